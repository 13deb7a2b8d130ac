"""What the algorithms send, and how `prefill_attention` chooses: arithmetic alone, without torch.

Note [Decode algorithms]
~~~~~~~~~~~~~~~~~~~~~~~~
N ring ranks, B sequences with one new token each, H query heads on a Ulysses rank, head dim d, e bytes an element.
Between the layers of a model (`gather=False`) each algorithm takes queries and leaves out in a form of its own:

                takes q        leaves out     sends a rank                          collectives
    pass_q      its rows       its rows       (N-1)/N B H (2 d e + 4)               N-1 hops, 1 all-to-all
    gather_q    its heads      its heads      2 (N-1)/N B H d e + 4 (N-1) B H       3
    all_to_all  its heads      its heads      (N-1)/N B H (2 d e + 4)               2
    helix       whole          its heads      (N-1)/N B H (d e + 4)                 1
    tree        whole          whole          2 (N-1)/N B H 4 (d + 2)               2 all-reduces

Rows and heads are dealt in runs that differ by at most one, without padding; the table has their mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from usp.heads import runs

DECODE = ("pass_q", "gather_q", "all_to_all", "helix", "tree")
PREFILL = ("pass_kv", "pass_q", "all_gather")  # of equals, `auto` takes the first

Volume = Mapping[str, tuple[int, int]]  # by kind of traffic: bytes and messages of one rank


def decode_volume(
    algorithm: str,
    *,
    ring: int,
    rank: int,
    batch: int,
    heads: int,
    head_dim: int,
    head_dim_v: int,
    element_bytes: int,
    seq: int = 1,
) -> Volume:
    """What ring rank `rank` sends in one `decode_attention(..., gather=False)` of `seq` tokens a row.

    `heads` are the query heads of its Ulysses rank. Equal to what `measure_traffic` counts, which a test holds.
    """
    if ring == 1:
        return {}
    lse_bytes = max(4, element_bytes)
    own, rows = len(runs(heads, ring)[rank]), [len(x) for x in runs(batch, ring)]
    others, q_bytes, out_bytes = ring - 1, head_dim * element_bytes, head_dim_v * element_bytes
    if algorithm == "pass_q":
        hops = [rows[(rank - n) % ring] for n in range(others)]  # its own, then those that came before
        partials = (batch - rows[rank]) * seq * heads * (out_bytes + lse_bytes), 1
        queries = sum(hops) * seq * heads * q_bytes, sum(map(bool, hops))
        return {"partials": partials} | ({"queries": queries} if any(hops) else {})
    if algorithm == "tree":
        numbers = batch * seq * heads * lse_bytes  # of one float each
        return {"partials": (all_reduce_bytes(numbers, ring) + all_reduce_bytes(numbers * (head_dim_v + 1), ring), 2)}
    partials = batch * seq * (heads - own) * (out_bytes + lse_bytes), 1
    if algorithm == "helix":
        return {"partials": partials}
    queries = others * batch * seq * own * q_bytes, 1
    if algorithm == "all_to_all":
        return {"queries": queries, "partials": partials}
    assert algorithm == "gather_q"
    return {
        "queries": queries,
        "lse": (others * batch * seq * heads * lse_bytes, 1),
        "partials": (batch * seq * (heads - own) * out_bytes, 1),
    }


def all_reduce_bytes(size_bytes: int, ranks: int) -> int:
    """What a rank sends in an all-reduce of that size: a reduce-scatter and an all-gather."""
    return 2 * (ranks - 1) * size_bytes // ranks


class Rates(NamedTuple):
    """How fast a ring rank computes and sends, for `prefill_attention` to choose by.

    With the defaults nothing hides behind the computation and messages cost nothing but their bytes, so that sizes
    alone decide.
    """

    flops_per_s: float = math.inf  # of attention, as achieved
    bytes_per_s: float = 1e9  # from one ring rank to the next, as achieved
    latency_s: float = 0.0  # of a message, whatever its size
    overlap: float = 1.0  # of the time in which a rank both computes and sends, what share is saved
    collective_bytes_per_s: float | None = None  # of an all-to-all or a gather, if it is not that of a hop
    collective_latency_s: float | None = None


class Report(NamedTuple):
    """What `prefill_attention` did, and by which numbers `algorithm="auto"` chooses; the same on every rank.

    Sizes are those of the ring rank that has most. `exposed_s` is the communication that no computation hides, as
    `exposed` has it, by algorithm.
    """

    algorithm: str
    new: int  # tokens of the turn, of the longest batch row
    cached: int  # tokens of that row before it
    ring: int
    kv_bytes: int  # of one hop of keys and values
    gathered_bytes: int  # of one rank's share of all keys and values
    q_bytes: int  # of one hop of queries
    partial_bytes: int  # what one rank returns to another, out and lse
    step_flops: float  # of one ring rank in one step; not counted where rates.flops_per_s is infinite
    rates: Rates
    exposed_s: Mapping[str, float]


def exposed(
    ring: int,
    kv_bytes: float,
    gathered_bytes: float,
    q_bytes: float,
    partial_bytes: float,
    step_flops: float,
    rates: Rates,
) -> dict[str, float]:
    """Seconds of communication that computation does not hide, by prefill algorithm.

    pass_kv     (N-1) open(kv)                   keys travel under the attention to those before
    pass_q      (N-1) open(q) + all-to-all       queries travel; what comes back is never hidden
    all_gather  one collective of (N-1) gathered

    hop(x) = latency + x / bandwidth, open(x) = hop(x) - overlap min(hop(x), step). The selection rules of Context
    Parallelism for Scalable Million-Token Inference (arXiv 2411.01783, equations 1, 2 and 5) are its limits: for an
    infinite rate of computing, pass_q is chosen where
    new / (new + cached) < 2 kv_heads / heads / (2 + 4 / (head_dim element_bytes)).
    """
    if ring == 1:
        return dict.fromkeys(PREFILL, 0.0)
    others, step_s = ring - 1, step_flops / rates.flops_per_s
    together_s = rates.latency_s if rates.collective_latency_s is None else rates.collective_latency_s

    def hops(size_bytes: float) -> float:
        hop_s = rates.latency_s + size_bytes / rates.bytes_per_s
        return others * (hop_s - rates.overlap * min(hop_s, step_s))

    def collective(size_bytes: float) -> float:
        return together_s + others * (size_bytes / (rates.collective_bytes_per_s or rates.bytes_per_s))

    return {
        "pass_kv": hops(kv_bytes),
        "pass_q": hops(q_bytes) + collective(partial_bytes),
        "all_gather": collective(gathered_bytes),
    }
