"""(out, lse) over a part of the keys, on its way to the rank that merges it.

One message: lse keeps its float32 (float64 for float64), natural log, as the last columns of out, bit by bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from usp import comm
from usp.blocks import ring_order, schedule, steps
from usp.merging import accumulator_dtype, combined
from usp.mesh import Axis


def columns(head_dim: int, dtype: torch.dtype) -> int:
    """Of out and lse together, in elements of a dtype."""
    return head_dim + accumulator_dtype(dtype).itemsize // dtype.itemsize


def packed(
    out: Float[Tensor, "batch seq heads head_dim"], lse: Float[Tensor, "batch heads seq"]
) -> Float[Tensor, "batch seq heads columns"]:
    """In out's dtype."""
    bits = _fresh(rearrange(lse, "b h s -> b s h 1")).view(out.dtype)
    return torch.cat([out, bits], dim=3)


def unpacked(
    x: Float[Tensor, "batch seq heads columns"], head_dim: int
) -> tuple[Float[Tensor, "batch seq heads head_dim"], Float[Tensor, "batch heads seq"]]:
    """out in its dtype, lse in the accumulator's."""
    lse = _fresh(x[..., head_dim:]).view(accumulator_dtype(x.dtype))
    return x[..., :head_dim], rearrange(lse, "b s h 1 -> b h s")


def _fresh(x: Tensor) -> Tensor:
    """A copy whose strides and beginning fit any dtype: `contiguous` keeps odd ones where there is but one element."""
    return x.clone(memory_format=torch.contiguous_format)


def round_trip(
    q: Tensor,
    shapes: Sequence[tuple[int, ...]],
    visited: Sequence[Sequence[object]],
    ring: Axis,
    head_dim_v: int,
    attend: Callable[[int, Tensor], tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """(out, lse) of queries that visit the ranks with keys for them, one after another; found parts come back at once.

    Args:
        q: this rank's queries (rows, seq, heads, head_dim).
        shapes: those of every ring rank's.
        visited: [rank][source]: whether (or which of) the rank's keys are seen by the source's queries.
        head_dim_v: of what comes back.
        attend: of a source's queries to the keys that are here; called for this rank's own in any case.

    Returns:
        out in q's dtype and lse in the accumulator's.
    """
    ranks, own, width = range(ring.size), ring.rank, columns(head_dim_v, q.dtype)
    sizes = [math.prod(shape) for shape in shapes]
    travels = [any(visited[rank][source] for rank in ranks if rank != source) for source in ranks]
    numels = [size if away else 0 for size, away in zip(sizes, travels, strict=True)]
    exchange = comm.Exchange(ring.group, "queries", max(sizes), q.dtype, q.device)
    program = steps(schedule(visited, ring_order(ring.size)), own)
    mine: list[tuple[Tensor, Tensor]] = []
    found: dict[int, Tensor] = {}
    for step, message in exchange.travel(program, numels, own, lambda x: x.copy_(q.flatten())):
        if step.source == own:
            mine.append(attend(own, q))
        elif step.source is not None and message is not None:
            out, lse = attend(step.source, message.view(shapes[step.source]))
            found[step.source] = packed(out.to(q.dtype), lse)
    if any(travels):
        rows = [math.prod(shape[:3]) for shape in shapes]
        x = torch.cat([found[n].flatten(0, 2) for n in sorted(found)]) if found else q.new_empty((0, width))
        send = [rows[n] if n in found else 0 for n in ranks]
        receive = [rows[own] if n != own and visited[n][own] else 0 for n in ranks]
        arrived = comm.all_to_all(x, send, receive, ring.group, "partials").split(max(1, rows[own]))
        mine += [unpacked(x.view(*shapes[own][:3], width), head_dim_v) for x in arrived if len(x)]
    out, lse = combined(*zip(*mine, strict=True))
    return out.to(q.dtype), lse
