"""Ring attention: queries stay, keys and values visit the ranks that need them.

Note [Gradients]
~~~~~~~~~~~~~~~~
Forward keeps q, k, v and the merged (out, lse). Backward sends the same keys around the same way again and
gives every block the *global* out and lse, so that each block's share of a gradient is exact:

    p = exp(scores - lse)    ds = p (dout v^T - rowsum(dout out) + dlse)    dq = ds k, dk = ds^T q, dv = p^T dout

dq accumulates at home. dk and dv travel in float32: born at a source's first foreign visitor, they follow
the keys, and the last visitor sends them straight home, where the home's own share is added and the one
cast happens. lse is an output like out: what is computed from (out, lse) afterwards is plain autograd.

No gradient of a parameter is reduced here: each rank gets its share, and the loss is the sum over ranks.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from usp import comm, kernels
from usp.blocks import (
    Block,
    Columns,
    Step,
    batch_rows,
    blocks,
    carried,
    in_message,
    needed,
    ring_order,
    schedule,
    steps,
)
from usp.heads import Group, HeadPlan
from usp.masks import Mask
from usp.merging import accumulate, accumulator_dtype
from usp.mesh import ALONE, Axis
from usp.partitions import Partition
from usp.sharding import checked_axes

EXCHANGES = ("ring", "all_gather")


@dataclass(frozen=True)
class Pass:
    """Everything that a ring pass needs and is not a tensor. Interned: equal calls share one plan.

    `local` is set where nothing travels: the ring ranks whose queries meet whose keys, on this rank alone.
    """

    mask: Mask
    queries: Partition
    keys: Partition
    ring: Axis
    groups: tuple[Group, ...]
    scale: float
    backend: str
    exchange: str
    local: tuple[int, int] | None = None

    @cached_property
    def handle(self) -> int:
        """Stands for this object across the custom-op boundary."""
        return next(_handles)

    @cached_property
    def need(self) -> tuple[tuple[Columns, ...], ...]:
        return needed(self.mask, self.queries, self.keys)

    @property
    def rank(self) -> int:
        """The ring rank whose queries these are."""
        return self.local[0] if self.local else self.ring.rank

    @property
    def home(self) -> int:
        """The ring rank whose keys are here from the beginning."""
        return self.local[1] if self.local else self.ring.rank

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        if self.local:
            return (Step(source=self.home),)
        return steps(schedule(self.need, ring_order(self.ring.size)), self.ring.rank)

    @cached_property
    def columns(self) -> tuple[Columns, ...]:
        """By source: which of its keys the other ranks get."""
        if self.exchange == "all_gather":
            return ((range(self.keys.seq_ring),),) * self.ring.size
        if self.local:
            return ((),) * self.keys.ring
        return carried(self.need)

    @cached_property
    def work(self) -> dict[int, tuple[tuple[slice, Block], ...]]:
        """By source: the batch rows and the blocks to compute with its keys, as they are at home or in its message."""
        rows = batch_rows(self.mask, self.queries, self.keys)
        return {
            source: tuple(
                (
                    slice(None) if rows == 1 else slice(row, row + 1),
                    block if source == self.home else in_message(block, self.columns[source]),
                )
                for row in range(rows)
                for block in blocks(self.mask, self.queries, self.rank, self.keys, source, row)
            )
            for source in (step.source for step in self.steps)
            if source is not None
        }


_handles = itertools.count()
_by_handle: weakref.WeakValueDictionary[int, Pass] = weakref.WeakValueDictionary()


@lru_cache(maxsize=1024)
def interned(plan: Pass) -> Pass:
    """The one plan equal to this one. Recent ones are kept; older ones live while a backward needs them."""
    _by_handle[plan.handle] = plan
    return plan


def _handle(
    mask: Mask,
    queries: Partition,
    keys: Partition,
    size: int,
    rank: int,
    group: str,
    groups: tuple[Group, ...],
    scale: float,
    backend: str,
    exchange: str,
    local: tuple[int, int] | None,
) -> int:
    plan = interned(Pass(mask, queries, keys, Axis(size, rank, group), groups, scale, backend, exchange, local))
    if torch.compiler.is_compiling():
        _traced.add(plan)  # its number is in the graph for good
    return plan.handle


# A traced call carries the number and does not trace the planning. This is what torch.compiler.assume_constant_result
# sets; calling that would import the whole compiler, which takes seconds, for everybody.
_handle._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
_traced: set[Pass] = set()


def ring_attention(
    q: Float[Tensor, "batch seq_ring heads head_dim"],
    k: Float[Tensor, "batch key_seq_ring kv_heads head_dim"],
    v: Float[Tensor, "batch key_seq_ring kv_heads head_dim_v"],
    mesh: DeviceMesh | None,
    tokens: Partition,
    *,
    mask: Mask,
    key_tokens: Partition | None = None,
    plan: HeadPlan | None = None,
    scale: float | None = None,
    exchange: str = "ring",
    backend: str = "auto",
) -> tuple[Float[Tensor, "batch seq_ring heads head_dim_v"], Float[Tensor, "batch heads seq_ring"]]:
    """Attention of a ring rank's queries to all keys, over the "ring" axis of the mesh alone.

    A piece of `hybrid_attention`, which see; its inputs are what `sequence_to_heads` returns. Ranks are not
    checked against each other here. With a plan, heads are those of this Ulysses rank in it.

    Returns:
        out in q's dtype and lse, the natural log in float32 (float64 for float64); both differentiable.

    Raises:
        ValueError: if the shapes do not fit the partitions, or the backend cannot do it.
    """
    (ring, ulysses), keys = checked_axes(mesh, tokens), key_tokens or tokens
    checked_axes(mesh, keys)
    check_call(q, k, v, mask, tokens, keys, scale, exchange, seq=tokens.seq_ring, key_seq=keys.seq_ring)
    if key_tokens is None:
        check_ends(mask, tokens)
    groups = (plan or HeadPlan(q.shape[2], k.shape[2])).groups(ulysses.rank if plan else 0)
    if (q.shape[2], k.shape[2]) != (groups[-1].queries.stop, groups[-1].keys.stop):
        raise ValueError(
            f"q has {q.shape[2]} heads and k {k.shape[2]}, but Ulysses rank {ulysses.rank} of {plan} has "
            f"{groups[-1].queries.stop} and {groups[-1].keys.stop}"
        )
    differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    backend = kernels.select(backend, q, v, lse_gradient=differentiated)
    return attend(q, k, v, ring, mask, tokens, keys, groups, scale, exchange, backend)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ring: Axis,
    mask: Mask,
    tokens: Partition,
    keys: Partition,
    groups: tuple[Group, ...],
    scale: float | None,
    exchange: str,
    backend: str,
    local: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """`ring_attention` of checked arguments. With `local`, of one rank's queries to one rank's keys, both here."""
    factor: float = q.shape[3] ** -0.5 if scale is None else scale
    ring = ALONE if local else ring
    exchange = exchange if ring.size > 1 else "ring"
    handle = _handle(mask, tokens, keys, ring.size, ring.rank, ring.group, groups, factor, backend, exchange, local)
    return torch.ops.usp.ring_forward(q, k, v, handle)


def check_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    tokens: Partition,
    keys: Partition,
    scale: float | None,
    exchange: str,
    *,
    seq: int,
    key_seq: int,
) -> None:
    """What one rank alone can see to be wrong with the tensors and options of a call.

    Raises:
        ValueError: naming the values.
    """
    if not isinstance(mask, Mask):
        raise ValueError(
            f"mask is a {type(mask).__name__} and not a usp.Mask: describe it by causal, window, documents and "
            "regions, or make it with Mask.from_attention_mask, .from_cu_seqlens or .from_position_ids; a dense mask "
            "would make every rank compute and send everything"
        )
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.ndim == k.ndim == v.ndim == 4:
        raise ValueError(f"{shapes}: each must be (batch, seq, heads, head_dim)")
    if not (q.shape[0] == k.shape[0] == v.shape[0] and k.shape[:3] == v.shape[:3] and q.shape[3] == k.shape[3]):
        raise ValueError(f"{shapes}: batch, k's and v's seq and heads, and q's and k's head_dim must be equal")
    if 0 in (*q.shape, *v.shape):
        raise ValueError(f"{shapes}: every size is at least 1")
    if not (q.dtype == k.dtype == v.dtype and q.device == k.device == v.device):
        raise ValueError(f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype} on {q.device}, {k.device}, {v.device}: use one")
    for name, x, partition, expected in (("q", q, tokens, seq), ("k and v", k, keys, key_seq)):
        if x.shape[1] != expected:
            raise ValueError(
                f"{name} hold {x.shape[1]} tokens, but this rank's share of {partition} is {expected}: use usp.shard"
            )
    rows = batch_rows(mask, tokens, keys)
    if rows not in (1, q.shape[0]):
        raise ValueError(f"the mask or a start tells {rows} batch rows apart, but the batch is {q.shape[0]}")
    if scale is not None and not 0 < scale < math.inf:
        raise ValueError(f"scale={scale} is not a positive finite number")
    if exchange not in EXCHANGES:
        raise ValueError(f"exchange={exchange!r} is not one of {EXCHANGES}")


def check_ends(mask: Mask, tokens: Partition, beside: Partition | None = None) -> None:
    """No document and no region goes past the end of the sequence, where these tokens (and those beside) are all of it.

    Raises:
        ValueError: naming the ends.
    """
    for row in range(batch_rows(mask, tokens, tokens)):
        first, end = tokens.span(row)
        end = max(end, beside.span(row)[1]) if beside else end
        if mask.end(row) > end:
            raise ValueError(
                f"the mask's documents and regions reach to position {mask.end(row)} in batch row {row}, but the "
                f"{tokens.seq} tokens from position {first} end at {end}: give lengths, offsets and spans of this "
                "sequence, or a partition of the keys (key_tokens=) if these tokens are a part of it"
            )


check_ends._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]  # as _handle: not traced


torch.library.define("usp::ring_forward", "(Tensor q, Tensor k, Tensor v, int handle) -> (Tensor, Tensor)")
torch.library.define(
    "usp::ring_backward",
    "(Tensor? dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, int handle)"
    " -> (Tensor, Tensor, Tensor)",
)


@torch.library.impl("usp::ring_forward", "CompositeExplicitAutograd")
def _ring_forward(q: Tensor, k: Tensor, v: Tensor, handle: int) -> tuple[Tensor, Tensor]:
    plan = _by_handle[handle]
    wide = accumulator_dtype(q.dtype)
    batch, seq, heads, _ = q.shape
    out = q.new_zeros((batch, seq, heads, v.shape[3]), dtype=wide)
    lse = q.new_full((batch, heads, seq), -torch.inf, dtype=wide)
    with torch.autocast(q.device.type, enabled=False):
        for step, k_block, v_block in _arrivals(plan, k, v):
            for rows, block in () if step.source is None else plan.work[step.source]:
                seen = slice(block.q.start, block.q.stop)
                for heads, kv_heads in _slices(plan.groups):
                    part = kernels.forward(
                        *(plan.backend, q[rows, :, heads], k_block[rows, :, kv_heads], v_block[rows, :, kv_heads]),
                        *(block, plan.scale),
                    )
                    accumulate(out[rows, seen, heads], lse[rows, heads, seen], *part)
    return out.to(q.dtype), lse


@torch.library.impl("usp::ring_backward", "CompositeExplicitAutograd")
def _ring_backward(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    handle: int,
) -> tuple[Tensor, Tensor, Tensor]:
    plan = _by_handle[handle]
    dout = torch.zeros_like(out) if dout is None else dout
    dq = torch.zeros(q.shape, dtype=accumulator_dtype(q.dtype), device=q.device)
    gradients = (_GatheredGradients if plan.exchange == "all_gather" else _RingGradients)(plan, k, v)
    with torch.autocast(q.device.type, enabled=False):
        for step, k_block, v_block in _arrivals(plan, k, v):
            gradients.start(step)
            for rows, block in () if step.source is None else plan.work[step.source]:
                seen, keys = slice(block.q.start, block.q.stop), slice(block.k.start, block.k.stop)
                for heads, kv_heads in _slices(plan.groups):
                    dq_part, dk_part, dv_part = kernels.backward(
                        *(plan.backend, dout[rows, :, heads], q[rows, :, heads]),
                        *(k_block[rows, :, kv_heads], v_block[rows, :, kv_heads]),
                        *(out[rows, :, heads], lse[rows, heads], None if dlse is None else dlse[rows, heads]),
                        *(block, plan.scale),
                    )
                    dk, dv = gradients.of(step)  # asked for after a kernel, under which it came
                    dq[rows, seen, heads] += dq_part
                    dk[rows, keys, kv_heads] += dk_part
                    dv[rows, keys, kv_heads] += dv_part
            gradients.wait(step)
    dk, dv = gradients.home
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _slices(groups: tuple[Group, ...]) -> list[tuple[slice, slice]]:
    return [(slice(q.start, q.stop), slice(k.start, k.stop)) for q, k in groups]


@torch.library.register_fake("usp::ring_forward")
def _(q: Tensor, k: Tensor, v: Tensor, handle: int) -> tuple[Tensor, Tensor]:
    batch, seq, heads, _ = q.shape
    lse = q.new_empty((batch, heads, seq), dtype=accumulator_dtype(q.dtype))
    return q.new_empty((batch, seq, heads, v.shape[3])), lse


@torch.library.register_fake("usp::ring_backward")
def _(dout, dlse, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, handle: int):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx, inputs, output) -> None:
    q, k, v, ctx.handle = inputs
    ctx.plan = _by_handle[ctx.handle]  # keeps it alive
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output)


def _gradient(ctx, dout: Tensor | None, dlse: Tensor | None):
    q, k, v, out, lse = ctx.saved_tensors
    grads = torch.ops.usp.ring_backward(dout, dlse, q, k, v, out, lse, ctx.handle)
    assert all(grad.shape == x.shape for grad, x in zip(grads, (q, k, v), strict=True))
    return *grads, None


def _no_second_gradient(ctx, *grads):
    raise RuntimeError("usp attention is differentiable once: its backward pass has no gradient of its own")


torch.library.register_autograd("usp::ring_forward", _gradient, setup_context=_save)
torch.library.register_autograd("usp::ring_backward", _no_second_gradient)


# ---------------------------------------------------------------------------------------------------
# How keys come by, and how their gradients get home.


def _arrivals(plan: Pass, k: Tensor, v: Tensor) -> Iterator[tuple[Step, Tensor, Tensor]]:
    """Step by step, the keys and values to compute with; the next ones travel meanwhile."""
    home = plan.home
    if plan.exchange == "all_gather":
        message = k.new_empty(k.numel() + v.numel())
        _pack(k, v, plan.columns[home], message)
        everyone = comm.all_gather(message, plan.ring.group, "all_gather")
        for step in plan.steps:
            yield step, *(_unpack(everyone[step.source], k, v) if step.source is not None else (k, v))
        return
    numels = [_numel(columns, k, v) for columns in plan.columns]
    exchange = comm.Exchange(plan.ring.group, "ring", max(numels), k.dtype, k.device)
    held: dict[int, Tensor] = {}
    if plan.columns[home]:
        held[home] = exchange.empty(numels[home])
        _pack(k, v, plan.columns[home], held[home])
    for step in plan.steps:
        receive = [(hop, numels[hop.source]) for hop in (step.receive,) if hop]
        arriving = exchange.start([(hop, held[hop.source]) for hop in step.send], receive)
        yield step, *((k, v) if step.source in (home, None) else _unpack(held[step.source], k, v))
        exchange.wait()
        for source in step.spent:
            if source in held:
                exchange.recycle(held.pop(source))
        held.update((hop.source, buffer) for (hop, _), buffer in zip(receive, arriving, strict=True))


class _RingGradients:
    """dk and dv that follow the keys and go home from their last visitor."""

    def __init__(self, plan: Pass, k: Tensor, v: Tensor):
        self.rank, self.columns, self.k, self.v = plan.home, plan.columns, k, v
        wide = accumulator_dtype(k.dtype)
        self.numels = [_numel(columns, k, v) for columns in plan.columns]
        self.exchange = comm.Exchange(plan.ring.group, "ring_grad", max(self.numels), wide, k.device)
        self.home = tuple(torch.zeros(x.shape, dtype=wide, device=x.device) for x in (k, v))
        self.held: dict[int, Tensor] = {}  # by source: what was added up so far, on its way
        self.arriving: dict[int, Tensor] = {}

    def start(self, step: Step) -> None:
        receive = [(hop, self.numels[hop.source]) for hop in step.grad_receive]
        buffers = self.exchange.start([(hop, self.held[hop.source]) for hop in step.grad_send], receive)
        self.arriving = {hop.source: buffer for hop, buffer in zip(step.grad_receive, buffers, strict=True)}

    def of(self, step: Step) -> tuple[Tensor, ...]:
        """Where to add this rank's share of the step's gradient: to what earlier visitors added up."""
        source = step.source
        if source is None or source == self.rank:
            return self.home
        if source in self.arriving:
            self.exchange.wait()
            self.held[source] = self.arriving.pop(source)
        elif source not in self.held:
            self.held[source] = self.exchange.empty(self.numels[source]).zero_()
        return _unpack(self.held[source], self.k, self.v)

    def wait(self, step: Step) -> None:
        self.of(step)  # takes what came, also if there was nothing to add
        self.exchange.wait()
        for hop in step.grad_send:
            self.exchange.recycle(self.held.pop(hop.source))
        if self.rank in self.arriving:
            buffer = self.arriving.pop(self.rank)
            for mine, others in zip(self.home, _unpack(buffer, self.k, self.v), strict=True):
                for at_home, sent in _places(self.columns[self.rank]):
                    mine[:, at_home] += others[:, sent]
            self.exchange.recycle(buffer)
        assert not self.arriving


class _GatheredGradients:
    """dk and dv of all sources, summed over the ranks at the end."""

    def __init__(self, plan: Pass, k: Tensor, v: Tensor):
        self.group, self.k, self.v = plan.ring.group, k, v
        size = plan.ring.size, k.numel() + v.numel()
        self.shares = torch.zeros(size, dtype=accumulator_dtype(k.dtype), device=k.device)

    def start(self, step: Step) -> None:
        """Nothing moves before all shares are known."""

    def of(self, step: Step) -> tuple[Tensor, ...]:
        return _unpack(self.shares[step.source], self.k, self.v)

    def wait(self, step: Step) -> None:
        """Nothing moved."""

    @property
    def home(self) -> tuple[Tensor, ...]:
        total = comm.reduce_scatter(self.shares, self.group, "reduce_scatter")
        return tuple(x.clone() for x in _unpack(total, self.k, self.v))  # of one buffer, which outputs may not share


def _pack(k: Tensor, v: Tensor, columns: Columns, message: Tensor) -> None:
    """Write these keys and their values into one message."""
    for part, x in zip(_unpack(message, k, v), (k, v), strict=True):
        for at_home, sent in _places(columns):
            part[:, sent] = x[:, at_home]


def _unpack(message: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Views of a message, shaped like k and v but for the number of tokens."""
    batch, _, heads, _ = k.shape
    dims = k.shape[3], v.shape[3]
    tokens = message.numel() // sum(dims)
    k, v = (
        rearrange(x, "(b s h d) -> b s h d", b=batch, h=heads, d=dim)
        for x, dim in zip(message.split([tokens * dim for dim in dims]), dims, strict=True)
    )
    return k, v


def _numel(columns: Columns, k: Tensor, v: Tensor) -> int:
    return k.shape[0] * sum(map(len, columns)) * k.shape[2] * (k.shape[3] + v.shape[3])


def _places(columns: Columns) -> Iterator[tuple[slice, slice]]:
    """Where columns are in the source's own tensors, and in its message."""
    first = 0
    for x in columns:
        yield slice(x.start, x.stop), slice(first, first + len(x))
        first += len(x)
