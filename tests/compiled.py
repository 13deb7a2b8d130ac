"""Run by tests in processes of their own, where signatures are not checked: checks cannot be traced."""

import sys

import torch
from torch._dynamo.testing import CompileCounterWithBackend

import usp

ulysses = int(sys.argv[1] == "ulysses")
mesh = usp.init_mesh(ring=2 - ulysses, ulysses=1 + ulysses, device_type="cpu")
tokens = usp.partition(16, mesh, "zigzag")
mask = usp.Mask(causal=True)  # made outside, as the mesh and the partition: planning is not traced
counted = CompileCounterWithBackend("aot_eager")


def shards():
    return [torch.randn(1, 8, heads, 8, requires_grad=True) for heads in (6, 3, 3)]


sinks = torch.randn(6, requires_grad=True)
options = {"replicate_kv": True, "check_ranks": False, "return_lse": True}


def loss(q, k, v):
    """Uneven heads, a KV head on both ranks, sinks: one graph all the same."""
    out, lse = usp.hybrid_attention(q, k, v, mesh, tokens, mask=mask, sinks=sinks, **options)
    return out.square().sum() + lse.sum()


compiled = torch.compile(loss, backend=counted, fullgraph=True)
for qkv in (shards() for _ in range(3)):
    found = torch.autograd.grad(compiled(*qkv), [*qkv, sinks])
    expected = torch.autograd.grad(loss(*qkv), [*qkv, sinks])
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
assert counted.frame_count == 1

# A module as users write it, with the ranks' agreement, which stays outside of the graphs.
module = usp.HybridAttention(mesh)
compiled = torch.compile(module, backend="eager")
graphs = []
for qkv in (shards() for _ in range(3)):
    assert torch.equal(compiled(*qkv, tokens, mask), module(*qkv, tokens, mask))
    graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
assert graphs[0] == graphs[2], "compiled again for the same shapes"
print("equal, compiled once for 3 calls", flush=True)
torch.distributed.destroy_process_group()
