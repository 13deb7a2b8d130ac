"""Which tokens of a growing sequence each ring rank keeps: what a KV cache holds, without keys and values.

Note [Ledger]
~~~~~~~~~~~~~
A batch row's tokens are in segments, each behind the one before. A prefill leaves a `Turn`: its tokens stay where
the partition had them. Tokens that come a few at a time are `Dealt` in blocks, a block always to the rank that has
the fewest of what counts, of equals the first, so on four ranks with blocks of two after a zigzag prompt

    position    0 1 2 3 4 5 6 7 | 8 9 10 11 12 13 14 15 16 17 18
    rank        0 1 2 3 3 2 1 0 | 0 0  1  1  2  2  3  3  0  0  1

What counts is what was dealt (owner "rotate") or all that is kept ("shortest"). A rank keeps a row's tokens in
increasing position, one *slot* each. How many it has before a position is arithmetic on the few numbers of one
segment, so a step does not depend on how long the row is or how many turns it had. All ranks have the same ledger:
nobody asks another where a token is.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from usp.masks import Span
from usp.partitions import Partition, Run

OWNERS = ("rotate", "shortest")

Counts = tuple[int, ...]  # by ring rank


class Turn(NamedTuple):
    """The tokens at positions [first, end), where `tokens` has them."""

    first: int
    end: int
    before: Counts  # tokens kept in the segments before
    dealt: Counts  # of them, those that were dealt
    tokens: Partition

    def runs(self, rank: int) -> list[Run]:
        return [part for run in self.tokens.runs(rank) if (part := run.between(self.first, self.end)).count]

    def below(self, rank: int, position: int) -> int:
        return sum(run.between(self.first, min(self.end, position)).count for run in self.tokens.runs(rank))


class Dealt(NamedTuple):
    """The tokens at positions [first, end), in blocks. `levels`: how much of what counts each rank had before."""

    first: int
    end: int
    before: Counts
    dealt: Counts
    block: int
    levels: Counts

    def runs(self, rank: int) -> list[Run]:
        runs: list[Run] = []
        left = self.below(rank, self.end)
        for n in range(-(-left // self.block)):
            start, count = self.first + self._number(rank, n) * self.block, min(self.block, left - n * self.block)
            if runs and runs[-1].start + runs[-1].count == start:
                start, count = runs[-1].start, runs.pop().count + count
            runs.append(Run(start, 1, count))
        return runs

    def below(self, rank: int, position: int) -> int:
        blocks, more = divmod(max(0, min(self.end, position) - self.first), self.block)
        return self._shares(blocks)[rank] * self.block + (more if more and self.owner(blocks) == rank else 0)

    def owner(self, block: int) -> int:
        """The rank of the block of this number."""
        before, after = self._shares(block), self._shares(block + 1)
        return next(rank for rank, count in enumerate(after) if count > before[rank])

    def _shares(self, blocks: int) -> Counts:
        """How many of the first blocks each rank has."""
        return _shares(self.block, self.levels, blocks)

    def _number(self, rank: int, n: int) -> int:
        """Which of all blocks is the n-th of this rank's: those before it go to lower levels, or to earlier ranks."""
        level = self.levels[rank] + n * self.block
        lower = sum(_blocks_below(self.block, own, level) for own in self.levels)
        return lower + sum(_has_block_at(self.block, own, level) for own in self.levels[:rank])


Segment = Turn | Dealt


def _blocks_below(block: int, level: int, limit: int) -> int:
    """How many blocks a rank that begins at `level` gets before its level is at the limit."""
    return max(0, -((level - limit) // block))


def _has_block_at(block: int, level: int, limit: int) -> bool:
    return limit >= level and (limit - level) % block == 0


@lru_cache(maxsize=4096)
def _shares(block: int, levels: Counts, blocks: int) -> Counts:
    """How many of the first `blocks` each rank has, each block having gone to the lowest level."""

    def given(limit: int) -> list[int]:
        return [_blocks_below(block, level, limit) for level in levels]

    limits = range(min(levels), min(levels) + (blocks + 1) * block + 1)
    limit = limits[bisect_right(limits, blocks, key=lambda limit: sum(given(limit))) - 1]
    shares = given(limit)
    left = blocks - sum(shares)
    for rank, level in enumerate(levels):
        if left and _has_block_at(block, level, limit):
            shares[rank] += 1
            left -= 1
    return tuple(shares)


@lru_cache(maxsize=512)
def _runs(segment: Segment, rank: int) -> tuple[Run, ...]:
    return tuple(segment.runs(rank))


class History(tuple[Segment, ...]):
    """Segments that are closed. Shared from step to step, so that what depends on all of them is found once."""

    @cached_property
    def firsts(self) -> list[int]:
        return [segment.first for segment in self]

    @cached_property
    def digest(self) -> str:
        return _digest(*self)

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()

    def __hash__(self) -> int:
        return self._hash


def _digest(*parts: object) -> str:
    """The same in every process, as a hash is not."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


@dataclass(frozen=True)
class Row:
    """The tokens of one batch row: closed segments, the last one, and the position of the next token."""

    closed: History = field(default_factory=History)
    last: Segment | None = None
    length: int = 0

    @property
    def segments(self) -> History:
        return self.closed if self.last is None else History((*self.closed, self.last))

    @property
    def first(self) -> int:
        """The position of the first token."""
        begin = self.closed[0] if self.closed else self.last
        return begin.first if begin else 0

    def below(self, rank: int, position: int) -> int:
        """How many tokens a ring rank keeps before a position."""
        segment = self.last
        if segment and position <= segment.first and self.closed:
            segment = self.closed[max(0, bisect_left(self.closed.firsts, position) - 1)]
        return segment.before[rank] + segment.below(rank, position) if segment else 0

    def with_turn(self, first: int, end: int, tokens: Partition) -> Row:
        before, dealt = self._counts(tokens.ring)
        return Row(self.segments, Turn(first, end, before, dealt, tokens), end)

    def with_dealt(self, count: int, ring: int, block: int, owner: str) -> Row:
        end = self.length + count
        if isinstance(self.last, Dealt) and self.last.end == self.length:
            return Row(self.closed, self.last._replace(end=end), end)
        before, dealt = self._counts(ring)
        counted = before if owner == "shortest" else dealt
        levels = tuple(x - min(counted) for x in counted)  # only differences count: rows that agree in them are equal
        return Row(self.segments, Dealt(self.length, end, before, dealt, block, levels), end)

    def truncated(self, length: int) -> Row:
        left = self.segments[: bisect_left(self.segments.firsts, length)]
        if not left:
            return Row(length=length)
        return Row(History(left[:-1]), left[-1]._replace(end=min(left[-1].end, length)), length)

    def _counts(self, ring: int) -> tuple[Counts, Counts]:
        """Tokens kept, and tokens dealt, by rank."""
        last = self.last
        if last is None:
            return (0,) * ring, (0,) * ring
        own = [last.below(rank, last.end) for rank in range(ring)]
        kept = tuple(x + y for x, y in zip(last.before, own, strict=True))
        dealt = last.dealt if isinstance(last, Turn) else tuple(x + y for x, y in zip(last.dealt, own, strict=True))
        return kept, dealt

    def counts(self, ring: int) -> Counts:
        """Tokens kept, by rank."""
        return self._counts(ring)[0]

    @cached_property
    def digest(self) -> str:
        return _digest(self.closed.digest, self.last, self.length)


@dataclass(frozen=True)
class Ledger:
    """The tokens of every batch row and ring rank. Hashable, and the same on all ranks: changing it makes another.

    Args:
        ring: how many ring ranks keep tokens.
        rows: by batch row; see Note [Ledger].
    """

    ring: int
    rows: tuple[Row, ...]

    @classmethod
    def empty(cls, ring: int, batch: int) -> Ledger:
        return cls(ring, (Row(),) * batch)

    @cached_property
    def _hash(self) -> int:
        return hash((self.ring, self.rows))

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"Ledger(tokens by row and ring rank {self.counts}, digest {_digest(*(x.digest for x in self.rows))})"

    @property
    def lengths(self) -> tuple[int, ...]:
        """By batch row: the position of its next token."""
        return tuple(row.length for row in self.rows)

    @property
    def starts(self) -> tuple[int, ...]:
        """By batch row: the position of its first token."""
        return tuple(row.first for row in self.rows)

    @cached_property
    def counts(self) -> tuple[Counts, ...]:
        """[row][rank]: tokens kept."""
        return tuple(row.counts(self.ring) for row in self.rows)

    @property
    def seq_ring(self) -> int:
        """Slots in use on the rank that has most."""
        return max(max(counts) for counts in self.counts)

    def span(self, row: int = 0) -> tuple[int, int]:
        """Positions [first, end) of a batch row."""
        return self._row(row).first, self._row(row).length

    def runs(self, ring_rank: int, row: int = 0) -> tuple[Run, ...]:
        """Positions that a ring rank keeps, by slot."""
        return tuple(run for segment in self._row(row).segments for run in _runs(segment, ring_rank))

    def below(self, ring_rank: int, row: int, position: int) -> int:
        """How many tokens a ring rank keeps before a position: the slot of the first that is not."""
        return self._row(row).below(ring_rank, position)

    def _row(self, row: int) -> Row:
        return self.rows[row if len(self.rows) > 1 else 0]

    def alike(self) -> Ledger:
        """With one row, if all rows keep the same tokens."""
        return Ledger(self.ring, self.rows[:1]) if len(set(self.rows)) == 1 else self

    def dealt(self, new: Sequence[int], block: int, owner: str) -> Ledger:
        """With so many more tokens in each batch row, in blocks."""
        rows = zip(self.rows, new, strict=True)
        return Ledger(
            self.ring, tuple(row.with_dealt(count, self.ring, block, owner) if count else row for row, count in rows)
        )

    def dealt_to(self, row: int, position: int) -> tuple[int, int]:
        """Of a position among the tokens that were dealt last: the rank that keeps it, and where its block ends."""
        last = self.rows[row].last
        assert isinstance(last, Dealt)
        number = (position - last.first) // last.block
        return last.owner(number), min(last.end, last.first + (number + 1) * last.block)

    def turned(self, tokens: Partition, spans: Sequence[Sequence[Span]]) -> Ledger:
        """With a prefill's tokens, of which those at the positions `spans` stay, by batch row and in order."""
        rows = []
        for n, (row, kept) in enumerate(zip(self.rows, spans, strict=True)):
            alone = replace(tokens, start=tokens.span(n)[0]) if kept else tokens
            for first, end in kept:
                row = row.with_turn(first, end, alone)
            rows.append(row)
        return Ledger(self.ring, tuple(rows))

    def truncated(self, lengths: Iterable[int]) -> Ledger:
        """Without the tokens from these positions on, one for each row, which is where the next ones go."""
        return Ledger(self.ring, tuple(row.truncated(length) for row, length in zip(self.rows, lengths, strict=True)))
