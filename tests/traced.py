"""Models of transformers that are compiled whole, on two ranks: one graph for batches of any documents.

python -m torch.distributed.run --standalone --nproc-per-node=2 tests/traced.py

Started this way signatures are not checked: checks cannot be traced.
"""

import torch
import transformers
from torch._dynamo.testing import CompileCounterWithBackend

import usp
from usp.integrations.transformers import parallelize

SIZES = {"vocab_size": 64, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2, "head_dim": 8}
SIZES |= {"num_attention_heads": 6, "num_key_value_heads": 3, "max_position_embeddings": 64, "pad_token_id": 0}
TYPES = ["sliding_attention", "full_attention"]
CONFIGS = {
    "llama on a ring": (2, 1, "LlamaConfig", {}, {}),
    "gemma2 on ulysses ranks": (1, 2, "Gemma2Config", {"sliding_window": 5, "layer_types": TYPES}, {}),
    "llama in tiles": (2, 1, "LlamaConfig", {}, {"tile_mlp": 8, "tile_loss": 8}),
}


def main() -> None:
    for what, (ring, ulysses, config, sizes, options) in CONFIGS.items():
        mesh = usp.init_mesh(ring=ring, ulysses=ulysses, device_type="cpu")
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**SIZES | sizes))
        parallelize(model, mesh, check_ranks=False, **options)
        counted = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(model, backend=counted, fullgraph=True)
        for first in range(1, 6):
            found, expected = (results(x, model, shard(mesh, first)) for x in (compiled, model))
            assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
        assert counted.frame_count <= 2, "compiled again for other documents"  # the first, and any
        print(f"equal, compiled once: {what}", flush=True)
        torch._dynamo.reset()
    torch.distributed.barrier()  # a rank that leaves while another still works may abort
    torch.distributed.destroy_process_group()


def shard(mesh, first: int) -> dict:
    """Two documents, the first of which has so many tokens."""
    torch.manual_seed(first)
    lengths = (5 * first, 29 - 5 * first)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    ids = torch.randint(1, 64, (1, 29))
    batch = {"input_ids": ids, "labels": ids, "position_ids": positions}
    return usp.shard_batch(batch, mesh, usp.partition(29, mesh, "zigzag"))


def results(called, model: torch.nn.Module, shard: dict) -> list[torch.Tensor]:
    model.zero_grad()
    out = called(**shard)
    out.loss.backward()
    return [out.loss.detach(), out.logits.detach(), *(x.grad.clone() for x in model.parameters())]


if __name__ == "__main__":
    main()
