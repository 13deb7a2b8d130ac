"""What is sent is exactly what the formulas say; ranks that disagree all raise and nothing hangs."""

from __future__ import annotations

import re
import time

import jaxtyping
import pytest
import torch
import torch.distributed as dist

import usp
from tests import hybrid, pool
from tests.hybrid import Case
from usp import Mask, comm
from usp.blocks import Hop, needed
from usp.mesh import axes

MESHES = [(4, 1), (1, 4), (2, 2), (2, 3), (3, 2), (4, 2), (8, 1)]


def formula(case: Case, rank: int) -> dict[str, int]:
    """Bytes that ring rank `rank` sends in forward and backward, from the table in docs/design.md."""
    tokens = case.tokens()
    ring, ulysses, size = case.ring, case.ulysses, case.dtype.itemsize
    wide = 8 if case.dtype == torch.float64 else 4
    pair = case.head_dim + case.head_dim_v
    token = case.batch * (case.kv_heads // ulysses) * pair
    need = needed(case.mask, tokens, tokens)
    sends = {"ring": 0, "ring_grad": 0}
    for source in range(ring):
        visitors = [r for r in ((source + n) % ring for n in range(1, ring)) if need[r][source]]
        here = rank == source or rank in visitors
        later = visitors if rank == source else visitors[visitors.index(rank) + 1 :] if here else []
        seen = len({column for r in visitors for columns in need[r][source] for column in columns})
        sends["ring"] += seen * bool(later)
        sends["ring_grad"] += seen * (rank in visitors)
    away = ulysses - 1
    row = case.batch * tokens.seq_local
    all_to_all = row * size * away * (case.heads + case.kv_heads) * pair // ulysses
    expected = {
        "ring": 2 * sends["ring"] * token * size,
        "ring_grad": sends["ring_grad"] * token * wide,
        "all_to_all": 2 * all_to_all,
        "lse": 2 * row * wide * away * case.heads // ulysses,
        "control": 16 * sum(degree > 1 for degree in (ring, ulysses)),
    }
    return {kind: count for kind, count in expected.items() if count}


@pytest.mark.parametrize(("ring", "ulysses"), MESHES)
def test_bytes_sent_are_the_formula(ranks, ring, ulysses):
    """A KV block that visits a rank without work, or comes expanded to the query heads, is traffic for nothing."""
    for case in cases_of(ring, ulysses):
        for coordinate, counted in ranks(ring * ulysses)(_count, case):
            assert counted == formula(case, coordinate), case


def test_lse_travels_only_if_it_is_returned(ranks):
    for lse_bytes in ranks(2)(_lse_bytes):
        assert lse_bytes == [0, 4 * 2 * 8 // 2 // 2]


def _lse_bytes() -> list[int]:
    mesh = pool.mesh(1, 2)
    x, counts = torch.zeros(1, 4, 2, 8), []
    for returned in (False, True):
        with usp.measure_traffic() as traffic:
            tokens = usp.partition(8, mesh, "zigzag")
            usp.hybrid_attention(x, x, x, mesh, tokens, mask=Mask(causal=True), return_lse=returned)
        counts.append(traffic.bytes["lse"])
    return counts


def cases_of(ring: int, ulysses: int) -> list[Case]:
    """Every layout x mask, in turns in either dtype: both with each layout and with each mask."""
    heads, dtypes = (2 * ulysses, ulysses), (torch.float32, torch.bfloat16)
    masks = [
        Mask(causal=True),
        Mask(causal=False),
        Mask(True, 9),
        Mask(False, 9),
        Mask.packed([20, 4, 24], causal=True),
    ]
    return [
        Case(ring, ulysses, layout, 48, mask, *heads, head_dim_v=4, batch=2, dtype=dtypes[(a + b) % 2])
        for a, layout in enumerate(("contiguous", "zigzag", "striped"))
        for b, mask in enumerate(masks)
    ]


def _count(case: Case) -> tuple[int, dict[str, int]]:
    with usp.measure_traffic() as traffic, pool.one_rank_checks_types():
        hybrid.run(case)
    assert sum(traffic.to_rank.values()) == traffic.payload_bytes or traffic.bytes["all_gather"]
    return axes(case.mesh())[0].rank, dict(traffic.bytes)


def test_who_gets_what_is_sent(ranks):
    """Consecutive ranks trade heads, keys go to the rank two further."""
    for rank, bytes_, to_rank in ranks(4)(_receivers):
        assert to_rank[rank ^ 2] == bytes_["ring"] + bytes_["ring_grad"]
        assert to_rank == {rank ^ 1: bytes_["all_to_all"] + bytes_["lse"], rank ^ 2: to_rank[rank ^ 2]}


def _receivers() -> tuple[int, dict[str, int], dict[int, int]]:
    case = Case(2, 2, "zigzag", 48, Mask(causal=True), 4, 2)
    with usp.measure_traffic() as traffic:
        hybrid.run(case)
    return dist.get_rank(), dict(traffic.bytes), dict(traffic.to_rank)


@pytest.mark.parametrize("ring", [2, 4])
def test_gathered_keys(ranks, ring):
    """exchange="all_gather" sends the dense volume, twice, and the gradients once."""
    case = Case(ring, 1, "zigzag", 48, heads=2, kv_heads=1, options=(("exchange", "all_gather"),))
    elements = case.tokens().seq_ring * 16
    for _, counted in ranks(ring)(_count, case):
        assert counted["all_gather"] == 2 * (ring - 1) * elements * 8
        assert counted["reduce_scatter"] == (ring - 1) * elements * 8
        assert "ring" not in counted


def test_which_kernels_ran(ranks):
    assert ranks(2)(_kernels) == [{"sdpa": 4, "tiled": 2}] * 2


def _kernels() -> dict[str, int]:
    case = Case(2, 1)
    mesh, tokens = case.mesh(), case.tokens()
    q, k, v = (usp.shard(x, mesh, tokens) for x in case.inputs()[:3])
    with usp.measure_traffic() as traffic:
        usp.hybrid_attention(q, k, v, mesh, tokens, mask=case.mask, backend="tiled")
        with usp.measure_traffic() as inner:
            usp.hybrid_attention(q, k, v, mesh, tokens, mask=case.mask)
            usp.hybrid_attention(q, k, v, mesh, tokens, mask=case.mask)
    usp.hybrid_attention(q, k, v, mesh, tokens, mask=case.mask)
    assert inner.kernels == {"sdpa": 4}
    seen = 12 if dist.get_rank() == 0 else 24  # rank 1 sees only the first half of rank 0's zigzag keys
    assert traffic.payload_bytes == traffic.bytes["ring"] == 3 * seen * 2 * 16 * 8
    assert traffic.messages == {"ring": 3, "control": 3}
    return dict(traffic.kernels)


def test_what_sending_costs_is_known(ranks):
    """CPU time inside communication: some of it, not all, and none of it while a rank only waits for another."""
    for spent_s, total_s in ranks(2)(_cost):
        assert 0 < spent_s < 0.5 * total_s


def _cost() -> tuple[float, float]:
    case = Case(2, 1, seq=2048, heads=4, kv_heads=4, head_dim=32, head_dim_v=32, dtype=torch.float32, lse=False)
    mesh = pool.mesh(2, 1)
    tokens = case.tokens()
    q, k, v = (usp.shard(x, mesh, tokens) for x in case.inputs()[:3])
    with usp.measure_traffic() as traffic:
        start_s = time.thread_time()
        if dist.get_rank() == 1:
            time.sleep(0.2)
        usp.hybrid_attention(q, k, v, mesh, tokens, mask=case.mask)
        return traffic.cpu_s, time.thread_time() - start_s


def test_a_mesh_of_one_sends_nothing(ranks):
    assert ranks(1)(_alone) == [{}]
    with usp.measure_traffic() as traffic:
        assert hybrid.wrong(Case()) == []
    assert not traffic.bytes


def _alone() -> dict[str, int]:
    with usp.measure_traffic() as traffic:
        assert hybrid.wrong(Case(), mesh=pool.mesh(1, 1)) == []
    return dict(traffic.bytes)


def test_data_movement_is_exact(ranks):
    """Integers through every exchange, compared bit for bit."""
    assert ranks(3)(_movement) == [True] * 3


def _movement() -> bool:
    rank, group = dist.get_rank(), pool.mesh(3, 1).get_group("ring").group_name
    everyone = torch.arange(3)
    sent = torch.arange(6).view(3, 2) + 100 * rank
    even = comm.all_to_all(sent, [1, 1, 1], [1, 1, 1], group, "test")
    assert torch.equal(even, torch.arange(2) + 2 * rank + 100 * everyone[:, None])
    uneven = comm.all_to_all(sent, [0, 1, 2], [rank] * 3, group, "test")
    assert (uneven[:, 0] % 100).tolist() == [[], [0, 0, 0], [2, 4, 2, 4, 2, 4]][rank]
    assert torch.equal(comm.all_gather(sent, group, "test"), torch.arange(6).view(3, 2) + 100 * everyone[:, None, None])
    assert torch.equal(comm.reduce_scatter(sent, group, "test"), 3 * (torch.arange(2) + 2 * rank) + 300)
    exchange = comm.Exchange(group, "test", 2, torch.int64, torch.device("cpu"))
    right, left = (rank + 1) % 3, (rank - 1) % 3
    mine = torch.tensor([rank, rank])
    (first,) = exchange.start([(Hop(0, right), mine)], [(Hop(0, left), 2)])
    exchange.wait()
    assert torch.equal(first, torch.tensor([left, left]))
    exchange.recycle(first)
    (second,) = exchange.start([(Hop(1, left), mine)], [(Hop(1, right), 2)])
    exchange.wait()
    assert second.data_ptr() == first.data_ptr()  # buffers are reused
    return torch.equal(second, torch.tensor([right, right]))


# Ranks that disagree.


def _call(case: Case, rank: int, changes: dict) -> str:
    """What this rank is told if `rank` calls with the changes; then a right call on the same groups."""
    mesh, tokens = case.mesh(), case.tokens()
    mine = changes if dist.get_rank() == rank or rank < 0 else {}
    q, k, v = (usp.shard(x, mesh, tokens) for x in case.inputs()[:3])
    q, k, v = (mine.get(name, x) for name, x in {"q": q, "k": k, "v": v}.items())
    q, k, v = (x.to(mine.get("dtype", x.dtype)) for x in (q, k, v))
    q.requires_grad_(mine.get("requires_grad", False))
    options = {name: mine[name] for name in ("scale", "backend", "exchange", "key_tokens") if name in mine}
    start = time.monotonic()
    jaxtyping.config.update("jaxtyping_disable", True)  # as in production: the library's own errors are the subject
    try:
        with usp.measure_traffic() as traffic, pytest.raises(ValueError) as caught:
            usp.hybrid_attention(q, k, v, mesh, mine.get("tokens", tokens), mask=mine.get("mask", case.mask), **options)
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
    assert traffic.payload_bytes == 0
    assert time.monotonic() - start < 20
    assert hybrid.wrong(case) == []
    return str(caught.value)


LARGER = torch.zeros(2, 12, 4, 8, dtype=torch.float64)
DISAGREEMENTS = {
    "window": ({"mask": Mask(True, window=3)}, ["mask", "window=3", "on rank 2"]),
    "documents": ({"mask": Mask.packed([5, 5], causal=True)}, ["mask", "(5, 10)"]),
    "scale": ({"scale": 0.5}, ["scale", "0.5"]),
    "layout": ({"tokens": usp.Partition(48, "striped", 2, 2)}, ["tokens", "layout='striped'", "layout='zigzag'"]),
    "dtype": ({"dtype": torch.float32}, ["dtypes", "torch.float32"]),
    "requires_grad": ({"requires_grad": True}, ["requires_grad", "[True, False, False, None, None]"]),
    "exchange": ({"exchange": "all_gather"}, ["exchange", "all_gather"]),
    "batch": (
        {x: torch.zeros(2, 12, h, 8, dtype=torch.float64) for x, h in (("q", 4), ("k", 2), ("v", 2))},
        ["shapes"],
    ),
}


@pytest.mark.parametrize(("changes", "named"), DISAGREEMENTS.values(), ids=DISAGREEMENTS)
def test_ranks_that_differ_all_raise(ranks, changes, named):
    """Nothing hangs, nobody computes, every rank is told who differs in what, and the next call works."""
    for message in ranks(4)(_call, Case(2, 2), 2, changes):
        assert "ranks made different calls" in message
        assert all(name in message for name in named), message


ERRORS = {
    "backend": ({"backend": "flush"}, "backend='flush' is not one of ['auto', 'sdpa', 'tiled']"),
    "exchange": ({"exchange": "rung"}, "exchange='rung' is not one of"),
    "scale": ({"scale": float("nan")}, "scale=nan"),
    "negative scale": ({"scale": -0.5}, "scale=-0.5 is not a number from 1e-30"),
    "no mask": ({"mask": None}, "mask is a NoneType and not a usp.Mask"),
    "dense mask": ({"mask": torch.ones(48, 48, dtype=torch.bool)}, "mask is a Tensor and not a usp.Mask"),
    "length": ({"q": torch.zeros(1, 9, 4, 8, dtype=torch.float64)}, "q hold 9 tokens"),
    "partition": ({"tokens": usp.Partition(48, "zigzag", 4, 1)}, "ring=4 x ulysses=1, the mesh has ring=2 x ulysses=2"),
    "key partition": ({"key_tokens": usp.Partition(99, "zigzag", 2, 2)}, "k and v hold 12 tokens"),
    "head_dim": ({"q": torch.zeros(1, 12, 4, 4, dtype=torch.float64)}, "q's and k's head_dim must be equal"),
    "dims": ({"q": torch.zeros(12, 4, 8, dtype=torch.float64)}, "each must be (batch, seq, heads, head_dim)"),
    "mixed dtypes": ({"q": torch.zeros(1, 12, 4, 8)}, "torch.float32, torch.float64, torch.float64"),
    "integers": ({"dtype": torch.int64}, "cannot do dtype=torch.int64"),
    "groups": (
        {"q": torch.zeros(1, 12, 5, 8, dtype=torch.float64)},
        "5 query heads and 2 KV heads: each KV head serves equally",
    ),
    "documents": (
        {"mask": Mask.packed([40, 9], causal=True)},
        "reach to position 49 in batch row 0, but the 48 tokens",
    ),
    "rows": ({"mask": Mask(True, documents=(((0, 9),), ((0, 7),)))}, "tells 2 batch rows apart, but the batch is 1"),
}


@pytest.mark.parametrize("rank", [-1, 3], ids=["all ranks", "one rank"])
@pytest.mark.parametrize(("changes", "message"), ERRORS.values(), ids=ERRORS)
def test_an_error_on_any_rank_is_raised_on_all(ranks, changes, message, rank):
    answers = ranks(4)(_call, Case(2, 2), rank, changes)
    for n, answer in enumerate(answers):
        assert message in answer
        assert answer.startswith("another rank refused this call") == (rank == 3 and n != 3)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "message"),
    [
        (8, 2, "8 query heads and 2 KV heads on ulysses=4 ranks: the largest .* is 2, with replicate_kv=True 8"),
        (3, 3, "the largest Ulysses degree is 3; give"),
        (8, 3, "each KV head serves equally many"),
    ],
)
def test_heads_that_cannot_be_dealt(ranks, heads, kv_heads, message):
    for answer in ranks(4)(_heads, heads, kv_heads):
        assert re.search(message, answer)


def _heads(heads: int, kv_heads: int) -> str:
    mesh = pool.mesh(1, 4)
    tokens = usp.partition(16, mesh, "contiguous")
    q, k = torch.zeros(1, 4, heads, 8), torch.zeros(1, 4, kv_heads, 8)
    with pytest.raises(ValueError) as caught:
        usp.hybrid_attention(q, k, k, mesh, tokens, mask=Mask(causal=True))
    return str(caught.value)


@pytest.mark.parametrize("sizes", [(4, 1, 1), (2, 3, 1), (4, 4, 1), (2, 1, 3), (0, 1, 1), (-1, 1, 1)])
def test_a_mesh_that_does_not_fit_the_job(ranks, sizes):
    for message in ranks(8)(_mesh_error, *sizes):
        assert all(f"{name}={size}" in message for name, size in zip(("ring", "ulysses", "data"), sizes, strict=True))


def _mesh_error(ring: int, ulysses: int, data: int) -> str:
    with pytest.raises(ValueError) as caught:
        usp.init_mesh(ring=ring, ulysses=ulysses, data=data, device_type="cpu")
    return str(caught.value)


def test_a_mesh_without_the_axes(ranks):
    assert ranks(2)(_axes_error) == [True] * 2


def _axes_error() -> bool:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("ring",))
    with pytest.raises(ValueError, match=r"lacks .'ulysses'."):
        usp.partition(8, mesh, "zigzag")
    with pytest.raises(ValueError, match="order="):
        usp.init_mesh(ring=2, ulysses=1, order=("ring", "ulysses"), device_type="cpu")
    return True


def test_a_rank_that_stays_away_is_noticed():
    """By the group's timeout; the message says that the group must be rebuilt."""
    short = pool.Pool(2, timeout_s=6)
    try:
        assert short(_one_stays_away)[0] is True
    finally:
        short.close()


def _one_stays_away() -> bool:
    case = Case(2, 1)
    case.mesh()
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match=r"another rank stayed away.*rebuild"):
            hybrid.run(case)
    return True
