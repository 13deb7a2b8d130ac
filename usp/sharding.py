"""Put a full sequence on the mesh and take it back.

Note [Gradients of shards]
~~~~~~~~~~~~~~~~~~~~~~~~~~
Everywhere in this library the loss is the sum of what the ranks compute. So the gradient that `shard`
gives a full tensor is this rank's share (zero outside its own tokens), and `unshard` sends every rank's
gradient of the full tensor to the tokens' owners and adds it up. A loss that every rank computes
whole from unsharded tensors counts once a rank: divide it by the number of sequence ranks.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from usp import comm
from usp.balance import balanced
from usp.blocks import batch_rows
from usp.masks import Mask
from usp.mesh import Axis, axes
from usp.partitions import Layout, Partition


def partition(
    seq: int,
    mesh: DeviceMesh | None,
    layout: Layout | str,
    *,
    mask: Mask | None = None,
    start: int | tuple[int, ...] = 0,
) -> Partition:
    """The partition of `seq` tokens over a mesh.

    Args:
        mask: for BALANCED, and only for it: what the tokens see of each other. They are assigned so that all ring
            ranks have the same work (Note [Balance]); that may come out as contiguous or zigzag. Found once for
            each mask, without communication, the same on every rank.

    Raises:
        ValueError: what `Partition` raises, if the mesh lacks an axis, or if a mask is missing or has no use.
    """
    ring, ulysses = axes(mesh)
    if layout == Layout.BALANCED:
        if not isinstance(mask, Mask):
            raise ValueError(
                "layout='balanced' balances the work of a mask: give mask=, or the ring rank of each block yourself, "
                "Partition(seq, 'balanced', ring, ulysses, owners=...)"
            )
        return balanced(mask, seq, ring.size, ulysses.size, start if isinstance(start, int) else tuple(start))
    if mask is not None and layout in list(Layout):
        raise ValueError(f"layout={str(layout)!r} does not depend on a mask: leave mask= out, or take 'balanced'")
    return Partition(seq, layout, ring.size, ulysses.size, start)


def shard(x: Tensor, mesh: DeviceMesh | None, tokens: Partition, *, dim: int = 1, fill: float = 0) -> Tensor:
    """This rank's tokens of a full tensor: a copy, `tokens.seq_local` long in `dim`.

    Args:
        x: the full tensor, the same on every rank, `tokens.seq` long in `dim`.
        fill: what padding holds (0, or -100 for labels).

    Raises:
        ValueError: if x has another length than the partition, or the partition another mesh.
    """
    ring, ulysses = checked_axes(mesh, tokens)
    if x.shape[dim] != tokens.seq:
        raise ValueError(f"dim {dim} of x is {x.shape[dim]} long, but the partition is of seq={tokens.seq} tokens")
    return _padded(x, dim, tokens, fill).index_select(dim, _owned(tokens, ring.rank, ulysses.rank, x.device))


def unshard(x: Tensor, mesh: DeviceMesh | None, tokens: Partition, *, dim: int = 1) -> Tensor:
    """The full tensor, on every rank, without padding: the inverse of `shard`. Differentiable.

    Every rank sends its shard to all others (kind "unshard"), and in backward as much again.

    Raises:
        ValueError: if x is not `tokens.seq_local` long in `dim`, or the partition is of another mesh.
    """
    ring, ulysses = checked_axes(mesh, tokens)
    if x.shape[dim] != tokens.seq_local:
        raise ValueError(f"dim {dim} of x is {x.shape[dim]} long, but a shard of {tokens} is {tokens.seq_local}")
    # Ulysses shares of a ring rank, then ring ranks: whose tokens follow each other in the result.
    gathered = gather(gather(x.movedim(dim, 0), ulysses, "unshard"), ring, "unshard")
    return gathered.index_select(0, _order(tokens, x.device)).movedim(0, dim)


def positions(
    mesh: DeviceMesh | None, tokens: Partition, *, mask: Mask | None = None, device: torch.device | str | None = None
) -> Int[Tensor, "rows seq_local"]:
    """Global positions of this rank's tokens, for rotary embeddings and labels.

    One row, or one a batch row if `tokens.start` or the mask tell them apart. With a mask that has
    documents (not key_documents), positions restart at 0 in each; outside documents they are 0. Padding
    counts on. On the mesh's kind of device, if none is given.

    Raises:
        ValueError: if mask and starts speak of different numbers of rows, the partition is of another mesh, or
            the mask is of regions alone, which do not say where a document begins.
    """
    ring, ulysses = checked_axes(mesh, tokens)
    device = torch.device(device or ("cpu" if mesh is None else mesh.device_type))
    local = _owned(tokens, ring.rank, ulysses.rank, device)
    rows = local + torch.tensor(tokens.starts, device=local.device)[:, None]
    if mask is None or mask.documents is None:
        return rows
    count = batch_rows(mask, tokens, tokens)
    rows = rows.expand(count, -1)
    restarted = torch.zeros_like(rows)
    for row in range(len(rows)):
        documents = mask.documents[row if len(mask.documents) > 1 else 0]
        if not documents and mask.disjoint_regions(row):
            raise ValueError(
                f"batch row {row} of the mask has regions and no documents to count positions in (it was made from an "
                "attention mask with holes, or from cumulative lengths of queries and keys): count them in the model, "
                "or leave mask out for global positions"
            )
        for first, end in documents:
            inside = (rows[row] >= first) & (rows[row] < end)
            restarted[row] = torch.where(inside, rows[row] - first, restarted[row])
    return restarted


def checked_axes(mesh: DeviceMesh | None, tokens: Partition) -> tuple[Axis, Axis]:
    """The mesh's axes, if the partition was made for them."""
    ring, ulysses = axes(mesh)
    if not isinstance(tokens, Partition):
        raise ValueError(f"tokens is a {type(tokens).__name__}: make it with usp.partition(seq, mesh, layout)")
    if (ring.size, ulysses.size) != (tokens.ring, tokens.ulysses):
        raise ValueError(
            f"the partition is for ring={tokens.ring} x ulysses={tokens.ulysses}, the mesh has ring={ring.size} x "
            f"ulysses={ulysses.size}: make it with usp.partition(seq, mesh, layout)"
        )
    return ring, ulysses


@lru_cache(maxsize=16)
def _owned(tokens: Partition, ring_rank: int, ulysses_rank: int, device: torch.device) -> Tensor:
    """Indices of a rank's tokens in the padded sequence, (seq_local,)."""
    first = tokens.span()[0]
    with torch.inference_mode(False):  # kept, and training may be next
        runs = [
            torch.arange(start - first, start - first + step * count, step, device=device)
            for start, step, count in tokens.runs(ring_rank)
        ]
        return torch.cat(runs)[ulysses_rank * tokens.seq_local : (ulysses_rank + 1) * tokens.seq_local].clone()


@lru_cache(maxsize=8)  # as long as the sequence
def _order(tokens: Partition, device: torch.device) -> Tensor:
    """Where the shards, one behind another, hold positions 0 to seq, (seq,)."""
    with torch.inference_mode(False):
        owned = [_owned(tokens, r, u, device) for r in range(tokens.ring) for u in range(tokens.ulysses)]
        return torch.argsort(torch.cat(owned))[: tokens.seq].clone()


def _padded(x: Tensor, dim: int, tokens: Partition, fill: float) -> Tensor:
    if tokens.padded == tokens.seq:
        return x
    after = x.ndim - 1 - dim % x.ndim  # dims behind `dim`, for pad's last-dim-first order
    return F.pad(x, [0] * (2 * after) + [0, tokens.padded - tokens.seq], value=fill)


def gather(x: Tensor, axis: Axis, kind: str) -> Tensor:
    """All ranks' x, one after another in dim 0. Differentiable: see Note [Gradients of shards]."""
    return x if axis.size == 1 else _Gather.apply(x, axis.group, kind)  # pyright: ignore[reportReturnType]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, group: str, kind: str) -> Tensor:
        return comm.all_gather(x.contiguous(), group, kind).flatten(0, 1)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        x, ctx.group, ctx.kind = inputs
        ctx.seq = x.shape[0]

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        return comm.reduce_scatter(grad.unflatten(0, (-1, ctx.seq)), ctx.group, ctx.kind), None, None
