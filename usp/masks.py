"""What a query may see: causality, windows and documents, in global positions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

Span = tuple[int, int]
Rows = tuple[tuple[Span, ...], ...]

EVERYWHERE: Span = (-(1 << 62), 1 << 62)


class Region(NamedTuple):
    """Queries x keys with `low <= key position - query position <= high`; None is open."""

    queries: Span
    keys: Span
    low: int | None
    high: int | None


@dataclass(frozen=True)
class Mask:
    """Which keys each query sees. Positions are global, so a mask does not know how tokens are laid out.

    Args:
        causal: a query sees keys at its own position and before.
        window: a query at i sees a key at j only if i - j < window, and j - i < window too when not
            causal. The query's own position counts: a window of 1 is itself alone.
        documents: per batch row, or one row for all, increasing disjoint spans (first, end). Tokens see
            only their own document; tokens outside all documents are padding.
        key_documents: for keys that are another sequence: the n-th query span sees the n-th of these.

    Padding rows have out 0, lse -inf and zero gradient.

    Raises:
        ValueError: for a window below 1, spans that overlap or decrease, or key documents that do not
            pair up with documents.
    """

    causal: bool
    window: int | None = None
    documents: Rows | None = None
    key_documents: Rows | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"window={self.window}: a window counts the query's own position, so it is at least 1")
        for name in ("documents", "key_documents"):
            if (rows := getattr(self, name)) is not None:
                object.__setattr__(self, name, _spans(name, rows))
        if self.key_documents is not None:
            spans = [len(row) for row in self.documents or ()]
            key_spans = [len(row) for row in self.key_documents]
            if spans != key_spans:
                raise ValueError(
                    f"documents has {spans} spans a row and key_documents {key_spans}: they pair up one to one"
                )

    @property
    def rows(self) -> int:
        """Batch rows that the mask tells apart; 1 if all rows are alike."""
        return len(self.documents) if self.documents is not None else 1

    @classmethod
    def packed(
        cls, lengths: Sequence[int] | Sequence[Sequence[int]], *, causal: bool, window: int | None = None
    ) -> Mask:
        """Documents packed one after another from position 0: their lengths, for all rows or a list a row.

        Empty documents are allowed and vanish; what follows the last one is padding.
        """
        flat = all(not isinstance(x, Iterable) or getattr(x, "ndim", 1) == 0 for x in lengths)
        rows = [lengths] if flat else lengths
        documents = []
        for row in ([int(x) for x in row] for row in rows):  # pyright: ignore
            if min(row, default=0) < 0:
                raise ValueError(f"lengths {row}: a document's length is at least 0")
            ends = list(accumulate(row))
            documents.append(tuple((end - length, end) for end, length in zip(ends, row, strict=True) if length))
        return cls(causal=causal, window=window, documents=tuple(documents))

    @classmethod
    def padded(
        cls, lengths: Sequence[int], seq: int, side: str = "right", *, causal: bool, window: int | None = None
    ) -> Mask:
        """One document a batch row, padded to `seq` on the "right" or the "left"."""
        if side not in ("left", "right"):
            raise ValueError(f"side={side!r} is neither 'left' nor 'right'")
        if any(not 0 <= length <= seq for length in lengths):
            raise ValueError(f"lengths {list(lengths)} are not all between 0 and seq={seq}")
        spans = [(seq - length, seq) if side == "left" else (0, length) for length in lengths]
        return cls(causal=causal, window=window, documents=tuple((x,) if x[0] < x[1] else () for x in spans))

    def regions(self, row: int = 0) -> tuple[Region, ...]:
        """The mask of a batch row as disjoint regions."""
        high = 0 if self.causal else None
        low = None
        if self.window is not None:
            low, high = 1 - self.window, 0 if self.causal else self.window - 1
        if self.documents is None:
            return (Region(EVERYWHERE, EVERYWHERE, low, high),)
        row = row if self.rows > 1 else 0
        keys = self.documents[row] if self.key_documents is None else self.key_documents[row]
        return tuple(Region(q, k, low, high) for q, k in zip(self.documents[row], keys, strict=True))


def _spans(name: str, rows: Iterable[Iterable[Sequence[int]]]) -> Rows:
    """Hashable rows of spans, checked."""
    checked = tuple(tuple((int(first), int(end)) for first, end in row) for row in rows)
    if not checked:
        raise ValueError(f"{name} is empty: give one row for all batch rows, or one a batch row")
    for row in checked:
        position = 0
        for first, end in row:
            if first < position or end <= first:
                raise ValueError(
                    f"{name} has the span {(first, end)} after position {position}: spans are not empty, "
                    "increase and do not overlap"
                )
            position = end
    return checked
