"""On which node each rank is, and what leaves a node at once.

Consecutive ranks share a node, and ranks of a group lie a stride apart: those of tensor 1, those of the inner axis as
many as there are tensor ranks, those of the other axis as many as the inner axis and tensor have together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

Nodes = tuple[int, ...]  # of the ranks of a group, in order


@lru_cache(maxsize=4096)
def groups(ranks: int, stride: int, world: int, per_node: int) -> tuple[Nodes, ...]:
    """The nodes of all groups of so many ranks, `stride` apart."""
    firsts = [block + n for block in range(0, world, ranks * stride) for n in range(stride)]
    return tuple([tuple([(first + n * stride) // per_node for n in range(ranks)]) for first in firsts])


def spans_nodes(ranks: int, stride: int, world: int, per_node: int) -> bool:
    """Whether one of those groups is in several nodes."""
    return any(len(set(nodes)) > 1 for nodes in groups(ranks, stride, world, per_node))


@lru_cache(maxsize=4096)
def neighbours(ranks: int, stride: int, world: int, per_node: int) -> tuple[tuple[Nodes, Mapping[Nodes, int]], ...]:
    """How groups lie, each way once: a group's nodes, and those of all groups that share a node with it, itself among
    them, with how many lie so. Nodes are counted from the group's first."""
    count = Counter(groups(ranks, stride, world, per_node))
    on: dict[int, set[Nodes]] = {}
    for nodes in count:
        for node in nodes:
            on.setdefault(node, set()).add(nodes)
    found = set()
    for nodes in count:
        near = set().union(*[on[node] for node in nodes])
        placed = [(tuple([node - nodes[0] for node in other]), count[other]) for other in near]
        found.add((tuple([node - nodes[0] for node in nodes]), tuple(sorted(placed))))
    return tuple([(nodes, dict(near)) for nodes, near in sorted(found)])


@lru_cache(maxsize=4096)
def hops(ranks: int, stride: int, world: int, per_node: int) -> int:
    """Ranks of one node, at most, whose next one in their group is in another node."""
    leaving = Counter()
    for nodes in groups(ranks, stride, world, per_node):
        leaving.update(here for here, there in zip(nodes, nodes[1:] + nodes[:1], strict=True) if here != there)
    return max(leaving.values(), default=0)


class Spread(NamedTuple):
    """Where messages from every rank to each other one of its group go."""

    together: int  # ranks of one group that share a node, at most
    away: int  # messages of one rank that leave its node, at most
    leaving: int  # messages that leave one node, at most


@lru_cache(maxsize=4096)
def spread(ranks: int, stride: int, world: int, per_node: int) -> Spread:
    together, leaving = set(), Counter()
    for nodes in groups(ranks, stride, world, per_node):
        shared = Counter(nodes)
        leaving.update({node: count * (ranks - count) for node, count in shared.items()})
        together.update(shared.values())
    return Spread(max(together), ranks - min(together), max(leaving.values()))
