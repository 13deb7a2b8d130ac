"""The whole library against the definition: every mesh, layout, mask and head grouping."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import usp
from tests import compiled, hybrid, oracle, pool
from tests.hybrid import Case
from usp import Mask, Region, kernels, ring

WORLDS = (1, 2, 3, 4, 6, 8)
MESHES = [(ring, world // ring) for world in WORLDS for ring in range(1, world + 1) if world % ring == 0]
LAYOUTS = ("contiguous", "zigzag", "striped")
MASKS = {
    "causal": Mask(causal=True),
    "full": Mask(causal=False),
    "window": Mask(causal=True, window=11),
    "documents": Mask.packed([17, 3, 1, 20, 7], causal=True),
}
HALF = torch.bfloat16


def heads_of(ulysses: int) -> dict[str, tuple[int, int]]:
    """Query and KV heads that divide over the Ulysses axis; every rank's share is MHA, GQA or MQA."""
    return {"MHA": (ulysses, ulysses), "GQA": (4 * ulysses, 2 * ulysses), "MQA": (2 * ulysses, ulysses)}


def matrix(ring: int, ulysses: int, dtype: torch.dtype) -> list[Case]:
    """Every layout x mask x head grouping in float64 on up to 4 ranks, else a Latin square of them; batch 1 or 3.

    On more ranks the square is in float64; of the other dtypes there are every layout, every mask and every head
    grouping, a case a mask.
    """
    dim = 32 if dtype == HALF else 8  # rounding errors of very short sums are no measure
    few, wide = ring * ulysses <= 4, dtype == torch.float64
    shift = int(dtype == HALF)
    cases = []
    for a, layout in enumerate(LAYOUTS):
        for b, mask in enumerate(MASKS.values()):
            for c, (heads, kv_heads) in enumerate(heads_of(ulysses).values()):
                square = (a + b + c) % 3 == 0
                if (few and wide) or (square and (few or wide or (a - b - shift) % 3 == 0)):
                    batch = 3 if (a + b + c // 2) % 2 else 1
                    cases.append(Case(ring, ulysses, layout, 48, mask, heads, kv_heads, dim, dim, batch, dtype))
    return cases


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, HALF], ids=["float64", "float32", "bfloat16"])
@pytest.mark.parametrize(("ring", "ulysses"), MESHES, ids=[f"u{u}r{r}" for r, u in MESHES])
def test_matrix(ranks, ring, ulysses, dtype):
    """out, lse and every gradient of random dout and dlse are the definition's, on every rank."""
    answers = ranks(ring * ulysses)(hybrid.worst, matrix(ring, ulysses, dtype))
    for answer in answers:
        for name, (error, _) in answer.items():
            oracle.note_worst(str(dtype).removeprefix("torch."), name, error, f"u{ulysses}r{ring}")


def worst_of(ranks, *cases: Case) -> None:
    ranks(cases[0].ring * cases[0].ulysses)(hybrid.worst, list(cases))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("ring", "ulysses"), [(1, 1), (2, 2), (4, 1), (1, 3)])
def test_any_length(ranks, ring, ulysses, layout):
    """Padding is invisible, with and without order, down to one token for the whole mesh."""
    worst_of(
        ranks,
        *(
            Case(ring, ulysses, layout, seq, Mask(causal=causal), 2 * ulysses, ulysses)
            for seq in (1, 2, 7, 29)
            for causal in (True, False)
        ),
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_with_documents_of_their_own(ranks, layout):
    """Every batch row has its own mask; rows and whole ranks without keys give out 0, lse -inf, gradient 0."""
    masks = [
        Mask(causal=True, documents=(((0, 10), (12, 30)), ((5, 31),), ())),
        Mask.padded([31, 3, 0], 31, "left", causal=False),
        Mask.padded([31, 3, 0], 31, causal=True, window=4),
        Mask(causal=False, window=5),
    ]
    worst_of(ranks, *(Case(2, 2, layout, 31, mask, batch=3) for mask in masks))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_keys_of_another_length(ranks, layout):
    """Cross attention, and queries that are the last tokens (chunked prefill)."""
    worst_of(
        ranks,
        Case(2, 2, layout, 9, Mask(causal=False), key_seq=33),
        Case(2, 2, layout, 33, Mask(causal=False), key_seq=5),
        Case(2, 2, layout, 9, Mask(causal=True), start=24, key_seq=33),
        Case(4, 1, layout, 9, Mask(causal=True, window=7), start=24, key_seq=33),
    )


REGIONS = {
    "prefix": Mask(True, regions=[[Region((0, 15), (0, 15))]]),
    "images": Mask(True, 20, regions=[[Region((3, 14), (3, 14)), Region((21, 37), (21, 37))]]),
    "chunks": Mask.packed([9, 9, 9, 9, 4], causal=True),
    "shared prefix": Mask(True, documents=[[(0, 11), (11, 25), (25, 40)]], regions=[[Region((11, 40), (0, 11))]]),
    "sinks": Mask(True, 6, regions=[[Region((0, 40), (0, 4), high=0)]]),
    "row by row": Mask(
        False, documents=[[]], regions=[[Region((4, 30), (2, 40), -6, 9)], [], [Region((0, 40), (0, 40))]]
    ),
    "holes": Mask.from_attention_mask([[1] * 9 + [0] * 4 + [1] * 20 + [0] * 7] * 3, causal=True),
}


@pytest.mark.parametrize(("ring", "ulysses"), [(2, 2), (4, 1), (1, 3)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_regions(ranks, ring, ulysses, layout):
    """What a mask shows besides is attended and differentiated like the rest."""
    heads = 2 * ulysses, ulysses
    worst_of(ranks, *(Case(ring, ulysses, layout, 40, mask, *heads, batch=3) for mask in REGIONS.values()))


@pytest.mark.parametrize("key_layout", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_queries_and_keys_in_other_layouts(ranks, layout, key_layout):
    masks = [Mask(False), Mask.from_cu_seqlens([0, 4, 20], [0, 15, 26], causal=False)]
    if (layout == "striped") == (key_layout == "striped"):
        masks += [Mask(False, 8), Mask.from_cu_seqlens([0, 4, 20], [0, 15, 26], causal=True, window=7)]
    worst_of(ranks, *(Case(2, 2, layout, 21, mask, key_seq=27, key_layout=key_layout) for mask in masks))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_prefill_in_chunks(ranks, layout):
    """The queries of each chunk are the last tokens so far; one mask of the whole prompt serves all of them."""
    mask = Mask.packed([[50], [21, 29]], causal=True)
    chunks = [(0, 16), (16, 16), (32, 3), (35, 15)]
    worst_of(
        ranks,
        *(Case(2, 2, layout, seq, mask, start=start, key_seq=start + seq, batch=2) for start, seq in chunks),
    )


@pytest.mark.parametrize(("ring", "ulysses"), [(2, 2), (1, 2), (3, 1)])
@pytest.mark.parametrize("exchange", ["ring", "all_gather"])
@pytest.mark.parametrize("backend", ["sdpa", "tiled"])
def test_every_backend_and_exchange(ranks, ring, ulysses, backend, exchange):
    options = (("backend", backend), ("exchange", exchange), ("scale", 0.4), ("check_ranks", False))
    worst_of(
        ranks,
        *(
            Case(ring, ulysses, layout, 49, mask, head_dim_v=12, options=options)
            for layout in LAYOUTS
            for mask in MASKS.values()
        ),
    )


@pytest.mark.parametrize(("ring", "ulysses"), [(1, 2), (2, 2), (4, 1)])
def test_owners_of_blocks(ranks, ring, ulysses):
    """A partition of one's own, block by block."""
    owners = (*range(ring), *range(ring), *reversed(range(ring)))
    cases = [Case(ring, ulysses, "balanced", 49, mask, owners=owners) for mask in MASKS.values()]
    worst_of(ranks, *cases)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_start_for_each_batch_row(ranks, layout):
    """Further turns: every row's queries follow a history of another length, also of none."""
    turns = {"start": (0, 24, 13), "key_seq": 33, "batch": 3}
    worst_of(
        ranks,
        Case(2, 2, layout, 9, Mask(causal=True), **turns),
        Case(2, 2, layout, 9, Mask(causal=True, window=6), **turns),
    )


def test_inference_then_training(ranks):
    """What is kept from a call under inference_mode serves autograd later."""
    assert ranks(2)(_inference_then_training) == [[]] * 2


def _inference_then_training() -> list[str]:
    case = Case(2, 1, seq=52)
    with torch.inference_mode():
        q, k, v = (usp.shard(x, case.mesh(), case.tokens()) for x in case.inputs()[:3])
        out = usp.hybrid_attention(q, k, v, case.mesh(), case.tokens(), mask=case.mask)
    assert not out.requires_grad
    x = torch.ones(52, requires_grad=True)
    usp.shard(x, case.mesh(), case.tokens(), dim=0).sum().backward()
    return hybrid.wrong(case)


@pytest.mark.parametrize("backend", usp.backends())
def test_autocast_does_not_reach_into_kernels(backend):
    """float32 in, float32 arithmetic: what autocast would lower is 1e-2 away."""
    with torch.autocast("cpu", torch.bfloat16):
        assert hybrid.wrong(Case(dtype=torch.float32, options=(("backend", backend),))) == []


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same values as a slice of a larger, transposed tensor."""
    large = torch.zeros(*x.shape[:1], x.shape[2], x.shape[1], 2 * x.shape[3], dtype=x.dtype)
    view = large.transpose(1, 2)[..., ::2]
    view.copy_(x)
    return view


def test_strided_inputs(ranks):
    for wrong in ranks(4)(_strided_wrong):
        assert wrong == []


def _strided_wrong() -> list[str]:
    cases = [Case(ring, 4 // ring, layout) for ring in (1, 2, 4) for layout in LAYOUTS]
    cases = [dataclasses.replace(case, heads=8, kv_heads=4) for case in cases]
    return [name for case in cases for name in hybrid.wrong(case, arrange=strided)]


@pytest.mark.parametrize(
    "order", [("data", "ring", "ulysses"), ("ulysses", "data", "ring"), ("ring", "ulysses", "data")]
)
def test_replicas_side_by_side_and_any_axis_order(ranks, order):
    """Groups are subgroups of a larger world; data replicas do not meet."""
    for wrong in ranks(8)(_wrong_on_mesh, order):
        assert wrong == []


def _wrong_on_mesh(order: tuple[str, ...]) -> list[str]:
    mesh = pool.mesh(2, 2, 2, order)
    return [name for layout in LAYOUTS for name in hybrid.wrong(Case(2, 2, layout, 31), mesh=mesh)]


def test_a_subgroup_of_a_larger_world(ranks):
    """Ranks 1, 2, 5 and 6 of 8 make a mesh; the others do something else."""
    answers = ranks(8)(_wrong_in_subgroup)
    assert [answer for answer in answers if answer is not None] == [[]] * 4


def _wrong_in_subgroup() -> list[str] | None:
    mesh = DeviceMesh("cpu", [[1, 5], [2, 6]], mesh_dim_names=("ring", "ulysses"))
    return hybrid.wrong(Case(2, 2), mesh=mesh) if mesh.get_coordinate() is not None else None


def test_two_calls_in_flight(ranks):
    """Forward twice, then backward in the other order: nothing is shared between calls."""
    assert ranks(4)(_two_in_flight) == [True] * 4


def _two_in_flight() -> bool:
    mesh, mask = pool.mesh(4, 1), Mask(causal=True)
    tokens = Case(4, 1).tokens()
    shards = []
    for seed in (1, 2):
        torch.manual_seed(10 * seed + dist.get_rank())
        shards.append([torch.randn(1, 12, 4, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)])

    def out(n: int) -> torch.Tensor:
        return usp.hybrid_attention(*shards[n], mesh, tokens, mask=mask).square().sum()

    alone = [torch.autograd.grad(out(n), shards[n]) for n in (0, 1)]
    first, second = out(0), out(1)
    grads = {1: torch.autograd.grad(second, shards[1]), 0: torch.autograd.grad(first, shards[0])}
    return all(torch.equal(x, y) for n in (0, 1) for x, y in zip(alone[n], grads[n], strict=True))


def test_gradients_of_only_some_inputs(ranks):
    assert ranks(4)(_partial_gradients) == [True] * 4


def _partial_gradients() -> bool:
    case = Case(2, 2)
    mesh, tokens = case.mesh(), case.tokens()
    whole = run_shards(case)
    for wanted in ((True, False, False), (False, True, False), (False, True, True)):
        q, k, v, dout = (usp.shard(x, mesh, tokens) for x in case.inputs()[:4])
        for x, want in zip((q, k, v), wanted, strict=True):
            x.requires_grad_(want)
        out = usp.hybrid_attention(q, k, v, mesh, tokens, mask=case.mask)
        out.backward(dout)
        for x, want, grad in zip((q, k, v), wanted, whole, strict=True):
            assert (x.grad is not None) == want
            assert not want or torch.equal(x.grad, grad)
    return True


def run_shards(case: Case) -> list[torch.Tensor]:
    values = hybrid.run(dataclasses.replace(case, lse=False))
    return [values[name] for name in ("dq", "dk", "dv")]


def test_double_backward_raises():
    q, k, v = (torch.randn(1, 8, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    out = usp.hybrid_attention(q, k, v, None, usp.Partition(8, "zigzag"), mask=Mask(causal=True))
    (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        grad.sum().backward()


def test_the_module_is_the_function(ranks):
    assert ranks(2)(_module) == [True] * 2


def _module() -> bool:
    mesh, mask = pool.mesh(2, 1), Mask(causal=True, window=5)
    tokens = usp.partition(16, mesh, "striped")
    q, k, v = (torch.randn(2, 8, 2, 4) for _ in range(3))
    module = usp.HybridAttention(mesh, scale=0.7, return_lse=True)
    expected = usp.hybrid_attention(q, k, v, mesh, tokens, mask=mask, scale=0.7, return_lse=True)
    assert "scale=0.7" in repr(module)
    return all(torch.equal(x, y) for x, y in zip(module(q, k, v, tokens, mask), expected, strict=True))


def test_the_pieces_are_the_whole(ranks):
    """sequence_to_heads, ring_attention and heads_to_sequence, composed by hand."""
    assert ranks(4)(_pieces) == [True] * 4


def _pieces() -> bool:
    mesh, mask = pool.mesh(2, 2), Mask(causal=True)
    tokens = usp.partition(16, mesh, "zigzag")
    q, k, v = (torch.randn(1, 4, 4, 8) for _ in range(3))
    heads = [usp.sequence_to_heads(x, mesh) for x in (q, k, v)]
    out, _ = usp.ring_attention(*heads, mesh, tokens, mask=mask)
    assert heads[0].shape == (1, 8, 2, 8)
    assert torch.equal(usp.heads_to_sequence(heads[0], mesh), q)
    return torch.equal(usp.heads_to_sequence(out, mesh), usp.hybrid_attention(q, k, v, mesh, tokens, mask=mask))


def test_compiled_without_a_graph_break():
    """Group names and plan handles cross the boundary of custom ops, so a traced call is one graph.

    The same for a ring is F136 of the cases.
    """
    text = compiled.printed()
    assert text.count("equal, compiled once: ulysses") == 2, text


def test_a_compiled_plan_is_kept():
    """Its number is in the graph for good, however many other calls there were since."""
    script = """
import torch, usp
tokens, mask, q = usp.Partition(16, "zigzag"), usp.Mask(causal=True), torch.randn(1, 16, 2, 8)

def attention(q, scale=None, check=True):
    return usp.hybrid_attention(q, q, q, None, tokens, mask=mask, scale=scale, check_ranks=check)

compiled = torch.compile(lambda q: attention(q, check=False), backend="aot_eager", fullgraph=True)
first = compiled(q)
for n in range(1100):
    attention(q, 0.1 + n / 10_000)
assert torch.equal(compiled(q), first)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"exchange": "rung"}, "exchange='rung'"),
        ({"tokens": usp.Partition(8, "zigzag", 2)}, "ring=2 x ulysses=1, the mesh has ring=1"),
        ({"tokens": usp.Partition(9, "zigzag")}, "q hold 8 tokens"),
        ({"scale": 0.0}, "scale=0.0 is not a number from"),
        ({"heads": 3}, "4 query heads and 3 KV heads: each KV head"),
    ],
)
def test_the_ring_alone_refuses_what_does_not_fit(changes, message):
    q, k = torch.zeros(1, 8, 4, 8), torch.zeros(1, 8, changes.get("heads", 4), 8)
    options = {name: changes[name] for name in ("exchange", "scale") if name in changes}
    tokens = changes.get("tokens", usp.Partition(8, "zigzag"))
    with pytest.raises(ValueError, match=message):
        usp.ring_attention(q, k, k, None, tokens, mask=Mask(causal=True), **options)


# What the tests above must notice: each fault, put into a running rank, has to be found.


def drop_a_hop(monkeypatch) -> None:
    blocks = ring.blocks
    monkeypatch.setattr(ring, "blocks", lambda *args: () if (args[2], args[4]) == (1, 0) else blocks(*args))


def swap_dk_and_dv(monkeypatch) -> None:
    backward = kernels.backward
    monkeypatch.setattr(
        kernels, "backward", lambda *args, **how: tuple(backward(*args, **how)[n] for n in (0, 2, 1, 3))
    )


def zero_dk(monkeypatch) -> None:
    backward = kernels.backward

    def without(*args, **how):
        dq, dk, *others = backward(*args, **how)
        return dq, dk * 0, *others

    monkeypatch.setattr(kernels, "backward", without)


def lose_a_gradient_on_its_way(monkeypatch) -> None:
    wait = ring._RingGradients.wait

    def lossy(self, step):
        self.exchange.wait()
        for buffer in self.arriving.values():
            buffer.zero_()
        wait(self, step)

    monkeypatch.setattr(ring._RingGradients, "wait", lossy)


def ignore_dlse(monkeypatch) -> None:
    backward = kernels.backward
    monkeypatch.setattr(kernels, "backward", lambda *args, **how: backward(*args[:7], None, *args[8:], **how))


FAULTS = {
    drop_a_hop: {"out", "lse", "dq", "dk", "dv"},
    zero_dk: {"dk"},
    swap_dk_and_dv: {"dk", "dv"},
    lose_a_gradient_on_its_way: {"dk", "dv"},
    ignore_dlse: {"dq", "dk"},
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, HALF], ids=["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(ranks, fault, dtype):
    """The twins: with the fault in place exactly the results that it spoils are wrong on some rank."""
    assert all(found == [] for found in ranks(2)(_wrong_with, None, dtype))
    assert set().union(*ranks(2)(_wrong_with, fault, dtype)) == FAULTS[fault]


def _wrong_with(fault, dtype: torch.dtype) -> list[str]:
    dim = 32 if dtype == HALF else 8
    case = Case(2, 1, "zigzag", 48, Mask(causal=True), 4, 2, dim, dim, dtype=dtype)
    ring.interned.cache_clear()
    try:
        with pytest.MonkeyPatch.context() as monkeypatch:
            if fault is not None:
                fault(monkeypatch)
            return hybrid.wrong(case)
    finally:
        ring.interned.cache_clear()
