"""What a query may see: causality, windows, documents and regions, in global positions.

Note [Regions]
~~~~~~~~~~~~~~
A region is a rectangle of queries x keys with a band, `low <= key position - query position <= high`. What
causal, window and documents say is one region, or one a document. `Mask(regions=)` adds more of them:

    prefix of 3, causal after it        images at 2 to 5 and 7 to 9         documents 0 to 4 and 4 to 9,
                                        in causal text                      both of which see 0 to 2
    # # # . . . . .                     # . . . . . . . .                   # . . . . . . . .
    # # # . . . . .                     # # . . . . . . .                   # # . . . . . . .
    # # # . . . . .                     # # # # # . . . .                   # # # . . . . . .
    # # # # . . . .                     # # # # # . . . .                   # # # # . . . . .
    # # # # # . . .                     # # # # # . . . .                   # # . . # . . . .
    # # # # # # . .                     # # # # # # . . .                   # # . . # # . . .
    # # # # # # # .                     # # # # # # # . .                   # # . . # # # . .
    # # # # # # # #                     # # # # # # # # #                   # # . . # # # # .
                                        # # # # # # # # #                   # # . . # # # # #

    Mask(True, regions=[[               Mask(True, regions=[[               Mask(True,
        Region((0, 3), (0, 3)),             Region((2, 5), (2, 5)),             documents=[[(0, 4), (4, 9)]],
    ]])                                     Region((7, 9), (7, 9)),             regions=[[Region((4, 9), (0, 2))]])
                                        ]])

Chunked attention is documents of the chunk's length; attention sinks beside a window of w are
`Mask(True, w, regions=[[Region((0, seq), (0, sinks), high=0)]])`. Regions may overlap each other and the rest: what
several of them show counts once, because a region less another is again regions (at most six).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from operator import index
from typing import Any, NamedTuple

Span = tuple[int, int]
Rows = tuple[tuple[Span, ...], ...]

EVERYWHERE: Span = (-(1 << 62), 1 << 62)


class Region(NamedTuple):
    """Spans (first, end) of queries x keys with `low <= key position - query position <= high`; None is open."""

    queries: Span
    keys: Span
    low: int | None = None
    high: int | None = None


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
        regions: per batch row, or one row for all, what is visible besides: a query sees a key if causal,
            window and documents say so, or if a region does. See Note [Regions] for the usual ones.

    Padding rows have out 0, lse -inf and zero gradient.

    Raises:
        ValueError: for a window that is not a whole number from 1, spans that are empty, overlap or decrease,
            key documents that do not pair up with documents, or documents and regions of different numbers of
            batch rows.
    """

    causal: bool
    window: int | None = None
    documents: Rows | None = None
    key_documents: Rows | None = None
    regions: tuple[tuple[Region, ...], ...] | None = None

    def __post_init__(self) -> None:
        _check_kind(self.causal, self.window)
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
        if self.regions is not None:
            object.__setattr__(self, "regions", _checked_regions(self.regions))
        counts = {name: len(getattr(self, name) or ((),)) for name in ("documents", "regions")}
        if len({count for count in counts.values() if count > 1}) > 1:
            raise ValueError(f"batch rows differ: {counts}; each must be one for all or one a batch row")

    def __repr__(self) -> str:
        """The call that makes it, without defaults: this stands in error messages."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return f"Mask({', '.join(f'{name}={value}' for name, value in given.items() if value is not None)})"

    @property
    def rows(self) -> int:
        """Batch rows that the mask tells apart; 1 if all rows are alike."""
        return max(len(self.documents or ((),)), len(self.regions or ((),)))

    @classmethod
    def packed(
        cls, lengths: Sequence[int] | Sequence[Sequence[int]], *, causal: bool, window: int | None = None
    ) -> Mask:
        """Documents packed one after another from position 0: their lengths, for all rows or a list a row.

        Empty documents are allowed and vanish; what follows the last one is padding.
        """
        rows = _integers("lengths", lengths)
        for row in rows:
            if min(row, default=0) < 0:
                raise ValueError(f"lengths holds {min(row)}: a document's length is at least 0")
        return cls.from_cu_seqlens([[0, *accumulate(row)] for row in rows], causal=causal, window=window)

    @classmethod
    def padded(
        cls, lengths: Sequence[int], seq: int, side: str = "right", *, causal: bool, window: int | None = None
    ) -> Mask:
        """One document a batch row, padded to `seq` on the "right" or the "left"."""
        if side not in ("left", "right"):
            raise ValueError(f"side={side!r} is neither 'left' nor 'right'")
        rows = _integers("lengths", lengths)
        row = rows[0]
        if len(rows) > 1 or any(not 0 <= length <= seq for length in row):
            raise ValueError(f"lengths {lengths}: give one length a batch row, between 0 and seq={seq}")
        spans = [(seq - length, seq) if side == "left" else (0, length) for length in row]
        return cls(causal=causal, window=window, documents=tuple((x,) if x[0] < x[1] else () for x in spans))

    @classmethod
    def from_cu_seqlens(
        cls,
        cu_seqlens: Sequence[int] | Sequence[Sequence[int]],
        key_cu_seqlens: Sequence[int] | Sequence[Sequence[int]] | None = None,
        *,
        causal: bool,
        window: int | None = None,
    ) -> Mask:
        """Packed documents by their cumulative lengths, as varlen kernels take them: 0, end of the first, ...

        Args:
            cu_seqlens: for all rows, or a list a row; a tensor or integers. A repeated entry is an empty document.
            key_cu_seqlens: where the keys are another packed sequence: the n-th query document sees the n-th key
                document. Causal and window then count from the ends of both (bottom right, as FlashAttention
                since 2.1): the last query sees the last key.

        Raises:
            ValueError: for entries that do not begin with 0 or decrease, or numbers of documents that differ.
        """
        _check_kind(causal, window)
        offsets = _offsets("cu_seqlens", cu_seqlens)
        if key_cu_seqlens is None:
            rows = tuple(tuple(x for x in pairwise(row) if x[0] < x[1]) for row in offsets)
            return cls(causal=causal, window=window, documents=rows)
        key_offsets = _offsets("key_cu_seqlens", key_cu_seqlens)
        counts, key_counts = ([len(row) - 1 for row in x] for x in (offsets, key_offsets))
        if counts != key_counts:
            raise ValueError(
                f"cu_seqlens holds {counts} documents a row and key_cu_seqlens {key_counts}: they pair up one to one"
            )
        pairs = [
            [(q, k) for q, k in zip(pairwise(row), pairwise(key_row), strict=True) if q[0] < q[1] and k[0] < k[1]]
            for row, key_row in zip(offsets, key_offsets, strict=True)
        ]
        if not causal and window is None:
            documents, key_documents = (tuple(tuple(x[n] for x in row) for row in pairs) for n in (0, 1))
            return cls(causal=False, documents=documents, key_documents=key_documents)
        return cls._of_regions([_region(q, k, causal, window, k[1] - q[1]) for q, k in row] for row in pairs)

    @classmethod
    def from_position_ids(
        cls,
        position_ids: Sequence[int] | Sequence[Sequence[int]],
        attention_mask: Sequence[Sequence[int]] | None = None,
        *,
        causal: bool,
        window: int | None = None,
    ) -> Mask:
        """Packed documents by position ids that restart at 0: (seq,) for all rows, or (batch, seq).

        Args:
            position_ids: of the whole sequence, not of a shard. Where the attention mask is 0 they do not count.
            attention_mask: as in `from_attention_mask`.

        Raises:
            ValueError: for ids that neither go on by 1 nor restart at 0.
        """
        rows = _equal_rows("position_ids", position_ids)
        kept = [[1] * len(row) for row in rows]
        if attention_mask is not None:
            kept = _attention_mask(attention_mask)
            if (len(kept), len(kept[0])) != (len(rows), len(rows[0])):
                raise ValueError(
                    f"position_ids is ({len(rows)}, {len(rows[0])}) and attention_mask ({len(kept)}, {len(kept[0])}): "
                    "they belong together one to one"
                )
        numbered = []
        for ids, real in zip(rows, kept, strict=True):
            numbers, last, count = [], None, 0
            for n, (position, there) in enumerate(zip(ids, real, strict=True)):
                if there:
                    if position == 0:
                        count += 1
                    elif last is None or position != last + 1:
                        raise ValueError(
                            f"position_ids holds {position} at index {n} after {last}: they go on by 1 or restart at "
                            "0; give the ids of the whole sequence, and attention_mask= if there is padding"
                        )
                    last = position
                numbers.append((there, count) if there else None)
            numbered.append(numbers)
        return cls._of_numbers(numbered, causal, window)

    @classmethod
    def from_attention_mask(
        cls, attention_mask: Sequence[Sequence[int]], *, causal: bool, window: int | None = None
    ) -> Mask:
        """A (batch, seq) attention mask as transformers models take it: 0 or False is padding, anywhere in a row.

        Other values number the documents: tokens of one number see each other (all 1, or True, in the usual mask).

        Raises:
            ValueError: for another shape, values that are not whole numbers from 0 (dense and additive masks), or
                a document in more than 64 runs with holes between.
        """
        rows = _attention_mask(attention_mask)
        return cls._of_numbers([[x or None for x in row] for row in rows], causal, window)

    @classmethod
    def _of_numbers(cls, rows: Sequence[Sequence[object]], causal: bool, window: int | None) -> Mask:
        """Tokens of one number see each other; None is padding."""
        _check_kind(causal, window)
        spans: list[dict[object, list[Span]]] = []  # by row and number
        for row in rows:
            end, found = 0, {}
            for number, same in groupby(row):
                first, end = end, end + len(list(same))
                if number is not None:
                    found.setdefault(number, []).append((first, end))
            spans.append(found)
        if all(len(parts) == 1 for found in spans for parts in found.values()):
            return cls(causal, window, documents=tuple(tuple(x for (x,) in found.values()) for found in spans))
        if (worst := max(len(parts) for found in spans for parts in found.values())) > _RUNS:
            raise ValueError(
                f"a document is in {worst} runs of tokens with others or padding between; up to {_RUNS} are taken, "
                "since each pair of runs is a kernel call: move padding to an end of the row, and documents together"
            )
        return cls._of_regions(
            [_region(q, k, causal, window) for parts in found.values() for q in parts for k in parts] for found in spans
        )

    @classmethod
    def _of_regions(cls, rows: Iterable[Iterable[Region]]) -> Mask:
        """Nothing is visible but the regions."""
        return cls(False, documents=((),), regions=tuple(tuple(x for x in row if _visible(x)) for row in rows))

    def end(self, row: int = 0) -> int:
        """The first position behind everything that a batch row's documents and regions name."""
        spans = [*_row(self.documents or ((),), row), *_row(self.key_documents or ((),), row)]
        spans += [span for region in _row(self.regions or ((),), row) for span in region[:2]]
        return max((end for _, end in spans), default=0)

    def disjoint_regions(self, row: int = 0) -> tuple[Region, ...]:
        """Everything that a batch row's queries see, each pair of query and key in one region."""
        return self._disjoint[row if self.rows > 1 else 0]

    @cached_property
    def ordered(self) -> bool:
        """Whether it matters somewhere which of query and key comes first, or how far apart they are."""
        return any(region.low is not None or region.high is not None for row in self._disjoint for region in row)

    @cached_property
    def _disjoint(self) -> tuple[tuple[Region, ...], ...]:
        rows = []
        for row in range(self.rows):
            queries = _row(self.documents or ((EVERYWHERE,),), row)
            keys = queries if self.key_documents is None else _row(self.key_documents, row)
            base = [_region(q, k, self.causal, self.window) for q, k in zip(queries, keys, strict=True)]
            rows.append(_union(base, _row(self.regions or ((),), row)))
        return tuple(rows)


_RUNS = 64  # of one document, when there are holes in it


def _check_kind(causal: bool, window: int | None) -> None:
    if not isinstance(causal, bool):
        raise ValueError(f"causal={causal!r} is neither True nor False")
    if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < 1):
        raise ValueError(
            f"window={window!r}: a window counts the query's own position, so it is a whole number from 1; "
            "None is no window"
        )


def joined(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Their union: not empty, increasing, apart from each other."""
    found: list[Span] = []
    for first, end in sorted(spans):
        if found and first <= found[-1][1] and first < end:
            found[-1] = found[-1][0], max(found[-1][1], end)
        elif first < end:
            found.append((first, end))
    return tuple(found)


def _row(rows: Sequence[tuple[Any, ...]], row: int) -> tuple[Any, ...]:
    return rows[row if len(rows) > 1 else 0]


def _region(queries: Span, keys: Span, causal: bool, window: int | None, shift: int = 0) -> Region:
    """Causal and window from the diagonal `key position - query position = shift`."""
    low = None if window is None else shift + 1 - window
    high = shift if causal else None if window is None else shift + window - 1
    return Region(queries, keys, low, high)


def _union(base: Sequence[Region], regions: Iterable[Region]) -> tuple[Region, ...]:
    """Base (disjoint, by increasing queries) stays as it is; the regions lose what was there before them."""
    found, recent = list(base), []
    first_queries, end_queries = [x.queries[0] for x in base], [x.queries[1] for x in base]
    for region in sorted(regions, key=_openness):
        near = base[bisect_right(end_queries, region.queries[0]) : bisect_left(first_queries, region.queries[1])]
        recent = [x for x in recent if x.queries[1] > region.queries[0]]
        pieces = [region]
        for other in (*near, *recent):
            pieces = [part for piece in pieces for part in _less(piece, other)]
        recent += pieces
        found += pieces
    return tuple(found)


def _openness(region: Region) -> tuple:
    """A total order: by place, open bands first, so that what a narrower band shows vanishes in them."""
    low, high = region.low, region.high
    return region.queries, region.keys, (low is not None) + (high is not None), low or 0, high or 0


def _less(region: Region, other: Region) -> list[Region]:
    """What of a region is not in the other, as disjoint regions."""
    (q0, q1), (k0, k1), low, high = region
    a, b = max(q0, other.queries[0]), min(q1, other.queries[1])
    c, d = max(k0, other.keys[0]), min(k1, other.keys[1])
    if (
        a >= b
        or c >= d
        or not _visible(Region((a, b), (c, d), _most(low, other.low, max), _most(high, other.high, min)))
    ):
        return [region]
    parts = [
        Region((q0, a), (k0, k1), low, high),
        Region((b, q1), (k0, k1), low, high),
        Region((a, b), (k0, c), low, high),
        Region((a, b), (d, k1), low, high),
    ]
    if other.low is not None:
        parts.append(Region((a, b), (c, d), low, _most(high, other.low - 1, min)))
    if other.high is not None:
        parts.append(Region((a, b), (c, d), _most(low, other.high + 1, max), high))
    return [x for x in parts if _visible(x)]


def _visible(region: Region) -> bool:
    """Whether it holds a pair."""
    (q0, q1), (k0, k1), low, high = region
    low, high = _most(low, k0 - q1 + 1, max), _most(high, k1 - 1 - q0, min)
    return q0 < q1 and k0 < k1 and low <= high


def _most(a: int | None, b: int | None, which):
    """Of two bounds the tighter; None is open."""
    return b if a is None else a if b is None else which(a, b)


def _integers(name: str, values) -> list[list[int]]:
    """One row or several of whole numbers, from tensors, arrays or sequences with one or two dimensions."""
    values = _listed(name, values)
    rows: list[Any] = [_listed(name, x) if isinstance(x, Iterable) else x for x in values]
    if not any(isinstance(x, list) for x in rows):
        rows = [rows]
    found = []
    for row in rows:
        if not isinstance(row, list):
            raise ValueError(f"{name} mixes numbers and rows: give one row for all batch rows, or one a batch row")
        for x in row:
            if not isinstance(x, int):
                kind = "has more than two dimensions" if isinstance(x, Iterable) else f"holds {x!r}"
                raise ValueError(
                    f"{name} {kind}: it is one row, or (batch, seq) rows, of whole numbers; dense and additive masks "
                    "have no blocks, describe them by causal, window, documents and regions"
                )
        found.append([int(x) for x in row])
    if not any(found):
        raise ValueError(f"{name} is empty: give one row for all batch rows, or one a batch row")
    return found


def _listed(name: str, values) -> list:
    """A list of numbers or rows, from a tensor, an array or a sequence, whose items may be tensors too."""
    if hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise ValueError(f"{name} is {values!r}: give a tensor or a sequence of whole numbers, or rows of them")
    return [x.tolist() if hasattr(x, "tolist") else x for x in values]


def _equal_rows(name: str, values) -> list[list[int]]:
    rows = _integers(name, values)
    if len({len(row) for row in rows}) > 1:
        raise ValueError(f"{name} has rows of {sorted({len(row) for row in rows})} tokens: give (batch, seq)")
    return rows


def _attention_mask(values) -> list[list[int]]:
    rows = _equal_rows("attention_mask", values)
    for row in rows:
        if min(row) < 0:
            raise ValueError(
                f"attention_mask holds {min(row)}: 0 is padding, other tokens have the number of their document; "
                "additive masks have no blocks, describe them by causal, window, documents and regions"
            )
    return rows


def _offsets(name: str, values) -> list[list[int]]:
    rows = _integers(name, values)
    for row in rows:
        if not row or row[0] != 0:
            raise ValueError(f"{name} begins with {row[:1]}: cumulative lengths begin with 0")
        if falls := [(a, b) for a, b in pairwise(row) if a > b]:
            raise ValueError(f"{name} goes from {falls[0][0]} to {falls[0][1]}: cumulative lengths never decrease")
    return rows


def _spans(name: str, rows) -> Rows:
    """Hashable rows of spans, checked."""
    checked = []
    for row in _some_rows(name, rows):
        position, spans = 0, []
        for span in _sequence(name, row):
            first, end = _span(name, span)
            if first < position or end <= first:
                raise ValueError(
                    f"{name} has the span {(first, end)} after position {position}: spans are not empty, "
                    "increase and do not overlap"
                )
            position = end
            spans.append((first, end))
        checked.append(tuple(spans))
    return tuple(checked)


def _checked_regions(rows) -> tuple[tuple[Region, ...], ...]:
    """Hashable rows of regions, checked."""
    found = []
    for row in _some_rows("regions", rows):
        regions = []
        for given in _sequence("regions", row):
            if not isinstance(given, Sequence) or not 2 <= len(given) <= 4 or isinstance(given[0], int):
                raise ValueError(
                    f"regions holds {given!r}: give one row of Region(queries, keys, low, high) for all batch rows, "
                    "or one row a batch row"
                )
            queries, keys = (_span("regions", span) for span in given[:2])
            try:
                low, high = (None if x is None else index(x) for x in (*given[2:], None, None)[:2])
            except TypeError:
                raise ValueError(f"{given}: low and high are whole numbers or None") from None
            region = Region(queries, keys, low, high)
            if min(queries[0], keys[0]) < 0:
                raise ValueError(f"{region}: positions start at 0")
            if not _visible(region):
                raise ValueError(f"{region} shows nothing: spans are (first, end), and low is at most high")
            regions.append(region)
        found.append(tuple(regions))
    return tuple(found)


def _some_rows(name: str, rows) -> list:
    found = _sequence(name, rows)
    if not found:
        raise ValueError(f"{name} is empty: give one row for all batch rows, or one a batch row")
    return found


def _sequence(name: str, rows) -> list:
    """Rows, or what is in a row."""
    if not isinstance(rows, Iterable) or isinstance(rows, str):
        raise ValueError(f"{name} holds {rows!r} where a row is: give one row for all batch rows, or one a batch row")
    return list(rows)


def _span(name: str, span) -> Span:
    try:
        first, end = (index(x) for x in span)
    except (TypeError, ValueError):
        raise ValueError(
            f"{name} holds {span!r} where a span (first, end) of whole numbers is: give one row of spans for all batch "
            "rows, or one a batch row"
        ) from None
    return first, end
