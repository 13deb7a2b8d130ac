"""The pure part: over all (rank, source) pairs, blocks tile the mask exactly once; schedules deliver."""

from __future__ import annotations

import random

import pytest
import torch

from tests import oracle
from usp.blocks import Block, Kind, batch_rows, blocks, needed, ring_order, schedule, steps
from usp.masks import Mask
from usp.partitions import Layout, Partition

MASKS = {
    "causal": Mask(causal=True),
    "full": Mask(causal=False),
    "window 1": Mask(causal=True, window=1),
    "window 5": Mask(causal=True, window=5),
    "window 13": Mask(causal=True, window=13),
    "two-sided window": Mask(causal=False, window=7),
    "documents": Mask.packed([3, 5, 1, 14, 8], causal=True),
    "documents, both ways": Mask.packed([7, 2, 9, 13], causal=False),
    "documents and window": Mask.packed([20, 11], causal=True, window=6),
    "two rows with padding": Mask(causal=True, documents=(((2, 9), (12, 30)), ((0, 31),))),
    "left padding": Mask.padded([31, 12, 0], 31, "left", causal=False, window=9),
}


def partition_of(layout: Layout, ring: int, seq: int = 31, ulysses: int = 1, start: int = 0) -> Partition:
    if layout != Layout.BALANCED:
        return Partition(seq, layout, ring, ulysses, start)
    owners = list(range(ring)) * 3
    random.Random(ring).shuffle(owners)
    return Partition(seq, layout, ring, ulysses, start, tuple(owners))


def positions_of(tokens: Partition, rank: int, row: int = 0) -> torch.Tensor:
    return torch.cat([torch.arange(count) * step + start for start, step, count in tokens.runs(rank, row)])


def band(block: Block) -> torch.Tensor:
    offset = torch.arange(len(block.k))[None] - torch.arange(len(block.q))[:, None]
    seen = torch.ones_like(offset, dtype=torch.bool)
    if block.low is not None:
        seen &= offset >= block.low
    if block.high is not None:
        seen &= offset <= block.high
    return seen


def coverage(mask: Mask, queries: Partition, keys: Partition, row: int) -> torch.Tensor:
    """How often each (query, key) pair of real tokens is computed; every block is checked on the way."""
    count = torch.zeros(queries.padded, keys.padded, dtype=torch.int64)
    need = needed(mask, queries, keys)
    for rank in range(queries.ring):
        i = positions_of(queries, rank, row) - queries.span(row)[0]
        for source in range(keys.ring):
            j = positions_of(keys, source, row) - keys.span(row)[0]
            found = blocks(mask, queries, rank, keys, source, row)
            assert need[rank][source] or not found
            for block in found:
                check_form(block)
                rows, columns = i[block.q.start : block.q.stop], j[block.k.start : block.k.stop]
                count[rows[:, None], columns[None]] += band(block).long()
    return count


def check_form(block: Block) -> None:
    """Trimmed, of one of the four kinds, and honest about its work."""
    seen = band(block)
    assert seen.any(1).all()
    assert seen.any(0).all()
    assert seen.sum() == block.pairs
    rows, columns = len(block.q), len(block.k)
    if block.kind == Kind.CAUSAL:
        assert block.high == 0
        assert rows >= columns
    if block.kind == Kind.EDGE:
        assert block.low == columns - rows <= 0
    if block.kind != Kind.FULL:
        assert not seen.all()


@pytest.mark.parametrize("ring", range(1, 9))
@pytest.mark.parametrize("layout", Layout)
def test_blocks_tile_every_mask_exactly_once(layout, ring):
    """A pair computed twice, or never, is a wrong answer on some mesh."""
    for name, mask in MASKS.items():
        for seq, ulysses in ((31, 1), (48, 2)):
            tokens = partition_of(layout, ring, seq, ulysses)
            for row in range(mask.rows):
                count = coverage(mask, tokens, tokens, row)
                expected = torch.zeros_like(count)
                expected[:seq, :seq] = oracle.visible(mask, tokens, tokens, row).long()
                assert torch.equal(count, expected), (name, tokens, row)


@pytest.mark.parametrize("ring", [1, 2, 3, 5])
@pytest.mark.parametrize("layout", [Layout.CONTIGUOUS, Layout.ZIGZAG, Layout.STRIPED])
@pytest.mark.parametrize(
    ("seq", "start", "key_seq", "mask"),
    [
        (11, 20, 31, Mask(causal=True)),
        (11, 20, 31, Mask(causal=True, window=6)),
        (11, 5, 31, Mask(causal=False, window=4)),
        (31, 0, 7, Mask(causal=False)),
        (17, 17, 34, Mask(causal=True, documents=(((0, 20), (20, 34)),))),
        (12, 0, 20, Mask(causal=False, documents=(((0, 4), (5, 12)),), key_documents=(((1, 11), (11, 20)),))),
    ],
)
def test_queries_of_another_length(layout, ring, seq, start, key_seq, mask):
    """Chunked prefill and cross attention compare global positions, never shapes."""
    queries, keys = Partition(seq, layout, ring, 1, start), Partition(key_seq, layout, ring)
    count = coverage(mask, queries, keys, 0)
    expected = torch.zeros_like(count)
    expected[:seq, :key_seq] = oracle.visible(mask, queries, keys, 0).long()
    assert torch.equal(count, expected)


def test_queries_and_keys_in_other_layouts():
    queries, keys = Partition(24, Layout.CONTIGUOUS, 4), Partition(24, Layout.ZIGZAG, 4)
    count = coverage(Mask(causal=True), queries, keys, 0)
    assert torch.equal(count, oracle.visible(Mask(causal=True), queries, keys, 0).long())


def test_a_start_for_each_batch_row():
    queries, keys = Partition(8, Layout.ZIGZAG, 2, 1, start=(4, 16)), Partition(24, Layout.ZIGZAG, 2)
    assert batch_rows(Mask(causal=True), queries, keys) == 2
    for row in range(2):
        count = coverage(Mask(causal=True), queries, keys, row)
        assert torch.equal(count, oracle.visible(Mask(causal=True), queries, keys, row).long())


def test_neighbours_are_one_block():
    """Few large kernel calls: a causal document at home is one square, a zigzag hop one rectangle."""
    tokens, causal = Partition(64, Layout.ZIGZAG, 4), Mask(causal=True)
    assert blocks(causal, tokens, 1, tokens, 1) == (Block(range(16), range(16), None, 0),)
    assert blocks(causal, tokens, 1, tokens, 0) == (Block(range(16), range(8)),)
    assert blocks(causal, tokens, 0, tokens, 1) == (Block(range(8, 16), range(16)),)
    striped = Partition(64, Layout.STRIPED, 4)
    assert blocks(causal, striped, 0, striped, 1) == (Block(range(1, 16), range(15), None, 0),)
    assert blocks(Mask(causal=False), tokens, 2, tokens, 3) == (Block(range(16), range(16)),)


def test_contiguous_needs_only_what_it_sees():
    tokens = Partition(64, Layout.CONTIGUOUS, 8)
    assert sum(map(sum, needed(Mask(causal=True), tokens, tokens))) == 36
    assert sum(map(sum, needed(Mask(causal=True, window=9), tokens, tokens))) == 15
    assert sum(map(sum, needed(Mask.packed([8] * 8, causal=True), tokens, tokens))) == 8


def double_ring(ring: int, inner: int) -> tuple[tuple[int, ...], ...]:
    """Keys go around the inner ring first, then one step along the outer one."""
    outer = ring // inner
    return tuple(
        tuple(
            (source // inner + a) % outer * inner + (source % inner + b) % inner
            for a in range(outer)
            for b in range(inner)
        )
        for source in range(ring)
    )


def both_ways(ring: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple((source + (n + 1) // 2 * (-1) ** (n + 1)) % ring for n in range(ring)) for source in range(ring))


ORDERS = {
    "single": ring_order(6),
    "double": double_ring(6, 3),
    "double, inner 2": double_ring(6, 2),
    "both": both_ways(6),
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("layout", [Layout.CONTIGUOUS, Layout.ZIGZAG])
def test_schedules_deliver(order, mask, layout):
    """Played through on paper: keys are there when used, every gradient share gets home once, no rank waits forever."""
    tokens = Partition(31, layout, 6)
    need = needed(mask, tokens, tokens)
    visits = schedule(need, order)
    programs = [steps(visits, rank) for rank in range(6)]
    held = [{rank} for rank in range(6)]
    shares: list[dict[int, set[int]]] = [{} for _ in range(6)]  # by source: whose shares are added up
    used = set()
    for now in zip(*programs, strict=True):
        sent, arriving, grads_sent, grads_arriving = [], [], [], []
        for rank, step in enumerate(now):
            for hop in step.send:
                assert hop.source in held[rank]
                sent.append((rank, hop.peer, hop.source))
            if step.receive:
                arriving.append((step.receive.peer, rank, step.receive.source))
            grads_sent += [(rank, hop.peer, hop.source) for hop in step.grad_send]
            grads_arriving += [(hop.peer, rank, hop.source) for hop in step.grad_receive]
            if step.source is not None:
                assert step.source in held[rank]
                used.add((rank, step.source))
                shares[rank][step.source] = {rank}
        assert sorted(sent) == sorted(arriving)
        assert sorted(grads_sent) == sorted(grads_arriving)
        moving = {(sender, receiver, source): shares[sender].pop(source) for sender, receiver, source in grads_sent}
        for (_, receiver, source), share in moving.items():
            assert not share & shares[receiver][source]
            shares[receiver][source] |= share
        for rank, step in enumerate(now):
            for source in step.spent:
                held[rank].remove(source)
        for _, receiver, source in sent:
            held[receiver].add(source)
    assert not any(held)
    home = {(rank, rank) for rank in range(6)}
    assert used | home == {(r, s) for r in range(6) for s in range(6) if need[r][s]} | home
    for source in range(6):
        assert shares[source] == {source: {r for r in range(6) if need[r][source]} | {source}}


def test_an_order_that_collides_is_refused():
    with pytest.raises(ValueError, match="two sources to one rank in step 1"):
        schedule(((True, True), (True, True)), ((0, 1), (1, 1)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Partition(0, Layout.ZIGZAG), "seq=0"),
        (lambda: Partition(4, Layout.ZIGZAG, 0), "ring=0"),
        (lambda: Partition(4, Layout.ZIGZAG, 2, -1), "ulysses=-1"),
        (lambda: Partition(4, "zigzags"), "zigzags.*contiguous"),
        (lambda: Partition(4, Layout.ZIGZAG, 2, start=-1), "start=-1"),
        (lambda: Partition(4, Layout.BALANCED, 2), "owners="),
        (lambda: Partition(4, Layout.BALANCED, 2, owners=(0, 1, 1)), r"block counts \[1, 2\]"),
        (lambda: Mask(causal=True, window=0), "window=0"),
        (lambda: Mask(causal=True, documents=(((0, 5), (4, 8)),)), r"\(4, 8\)"),
        (lambda: Mask(causal=True, documents=()), "empty"),
        (lambda: Mask(causal=True, documents=(((0, 5),),), key_documents=(((0, 2), (2, 4)),)), r"\[1\].*\[2\]"),
        (lambda: Mask.packed([3, -1], causal=True), "-1"),
        (lambda: Mask.padded([3, 9], 8, causal=True), "seq=8"),
        (lambda: Mask.padded([3], 8, "top", causal=True), "top"),
        (
            lambda: blocks(Mask(causal=True), Partition(4, "contiguous"), 0, Partition(9, "contiguous"), 0),
            "4 queries to 9 keys.*start=5",
        ),
        (
            lambda: blocks(Mask(causal=False), Partition(4, "striped", 2), 0, Partition(4, "zigzag", 2), 0),
            "striped.*zigzag",
        ),
        (
            lambda: batch_rows(
                Mask(causal=True, documents=(((0, 2),),) * 3),
                Partition(4, "zigzag", start=(0, 2)),
                Partition(4, "zigzag"),
            ),
            "3.*2",
        ),
    ],
)
def test_bad_input_is_refused(call, message):
    """The message names the values and the cure."""
    with pytest.raises(ValueError, match=message):
        call()


def test_lengths_of_any_integer_kind():
    expected = Mask(causal=True, documents=(((0, 3), (3, 7)),))
    for lengths in ([3, 0, 4], (3, 4), torch.tensor([3, 4]), torch.tensor([3, 4]).numpy(), [[3, 4]]):
        assert Mask.packed(lengths, causal=True) == expected
    assert Mask.packed([[3], [1, 2]], causal=True).rows == 2


@pytest.mark.parametrize(
    ("layout", "ring", "ulysses", "multiple"),
    [
        ("zigzag", 4, 1, 8),
        ("zigzag", 2, 2, 4),
        ("zigzag", 2, 3, 12),
        ("contiguous", 2, 4, 8),
        ("striped", 3, 1, 3),
    ],
)
def test_the_smallest_multiple(layout, ring, ulysses, multiple):
    for seq in (1, multiple - 1, multiple, multiple + 1, 3 * multiple):
        tokens = Partition(seq, layout, ring, ulysses)
        assert tokens.multiple == multiple
        assert tokens.padded % multiple == 0
        assert 0 <= tokens.padded - seq < multiple
        everyone = torch.cat([positions_of(tokens, rank) for rank in range(ring)])
        assert torch.equal(everyone.sort().values, torch.arange(tokens.padded))
        assert all(bool((positions_of(tokens, rank).diff() > 0).all()) for rank in range(ring))


def test_a_large_plan_is_quick_to_make():
    """Only regions that touch a rank's tokens are looked at: 1,000 documents on 64 ranks took minutes otherwise."""
    tokens = Partition(128 * 1024, Layout.ZIGZAG, 64)
    mask = Mask.packed([131] * 1000, causal=True)
    found = needed(mask, tokens, tokens)
    assert all(found[rank][rank] for rank in range(64))
    assert sum(map(sum, found)) < 64 * 4
