"""The layout BALANCED: equal work for any mask, with few needed pairs, found without asking anybody."""

from __future__ import annotations

import itertools

import hypothesis
import pytest
import torch

import usp
from analysis import figures
from experiments import balance
from tests import hybrid, oracle, pool
from tests.hybrid import Case
from tests.test_fuzz import regions, spans
from usp import Mask, Partition
from usp.balance import MOST, TOLERANCE, Assignment, balanced, demand, thin_out
from usp.balance import balance as balance_blocks
from usp.blocks import blocks, needed

LENGTHS = [101, 20, 20, 12, 9, 9]
MIXED = [length // 16 for length in balance.MIXED]  # 2,048 tokens


def work(mask: Mask, tokens: Partition) -> list[int]:
    """By rank, from what it computes; all batch rows."""
    rows = range(max(mask.rows, len(tokens.starts)))
    return [
        sum(x.pairs for row in rows for n in range(tokens.ring) for x in blocks(mask, tokens, rank, tokens, n, row))
        for rank in range(tokens.ring)
    ]


def pairs(mask: Mask, tokens: Partition) -> int:
    need = needed(mask, tokens, tokens)
    return sum(bool(need[r][s]) for r in range(tokens.ring) for s in range(tokens.ring) if r != s)


def imbalance(mask: Mask, tokens: Partition) -> float:
    loads = work(mask, tokens)
    return max(loads) * len(loads) / max(1, sum(loads))


def others(mask: Mask, seq: int, ring: int) -> list[Partition]:
    return [Partition(seq, layout, ring) for layout in ("contiguous", "zigzag", "striped")]


@pytest.mark.parametrize("ring", [2, 3, 4, 8])
def test_equal_work_and_fewer_needed_pairs_than_any_other_layout(ring):
    """Among those that are balanced too."""
    masks = {
        "mixed": Mask.packed(MIXED, causal=True),
        "mixed, both ways": Mask.packed(MIXED, causal=False),
        "prefix": Mask(True, regions=[[usp.Region((0, 700), (0, 700))]]),
        "image": Mask(True, regions=[[usp.Region((300, 900), (300, 900))]]),
        "left padding": Mask.padded([2048, 900], 2048, "left", causal=True),
        "window and sinks": Mask(True, 100, regions=[[usp.Region((0, 2048), (0, 64), high=0)]]),
    }
    for name, mask in masks.items():
        tokens = balanced(mask, 2048, ring, 1)
        assert imbalance(mask, tokens) <= TOLERANCE, name
        fair = [pairs(mask, x) for x in others(mask, 2048, ring) if imbalance(mask, x) <= TOLERANCE]
        assert pairs(mask, tokens) <= min(fair, default=ring * ring), name
        assert max(len(tokens.runs(rank)) for rank in range(ring)) <= MOST


def test_contiguous_and_zigzag_where_they_do():
    assert balanced(Mask.packed([4096] * 8, causal=True), 32768, 8, 1) == Partition(32768, "contiguous", 8)
    assert balanced(Mask(True, 1024), 131072, 8, 1) == Partition(131072, "contiguous", 8)
    assert balanced(Mask(False), 100, 4, 1) == Partition(100, "contiguous", 4)
    for ring in (2, 8, 64):
        assert balanced(Mask(True), 8192, ring, 2) == Partition(8192, "zigzag", ring, 2)
    assert balanced(Mask(True), 100, 1, 4) == Partition(100, "contiguous", 1, 4)


def test_blocks_of_one_token():
    """Documents of 1 and 5 tokens on two ranks: 8 pairs each, which only single tokens give."""
    mask = Mask.packed([1, 5], causal=True)
    tokens = balanced(mask, 6, 2, 1)
    assert work(mask, tokens) == [8, 8]
    assert len(tokens.owners or ()) == 6
    mask = Mask.packed([4, 12], causal=True)
    assert work(mask, balanced(mask, 16, 2, 1)) == [44, 44]


def test_what_cannot_be_balanced_is_as_even_as_it_gets():
    """Blocks that are too much work alone, a sequence that is short, nothing to do."""
    for lengths, seq, ring, most in (
        ([1] * 1900 + [148], 2048, 8, 1.6),  # zigzag 6.8
        ([64] * 1920 + [8192], 131072, 64, 1.9),  # zigzag 13
        ([4096], 131072, 64, 4.0),  # the rest is padding; zigzag 28
        ([20, 80], 100, 64, 1.5),
    ):
        mask = Mask.packed(lengths, causal=True)
        tokens = balanced(mask, seq, ring, 1)
        books = Assignment(demand(mask, tokens, len(tokens.owners or ())), tokens.owners or (), ring)
        assert max(books.load) <= most * books.mean, lengths
    assert balanced(Mask(True, documents=[[]]), 64, 4, 1) == Partition(64, "contiguous", 4)


@pytest.mark.parametrize(
    ("mask", "seq", "ring", "most"),
    [
        (Mask.packed(MIXED, causal=True), 2048, 8, 34),
        (Mask.packed(MIXED, causal=True), 2048, 4, 9),
        (Mask.packed([64] * 8 + [512, 1024], causal=True), 2048, 8, 38),
        (Mask.packed([1024, 2048, 1024], causal=True, window=64), 4096, 2, 0),  # zigzag; contiguous needs 1
    ],
)
def test_how_many_pairs_are_needed(mask, seq, ring, most):
    """What was found once is found again."""
    tokens = balanced(mask, seq, ring, 1)
    assert imbalance(mask, tokens) <= TOLERANCE
    assert pairs(mask, tokens) <= most


@hypothesis.settings(max_examples=40, deadline=None, database=None, derandomize=True)
@hypothesis.given(hypothesis.strategies.data())
def test_two_ranks_against_all_assignments(data):
    """Six blocks of two ranks can be dealt in 20 ways: the search is as even as the best of them, or within."""
    seq = 6 * data.draw(hypothesis.strategies.integers(4, 30))
    mask = Mask(data.draw(hypothesis.strategies.booleans()), documents=[data.draw(spans(seq))])
    plain = Partition(seq, "contiguous", 2)
    found = demand(mask, plain, 6)
    ways = [[int(n not in some) for n in range(6)] for some in itertools.combinations(range(6), 3)]
    best = min(max(Assignment(found, owners, 2).load) for owners in ways)
    tokens = balanced(mask, seq, 2, 1)
    assert max(work(mask, tokens)) <= max(best, TOLERANCE * sum(found.work) / 2)


def test_exchanges_and_savings_do_something():
    """From contiguous to within the tolerance; then fewer pairs and still within."""
    mask = Mask.packed(MIXED, causal=True)
    found = demand(mask, Partition(2048, "contiguous", 8), 64)
    assignment = Assignment(found, [n // 8 for n in range(64)], 8)
    assert not assignment.within
    balance_blocks(assignment)
    assert assignment.within
    documents = demand(Mask.packed([256] * 8, causal=True), Partition(2048, "contiguous", 8), 64)
    disturbed = Assignment(documents, [n // 8 for n in range(64)], 8)
    disturbed.swap([1], [9])
    assert disturbed.pairs > 0
    thin_out(disturbed)
    assert disturbed.pairs == 0


def test_padding_grows_by_next_to_nothing():
    for seq in (1000, 1021, 2048, 4099, 130_001):
        for ring, ulysses in ((2, 1), (3, 2), (8, 2), (64, 1)):
            tokens = balanced(Mask.packed([seq // 2, seq // 8], causal=True), seq, ring, ulysses)
            plain = Partition(seq, "contiguous", ring, ulysses)
            assert tokens.padded <= max(1.01 * plain.padded, plain.padded + 2 * ring * ulysses)


@hypothesis.settings(max_examples=60, deadline=None, database=None)
@hypothesis.given(hypothesis.strategies.data())
def test_any_mask(data):
    """The search's own books are those of the blocks, and what it gives is a partition that is no worse than any."""
    draw, integers = data.draw, hypothesis.strategies.integers
    seq, ring, ulysses = draw(integers(1, 200)), draw(integers(1, 6)), draw(integers(1, 3))
    rows = draw(integers(1, 2))
    documents = [draw(spans(seq)) for _ in range(rows)] if draw(hypothesis.strategies.booleans()) else None
    shown = [draw(regions(seq, seq)) for _ in range(rows)] if draw(hypothesis.strategies.booleans()) else None
    causal, window = draw(hypothesis.strategies.booleans()), draw(hypothesis.strategies.none() | integers(1, 50))
    mask = Mask(causal, window, documents, None, shown)
    start = draw(integers(0, 9)) if documents is None and shown is None else 0
    tokens = balanced(mask, seq, ring, ulysses, start)
    assert (tokens.seq, tokens.ring, tokens.ulysses, tokens.start) == (seq, ring, ulysses, start)
    owners = tokens.owners or (
        tuple(range(ring)) if tokens.layout == "contiguous" else (*range(ring), *range(ring)[::-1])
    )
    books = Assignment(demand(mask, tokens, len(owners)), owners, ring)
    assert books.load == work(mask, tokens)
    assert books.pairs == pairs(mask, tokens)
    plain = Partition(seq, "contiguous", ring, ulysses, start)
    assert imbalance(mask, tokens) <= max(TOLERANCE, imbalance(mask, plain)) + 0.05


def test_books_after_exchanges():
    """Swaps back and forth leave load, needs and pairs as they would be counted afresh."""
    found = demand(Mask.packed(MIXED, causal=True), Partition(2048, "contiguous", 4), 16)
    changed = Assignment(found, [n // 4 for n in range(16)], 4)
    before = changed.pairs
    for x, y in ((0, 5), (3, 12), (5, 15), (1, 14)):
        cost, old = changed.cost_of([x], [y]), changed.pairs
        changed.swap([x], [y])
        assert changed.pairs == old + cost
        fresh = Assignment(found, changed.owners, 4)
        assert (fresh.load, fresh.needs, fresh.owns, fresh.pairs) == (
            changed.load,
            changed.needs,
            changed.owns,
            changed.pairs,
        )
    assert changed.pairs != before


@pytest.mark.parametrize(("ring", "ulysses"), [(2, 2), (4, 1)])
def test_attention_with_a_balanced_partition(ranks, ring, ulysses):
    """All the way through: shards, positions, attention and gradients, the other options, and traffic as predicted."""
    assert ranks(4)(_through, ring, ulysses) == [True] * 4


def _through(ring: int, ulysses: int) -> bool:
    mesh = pool.mesh(ring, ulysses)
    mask = Mask.packed(LENGTHS, causal=True)
    tokens = usp.partition(171, mesh, usp.Layout.BALANCED, mask=mask)
    assert tokens is usp.partition(171, mesh, "balanced", mask=Mask.packed(LENGTHS, causal=True)), "found again"
    assert tokens.layout == "balanced"
    how = {"seq": 171, "mask": mask, "owners": tokens.owners}
    hybrid.worst(
        [Case(ring, ulysses, "balanced", **how), Case(ring, ulysses, "balanced", alibi=True, dropout=(0.2, 3), **how)]
    )
    x = torch.arange(171)
    assert torch.equal(usp.unshard(usp.shard(x, mesh, tokens, dim=0), mesh, tokens, dim=0), x)
    restarted = usp.unshard(usp.positions(mesh, tokens, mask=mask), mesh, tokens)[0]
    assert restarted.tolist() == [n for length in LENGTHS for n in range(length)]
    labels = usp.shard(x, mesh, tokens, dim=0, fill=-100)
    return bool((labels == -100).sum() == (usp.positions(mesh, tokens)[0] >= 171).sum())


def test_what_is_refused():
    with pytest.raises(ValueError, match=r"layout='balanced' balances the work of a mask: give mask="):
        usp.partition(16, None, "balanced")
    with pytest.raises(ValueError, match=r"layout='zigzag' does not depend on a mask"):
        usp.partition(16, None, "zigzag", mask=Mask(True))
    with pytest.raises(ValueError, match="batch rows differ"):
        usp.partition(16, None, "balanced", mask=Mask.padded([3, 4], 16, causal=True), start=(0, 1, 2))


def test_the_table_the_picture_and_the_measurement(tmp_path):
    lines = balance.table(4096, 4)
    assert {line.layout for line in lines} == set(balance.LAYOUTS)
    assert all(line.imbalance <= TOLERANCE for line in lines if line.layout == "balanced")
    masks = balance.masks(4096)
    owned = {name: {x: balance.partition(4096, 4, x, mask) for x in balance.LAYOUTS} for name, mask in masks.items()}
    work = {name: balance.work_of_queries(mask, 4096) for name, mask in masks.items()}
    assert figures.owners(owned, work, tmp_path / "owners.png").stat().st_size > 10_000
    assert all(seconds > 0 for seconds in balance.measured(1024, 2, 1).values())


def test_the_table_counts_what_the_blocks_say():
    mask = Mask.packed(MIXED, causal=True)
    counted = balance.work_of_queries(mask, 2048)
    for tokens in (*others(mask, 2048, 4), balanced(mask, 2048, 4, 1)):
        line = balance.line("mixed", str(tokens.layout), mask, tokens, counted, 0.0)
        assert line.imbalance == pytest.approx(imbalance(mask, tokens))
        assert line.pairs == pairs(mask, tokens)
    visible = oracle.visible(mask, Partition(2048, "contiguous"), Partition(2048, "contiguous"), 0)
    assert counted == visible.sum(1).tolist()
