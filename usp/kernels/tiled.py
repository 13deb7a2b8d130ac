"""Attention written out, in tiles of queries: every option, any float dtype, O(tile x keys) memory.

Computed in float32, or float64 for float64: that is the reference that everything else is held against.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from einops import rearrange
from torch import Tensor

from usp.merging import accumulator_dtype

ROWS = 256


def forward(q: Tensor, k: Tensor, v: Tensor, low: int | None, high: int | None, scale: float) -> tuple[Tensor, Tensor]:
    wide = accumulator_dtype(q.dtype)
    groups = q.shape[2] // k.shape[2]
    k, v = _by_head(k.to(wide)), _by_head(v.to(wide))
    outs, lses = [], []
    for rows, columns in tiles(q.shape[1], k.shape[2], low, high):
        scores = _scores(q[:, rows].to(wide), k[:, :, columns], groups, rows, columns, low, high, scale)
        lse = torch.logsumexp(scores, dim=-1)
        p = scores.sub_(lse[..., None]).exp_()
        outs.append(_ungroup(p @ v[:, :, columns], groups))
        lses.append(rearrange(lse, "b h (g t) -> b (h g) t", g=groups))
    return torch.cat(outs, dim=1), torch.cat(lses, dim=2)


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    low: int | None,
    high: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    wide = accumulator_dtype(q.dtype)
    groups = q.shape[2] // k.shape[2]
    k, v = _by_head(k.to(wide)), _by_head(v.to(wide))
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    delta = rearrange((dout.to(wide) * out.to(wide)).sum(-1), "b s h -> b h s")
    if dlse is not None:
        delta = delta - dlse
    dqs = []
    for rows, columns in tiles(q.shape[1], k.shape[2], low, high):
        q_tile, k_tile = q[:, rows].to(wide), k[:, :, columns]
        p = _scores(q_tile, k_tile, groups, rows, columns, low, high, scale)
        p = p.sub_(_group_rows(lse[:, :, rows], groups)).exp_()
        dout_tile = _group(dout[:, rows].to(wide), groups)
        dv[:, :, columns] += p.mT @ dout_tile
        ds = dout_tile @ v[:, :, columns].mT
        ds = ds.sub_(_group_rows(delta[:, :, rows], groups)).mul_(p).mul_(scale)
        dk[:, :, columns] += ds.mT @ _group(q_tile, groups)
        dqs.append(_ungroup(ds @ k_tile, groups))
    return torch.cat(dqs, dim=1), rearrange(dk, "b h s d -> b s h d"), rearrange(dv, "b h s d -> b s h d")


def tiles(rows: int, columns: int, low: int | None, high: int | None) -> Iterator[tuple[slice, slice]]:
    """Tiles of at most ROWS rows with the columns that they see."""
    for top in range(0, rows, ROWS):
        bottom = min(top + ROWS, rows)
        left = 0 if low is None else max(0, top + low)
        right = columns if high is None else min(columns, bottom + high)
        yield slice(top, bottom), slice(left, right)


def hidden(rows: slice, columns: slice, low: int | None, high: int | None, device: torch.device) -> Tensor:
    """True where a row of the tile does not see a column; (rows, columns)."""
    offset = (
        torch.arange(columns.start, columns.stop, device=device)
        - torch.arange(rows.start, rows.stop, device=device)[:, None]
    )
    mask = torch.zeros_like(offset, dtype=torch.bool)
    if low is not None:
        mask |= offset < low
    if high is not None:
        mask |= offset > high
    return mask


def _scores(
    q: Tensor,
    k: Tensor,
    groups: int,
    rows: slice,
    columns: slice,
    low: int | None,
    high: int | None,
    scale: float,
) -> Tensor:
    """Scaled scores of a tile, (batch, kv_heads, groups x rows, columns), -inf where hidden."""
    scores = (_group(q, groups) @ k.mT).mul_(scale)
    if low is not None or high is not None:
        mask = hidden(rows, columns, low, high, q.device)
        rearrange(scores, "b h (g t) s -> b h g t s", g=groups).masked_fill_(mask, -torch.inf)
    return scores


def _by_head(x: Tensor) -> Tensor:
    return rearrange(x, "b s h d -> b h s d")


def _group(x: Tensor, groups: int) -> Tensor:
    """The query heads of one KV head stand side by side, as more rows."""
    return rearrange(x, "b t (h g) d -> b h (g t) d", g=groups)


def _ungroup(x: Tensor, groups: int) -> Tensor:
    return rearrange(x, "b h (g t) d -> b t (h g) d", g=groups)


def _group_rows(x: Tensor, groups: int) -> Tensor:
    return rearrange(x, "b (h g) t -> b h (g t) 1", g=groups)
