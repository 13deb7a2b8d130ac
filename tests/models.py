"""Small models of transformers with random weights, as one process computes them and on ranks."""

from __future__ import annotations

import copy
import importlib
from functools import lru_cache
from typing import Any

import jaxtyping
import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import usp
import usp.nn
from tests import pool
from usp.integrations.transformers import parallelize

SLIDING = ["sliding_attention", "full_attention"]
LONG = {"rope_theta": 1e4, "original_max_position_embeddings": 16, "factor": 4.0}
ROPES = {  # whose frequencies depend on the largest position, which a shard does not have
    "longrope": {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4},
    "dynamic": {"rope_type": "dynamic"},
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {}),
    "mistral": ("MistralConfig", {"sliding_window": 7}),
    "gemma2": ("Gemma2Config", {"sliding_window": 5, "layer_types": SLIDING, "attn_logit_softcapping": 4.0}),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": 5, "layer_types": SLIDING}),
    "gpt_oss": (
        "GptOssConfig",
        {"sliding_window": 6, "layer_types": SLIDING, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
}
SIZES = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
for family in FAMILIES:  # here, and not first in each of many rank processes
    importlib.import_module(f"transformers.models.{family}.modeling_{family}")
transformers.logging.set_verbosity_error()


def made(family: str, **options) -> transformers.PreTrainedModel:
    """A model with the same weights in every process, none of them trivial."""
    name, own = FAMILIES[family]
    config = getattr(transformers, name)(**SIZES | own | options)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.5 if parameter.ndim < 2 else 0.2))
    return model


BATCH, SEQ = 2, 29


def documents(kind: str) -> list[list[tuple[int, int]]]:
    """By row, where documents begin and end."""
    return {
        "plain": [[(0, SEQ)], [(0, SEQ)]],
        "packed": [[(0, 11), (11, 12), (12, SEQ)], [(0, 4), (4, 24), (24, SEQ)]],
        "left": [[(0, SEQ)], [(9, SEQ)]],
        "right": [[(0, SEQ)], [(0, SEQ - 9)]],
    }[kind]


def batch(kind: str) -> dict[str, Tensor]:
    """Two samples: "plain", "packed" in documents that differ between rows, or padded on a side."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(1, 64, (BATCH, SEQ), generator=generator)
    mask, labels, positions = torch.zeros_like(ids), torch.full_like(ids, -100), torch.zeros_like(ids)
    for row, spans in enumerate(documents(kind)):
        for first, end in spans:
            mask[row, first:end] = 1
            positions[row, first:end] = torch.arange(end - first)
            labels[row, first + 1 : end] = ids[row, first + 1 : end]  # no document says how the next one begins
    labels[0, 3:6] = -100
    more = {"packed": {"position_ids": positions}, "left": {"attention_mask": mask}, "right": {"attention_mask": mask}}
    return {"input_ids": ids, "labels": labels} | more.get(kind, {})


@lru_cache
def alone(family: str, kind: str, options: tuple = ()) -> tuple[float, Tensor, dict[str, Tensor]]:
    """Loss, logits and gradients of one process, by transformers itself, a document at a time and without padding.

    In float64, but for gpt_oss, whose experts have no kernel for it.
    """
    model = made(family, **dict(options)).to(torch.float32 if family == "gpt_oss" else torch.float64).train()
    whole = batch(kind)
    count = int((whole["labels"][:, 1:] != -100).sum())
    positions = whole.get("position_ids", torch.arange(SEQ).expand(BATCH, -1))
    logits, total = torch.zeros(BATCH, SEQ, 64, dtype=model.dtype), 0.0
    for row, spans in enumerate(documents(kind)):
        for first, end in spans:
            here = (slice(row, row + 1), slice(first, end))
            one = {name: whole[name][here] for name in ("input_ids", "labels")}
            out = model(**one, position_ids=positions[here], use_cache=False, num_items_in_batch=count)
            out.loss.backward()
            logits[here] = out.logits.detach()
            total += out.loss.item()
    return total, logits, gradients(model)


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    found = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    return {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in found.items()}


def sharded(kind: str, mesh, layout: str) -> dict[str, Any]:
    whole = batch(kind)
    mask = usp.batch_mask(whole, causal=True) if layout == "balanced" else None
    return usp.shard_batch(whole, mesh, usp.partition(SEQ, mesh, layout, mask=mask))


def with_rope(kind: str) -> dict[str, Any]:
    """Options of a model, by the names of transformers 4 and 5."""
    rope, more = ROPES[kind] | LONG, {"max_position_embeddings": 16 if kind == "dynamic" else 64}
    more |= {"original_max_position_embeddings": 16} if kind == "longrope" else {}
    return more | ({"rope_scaling": rope} if transformers.__version__.startswith("4.") else {"rope_parameters": rope})


def long_rope(kind: str, ring: int, ulysses: int, layout: str) -> tuple:
    """On a rank: a step, and what follows a prompt that is short when it begins and long when it ends."""
    found = step("llama", "plain", ring, ulysses, layout, with_rope(kind), {}, None)
    return *found, rope_text(kind, pool.mesh(ring, ulysses), layout)


def rope_text(kind: str, mesh, layout: str) -> Tensor:
    model = made("llama", **with_rope(kind)).eval()
    model = model if mesh is None else parallelize(model, mesh, layout=layout)
    return model.generate(batch("plain")["input_ids"][:, :12], max_new_tokens=10, do_sample=False)


def own_cache(ring: int, ulysses: int) -> tuple[Tensor, Tensor, int]:
    """On a rank: a loop over a cache of the caller's; logits of the second call, as they should be, and its length."""
    ids = batch("plain")["input_ids"]
    cache = transformers.DynamicCache()
    model = parallelize(made("llama"), pool.mesh(ring, ulysses))
    with torch.no_grad():
        model(ids[:, :20], past_key_values=cache)
        found = model(ids[:, 20:23], past_key_values=cache).logits
        return found, made("llama")(ids[:, :23]).logits[:, 20:], cache.get_seq_length()


def copied_head(ring: int, ulysses: int) -> dict[str, Tensor]:
    """On a rank: gradients of a copy of a model with a head of its own, whose loss is in tiles."""
    mesh = pool.mesh(ring, ulysses)
    first = parallelize(made("llama"), mesh, gradients="sum", tile_loss=4)
    model = copy.deepcopy(first)
    with torch.no_grad():
        first.lm_head.weight.mul_(2)
    with torch.no_grad():
        assert model(**batch("packed")).logits is None  # evaluation with whole tensors has the loss alone
    model(**sharded("packed", mesh, "zigzag")).loss.backward()
    assert first.lm_head.weight.grad is None
    found = gradients(model)
    for x in found.values():
        dist.all_reduce(x)
    return found


def step(
    family: str, kind: str, ring: int, ulysses: int, layout: str, model_options: dict, options: dict, checkpoint: Any
) -> tuple[float, Tensor, dict[str, Tensor]]:
    """On a rank: loss, whole logits, and gradients summed over the ranks."""
    mesh = pool.mesh(ring, ulysses)
    model = parallelize(made(family, **model_options), mesh, gradients="sum", **options).train()
    if checkpoint is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpoint)
    shard = sharded(kind, mesh, layout)
    out = model(**shard)
    out.loss.backward()
    found = gradients(model)
    for x in found.values():
        dist.all_reduce(x)
    logits = out.logits.detach()
    if logits.shape[1] == shard["usp"].tokens.seq_local:
        logits = usp.unshard(logits, mesh, shard["usp"].tokens)
    return out.loss.item(), logits, found


PROMPT = 13


def generated(family: str, mesh, kind: str, **how) -> Tensor:
    """What follows a batch of two prompts: on a rank, or in one process by transformers itself without a mesh."""
    model = made(family).eval()
    if mesh is not None:
        model = parallelize(model, mesh, layout=how.pop("layout", "zigzag"))
    how.pop("layout", None)
    prompt = {name: x[:, :PROMPT] for name, x in batch(kind).items() if name in ("input_ids", "attention_mask")}
    torch.manual_seed(3)
    return model.generate(**prompt, max_new_tokens=12, **how)


def turns(family: str, mesh) -> list[Tensor]:
    """Two turns of a conversation over one cache, guesses that are taken back, and a prompt in chunks."""
    model = made(family).eval()
    if mesh is not None:
        model = parallelize(model, mesh)
    prompt = batch("plain")["input_ids"][:1]
    how: dict[str, Any] = {"do_sample": False, "max_new_tokens": 8, "eos_token_id": 63}
    first = model.generate(prompt, return_dict_in_generate=True, **how)
    name = "cache" if "cache" in first else "past_key_values"
    kept = {name: first[name]}
    second = model.generate(torch.cat([first.sequences, prompt.flip(1)], 1), **kept, **how)
    if mesh is not None:
        cache = kept[name]
        lengths = {layer.kept.lengths for layer in cache.layers}
        assert lengths == {(second.shape[1] - 1,)}
        assert cache.memory_bytes == sum(layer.kept.memory_bytes for layer in cache.layers)
    guessed = model.generate(prompt, prompt_lookup_num_tokens=3, **how)
    if transformers.__version__.startswith("4."):  # which calls forward itself, past hooks; that is refused
        return [first.sequences, second, guessed]
    return [first.sequences, second, guessed, model.generate(prompt, prefill_chunk_size=12, **how)]


def turns_on_ranks(family: str, ring: int, ulysses: int) -> list[Tensor]:
    return turns(family, pool.mesh(ring, ulysses))


def generated_on_ranks(family: str, ring: int, ulysses: int, kind: str, how: dict) -> Tensor:
    return generated(family, pool.mesh(ring, ulysses), kind, **how)


def whole_calls(family: str, kind: str, ring: int, ulysses: int) -> dict[str, Any]:
    """On a rank: a model that is called as if there were one process."""
    mesh = pool.mesh(ring, ulysses)
    model = parallelize(made(family), mesh, gradients="sum")
    whole = batch(kind)
    with torch.no_grad():
        seen = model(**whole, use_cache=False, output_hidden_states=True)
        inputs = {name: x for name, x in whole.items() if name != "labels"}
        last = model(**inputs, logits_to_keep=3, use_cache=False).logits
        shard = sharded(kind, mesh, "zigzag")
        base = model.model(**{name: shard[name] for name in ("input_ids", "position_ids", "usp")})
        base = usp.unshard(base.last_hidden_state, mesh, usp.partition(SEQ, mesh, "zigzag"))
    model.train()
    out = model(**whole)
    out.loss.backward()
    found = gradients(model)
    for x in found.values():
        dist.all_reduce(x)
    assert out.logits is None
    hidden = seen.hidden_states
    return {
        "loss": (seen.loss.item(), out.loss.item()),
        "logits": (seen.logits, last),
        "hidden": (hidden[-1], base),
    } | {
        "gradients": found,
        "layers": len(hidden),
    }


def as_printed(code: str) -> dict[str, Tensor]:
    """On four ranks: gradients after code that a reader is shown, averaged as an engine would."""
    names = {"model": made("llama"), "batch": batch("packed")}
    exec(code, names)
    found = gradients(names["model"])
    for x in found.values():
        dist.all_reduce(x)
        x /= dist.get_world_size()
    return found


def two_models() -> list[tuple[float, dict[str, Tensor]]]:
    """On two ranks: two models on different meshes take turns, and their backward passes come in another order."""
    meshes = [pool.mesh(2, 1), pool.mesh(1, 2)]
    found = [parallelize(made(f), m, gradients="sum") for f, m in zip(("llama", "qwen3"), meshes, strict=True)]
    losses = [model(**sharded("packed", mesh, "zigzag")).loss for model, mesh in zip(found, meshes, strict=True)]
    for loss in losses:
        loss.backward()
    grads = [gradients(model) for model in found]
    for x in (x for some in grads for x in some.values()):
        dist.all_reduce(x)
    return [(loss.item(), some) for loss, some in zip(losses, grads, strict=True)]


def recomputed(kind: str) -> tuple[dict[str, int], int, tuple]:
    """On four ranks: what a step with checkpoints of a kind sends and computes, and its result."""
    checkpoint = {"none": None, "reentrant": {"use_reentrant": True}, "all": {"use_reentrant": False}}
    checkpoint["attention kept"] = {"use_reentrant": False, "context_fn": usp.nn.keep_attention}
    with usp.measure_traffic() as traffic:
        found = step("llama", "packed", 2, 2, "zigzag", {}, {}, checkpoint[kind])
    return dict(traffic.bytes), sum(traffic.kernels.values()), found


def dropped(ring: int, ulysses: int) -> tuple[float, float]:
    """The losses of two steps with attention dropout; on one process too."""
    mesh = pool.mesh(ring, ulysses) if ring * ulysses > 1 else None
    model = parallelize(made("llama", attention_dropout=0.3), mesh, seed=7).train()
    shard = sharded("packed", mesh, "zigzag")
    return model(**shard).loss.item(), model(**shard).loss.item()


def engine(kind: str, options: dict) -> tuple[float, dict[str, Tensor]]:
    """On eight ranks: data 2 x ring 2 x ulysses 2, each replica with a row of the batch, wrapped by DDP or FSDP2."""
    mesh = pool.mesh(2, 2, 2)
    model = parallelize(made("llama"), mesh, **options).train()
    if kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        for layer in model.model.layers:
            fully_shard(layer, mesh=init_device_mesh("cpu", (8,)))
        fully_shard(model, mesh=init_device_mesh("cpu", (8,)))
    row = mesh.get_local_rank("data")
    whole = {name: x[row : row + 1] for name, x in batch("packed").items()}
    shard = usp.shard_batch(whole, mesh, usp.partition(SEQ, mesh, "zigzag"))
    out = model(**shard)
    out.loss.backward()
    return out.loss.item(), {name.removeprefix("module."): x for name, x in gradients(model).items()}


def tensor_parallel() -> tuple[float, dict[str, Tensor]]:
    """On four ranks: ring 2 x tensor 2, projections sharded by PyTorch's parallel styles."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("ring", "ulysses", "tensor"))
    model = parallelize(made("llama", num_key_value_heads=2), mesh, gradients="sum")
    plan = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    plan |= {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
    plan |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    for layer in model.model.layers:
        parallelize_module(layer, mesh["tensor"], plan)
    out = model(**sharded("packed", mesh, "zigzag"))
    out.loss.backward()
    found = gradients(model)
    for x in found.values():
        dist.all_reduce(x, group=mesh.get_group("ring"))
    return out.loss.item(), found


def refusal(what: str, ring: int, ulysses: int) -> str:
    """On a rank: the message by which a call is refused; the next one is right."""
    jaxtyping.config.update("jaxtyping_disable", True)  # the library's own messages are the subject
    mesh = pool.mesh(ring, ulysses)
    rank = dist.get_rank()
    if what in UNFIT:
        with pytest.raises(ValueError) as caught:
            parallelize(UNFIT[what](), mesh)
        jaxtyping.config.update("jaxtyping_disable", False)
        return str(caught.value)
    if what == "positions":
        model = parallelize(learned_positions(SEQ - 1), mesh, layout="contiguous").eval()
    else:
        dropout = 0.1 if what == "cache in training" else 0.0
        tile = {"tile_loss": 4} if what == "wrapped head" else {}
        model = parallelize(made("llama", attention_dropout=dropout), mesh, layout="contiguous", **tile).eval()
    if what == "wrapped head":
        model.lm_head = torch.nn.Sequential(model.get_output_embeddings(), torch.nn.Identity())
        model.lm_head[1].forward = lambda x: x.expand(-1, 15, -1)
    beyond = {name: x.clone() for name, x in sharded("plain", mesh, "zigzag").items() if name != "usp"}
    beyond["input_ids"][:, 0] += 64 * rank
    shard, whole = sharded("plain", mesh, "zigzag"), batch("plain")
    ids, other = {"input_ids": whole["input_ids"]}, (whole["input_ids"] + rank) % 64
    dense = torch.ones(BATCH, 1, SEQ, SEQ, dtype=torch.bool)
    static = {"cache_implementation": "static", "max_new_tokens": 2, "do_sample": False}
    trainable = torch.enable_grad() if what in ("gradient without labels", "prompt tuning") else torch.no_grad()
    filled = transformers.DynamicCache()
    filled.update(torch.zeros(BATCH, 3, 4, 8), torch.zeros(BATCH, 3, 4, 8), 0)
    calls = {
        "dense mask": lambda: model(**ids, attention_mask=dense),
        "dense mask beside a shard": lambda: model(**shard, attention_mask=dense),
        "mask beside a shard": lambda: model(**shard, attention_mask=torch.ones(BATCH, 15)),
        "mask inside": lambda: model.model(shard["input_ids"], attention_mask=torch.ones(BATCH, 15), usp=shard["usp"]),
        "mask of a part": lambda: model.model(shard["input_ids"], attention_mask=torch.ones(BATCH, 15)),
        "part without a batch": lambda: model.model(shard["input_ids"]),
        "weights": lambda: model(**shard, output_attentions=True),
        "weights of whole": lambda: model(**ids, output_attentions=True),
        "unknown": lambda: model(**shard, position_bias=torch.zeros(1)),
        "no positions": lambda: model(input_ids=shard["input_ids"], usp=shard["usp"]),
        "not a batch": lambda: model(**shard | {"usp": 3}),
        "shard of another length": lambda: model(**shard | {"input_ids": shard["input_ids"][:, 1:]}),
        "cache of a shard": lambda: model(**shard, use_cache=True),
        "labels not shifted": lambda: model(**{name: x for name, x in shard.items() if name != "shift_labels"}),
        "other tokens": lambda: model(other),
        "shards by hand": lambda: model(shard["input_ids"], labels=shard["labels"], use_cache=False),
        "gradient without labels": lambda: model(**ids),
        "tuple": lambda: model(**ids, return_dict=False),
        "kept by index": lambda: model(**ids, logits_to_keep=torch.tensor([1])),
        "beams": lambda: model.generate(**ids, num_beams=2, max_new_tokens=2, do_sample=False),
        "static cache": lambda: model.generate(**ids, **static),
        "filled cache": lambda: model(**ids, past_key_values=filled),
        "right padding": lambda: model(**_unlabelled("right"), use_cache=True),
        "cache and labels": lambda: model(**whole, use_cache=True),
        "cache in training": lambda: model.train()(**ids, use_cache=True),
        "one rank differs": lambda: model(**shard, **({"output_attentions": True} if rank else {})),
        "twice": lambda: parallelize(model, mesh),
        "seeds": lambda: _seeded(
            rank, lambda: model.generate(**ids, max_new_tokens=9, do_sample=True, temperature=3.0)
        ),
        "ids beyond the table": lambda: model(**beyond, usp=shard["usp"]),
        "ids beyond the table, of whole": lambda: model(ids["input_ids"] + 64 * (torch.arange(SEQ) == SEQ - 1)),
        "positions": lambda: model(**ids, use_cache=False),
        "count of one rank": lambda: model(**shard, num_items_in_batch=-1 if rank else 50),
        "labels and few logits": lambda: model(**whole, logits_to_keep=8),
        "part without positions": lambda: model.model(input_ids=shard["input_ids"], usp=shard["usp"]),
        "wrapped head": lambda: model(**shard),
        "argument of one rank": lambda: model(**shard, **({"output_hidden_states": True} if rank else {})),
        "prompt tuning": lambda: _frozen(model)(
            inputs_embeds=torch.ones(1, 8, 48, requires_grad=True), use_cache=False
        ),
        "router": lambda: model(**ids, output_router_logits=True),
        "grad mode of one rank": lambda: _in_mode(rank == 0, lambda: model(**shard)),
    }
    with trainable, pytest.raises(ValueError) as caught:
        calls[what]()
    if what not in ("positions", "wrapped head"):
        with torch.no_grad():
            assert torch.isfinite(model.eval()(**sharded("plain", mesh, "zigzag")).loss)
    jaxtyping.config.update("jaxtyping_disable", False)
    return str(caught.value)


def other_attention(name: str, ring: int, ulysses: int) -> str:
    """On a rank: what a model says that is told to use another attention after it was parallelized."""
    mesh = pool.mesh(ring, ulysses)
    model = parallelize(made("llama"), mesh)
    model.set_attn_implementation(name)
    with pytest.raises(ValueError) as caught:
        model(**sharded("plain", mesh, "contiguous"))
    return str(caught.value)


def first_reaches_last(ring: int, ulysses: int) -> bool:
    """On a rank: another first token changes the logits of the last one."""
    model, ids = parallelize(made("llama"), pool.mesh(ring, ulysses)), batch("plain")["input_ids"]
    with torch.no_grad():
        logits = model(ids, logits_to_keep=1).logits
        return not torch.equal(logits, model(torch.cat([63 - ids[:, :1], ids[:, 1:]], 1), logits_to_keep=1).logits)


def _unlabelled(kind: str) -> dict[str, Tensor]:
    return {name: x for name, x in batch(kind).items() if name != "labels"}


def right_padded(ring: int, ulysses: int) -> Tensor:
    with torch.no_grad():
        return parallelize(made("llama"), pool.mesh(ring, ulysses))(**_unlabelled("right")).logits


def _seeded(rank: int, call):
    torch.manual_seed(rank)
    return call()


def _frozen(model):
    return model.requires_grad_(False)


def learned_positions(count: int) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 64}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_positions=count, **sizes))


def _in_mode(mode: bool, call):
    with torch.set_grad_enabled(mode):
        return call()


class WithConvolution(transformers.LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model.layers[0].mix = torch.nn.Conv1d(config.hidden_size, config.hidden_size, 4)


class WithoutKeywords(transformers.LlamaForCausalLM):
    def forward(self, input_ids=None, position_ids=None, labels=None):
        return super().forward(input_ids, position_ids=position_ids, labels=labels)


def _config(**options) -> Any:
    return transformers.LlamaConfig(**SIZES | options)


def _untyped() -> transformers.PreTrainedModel:
    model = made("llama")
    model.config.layer_types = ["full_attention", "chunked_attention"]
    return model


UNFIT = {
    "convolution": lambda: WithConvolution(_config()),
    "no keywords": lambda: WithoutKeywords(_config()),
    "mamba": lambda: transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1)
    ),
    "encoder and decoder": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=32, d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8)
    ),
    "classifier": lambda: transformers.LlamaForSequenceClassification(_config()),
    "chunked attention": _untyped,
    "module": lambda: torch.nn.Linear(2, 2),
    "options": lambda: made("llama", vocab_size=64 + dist.get_rank()),
}


def chosen() -> tuple[tuple, Tensor]:
    """On four ranks: every option that is handed on is what then happens."""
    with usp.measure_traffic() as traffic:
        options = {"exchange": "all_gather", "backend": "tiled", "replicate_kv": True}
        found = step("llama", "packed", 2, 2, "zigzag", {}, options, None)
    assert traffic.bytes["all_gather"]
    assert not traffic.bytes["ring"]
    assert set(traffic.kernels) == {"tiled"}
    model = parallelize(made("llama"), pool.mesh(2, 2), prefill="pass_q", decode="gather_q").eval()
    with usp.measure_traffic() as traffic:
        text = model.generate(batch("plain")["input_ids"][:, :PROMPT], max_new_tokens=12, do_sample=False)
    assert traffic.bytes["queries"]
    assert traffic.bytes["lse"]
    assert not traffic.bytes["ring"]
    return found, text
