"""Combine attention over disjoint sets of keys: (out, lse) pairs form a commutative monoid.

out = softmax(scores) v and lse = log(sum(exp(scores))) of two key sets give those of their union (online
softmax). The identity is (anything, -inf): a row that saw no key.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor


def merge(
    out_a: Float[Tensor, "batch seq heads head_dim"],
    lse_a: Float[Tensor, "batch heads seq"],
    out_b: Float[Tensor, "batch seq heads head_dim"],
    lse_b: Float[Tensor, "batch heads seq"],
) -> tuple[Float[Tensor, "batch seq heads head_dim"], Float[Tensor, "batch heads seq"]]:
    """Attention over the union of two disjoint key sets.

    Computed in float32 (float64 for float64); `out` comes back in the wider of the two dtypes, `lse`
    (natural log) in float32 or float64. Differentiable, also where one or both sides saw no key (lse
    -inf; whatever stands in that side's `out`, NaN included, is ignored). lse of +inf is nobody's
    answer and gives NaN.
    """
    dtype = torch.promote_types(out_a.dtype, out_b.dtype)
    out, lse = combined((out_a, out_b), (lse_a, lse_b))
    return out.to(dtype), lse


def combined(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """`merge` of any number of parts, in the accumulator's dtype."""
    wide = accumulator_dtype(reduce(torch.promote_types, (out.dtype for out in outs)))
    lses = [lse.to(wide) for lse in lses]
    peak = reduce(torch.maximum, lses).detach()
    peak = torch.where(peak == -torch.inf, 0.0, peak)
    weights = [torch.exp(lse - peak) for lse in lses]
    total = sum(weights[1:], start=weights[0])
    empty = total == 0
    total = torch.where(empty, 1.0, total)
    parts = [_weighted(out.to(wide), w / total, lse) for out, w, lse in zip(outs, weights, lses, strict=True)]
    return sum(parts[1:], start=parts[0]), torch.where(empty, -torch.inf, peak + torch.log(total))


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
    """A sink, one a head, takes exp(sink) of the softmax's sum, and nothing of the values."""
    if sinks is None:
        return out
    lse = torch.where(lse == -torch.inf, 0.0, lse)  # out is 0 there; and a sink of -inf, which is none, is nobody's NaN
    left = torch.sigmoid(lse - sinks.to(lse.dtype)[:, None])
    return (out * per_row(left)).to(out.dtype)


CPU_TILE, TILE = 1 << 18, 1 << 26  # elements: of a cache, and so that launches do not count


def accumulate(
    out: Float[Tensor, "batch seq heads head_dim"],
    lse: Float[Tensor, "batch heads seq"],
    block_out: Float[Tensor, "batch seq heads head_dim"],
    block_lse: Float[Tensor, "batch heads seq"],
) -> None:
    """Merge a block's result into wide accumulators, in place and without autograd.

    Every row of the block has seen a key, so block_lse is finite and nothing needs a guard, also where
    the accumulator is still (0, -inf).
    """
    weight = per_row(torch.sigmoid(block_lse - lse))
    torch.logaddexp(lse, block_lse, out=lse)
    rows = out.shape[1]
    if block_out.dtype != out.dtype:  # widened a tile at a time: in the cache, and not as large as out once more
        tile = CPU_TILE if out.device.type == "cpu" else TILE
        rows = max(1, tile * rows // out.numel())
    for here, part, weights in zip(*(x.split(rows, 1) for x in (out, block_out, weight)), strict=True):
        here.lerp_(part.to(out.dtype), weights)


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """What partial results are summed in: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def per_row(x: Float[Tensor, "batch heads seq"]) -> Float[Tensor, "batch seq heads 1"]:
    """A number a row, as lse has it, to multiply `out` with."""
    return rearrange(x, "b h s -> b s h 1")


def _weighted(out: Tensor, weight: Tensor, lse: Tensor) -> Tensor:
    return torch.where(per_row(lse) == -torch.inf, 0.0, out) * per_row(weight)
