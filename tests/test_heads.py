"""Any number of heads, sinks, and tokens that every rank holds: against the definition, bytes against the plan."""

from __future__ import annotations

import math
import re
import time

import jaxtyping
import pytest
import torch
import torch.distributed as dist

import usp
from tests import hybrid, pool
from tests.hybrid import Case
from usp import HeadPlan, Joint, Mask
from usp.heads import Group
from usp.mesh import axes

HEADS = [(9, 3), (6, 2), (6, 3), (8, 1), (5, 5), (7, 7)]
MESHES = sorted(((ring, ulysses) for ulysses in range(1, 7) for ring in range(1, 4)), key=math.prod)  # a pool at a time


def plans(ulysses: int) -> list[HeadPlan]:
    """Every head count on that many ranks, with and without replication where it can be."""
    return [
        HeadPlan(heads, kv_heads, ulysses, replicate)
        for heads, kv_heads in HEADS
        for replicate in (False, True)
        if ulysses <= (heads if replicate else kv_heads)
    ]


@pytest.mark.parametrize("ulysses", range(1, 9))
def test_plans_deal_every_head(ulysses):
    """Query heads once and evenly; each rank has the KV heads that its query heads read, in groups that are regular."""
    for plan in plans(ulysses):
        share = plan.heads // plan.kv_heads
        assert [h for run in plan.queries for h in run] == list(range(plan.heads))
        counts = [len(run) for run in (plan.queries if plan.replicate_kv else plan.keys)]
        assert max(counts) - min(counts) <= 1
        if not plan.replicate_kv:
            assert [h for run in plan.keys for h in run] == list(range(plan.kv_heads))
        for rank in range(ulysses):
            queries, keys = plan.queries[rank], plan.keys[rank]
            assert {h // share for h in queries} == set(keys)
            read = {}
            for group in plan.groups(rank):
                each = len(group.queries) // len(group.keys)
                read |= {q: group.keys[n // each] for n, q in enumerate(group.queries)}
            assert [keys[read[n]] for n in range(len(queries))] == [h // share for h in queries]


def test_plans_of_the_docs():
    assert HeadPlan(9, 3, 2).queries == (range(6), range(6, 9))
    assert HeadPlan(9, 3, 2).groups(0) == (Group(range(6), range(2)),)
    assert HeadPlan(9, 3, 2, True).queries == (range(5), range(5, 9))
    assert HeadPlan(9, 3, 2, True).keys == (range(2), range(1, 3))
    assert HeadPlan(9, 3, 2, True).groups(0) == (Group(range(3), range(1)), Group(range(3, 5), range(1, 2)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((9, 3, 4), "largest Ulysses degree is 3, with replicate_kv=True 9; give"),
        ((9, 3, 10, True), "9 query heads and 3 KV heads on ulysses=10 ranks: the largest Ulysses degree is 9; give"),
        ((8, 3), "8 query heads and 3 KV heads: each KV head serves equally many"),
        ((8, 0), "each is at least 1"),
    ],
)
def test_plans_that_cannot_be(arguments, message):
    with pytest.raises(ValueError, match=message):
        HeadPlan(*arguments)


@pytest.mark.parametrize(("ring", "ulysses"), MESHES, ids=[f"u{u}r{r}" for r, u in MESHES])
def test_any_heads_on_any_mesh(ranks, request, ring, ulysses):
    """out, lse, every gradient and dsinks; and the bytes of the all-to-all are those of the plan.

    On more than 6 ranks a third of the plans, and none on 15 and 18, unless --all-heads is given: rings of 3 are there
    with up to 4 Ulysses ranks, and 5 and 6 of those with rings of up to 2.
    """
    every = request.config.getoption("--all-heads")
    if ring * ulysses > 12 and not every:
        pytest.skip("--all-heads")
    cases = []
    some = 1 if ring * ulysses <= 6 or every else 3
    for n, plan in enumerate(plans(ulysses)[(ulysses + ring) % some :: some]):
        layout, mask = [("zigzag", Mask(True)), ("contiguous", Mask(False, 7)), ("striped", Mask(True))][n % 3]
        options = (("replicate_kv", plan.replicate_kv), ("backend", ["auto", "tiled"][n % 2]))
        case = Case(
            ring, ulysses, layout, 21, mask, plan.heads, plan.kv_heads, 10, 6, sinks=n % 2 == 0, options=options
        )
        cases.append((case, plan))
    ranks(ring * ulysses)(_right_and_counted, cases)


def _right_and_counted(cases: list[tuple[Case, HeadPlan]]) -> None:
    for case, plan in cases:
        with usp.measure_traffic() as traffic, pool.one_rank_checks_types():
            hybrid.worst([case])
        assert traffic.bytes["all_to_all"] == formula(case, plan, axes(case.mesh())[1].rank), case
        assert traffic.messages["all_to_all"] == (4 if case.ulysses > 1 else 0)  # q, k, v together; out; and back


def formula(case: Case, plan: HeadPlan, rank: int) -> int:
    """Of one rank, forward and backward: q, k, v to the others' heads; its heads of out to the others' tokens."""
    token_bytes = case.batch * case.tokens().seq_local * case.dtype.itemsize
    others = [n for n in range(plan.ulysses) if n != rank]
    queries = sum(len(plan.queries[n]) for n in others)
    keys = sum(len(plan.keys[n]) for n in others)
    there = queries * case.head_dim + keys * (case.head_dim + case.head_dim_v)
    back = len(plan.queries[rank]) * len(others)
    its_keys = len(plan.keys[rank]) * len(others)
    gradients = back * case.head_dim + its_keys * (case.head_dim + case.head_dim_v)
    return token_bytes * (there + back * case.head_dim_v + queries * case.head_dim_v + gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_odd_head_dims_in_every_dtype(ranks, dtype):
    """Values narrower and wider than keys, no powers of two, sinks; with and without a gradient through lse."""
    cases = [
        Case(
            2,
            2,
            "zigzag",
            48,
            mask,
            6,
            2,
            dim,
            dim_v,
            dtype=dtype,
            sinks=True,
            lse=lse,
            options=(("backend", backend),),
        )
        for dim, dim_v in ((40, 24), (24, 56), (33, 33))
        for mask in (Mask(True), Mask(True, 9))
        for lse in (True, False)
        for backend in usp.backends()
    ]
    ranks(4)(hybrid.worst, cases)


def test_replicas_of_bfloat16_are_summed_in_float32(ranks):
    """A KV head on 8 ranks: its gradient is as exact as on one."""
    ranks(8)(
        hybrid.worst,
        [Case(1, 8, "zigzag", 64, Mask(True), 8, 1, 32, 32, dtype=torch.bfloat16, options=(("replicate_kv", True),))],
    )


def test_extreme_sinks(ranks):
    """None at all (-inf), all of the softmax, and rows and padding that see no key: no NaN anywhere."""
    assert ranks(4)(_extreme_sinks) == [True] * 4


def _extreme_sinks() -> bool:
    mesh = pool.mesh(2, 2)
    tokens = usp.partition(13, mesh, "zigzag")
    q, k, v = (usp.shard(torch.randn(1, 13, heads, 8), mesh, tokens).requires_grad_() for heads in (4, 2, 2))
    mask = Mask(True, documents=[[(0, 9)]])
    sinks = torch.tensor([-torch.inf, 100.0, -100.0, torch.inf], requires_grad=True)
    out = usp.hybrid_attention(q, k, v, mesh, tokens, mask=mask, sinks=sinks)
    plain = usp.hybrid_attention(q, k, v, mesh, tokens, mask=mask)
    gradients = torch.autograd.grad(out.square().sum(), (q, k, v, sinks))
    assert all(x.isfinite().all() for x in (out, *gradients))
    assert torch.equal(out[:, :, 0], plain[:, :, 0])
    assert torch.equal(out[:, :, 3], torch.zeros_like(out[:, :, 3]))
    return torch.allclose(out[:, :, 2], plain[:, :, 2])


# Joint tokens.


JOINT_MESHES = [(1, 1), (2, 1), (1, 2), (2, 2), (3, 1), (1, 3)]


@pytest.mark.parametrize(("ring", "ulysses"), JOINT_MESHES, ids=[f"u{u}r{r}" for r, u in JOINT_MESHES])
def test_joint_tokens_are_tokens(ranks, ring, ulysses):
    """In front or behind, attending or only attended to, under every mask: as one sequence of all tokens.

    All of these on 1 and 2 x 2 ranks, on the others every pair.
    """
    masks = [
        Mask(False),
        Mask(True),
        Mask(True, 6),
        Mask(False, documents=[[(0, 20)], [(1, 18)]]),
        Mask(True, documents=[[(0, 8), (8, 20)]], regions=[[usp.Region((8, 20), (0, 3))]]),
    ]
    calls = [
        hybrid.Beside(ring, ulysses, ["contiguous", "zigzag"][(n + front) % 2], mask, front, queries, sinks=n % 2 == 0)
        for n, mask in enumerate(masks)
        for front in (True, False)
        for queries in (True, False)
        if ring == ulysses or (n // 2 + front + queries + ulysses) % 2 == 0  # layouts go by n + front
    ]
    calls += [hybrid.Beside(ring, ulysses, "striped", Mask(False), front) for front in (True, False)]
    calls += [hybrid.Beside(ring, ulysses, heads=4, kv_heads=1, replicate_kv=True, sinks=True)]
    calls += [
        hybrid.Beside(ring, ulysses, mask=Mask(True), options=(("backend", backend), ("exchange", exchange)))
        for backend in usp.backends()
        for exchange in ("ring", "all_gather")
    ]
    ranks(ring * ulysses)(hybrid.joint_equals_the_whole, calls)


@pytest.mark.parametrize("return_lse", [False, True])
def test_bytes_of_joint_queries(ranks, return_lse):
    """From the table in docs/design.md: small partial results over the ring, then heads over the Ulysses ranks."""
    for rank, counted in ranks(6)(_joint_bytes, return_lse):
        own, largest = [3, 2][rank], 3  # of 5 heads
        over_ring = 3 * 2 * own * (8 * 4 + 4)
        over_heads = 3 * 1 * largest * (8 * 4 + 4 * return_lse)
        assert counted == 2 * (over_ring + over_heads)


def _joint_bytes(return_lse: bool) -> tuple[int, int]:
    mesh = pool.mesh(3, 2)
    tokens = usp.partition(12, mesh, "zigzag", start=3)
    x = torch.randn(1, 2, 5, 8, requires_grad=True)
    beside = [torch.randn(1, 3, 5, 8, requires_grad=True) for _ in range(3)]
    with usp.measure_traffic() as traffic:
        pair = usp.hybrid_attention(
            x, x, x, mesh, tokens, mask=Mask(False), joint=Joint(*beside), return_lse=return_lse
        )
        results = [y for result in pair for y in (result if return_lse else [result])]
        torch.autograd.grad(sum(y.sum() for y in results), beside)
    return axes(mesh)[1].rank, traffic.bytes["joint"]


# Errors.


def _refused(ranks, world: int, function, *args) -> list[str]:
    return ranks(world)(_as_a_user, function, args)


def _as_a_user(function, args) -> str:
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        return function(*args)
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


def test_two_mistakes_at_once(ranks):
    """Too many ranks for the heads on all of them, and a wrong size on one: all raise at once, the next call works."""
    for rank, message in enumerate(_refused(ranks, 4, _mixed)):
        wanted = "q hold 9 tokens" if rank == 2 else "largest Ulysses degree is 2, with replicate_kv=True 8"
        assert wanted in message, message


def _mixed() -> str:
    mesh = pool.mesh(1, 4)
    tokens = usp.partition(32, mesh, "zigzag")
    q = torch.zeros(1, 9 if dist.get_rank() == 2 else 8, 8, 8)
    k = torch.zeros(1, 8, 2, 8)
    start_s = time.monotonic()
    with usp.measure_traffic() as traffic, pytest.raises(ValueError) as caught:
        usp.hybrid_attention(q, k, k, mesh, tokens, mask=Mask(causal=True))
    assert time.monotonic() - start_s < 5
    assert traffic.payload_bytes == 0
    hybrid.worst([Case(1, 4, heads=8, kv_heads=2, options=(("replicate_kv", True),))])
    return str(caught.value)


def joint_of(**changes) -> Joint:
    shape = {"k": (1, 3, 2, 8), "v": (1, 3, 2, 8), "q": (1, 3, 4, 8)} | changes
    dtype = shape.pop("dtype", torch.float32)
    start = shape.pop("start", 0)
    return Joint(**{name: torch.zeros(x, dtype=dtype) for name, x in shape.items()}, start=start)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sinks": torch.zeros(2)}, r"sinks is \(2,\).*each of the 4 query heads"),
        ({"sinks": torch.zeros(4, dtype=torch.int64)}, "sinks is .*int64.*floating point"),
        ({"joint": joint_of(k=(1, 3, 4, 8))}, r"joint.k is \(1, 3, 4, 8\)"),
        ({"joint": joint_of(v=(1, 2, 2, 8))}, r"joint.v is \(1, 2, 2, 8\)"),
        ({"joint": joint_of(q=(2, 3, 4, 8))}, r"joint.q is \(2, 3, 4, 8\)"),
        ({"joint": joint_of(dtype=torch.float64)}, "joint.k is .*float64"),
        ({"joint": joint_of(k=(1, 0, 2, 8), v=(1, 0, 2, 8), q=(1, 0, 4, 8))}, r"joint.k is \(1, 0, 2, 8\)"),
        (
            {"joint": joint_of(start=5)},
            r"joint tokens at 5 to 8 overlap the queries at 3 to 11: .* behind \(start=11\)",
        ),
        ({"joint": joint_of(start=-1)}, "joint.start=-1 is not a position"),
        ({"joint": (torch.zeros(1, 3, 2, 8), torch.zeros(1, 3, 2, 8))}, "joint is a tuple: give usp.Joint"),
        ({"joint": Joint(None, torch.zeros(1, 3, 2, 8))}, "joint is a Joint: give usp.Joint.* of tensors"),
        ({"joint": {}}, "joint is a dict"),
        ({"mask": Mask(False, documents=[[(0, 999)]])}, "reach to position 999 .* end at 11"),
        ({"mask": Mask(False, documents=[[(0, 3)], [(0, 9)]])}, "2 batch rows"),
    ],
)
def test_what_does_not_fit_is_refused(ranks, options, message):
    for text in _refused(ranks, 2, _call, options):
        assert re.search(message, text), text


def _call(options: dict) -> str:
    mesh = pool.mesh(2, 1)
    tokens = usp.partition(8, mesh, "contiguous", start=3)
    q, k = torch.zeros(1, 4, 4, 8), torch.zeros(1, 4, 2, 8)
    right = {"mask": Mask(causal=True), "joint": joint_of()}
    mine = right | options if dist.get_rank() == 0 else right
    with pytest.raises(ValueError) as caught:
        usp.hybrid_attention(q, k, k, mesh, tokens, **mine)
    usp.hybrid_attention(q, k, k, mesh, tokens, **right)
    return str(caught.value)


def test_the_pieces_with_a_plan(ranks):
    """sequence_to_heads, ring_attention and heads_to_sequence with uneven heads, composed by hand."""
    assert ranks(4)(_pieces) == [True] * 4


def _pieces() -> bool:
    mesh, mask = pool.mesh(2, 2), Mask(causal=True)
    tokens = usp.partition(16, mesh, "zigzag")
    q, k = torch.randn(1, 4, 9, 8), torch.randn(1, 4, 3, 8)
    for replicate in (False, True):
        plan = HeadPlan(9, 3, 2, replicate)
        heads = [usp.sequence_to_heads(x, mesh, plan=plan) for x in (q, k, k)]
        out, _ = usp.ring_attention(*heads, mesh, tokens, mask=mask, plan=plan)
        whole = usp.hybrid_attention(q, k, k, mesh, tokens, mask=mask, replicate_kv=replicate)
        assert torch.equal(usp.heads_to_sequence(out, mesh, plan=plan), whole)
        with pytest.raises(ValueError, match="heads and k 2, but Ulysses rank"):
            usp.ring_attention(
                heads[0], *2 * [torch.randn(1, 8, 2, 8)], mesh, tokens, mask=mask, plan=HeadPlan(3, 3, 2)
            )
    with pytest.raises(ValueError, match="9 heads do not divide over ulysses=2 ranks: give plan="):
        usp.sequence_to_heads(q, mesh)
    with pytest.raises(ValueError, match=r"x has 9 heads .* does not fit HeadPlan"):
        usp.sequence_to_heads(q, mesh, plan=HeadPlan(8, 4, 2))
    with pytest.raises(ValueError, match=r"x has 9 heads on rank .*: not those of HeadPlan"):
        usp.heads_to_sequence(q, mesh, plan=HeadPlan(9, 3, 2))
    return True
