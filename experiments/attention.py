"""Measure hybrid attention on real ranks: one point, or a sweep over meshes, layouts, lengths and workloads.

    python -m experiments.attention mesh.ring=4 mesh.ulysses=2 workload=h8_d128 seq=4096 layout=zigzag
    python -m experiments.attention -m experiment=sweep

Each point starts its own ranks on this machine and writes results/<name>/<point>/record.json. A point that has a good
record is not measured again (force=true does), so the same command continues what was interrupted. Under torchrun, the
ranks that are already running are used.
"""

from __future__ import annotations

import math
import time
from statistics import mean, median

import torch
import torch.distributed as dist
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

import usp
import usp.nn
from analysis.compare import mesh_label
from experiments import points, ranks
from usp.cost import traffic
from usp.cost.counts import Volume


def main() -> None:
    points.main(EXPERIMENT)


def label(config: dict) -> str:
    parts = mesh_label(config), config["layout"]["name"], f"s{config['seq']}", points.workload_label(config)
    return "-".join((*parts, config["dtype"]))


def check(config: dict) -> None:
    """What can be seen to be wrong before any process is started.

    Raises:
        ValueError: naming the values.
    """
    from analysis import published

    points.check(config)
    if config["measure"]["baseline"] and config["window"] is not None:
        raise ValueError(f"measure.baseline=true with window={config['window']}: the fused kernel has no window")
    table, length, factor = (config["published"][key] for key in ("table", "length", "factor"))
    if table is None and (length is not None or config["published"]["only"]):
        raise ValueError("published.length and published.only need a published.table")
    if table is not None:
        if length is not None and length != config["seq"] * factor:
            raise ValueError(
                f"seq={config['seq']} is not published.length={length} / published.factor={factor}: set the length and "
                "the factor, or published.table=null for a length of your own"
            )
        if published.rows(table)[0].backward and not config["backward"]:
            raise ValueError(f"published.table={table} has rates of forward + backward: backward=true")


def summary(config: dict, samples: list[dict]) -> dict:
    """The figures of the table, from the ranks' samples.

    Raises:
        ArithmeticError: if a rank sent something else than the cost model says.
    """
    points.check_traffic(samples, predicted(config))
    return figures(config, samples)


def figures(config: dict, samples: list[dict]) -> dict:
    """The same of any samples."""
    found = points.figures(config, samples)
    found["forward_speed_per_s"] = 1 / points.slowest_s(samples, "forward_")
    if config["measure"]["baseline"]:
        # In each round the one-process kernel and the ranks ran one after the other: the median of the rounds' ratios.
        kernels = [rank["baseline_cpu_s"] for rank in samples if rank["baseline_cpu_s"]]
        alone = [mean(seconds) for seconds in zip(*kernels, strict=True)]
        together = [sum(seconds) for seconds in zip(*(rank["cpu_s"] for rank in samples), strict=True)]
        found["baseline_cpu_s"] = median(alone)
        found["efficiency"] = median(a / b for a, b in zip(alone, together, strict=True))
    return found


def predicted(config: dict) -> dict[tuple[int, int], Volume]:
    """What each rank (ring rank, Ulysses rank) sends, before anything is run."""
    from analysis.measurements import call_of

    call, plan = call_of(config)
    found = traffic(call, plan, backward=config["backward"])
    return {divmod(n, plan.ulysses): volume for n, volume in enumerate(found)}


def line(found: dict) -> str:
    return f"{found['speed_per_s']:.2f} calls/s"


# ---------------------------------------------------------------------------------------------------
# On a rank.


def measure(config: dict) -> dict:
    """One point on this rank: run the attention, count and time it, hold it against float64."""
    device = ranks.device()
    mesh = ranks.mesh_of(config)
    tokens = usp.partition(config["seq"], mesh, config["layout"]["name"])
    mask = usp.Mask(causal=config["causal"], window=config["window"])
    q, k, v, *dout = (usp.shard(_whole(config, n).to(device), mesh, tokens) for n in range(3 + config["backward"]))
    q, k, v = (x.requires_grad_(config["backward"]) for x in (q, k, v))
    options = {key: config[key] for key in ("exchange", "backend", "replicate_kv")}
    attention = usp.HybridAttention(mesh, **options)
    if device.type == "cuda" and config["measure"]["baseline"]:
        raise ValueError("measure.baseline=true compares CPU seconds, but each rank has a device: device=cpu")

    def forward() -> Tensor:
        return attention(q, k, v, tokens, mask)

    def backward(out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, (q, k, v), dout)

    def call() -> list[Tensor]:
        out = forward()
        return [out.detach(), *(backward(out) if config["backward"] else ())]

    results, sample = ranks.counted(call, mesh)
    sample |= {"error": _errors(config, results, mesh, tokens, mask), "baseline_cpu_s": []}
    del results

    def baseline() -> None:
        # As many copies as there are cores, so that caches and clocks are shared in both halves of a round.
        if config["measure"]["baseline"] and dist.get_rank() < ranks.CORES:
            sample["baseline_cpu_s"].append(_fused_on_one_process(config))

    warmup = config["measure"]["warmup"] - 1  # the call above is one
    more = {"warmup": warmup, "repeats": config["measure"]["repeats"], "before": baseline}
    return sample | ranks.clocked(forward, backward if config["backward"] else None, **more)


def _whole(config: dict, n: int, heads: range | None = None) -> Tensor:
    """The n-th of q, k, v, dout over the whole sequence, all heads or some: the same on every rank and every mesh."""
    workload = config["workload"]
    count = workload["kv_heads"] if n in (1, 2) else workload["heads"]
    shape = workload["batch"], config["seq"], workload["head_dim"]
    drawn = []
    for head in heads or range(count):
        generator = torch.Generator().manual_seed((4 * config["seed"] + n << 16) + head)
        drawn.append(torch.randn(shape, generator=generator))
    return torch.stack(drawn, 2).to(getattr(torch, config["dtype"]))


def _errors(config: dict, results: list[Tensor], mesh, tokens: usp.Partition, mask: usp.Mask) -> ranks.Errors:
    """Against float64 on one process; measure.reference says what is compared."""
    if config["measure"]["reference"] == "whole":
        return _whole_errors(config, results, mesh, tokens, mask)
    if config["measure"]["reference"] == "rows":
        return _row_errors(config, results, mesh, tokens)
    return {}


def _whole_errors(config: dict, results: list[Tensor], mesh, tokens: usp.Partition, mask: usp.Mask) -> ranks.Errors:
    """Of out, dq, dk and dv over the whole sequence, for this rank's share of the heads."""
    with torch.no_grad():
        whole = [usp.unshard(x, mesh, tokens).cpu() for x in results]
    world, kv_heads = dist.get_world_size(), config["workload"]["kv_heads"]
    groups = config["workload"]["heads"] // kv_heads
    keys = range(dist.get_rank() * kv_heads // world, (dist.get_rank() + 1) * kv_heads // world)
    if not keys:
        return {}
    queries = range(keys.start * groups, keys.stop * groups)
    q, k, v, dout = (_whole(config, n, heads).double() for n, heads in enumerate((queries, keys, keys, queries)))
    q, k, v = (x.requires_grad_(config["backward"]) for x in (q, k, v))
    alone = usp.Partition(config["seq"], usp.Layout.CONTIGUOUS)
    out = usp.hybrid_attention(q, k, v, None, alone, mask=mask, backend="tiled")
    expected = [out.detach(), *(torch.autograd.grad(out, (q, k, v), dout) if config["backward"] else ())]
    found = [x[:, :, heads.start : heads.stop] for x, heads in zip(whole, (queries, queries, keys, keys), strict=False)]
    return {name: ranks.error(x, y) for name, x, y in zip(("out", "dq", "dk", "dv"), found, expected, strict=False)}


def _row_errors(config: dict, results: list[Tensor], mesh, tokens: usp.Partition) -> ranks.Errors:
    """Of out and dq in some of this rank's rows and heads, by a softmax over the whole sequence written out.

    Ranks take turns with the KV heads, so that together they see them all.
    """
    at = usp.positions(mesh, tokens)[0].cpu()
    real = (at < config["seq"]).nonzero().flatten()
    if not len(real):
        return {}
    rows = real[torch.linspace(0, len(real) - 1, min(ranks.ROWS, len(real))).long()]
    groups = config["workload"]["heads"] // config["workload"]["kv_heads"]
    distance = at[rows, None] - torch.arange(config["seq"])
    hidden = distance < 0 if config["causal"] else torch.zeros_like(distance, dtype=torch.bool)
    if config["window"] is not None:
        hidden |= distance.abs() >= config["window"]
    pairs: dict[str, list[tuple[float, float]]] = {"out": [], "dq": []}
    kv_heads, world = config["workload"]["kv_heads"], dist.get_world_size()
    for kv_head in range(dist.get_rank() % kv_heads, kv_heads, world):
        heads = range(kv_head * groups, (kv_head + 1) * groups)
        keys, values = (_by_head(_whole(config, n, range(kv_head, kv_head + 1))) for n in (1, 2))
        q, dout = (_by_head(_whole(config, n, heads)[:, at[rows]]) for n in (0, 3))
        q.requires_grad_(config["backward"])
        scores = q @ keys.mT / math.sqrt(config["workload"]["head_dim"])
        out = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values
        expected = [out.detach(), *(torch.autograd.grad(out, q, dout) if config["backward"] else ())]
        for name, x, y in zip(pairs, results, expected, strict=False):
            pairs[name].append(ranks.error(_by_head(x[:, rows, heads.start : heads.stop].cpu()), y))
    return {name: ranks.worst(found) for name, found in pairs.items() if found}


def _by_head(x: Tensor) -> Tensor:
    return rearrange(x.double(), "b s h d -> b h s d")


def _fused_on_one_process(config: dict) -> float:
    """CPU seconds of PyTorch's fused attention over the whole sequence, with backward if the point has it."""
    q, k, v, dout = (rearrange(_whole(config, n), "b s h d -> b h s d") for n in range(4))
    q, k, v = (x.requires_grad_(config["backward"]) for x in (q, k, v))
    start = time.process_time()
    out = F.scaled_dot_product_attention(q, k, v, is_causal=config["causal"], enable_gqa=True)
    if config["backward"]:
        torch.autograd.grad(out, (q, k, v), dout)
    return time.process_time() - start


EXPERIMENT = points.Experiment("attention", label, check, measure, summary, line)

if __name__ == "__main__":
    from experiments.attention import main  # the module that other processes can import, not this copy of it

    main()
