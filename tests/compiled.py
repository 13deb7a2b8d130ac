"""Calls that are compiled, on a ring and on Ulysses ranks, in processes that several tests share.

python -m torch.distributed.run --standalone --nproc-per-node=2 tests/compiled.py

Started this way signatures are not checked: checks cannot be traced.
"""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import torch

import usp


@cache
def printed() -> str:
    """What the command above prints: `equal, compiled once: ring` on each of two ranks, and the same for ulysses."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    return result.stdout + result.stderr[-3000:] * (result.returncode != 0)


def main() -> None:
    """Both kinds of ranks, in one job: most of its time is the import of the compiler."""
    for kind, degrees in {"ring": (2, 1), "ulysses": (1, 2)}.items():
        check(usp.init_mesh(ring=degrees[0], ulysses=degrees[1], device_type="cpu"))
        print(f"equal, compiled once: {kind}", flush=True)
        torch._dynamo.reset()
    torch.distributed.barrier()  # a rank that leaves while another still works may abort
    torch.distributed.destroy_process_group()


def shards() -> list[torch.Tensor]:
    return [torch.randn(1, 8, heads, 8, requires_grad=True) for heads in (6, 3, 3)]


def check(mesh) -> None:
    """A function, and a module as users write it, give what they give without being compiled.

    Raises:
        AssertionError: if not, or if one is compiled again.
    """
    from torch._dynamo.testing import CompileCounterWithBackend  # seconds

    tokens = usp.partition(16, mesh, "zigzag")
    mask = usp.Mask(causal=True)  # made outside, as the mesh and the partition: planning is not traced
    counted = CompileCounterWithBackend("aot_eager")
    sinks, table = (torch.randn(*shape, requires_grad=True) for shape in ((6,), (8, 6)))
    options = {"replicate_kv": True, "check_ranks": False, "return_lse": True, "softcap": 4.0, "alibi": (0.5,) * 6}

    def loss(q, k, v, seed):
        """Uneven heads, a KV head on both ranks, sinks, every term of the scores: one graph all the same."""
        bias = usp.RelativeBias.t5(table, bidirectional=False)
        out, lse = usp.hybrid_attention(
            *(q, k, v, mesh, tokens), mask=mask, sinks=sinks, bias=bias, dropout=(0.2, seed), **options
        )
        return out.square().sum() + lse.sum()

    compiled = torch.compile(loss, backend=counted, fullgraph=True)
    for seed in range(5):
        qkv = shards()
        leaves = [*qkv, sinks, table]
        found = torch.autograd.grad(compiled(*qkv, seed), leaves)
        expected = torch.autograd.grad(loss(*qkv, seed), leaves)
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    assert counted.frame_count <= 2, "compiled again for another seed"  # the first, and any

    # With the ranks' agreement, which stays outside of the graphs.
    module = usp.HybridAttention(mesh)
    compiled = torch.compile(module, backend="eager")
    graphs = []
    for qkv in (shards() for _ in range(3)):
        assert torch.equal(compiled(*qkv, tokens, mask), module(*qkv, tokens, mask))
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[2], "compiled again for the same shapes"


if __name__ == "__main__":
    main()
