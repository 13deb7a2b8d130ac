"""Run by a test in processes of its own, where signatures are not checked: checks cannot be traced."""

import sys

import torch

import usp

mesh = usp.init_mesh(ring=2, ulysses=1, device_type="cpu") if sys.argv[1] == "ring" else None
mesh = mesh or usp.init_mesh(ring=1, ulysses=2, device_type="cpu")
tokens = usp.partition(16, mesh, "zigzag")
mask = usp.Mask(causal=True)  # made outside, as the mesh and the partition: planning is not traced
shards = [torch.randn(1, 8, 2, 8, requires_grad=True) for _ in range(3)]


def loss(q, k, v):
    out, lse = usp.hybrid_attention(q, k, v, mesh, tokens, mask=mask, check_ranks=False, return_lse=True)
    return out.square().sum() + lse.sum()


compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
found = torch.autograd.grad(compiled(*shards), shards)
expected = torch.autograd.grad(loss(*shards), shards)
assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
print("equal")
torch.distributed.destroy_process_group()
