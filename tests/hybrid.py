"""On a rank: run the hybrid attention on shards and hold the results against the reference."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

import usp
from tests import oracle, pool
from usp import Mask, Partition
from usp.mesh import axes


@dataclass(frozen=True)
class Case:
    """One call. Everything else follows from it, the same on every rank."""

    ring: int = 1
    ulysses: int = 1
    layout: str = "zigzag"
    seq: int = 48
    mask: Mask = Mask(causal=True)  # noqa: RUF009
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    head_dim_v: int = 8
    batch: int = 1
    dtype: torch.dtype = torch.float64
    start: int | tuple[int, ...] = 0
    key_seq: int | None = None
    key_layout: str | None = None
    lse: bool = True
    owners: tuple[int, ...] | None = None
    sinks: bool = False
    softcap: float | None = None
    alibi: bool = False
    bias: str | None = None
    dropout: tuple[float, int] | None = None
    options: tuple[tuple[str, object], ...] = ()

    def tokens(self) -> Partition:
        owners = self.owners if self.layout == "balanced" else None
        return Partition(self.seq, self.layout, self.ring, self.ulysses, self.start, owners)

    def key_tokens(self) -> Partition:
        seq, layout = self.key_seq or self.seq, self.key_layout or self.layout
        start = 0 if self.key_seq else self.start
        return Partition(seq, layout, self.ring, self.ulysses, start, self.owners if layout == "balanced" else None)

    def scores(self) -> oracle.Options:
        scale = dict(self.options).get("scale")
        return oracle.Options(scale, self.softcap, slopes(self.heads) if self.alibi else None, self.bias, self.dropout)

    def inputs(self) -> tuple[Tensor, ...]:
        """q, k, v, dout, dlse, sinks, table: whole tensors, made once."""
        q_shape, k_shape = (self.batch, self.seq, self.heads), (self.batch, self.key_seq or self.seq, self.kv_heads)
        buckets = 11 if self.bias == "clipped" else 12
        return _inputs(q_shape, k_shape, (self.head_dim, self.head_dim_v), buckets, self.dtype)

    def expected(self) -> oracle.Answer:
        """The reference, which no mesh or layout changes; made once."""
        return _expected(
            dataclasses.replace(self, ring=1, ulysses=1, layout="contiguous", key_layout=None, owners=None)
        )

    def mesh(self):
        return pool.mesh(self.ring, self.ulysses) if self.ring * self.ulysses > 1 else None


def slopes(heads: int) -> tuple[float, ...]:
    """One a head, from a steep one down to none."""
    return tuple(0.7 * (heads - 1 - n) / heads for n in range(heads))


def relative_bias(form: str, table: Tensor) -> usp.RelativeBias:
    if form == "clipped":
        return usp.RelativeBias.clipped(table)
    return usp.RelativeBias.t5(table, bidirectional=form == "t5 encoder", max_distance=20)


@lru_cache(maxsize=32)
@torch.inference_mode(False)  # they serve autograd later, wherever they are made
def _inputs(q_shape, k_shape, dims: tuple[int, int], buckets: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    (batch, seq, heads), (dim, dim_v) = q_shape, dims
    shards = normal(*q_shape, dim), normal(*k_shape, dim), normal(*k_shape, dim_v), normal(*q_shape, dim_v)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    more = normal(batch, heads, seq), normal(heads), normal(buckets, heads)
    return *(x.to(dtype) for x in shards), *(x.to(wide) for x in more)


@lru_cache(maxsize=256)
def _expected(case: Case) -> oracle.Answer:
    q, k, v, dout, dlse, sinks, table = case.inputs()
    tokens = case.tokens(), case.key_tokens()
    seen = torch.stack([oracle.visible(case.mask, *tokens, n) for n in range(case.batch)])
    positions = tuple(torch.stack([torch.arange(x.seq) + x.span(n)[0] for n in range(case.batch)]) for x in tokens)
    tensors = sinks if case.sinks else None, table if case.bias else None
    return oracle.answer(q, k, v, dout, dlse if case.lse else None, seen, case.scores(), *tensors, positions)


DIMS = {"out": 1, "lse": 2, "dq": 1, "dk": 1, "dv": 1}  # where each result's tokens are


def run(case: Case, mesh=None, arrange=lambda x: x) -> dict[str, Tensor]:
    """This rank's out, lse, dq, dk and dv; dsinks and dtable summed over ranks.

    `arrange` may change the shards' memory layout.
    """
    mesh = mesh or case.mesh()
    tokens, key_tokens = case.tokens(), case.key_tokens()
    q, k, v, dout, dlse, sinks, table = case.inputs()
    q, dout = (usp.shard(x, mesh, tokens) for x in (q, dout))
    k, v = (usp.shard(x, mesh, key_tokens) for x in (k, v))
    q, k, v = (arrange(x).detach().requires_grad_() for x in (q, k, v))
    sinks, table = (x.detach().requires_grad_() for x in (sinks, table))
    parameters = ({"dsinks": sinks} if case.sinks else {}) | ({"dtable": table} if case.bias else {})
    leaves = [q, k, v, *parameters.values()]
    scores = case.scores()
    out, lse = usp.hybrid_attention(
        *(q, k, v, mesh, tokens),
        sinks=sinks if case.sinks else None,
        softcap=scores.softcap,
        alibi=scores.alibi,
        bias=relative_bias(case.bias, table) if case.bias else None,
        dropout=scores.dropout,
        mask=case.mask,
        key_tokens=key_tokens if case.key_seq or case.key_layout else None,
        return_lse=True,
        **dict(case.options),
    )
    results, grads = [out], [dout]
    if case.lse:
        results.append(lse)
        grads.append(usp.shard(dlse, mesh, tokens, dim=2))
    gradients = torch.autograd.grad(results, leaves, grads)
    assert out.dtype == case.dtype
    assert [x.dtype for x in gradients] == [x.dtype for x in leaves]
    found = dict(zip(DIMS, (out.detach(), lse.detach(), *gradients[:3]), strict=True))
    return found | {name: summed(x, mesh) for name, x in zip(parameters, gradients[3:], strict=True)}


def summed(share: Tensor, mesh) -> Tensor:
    """Of all ranks of one sequence: what a trainer does with a parameter's gradient."""
    share = share.clone()
    for name, axis in zip(("ring", "ulysses"), axes(mesh), strict=True):
        if axis.size > 1:
            dist.all_reduce(share, group=mesh.get_group(name))
    return share


def errors(case: Case, mesh=None, size: float = 0.0, **how) -> dict[str, tuple[float, float]]:
    """By result, this rank's worst error and the tolerance, both relative to the whole reference's largest value.

    A largest value below `size` counts as that.
    """
    mesh = mesh or case.mesh()
    expected, actual = case.expected(), run(case, mesh, **how)
    found = {}
    for name, x in actual.items():
        reference = expected.values[name]
        if name in DIMS:
            tokens = case.key_tokens() if name in ("dk", "dv") else case.tokens()
            padding = -torch.inf if name == "lse" else 0.0
            reference = usp.shard(reference, mesh, tokens, dim=DIMS[name], fill=padding)
        found[name] = (
            oracle.relative_error(x, reference, expected.values[name], size),
            oracle.tolerance(name, case.dtype, expected),
        )
    return found


def wrong(case: Case, **how) -> list[str]:
    """Names of what this rank got wrong."""
    return [name for name, (error, allowed) in errors(case, **how).items() if not error <= allowed]


def worst(cases: list[Case], least: float = 0.0, size: float = 0.0) -> dict[str, tuple[float, str]]:
    """Every case within tolerance (or `least`), on this rank; the worst relative error of each result, and where.

    Of many cases one rank checks signatures; of a case alone all do, so that all fail together.
    """
    found: dict[str, tuple[float, str]] = {}
    for case in cases:
        with pool.one_rank_checks_types() if len(cases) > 1 else nullcontext():
            results = errors(case, size=size)
        for name, (error, allowed) in results.items():
            allowed = max(allowed, least)
            assert error <= allowed, f"{name} is off by {error:.2e}, allowed {allowed:.2e}, in {case}"
            if error >= found.get(name, (-1.0, ""))[0]:
                found[name] = (error, str(case))
    return found


@dataclass(frozen=True)
class Beside:
    """A call with joint tokens, and the whole that it must equal."""

    ring: int = 1
    ulysses: int = 1
    layout: str = "zigzag"
    mask: Mask = Mask(causal=False)  # noqa: RUF009
    front: bool = True
    queries: bool = True
    heads: int = 6
    kv_heads: int = 3
    replicate_kv: bool = False
    sinks: bool = False
    softcap: float | None = None
    alibi: bool = False
    bias: str | None = None
    dropout: tuple[float, int] | None = None
    seq: int = 17
    joint: int = 3
    batch: int = 2
    options: tuple[tuple[str, str], ...] = ()


def joint_equals_the_whole(calls: list[Beside]) -> None:
    """On a rank: results and gradients of each call, those of the joint tokens summed over ranks, in float64."""
    for call in calls:
        with pool.one_rank_checks_types():
            _one_joint(call)


def _one_joint(call: Beside) -> None:
    mesh = pool.mesh(call.ring, call.ulysses) if call.ring * call.ulysses > 1 else None
    generator = torch.Generator().manual_seed(0)
    whole = call.seq + call.joint
    beside, rest = (
        (slice(call.joint), slice(call.joint, whole)) if call.front else (slice(call.seq, whole), slice(call.seq))
    )
    q, k, v, dout = (
        torch.randn(call.batch, whole, heads, 8, generator=generator, dtype=torch.float64)
        for heads in (call.heads, call.kv_heads, call.kv_heads, call.heads)
    )
    sinks = torch.randn(call.heads, generator=generator, dtype=torch.float64) if call.sinks else None
    table = torch.randn(12, call.heads, generator=generator, dtype=torch.float64) if call.bias else None
    dlse = torch.randn(call.batch, call.heads, whole, generator=generator, dtype=torch.float64)
    if not call.queries:
        dout[:, beside], dlse[:, :, beside] = 0.0, 0.0

    everything = Partition(whole, "contiguous")
    seen = torch.stack([oracle.visible(call.mask, everything, everything, row) for row in range(call.batch)])
    alibi = slopes(call.heads) if call.alibi else None
    options = oracle.Options(None, call.softcap, alibi, call.bias, call.dropout)
    places = torch.arange(whole).expand(call.batch, -1)
    expected = oracle.answer(q, k, v, dout, dlse, seen, options, sinks, table, (places, places)).values

    tokens = usp.partition(call.seq, mesh, call.layout, start=call.joint if call.front else 0)
    shards = [usp.shard(x[:, rest], mesh, tokens).requires_grad_() for x in (q, k, v)]
    held = [x[:, beside].clone().requires_grad_() for x in ((k, v, q) if call.queries else (k, v))]
    joint = usp.Joint(*held, start=0 if call.front else call.seq)
    parameters = {"dsinks": sinks, "dtable": table}
    parameters = {name: x.clone().requires_grad_() for name, x in parameters.items() if x is not None}
    found = usp.hybrid_attention(
        *(*shards, mesh, tokens),
        mask=call.mask,
        joint=joint,
        replicate_kv=call.replicate_kv,
        sinks=parameters.get("dsinks"),
        softcap=call.softcap,
        alibi=alibi,
        bias=relative_bias(call.bias, parameters["dtable"]) if call.bias else None,
        dropout=call.dropout,
        return_lse=True,
        **dict(call.options),
    )
    (out, lse), others = found if call.queries else (found, None)
    results = [out, lse]
    grads = [usp.shard(dout[:, rest], mesh, tokens), usp.shard(dlse[:, :, rest], mesh, tokens, dim=2)]
    if others:  # computed whole on every rank, so each takes its part of a loss on it
        results += others
        grads += [x / (call.ring * call.ulysses) for x in (dout[:, beside], dlse[:, :, beside])]
    gradients = torch.autograd.grad(results, [*shards, *held, *parameters.values()], grads)

    def right(name: str, actual: torch.Tensor, reference: torch.Tensor) -> None:
        error = oracle.relative_error(actual.detach(), reference)
        assert error < 1e-12, f"{name} is off by {error:.1e} in {call}"

    right("out", usp.unshard(out, mesh, tokens), expected["out"][:, rest])
    right("lse", usp.unshard(lse, mesh, tokens, dim=2), expected["lse"][:, :, rest])
    if others:
        right("joint out", others[0], expected["out"][:, beside])
        right("joint lse", others[1], expected["lse"][:, :, beside])
    for name, x in zip(("dq", "dk", "dv"), gradients[:3], strict=True):
        right(name, usp.unshard(x, mesh, tokens), expected[name][:, rest])
    for name, x in zip(("dk", "dv", "dq")[: len(held)], gradients[3:], strict=False):
        right(f"joint {name}", summed(x, mesh), expected[name][:, beside])
    for name, x in zip(parameters, gradients[3 + len(held) :], strict=True):
        right(name, summed(x, mesh), expected[name])
