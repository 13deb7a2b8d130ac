"""Who keeps which token of a growing sequence: arithmetic, held against lists of tokens."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from tests import oracle
from tests.test_blocks import band, positions_of
from usp import Mask, Partition
from usp.blocks import blocks, needed
from usp.ledger import Dealt, Ledger, Row, Turn

LAYOUTS = ("contiguous", "zigzag", "striped")


class Model:
    """A row of a ledger as plain lists: the owner of every position."""

    def __init__(self, ring: int):
        self.ring = ring
        self.owner: dict[int, int] = {}
        self.dealt: dict[int, int] = {}  # positions that were dealt, and whose
        self.end, self.first = 0, -1  # the first of those that are being dealt; -1 after a turn
        self.levels: list[int] = []
        self.current = 0

    def turn(self, tokens: Partition, spans) -> None:
        for rank in range(self.ring):
            for run in tokens.runs(rank):
                for n in range(run.count):
                    position = run.start + n * run.step
                    if any(a <= position < b for a, b in spans):
                        self.owner[position] = rank
        self.end = max([self.end, *(b for _, b in spans)])
        self.first = -1

    def deal(self, count: int, block: int, owner: str) -> None:
        """One token at a time; a block that has begun goes on unless a turn came in between."""
        if self.first < 0:
            counted = list((self.owner if owner == "shortest" else self.dealt).values())
            self.first, self.levels = self.end, [counted.count(rank) for rank in range(self.ring)]
        for position in range(self.end, self.end + count):
            if (position - self.first) % block == 0:
                self.current = self.levels.index(min(self.levels))
                self.levels[self.current] += block
            self.owner[position] = self.dealt[position] = self.current
        self.end += count


@pytest.mark.parametrize("owner", ["rotate", "shortest"])
@pytest.mark.parametrize("ring", [1, 2, 3, 4, 8])
def test_a_ledger_is_what_its_history_says(ring, owner):
    """Turns of all layouts, padding, and tokens that come a few at a time, in any order."""
    draw = random.Random(f"{ring} {owner}")
    for block in (1, 2, 5, 16):
        ledger, models = Ledger.empty(ring, 3), [Model(ring) for _ in range(3)]
        for _ in range(12):
            if draw.random() < 0.3:
                seq = draw.randint(1, 40)
                tokens = Partition(seq, draw.choice(LAYOUTS), ring, start=ledger.lengths)
                spans = []
                for row, model in enumerate(models):
                    first, end = tokens.span(row)
                    a, b = sorted((draw.randint(first, end), draw.randint(first, end)))
                    spans.append([] if a == b else [(a, b)])
                    if spans[-1]:
                        model.turn(Partition(seq, tokens.layout, ring, start=first), spans[-1])
                ledger = ledger.turned(tokens, spans)
            else:
                counts = [draw.choice((0, 1, 1, 3, 20)) for _ in models]
                ledger = ledger.dealt(counts, block, owner)
                for model, count in zip(models, counts, strict=True):
                    if count:
                        model.deal(count, block, owner)
            for row, model in enumerate(models):
                assert ledger.lengths[row] == model.end
                for rank in range(ring):
                    positions = sorted(p for p, who in model.owner.items() if who == rank)
                    runs = ledger.runs(rank, row)
                    assert [run.start + n * run.step for run in runs for n in range(run.count)] == positions
                    assert ledger.counts[row][rank] == len(positions)
                    for position in (0, model.end // 2, model.end - 1, model.end, model.end + 9):
                        assert ledger.below(rank, row, position) == sum(p < position for p in positions)


@pytest.mark.parametrize("owner", ["rotate", "shortest"])
def test_ranks_stay_within_a_block(owner):
    """Also over many short turns of decoding, with prompts in between; `shortest` makes up for uneven prompts."""
    for block in (1, 4, 16):
        ledger = Ledger.empty(4, 2)
        for turn in range(30):
            tokens = Partition(8, "contiguous", 4, start=ledger.lengths)
            ledger = ledger.turned(tokens, [[(first, first + 3)] for first in ledger.lengths])
            for _ in range(200 if turn == 29 else 3):
                ledger = ledger.dealt((5, 1), block, owner)
        for row, counts in zip(ledger.rows, ledger.counts, strict=True):
            dealt = [sum(x.below(rank, x.end) for x in row.segments if isinstance(x, Dealt)) for rank in range(4)]
            even = dealt if owner == "rotate" else counts
            assert max(even) - min(even) <= block, even


def test_rejected_tokens_had_never_been():
    """Whatever is taken back, what comes next goes where it would have gone."""
    for ahead in (1, 7, 40):
        one = two = Ledger.empty(3, 1).turned(Partition(10, "zigzag", 3), [[(0, 10)]])
        for count in (1, 2, 5, 16, 3):
            one = one.dealt((count,), 4, "rotate")
            two = two.dealt((count + ahead,), 4, "rotate").truncated([one.lengths[0]])
            assert one == two
        assert hash(one) == hash(two)
        assert repr(one) == repr(two) != repr(one.truncated([4]))
        assert one.truncated([4]).span() == (0, 4)
        assert one.truncated([0]).rows == (Row(),)


def test_a_length_may_end_in_a_hole():
    """Padding between texts: what comes next stands where it was asked to."""
    ledger = Ledger.empty(2, 1).turned(Partition(10, "zigzag", 2), [[(0, 4), (7, 10)]])
    assert ledger.truncated([6]).dealt((2,), 1, "rotate").span() == (0, 8)
    assert ledger.truncated([6]).counts == ledger.truncated([4]).counts == ((3, 1),)
    after = ledger.truncated([6]).dealt((2,), 1, "rotate")
    assert [run.start for rank in range(2) for run in after.runs(rank)] == [0, 6, 3, 7]


def test_the_work_of_a_step_does_not_depend_on_the_history(monkeypatch):
    """One segment of a row is looked at, whatever length and number of turns: no other is even asked."""
    asked = []
    monkeypatch.setattr(Turn, "below", lambda self, *args: asked.append(self) or 0)
    counted = Dealt.below
    monkeypatch.setattr(Dealt, "below", lambda self, *args: asked.append(self) or counted(self, *args))
    work = []
    for turns in (1, 200):
        ledger = Ledger.empty(4, 2)
        for _ in range(turns):
            tokens = Partition(1 << 14, "striped", 4, start=ledger.lengths)
            ledger = ledger.turned(tokens, [[tokens.span(row)] for row in range(2)]).dealt((7, 1), 16, "shortest")
        for _ in range(300):
            ledger = ledger.dealt((7, 1), 16, "shortest")
        asked.clear()
        ledger = ledger.dealt((1, 1), 16, "shortest")
        assert hash(ledger)
        assert ledger.counts
        assert [ledger.below(rank, row, ledger.lengths[row]) for rank in range(4) for row in range(2)]
        work.append(len(asked))
    assert work[0] == work[1] > 0


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("held", [*LAYOUTS, "all"])
def test_blocks_of_new_tokens_and_a_cache_tile_the_mask(layout, held):
    """Whatever layouts the turns before had, and what was decoded between them; `needed` is what the blocks read."""
    ring = 4
    ledger = Ledger.empty(ring, 1)
    for name in LAYOUTS if held == "all" else (held,):
        tokens = Partition(11, name, ring, start=ledger.lengths[0])
        ledger = ledger.turned(tokens, [[tokens.span()]]).dealt((4,), 3, "rotate")
    start = ledger.lengths[0]
    queries = Partition(19, layout, ring, start=start)
    ledger = ledger.turned(queries, [[queries.span()]])
    keys = Partition(start + 19, "contiguous")
    masks = [Mask(True), Mask(False), Mask(True, 9), Mask(False, 6), Mask(True, 30)]
    masks += [Mask(True, documents=[[(2, 7), (9, start + 4), (start + 4, start + 19)]])]
    for mask in masks:
        seen = oracle.visible(mask, queries, keys, 0)
        count = torch.zeros(queries.padded, start + 19, dtype=torch.long)
        need = needed(mask, queries, ledger)
        for rank, source in itertools.product(range(ring), range(ring)):
            rows, columns = positions_of(queries, rank) - start, positions_of(ledger, source)
            found = blocks(mask, queries, rank, ledger, source)
            for block in found:
                count[rows[block.q.start : block.q.stop, None], columns[block.k.start : block.k.stop]] += band(block)
            assert {j for x in found for j in x.k} == {j for x in need[rank][source] for j in x}
        assert torch.equal(count[:19], seen.long()), mask
        assert not count[19:].any()
