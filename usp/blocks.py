"""Which rectangles of (my queries) x (that rank's keys) must be computed, and when.

A partition and a mask together answer this; the ring runs the blocks, the cost model prices them, the
merge knows from them which rows saw no key. Integers only: no process group and no tensor.

Note [Blocks]
~~~~~~~~~~~~~
Local order is global order, so what a query sees of a run of keys is an interval that moves with the
query: a rectangle with a band, `low <= column - row <= high`. Every block is trimmed (each row sees a
column, each column is seen), the blocks of one (rank, source) are disjoint, and four kinds remain:

    FULL            CAUSAL (None, 0)        EDGE (low, None)        BAND (low, high)
    # # # #         # . . .                 # # # #                 # # . . .
    # # # #         # # . .                 . # # #                 # # # . .
    # # # #         # # # .                 . . # #                 . # # # .
                    # # # #                 . . . #                 . . # # #

CAUSAL starts in the top left corner and is square or taller; EDGE, a window's far end, is the same
seen from the bottom right: low = columns - rows. What a causal or edge rectangle is wider is FULL.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Container, Iterable, Iterator, Sequence
from enum import Enum
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from usp.ledger import Ledger
from usp.masks import EVERYWHERE, Mask, Region, Span, joined
from usp.partitions import Layout, Partition, Run

Tokens = Partition | Ledger  # what queries or keys are: of a call, or what a cache holds


class Kind(Enum):
    """The shape of a block's band; see Note [Blocks]."""

    FULL = "full"
    CAUSAL = "causal"
    EDGE = "edge"
    BAND = "band"


class Block(NamedTuple):
    """Local rows x local columns; (i, j) is visible iff low <= (j - k.start) - (i - q.start) <= high."""

    q: range
    k: range
    low: int | None = None
    high: int | None = None

    @property
    def kind(self) -> Kind:
        if self.low is None:
            return Kind.FULL if self.high is None else Kind.CAUSAL
        return Kind.EDGE if self.high is None else Kind.BAND

    @property
    def pairs(self) -> int:
        """Visible (query, key) pairs: the block's work."""
        return visible_pairs(len(self.q), len(self.k), self.low, self.high)


def visible_pairs(rows: int, columns: int, low: int | None, high: int | None) -> int:
    """(row, column) pairs of a rectangle with `low <= column - row <= high`."""

    def below(high: int) -> int:
        return _stairs(high + rows, columns) - _stairs(high, columns)

    found = rows * columns if high is None else below(high)
    return found if low is None else found - below(low - 1)


def _stairs(last: int, columns: int) -> int:
    """min(x, columns), summed over x from 1 to last."""
    if last <= columns:
        return last * (last + 1) // 2 if last > 0 else 0
    return columns * (columns + 1) // 2 + columns * (last - columns)


class Piece(NamedTuple):
    """Part of a rank's tokens: a run and the local index where it begins."""

    first: int
    run: Run


def blocks(
    mask: Mask, queries: Partition, rank: int, keys: Tokens, source: int, row: int = 0, reach: int | None = None
) -> tuple[Block, ...]:
    """What ring rank `rank` computes with the keys of ring rank `source`, for one batch row.

    Indices count tokens of a ring rank's share (0 to seq_ring). With a reach, the keys of a block are all at or
    before its queries or all behind them; and its queries are at most `reach` positions apart, unless there is no
    key between them.

    Raises:
        ValueError: what `batch_rows` raises.
    """
    batch_rows(mask, queries, keys)
    q_runs, k_runs = queries.runs(rank, row), keys.runs(source, row)
    whole = mask.disjoint_regions(row)
    regions = whole if reach is None else _cut(whole, queries.span(row), keys.span(row), reach)
    found: list[Block] = []
    for region in regions:
        q_pieces = _inside(q_runs, region.queries, queries.span(row))
        k_pieces = _inside(k_runs, region.keys, keys.span(row))
        found += _joined(_rectangles(region.low, region.high, q_pieces, k_pieces))
    return tuple(sorted(found, key=lambda block: (block.q.start, block.k.start)))


@lru_cache(maxsize=64)
def _cut(regions: tuple[Region, ...], q_real: Span, k_real: Span, reach: int) -> tuple[Region, ...]:
    return tuple(part for region in regions for part in _sides(region, q_real, k_real, reach))


def _sides(region: Region, q_real: Span, k_real: Span, reach: int) -> Iterator[Region]:
    """A region cut as `blocks` promises: in halves, so that what is left to cut is only what is near the diagonal."""
    (a, b), (c, d) = _both(region.queries, q_real), _both(region.keys, k_real)
    (nearest, furthest), (low, high) = (c - b + 1, d - 1 - a), region[2:]
    if a >= b or c >= d or (high is not None and nearest > high) or (low is not None and furthest < low):
        return
    region = region._replace(queries=(a, b), keys=(c, d))
    if d - 1 <= a or b <= c:
        yield region
    elif b - a <= reach:
        yield region._replace(high=0 if region.high is None else min(region.high, 0))
        yield region._replace(low=1 if region.low is None else max(region.low, 1))
    else:
        middle = (a + b) // 2
        for q_half in ((a, middle), (middle, b)):
            for k_half in ((EVERYWHERE[0], middle), (middle, EVERYWHERE[1])):
                yield from _sides(region, q_half, k_half, reach)


def _both(x: Span, y: Span) -> Span:
    return max(x[0], y[0]), min(x[1], y[1])


def batch_rows(mask: Mask, queries: Partition, keys: Tokens) -> int:
    """Batch rows whose blocks may differ; 1 if the whole batch is alike.

    Raises:
        ValueError: if mask and starts speak of different numbers of rows, only one of the partitions is striped
            over several ranks and the mask has an order, or a causal mask meets queries and keys of other
            lengths whose starts are not told apart.
    """
    counts = {"mask": mask.rows, "queries' start": len(queries.starts), "keys' start": len(keys.starts)}
    several = {name: count for name, count in counts.items() if count > 1}
    if len(set(several.values())) > 1:
        raise ValueError(f"batch rows differ: {several}; each must be one for all or one a batch row")
    rows = max(counts.values())
    if isinstance(keys, Ledger):  # whose runs are looked at one by one, and who has a start of its own
        return rows
    if striped_apart(queries, keys) and mask.ordered:
        raise ValueError(
            f"queries are {queries.layout} and keys are {keys.layout} over {queries.ring} ring ranks: under a mask "
            "with an order (causal, window) striped shards meet only striped shards; use one layout for both"
        )
    start = keys.span()[0]
    alike = all(queries.span(row)[0] == keys.span(row)[0] for row in range(rows))
    if mask.causal and queries.seq != keys.seq and alike:
        raise ValueError(
            f"causal attention of {queries.seq} queries to {keys.seq} keys, both starting at position {start}: "
            f"give the queries' partition its start (start={start + abs(keys.seq - queries.seq)} if they are "
            "the last tokens), or cut the keys that no query sees"
        )
    return rows


def striped_apart(*partitions: Tokens) -> bool:
    """Whether some are striped over several ranks and others are not: such tokens meet only without an order."""
    return len({_striped(tokens) for tokens in partitions}) > 1


def _striped(tokens: Tokens) -> bool:
    return isinstance(tokens, Partition) and tokens.layout == Layout.STRIPED and tokens.ring > 1


def span_of(*partitions: Tokens) -> int:
    """How many positions there are from the first token to the last."""
    spans = [tokens.span(row) for tokens in partitions for row in range(len(tokens.starts))]
    return max([end for _, end in spans]) - min([first for first, _ in spans])


Columns = tuple[range, ...]  # of a source's keys: not empty, increasing, apart from each other


def needed(mask: Mask, queries: Partition, keys: Tokens) -> tuple[tuple[Columns, ...], ...]:
    """[rank][source]: which of that ring rank's keys this one sees, in any batch row.

    Of striped keys, where every rank holds some of every document: all from the first to the last that anybody may see.
    """
    if _striped(keys):
        return _needed_hulls(mask, queries, keys)
    ranks = range(queries.ring)
    found: list[list[list[range]]] = [[[] for _ in ranks] for _ in ranks]
    for row in range(batch_rows(mask, queries, keys)):
        for region in mask.disjoint_regions(row):
            for rank, source, rectangles, (_, first) in _meetings(region, queries, keys, row):
                if rectangles:
                    columns = found[rank][source]
                    columns += [range(first + block.k.start, first + block.k.stop) for block in rectangles]
    return tuple(tuple([_union(x) if len(x) > 1 else tuple(x) for x in row]) for row in found)


def _needed_hulls(mask: Mask, queries: Partition, keys: Tokens) -> tuple[tuple[Columns, ...], ...]:
    """`needed` of striped keys. A few documents tell for most masks that everybody needs everybody's keys."""
    ranks = range(queries.ring)
    hulls = [_union(_hull(mask, keys, source)) for source in ranks]
    regions = [(row, x) for row in range(batch_rows(mask, queries, keys)) for x in mask.disjoint_regions(row)]
    found = [[False] * queries.ring for _ in ranks]
    asked = _ASKED // queries.ring**2
    for row, region in regions[:asked]:
        for rank, source, rectangles, _ in _meetings(region, queries, keys, row):
            found[rank][source] |= bool(rectangles)
        if all(map(all, found)):
            break
    else:
        if len(regions) > asked:
            work = loads(mask, queries, keys)
            found = [[source in work[rank] for source in ranks] for rank in ranks]
    return tuple(tuple(hulls[source] if found[rank][source] else () for source in ranks) for rank in ranks)


_ASKED = 1 << 18  # pairs of ranks


class Load(NamedTuple):
    """Work of a rank with one source's keys, in all batch rows that differ."""

    pairs: int  # visible (query, key)
    rows: int  # of all blocks: what is merged
    columns: int
    blocks: int

    def __add__(self, other: tuple) -> Load:
        return Load(*(a + b for a, b in zip(self, other, strict=True)))


def loads(mask: Mask, queries: Partition, keys: Tokens) -> tuple[dict[int, Load], ...]:
    """[rank][source]: the sums over `blocks`, without making those that look alike twice; no entry without work.

    Dense masks, or a thousand documents, on 1,024 ranks take a few seconds at most.
    """
    if isinstance(keys, Partition) and _striped(queries) and _striped(keys):
        return _striped_loads(mask, queries, keys)
    found: list[dict[int, Load]] = [{} for _ in range(queries.ring)]
    sums: dict[int, Load] = {}  # by rectangles that are shared between pairs
    for row in range(batch_rows(mask, queries, keys)):
        for region in mask.disjoint_regions(row):
            for rank, source, rectangles, _ in _meetings(region, queries, keys, row):
                if not rectangles:
                    continue
                if (load := sums.get(id(rectangles))) is None:
                    joined = _joined(iter(rectangles))
                    sizes = [(x.pairs, len(x.q), len(x.k), 1) for x in joined]
                    load = sums[id(rectangles)] = Load(*map(sum, zip(*sizes, strict=True)))
                found[rank][source] = found[rank][source] + load if source in found[rank] else load
            sums.clear()  # their rectangles may be gone
    return tuple(found)


def sizes(mask: Mask, queries: Partition, keys: Tokens, ranks: Sequence[int]) -> list[dict[int, list[tuple[int, int]]]]:
    """[n][source]: queries and keys of each of the `blocks` of ranks[n], in their order, row by row."""
    found: dict[int, dict[int, list[tuple[int, int]]]] = {rank: {} for rank in ranks}
    for row in range(batch_rows(mask, queries, keys)):
        here: dict[tuple[int, int], list[tuple[int, int, int, int]]] = {}
        for region in mask.disjoint_regions(row):
            joined: dict[int, list[Block]] = {}  # by rectangles that are shared between pairs
            for rank, source, rectangles, (q_first, k_first) in _meetings(region, queries, keys, row, found):
                if rectangles:
                    some = joined.get(id(rectangles)) or joined.setdefault(id(rectangles), _joined(iter(rectangles)))
                    places = here.setdefault((rank, source), [])
                    places += [(q_first + x.q.start, k_first + x.k.start, len(x.q), len(x.k)) for x in some]
        for (rank, source), places in here.items():
            found[rank].setdefault(source, []).extend((q, k) for _, _, q, k in sorted(places))
    return [found[rank] for rank in ranks]


def _striped_loads(mask: Mask, queries: Partition, keys: Partition) -> tuple[dict[int, Load], ...]:
    """`loads` where every rank has some of everything: a million pairs a region, on 1,024 ranks.

    In the order of their first positions, what a rank has to do with each source changes only where sources begin to
    hold a token less, or one end of the band moves on by an index. So sums are kept as differences between neighbours,
    the four of a load in one integer.
    """
    ring = queries.ring
    steps = [[0] * (ring + 1) for _ in range(ring)]
    known: dict[tuple[int, int, int | None, int | None], int] = {}

    def packed(rows: int, columns: int, low: int | None, high: int | None) -> int:
        pieces = [Piece(0, Run(0, 1, rows))], [Piece(0, Run(0, 1, columns))]
        found = _joined(_rectangles(low, high, *pieces))
        return sum(x.pairs + (len(x.q) << _FIELD) + (len(x.k) << 2 * _FIELD) + (1 << 3 * _FIELD) for x in found)

    for row in range(batch_rows(mask, queries, keys)):
        q_start, k_start = queries.span(row)[0], keys.span(row)[0]
        for q_span, k_span, low, high in mask.disjoint_regions(row):
            (a, b), (c, d) = _both(q_span, queries.span(row)), _both(k_span, keys.span(row))
            holders = min(ring, d - c)
            for i in range(min(ring, b - a) if holders > 0 else 0):
                mine, apart = steps[(a + i - q_start) % ring], c - a - i
                rows = -((a + i - b) // ring)
                edges = [holders, (d - c) % ring]
                if high is not None:
                    edges.append((high - apart) % ring + 1)
                if low is not None:
                    edges.append(ring - (apart - low) % ring)
                j = 0
                for end in sorted(edges):
                    if not j < end <= holders:
                        continue
                    key = (
                        rows,
                        -((c + j - d) // ring),
                        None if low is None else -((apart + j - low) // ring),
                        None if high is None else (high - apart - j) // ring,
                    )
                    if (load := known.get(key)) is None:
                        load = known[key] = packed(*key)
                    if load:
                        first, last = (c + j - k_start) % ring, (c + end - 1 - k_start) % ring + 1
                        mine[first] += load
                        mine[last] -= load
                        if last <= first:  # round the end
                            mine[0] += load
                            mine[ring] -= load
                    j = end
    field = (1 << _FIELD) - 1
    return tuple(
        {
            source: Load(*(x >> n * _FIELD & field for n in range(4)))
            for source, x in enumerate(accumulate(mine[:-1]))
            if x
        }
        for mine in steps
    )


_FIELD = 80  # bits: more than any sum has


def _meetings(
    region: Region, queries: Partition, keys: Tokens, row: int, ranks: Container[int] | None = None
) -> Iterator[tuple[int, int, tuple[Block, ...], tuple[int, int]]]:
    """(rank, source, rectangles, where they begin) of the ranks that may hold tokens of a region.

    What lies alike towards each other is the same tuple of rectangles, counted from the first token of each side.
    On 1,024 ranks there are a million pairs, and few that differ.
    """
    low, high = region.low, region.high
    shapes: dict[tuple, int] = {}
    sides = []
    for tokens, span in ((queries, region.queries), (keys, region.keys)):
        held = []
        for rank, runs in _holders(tokens, row, span):
            if pieces := _inside(runs, span, tokens.span(row)):
                first = pieces[0].first
                shape = tuple((x.first - first, x.run.step, x.run.count) for x in pieces)
                ends = [(x.run.start, x.run.start + (x.run.count - 1) * x.run.step) for x in pieces]
                held.append(
                    (
                        rank,
                        [x._replace(first=x.first - first) for x in pieces],
                        shapes.setdefault(shape, len(shapes)),
                        ends,
                        first,
                    )
                )
        sides.append(held)
    known: dict[tuple, tuple[Block, ...]] = {}
    for rank, q_pieces, q_shape, q_ends, q_first in sides[0]:
        if ranks is not None and rank not in ranks:
            continue
        for source, k_pieces, k_shape, k_ends, k_first in sides[1]:
            towards = q_shape, k_shape, q_ends == k_ends, *_relations(q_ends, k_ends, low, high)
            if (rectangles := known.get(towards)) is None:
                rectangles = known[towards] = tuple(_rectangles(low, high, q_pieces, k_pieces))
            yield rank, source, rectangles, (q_first, k_first)


def _relations(q_ends: Sequence[Span], k_ends: Sequence[Span], low: int | None, high: int | None) -> list[int | bool]:
    """Of each run of queries to each run of keys, by their first and last positions: sees all, nothing, or how far
    they lie apart."""
    found: list[int | bool] = []
    for q_first, q_last in q_ends:
        for k_first, k_last in k_ends:
            if (high is not None and k_first - q_last > high) or (low is not None and k_last - q_first < low):
                found.append(False)
            elif (high is None or k_last - q_first <= high) and (low is None or low <= k_first - q_last):
                found.append(True)
            else:
                found.append(k_first - q_first + _APART)
    return found


_APART = 1 << 62  # so that no distance is taken for True or False


def _hull(mask: Mask, keys: Tokens, source: int) -> list[range]:
    """A source's keys between the first and the last that any query may see, in any batch row."""
    found = []
    for row in range(max(mask.rows, len(keys.starts))):
        if regions := mask.disjoint_regions(row):
            span = min(x.keys[0] for x in regions), max(x.keys[1] for x in regions)
            pieces = _inside(keys.runs(source, row), span, keys.span(row))
            found += [range(x.first, x.first + x.run.count) for x in pieces]
    return found


def carried(need: Sequence[Sequence[Columns]]) -> tuple[Columns, ...]:
    """[source]: which of its keys leave home, in one message: those that any other rank sees."""
    ranks = range(len(need))
    return tuple(_union({x for rank in ranks if rank != source for x in need[rank][source]}) for source in ranks)


def in_message(block: Block, columns: Columns) -> Block:
    """The block, with its keys counted in a message that holds only these columns."""
    before = sum(len(x) for x in columns if x.stop <= block.k.start)
    (here,) = (x for x in columns if x.start <= block.k.start < x.stop)
    first = before + block.k.start - here.start
    return block._replace(k=range(first, first + len(block.k)))


def _union(ranges: Iterable[range]) -> Columns:
    return tuple(range(*span) for span in joined((x.start, x.stop) for x in ranges))


def _holders(tokens: Tokens, row: int, span: Span) -> Iterator[tuple[int, tuple[Run, ...]]]:
    """The ring ranks that may hold tokens of a span, with all their runs; each once."""
    if isinstance(tokens, Ledger):  # whose runs lie among each other
        yield from ((rank, tokens.runs(rank, row)) for rank in range(tokens.ring))
        return
    owners, starts, runs = _by_position(tokens, row)
    if tokens.layout == Layout.STRIPED:
        yield from enumerate(runs)
        return
    first = max(0, bisect_right(starts, span[0]) - 1)
    last = bisect_left(starts, span[1])
    for rank in sorted(set(owners[first:last])):
        yield rank, runs[rank]


@lru_cache(maxsize=64)
def _by_position(tokens: Partition, row: int) -> tuple[list[int], list[int], list[tuple[Run, ...]]]:
    """Owner and start of every run, by position; and all ranks' runs."""
    runs = [tokens.runs(rank, row) for rank in range(tokens.ring)]
    by_start = sorted((run.start, rank) for rank in range(tokens.ring) for run in runs[rank])
    return [rank for _, rank in by_start], [start for start, _ in by_start], runs


def _inside(runs: Sequence[Run], region: Span, real: Span) -> list[Piece]:
    """The parts of a rank's runs that lie in a span and are real tokens."""
    first, end = _both(region, real)
    pieces, index = [], 0
    for run in runs:
        part = run.between(first, end)
        if part.count:
            pieces.append(Piece(index + (part.start - run.start) // run.step, part))
        index += run.count
    return pieces


def _rectangles(low: int | None, high: int | None, q_pieces: list[Piece], k_pieces: list[Piece]) -> Iterator[Block]:
    """One region's blocks, run by run."""
    if low is None and (high is None or (high == 0 and q_pieces == k_pieces)):
        # Only the order of positions counts, and local order is that order: one rectangle for all runs.
        q_pieces, k_pieces = _as_one(q_pieces), _as_one(k_pieces)
    for q in q_pieces:
        full, partly = [], []
        for k in k_pieces:
            seen = _seen(q.run, k.run, low, high)
            if seen:
                full.append(k)
            elif seen is None:
                partly.append(k)
        for k in _as_one(full):  # keys that all of these queries see are neighbours
            yield Block(range(q.first, q.first + q.run.count), range(k.first, k.first + k.run.count))
        for k in partly:
            yield from _met(q, k, low, high)


def _seen(q: Run, k: Run, low: int | None, high: int | None) -> bool | None:
    """Whether all of these queries see all of these keys; None if some see some."""
    nearest = k.start - (q.start + (q.count - 1) * q.step)
    furthest = k.start + (k.count - 1) * k.step - q.start
    if (low is None or low <= nearest) and (high is None or furthest <= high):
        return True
    return False if (low is not None and furthest < low) or (high is not None and nearest > high) else None


def _met(q: Piece, k: Piece, low: int | None, high: int | None) -> Iterator[Block]:
    """A rectangle that a band crosses. Runs of two steps are halved until one of them is a single token."""
    seen = _seen(q.run, k.run, low, high)
    if seen:
        yield Block(range(q.first, q.first + q.run.count), range(k.first, k.first + k.run.count))
    elif seen is None:
        if q.run.count == 1 or k.run.count == 1:  # of which the step is any
            step = k.run.step if q.run.count == 1 else q.run.step
            q, k = (x._replace(run=x.run._replace(step=step)) for x in (q, k))
        if q.run.step == k.run.step:
            yield from _trimmed(q, k, low, high)
        elif q.run.step > k.run.step:
            for half in _halves(q):
                yield from _met(half, k, low, high)
        else:
            for half in _halves(k):
                yield from _met(q, half, low, high)


def _halves(piece: Piece) -> tuple[Piece, Piece]:
    first, (start, step, count) = piece
    half = count // 2
    return Piece(first, Run(start, step, half)), Piece(first + half, Run(start + half * step, step, count - half))


def _as_one(pieces: list[Piece]) -> list[Piece]:
    return [Piece(pieces[0].first, Run(0, 1, sum(piece.run.count for piece in pieces)))] if pieces else []


def _trimmed(q_piece: Piece, k_piece: Piece, low: int | None, high: int | None) -> Iterator[Block]:
    """The rectangle of two pieces as trimmed blocks of the four kinds."""
    q, k = q_piece.run, k_piece.run
    if low is not None:  # from positions to indices, rounded inwards
        low = -((k.start - q.start - low) // q.step)
    if high is not None:
        high = (high - (k.start - q.start)) // q.step
    if low is not None and high is not None and low > high:
        return
    top, bottom = 0, q.count
    left, right = 0, k.count
    if high is not None:
        top, right = max(top, -high), min(right, q.count + high)
    if low is not None:
        bottom, left = min(bottom, k.count - low), max(left, low)
    if top >= bottom or left >= right:
        return
    rows, columns = bottom - top, right - left
    if low is not None:
        low = low + top - left
        low = None if low <= 1 - rows else low
    if high is not None:
        high = high + top - left
        high = None if high >= columns - 1 else high
    q_range = range(q_piece.first + top, q_piece.first + bottom)
    k_range = range(k_piece.first + left, k_piece.first + right)
    if low is None and high:  # the columns that all rows see
        yield Block(q_range, k_range[:high])
        k_range, high = k_range[high:], 0
    elif high is None and low is not None and columns > rows + low:
        yield Block(q_range, k_range[rows + low :])
        k_range = k_range[: rows + low]
    yield Block(q_range, k_range, low, high)


def _joined(pieces: Iterator[Block]) -> list[Block]:
    """FULL neighbours made one, first along the keys, then along the queries."""
    rest, full = [], []
    for block in pieces:
        (full if block.kind == Kind.FULL else rest).append(block)
    full.sort(key=lambda x: (x.q.start, x.q.stop, x.k.start))
    across: list[Block] = []
    for block in full:
        if across and across[-1].q == block.q and across[-1].k.stop == block.k.start:
            block = block._replace(k=range(across.pop().k.start, block.k.stop))
        across.append(block)
    across.sort(key=lambda x: (x.k.start, x.k.stop, x.q.start))
    for block in across:
        if rest and rest[-1].kind == Kind.FULL and rest[-1].k == block.k and rest[-1].q.stop == block.q.start:
            block = block._replace(q=range(rest.pop().q.start, block.q.stop))
        rest.append(block)
    return rest


# ---------------------------------------------------------------------------------------------------
# When: the journey of every source's keys.

Visits = tuple[tuple[tuple[int, int], ...], ...]


def ring_order(ring: int) -> tuple[tuple[int, ...], ...]:
    """[source]: the ranks in the order in which its keys pass them, itself first: the single ring."""
    return tuple(tuple((source + step) % ring for step in range(ring)) for source in range(ring))


def schedule(need: Sequence[Sequence[object]], order: Sequence[Sequence[int]]) -> Visits:
    """[source]: the (rank, step) visits of its keys, itself at step 0, then only ranks that need (something of) them.

    Keys go from one visitor directly to the next. Any order works in which no two sources are due at
    one rank in one step: single ring, double ring (inner before outer) and bidirectional ring are
    orders, not programs.
    """
    ranks = range(len(need))
    for step in ranks:
        if sorted(order[source][step] for source in ranks) != list(ranks):
            raise ValueError(f"order {order} sends two sources to one rank in step {step}")
    return tuple(
        tuple((rank, step) for step, rank in enumerate(order[source]) if step == 0 or need[rank][source])
        for source in ranks
    )


class Hop(NamedTuple):
    """One message: keys, or their gradients, of `source` go to or come from `peer`."""

    source: int
    peer: int


class Step(NamedTuple):
    """What one rank does in one step.

    Hops begin with the step and end with it: keys that move during a step are used in the next one; a
    gradient that moves during a step was complete the step before, and is added at the step's end. Both
    ends of a hop name the same step, so ordered communicators (NCCL) cannot deadlock.
    """

    source: int | None = None  # whose keys are used
    send: tuple[Hop, ...] = ()
    receive: Hop | None = None
    spent: tuple[int, ...] = ()  # sources whose keys are not used or sent after this step
    grad_send: tuple[Hop, ...] = ()
    grad_receive: tuple[Hop, ...] = ()


def steps(visits: Visits, rank: int) -> tuple[Step, ...]:
    """The program of one rank: a step for each of the order's, and one for the last gradients home.

    A source's gradient is born at its first foreign visitor, follows the keys' way, and goes from the
    last visitor straight home.
    """
    return programs(visits, (rank,))[0]


def programs(visits: Visits, ranks: Sequence[int]) -> list[tuple[Step, ...]]:
    """`steps` of several ranks, at the cost of one."""
    drafts = {rank: _Draft({}, {}, {}, {}, {}, {}) for rank in ranks}
    for source, stops in enumerate(visits):
        for (here, _), (there, due) in pairwise(stops):
            if here in drafts:
                drafts[here].send.setdefault(due - 1, []).append(Hop(source, there))
            if there in drafts:
                drafts[there].receive[due - 1] = Hop(source, here)
        for n, (here, step) in enumerate(stops):
            if here in drafts:
                drafts[here].source_at[step] = source
                last_use = stops[n + 1][1] - 1 if n + 1 < len(stops) else step
                drafts[here].spent.setdefault(last_use, []).append(source)
        foreign = stops[1:]
        home = [(source, foreign[-1][1] + 1)] if foreign else []
        for (here, _), (there, due) in zip(foreign, [*foreign[1:], *home], strict=True):
            if here in drafts:
                drafts[here].grad_send.setdefault(due, []).append(Hop(source, there))
            if there in drafts:
                drafts[there].grad_receive.setdefault(due, []).append(Hop(source, here))
    return [drafts[rank].steps(len(visits) + 1) for rank in ranks]


class _Draft(NamedTuple):
    """A rank's program, by step."""

    source_at: dict[int, int]
    send: dict[int, list[Hop]]
    receive: dict[int, Hop]
    spent: dict[int, list[int]]
    grad_send: dict[int, list[Hop]]
    grad_receive: dict[int, list[Hop]]

    def steps(self, count: int) -> tuple[Step, ...]:
        return tuple(
            Step(
                self.source_at.get(step),
                tuple(self.send.get(step, ())),
                self.receive.get(step),
                tuple(self.spent.get(step, ())),
                tuple(self.grad_send.get(step, ())),
                tuple(self.grad_receive.get(step, ())),
            )
            for step in range(count)
        )
