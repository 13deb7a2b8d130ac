"""Causal attention over 1,000 tokens on a 2 x 2 mesh, with gradients.

torchrun --nproc-per-node 4 examples/minimal.py
"""

import torch

import usp

mesh = usp.init_mesh(ring=2, ulysses=2)
tokens = usp.partition(1000, mesh, "zigzag")  # which tokens each rank owns

torch.manual_seed(0)  # the whole sequence, the same on every rank: only for the example
whole = [torch.randn(1, 1000, heads, 64) for heads in (8, 2, 2)]
q, k, v = (usp.shard(x, mesh, tokens).requires_grad_() for x in whole)

out = usp.hybrid_attention(q, k, v, mesh, tokens, mask=usp.Mask(causal=True))
out.square().mean().backward()  # q.grad, k.grad, v.grad: this rank's tokens
print(f"out {tuple(out.shape)}, whole {tuple(usp.unshard(out, mesh, tokens).shape)}")
torch.distributed.destroy_process_group()  # else a rank may abort when it exits
