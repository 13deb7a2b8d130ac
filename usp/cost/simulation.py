"""A ring pass played through, step by step, on a network of two levels: imbalance and waiting are not averages.

Every rank computes and sends at the same time. A step ends for a rank when its kernels are done and what it sends and
receives in this step is there; a hop begins when both of its ends have begun the step. So a rank that has much to do
holds up its neighbours, and only them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from usp.blocks import Visits


class Moment(NamedTuple):
    """One step of one rank: when it began, when its kernels were done, when it was over."""

    rank: int
    step: int
    source: int | None
    begin_s: float
    computed_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """What a simulation found; by ring rank where it is a tuple."""

    total_s: float  # of the rank that is done last
    compute_s: tuple[float, ...]
    end_s: tuple[float, ...]
    moments: tuple[Moment, ...]  # if they were asked for

    @property
    def exposed_s(self) -> float:
        """By how much the pass takes longer than the busiest rank computes."""
        return self.total_s - max(self.compute_s)


def simulate(
    visits: Visits,
    compute_s: Sequence[Mapping[int, float]],
    message_s: Callable[[int, bool, int], float],
    *,
    node_of: Callable[[int], int] = lambda rank: 0,
    rings: Mapping[tuple[int, ...], int] | None = None,
    backward: bool = False,
    overlap: float = 1.0,
    moments: bool = False,
) -> Timeline:
    """One ring pass.

    Args:
        visits: as `usp.blocks.schedule` returns them.
        compute_s: [rank][source]: seconds of its kernels.
        message_s: of (source, whether it is a gradient, how many ranks of the sender's node send to other nodes in this
            step, 0 if it stays inside a node): seconds of the message.
        node_of: the node of a ring rank.
        rings: the nodes of the ranks of all rings that do the same at the same time, this one among them, and how many
            lie so; without it there is this one alone.
        backward: also the gradients of keys, which follow a step behind and go home from their last visitor.
        overlap: of the time in which a rank both computes and sends, what share is saved; with 0 one waits for the
            other.
        moments: keep when what happened.

    Raises:
        ValueError: if this ring is not among `rings`.
    """
    ring, ranks = len(visits), range(len(visits))
    nodes = tuple([node_of(rank) for rank in ranks])
    rings = rings or {nodes: 1}
    if nodes not in rings:
        raise ValueError(f"rings={dict(rings)} must have this one, on nodes {nodes}, among them")
    source_at: list[list[int | None]] = [[None] * ring for _ in range(ring + 1)]
    flows: list[list[tuple[int, int, int, bool]]] = [[] for _ in range(ring + 1)]
    for source, stops in enumerate(visits):
        for rank, step in stops:
            source_at[step][rank] = source
        for (here, _), (there, due) in pairwise(stops):
            flows[due - 1].append((source, here, there, False))
        if backward and len(stops) > 1:
            foreign = stops[1:]
            arrivals = [*foreign[1:], (source, foreign[-1][1] + 1)]
            for (here, _), (there, due) in zip(foreign, arrivals, strict=True):
                flows[due].append((source, here, there, True))
    begin, busy = [0.0] * ring, [0.0] * ring
    kept: list[Moment] = []
    for step in range(ring + backward):
        sources = source_at[step]
        work = [0.0 if x is None else compute_s[rank].get(x, 0.0) for rank, x in enumerate(sources)]
        computed = [a + b for a, b in zip(begin, work, strict=True)]
        end = computed.copy()
        crossing: dict[int, int] = {}  # of each node: how many of its ranks send to others
        for places, count in rings.items():
            for rank in {sender for _, sender, receiver, _ in flows[step] if places[sender] != places[receiver]}:
                crossing[places[rank]] = crossing.get(places[rank], 0) + count
        sending: dict[int, float] = {}  # of each rank, one message after another
        for source, sender, receiver, gradient in flows[step]:
            node = nodes[sender]
            shared = crossing[node] if crossing and node != nodes[receiver] else 0
            seconds = sending[sender] = sending.get(sender, 0.0) + message_s(source, gradient, shared)
            arrival = max(begin[sender], begin[receiver]) + seconds
            for rank in (sender, receiver):
                there_s = max(arrival, computed[rank])
                if overlap < 1:
                    there_s += (1 - overlap) * min(work[rank], seconds)
                if there_s > end[rank]:
                    end[rank] = there_s
        if moments:
            kept += [Moment(rank, step, sources[rank], begin[rank], computed[rank], end[rank]) for rank in ranks]
        busy = [a + b for a, b in zip(busy, work, strict=True)]
        begin = end
    return Timeline(max(begin), tuple(busy), tuple(begin), tuple(kept))
