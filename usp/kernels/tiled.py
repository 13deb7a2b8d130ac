"""Attention written out, in tiles: every option, any float dtype, O(tile x keys) memory.

Computed in float32, or float64 for float64: that is the reference that everything else is held against.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from usp.kernels.scores import Terms
from usp.merging import accumulator_dtype

ROWS = 128
_SCORES = {"cpu": 1 << 19, "cuda": 1 << 26}  # in a tile, unless one KV head has more


def forward(q: Tensor, k: Tensor, v: Tensor, low: int | None, high: int | None, terms: Terms) -> tuple[Tensor, Tensor]:
    wide = accumulator_dtype(q.dtype)
    batch, rows, heads, _ = q.shape
    q, k, v = (_by_head(x.to(wide)) for x in (q, k, v))
    q, terms = q * terms.scale, terms.on(q.device)
    out, lse = q.new_empty((batch, heads, rows, v.shape[3])), q.new_empty((batch, heads, rows))
    for tile in _tiles(q, k, low, high):
        scores = _scores(q, k, tile, low, high, terms).scores
        peak = scores.amax(-1, keepdim=True)
        p = _exp(scores.sub_(peak))
        total = p.sum(-1, keepdim=True)
        lse[:, tile.heads, tile.rows] = peak.add_(total.log()).squeeze(-1)
        if terms.dropout:
            p.mul_(terms.of(tile.heads, tile.rows, tile.columns).kept(*p.shape[:2]))
            total.mul_(1 - terms.dropout)
        out[:, tile.heads, tile.rows] = _ungrouped(_grouped(p, tile) @ v[:, tile.kv_heads, tile.columns], p) / total
    return rearrange(out, "b h s d -> b s h d"), lse


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
    terms: Terms,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    wide = accumulator_dtype(q.dtype)
    dout, q, k, v, out = (_by_head(x.to(wide)) for x in (dout, q, k, v, out))
    q, terms = q * terms.scale, terms.on(q.device)
    delta = (dout * out).sum(-1)
    if dlse is not None:
        delta -= dlse
    if terms.dropout:
        dout = dout / (1 - terms.dropout)
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    dtable = None if terms.table is None else torch.zeros_like(terms.table, dtype=torch.float64)
    for tile in _tiles(q, k, low, high):
        heads, kv_heads, rows, columns = tile
        scores, capped, buckets = _scores(q, k, tile, low, high, terms)
        p = _exp(scores.sub_(lse[:, heads, rows, None]))
        dout_tile = _grouped(dout[:, heads, rows], tile)
        ds = _ungrouped(dout_tile @ v[:, kv_heads, columns].mT, p)
        dropped = p
        if terms.dropout:
            kept = terms.of(heads, rows, columns).kept(*p.shape[:2])
            ds.mul_(kept)
            dropped = p * kept
        dv[:, kv_heads, columns] += _grouped(dropped, tile).mT @ dout_tile
        ds.sub_(delta[:, heads, rows, None]).mul_(p)
        if dtable is not None and buckets is not None:
            by_pair = ds.sum(0).flatten(1).double()  # very many for few cells
            dtable[:, heads].T.scatter_add_(1, buckets.flatten().expand_as(by_pair), by_pair)
        if capped is not None and terms.softcap:
            ds.mul_(capped.div_(terms.softcap).square_().neg_().add_(1))
        ds = _grouped(ds, tile)
        dk[:, kv_heads, columns] += ds.mT @ _grouped(q[:, heads, rows], tile)
        dq[:, heads, rows] = _ungrouped(ds @ k[:, kv_heads, columns], p).mul_(terms.scale)
    dq, dk, dv = (rearrange(x, "b h s d -> b s h d") for x in (dq, dk, dv))
    return dq, dk, dv, dtable


def tiles(rows: int, columns: int, low: int | None, high: int | None, most: int) -> Iterator[tuple[slice, slice]]:
    """Tiles of at most this many rows with the columns that they see."""
    for top in range(0, rows, most):
        bottom = min(top + most, rows)
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


class _Tile(NamedTuple):
    heads: slice
    kv_heads: slice
    rows: slice
    columns: slice


class _Found(NamedTuple):
    scores: Tensor  # (batch, heads, rows, columns), -inf where hidden
    capped: Tensor | None  # before bias and mask, if there is a softcap
    buckets: Tensor | None  # (rows, columns), if there is a relative bias


def _tiles(q: Tensor, k: Tensor, low: int | None, high: int | None) -> Iterator[_Tile]:
    """As many KV heads at once as stay in the cache."""
    batch, heads, rows, _ = q.shape
    kv_heads, columns = k.shape[1:3]
    groups = heads // kv_heads
    for seen in tiles(rows, columns, low, high, max(1, ROWS // groups)):
        pairs = (seen[0].stop - seen[0].start) * (seen[1].stop - seen[1].start)
        count = min(kv_heads, max(1, _SCORES.get(q.device.type, 1 << 26) // (batch * groups * pairs)))
        for first in range(0, kv_heads, count):
            last = min(first + count, kv_heads)
            yield _Tile(slice(first * groups, last * groups), slice(first, last), *seen)


def _scores(q: Tensor, k: Tensor, tile: _Tile, low: int | None, high: int | None, terms: Terms) -> _Found:
    heads, kv_heads, rows, columns = tile
    q_tile = q[:, heads, rows]
    scores = _ungrouped(_grouped(q_tile, tile) @ k[:, kv_heads, columns].mT, q_tile)
    capped = None
    if terms.softcap:
        capped = scores.div_(terms.softcap).tanh_().mul_(terms.softcap).clone()
    buckets = terms.of(heads, rows, columns).add_bias(scores)
    for first, last in _edges(tile, low, high):
        mask = hidden(rows, slice(first, last), low, high, q.device)
        scores[..., first - columns.start : last - columns.start].masked_fill_(mask, -torch.inf)
    return _Found(scores, capped, buckets)


def _exp(x: Tensor) -> Tensor:
    """exp in place, and 0 for what is so small that nothing could tell.

    Processors are 10 to 150 times as slow with numbers below the normal ones: in exp itself, also of -inf, and in
    every product with such a weight. ALiBi makes many of them.
    """
    least = -80.0 if x.dtype == torch.float32 else -690.0
    return torch.threshold_(x.clamp_(min=least).exp_(), 2 * math.exp(least), 0.0)


def _edges(tile: _Tile, low: int | None, high: int | None) -> Iterator[tuple[int, int]]:
    """Columns of the tile that not all of its rows see."""
    _, _, rows, columns = tile
    left, right = columns.start, columns.stop
    first = left if low is None else min(max(left, rows.stop - 1 + low), right)  # from here on not too far
    last = right if high is None else max(min(right, rows.start + high + 1), left)  # from here on too near
    if first >= last:
        first, last = right, right
    if left < first:
        yield left, first
    if last < right:
        yield last, right


def _by_head(x: Tensor) -> Tensor:
    return rearrange(x, "b s h d -> b h s d").contiguous()


def _grouped(x: Tensor, tile: _Tile) -> Tensor:
    """(batch, heads, rows, ...) as (batch, kv_heads, heads of each x rows, ...)."""
    return rearrange(x, "b (h g) t d -> b h (g t) d", h=tile.kv_heads.stop - tile.kv_heads.start)


def _ungrouped(x: Tensor, like: Tensor) -> Tensor:
    return x.view(*like.shape[:3], x.shape[-1])
