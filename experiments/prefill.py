"""Measure a prefill over a KV cache that holds a share of the tokens: should keys travel, or queries?

    python -m experiments.prefill mesh=u1r2 total=8192 share=0.9 algorithm=pass_q
    python -m experiments.prefill -m experiment=prefill

Of `total` tokens of each sequence the cache holds `share`, as an earlier turn in the same layout left them; the others
are the new turn. Before that, the same ranks measure how fast they compute and send. A record has what was sent and how
long it took, and for every algorithm the communication that `usp.inference.volumes.exposed` predicts not to hide, by
sizes alone and by the measured rates. Points, records and torchrun: as in experiments.attention.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist

import usp
from analysis.compare import mesh_label
from experiments import points, ranks, sequences
from usp.blocks import Hop
from usp.comm import Exchange
from usp.cost import Plan, Workload
from usp.cost.counts import Volume, prefill_traffic
from usp.inference import KVCache, Rates, Report, prefill_attention
from usp.inference.volumes import exposed

HOP_BYTES = 1 << 22  # of the message that bytes per second are measured with
TRIES = 7  # of each rate; the median counts


def main() -> None:
    points.main(EXPERIMENT)


def label(config: dict) -> str:
    parts = mesh_label(config), config["algorithm"], config["layout"]["name"]
    shape = f"t{config['total']}", f"p{cached(config)}", points.workload_label(config)
    return "-".join((*parts, *shape, config["dtype"]))


def cached(config: dict) -> int:
    """Tokens of each sequence that the cache holds before the call."""
    return round(config["share"] * config["total"])


def check(config: dict) -> None:
    """What can be seen to be wrong before any process is started.

    Raises:
        ValueError: naming the values.
    """
    sequences.check(config)
    if config["total"] < 1:
        raise ValueError(f"total={config['total']}: at least one token")
    if not 0 <= config["share"] <= 1:
        raise ValueError(f"share={config['share']}: a share of the tokens is from 0 to 1")
    if cached(config) == config["total"]:
        raise ValueError(
            f"share={config['share']} of total={config['total']} leaves no new token: give a smaller share"
        )
    if config["mesh"]["ring"] < 2:
        raise ValueError(
            f"mesh.ring={config['mesh']['ring']}: neither keys nor queries travel in a ring of one; at least 2"
        )


def summary(config: dict, samples: list[dict]) -> dict:
    """The figures of the table, from the ranks' samples; the report is the same on every rank.

    Raises:
        ArithmeticError: if a rank sent something else than the cost model says.
    """
    by_formula = {(rank["ring_rank"], rank["ulysses_rank"]): rank["formula"] for rank in samples}
    points.check_traffic(samples, by_formula)
    found, report = points.figures(config, samples), samples[0]["report"]
    sizes = (report[key] for key in ("ring", "kv_bytes", "gathered_bytes", "q_bytes", "partial_bytes"))
    return found | {
        "chosen": report["algorithm"],
        "cached": report["cached"],
        "new": report["new"],
        "call_s": 1 / found["speed_per_s"],
        "rates": report["rates"],
        "by_sizes_s": exposed(*sizes, 0.0, Rates()),
        "by_rates_s": report["exposed_s"],
    }


def line(found: dict) -> str:
    return f"{1e3 * found['wall_s']:.1f} ms of wall time, {found['sent_bytes'] / 1e6:.2f} MB"


# ---------------------------------------------------------------------------------------------------
# On a rank.


def measure(config: dict) -> dict:
    """One point on this rank: rates, a cache as an earlier turn left it, then the new turn checked, counted, timed."""
    mesh, first = ranks.mesh_of(config), cached(config)
    cache = filled(config, mesh)
    rates = measured_rates(config, cache)
    turn = usp.partition(config["total"] - first, mesh, config["layout"]["name"], start=first)
    whole = (sequences.tokens(config, n, first, turn.seq).to(cache.k.device) for n in range(3))
    q, k, v = (usp.shard(x, mesh, turn) for x in whole)
    options = {key: config[key] for key in ("algorithm", "backend")}

    def call(**more) -> tuple:
        return prefill_attention(q, k, v, mesh, turn, cache, mask=usp.Mask(causal=True), rates=rates, **options, **more)

    def take_back() -> None:
        cache.truncate(first)

    (out, lse), _ = call(return_lse=True)
    at = usp.positions(mesh, turn)[0].cpu()
    real = at < config["total"]
    everything = range(config["batch"]), range(config["workload"]["heads"])
    error = sequences.errors(config, out[:, real], lse[:, :, real], *everything, at[real])
    take_back()
    (_, report), sample = ranks.counted(call, mesh)
    formula = predicted(config, cache, turn, report.algorithm)
    take_back()
    sample |= {"formula": formula, "error": error, "report": plain(report), "cache_bytes": cache.memory_bytes}
    return sample | sequences.timed(config, call, take_back)


def predicted(config: dict, cache: KVCache, turn: usp.Partition, algorithm: str) -> Volume:
    """What this rank sends in a turn which the cache now holds."""
    shape = config["workload"] | {"batch": config["batch"], "seq": turn.seq}
    call = Workload(mask=usp.Mask(causal=True), element_bytes=cache.k.element_size(), **shape)
    plan = Plan(**config["mesh"], layout=config["layout"]["name"])
    found = prefill_traffic(call, plan, turn, cache.ledger.alike(), algorithm)
    return found[cache.ring.rank * plan.ulysses + cache.ulysses.rank]


def filled(config: dict, mesh) -> KVCache:
    """A cache with the first tokens of every sequence, where a turn in the point's layout leaves them.

    Nobody looks at that turn's result, so each token sees itself alone.
    """
    workload = config["workload"]
    cache = KVCache(
        mesh,
        batch=config["batch"],
        capacity=config["total"],
        kv_heads=workload["kv_heads"],
        head_dim=workload["head_dim"],
        dtype=getattr(torch, config["dtype"]),
        heads=workload["heads"],
    )
    if first := cached(config):
        turn = usp.partition(first, mesh, config["layout"]["name"])
        k, v = (usp.shard(sequences.tokens(config, n, 0, first).to(cache.k.device), mesh, turn) for n in (1, 2))
        q = k.new_zeros((*k.shape[:2], workload["heads"], workload["head_dim"]))
        alone = usp.Mask(causal=True, window=1)
        prefill_attention(q, k, v, mesh, turn, cache, mask=alone, algorithm="pass_kv", backend=config["backend"])
    return cache


def plain(report: Report) -> dict:
    return report._asdict() | {"rates": report.rates._asdict(), "exposed_s": dict(report.exposed_s)}


def measured_rates(config: dict, cache: KVCache) -> Rates:
    """How fast this mesh's ranks compute a ring step of this point and send a message to the next; of the slowest.

    In wall time, all ranks at once: where ranks share cores, so do their rates.
    """
    ring, dtype, device = cache.ring, cache.k.dtype, cache.k.device
    plan = cache.plan(config["workload"]["heads"])
    own, keys = (max(map(len, heads)) for heads in (plan.queries, plan.keys))
    rows = max(1, (config["total"] - cached(config)) // ring.size)
    columns = max(1, config["total"] // ring.size)
    shape = config["batch"], cache.head_dim
    q, k, v = (
        torch.randn(shape[0], count, heads, shape[1], device=device).to(dtype)
        for count, heads in ((rows, own), (columns, keys), (columns, keys))
    )
    mine, others = usp.Partition(rows, "contiguous"), usp.Partition(columns, "contiguous")

    def attend() -> None:
        with torch.no_grad():
            usp.hybrid_attention(
                q, k, v, None, mine, key_tokens=others, mask=usp.Mask(causal=False), backend=config["backend"]
            )

    exchange = Exchange(ring.group, "rates", HOP_BYTES // dtype.itemsize, dtype, device)
    after, before = (ring.rank + 1) % ring.size, (ring.rank - 1) % ring.size

    def hop(numel: int) -> None:
        message = exchange.empty(numel)
        arrived = exchange.start([(Hop(ring.rank, after), message)], [(Hop(before, before), numel)])
        exchange.wait()
        for buffer in (message, *arrived):
            exchange.recycle(buffer)

    step_s, small_s, large_s = (seconds(call) for call in (attend, lambda: hop(1), lambda: hop(exchange.largest)))
    flops = 4 * shape[0] * rows * columns * own * shape[1]
    sending_s = max(large_s - small_s, 0.01 * large_s)
    found = ranks.everyone((flops / step_s, HOP_BYTES / sending_s, small_s))
    flops_per_s, bytes_per_s, latency_s = zip(*found, strict=True)
    return Rates(min(flops_per_s), min(bytes_per_s), max(latency_s))


def seconds(call: Callable[[], None]) -> float:
    """Of wall time, the median of some calls that all ranks begin together."""
    taken = []
    for n in range(TRIES + 1):
        dist.barrier()
        start_s = time.perf_counter()
        call()
        ranks.wait()
        if n:
            taken.append(time.perf_counter() - start_s)
    return median(taken)


EXPERIMENT = points.Experiment("prefill", label, check, measure, summary, line)

if __name__ == "__main__":
    from experiments.prefill import main  # the module that other processes can import, not this copy of it

    main()
