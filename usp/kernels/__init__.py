"""Kernels that compute attention of one block and return (out, lse), and take them back for the gradient.

A backend is a module with `forward` and `backward`, called with one block's slices:

    forward(q, k, v, low, high, terms) -> out (batch, rows, heads, head_dim_v), lse (batch, heads, rows)
    backward(dout, q, k, v, out, lse, dlse, low, high, terms) -> dq, dk, dv, dtable or None

q is (batch, rows, heads, head_dim), k (batch, columns, kv_heads, head_dim) and v the same with head_dim_v; query head
h reads KV head h // (heads // kv_heads). Row i sees column j iff low <= j - i <= high; blocks are never empty and each
row sees a key (Note [Blocks]). lse is the natural log, float32 (float64 for float64). `backward` is given out and lse
over all keys, not only this block's, and dlse, the gradient through lse, or None; its results are this block's shares,
in any float dtype. `terms` (scores.py) say what a score is besides scale x (q k), for the options that a backend has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from usp import comm
from usp.blocks import Block
from usp.kernels import sdpa, tiled
from usp.kernels.scores import LARGEST, Scores, Terms

HALF = (torch.bfloat16, torch.float16)
FLOATS = (torch.float64, torch.float32, *HALF)


@dataclass(frozen=True)
class Backend:
    """What a backend can do."""

    module: ModuleType
    dtypes: Mapping[str, tuple[torch.dtype, ...]]  # by device type
    head_dim: Mapping[str, int]  # the largest, by device type; no entry, no limit
    bands: str  # how it does the kinds of blocks
    options: Mapping[str, str]  # which of OPTIONS it has, and how
    lacks: Mapping[str, str]  # which it has not, and why
    slope: Mapping[torch.dtype, float]  # the largest ALiBi slope / scale; no entry, no limit
    rounds: bool  # whether out comes in q's dtype, not in the accumulator's
    copies: bool  # whether every call copies its keys and values, to another dtype
    slow: Mapping[str, tuple[torch.dtype, ...]]  # options and dtypes for which "auto" prefers another on the CPU


OPTIONS = ("softcap", "alibi", "bias", "dropout")
_TABLE = {  # in the order in which "auto" tries them
    "sdpa": Backend(
        sdpa,
        {"cpu": FLOATS, "cuda": HALF},
        {"cuda": 256},
        "full and causal native; edge by reversal and band in masked tiles on CPU, native windows on CUDA",
        {"alibi": "as 1 to 6 more columns of a head, exact in the dtype; in float16 within 2^22 positions"},
        {
            "softcap": "PyTorch's ops have no tanh between scores and softmax",
            "bias": "PyTorch's ops have no gradient for it",
            "dropout": "PyTorch's generators are local to a call, so no other rank or layout drops the same pairs",
        },
        {torch.float16: 65504 / 2048, torch.bfloat16: LARGEST, torch.float32: LARGEST},
        True,
        False,
        {"alibi": (torch.float64, torch.float32)},  # 3 times as long as `tiled`: see its _exp
    ),
    "tiled": Backend(
        tiled,
        {"cpu": FLOATS, "cuda": FLOATS},
        {},
        "all, written out",
        {
            "softcap": "written out",
            "alibi": "written out",
            "bias": "looked up for each pair, with its gradient",
            "dropout": "a hash of each pair",
        },
        {},
        {},
        False,
        True,
        {},
    ),
}


def backends() -> dict[str, Backend]:
    """The attention backends by name, in the order in which backend="auto" prefers them."""
    return dict(_TABLE)


def select(
    name: str, q: Tensor, v: Tensor, scores: Scores, *, lse_gradient: bool, span: int, apart: bool = False
) -> str:
    """The backend to use for tensors and options like these; "auto" is the first that can and is not slow at it.

    A gradient through lse and ALiBi may take more columns of a head than the tensors have; those of ALiBi depend on
    how far positions `span`. Shards that are `apart` are striped and not, so their blocks cannot be cut where queries
    and keys change order.

    Raises:
        ValueError: naming what the backend cannot do, why, and the backends that can.
    """
    if name != "auto" and name not in _TABLE:
        raise ValueError(f"backend={name!r} is not one of {['auto', *_TABLE]}")
    refusals = {backend: _refusal(backend, q, v, scores, lse_gradient, span, apart) for backend in _TABLE}
    able = [backend for backend, refusal in refusals.items() if not refusal]
    if name == "auto" and able:
        slow = [x for x in able if q.device.type == "cpu" and _is_slow(_TABLE[x], q.dtype, scores)]
        return [*(x for x in able if x not in slow), *slow][0]
    if name not in able:
        reasons = set(refusals.values()) if name == "auto" else {refusals[name]}
        raise ValueError(f"backend={name!r} cannot do {'; nor '.join(sorted(reasons))}; backends that can: {able}")
    return name


def _is_slow(backend: Backend, dtype: torch.dtype, scores: Scores) -> bool:
    return any(dtype in dtypes and option in scores.options for option, dtypes in backend.slow.items())


def _refusal(name: str, q: Tensor, v: Tensor, scores: Scores, lse_gradient: bool, span: int, apart: bool) -> str:
    """What a backend cannot do of this, and why; empty if it can."""
    can, device, dtype = _TABLE[name], q.device.type, q.dtype
    head_dim = max(
        q.shape[3] + (sdpa.alibi_columns(dtype, span) if scores.alibi else 0),
        v.shape[3] + (sdpa.lse_columns(dtype) if lse_gradient else 0),
    )
    if dtype not in can.dtypes.get(device, ()) or head_dim > can.head_dim.get(device, head_dim):
        return f"dtype={dtype} with head_dim={head_dim} on device={device!r}"
    for option, value in scores.options.items():
        if option not in can.options:
            return f"{option}={value}: {can.lacks[option]}"
    if scores.alibi and max(scores.alibi) / scores.scale > can.slope.get(dtype, math.inf):
        return f"alibi={scores.alibi} with scale={scores.scale} in {dtype}: slope / scale up to {can.slope[dtype]}"
    if name == "sdpa" and scores.alibi and apart:
        return f"alibi={scores.alibi} between striped shards and others: they have no order that blocks could be cut by"
    if name == "sdpa" and scores.alibi and dtype == torch.float16 and span > 1 << 22:
        return f"alibi={scores.alibi} over {span} positions in float16: at most 2^22"
    return ""


def reach(backend: str, dtype: torch.dtype, scores: Scores) -> int | None:
    """How many positions of queries a block may have for the backend's ALiBi to be exact; None for any number."""
    if backend != "sdpa" or not scores.alibi or not max(scores.alibi):
        return None
    return max(1, int(sdpa.REACH[dtype] / max(scores.alibi)))


def copies(backend: str, head_dim: int, head_dim_v: int, scores: Scores) -> bool:
    """Whether a call makes a copy of its keys or values: of another dtype, or with more columns."""
    return _TABLE[backend].copies or head_dim != head_dim_v or scores.alibi is not None


def forward(
    backend: str, q: Tensor, k: Tensor, v: Tensor, block: Block, terms: Terms, *, centred: bool = False
) -> tuple[Tensor, Tensor]:
    """(out, lse) of one block, from the ring rank's whole q and the source's whole k and v; terms are the block's.

    `centred`: where the backend rounds out, let it do so around the middle of v.
    """
    comm.ran(backend)
    q, k, v = _part(q, block.q), _part(k, block.k), _part(v, block.k)
    kernel = _TABLE[backend]
    if not (centred and kernel.rounds):
        return kernel.module.forward(q, k, v, block.low, block.high, terms)
    middle = _middle(v)
    out, lse = kernel.module.forward(q, k, v - middle, block.low, block.high, terms)
    return out.to(lse.dtype) + _to_queries(middle, q), lse


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
    terms: Terms,
    *,
    rest: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """One block's shares of dq, dk and dv (over its rows and columns) and of dtable, from whole tensors.

    `rest`: what rounding took from out. A backend that has no place for it gets out and v around the middle of v, where
    it is small: dout v - dout out, of which ds is made, does not change with an offset of both.
    """
    comm.ran(backend)
    kernel = _TABLE[backend]
    q, k, v, out = _part(q, block.q), _part(k, block.k), _part(v, block.k), _part(out, block.q)
    if rest is not None:
        out = out.to(lse.dtype) + _part(rest, block.q)
        if kernel.rounds:
            middle = _middle(v)
            v, out = v - middle, (out - _to_queries(middle, q)).to(q.dtype)
    return kernel.module.backward(
        _part(dout, block.q),
        q,
        k,
        v,
        out,
        _part(lse, block.q, 2),
        None if dlse is None else _part(dlse, block.q, 2),
        block.low,
        block.high,
        terms,
    )


def _middle(v: Tensor) -> Tensor:
    """The mean of a block's values, in their dtype."""
    return v.mean(1, keepdim=True, dtype=torch.float32).to(v.dtype)


def _to_queries(x: Tensor, q: Tensor) -> Tensor:
    """Of KV heads, for the query heads that read them."""
    return x.repeat_interleave(q.shape[2] // x.shape[2], 2)


def _part(x: Tensor, rows: range, dim: int = 1) -> Tensor:
    return x.narrow(dim, rows.start, len(rows))
