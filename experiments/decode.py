"""Measure one step of decoding over a sharded KV cache on real ranks: one point, or a sweep.

    python -m experiments.decode mesh=u1r4 algorithm=helix context=16384 batch=8
    python -m experiments.decode -m experiment=decode

A step is `decode_attention` of `seq` new tokens of every sequence over a cache of `context` tokens. What it sends is
held against `usp.cost.counts.decode_traffic`: a difference fails the point. Points, records and torchrun: as in
experiments.attention.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

import usp
from analysis.compare import mesh_label
from experiments import points, ranks, sequences
from usp.cost import Plan, Workload
from usp.cost.counts import decode_traffic
from usp.heads import runs
from usp.inference import KVCache, decode_attention

FILLED = 1 << 22  # elements of keys that are appended to the cache at once


def main() -> None:
    points.main(EXPERIMENT)


def label(config: dict) -> str:
    parts = mesh_label(config), config["algorithm"], f"c{config['context']}", points.workload_label(config)
    return "-".join((*parts, config["dtype"]))


def check(config: dict) -> None:
    """What can be seen to be wrong before any process is started.

    Raises:
        ValueError: naming the values.
    """
    sequences.check(config)
    for key in ("context", "seq", "block"):
        if config[key] < 1:
            raise ValueError(f"{key}={config[key]}: at least 1")
    if config["algorithm"] == "auto" and not config["gather"]:
        raise ValueError(
            "algorithm=auto with gather=false: what of out a rank gets depends on the algorithm, so name one, or "
            "gather=true"
        )
    usp.Mask(causal=True, window=config["window"])


def summary(config: dict, samples: list[dict]) -> dict:
    """The figures of the table, from the ranks' samples.

    token_s is what a token of a sequence takes: a step's seconds over its `seq` tokens.

    Raises:
        ArithmeticError: if a rank sent other than the formula says.
    """
    found = points.figures(config, samples)
    by_formula = {(rank["ring_rank"], rank["ulysses_rank"]): rank["formula"] for rank in samples}
    points.check_traffic(samples, by_formula)
    return found | {
        "token_s": 1 / found["speed_per_s"] / config["seq"],
        "wall_token_s": found["wall_s"] / config["seq"],
        "tokens_per_s": found["speed_per_s"] * config["seq"] * config["batch"],
        "formula_bytes": max(_without_out(rank["formula"], 0) for rank in samples),
        "formula_messages": max(_without_out(rank["formula"], 1) for rank in samples),
        "out_bytes": max(rank["bytes"].get("out", 0) for rank in samples),
        "cache_bytes": max(rank["cache_bytes"] for rank in samples),
    }


def _without_out(formula: dict, what: int) -> int:
    """Bytes (0) or messages (1) of the algorithm itself."""
    return sum(pair[what] for kind, pair in formula.items() if kind != "out")


def line(found: dict) -> str:
    return f"{1e3 * found['token_s']:.2f} ms a token"


# ---------------------------------------------------------------------------------------------------
# On a rank.


class Share(NamedTuple):
    """What of the whole tensors a rank gives and gets."""

    rows: range  # sequences of q and of out
    queries: range  # query heads of q
    keys: range  # KV heads of k and v
    heads: range  # query heads of out


def share(config: dict, cache: KVCache) -> Share:
    """As `decode_attention` with the point's `gather` and `algorithm` wants it."""
    workload = config["workload"]
    rows, heads = range(config["batch"]), range(workload["heads"])
    if config["gather"]:
        return Share(rows, heads, range(workload["kv_heads"]), heads)
    plan, ring = cache.plan(workload["heads"]), cache.ring
    own, keys = plan.queries[cache.ulysses.rank], plan.keys[cache.ulysses.rank]
    part = runs(len(own), ring.size)[ring.rank]
    mine = own[part.start : part.stop]
    return {
        "helix": Share(rows, own, keys, mine),
        "tree": Share(rows, own, keys, own),
        "all_to_all": Share(rows, mine, keys, mine),
        "gather_q": Share(rows, mine, keys, mine),
        "pass_q": Share(runs(len(rows), ring.size)[ring.rank], own, keys, own),
    }[config["algorithm"]]


def measure(config: dict) -> dict:
    """One point on this rank: fill a cache, check a step, count one, time the others."""
    mesh, context, workload = ranks.mesh_of(config), config["context"], config["workload"]
    cache = filled(config, mesh)
    rows, queries, keys, heads = share(config, cache)
    whole = (sequences.tokens(config, n, context, config["seq"]).to(cache.k.device) for n in range(3))
    q, k, v = (x[:, :, some.start : some.stop] for x, some in zip(whole, (queries, keys, keys), strict=True))
    q = q[rows.start : rows.stop]
    options = {key: config[key] for key in ("algorithm", "gather", "backend")}
    options["mask"] = usp.Mask(causal=True, window=config["window"])

    def step(**more):
        return decode_attention(q, k, v, mesh, cache, **options, **more)

    def take_back() -> None:
        cache.truncate(context)

    out, lse = step(return_lse=True)
    at = torch.arange(context, context + config["seq"])
    error = sequences.errors(config, out, lse, rows, heads, at)
    take_back()
    _, sample = ranks.counted(step, mesh)
    take_back()
    sizes = workload | {"batch": config["batch"], "seq": context}
    call = Workload(mask=options["mask"], element_bytes=cache.k.element_size(), **sizes)
    algorithm = "helix" if config["algorithm"] == "auto" else config["algorithm"]
    plan = Plan(**config["mesh"], algorithm=algorithm)
    volumes = decode_traffic(call, plan, seq=config["seq"], gather=config["gather"])
    formula = volumes[cache.ring.rank * plan.ulysses + cache.ulysses.rank]
    sample |= {"error": error, "formula": formula, "cache_bytes": cache.memory_bytes}
    return sample | sequences.timed(config, step, take_back)


def filled(config: dict, mesh) -> KVCache:
    """A cache with `context` tokens of every sequence, dealt to the ring ranks as decoding would have."""
    workload = config["workload"]
    cache = KVCache(
        mesh,
        batch=config["batch"],
        capacity=config["context"] + config["seq"],
        kv_heads=workload["kv_heads"],
        head_dim=workload["head_dim"],
        dtype=getattr(torch, config["dtype"]),
        block=config["block"],
        owner=config["owner"],
        heads=workload["heads"],
    )
    numel = config["batch"] * workload["kv_heads"] * workload["head_dim"]
    chunk = max(sequences.PIECE, FILLED // numel // sequences.PIECE * sequences.PIECE)
    for first in range(0, config["context"], chunk):
        count = min(chunk, config["context"] - first)
        cache.append(*(sequences.tokens(config, n, first, count).to(cache.k.device) for n in (1, 2)))
    return cache


EXPERIMENT = points.Experiment("decode", label, check, measure, summary, line)

if __name__ == "__main__":
    from experiments.decode import main  # the module that other processes can import, not this copy of it

    main()
