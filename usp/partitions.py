"""Which tokens each rank owns.

Note [Layouts]
~~~~~~~~~~~~~~
A sequence is cut among the R ring ranks; each ring rank's share is cut again, in order, among its
U Ulysses ranks. What a rank holds is always kept in increasing global position, as few *runs*
`(start, step, count)`. Sixteen tokens on four ring ranks:

    position      0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15
    contiguous    0  0  0  0  1  1  1  1  2  2  2  2  3  3  3  3    one run, step 1
    zigzag        0  0  1  1  2  2  3  3  3  3  2  2  1  1  0  0    chunks r and 2R-1-r, step 1
    striped       0  1  2  3  0  1  2  3  0  1  2  3  0  1  2  3    one run, step R
    balanced      as `owners` says, one ring rank a block           step 1

Contiguous suits windows and masks without order; zigzag and striped give every rank the same causal
work; balanced suits the mask for which `usp.partition` found the owners (Note [Balance]). Everything that
depends on a layout (sharding, masks, traffic, pictures) reads its runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Layout(StrEnum):
    """How tokens are dealt to the ring ranks; see Note [Layouts]."""

    CONTIGUOUS = "contiguous"
    ZIGZAG = "zigzag"
    STRIPED = "striped"
    BALANCED = "balanced"


class Run(NamedTuple):
    """The positions start, start + step, ... (count of them)."""

    start: int
    step: int
    count: int  # pyright: ignore[reportIncompatibleMethodOverride]

    def between(self, first: int, end: int) -> Run:
        """The part at positions [first, end); without any, the count is 0."""
        skip = max(0, -((self.start - first) // self.step))
        last = min(self.count, -((self.start - end) // self.step))
        return Run(self.start + skip * self.step, self.step, max(0, last - skip))


@dataclass(frozen=True)
class Partition:
    """Which tokens each rank of a ring x ulysses mesh owns. Hashable, and the same on all ranks.

    Args:
        seq: real tokens of the whole sequence. It is padded at its end to a multiple of `multiple`;
            padding attends nothing, is attended by nothing and gets zero gradient.
        layout: a `Layout` or its name; kept as a `Layout`.
        ring, ulysses: sizes of the two mesh axes.
        start: global position of the first token; one int, or one a batch row.
        owners: for BALANCED only, the ring rank of each of equally long blocks.

    Raises:
        ValueError: for sizes below 1, an unknown layout, or owners that do not give every ring rank
            the same number of blocks.
    """

    seq: int
    layout: Layout | str
    ring: int = 1
    ulysses: int = 1
    start: int | tuple[int, ...] = 0
    owners: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("seq", "ring", "ulysses"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name}={value}: a partition needs {name} of at least 1")
        if self.layout not in list(Layout):
            raise ValueError(f"layout={self.layout!r} is not one of {[str(x) for x in Layout]}")
        object.__setattr__(self, "layout", Layout(self.layout))
        if not isinstance(self.start, int):
            object.__setattr__(self, "start", tuple(self.start))
        if min(self.starts, default=-1) < 0:
            raise ValueError(f"start={self.start}: positions start at 0 or later, one int or one a batch row")
        if (self.layout == Layout.BALANCED) != (self.owners is not None):
            raise ValueError(
                f"layout={self.layout} with owners={self.owners}: BALANCED, and only BALANCED, is given by "
                "owners=, the ring rank of each block"
            )
        if self.owners is not None:
            object.__setattr__(self, "owners", tuple(self.owners))
            shares = [self.owners.count(rank) for rank in range(self.ring)]
            if len(set(shares)) != 1 or sum(shares) != len(self.owners) or not self.owners:
                raise ValueError(
                    f"owners={self.owners} gives ring ranks 0 to {self.ring - 1} the block counts {shares} of "
                    f"{len(self.owners)}: each needs the same number"
                )

    def __repr__(self) -> str:
        """The call that makes it, without defaults: this stands in error messages."""
        text = f"seq={self.seq}, layout={str(self.layout)!r}, ring={self.ring}, ulysses={self.ulysses}"
        text += f", start={self.start}" if self.start else ""
        return f"Partition({text}, owners={self.owners})" if self.owners else f"Partition({text})"

    @property
    def multiple(self) -> int:
        """The padded length is the next multiple of this."""
        ranks = self.ring * self.ulysses
        if self.layout == Layout.ZIGZAG:
            return math.lcm(ranks, 2 * self.ring)
        return math.lcm(ranks, len(self.owners)) if self.owners else ranks

    @property
    def padded(self) -> int:
        """Length with padding."""
        return -(-self.seq // self.multiple) * self.multiple

    @property
    def seq_ring(self) -> int:
        """Tokens of one ring rank, between the two all-to-alls."""
        return self.padded // self.ring

    @property
    def seq_local(self) -> int:
        """Tokens of one rank."""
        return self.seq_ring // self.ulysses

    @property
    def starts(self) -> tuple[int, ...]:
        """`start` as one entry, or one a batch row."""
        return (self.start,) if isinstance(self.start, int) else self.start

    def span(self, row: int = 0) -> tuple[int, int]:
        """Global positions [first, end) of the real tokens of a batch row."""
        start = self.starts[row if len(self.starts) > 1 else 0]
        return start, start + self.seq

    def runs(self, ring_rank: int, row: int = 0) -> tuple[Run, ...]:
        """Global positions that a ring rank holds (padding included), in increasing order."""
        first, step = self.span(row)[0], 1
        if self.layout == Layout.STRIPED:
            step, starts, count = self.ring, [ring_rank], self.seq_ring
        elif self.layout == Layout.CONTIGUOUS:
            starts, count = [ring_rank * self.seq_ring], self.seq_ring
        else:
            owners = self.owners or (*range(self.ring), *reversed(range(self.ring)))
            count = self.padded // len(owners)
            starts = [block * count for block, owner in enumerate(owners) if owner == ring_rank]
        runs: list[Run] = []
        for start in starts:
            if runs and runs[-1].start + runs[-1].count == first + start:  # joins the run before it
                runs[-1] = runs[-1]._replace(count=runs[-1].count + count)
            else:
                runs.append(Run(first + start, step, count))
        return tuple(runs)
