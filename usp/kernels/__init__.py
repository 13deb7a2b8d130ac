"""Kernels that compute attention of one block and return (out, lse), and take them back for the gradient.

A backend is a module with `forward` and `backward`, called with one block's slices:

    forward(q, k, v, low, high, scale) -> out (batch, rows, heads, head_dim_v), lse (batch, heads, rows)
    backward(dout, q, k, v, out, lse, dlse, low, high, scale) -> dq, dk, dv

q is (batch, rows, heads, head_dim), k (batch, columns, kv_heads, head_dim) and v the same with head_dim_v; query head
h reads KV head h // (heads // kv_heads). Row i sees column j iff low <= j - i <= high; blocks are never empty and each
row sees a key (Note [Blocks]). lse is the natural log, float32 (float64 for float64). `backward` is given out and lse
over all keys, not only this block's, and dlse, the gradient through lse, or None; its results are this block's shares,
in any float dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from usp import comm
from usp.blocks import Block
from usp.kernels import sdpa, tiled

HALF = (torch.bfloat16, torch.float16)
FLOATS = (torch.float64, torch.float32, *HALF)


@dataclass(frozen=True)
class Backend:
    """What a backend can do."""

    module: ModuleType
    dtypes: Mapping[str, tuple[torch.dtype, ...]]  # by device type
    head_dim: Mapping[str, int]  # the largest, by device type; no entry, no limit
    bands: str  # how it does the kinds of blocks


_TABLE = {  # in the order in which "auto" tries them
    "sdpa": Backend(
        sdpa,
        {"cpu": FLOATS, "cuda": HALF},
        {"cuda": 256},
        "full and causal native; edge by reversal and band in masked tiles on CPU, native windows on CUDA",
    ),
    "tiled": Backend(tiled, {"cpu": FLOATS, "cuda": FLOATS}, {}, "all, written out"),
}


def backends() -> dict[str, Backend]:
    """The attention backends by name, in the order in which backend="auto" prefers them."""
    return dict(_TABLE)


def select(name: str, q: Tensor, v: Tensor, *, lse_gradient: bool) -> str:
    """The backend to use for tensors like these; "auto" is the first that can.

    A gradient through lse may take more columns of a head than the tensors have.

    Raises:
        ValueError: naming what the backend cannot do and the backends that can.
    """
    device, dtype = q.device, q.dtype
    head_dim = max(q.shape[3], v.shape[3] + (sdpa.lse_columns(dtype) if lse_gradient else 0))
    able = [
        backend
        for backend, can in _TABLE.items()
        if dtype in can.dtypes.get(device.type, ()) and head_dim <= can.head_dim.get(device.type, head_dim)
    ]
    if name != "auto" and name not in _TABLE:
        raise ValueError(f"backend={name!r} is not one of {['auto', *_TABLE]}")
    if not able or (name != "auto" and name not in able):
        raise ValueError(
            f"backend={name!r} cannot do dtype={dtype} with head_dim={head_dim} on device={device.type!r}; "
            f"backends that can: {able}"
        )
    return able[0] if name == "auto" else name


def forward(backend: str, q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float) -> tuple[Tensor, Tensor]:
    """(out, lse) of one block, from the ring rank's whole q and the source's whole k and v."""
    comm.ran(backend)
    q, k, v = _part(q, block.q), _part(k, block.k), _part(v, block.k)
    return _TABLE[backend].module.forward(q, k, v, block.low, block.high, scale)


def backward(
    backend: str,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    block: Block,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """One block's shares of dq, dk and dv (over its rows and columns), from whole tensors as in `forward`."""
    comm.ran(backend)
    return _TABLE[backend].module.backward(
        _part(dout, block.q),
        _part(q, block.q),
        _part(k, block.k),
        _part(v, block.k),
        _part(out, block.q),
        _part(lse, block.q, 2),
        None if dlse is None else _part(dlse, block.q, 2),
        block.low,
        block.high,
        scale,
    )


def _part(x: Tensor, rows: range, dim: int = 1) -> Tensor:
    return x.narrow(dim, rows.start, len(rows))
