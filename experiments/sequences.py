"""Whole sequences of random tokens, the same on every rank, and what attention to them gives in float64.

Configurations are those of experiments.decode and experiments.prefill. Tokens are drawn in pieces, so that any rank can
draw any part of any sequence.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from experiments import points, ranks
from usp.heads import HeadPlan

PIECE = 256  # tokens that are drawn together
PARTS = 4  # of each rank, sequences and KV heads that are compared when not the whole result is


def check(config: dict) -> None:
    """What is wrong with any call over a cache, as far as it can be seen before any process is started.

    Raises:
        ValueError: naming the values.
    """
    points.check(config)
    workload = config["workload"]
    if config["measure"]["baseline"]:
        raise ValueError("measure.baseline=true: only experiments.attention runs the one-process kernel; leave it out")
    if config["batch"] < 1:
        raise ValueError(f"batch={config['batch']}: at least one sequence")
    if workload["batch"] != config["batch"]:
        raise ValueError(f"workload.batch={workload['batch']} is not batch={config['batch']}: give batch= alone")
    HeadPlan(workload["heads"], workload["kv_heads"], config["mesh"]["ulysses"])


def tokens(config: dict, n: int, first: int, count: int) -> Tensor:
    """The n-th of q, k, v at positions [first, first + count) of all sequences: (batch, count, heads, head_dim)."""
    whole = _room(config, n, config["batch"], count)
    for row, into in enumerate(whole):
        _draw(config, n, row, first, into)
    return whole.to(getattr(torch, config["dtype"]))


def drawn(config: dict, n: int, row: int, first: int, count: int) -> Tensor:
    """The same of one sequence: (count, heads, head_dim)."""
    into = _room(config, n, count)
    _draw(config, n, row, first, into)
    return into.to(getattr(torch, config["dtype"]))


def _room(config: dict, n: int, *sizes: int) -> Tensor:
    return torch.empty(*sizes, config["workload"]["kv_heads" if n else "heads"], config["workload"]["head_dim"])


def _draw(config: dict, n: int, row: int, first: int, into: Tensor) -> None:
    """Fill (count, heads, head_dim) with what stands at the positions from `first` on."""
    count = len(into)
    for piece in range(first // PIECE, -(-(first + count) // PIECE)):
        seed = zlib.crc32(f"{config['seed']} {n} {row} {piece}".encode())
        generator = torch.Generator().manual_seed(seed)
        start = piece * PIECE - first
        if 0 <= start <= count - PIECE:
            into[start : start + PIECE].normal_(generator=generator)
        else:
            whole = torch.randn(PIECE, *into.shape[1:], generator=generator)
            a, b = max(0, start), min(count, start + PIECE)
            into[a:b] = whole[a - start : b - start]


def expected(config: dict, row: int, heads: range, at: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of the queries at positions `at` of a sequence: causal, within the window if there is one.

    A softmax over all earlier tokens written out: out (queries, heads, head_dim) and lse (heads, queries) in float64.
    `heads` are query heads of one KV head.
    """
    workload, length = config["workload"], int(at.max()) + 1
    own = heads.start // (workload["heads"] // workload["kv_heads"])
    keys, values = (drawn(config, n, row, 0, length)[:, own].double() for n in (1, 2))
    q = torch.stack([drawn(config, 0, row, int(position), 1)[0] for position in at]).double()
    distance = at[:, None] - torch.arange(length)
    hidden = distance < 0
    if config.get("window") is not None:
        hidden |= distance >= config["window"]
    scores = torch.einsum("shd,td->hst", q[:, heads.start : heads.stop], keys) / math.sqrt(workload["head_dim"])
    scores = scores.masked_fill(hidden, -torch.inf)
    return torch.einsum("hst,td->shd", scores.softmax(-1), values), torch.logsumexp(scores, -1)


def errors(config: dict, out: Tensor, lse: Tensor, rows: range, heads: range, at: Tensor) -> ranks.Errors:
    """Of this rank's out (rows, queries, heads, head_dim) and lse (rows, heads, queries), where queries are `at`.

    measure.reference=rows takes a few queries, and a few pairs of a sequence and a KV head, other ones on every rank;
    whole takes all, none nothing.
    """
    wanted = config["measure"]["reference"]
    groups = config["workload"]["heads"] // config["workload"]["kv_heads"]
    pairs = [
        (row, range(max(heads.start, n * groups), min(heads.stop, n * groups + groups)))
        for row in rows
        for n in range(heads.start // groups, -(-heads.stop // groups))
    ]
    if wanted == "none" or not pairs or not len(at):
        return {}
    queries = torch.arange(len(at))
    if wanted == "rows":
        turn = dist.get_rank()
        some = range(min(PARTS, len(pairs)))
        pairs = [pairs[(n * len(pairs) // len(some) + turn) % len(pairs)] for n in some]
        queries = torch.linspace(0, len(at) - 1, min(ranks.ROWS, len(at))).long()
    found: dict[str, list[tuple[float, float]]] = {"out": [], "lse": []}
    for row, some in pairs:
        here = slice(some.start - heads.start, some.stop - heads.start)
        right, right_lse = expected(config, row, some, at[queries])
        found["out"].append(ranks.error(out[row - rows.start, queries, here].cpu(), right))
        found["lse"].append(ranks.error(lse[row - rows.start, here][:, queries].cpu(), right_lse))
    return {name: ranks.worst(pairs) for name, pairs in found.items()}


def timed(config: dict, call: Callable[[], object], after: Callable[[], None]) -> dict[str, list[float]]:
    """Seconds of every call on this rank (`experiments.ranks.timed`); two calls were made before, to check and count.

    `after` undoes a call, outside of what is timed.
    """
    measure = config["measure"]
    samples = ranks.clocked(call, None, warmup=max(0, measure["warmup"] - 2), repeats=measure["repeats"], after=after)
    return {name: values for name, values in samples.items() if not name.startswith("forward_")}
