"""The pure part: over all (rank, source) pairs, blocks tile the mask exactly once; schedules deliver."""

from __future__ import annotations

import itertools
import random
import time
from bisect import bisect_right

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import oracle
from usp.blocks import Block, Kind, Load, batch_rows, blocks, carried, loads, needed, ring_order, schedule, steps
from usp.masks import Mask, Region
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
    "prefix": Mask(causal=True, regions=[[Region((0, 11), (0, 11))]]),
    "images": Mask(causal=True, window=9, regions=[[Region((3, 9), (3, 9)), Region((14, 26), (14, 26))]]),
    "chunks": Mask.packed([6, 6, 6, 6, 6, 1], causal=True),
    "shared prefix": Mask(
        causal=True,
        documents=[[(0, 8), (8, 17), (17, 31)]],
        regions=[[Region((8, 31), (0, 8)), Region((9, 12), (0, 9))]],
    ),
    "sinks and a window": Mask(causal=True, window=5, regions=[[Region((0, 31), (0, 3), high=0)]]),
    "overlapping regions, row by row": Mask(
        causal=False,
        documents=[()],
        regions=[
            [
                Region((0, 20), (4, 30), -3, 6),
                Region((5, 31), (0, 12), high=2),
                Region((7, 9), (0, 31)),
                Region((8, 9), (2, 4)),
            ],
            [],
            [Region((0, 31), (0, 31), 2, 4), Region((0, 31), (0, 31), 3, 9), Region((0, 31), (10, 11))],
        ],
    ),
    "holes in a row": Mask.from_attention_mask([[1] * 9 + [0] * 3 + [1] * 11 + [0] * 8], causal=True, window=14),
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
    for n, (name, mask) in enumerate(MASKS.items()):
        seq, ulysses = [(31, 1), (48, 2)][(n + ring) % 2]
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


@pytest.mark.parametrize("ring", [1, 2, 3, 5])
@pytest.mark.parametrize("key_layout", Layout)
@pytest.mark.parametrize("layout", Layout)
def test_queries_and_keys_in_other_layouts(layout, key_layout, ring):
    """All pairs of layouts; striped meets the others only under masks without an order."""
    queries, keys = partition_of(layout, ring, 24), partition_of(key_layout, ring, 29)
    masks = [Mask(causal=False), Mask(False, documents=[[(1, 9), (9, 22)]], key_documents=[[(0, 8), (12, 29)]])]
    if ring == 1 or (layout == Layout.STRIPED) == (key_layout == Layout.STRIPED):
        masks += [Mask(causal=False, window=6), Mask.from_cu_seqlens([0, 4, 20], [0, 15, 26], causal=True)]
    for mask in masks:
        count = coverage(mask, queries, keys, 0)
        expected = torch.zeros_like(count)
        expected[:24, :29] = oracle.visible(mask, queries, keys, 0).long()
        assert torch.equal(count, expected), (mask, queries, keys)


def test_a_start_for_each_batch_row():
    queries, keys = Partition(8, Layout.ZIGZAG, 2, 1, start=(4, 16)), Partition(24, Layout.ZIGZAG, 2)
    assert batch_rows(Mask(causal=True), queries, keys) == 2
    for row in range(2):
        count = coverage(Mask(causal=True), queries, keys, row)
        assert torch.equal(count, oracle.visible(Mask(causal=True), queries, keys, row).long())


@pytest.mark.parametrize("layout", Layout)
def test_loads_are_the_sums_over_blocks(layout):
    """Of every rank and source, also where what looks alike is counted once: rings with and without padding."""
    for ring, seq, start in ((1, 31, 0), (3, 31, 5), (4, 64, 0), (7, 31, 0)):
        tokens = partition_of(layout, ring, seq, start=start)
        for name, mask in MASKS.items():
            found = loads(mask, tokens, tokens)
            for rank, source in itertools.product(range(ring), repeat=2):
                parts = [
                    block
                    for row in range(batch_rows(mask, tokens, tokens))
                    for block in blocks(mask, tokens, rank, tokens, source, row)
                ]
                sums = Load(
                    sum(x.pairs for x in parts),
                    *(sum(map(len, x)) for x in ([y.q for y in parts], [y.k for y in parts])),
                    len(parts),
                )
                assert found[rank].get(source, Load(0, 0, 0, 0)) == sums, (name, tokens, rank, source)


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
    assert pairs(needed(Mask(causal=True), tokens, tokens)) == 36
    assert pairs(needed(Mask(causal=True, window=9), tokens, tokens)) == 15
    assert pairs(needed(Mask.packed([8] * 8, causal=True), tokens, tokens)) == 8


def pairs(need) -> int:
    return sum(map(bool, itertools.chain(*need)))


def test_only_seen_keys_leave_home():
    """A window's hop holds the window, a document's hop the document."""
    tokens = Partition(64, Layout.CONTIGUOUS, 4)
    assert carried(needed(Mask(causal=True), tokens, tokens)) == (*((range(16),),) * 3, ())
    assert carried(needed(Mask(causal=True, window=4), tokens, tokens)) == (*((range(13, 16),),) * 3, ())
    assert carried(needed(Mask.packed([20, 26, 18], causal=True), tokens, tokens)) == (
        *((range(16),), (range(4, 16),), (range(14, 16),), ()),
    )
    zigzag = Partition(64, Layout.ZIGZAG, 4)
    assert carried(needed(Mask(causal=True, window=4), zigzag, zigzag))[0] == (range(5, 8),)
    assert carried(needed(Mask(causal=True, window=4), zigzag, zigzag))[2] == (range(5, 8), range(13, 16))
    striped = Partition(64, Layout.STRIPED, 4)
    assert carried(needed(Mask.packed([20, 30], causal=True), striped, striped))[1:3] == ((range(13),), (range(12),))


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
        (lambda: Mask.packed([3.0, 4.0], causal=True), "lengths holds 3.0"),
        (lambda: Mask.packed([[3], 4], causal=True), "lengths mixes numbers and rows"),
        (lambda: Mask.packed([[[3]]], causal=True), "lengths has more than two dimensions"),
        (lambda: Mask.from_cu_seqlens([3, 4], causal=True), r"cu_seqlens begins with \[3\]: .* begin with 0"),
        (lambda: Mask.from_cu_seqlens([0, 4, 3], causal=True), "from 4 to 3: .* never decrease"),
        (lambda: Mask.from_cu_seqlens([0, 4], [0, 2, 3], causal=False), r"\[1\].*key_cu_seqlens \[2\]"),
        (lambda: Mask.from_position_ids([4, 5, 6], causal=True), "position_ids holds 4 at index 0 after None.*whole"),
        (lambda: Mask.from_position_ids([0, 1, 3], causal=True), "position_ids holds 3 at index 2 after 1"),
        (
            lambda: Mask.from_position_ids([[0, 1]], [[1]], causal=True),
            "position_ids is (1, 2) and attention_mask (1, 1)".replace("(", r"\(").replace(")", r"\)"),
        ),
        (
            lambda: Mask.from_attention_mask(torch.zeros(1, 1, 4, 4), causal=True),
            "attention_mask has more than two dimensions.*dense",
        ),
        (lambda: Mask.from_attention_mask(torch.zeros(2, 4), causal=True), "attention_mask holds 0.0.*additive"),
        (lambda: Mask.from_attention_mask([[0, -10000]], causal=True), "attention_mask holds -10000.*additive"),
        (lambda: Mask.from_attention_mask([], causal=True), "attention_mask is empty"),
        (
            lambda: Mask.from_attention_mask(torch.zeros(3, 0, dtype=torch.int64), causal=True),
            "attention_mask is empty",
        ),
        (lambda: Mask.from_attention_mask([[1, 1], [1]], causal=True), r"attention_mask has rows of \[1, 2\] tokens"),
        (lambda: Mask.from_position_ids([[0, 1], [0]], causal=True), r"position_ids has rows of \[1, 2\] tokens"),
        (lambda: Mask.from_attention_mask([[1, 0] * 100], causal=True), "a document is in 100 runs"),
        (lambda: Mask.packed([], causal=True), "lengths is empty"),
        (lambda: Mask.packed(torch.tensor(3), causal=True), "lengths is 3: give a tensor or a sequence"),
        (lambda: Mask.packed(None, causal=True), "lengths is None"),
        (lambda: Mask.from_cu_seqlens({0, 3}, causal=True), r"cu_seqlens is \{0, 3\}"),
        (lambda: Mask.padded([[3, 4], [5, 6]], 8, causal=True), "one length a batch row"),
        (lambda: Mask(True, documents=[(0, 4), (4, 10)]), "documents holds 0 where a span"),
        (lambda: Mask(True, documents=[[(0.5, 4.9)]]), r"documents holds \(0.5, 4.9\) where a span"),
        (lambda: Mask(True, documents=5), "documents holds 5 where a row is"),
        (lambda: Mask(True, regions=5), "regions holds 5 where a row is"),
        (lambda: Mask(True, regions=[None]), "regions holds None where a row is"),
        (lambda: Mask(True, regions=[[None]]), "regions holds None: give one row of Region"),
        (lambda: Mask(True, regions=[[(("0", "4"), (0, 4))]]), r"regions holds \('0', '4'\) where a span"),
        (lambda: Mask(True, regions=[[((0, float("inf")), (0, 4))]]), "inf.* where a span"),
        (lambda: Mask(True, regions=[[((0, 4), (0, 4), 0.5)]]), "low and high are whole numbers"),
        (lambda: Mask(True, regions=[[((-3, 4), (0, 4))]]), "positions start at 0"),
        (lambda: Mask(True, 2.5), "window=2.5: .* whole number from 1; None is no window"),
        (lambda: Mask("no"), "causal='no' is neither True nor False"),
        (lambda: Mask.from_attention_mask([[1, 0, 1]], causal=True, window=-1), "window=-1"),
        (lambda: Mask.from_cu_seqlens([0, 3], [0, 3], causal=True, window=0), "window=0"),
        (lambda: Mask(True, regions=[]), "regions is empty"),
        (lambda: Mask(True, regions=[Region((0, 4), (0, 4))]), r"regions holds \(0, 4\): give one row of Region"),
        (lambda: Mask(True, regions=[[((0, 4), (0, 4), 1, 2, 3)]]), "one row of Region"),
        (lambda: Mask(True, regions=[[Region((0, 4), (4, 4))]]), "shows nothing"),
        (lambda: Mask(True, regions=[[Region((0, 4), (0, 4), 3, 2)]]), "shows nothing"),
        (lambda: Mask(True, documents=[[]] * 3, regions=[[]] * 2), r"'documents': 3, 'regions': 2"),
        (lambda: Mask.padded([3, 9], 8, causal=True), "seq=8"),
        (lambda: Mask.padded([3], 8, "top", causal=True), "top"),
        (
            lambda: blocks(Mask(causal=True), Partition(4, "contiguous"), 0, Partition(9, "contiguous"), 0),
            "4 queries to 9 keys.*start=5",
        ),
        (
            lambda: blocks(Mask(causal=True), Partition(4, "striped", 2), 0, Partition(4, "zigzag", 2), 0),
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


MADE = {
    "padding": (
        Mask.from_attention_mask([[1, 1, 1, 0], [0, 1, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]], causal=True),
        Mask(True, documents=[[(0, 3)], [(1, 4)], [(0, 4)], []]),
    ),
    "bool": (
        Mask.from_attention_mask(torch.tensor([[True, False]]), causal=False, window=3),
        Mask(False, 3, [[(0, 1)]]),
    ),
    "numbered documents": (
        Mask.from_attention_mask(torch.tensor([[1, 1, 2, 3, 3, 0]]), causal=True),
        Mask(True, documents=[[(0, 2), (2, 3), (3, 5)]]),
    ),
    "a hole": (
        Mask.from_attention_mask([[1, 1, 0, 1]], causal=False),
        Mask(
            False,
            documents=[[]],
            regions=[
                [Region((0, 2), (0, 2)), Region((0, 2), (3, 4)), Region((3, 4), (0, 2)), Region((3, 4), (3, 4))],
            ],
        ),
    ),
    "a number that comes back": (
        Mask.from_attention_mask([[1, 2, 1]], causal=True),
        Mask(
            False,
            documents=[[]],
            regions=[
                [
                    Region((0, 1), (0, 1), None, 0),
                    Region((2, 3), (0, 1), None, 0),
                    Region((2, 3), (2, 3), None, 0),
                    Region((1, 2), (1, 2), None, 0),
                ]
            ],
        ),
    ),
    "restarts": (
        Mask.from_position_ids([0, 0, 0, 1, 2, 3, 4, 5, 0, 0, 1, 2, 3, 4, 5, 6], causal=True),
        Mask.from_cu_seqlens([0, 1, 2, 8, 9, 16], causal=True),
    ),
    "restarts and padding": (
        Mask.from_position_ids(
            torch.tensor([[1, 1, 0, 1, 2], [0, 1, 0, 0, 0]]),
            torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0]]),
            causal=True,
        ),
        Mask(True, documents=[[(2, 5)], [(0, 2), (2, 3)]]),
    ),
    "repeated entries": (
        Mask.from_cu_seqlens(torch.tensor([0, 0, 6, 6, 16, 16], dtype=torch.int32), causal=True),
        Mask.packed([6, 10], causal=True),
    ),
    "rows of offsets": (
        Mask.from_cu_seqlens([[0, 4], [0, 2, 4]], causal=True),
        Mask.packed([[4], [2, 2]], causal=True),
    ),
    "keys of their own": (
        Mask.from_cu_seqlens([0, 3, 3, 5, 9], [0, 4, 6, 9, 9], causal=False),
        Mask(False, documents=[[(0, 3), (3, 5)]], key_documents=[[(0, 4), (6, 9)]]),
    ),
    "keys of their own, from the ends": (
        Mask.from_cu_seqlens([0, 3, 5], [0, 4, 9], causal=True, window=2),
        Mask(False, documents=[[]], regions=[[Region((0, 3), (0, 4), 0, 1), Region((3, 5), (4, 9), 3, 4)]]),
    ),
}


@pytest.mark.parametrize(("made", "expected"), MADE.values(), ids=MADE)
def test_masks_from_what_models_hold(made, expected):
    """Attention masks, position ids and cumulative lengths say the same as spans and regions."""
    assert made == expected


def together(numbers: list[list[object]], row: int) -> torch.Tensor:
    """(seq, seq) of bool: equal numbers, and not None."""
    same = [[a == b and a is not None for b in numbers[row]] for a in numbers[row]]
    return torch.tensor(same).view(len(same), len(same))


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_constructors_show_what_they_are_given(data):
    """Numbered tokens, restarting positions and lengths, drawn at random, against equal numbers pair by pair."""
    batch, seq = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 24))
    causal, window = data.draw(st.booleans()), data.draw(st.none() | st.integers(1, 9))
    row = st.lists(st.integers(0, 3), min_size=seq, max_size=seq)
    given_numbers = [data.draw(row) for _ in range(batch)]
    restarts = [[data.draw(st.booleans()) for _ in range(seq)] for _ in range(batch)]
    position_ids, numbered = [], []
    for kept, again in zip(given_numbers, restarts, strict=True):
        ids, documents, position, document = [], [], -1, 0
        for there, restart in zip(kept, again, strict=True):
            if there:
                document += restart or position < 0
                position = 0 if restart or position < 0 else position + 1
            ids.append(position if there else 7)
            documents.append((there, document) if there else None)
        position_ids.append(ids)
        numbered.append(documents)
    kind = {"causal": causal, "window": window}
    made = {
        "attention mask": (
            Mask.from_attention_mask,
            [torch.tensor(given_numbers)],
            [[x or None for x in r] for r in given_numbers],
        ),
        "position ids": (Mask.from_position_ids, [torch.tensor(position_ids), torch.tensor(given_numbers)], numbered),
    }
    if all(map(any, given_numbers)):
        cut = [0, *sorted(data.draw(st.lists(st.integers(0, seq), max_size=5))), seq]
        by_offset = [[bisect_right(cut, n) for n in range(seq)]]
        made["cumulative lengths"] = Mask.from_cu_seqlens, [torch.tensor(cut)], by_offset
    tokens = Partition(seq, "contiguous")
    for name, (make, arguments, numbers) in made.items():
        if name != "cumulative lengths" and not any(map(any, numbers)):
            continue
        mask = make(*arguments, **kind)
        for n in range(len(numbers)):
            expected = together(numbers, n) & oracle.visible(Mask(**kind), tokens, tokens, 0)
            assert torch.equal(oracle.visible(mask, tokens, tokens, n), expected), (name, arguments)


def test_the_order_of_regions_does_not_matter():
    """Nor does the process: equal masks have equal blocks everywhere."""
    wide, narrow = Region((0, 8), (0, 8)), Region((0, 8), (0, 8), 0, None)
    for regions in ([wide, narrow], [narrow, wide], [narrow, wide, narrow]):
        mask = Mask(True, documents=[[]], regions=[regions])
        assert mask.disjoint_regions() == (wide,)
        assert not mask.ordered


def test_regions_of_many_documents_are_quick():
    """Each region meets only what overlaps it: 1,000 documents that all see a prefix, with an image in each."""
    ends = [(100 * n, 100 * n + 100) for n in range(1000)]
    images = [Region((end - 20, end), (end - 20, end)) for _, end in ends]
    prefixes = [Region((first, end), (0, 50)) for first, end in ends]
    mask = Mask(causal=True, documents=[ends], regions=[[*images, *prefixes]])
    assert len(mask.disjoint_regions()) == 3 * 1000
    assert Mask(causal=True, documents=[ends], regions=[[Region((0, 100_000), (0, 50))]]).rows == 1


def test_what_is_shown_is_the_call():
    """In error messages, and what a drawn call prints to be seen again."""
    names = {"Mask": Mask, "Partition": Partition, "Region": Region}
    for mask in MASKS.values():
        assert eval(repr(mask), names) == mask
    for tokens in (Partition(9, "zigzag", 2), Partition(8, "balanced", 2, 2, (3, 5), (1, 0))):
        assert eval(repr(tokens), names) == tokens
    assert repr(Partition(9, "zigzag", 2)) == "Partition(seq=9, layout='zigzag', ring=2, ulysses=1)"


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
    mask = Mask.packed([131] * 1000, causal=True)
    for layout in (Layout.ZIGZAG, Layout.STRIPED):
        tokens = Partition(128 * 1024, layout, 64)
        start_s = time.process_time()
        found = needed(mask, tokens, tokens)
        assert time.process_time() - start_s < 5.0  # 0.04 s
        assert all(found[rank][rank] for rank in range(64))
        assert pairs(found) < 64 * 4 or layout == Layout.STRIPED
