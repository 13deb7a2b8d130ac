"""On a rank: run the hybrid attention on shards and hold the results against the reference."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

import usp
from tests import oracle, pool
from usp import Mask, Partition


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
    options: tuple[tuple[str, object], ...] = ()

    def tokens(self) -> Partition:
        owners = self.owners if self.layout == "balanced" else None
        return Partition(self.seq, self.layout, self.ring, self.ulysses, self.start, owners)

    def key_tokens(self) -> Partition:
        seq, layout = self.key_seq or self.seq, self.key_layout or self.layout
        start = 0 if self.key_seq else self.start
        return Partition(seq, layout, self.ring, self.ulysses, start, self.owners if layout == "balanced" else None)

    def inputs(self) -> tuple[Tensor, ...]:
        """q, k, v, dout, dlse: whole tensors."""
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        key_seq = self.key_seq or self.seq
        q = normal(self.batch, self.seq, self.heads, self.head_dim)
        k = normal(self.batch, key_seq, self.kv_heads, self.head_dim)
        v = normal(self.batch, key_seq, self.kv_heads, self.head_dim_v)
        dout = normal(self.batch, self.seq, self.heads, self.head_dim_v)
        dlse = normal(self.batch, self.heads, self.seq)
        return *(x.to(self.dtype) for x in (q, k, v, dout)), dlse.to(
            torch.float64 if self.dtype == torch.float64 else torch.float32
        )

    def expected(self) -> oracle.Answer:
        """The reference, which no mesh or layout changes; made once."""
        return _expected(
            dataclasses.replace(self, ring=1, ulysses=1, layout="contiguous", key_layout=None, owners=None)
        )

    def mesh(self):
        return pool.mesh(self.ring, self.ulysses) if self.ring * self.ulysses > 1 else None


@lru_cache(maxsize=256)
def _expected(case: Case) -> oracle.Answer:
    q, k, v, dout, dlse = case.inputs()
    seen = torch.stack([oracle.visible(case.mask, case.tokens(), case.key_tokens(), n) for n in range(case.batch)])
    return oracle.answer(q, k, v, dout, dlse if case.lse else None, seen, dict(case.options).get("scale"))


DIMS = {"out": 1, "lse": 2, "dq": 1, "dk": 1, "dv": 1}  # where each result's tokens are


def run(case: Case, mesh=None, arrange=lambda x: x) -> dict[str, Tensor]:
    """This rank's out, lse, dq, dk, dv. `arrange` may change the shards' memory layout."""
    mesh = mesh or case.mesh()
    tokens, key_tokens = case.tokens(), case.key_tokens()
    q, k, v, dout, dlse = case.inputs()
    q, dout = (usp.shard(x, mesh, tokens) for x in (q, dout))
    k, v = (usp.shard(x, mesh, key_tokens) for x in (k, v))
    q, k, v = (arrange(x).detach().requires_grad_() for x in (q, k, v))
    out, lse = usp.hybrid_attention(
        *(q, k, v, mesh, tokens),
        mask=case.mask,
        key_tokens=key_tokens if case.key_seq or case.key_layout else None,
        return_lse=True,
        **dict(case.options),
    )
    results, grads = [out], [dout]
    if case.lse:
        results.append(lse)
        grads.append(usp.shard(dlse, mesh, tokens, dim=2))
    gradients = torch.autograd.grad(results, (q, k, v), grads)
    assert out.dtype == case.dtype
    assert [x.dtype for x in gradients] == [case.dtype] * 3
    return dict(zip(DIMS, (out.detach(), lse.detach(), *gradients), strict=True))


def errors(case: Case, mesh=None, size: float = 0.0, **how) -> dict[str, tuple[float, float]]:
    """By result, this rank's worst error and the tolerance, both relative to the whole reference's largest value.

    A largest value below `size` counts as that.
    """
    mesh = mesh or case.mesh()
    expected, actual = case.expected(), run(case, mesh, **how)
    found = {}
    for name, x in actual.items():
        tokens = case.key_tokens() if name in ("dk", "dv") else case.tokens()
        padding = -torch.inf if name == "lse" else 0.0
        reference = usp.shard(expected.values[name], mesh, tokens, dim=DIMS[name], fill=padding)
        found[name] = (
            oracle.relative_error(x, reference, expected.values[name], size),
            oracle.tolerance(name, case.dtype, expected),
        )
    return found


def wrong(case: Case, **how) -> list[str]:
    """Names of what this rank got wrong."""
    return [name for name, (error, allowed) in errors(case, **how).items() if not error <= allowed]


def worst(cases: list[Case], least: float = 0.0, size: float = 0.0) -> dict[str, tuple[float, str]]:
    """Every case within tolerance (or `least`), on this rank; the worst relative error of each result, and where."""
    found: dict[str, tuple[float, str]] = {}
    for case in cases:
        for name, (error, allowed) in errors(case, size=size).items():
            allowed = max(allowed, least)
            assert error <= allowed, f"{name} is off by {error:.2e}, allowed {allowed:.2e}, in {case}"
            if error >= found.get(name, (-1.0, ""))[0]:
                found[name] = (error, str(case))
    return found
