"""Does decoding slow down or grow? Ranks stay even, appending stays as fast, attention takes what its keys take.

    python -m experiments.growth
    python -m experiments.growth --tokens 10000 --ring 4 --contexts 8192 32768 131072

Tokens are appended one by one; then decode steps are timed over caches of growing length. Real ranks, one sequence.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch

import usp
from experiments import ranks
from usp.inference import KVCache, decode_attention

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 64
STEPS = 30  # timed at every length


def measure(config: dict) -> dict:
    """On a rank: CPU seconds of an append by thousands, how uneven ranks were, and a step's seconds and memory."""
    mesh = usp.init_mesh(ring=config["ring"], ulysses=1, device_type="cpu")
    made = {"batch": 1, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "dtype": torch.bfloat16, "block": config["block"]}
    cache = KVCache(mesh, capacity=config["tokens"], **made)
    k = torch.randn(1, 1, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)
    append_s, apart = [], 0
    for _ in range(config["tokens"]):
        start_s = time.thread_time()
        cache.append(k, k)
        append_s.append(time.thread_time() - start_s)
        apart = max(apart, max(cache.counts[0]) - min(cache.counts[0]))
    thousands = [append_s[n : n + 1000] for n in range(0, len(append_s), 1000)]
    steps = {}
    for context in config["contexts"]:
        cache = KVCache(mesh, capacity=context + STEPS + 2, **made)
        for first in range(0, context, 4096):
            chunk = torch.randn(1, min(4096, context - first), KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)
            cache.append(chunk, chunk)
        q = torch.randn(1, 1, HEADS, HEAD_DIM, dtype=torch.bfloat16)
        decode_attention(q, k, k, mesh, cache, mask=usp.Mask(causal=True))
        before_bytes = ranks.reset_peak_memory(torch.device("cpu"))
        taken_s = []
        for _ in range(STEPS):
            with usp.measure_traffic() as traffic:
                start_s = time.thread_time()
                decode_attention(q, k, k, mesh, cache, mask=usp.Mask(causal=True))
                taken_s.append(time.thread_time() - start_s - traffic.cpu_s)
        used_bytes = cache.counts[0][cache.ring.rank] * 2 * KV_HEADS * HEAD_DIM * 2
        grown_bytes = ranks.peak_memory(torch.device("cpu")) - before_bytes
        steps[context] = {"step_s": median(taken_s), "read_bytes": used_bytes, "grown_bytes": grown_bytes}
    return {"append_s": [median(x) for x in thousands], "apart": apart, "steps": steps}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.growth", description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=10_000, help="appended one by one")
    parser.add_argument("--ring", type=int, default=4, help="ranks")
    parser.add_argument("--block", type=int, default=16, help="tokens that go to one rank before the next one's turn")
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 16384, 65536, 262144], help="cached tokens")
    config = vars(parser.parse_args()) | {"device": "cpu"}
    found = ranks.launch(measure, config, config["ring"], 600.0)
    tokens, ring, block = config["tokens"], config["ring"], config["block"]
    print(f"{tokens:,} tokens appended one by one on a ring of {ring}, blocks of {block}:")
    print(f"  ranks at most {max(x['apart'] for x in found)} tokens apart at any time")
    slowest = [max(x["append_s"][n] for x in found) for n in range(len(found[0]["append_s"]))]
    print(f"  an append, by thousands, us: {' '.join(f'{1e6 * x:.0f}' for x in slowest)}")
    print(f"A step of one token, {HEADS} query and {KV_HEADS} KV heads x {HEAD_DIM}, bfloat16; of the slowest rank:")
    grown = f"KiB grown in {STEPS} steps"
    print(f"{'cached tokens':>14} {'MiB read':>9} {'computing, us':>14} {'GB/s':>6} {grown:>24}")
    for context in config["contexts"]:
        step = max((x["steps"][context] for x in found), key=lambda x: x["step_s"])
        grown = max(x["steps"][context]["grown_bytes"] for x in found)
        print(
            f"{context:14,} {step['read_bytes'] / 2**20:9.2f} {1e6 * step['step_s']:14.0f} "
            f"{step['read_bytes'] / step['step_s'] / 1e9:6.2f} {grown / 1024:24.0f}"
        )


if __name__ == "__main__":
    main()
