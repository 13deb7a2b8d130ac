"""Softcap, ALiBi, relative bias and dropout: the same on every mesh, layout and backend, or refused by name."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

import jaxtyping
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import usp
from experiments import support
from tests import hybrid, oracle, pool
from tests.hybrid import Beside, Case
from usp import Mask, Partition, Region, kernels
from usp.blocks import blocks
from usp.kernels.scores import Scores, Terms, _t5_buckets

ROOT = Path(__file__).parent.parent
SLOPES = (0.9, 0.05, 0.004, 0.0)
LAYOUTS = ("contiguous", "zigzag", "striped")
OPTIONS = {
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi": True},
    "bias": {"bias": "t5 encoder"},
    "dropout": {"dropout": (0.3, 11)},
}
MASKS = (
    Mask(True),
    Mask(False),
    Mask(True, 11, regions=[[Region((10, 30), (10, 45))]]),
    Mask.packed([17, 28], causal=True),
)


def worst(ranks, cases: list[Case]) -> None:
    ranks(cases[0].ring * cases[0].ulysses)(hybrid.worst, cases)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16], ids=["float64", "float32", "bfloat16"]
)
@pytest.mark.parametrize(("ring", "ulysses"), [(1, 1), (4, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_on_every_mesh_and_layout(ranks, option, ring, ulysses, dtype):
    """out, lse and every gradient, those of a table too, with every backend that can.

    Every layout x mask on a ring in float64, in turns where there is none; else every layout and every mask.
    """
    dim, wide, shift = 32 if dtype == torch.bfloat16 else 8, dtype == torch.float64, int(dtype == torch.bfloat16)
    worst(
        ranks,
        [
            Case(
                *(ring, ulysses, layout, 49, mask, 4, 2, dim, dim, 2, dtype),
                options=(("backend", name),),
                **OPTIONS[option],
            )
            for a, layout in enumerate(LAYOUTS)
            for b, mask in enumerate(MASKS)
            for name, backend in usp.backends().items()
            if option in backend.options
            and ((wide and (ring > 1 or (a + b + ulysses) % 2 == 0)) or (a - b - shift) % 3 == 0)
        ],
    )


MORE = {
    "uneven heads, copies of KV heads": Case(2, 2, heads=6, kv_heads=3, options=(("replicate_kv", True),)),
    "more ranks than KV heads": Case(1, 4, heads=6, kv_heads=2, options=(("replicate_kv", True),)),
    "all keys gathered": Case(4, 1, options=(("exchange", "all_gather"),)),
    "sinks": Case(2, 2, sinks=True),
    "cross attention": Case(2, 2, seq=9, mask=Mask(False), key_seq=33),
    "starts of rows": Case(2, 2, seq=9, start=(0, 24, 13), key_seq=33, batch=3),
    "documents of rows": Case(2, 2, seq=31, mask=Mask.padded([31, 3, 0], 31, "left", causal=False), batch=3),
    "owners of blocks": Case(2, 1, "balanced", 49, owners=(0, 1, 1, 0, 1, 0)),
    "queries and keys in other layouts": Case(4, 1, "striped", 21, Mask(False), key_seq=27, key_layout="zigzag"),
    "half precision": Case(2, 2, head_dim=32, head_dim_v=24, dtype=torch.float16),
    "unequal head dims": Case(2, 1, head_dim=8, head_dim_v=13),
    "one token a rank": Case(4, 1, "striped", 3),
    "no gradient through lse": Case(2, 2, lse=False),
}


@pytest.mark.parametrize("what", MORE)
def test_every_option_with_everything_else(ranks, what):
    everything = {"softcap": 1.5, "alibi": True, "bias": "clipped", "dropout": (0.2, 1 << 40)}
    options = [*OPTIONS.values(), {"bias": "t5 decoder"}, everything]
    worst(ranks, [dataclasses.replace(MORE[what], **option) for option in options])


@pytest.mark.parametrize("front", [True, False])
def test_joint_tokens(ranks, front):
    """Their positions count like those of the others."""
    calls = [
        Beside(2, 2, layout, mask, front, sinks=True, **option)
        for layout in LAYOUTS
        for mask in (Mask(False), *([Mask(True)] if layout != "striped" else []))
        for option in [*OPTIONS.values(), {"alibi": True, "options": (("backend", "tiled"),)}]
    ]
    ranks(4)(hybrid.joint_equals_the_whole, calls)


# ---------------------------------------------------------------------------------------------------
# Dropout.


def pattern(ring: int, ulysses: int, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """On a rank: (batch, heads, seq, key_seq), whether a pair is kept and visible; and out of random v."""
    mesh = pool.mesh(ring, ulysses) if ring * ulysses > 1 else None
    tokens = usp.partition(48, mesh, layout)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 48, 6, 48, generator=generator, dtype=torch.float64) for _ in range(3))
    q, k, v = (usp.shard(x, mesh, tokens) for x in (q, k, v))
    one_hot = usp.shard(torch.eye(48, dtype=torch.float64).expand(2, 6, 48, 48).transpose(1, 2), mesh, tokens)
    found = []
    for values in (one_hot, v):
        out = usp.hybrid_attention(q, k, values, mesh, tokens, mask=Mask(True), dropout=(0.4, 12345))
        found.append(usp.unshard(out, mesh, tokens))
    return (found[0] > 0).transpose(1, 2), found[1]


def test_dropout_is_the_same_on_every_mesh_and_layout(ranks):
    """To the bit: what is kept. Sums over ranks differ by their order, so out is equal to some 1e-15."""
    kept, out = pattern(1, 1, "contiguous")
    causal = torch.ones(48, 48, dtype=torch.bool).tril()
    assert torch.equal(kept, causal & oracle.kept(0.4, 12345, 6, *torch.arange(48).expand(2, 2, 48)))
    for ring, ulysses in ((1, 1), (2, 1), (1, 2), (4, 1), (2, 2), (6, 1), (3, 2), (2, 3), (1, 6)):
        for layout in LAYOUTS:
            for other, other_out in ranks(ring * ulysses)(pattern, ring, ulysses, layout):
                assert torch.equal(kept, other), (ring, ulysses, layout)
                assert oracle.relative_error(other_out, out) < 5e-15


def kept(p: float, seed: int, batch: int, heads: int, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
    terms = Terms(1.0, dropout=p, seed=seed, i=i, j=j)
    return terms.kept(batch, heads)


def test_dropout_is_fair():
    """Rates of rows, columns, heads and all, and pairs of neighbours, within five standard errors."""
    places = torch.arange(512) + 100_000
    for p in (0.1, 0.5, 0.9):
        x = kept(p, 77, 2, 8, places, places).double() - (1 - p)
        variance = p * (1 - p)
        for dims in ((0, 1, 2, 3), (2, 3), (0, 1, 2), (0, 1, 3)):
            count = math.prod(x.shape[dim] for dim in dims)
            assert (x.mean(dims).abs() < 5 * (variance / count) ** 0.5).all(), (p, dims)
        for dim in range(4):
            for step in (1, 2, 16):
                if x.shape[dim] > step:
                    pairs = x.narrow(dim, step, x.shape[dim] - step) * x.narrow(dim, 0, x.shape[dim] - step)
                    assert pairs.mean().abs() < 5 * variance / pairs.numel() ** 0.5, (p, dim, step)
        other = kept(p, 78, 2, 8, places, places).double() - (1 - p)
        assert (x * other).mean().abs() < 5 * variance / x.numel() ** 0.5


def test_dropout_knows_every_part():
    """Rows, heads, positions beyond 2^32 and both halves of a seed drop differently, and p = 0 nothing."""
    places = torch.arange(64)
    one = kept(0.5, 1, 2, 2, places, places)
    for other in (
        kept(0.5, 1 + (1 << 40), 2, 2, places, places),
        kept(0.5, 1, 2, 2, places + (1 << 33), places),
        one.flip(0),
        one.flip(1),
        one.mT,
    ):
        assert 0.4 < (one == other).double().mean() < 0.6
    q = torch.randn(1, 16, 2, 8)
    tokens = Partition(16, "zigzag")
    plain = usp.hybrid_attention(q, q, q, None, tokens, mask=Mask(True))
    assert torch.equal(plain, usp.hybrid_attention(q, q, q, None, tokens, mask=Mask(True), dropout=(0.0, 5)))


def test_lse_is_undropped_and_checkpoints_replay(ranks):
    assert ranks(2)(_replays) == [True] * 2


def _replays() -> bool:
    mesh = pool.mesh(2, 1)
    tokens = usp.partition(32, mesh, "zigzag")
    torch.manual_seed(0)
    q = usp.shard(torch.randn(1, 32, 2, 8, dtype=torch.float64), mesh, tokens).requires_grad_()

    def attention(q, dropout):
        return usp.hybrid_attention(q, q, q, mesh, tokens, mask=Mask(True), dropout=dropout, return_lse=True)

    (out, lse), (plain, plain_lse) = attention(q, (0.5, 3)), attention(q, None)
    assert torch.allclose(lse, plain_lse, rtol=0, atol=1e-14)
    assert not torch.allclose(out, plain)
    again, _ = checkpoint(attention, q, (0.5, 3), use_reentrant=False)
    grads = [torch.autograd.grad(x.square().sum(), q)[0] for x in (out, again)]
    return torch.equal(out, again) and torch.equal(*grads)


# ---------------------------------------------------------------------------------------------------
# ALiBi as columns.


@pytest.mark.parametrize("mask", [Mask(True), Mask(False), Mask(True, 700)], ids=["causal", "full", "window"])
def test_alibi_far_away(mask):
    """3,000 tokens: a 16-bit additive mask is off by 70 %. Steep and flat slopes, both directions, gradients too.

    In half precision, no further off than the op is without.
    """
    torch.manual_seed(0)
    tokens = Partition(3000, "contiguous")
    whole = [torch.randn(1, 3000, heads, 16).bfloat16() for heads in (4, 2, 2)]  # what all dtypes can hold

    def found(dtype: torch.dtype, backend: str, alibi: tuple[float, ...] | None) -> list[torch.Tensor]:
        q, k, v = (x.to(dtype).requires_grad_() for x in whole)
        how = {"alibi": alibi, "backend": backend, "return_lse": True}
        out, lse = usp.hybrid_attention(q, k, v, None, tokens, mask=mask, **how)
        loss = out.double().square().sum() + lse.double().sum()
        return [x.detach() for x in (out, lse, *torch.autograd.grad(loss, (q, k, v)))]

    exact, exact_without = (found(torch.float64, "tiled", alibi) for alibi in (SLOPES, None))
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        actual = found(dtype, "sdpa", SLOPES)
        without = found(dtype, "sdpa", None) if dtype.itemsize == 2 else exact_without
        for name, *values in zip(("out", "lse", "dq", "dk", "dv"), actual, exact, without, exact_without, strict=True):
            error, usual = (oracle.relative_error(*pair) for pair in (values[:2], values[2:]))
            assert error < oracle.EXACT.get(dtype, max(3 * usual, 1e-4)), (name, dtype, error, usual)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_with_a_reach(layout, mask):
    """Cut blocks show the same pairs, once, and keep their promises."""
    for ring in (1, 4):
        tokens = Partition(49, layout, ring)
        whole = Partition(49, "contiguous")
        for reach in (1, 5, 48, 1000):
            shown = torch.zeros(49, 49, dtype=torch.int64)
            for rank in range(ring):
                for source in range(ring):
                    for block in blocks(mask, tokens, rank, tokens, source, reach=reach):
                        i, j = (
                            torch.tensor(
                                [p for x in tokens.runs(r) for p in range(x.start, x.start + x.step * x.count, x.step)]
                            )
                            for r in (rank, source)
                        )
                        i, j = i[block.q.start : block.q.stop, None], j[None, block.k.start : block.k.stop]
                        offset = torch.arange(len(block.k))[None] - torch.arange(len(block.q))[:, None]
                        seen = torch.ones_like(offset, dtype=torch.bool)
                        seen &= offset >= block.low if block.low is not None else seen
                        seen &= offset <= block.high if block.high is not None else seen
                        assert (j <= i)[seen].all() or (j > i)[seen].all()
                        between = j.max() > i.min() and j.min() < i.max()
                        assert not between or i.max() - i.min() < reach
                        shown[i, j] += seen
            assert torch.equal(shown, oracle.visible(mask, whole, whole, 0).to(torch.int64))


# ---------------------------------------------------------------------------------------------------
# Relative bias.


@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16])
def test_t5_buckets_are_those_of_the_definition(default):
    """Of every offset, in sizes that models have; whatever the default dtype."""
    _t5_buckets.cache_clear()
    torch.set_default_dtype(default)
    try:
        check_t5_buckets()
    finally:
        torch.set_default_dtype(torch.float32)
        _t5_buckets.cache_clear()


def check_t5_buckets() -> None:
    for count, both, far in ((32, True, 128), (32, False, 128), (64, True, 256), (8, True, 20), (2, False, 3)):
        table = torch.arange(count).float()[:, None]
        bias = usp.RelativeBias.t5(table, bidirectional=both, max_distance=far)
        offsets = torch.arange(-3 * far, 3 * far + 1)
        found = Terms(1.0, table=table, starts=bias.starts, buckets=bias.buckets, i=torch.zeros(1).long(), j=offsets)
        scores = torch.zeros(1, 1, 1, len(offsets), dtype=torch.float32)
        found.add_bias(scores)
        side = count // 2 if both else count
        expected = []
        for offset in offsets.tolist():
            distance = abs(offset) if both else max(0, -offset)
            bucket = distance
            if distance >= side // 2:
                ratio = torch.log(torch.tensor(distance / (side // 2), dtype=torch.float32)) / math.log(
                    far / (side // 2)
                )
                bucket = min(side - 1, side // 2 + int(ratio * (side - side // 2)))
            expected.append(bucket + (side if both and offset > 0 else 0))
        assert scores.flatten().tolist() == expected, (count, both, far)


# ---------------------------------------------------------------------------------------------------
# What is refused.

TABLE = torch.zeros(8, 4)
REFUSED = {
    "softcap of 0": ({"softcap": 0.0}, r"softcap=0\.0 is not a number from"),
    "a text": ({"softcap": "2"}, r"softcap='2' is not"),
    "more than float32 holds": ({"softcap": 1e300}, r"softcap=1e\+300 .* from 1e-30 to 1e\+30"),
    "slopes of a wrong kind": ({"alibi": [0.5, 0.25, "0.1", 0.1]}, r"'0\.1'.* is not a tuple of numbers"),
    "steps of floats": ({"bias": usp.RelativeBias(TABLE, (2.5,), (0, 1))}, r"starts=\(2\.5,\) is not a tuple of whole"),
    "buckets of bools": ({"bias": usp.RelativeBias(TABLE, (2,), (False, True))}, r"buckets=.* is not a tuple of whole"),
    "dropout of nearly everything": ({"dropout": (1 - 1e-12, 0)}, r"p < 1"),
    "slopes of other heads": (
        {"alibi": [0.5, 0.25]},
        r"alibi=\[0\.5, 0\.25\]: give one slope for each of the 4 query heads",
    ),
    "a negative slope": ({"alibi": [0.5, 0.25, -1.0, 0.1]}, r"-1\.0.*not negative and at most"),
    "slopes of rows": ({"alibi": torch.ones(2, 4)}, r"is not a tuple of numbers"),
    "learned slopes": ({"alibi": torch.ones(4, requires_grad=True)}, r"alibi requires a gradient"),
    "a dense bias": (
        {"bias": torch.zeros(1, 4, 16, 16)},
        r"bias is a Tensor of \(1, 4, 16, 16\): a dense bias.*RelativeBias",
    ),
    "a table of other heads": (
        {"bias": usp.RelativeBias.clipped(torch.zeros(3, 2))},
        r"bias\.table is \(3, 2\).*4 query heads",
    ),
    "a table of integers": ({"bias": usp.RelativeBias(TABLE.long(), (), (0,))}, r"floating point"),
    "starts that decrease": (
        {"bias": usp.RelativeBias(TABLE, (3, 2), (0, 1, 2))},
        r"starts=\(3, 2\) does not increase",
    ),
    "a bucket too few": ({"bias": usp.RelativeBias(TABLE, (3,), (0,))}, r"buckets=\(0,\): give 2 rows"),
    "a bucket that is not there": ({"bias": usp.RelativeBias(TABLE, (3,), (0, 8))}, r"0 to 7"),
    "dropout without a seed": ({"dropout": 0.5}, r"dropout=0\.5: give \(p, seed\)"),
    "dropout of everything": ({"dropout": (1.0, 0)}, r"dropout=\(1\.0, 0\).*p < 1"),
    "a negative seed": ({"dropout": (0.1, -1)}, r"from 0 to 2\^63 - 1"),
    "softcap on sdpa": ({"softcap": 2.0, "backend": "sdpa"}, r"'sdpa' cannot do softcap=2\.0: .*can: \['tiled'\]"),
    "bias on sdpa": (
        {"bias": usp.RelativeBias.clipped(torch.zeros(3, 4)), "backend": "sdpa"},
        r"'sdpa' cannot do bias=.*\['tiled'\]",
    ),
    "dropout on sdpa": (
        {"dropout": (0.5, 1), "backend": "sdpa"},
        r"'sdpa' cannot do dropout=0\.5: .*generators are local.*\['tiled'\]",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_by_name_on_every_rank(ranks, what):
    """Before anything is sent, and the groups are as good as before."""
    options, words = REFUSED[what]
    for message, sent, again in ranks(2)(_refused, options):
        assert re.search(words, message), message
        assert sent == {"control"}
        assert again == []


def _refused(options: dict) -> tuple[str, set[str], list[str]]:
    mesh = pool.mesh(2, 1)
    tokens = usp.partition(16, mesh, "zigzag")
    q = torch.randn(1, 8, 4, 8)
    jaxtyping.config.update("jaxtyping_disable", True)  # the library's own errors are the subject
    with usp.measure_traffic() as traffic:
        try:
            usp.hybrid_attention(q, q, q, mesh, tokens, mask=Mask(True), **options)
            message = "nothing was refused"
        except ValueError as error:
            message = str(error)
        finally:
            jaxtyping.config.update("jaxtyping_disable", False)
    return message, {kind for kind, sent in traffic.bytes.items() if sent}, hybrid.wrong(Case(2, 1))


@pytest.mark.parametrize("layout", usp.Layout)
def test_the_support_matrix_is_true(ranks, layout):
    """Every cell: computed and right, or refused by name."""
    owners = (0, 1, 1, 0) if layout == "balanced" else None
    for (option, backend, where), able in support.cells().items():
        if where == layout:
            case = Case(2, 1, layout, 21, owners=owners, options=(("backend", backend),), **OPTIONS.get(option, {}))
            if able:
                worst(ranks, [case])
            else:
                with pytest.raises(AssertionError, match=rf"ValueError: backend='{backend}' cannot do {option}="):
                    worst(ranks, [case])


def test_the_page_of_the_support_matrix():
    """docs/support.md is what `python -m experiments.support` prints, and every option is in it or out of it."""
    assert (ROOT / "docs/support.md").read_text() == support.page()
    for backend in usp.backends().values():
        assert sorted([*backend.options, *backend.lacks]) == sorted(kernels.OPTIONS)


def test_ranks_that_ask_for_different_things(ranks):
    for message in ranks(2)(_different):
        assert "dropout: (0.1, 0) on rank 0, (0.1, 1) on rank 1" in message


def _different() -> str:
    mesh = pool.mesh(2, 1)
    q = torch.randn(1, 8, 4, 8)
    tokens, rank = usp.partition(16, mesh, "zigzag"), mesh.get_local_rank("ring")

    def attention(**options) -> torch.Tensor:
        return usp.hybrid_attention(q, q, q, mesh, tokens, mask=Mask(True), **options)

    # The same slopes as a tensor here and numbers there are the same; those that print alike are not.
    slopes = torch.tensor([0.00391, 0.5, 0.25, 0.1])
    attention(alibi=slopes if rank else slopes.tolist())
    with pytest.raises(ValueError, match="different calls"):
        attention(alibi=slopes - 3e-5 * rank)
    with pytest.raises(ValueError, match="different calls") as caught:
        attention(dropout=(0.1, rank))
    return str(caught.value)


def test_what_alibi_takes_of_a_head_counts(monkeypatch):
    """On a device with a largest head dim; steep slopes do not fit float16; and striped shards beside others."""
    q = torch.empty(1, 8, 1, 252, dtype=torch.bfloat16, device="meta")
    monkeypatch.setitem(kernels.backends()["sdpa"].dtypes, "meta", (torch.bfloat16,))
    monkeypatch.setitem(kernels.backends()["sdpa"].head_dim, "meta", 256)
    monkeypatch.setitem(kernels.backends()["tiled"].dtypes, "meta", (torch.bfloat16,))

    def select(q: torch.Tensor, *slopes: float, name: str = "auto", span: int = 8, apart: bool = False) -> str:
        scores = Scores(0.1, alibi=slopes or None)
        return kernels.select(name, q, q, scores, lse_gradient=False, span=span, apart=apart)

    assert select(q) == "sdpa"
    assert select(q, 0.5, span=256) == "sdpa"  # 254 columns
    assert select(q, 0.5, span=65536) == "sdpa"  # 256
    assert select(q, 0.5, span=65537) == "tiled"
    half = torch.empty(1, 8, 1, 8, dtype=torch.float16)
    assert select(half, 3.0, span=1 << 22) == "sdpa"
    assert select(half, 3.0, span=1 + (1 << 22)) == "tiled"
    assert select(half, 4.0) == "tiled"
    for dtype, expected in ((torch.bfloat16, "sdpa"), (torch.float32, "tiled"), (torch.float64, "tiled")):
        assert select(half.to(dtype), 1.0) == expected
    with pytest.raises(ValueError, match="between striped shards and others"):
        select(half, 1.0, name="sdpa", apart=True)
    with pytest.raises(ValueError, match=r"over 5000000 positions in float16.*can: \['tiled'\]"):
        select(half, 1.0, name="sdpa", span=5_000_000)


# ---------------------------------------------------------------------------------------------------
# Pieces and modules.


def test_the_pieces_take_the_options_too(ranks):
    assert ranks(4)(_pieces) == [True] * 4


def _pieces() -> bool:
    mesh, mask = pool.mesh(2, 2), Mask(True)
    tokens = usp.partition(16, mesh, "zigzag")
    q, k, v = (torch.randn(1, 4, 4, 8) for _ in range(3))
    slopes, table = (0.5, 0.25, 0.1, 0.0), torch.randn(5, 4)
    whole = usp.hybrid_attention(
        *(q, k, v, mesh, tokens),
        mask=mask,
        softcap=2.0,
        alibi=slopes,
        bias=usp.RelativeBias.clipped(table),
        dropout=(0.3, 9),
    )
    mine = slice(2 * mesh.get_local_rank("ulysses"), 2 * mesh.get_local_rank("ulysses") + 2)
    out, _ = usp.ring_attention(
        *(usp.sequence_to_heads(x, mesh) for x in (q, k, v)),
        *(mesh, tokens),
        mask=mask,
        softcap=2.0,
        alibi=slopes[mine],
        bias=usp.RelativeBias.clipped(table[:, mine]),
        dropout=(0.3, 9),
    )
    assert torch.equal(usp.heads_to_sequence(out, mesh), whole)
    module = usp.HybridAttention(mesh, softcap=2.0, alibi=slopes)
    more = {"bias": usp.RelativeBias.clipped(table), "dropout": (0.3, 9)}
    return torch.equal(module(q, k, v, tokens, mask, **more), whole)


@pytest.mark.parametrize("backend", usp.backends())
@pytest.mark.parametrize(("ring", "layout"), [(1, "contiguous"), (2, "contiguous"), (2, "zigzag")])
def test_float32_delta(ranks, ring, layout, backend):
    """Where v has an offset, the rounding of out is most of the error of dq and dk in half precision."""
    for mask in (Mask(True), Mask(False), Mask(True, 40)):
        for plain, better in ranks(ring)(_delta_errors, ring, layout, mask, backend):
            assert better["dq"] < 0.35 * plain["dq"], (mask, plain, better)
            assert better["dk"] < 0.5 * plain["dk"], (mask, plain, better)
            assert better["dv"] < 1.1 * plain["dv"], (mask, plain, better)
            assert max(better.values()) < 0.008, (mask, better)


def _delta_errors(ring: int, layout: str, mask: Mask, backend: str) -> list[dict[str, float]]:
    """Relative errors (norms) of the gradients, without and with it."""
    mesh = pool.mesh(ring, 1) if ring > 1 else None
    tokens = usp.partition(256, mesh, layout)
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(1, 256, heads, 64, generator=generator, dtype=torch.float64).bfloat16() for heads in (4, 2, 2, 4)
    ]
    tensors[2] += 5.0

    def gradients(wide: torch.dtype, **options) -> list[torch.Tensor]:
        q, k, v = (usp.shard(x, mesh, tokens).to(wide).requires_grad_() for x in tensors[:3])
        out = usp.hybrid_attention(q, k, v, mesh, tokens, mask=mask, **options)
        grads = torch.autograd.grad(out, (q, k, v), usp.shard(tensors[3], mesh, tokens).to(wide))
        return [usp.unshard(x, mesh, tokens).double() for x in grads]

    reference = gradients(torch.float64)
    return [
        {
            name: ((x - y).norm() / y.norm()).item()
            for name, x, y in zip(("dq", "dk", "dv"), found, reference, strict=True)
        }
        for found in (gradients(torch.bfloat16, backend=backend, float32_delta=x) for x in (False, True))
    ]


def test_the_gradient_of_a_table_adds_up_in_float64():
    """Very many pairs for few cells: in float32 they would be off by 5e-5 at this length."""
    torch.manual_seed(0)
    q = torch.randn(1, 4096, 1, 8)
    found = []
    for dtype in (torch.float64, torch.float32):
        table = torch.zeros(8, 1, dtype=dtype, requires_grad=True)
        bias = usp.RelativeBias.t5(table, bidirectional=True)
        out = usp.hybrid_attention(*[q.to(dtype)] * 3, None, Partition(4096, "zigzag"), mask=Mask(False), bias=bias)
        found += torch.autograd.grad(out.square().sum(), table)
    assert oracle.relative_error(found[1], found[0]) < 5e-6
