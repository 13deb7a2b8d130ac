"""PyTorch's fused attention: the CPU flash op, and on CUDA the aten flash op (half precision).

The CPU op knows full and top-left causal blocks. An edge block is a causal one with rows and columns in
reverse order; a band is done in tiles of rows with one additive mask that all tiles share. The CUDA op
has windows relative to the bottom right corner; a trimmed block always fits one (Note [Blocks]: the far
edge leaves columns - rows - low >= 0 and the near edge high - (columns - rows) >= 0).

Note [ALiBi columns]
~~~~~~~~~~~~~~~~~~~~
The ops know no bias, but scale (q k) may hold one. All keys of a block lie before their queries or all after
(`blocks` with a reach), so with the position b of the block's last key, or of its first, respectively,

    -slope |i - j| = -slope |j - b| -+ slope (i - b)

The second part is the same for a whole row and goes into lse. The first is a few more columns of q and k:
-slope / scale, in half precision cut into two numbers that the dtype holds, times the digits of |j - b| in the
largest base whose digits the dtype holds exactly. A 16-bit additive mask would round the whole bias instead:
70 % error at a distance of 3,000. What is lost is the rounding of a sum as large as slope |j - b|, which counts
where a key is near its query and far from b; so blocks are cut until slope |i - b| is at most REACH there.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from usp.kernels.scores import Terms
from usp.kernels.tiled import hidden, tiles
from usp.merging import accumulator_dtype

ROWS = 256  # of a band's tile
REACH = {torch.float64: 512.0, torch.float32: 32.0, torch.bfloat16: 8192.0, torch.float16: 8192.0}  # see the note
_CUDA_MULTIPLE = 8  # its head dims are multiples of this


def forward(q: Tensor, k: Tensor, v: Tensor, low: int | None, high: int | None, terms: Terms) -> tuple[Tensor, Tensor]:
    head_dim_v, scale = v.shape[3], terms.scale
    q, k, shift = _with_alibi(q, k, low, terms)
    width = _width(q, v, 0)
    q, k, v = (_widen(x, width) for x in (q, k, v))
    if q.is_cuda:
        out, lse = _cuda_forward(q, k, v, low, high, scale)
    elif low is None or high is None:
        q, k, v = (_in_order(x, 1, low) for x in (q, k, v))
        out, lse = _cpu_forward(q, k, v, _banded(low, high), None, scale)
        out, lse = _in_order(out, 1, low), _in_order(lse, 2, low)
    else:
        band = _Band(q, low, high)
        parts = [
            _cpu_forward(q[:, rows], k[:, columns], v[:, columns], False, band.mask(rows, columns), scale)
            for rows, columns in tiles(q.shape[1], k.shape[1], low, high, ROWS)
        ]
        out, lse = torch.cat([x[0] for x in parts], dim=1), torch.cat([x[1] for x in parts], dim=2)
    return out.narrow(3, 0, head_dim_v), lse if shift is None else lse + shift


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
) -> tuple[Tensor, Tensor, Tensor, None]:
    head_dim, head_dim_v, scale = q.shape[3], v.shape[3], terms.scale
    q, k, shift = _with_alibi(q, k, low, terms)
    lse = lse if shift is None else lse - shift
    if dlse is None:
        width = _width(q, v, 0)
    else:
        # The ops subtract rowsum(dout * out) from the gradient of the scores. More columns, ones in dout and -dlse in
        # out with zeros in q, k and v, make that rowsum(dout * out) - dlse. Half precision needs two for dlse.
        dlse = rearrange(dlse, "b h s -> b s h 1")
        columns = [dlse.to(out.dtype)]
        if lse_columns(out.dtype) == 2:
            columns.append((dlse - columns[0]).to(out.dtype))
        width = _width(q, v, len(columns))
        dout = torch.cat([dout, *(torch.ones_like(x) for x in columns)], dim=3)
        out = torch.cat([out, *(-x for x in columns)], dim=3)
    dout, q, k, v, out = (_widen(x, width) for x in (dout, q, k, v, out))
    if q.is_cuda:
        dq, dk, dv = _cuda_backward(dout, q, k, v, out, lse, low, high, scale)
    elif low is None or high is None:
        dout, q, k, v, out = (_in_order(x, 1, low) for x in (dout, q, k, v, out))
        grads = _cpu_backward(dout, q, k, v, out, _in_order(lse, 2, low), _banded(low, high), None, scale)
        dq, dk, dv = (_in_order(x, 1, low) for x in grads)
    else:
        band = _Band(q, low, high)
        dq = torch.empty_like(q)
        dk, dv = (torch.zeros_like(x, dtype=accumulator_dtype(x.dtype)) for x in (k, v))
        for rows, columns in tiles(q.shape[1], k.shape[1], low, high, ROWS):
            dq[:, rows], dk_tile, dv_tile = _cpu_backward(
                *(dout[:, rows], q[:, rows], k[:, columns], v[:, columns], out[:, rows], lse[:, :, rows]),
                *(False, band.mask(rows, columns), scale),
            )
            dk[:, columns] += dk_tile
            dv[:, columns] += dv_tile
    return dq.narrow(3, 0, head_dim), dk.narrow(3, 0, head_dim), dv.narrow(3, 0, head_dim_v), None


def lse_columns(dtype: torch.dtype) -> int:
    """How many head-dim columns a gradient through lse takes."""
    return 2 if dtype.itemsize == 2 else 1


def alibi_columns(dtype: torch.dtype, span: int) -> int:
    """How many head-dim columns ALiBi takes at most, where positions are less than `span` apart."""
    digits = 1
    while int(2 / torch.finfo(dtype).eps) ** digits < span:
        digits += 1
    return digits * (2 if dtype.itemsize == 2 else 1)


def _with_alibi(q: Tensor, k: Tensor, low: int | None, terms: Terms) -> tuple[Tensor, Tensor, Tensor | None]:
    """q and k with more columns, and what is to be added to lse, (heads, rows); see Note [ALiBi columns]."""
    if terms.slopes is None:
        return q, k, None
    assert terms.i is not None
    assert terms.j is not None
    before = bool(terms.j[max(0, low or 0)] <= terms.i[0])  # of a key that the first query sees
    base, side = (terms.j[-1], 1) if before else (terms.j[0], -1)
    slopes = torch.tensor(terms.slopes, dtype=torch.float64) / -terms.scale
    parts = [slopes.to(q.dtype).double()]
    if q.dtype.itemsize == 2:
        parts.append((slopes - parts[0]).to(q.dtype).double())
    largest, rest = int(2 / torch.finfo(q.dtype).eps), (terms.j - base).abs()
    digits, factors = [rest % largest], [1]
    while int((rest := rest // largest).max()):
        digits.append(rest % largest)
        factors.append(factors[-1] * largest)
    q_columns = torch.stack([part * factor for part in parts for factor in factors], dim=1).to(q.device, q.dtype)
    k_columns = torch.stack(digits * len(parts), dim=1).to(k.device, k.dtype)
    shift = terms.scale * torch.stack(parts).sum(0)[:, None] * (terms.i - base) * side
    return (
        torch.cat([q, q_columns.expand(*q.shape[:3], -1)], dim=3),
        torch.cat([k, k_columns[:, None].expand(*k.shape[:3], -1)], dim=3),
        shift.to(q.device, accumulator_dtype(q.dtype)),
    )


def _width(q: Tensor, v: Tensor, more: int) -> int:
    """The ops want one head dim for q, k and v."""
    width = max(q.shape[3], v.shape[3] + more)
    return -(-width // _CUDA_MULTIPLE) * _CUDA_MULTIPLE if q.is_cuda else width


def _widen(x: Tensor, width: int) -> Tensor:
    """Padded to the common head dim, and with the memory order that the ops take for granted without a check."""
    if x.shape[3] != width:
        return F.pad(x, (0, width - x.shape[3]))
    return x if x.stride(3) == 1 else x.contiguous()


def _banded(low: int | None, high: int | None) -> bool:
    return low is not None or high is not None


def _in_order(x: Tensor, dim: int, low: int | None) -> Tensor:
    """Reversed for edge blocks."""
    return x if low is None else x.flip(dim)


class _Band:
    """The additive mask of a band, made once; every tile takes its part."""

    def __init__(self, q: Tensor, low: int, high: int):
        self.low = low
        self.rows = slice(0, min(ROWS, q.shape[1]))
        columns = slice(low, self.rows.stop + high)
        mask = hidden(self.rows, columns, low, high, q.device)
        self.full = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(mask, -torch.inf)

    def mask(self, rows: slice, columns: slice) -> Tensor:
        left = columns.start - rows.start - self.low
        return self.full[: rows.stop - rows.start, left : left + columns.stop - columns.start]


def _cpu_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    q, k, v = (rearrange(x, "b s h d -> b h s d") for x in (q, k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=mask, scale=scale
    )
    return rearrange(out, "b h s d -> b s h d"), lse


def _cpu_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    mask: Tensor | None,
    scale: float,
) -> tuple[Tensor, ...]:
    dout, q, k, v, out = (rearrange(x, "b s h d -> b h s d") for x in (dout, q, k, v, out))
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale
    )
    return tuple(rearrange(x, "b h s d -> b s h d") for x in grads)


def _cuda_window(q: Tensor, k: Tensor, low: int | None, high: int | None) -> dict[str, int]:
    shift = k.shape[1] - q.shape[1]
    return {
        "window_size_left": -1 if low is None else shift - low,
        "window_size_right": -1 if high is None else high - shift,
    }


def _cuda_forward(
    q: Tensor, k: Tensor, v: Tensor, low: int | None, high: int | None, scale: float
) -> tuple[Tensor, Tensor]:
    lengths = None, None, q.shape[1], k.shape[1]
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, *lengths, 0.0, False, False, scale=scale, **_cuda_window(q, k, low, high)
    )
    return out, lse


def _cuda_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    low: int | None,
    high: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    lengths = None, None, q.shape[1], k.shape[1]
    state = torch.empty(2, dtype=torch.uint64, device=q.device), torch.empty(0, dtype=torch.uint64, device=q.device)
    return torch.ops.aten._flash_attention_backward(
        *(dout.contiguous(), q, k, v, out.contiguous(), lse.contiguous(), *lengths, 0.0, False, *state),
        scale=scale,
        **_cuda_window(q, k, low, high),
    )
