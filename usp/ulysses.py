"""Trade sequence shards for head shards inside a Ulysses group, and back.

Tensors that go the same way go in one message to each rank. The two directions are each other's transpose,
so each is the other's gradient; where a KV head is on several ranks (`HeadPlan`), the way back adds up what
they have of its gradient, in float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain, islice

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from usp import comm
from usp.heads import HeadPlan
from usp.merging import accumulator_dtype
from usp.mesh import Axis, axes


def sequence_to_heads(
    x: Float[Tensor, "batch seq_local heads head_dim"], mesh: DeviceMesh | None, *, plan: HeadPlan | None = None
) -> Float[Tensor, "batch seq_ring heads_local head_dim"]:
    """All tokens of the ring rank, this rank's share of the heads. Differentiable.

    x is q, k or v: it has the plan's query heads or its KV heads. Without a plan, heads divide over the Ulysses axis.

    Raises:
        ValueError: if the heads do not fit the plan, or do not divide.
    """
    ulysses = axes(mesh)[1]
    plan = plan or _even(x.shape[2], ulysses.size)
    if plan.ulysses != ulysses.size or x.shape[2] not in (plan.heads, plan.kv_heads):
        raise ValueError(f"x has {x.shape[2]} heads on ulysses={ulysses.size} ranks, which does not fit {plan}")
    return to_heads([x], "q" if x.shape[2] == plan.heads else "k", plan, ulysses)[0]


def heads_to_sequence(
    x: Float[Tensor, "batch seq_ring heads_local head_dim"], mesh: DeviceMesh | None, *, plan: HeadPlan | None = None
) -> Float[Tensor, "batch seq_local heads head_dim"]:
    """The inverse of `sequence_to_heads` for what has query heads, as out. Differentiable.

    Raises:
        ValueError: if the heads do not fit the plan.
    """
    ulysses = axes(mesh)[1]
    plan = plan or _even(x.shape[2] * ulysses.size, ulysses.size)
    if plan.ulysses != ulysses.size or x.shape[2] != len(plan.queries[ulysses.rank]):
        raise ValueError(
            f"x has {x.shape[2]} heads on rank {ulysses.rank} of ulysses={ulysses.size}: not those of {plan}"
        )
    return to_sequence([x], "q", plan, ulysses)[0]


def lse_to_sequence(
    lse: Float[Tensor, "batch heads_local seq_ring"], plan: HeadPlan, ulysses: Axis
) -> Float[Tensor, "batch heads seq_local"]:
    """`heads_to_sequence` for lse. Differentiable."""
    x = rearrange(lse, "b h s -> b s h 1")
    return rearrange(to_sequence([x], "q", plan, ulysses, "lse")[0], "b s h 1 -> b h s")


def to_heads(xs: Sequence[Tensor], cuts: str, plan: HeadPlan, ulysses: Axis) -> list[Tensor]:
    """(batch, seq_local, heads or KV heads, dim) each, to all tokens and this rank's heads; one message a rank.

    `cuts` has a letter for each: "q" where query heads are dealt, "k" where KV heads are.
    """
    if ulysses.size == 1:
        return list(xs)
    arguments = plan.heads, plan.kv_heads, plan.replicate_kv, ulysses.group, "all_to_all"
    return torch.ops.usp.to_heads(xs, cuts, *arguments)


def to_sequence(
    xs: Sequence[Tensor], cuts: str, plan: HeadPlan, ulysses: Axis, kind: str = "all_to_all"
) -> list[Tensor]:
    """The transpose of `to_heads`."""
    if ulysses.size == 1:
        return list(xs)
    return torch.ops.usp.to_sequence(xs, cuts, plan.heads, plan.kv_heads, plan.replicate_kv, ulysses.group, kind)


def _even(heads: int, ulysses: int) -> HeadPlan:
    if heads % ulysses:
        raise ValueError(f"{heads} heads do not divide over ulysses={ulysses} ranks: give plan=usp.HeadPlan(...)")
    return HeadPlan(heads, heads, ulysses)


_ARGUMENTS = "(Tensor[] xs, str cuts, int heads, int kv_heads, bool replicate_kv, str group, str kind) -> Tensor[]"
torch.library.define("usp::to_heads", _ARGUMENTS)
torch.library.define("usp::to_sequence", _ARGUMENTS)


@torch.library.impl("usp::to_heads", "CompositeExplicitAutograd")
def _to_heads(xs: list[Tensor], cuts: str, heads: int, kv_heads: int, replicate_kv: bool, group: str, kind: str):
    size, rank = comm.size_and_rank(group)
    dealt = _dealt(cuts, _plan(heads, kv_heads, size, replicate_kv))
    give = [[x[:, :, mine[n].start : mine[n].stop] for x, mine in zip(xs, dealt, strict=True)] for n in range(size)]
    outs = _local_shapes(xs, dealt, rank, size)
    parts = [(batch, seq // size, count, dim) for batch, seq, count, dim in outs]
    arrived = _exchange(give, [parts] * size, group, kind)
    return [torch.cat(some, 1) for some in zip(*arrived, strict=True)]


@torch.library.impl("usp::to_sequence", "CompositeExplicitAutograd")
def _to_sequence(xs: list[Tensor], cuts: str, heads: int, kv_heads: int, replicate_kv: bool, group: str, kind: str):
    size, _ = comm.size_and_rank(group)
    dealt = _dealt(cuts, _plan(heads, kv_heads, size, replicate_kv))
    chunks = [x.chunk(size, 1) for x in xs]
    give = [[parts[n] for parts in chunks] for n in range(size)]
    take = [
        [(*parts[0].shape[:2], len(theirs[n]), parts[0].shape[3]) for parts, theirs in zip(chunks, dealt, strict=True)]
        for n in range(size)
    ]
    arrived = _exchange(give, take, group, kind)
    outs = []
    for some, theirs in zip(zip(*arrived, strict=True), dealt, strict=True):
        if sum(map(len, theirs)) == theirs[-1].stop:
            outs.append(torch.cat(some, 2))
        else:  # heads that several ranks have: gradients, which add up
            batch, seq, _, dim = some[0].shape
            out = some[0].new_zeros((batch, seq, theirs[-1].stop, dim), dtype=accumulator_dtype(some[0].dtype))
            for part, where in zip(some, theirs, strict=True):
                out[:, :, where.start : where.stop] += part
            outs.append(out.to(some[0].dtype))
    return outs


@torch.library.register_fake("usp::to_heads")
def _(xs, cuts: str, heads: int, kv_heads: int, replicate_kv: bool, group: str, kind: str):
    size, rank = comm.size_and_rank(group)
    dealt = _dealt(cuts, _plan(heads, kv_heads, size, replicate_kv))
    return [x.new_empty(shape) for x, shape in zip(xs, _local_shapes(xs, dealt, rank, size), strict=True)]


@torch.library.register_fake("usp::to_sequence")
def _(xs, cuts: str, heads: int, kv_heads: int, replicate_kv: bool, group: str, kind: str):
    size, _ = comm.size_and_rank(group)
    totals = [heads if cut == "q" else kv_heads for cut in cuts]
    return [
        x.new_empty((x.shape[0], x.shape[1] // size, total, x.shape[3])) for x, total in zip(xs, totals, strict=True)
    ]


_plan = lru_cache(maxsize=256)(HeadPlan)


def _dealt(cuts: str, plan: HeadPlan) -> list[tuple[range, ...]]:
    """By tensor and rank: its heads."""
    return [plan.queries if cut == "q" else plan.keys for cut in cuts]


def _local_shapes(xs: Sequence[Tensor], dealt: list[tuple[range, ...]], rank: int, size: int):
    return [(x.shape[0], x.shape[1] * size, len(mine[rank]), x.shape[3]) for x, mine in zip(xs, dealt, strict=True)]


def _exchange(
    give: list[list[Tensor]], take: Sequence[Sequence[tuple[int, ...]]], group: str, kind: str
) -> list[list[Tensor]]:
    """give[n] goes to rank n, as one message; the result's [n] came from rank n and has the shapes take[n]."""
    message = give[0][0].new_empty(sum(x.numel() for part in give for x in part))
    for here, x in zip(_views(message, [x.shape for part in give for x in part]), chain(*give), strict=True):
        here.copy_(x)
    sizes = [sum(x.numel() for x in part) for part in give], [sum(map(math.prod, shapes)) for shapes in take]
    arrived = iter(_views(comm.all_to_all(message, *sizes, group, kind), list(chain(*take))))
    return [list(islice(arrived, len(shapes))) for shapes in take]


def _views(message: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Parts of a flat message, one after another."""
    return [x.view(shape) for x, shape in zip(message.split([math.prod(s) for s in shapes]), shapes, strict=True)]


def _keep(ctx, inputs, output) -> None:
    _, *ctx.arguments = inputs


def _to_heads_gradient(ctx, grads: list[Tensor]):
    return torch.ops.usp.to_sequence(grads, *ctx.arguments), *[None] * len(ctx.arguments)


def _to_sequence_gradient(ctx, grads: list[Tensor]):
    return torch.ops.usp.to_heads(grads, *ctx.arguments), *[None] * len(ctx.arguments)


torch.library.register_autograd("usp::to_heads", _to_heads_gradient, setup_context=_keep)
torch.library.register_autograd("usp::to_sequence", _to_sequence_gradient, setup_context=_keep)
