"""Which ring rank gets which blocks of tokens, so that all have the same work: the layout BALANCED.

Note [Balance]
~~~~~~~~~~~~~~
A rank's work is the number of (query, key) pairs that its queries see; ranks have equally many tokens. Two
things cost: the work of the busiest rank, and every *needed pair* of ranks of which one sees keys of the other.
Sought is an assignment within TOLERANCE of the mean work, of those the fewest needed pairs, of those the
fewest blocks:

    1. Contiguous, if that is within the tolerance; or zigzag, if that is too and needs fewer pairs.
    2. Else every rank's tokens are cut in 2, 3, 4 ... at most 16 blocks, the coarsest first. From contiguous, the
       busiest rank gives a block of much work for one of little, to a partner with whom that costs few new pairs,
       until all are within the tolerance; then exchanges that save pairs.
    3. But zigzag, if that is within the tolerance and needs less than a ninth more pairs.

Equal sums of equal counts are a hard problem, and this is a search and not a proof. It is deterministic: every
rank finds the same without asking. If nothing is within the tolerance (one block alone may be too much work, or the
sequence be too short), the most even that was found.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import combinations

from usp.blocks import batch_rows, visible_pairs
from usp.masks import Mask
from usp.partitions import Layout, Partition

TOLERANCE = 1.02
MOST = 16  # blocks of a rank
_PADDING = 1.01  # how much longer the sequence may become for more blocks
_HOPE = 1.1  # imbalance of blocks dealt out, whatever they need, from which exchanges may lead to the tolerance
_PARTNERS = 4  # of the busiest rank that are looked at
_COSTED = 3  # swaps whose new pairs are counted before one is made
_LOOKS = 3_000  # at swaps that may save pairs, over the number of ranks
_OTHERS = (3, 5, 6, 10, 12)  # cuts beside the divisors of the finest
_MANY = 16  # ranks: on more, only some cuts are tried, and the first within the tolerance is taken
_SAVED = 0.9  # of zigzag's pairs: fewer must be needed to do without it


@dataclass(frozen=True)
class Demand:
    """Of each of equally long blocks of the sequence: what its queries see, in all batch rows."""

    work: list[int]  # pairs
    keys: list[list[tuple[int, int]]]  # blocks (first, last) that hold keys which it sees

    def coarser(self, factor: int) -> Demand:
        """Of blocks that are so many times as long."""
        starts = range(0, len(self.work), factor)
        return Demand(
            [sum(self.work[n : n + factor]) for n in starts],
            [[(a // factor, b // factor) for keys in self.keys[n : n + factor] for a, b in keys] for n in starts],
        )

    @cached_property
    def sees(self) -> list[int]:
        """The blocks that each one sees keys of, as bits."""
        found = []
        for keys in self.keys:
            bits = 0
            for first, last in set(keys):
                bits |= (2 << last) - (1 << first)
            found.append(bits)
        return found


def demand(mask: Mask, tokens: Partition, count: int) -> Demand:
    """Of the sequence in `count` blocks; its padded length is a multiple of that."""
    size = tokens.padded // count
    work, keys = [0] * count, [[] for _ in range(count)]
    for row in range(batch_rows(mask, tokens, tokens)):
        start, end = tokens.span(row)
        for (a, b), (c, d), low, high in mask.disjoint_regions(row):
            a, b, c, d = max(a, start), min(b, end), max(c, start), min(d, end)
            if a >= b or c >= d:
                continue
            for n in range((a - start) // size, (b - 1 - start) // size + 1):
                x, y = max(a, start + n * size), min(b, start + (n + 1) * size)
                first = c if low is None else max(c, x + low)
                last = d - 1 if high is None else min(d - 1, y - 1 + high)
                if first <= last:
                    shift = x - c  # from positions to indices
                    band = None if low is None else low + shift, None if high is None else high + shift
                    work[n] += visible_pairs(y - x, d - c, *band)
                    keys[n].append(((first - start) // size, (last - start) // size))
    return Demand(work, keys)


class Assignment:
    """Blocks with owners, and what follows from them, kept up to date while blocks change hands."""

    def __init__(self, found: Demand, owners: Sequence[int], ring: int):
        self.work, self.sees = found.work, found.sees
        self.owners, self.ring = list(owners), ring
        self.blocks: list[list[int]] = [[] for _ in range(ring)]  # of each rank, by work
        for n in sorted(range(len(self.work)), key=lambda n: (self.work[n], n)):
            self.blocks[owners[n]].append(n)
        self.load = [sum(self.work[n] for n in mine) for mine in self.blocks]
        self.owns = [sum(1 << n for n in mine) for mine in self.blocks]
        self.needs = [self._needs(mine) for mine in self.blocks]
        self.mean = sum(self.load) / ring
        self.limit = int(TOLERANCE * self.mean)

    @property
    def busiest(self) -> int:
        return self.load.index(max(self.load))

    @property
    def within(self) -> bool:
        """Whether no rank has more work than the tolerance allows."""
        return max(self.load) <= self.limit

    @property
    def pairs(self) -> int:
        """(rank, source) of different ranks where one sees keys of the other."""
        return sum(self._partners(rank) for rank in range(self.ring))

    def _needs(self, mine: Sequence[int]) -> int:
        bits = 0
        for n in mine:
            bits |= self.sees[n]
        return bits

    def _partners(self, rank: int) -> int:
        needs = self.needs[rank]
        return len([1 for owns in self.owns if needs & owns]) - (needs & self.owns[rank] != 0)

    def around(self, a: int, b: int) -> int:
        """The needed pairs in which one of two ranks takes part."""
        found = self._partners(a) + self._partners(b)
        for owns in (self.owns[a], self.owns[b]):
            found += len([1 for needs in self.needs if needs & owns])
            found -= (self.needs[a] & owns != 0) + (self.needs[b] & owns != 0)
        return found

    def swap(self, mine: Sequence[int], theirs: Sequence[int]) -> None:
        """Blocks of one rank and as many of another change hands."""
        a, b = self.owners[mine[0]], self.owners[theirs[0]]
        moved = 0
        for x, y in zip(mine, theirs, strict=True):
            self.owners[x], self.owners[y] = b, a
            self.blocks[a].remove(x)
            self.blocks[b].remove(y)
            insort(self.blocks[a], y, key=self.work.__getitem__)
            insort(self.blocks[b], x, key=self.work.__getitem__)
            moved |= 1 << x | 1 << y
            self.load[a] += self.work[y] - self.work[x]
            self.load[b] += self.work[x] - self.work[y]
        for rank in (a, b):
            self.owns[rank] ^= moved
            self.needs[rank] = self._needs(self.blocks[rank])

    def has_company(self, n: int) -> bool:
        """Whether a neighbour of a block has the same owner."""
        return self.owners[n] in (*self.owners[max(0, n - 1) : n], *self.owners[n + 1 : n + 2])

    def cost_of(self, mine: Sequence[int], theirs: Sequence[int]) -> int:
        """How many pairs more it needs when blocks of one rank and as many of another change hands."""
        a, b = self.owners[mine[0]], self.owners[theirs[0]]
        before = self.around(a, b)
        self.swap(mine, theirs)
        after = self.around(a, b)
        self.swap(mine, theirs)
        return after - before


def balance(assignment: Assignment) -> None:
    """Exchange blocks, or two at once, until no rank has more than the tolerance, or nothing helps."""
    while assignment.load[busy := assignment.busiest] > assignment.limit:
        found: list[tuple] = []
        for size in (1, 2):
            for near, other in enumerate(_lightest(assignment, busy)):
                found += _good_swaps(assignment, busy, other, near, size)
                if near >= _COSTED and found and min(found)[0] == 0:
                    break  # enough to choose from
            if found:
                break
        if not found:
            return
        some = heapq.nsmallest(_COSTED, found)
        *_, mine, theirs = min((assignment.cost_of(*x[3:]), *x[1:]) for x in some if x[0] == some[0][0])
        assignment.swap(mine, theirs)


def _lightest(assignment: Assignment, busy: int) -> list[int]:
    """Ranks with little work, those first that the busy one has to do with anyhow."""
    load, needs = assignment.load, assignment.needs[busy]
    light = sorted([rank for rank in range(assignment.ring) if load[rank] < assignment.mean], key=load.__getitem__)
    near = [rank for rank in light if needs & assignment.owns[rank]]
    return list(dict.fromkeys([*near[:_PARTNERS], *light[:_PARTNERS]]))


def _good_swaps(assignment: Assignment, busy: int, other: int, near: int, size: int) -> list[tuple]:
    """For so many blocks of the busy rank, those of the other with which the two would come nearest to the mean, if
    that takes work from the busy one: (excess over the limit, near, larger load, blocks, blocks)."""
    more, less, work = assignment.load[busy], assignment.load[other], assignment.work
    wanted = min(more - assignment.mean, assignment.mean - less)
    theirs = [(sum([work[n] for n in some]), some) for some in combinations(assignment.blocks[other], size)]
    if size > 1:
        theirs.sort()
    weights = [weight for weight, _ in theirs]
    found = []
    for mine in combinations(assignment.blocks[busy], size):
        have = sum([work[n] for n in mine])
        at = bisect_left(weights, have - wanted)
        for n in (at - 1, at):
            if 0 <= n < len(weights) and 0 < (difference := have - weights[n]) < more - less:
                worse = max(more - difference, less + difference)
                found.append((max(0, worse - assignment.limit), near, worse, mine, theirs[n][1]))
    return found


def thin_out(assignment: Assignment) -> None:
    """Swaps that save pairs and stay within the tolerance; those first that end what stands alone."""
    left, count = _LOOKS // assignment.ring, len(assignment.owners)
    saved = True
    while saved:
        saved = False
        alone = [n for n in range(count) if not assignment.has_company(n)]
        for x in dict.fromkeys((*alone, *range(count))):
            a = assignment.owners[x]
            for y in {y: None for n in assignment.blocks[a] for y in (n - 1, n + 1) if 0 <= y < count}:
                b = assignment.owners[y]
                difference = assignment.work[x] - assignment.work[y]
                worse = max(assignment.load[a] - difference, assignment.load[b] + difference)
                if a == b or worse > assignment.limit:
                    continue
                if left == 0:
                    return
                left -= 1
                if assignment.cost_of((x,), (y,)) < 0:
                    assignment.swap((x,), (y,))
                    saved = True
                    break


@lru_cache(maxsize=16)
def balanced(mask: Mask, seq: int, ring: int, ulysses: int, start: int | tuple[int, ...] = 0) -> Partition:
    """The partition of a sequence whose queries and keys are these tokens; see Note [Balance]."""
    plain = Partition(seq, Layout.CONTIGUOUS, ring, ulysses, start)
    zigzag = Partition(seq, Layout.ZIGZAG, ring, ulysses, start)
    cuts = _cuts(plain)
    finest = _with_owners(plain, _in_order(ring, cuts[-1]))
    found = demand(mask, finest, ring * cuts[-1])

    def of(tokens: Partition, count: int) -> Demand:
        factor, rest = divmod(ring * cuts[-1], count)
        same = tokens.padded == finest.padded and not rest
        return found.coarser(factor) if same else demand(mask, tokens, count)

    folded = (*range(ring), *reversed(range(ring)))
    simple = [
        (Assignment(of(plain, ring), range(ring), ring), plain),
        (Assignment(of(zigzag, 2 * ring), folded, ring), zigzag),
    ]
    within = [x for x in simple if x[0].within]
    if within and within[0][1] is plain:
        return min(within, key=lambda x: x[0].pairs)[1]
    candidates = [(*_rated(assignment), tokens) for assignment, tokens in simple]
    for cut in cuts:
        owners, last = _in_order(ring, cut), cut == cuts[-1]
        asked = of(_with_owners(plain, owners), ring * cut)
        dealt, largest = _dealt(asked.work, ring)
        if not last and largest > _HOPE * sum(asked.work) / ring:
            continue
        assignment = Assignment(asked, owners, ring)
        balance(assignment)
        if last and not assignment.within:
            other = Assignment(asked, dealt, ring)
            balance(other)
            assignment = min(assignment, other, key=lambda x: max(x.load))
        if assignment.within:
            thin_out(assignment)
        candidates.append((*_rated(assignment), _with_owners(plain, tuple(assignment.owners))))
        if assignment.within and ring > _MANY:
            break
    best = min(candidates, key=lambda x: x[:3])
    return zigzag if within and best[1] > _SAVED * simple[1][0].pairs else best[3]


def _dealt(work: Sequence[int], ring: int) -> tuple[list[int], int]:
    """Owners that balance well, whatever they need, and the largest load: the heaviest blocks first, each to who has
    least and has room."""
    room, owners, largest = [len(work) // ring] * ring, [0] * len(work), 0
    ranks = [(0, rank) for rank in range(ring)]
    for n in sorted(range(len(work)), key=lambda n: (-work[n], n)):
        load, rank = heapq.heappop(ranks)
        owners[n] = rank
        room[rank] -= 1
        largest = max(largest, load + work[n])
        if room[rank]:
            heapq.heappush(ranks, (load + work[n], rank))
    return owners, largest


def _rated(assignment: Assignment) -> tuple[int, int, int]:
    """Less is better: the work of the busiest rank if it is more than the limit, pairs, blocks."""
    return 0 if assignment.within else max(assignment.load), assignment.pairs, len(assignment.owners)


def _in_order(ring: int, cut: int) -> tuple[int, ...]:
    return tuple(n // cut for n in range(ring * cut))


def _with_owners(plain: Partition, owners: tuple[int, ...]) -> Partition:
    return Partition(plain.seq, Layout.BALANCED, plain.ring, plain.ulysses, plain.start, owners)


def _cuts(plain: Partition) -> list[int]:
    """In how many blocks the tokens of a rank may be cut, so that the sequence grows by next to nothing."""

    def padded(cut: int) -> int:
        multiple = math.lcm(plain.ring * plain.ulysses, plain.ring * cut)
        return -(-plain.seq // multiple) * multiple

    lengths = {cut: padded(cut) for cut in range(2, MOST + 1)}
    allowed = max(_PADDING * plain.padded, min(lengths.values()))
    cuts = [cut for cut, length in lengths.items() if length <= allowed]
    return [cut for cut in cuts if cuts[-1] % cut == 0 or (cut in _OTHERS and plain.ring <= _MANY)]
