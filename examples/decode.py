"""A prompt on four ranks, then tokens one by one over the cache that it left.

torchrun --nproc-per-node 4 examples/decode.py
"""

import torch

import usp
from usp.inference import KVCache, decode_attention, prefill_attention

mesh, mask = usp.init_mesh(ring=2, ulysses=2), usp.Mask(causal=True)
cache = KVCache(mesh, batch=2, capacity=4096, kv_heads=2, head_dim=64, dtype=torch.float32)

torch.manual_seed(0)  # whole tensors, the same on every rank: only for the example
prompt = [torch.randn(2, 1000, heads, 64) for heads in (8, 2, 2)]
tokens = usp.partition(1000, mesh, "zigzag", start=cache.start)  # start: where the cached sequences end
q, k, v = (usp.shard(x, mesh, tokens) for x in prompt)
out, report = prefill_attention(q, k, v, mesh, tokens, cache, mask=mask)

for _ in range(20):  # each rank has the whole step, and keeps what is its own
    q, k, v = (torch.randn(2, 1, heads, 64) for heads in (8, 2, 2))
    out = decode_attention(q, k, v, mesh, cache, mask=mask)

draft = [torch.randn(2, 4, heads, 64) for heads in (8, 2, 2)]  # four guessed tokens at once, of which some are right
out = decode_attention(*draft, mesh, cache, mask=mask)
cache.truncate([cache.lengths[0] - 1, cache.lengths[1] - 3])
print(f"{report.algorithm}, lengths {cache.lengths}, out {tuple(out.shape)}, on ring ranks {cache.counts[0]}")
torch.distributed.destroy_process_group()  # else a rank may abort when it exits
