"""Which heads each Ulysses rank computes, when there are not equally many for all.

Note [Heads]
~~~~~~~~~~~~
Query head h reads KV head h // (heads // kv_heads). Nine query and three KV heads on two ranks:

    query head       0  1  2  3  4  5  6  7  8
    KV head          0  0  0  1  1  1  2  2  2
    rank             0  0  0  0  0  0  1  1  1    cut where KV heads end: each of those is on one rank
    replicate_kv     0  0  0  0  0  1  1  1  1    cut evenly: KV head 1 is on both, and its gradients are summed

What a rank holds is *groups* of query and KV heads with equally many queries a KV head, one kernel call each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Group(NamedTuple):
    """Heads of one kernel call, counted among the rank's own: query head n reads KV head n // (queries // keys)."""

    queries: range
    keys: range


@dataclass(frozen=True)
class HeadPlan:
    """The query and KV heads of every Ulysses rank; see Note [Heads]. Hashable, and the same on all ranks.

    Args:
        heads, kv_heads: of the whole model.
        ulysses: ranks that the heads are dealt to, in runs of consecutive heads that differ by at most one.
        replicate_kv: cut query heads evenly and give a KV head to every rank that has some of its query heads.
            Without it a KV head is on one rank, and there are at most as many ranks as KV heads.

    Raises:
        ValueError: if KV heads do not divide the query heads, or there are more ranks than heads to deal; names
            the largest degree that works.
    """

    heads: int
    kv_heads: int
    ulysses: int = 1
    replicate_kv: bool = False

    def __post_init__(self) -> None:
        text = f"{self.heads} query heads and {self.kv_heads} KV heads"
        if min(self.heads, self.kv_heads, self.ulysses) < 1:
            raise ValueError(f"{text} on ulysses={self.ulysses} ranks: each is at least 1")
        if self.heads % self.kv_heads:
            raise ValueError(f"{text}: each KV head serves equally many query heads")
        if self.ulysses > (self.heads if self.replicate_kv else self.kv_heads):
            more = not self.replicate_kv and self.heads > self.kv_heads
            cure = f", with replicate_kv=True {self.heads}" if more else ""
            largest = self.heads if self.replicate_kv else self.kv_heads
            raise ValueError(
                f"{text} on ulysses={self.ulysses} ranks: the largest Ulysses degree is {largest}{cure}; "
                "give the other ranks to the ring"
            )

    @property
    def queries(self) -> tuple[range, ...]:
        """By Ulysses rank: its query heads."""
        if self.replicate_kv:
            return runs(self.heads, self.ulysses)
        share = self.heads // self.kv_heads
        return tuple([range(x.start * share, x.stop * share) for x in self.keys])

    @property
    def keys(self) -> tuple[range, ...]:
        """By Ulysses rank: its KV heads."""
        if not self.replicate_kv:
            return runs(self.kv_heads, self.ulysses)
        share = self.heads // self.kv_heads
        return tuple([range(x.start // share, (x.stop - 1) // share + 1) for x in self.queries])

    def groups(self, rank: int) -> tuple[Group, ...]:
        """The kernel calls of a rank."""
        share = self.heads // self.kv_heads
        queries, keys = self.queries[rank], self.keys[rank]
        found: list[Group] = []
        q = 0
        for k, head in enumerate(keys):
            served = min(queries.stop, head * share + share) - max(queries.start, head * share)
            first_q, first_k = q, k
            if found and len(found[-1].queries) == served * len(found[-1].keys):  # as many as those before: one call
                first_q, first_k = found[-1].queries.start, found[-1].keys.start
                found.pop()
            q += served
            found.append(Group(range(first_q, q), range(first_k, k + 1)))
        return tuple(found)


def runs(count: int, parts: int) -> tuple[range, ...]:
    """range(count) in `parts` runs that differ by at most one, the longer ones first."""
    size, longer = divmod(count, parts)
    return tuple([range(n * size + min(n, longer), (n + 1) * size + min(n + 1, longer)) for n in range(parts)])
