"""Merging is a commutative monoid, exact on every split and safe on rows without keys."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import usp
from tests import oracle
from usp import merging
from usp.merging import accumulate

INF = float("inf")


def parts_of(splits: list[int], dtype=torch.float64) -> tuple[list, tuple]:
    """Attention over a split of the keys, part by part, and over all keys."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, h, 8, dtype=dtype) for n, h in ((6, 4), (sum(splits), 2), (sum(splits), 2)))
    whole = oracle.attention(q, k, v, torch.ones(2, 6, sum(splits), dtype=torch.bool))
    parts, start = [], 0
    for n in splits:
        seen = torch.ones(2, 6, n, dtype=torch.bool)
        parts.append(oracle.attention(q, k[:, start : start + n], v[:, start : start + n], seen))
        start += n
    return parts, whole


def fold(parts):
    out, lse = parts[0]
    for other in parts[1:]:
        out, lse = usp.merge(out, lse, *other)
    return out, lse


def close(a, b, dtype=torch.float64) -> bool:
    return all(oracle.relative_error(x, y) <= oracle.EXACT[dtype] for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("splits", [[1, 9], [5, 5], [3, 3, 4], [1, 1, 1, 7]])
def test_any_split_any_order(splits):
    parts, whole = parts_of(splits)
    for order in itertools.permutations(parts):
        assert close(fold(order), whole)
    tree = fold([fold(parts[:2]), *([fold(parts[2:])] if parts[2:] else [])])
    assert close(tree, whole)


def test_merged_with_itself_adds_log_2():
    part = parts_of([10])[1]
    out, lse = usp.merge(*part, *part)
    assert close((out, lse), (part[0], part[1] + torch.log(torch.tensor(2.0, dtype=torch.float64))))


@pytest.mark.parametrize("junk", [0.0, float("nan"), INF])
def test_the_identity_is_minus_infinity_whatever_stands_beside_it(junk):
    out, lse = parts_of([10])[1]
    nothing = torch.full_like(out, junk), torch.full_like(lse, -INF)
    for merged in (usp.merge(out, lse, *nothing), usp.merge(*nothing, out, lse)):
        assert torch.equal(merged[0], out)
        assert torch.equal(merged[1], lse)
    out, lse = usp.merge(*nothing, *nothing)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, nothing[1])


def test_far_apart_scores_neither_overflow_nor_vanish():
    shape = (1, 4, 2, 4)
    parts = [(torch.full(shape, x), torch.full((1, 2, 4), lse)) for x, lse in ((1.0, 0.0), (3.0, 120.0), (5.0, -200.0))]
    for order in itertools.permutations(parts):
        out, lse = fold(order)
        assert torch.equal(out, torch.full(shape, 3.0))
        assert torch.equal(lse, torch.full((1, 2, 4), 120.0))


def test_plus_infinity_is_loud():
    """Some kernels mark empty rows with +inf; read as a number that would silence all other keys."""
    out, lse = parts_of([10])[1]
    assert usp.merge(out, lse, out, torch.full_like(lse, INF))[0].isnan().all()


def test_gradients_through_merge_also_where_a_side_is_empty():
    """Joint tokens and chunk merges are plain autograd over (out, lse): no NaN may leak from empty rows."""
    (a, b), _ = parts_of([4, 6])
    tensors = [x.detach().clone() for x in (*a, *b)]
    tensors[1][:, :, 0] = -INF
    tensors[3][:, :, 0] = -INF
    tensors[3][:, :, 1] = -INF
    tensors = [x.requires_grad_() for x in tensors]
    out, lse = usp.merge(*tensors)
    gradients = torch.autograd.grad((out.sum() + lse[:, :, 1:].sum()), tensors)
    assert all(x.isfinite().all() for x in gradients)
    assert not gradients[0][:, 0].any()
    live = [x[:, 2:].detach().clone() if x.ndim == 4 else x[:, :, 2:].detach().clone() for x in tensors]
    assert torch.autograd.gradcheck(usp.merge, [x.requires_grad_() for x in live])


def test_accumulate_is_merge_in_place():
    parts, whole = parts_of([3, 3, 4])
    out, lse = torch.zeros_like(whole[0]), torch.full_like(whole[1], -INF)
    for part in parts:
        accumulate(out, lse, *part)
    assert close((out, lse), whole)


def test_half_precision_is_summed_in_float32():
    """64 parts in bf16: the error stays that of one rounding, whatever the number of parts."""
    parts, whole = parts_of([1] * 64)
    out, lse = torch.zeros_like(whole[0]).float(), torch.full_like(whole[1], -INF).float()
    for part in parts:
        accumulate(out, lse, part[0].bfloat16(), part[1].float())
    assert oracle.relative_error(out, whole[0]) < 4e-3
    (a, b) = parts[:2]
    assert usp.merge(a[0].bfloat16(), a[1].float(), b[0].bfloat16(), b[1].float())[0].dtype == torch.bfloat16
    assert usp.merge(a[0].bfloat16(), a[1].float(), b[0].float(), b[1].float())[0].dtype == torch.float32


def test_accumulate_widens_a_tile_at_a_time(monkeypatch):
    """Many tiles give what one gives, and no copy of a half-precision block as large as the block is made."""
    torch.manual_seed(0)
    block, lse = torch.randn(2, 50, 4, 8).bfloat16(), torch.randn(2, 4, 50)
    whole, tiled = (torch.randn(2, 50, 4, 8, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    for out, tile in ((whole, 1 << 18), (tiled, 3 * 2 * 4 * 8)):
        monkeypatch.setattr(merging, "CPU_TILE", tile)
        with Sizes() as sizes:
            accumulate(out, lse.clone(), block, lse)
        assert sizes.largest == max(min(tile, block.numel()), lse.numel())
    assert torch.equal(whole, tiled)


class Sizes(TorchDispatchMode):
    """Elements of the largest tensor that an operator made."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view and not func.name().endswith("_"):
            made = "_to_copy" in func.name() or "sigmoid" in func.name()
            self.largest = max(self.largest, result.numel() if made else 0)
        return result
