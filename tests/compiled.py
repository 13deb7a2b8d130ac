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

# A module as users write it, with the ranks' agreement, which stays outside of the graphs.
module = usp.HybridAttention(mesh)
compiled = torch.compile(module, backend="eager")
graphs = []
for qkv in (shards() for _ in range(3)):
    assert torch.equal(compiled(*qkv, tokens, mask), module(*qkv, tokens, mask))
    graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
assert graphs[0] == graphs[2], "compiled again for the same shapes"
print("equal, compiled once", flush=True)
torch.distributed.barrier()  # a rank that leaves while another still works may abort
torch.distributed.destroy_process_group()
