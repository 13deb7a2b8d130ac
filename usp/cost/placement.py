"""On which node each rank is. Consecutive ranks share a node; ranks of a group lie a stride apart.

Tensor ranks are 1 apart, those of the inner axis as many as there are tensor ranks, those of the other axis as many
as the inner axis and tensor have together.
"""

from __future__ import annotations

from functools import lru_cache

Nodes = tuple[int, ...]  # of the ranks of a group, in order


@lru_cache(maxsize=4096)
def groups(ranks: int, stride: int, world: int, per_node: int) -> tuple[Nodes, ...]:
    """The nodes of all groups of so many ranks, `stride` apart, by blocks of `stride` groups that are interleaved."""
    firsts = [block + n for block in range(0, world, ranks * stride) for n in range(stride)]
    return tuple([tuple([(first + n * stride) // per_node for n in range(ranks)]) for first in firsts])


def spans_nodes(ranks: int, stride: int, world: int, per_node: int) -> bool:
    """Whether one of those groups is in several nodes."""
    return any(len(set(nodes)) > 1 for nodes in groups(ranks, stride, world, per_node))
