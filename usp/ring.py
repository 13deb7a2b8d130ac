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
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple, Protocol, runtime_checkable

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
    Tokens,
    batch_rows,
    blocks,
    carried,
    in_message,
    needed,
    ring_order,
    schedule,
    span_of,
    steps,
    striped_apart,
)
from usp.heads import Group, HeadPlan
from usp.kernels.scores import RelativeBias, Scores, Terms, checked_scores
from usp.masks import Mask
from usp.merging import accumulate, accumulator_dtype
from usp.mesh import ALONE, Axis
from usp.partitions import Partition
from usp.sharding import checked_axes

EXCHANGES = ("ring", "all_gather")


class How(NamedTuple):
    """What all ring passes of a call have in common and is not a tensor. Heads are those of this rank."""

    groups: tuple[Group, ...]
    scores: Scores
    backend: str
    exchange: str
    float32_delta: bool


@dataclass(frozen=True)
class Pass:
    """Everything that a ring pass needs and is not a tensor. Interned: equal calls share one plan.

    `local` is set where nothing travels: the ring ranks whose queries meet whose keys, on this rank alone.
    """

    mask: Mask
    queries: Partition
    keys: Tokens
    ring: Axis
    how: How
    reach: int | None = None
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
        if self.how.exchange == "all_gather":
            return ((range(self.keys.seq_ring),),) * self.ring.size
        if self.local:
            return ((),) * self.keys.ring
        return carried(self.need)

    @cached_property
    def work(self) -> dict[int, tuple[Work, ...]]:
        """By source: what is to be computed with its keys."""
        rows = batch_rows(self.mask, self.queries, self.keys)
        return {
            source: tuple(
                Work(
                    slice(None) if rows == 1 else slice(row, row + 1),
                    block if source == self.home else in_message(block, self.columns[source]),
                    row,
                    source,
                    block.k,
                )
                for row in range(rows)
                for block in blocks(self.mask, self.queries, self.rank, self.keys, source, row, self.reach)
            )
            for source in (step.source for step in self.steps)
            if source is not None
        }

    def terms(self, work: Work, heads: slice, table: Tensor | None, seed: int) -> Terms:
        """Of the scores of one kernel call."""
        i = j = None
        if self.how.scores.by_position:
            i = _positions(self.queries, self.rank, work.row)[work.block.q.start : work.block.q.stop]
            j = _positions(self.keys, work.source, work.row)[work.columns.start : work.columns.stop]
        return self.how.scores.at(heads, work.row, i, j, table, seed)


class Work(NamedTuple):
    """One block: for these batch rows, with keys as they are at home or in a message."""

    rows: slice
    block: Block
    row: int  # the first batch row
    source: int  # whose keys
    columns: range  # these, as they are at home


@lru_cache(maxsize=8)  # a pass asks for its own and one source's, block by block
def _positions(tokens: Tokens, rank: int, row: int) -> Tensor:
    """Global positions of a ring rank's tokens, on the CPU."""
    parts = [torch.arange(run.count, device="cpu") * run.step + run.start for run in tokens.runs(rank, row)]
    return torch.cat(parts)


_handles = itertools.count()
_by_handle: weakref.WeakValueDictionary[int, Pass] = weakref.WeakValueDictionary()


@lru_cache(maxsize=256)  # of 131,072 packed tokens one is up to a MiB; the layers of a model share a few
def interned(plan: Pass) -> Pass:
    """The one plan equal to this one. Recent ones are kept; older ones live while a backward needs them."""
    _by_handle[plan.handle] = plan
    return plan


def _handle(
    mask: Mask,
    queries: Partition,
    keys: Tokens,
    ring: tuple,
    how: tuple,
    scores: tuple,
    reach: int | None,
    local: tuple[int, int] | None,
) -> int:
    # Plain tuples, since those with names would come from a traced call without them.
    plan = interned(Pass(mask, queries, keys, Axis(*ring), How(*how)._replace(scores=Scores(*scores)), reach, local))
    if torch.compiler.is_compiling():
        _traced.add(plan)  # its number is in the graph for good
    return plan.handle


# A traced call carries the number and does not trace the planning. This is what torch.compiler.assume_constant_result
# sets; calling that would import the whole compiler, which takes seconds, for everybody.
_handle._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
_traced: set[Pass] = set()


@runtime_checkable
class Batch(Protocol):
    """Who has which tokens of a batch, and what they see."""

    tokens: Partition

    def mask(self, *, causal: bool, window: int | None = None) -> Mask: ...


class Wanted(NamedTuple):
    """What a layer of a traced model asks for, whatever the batch: the rest of a `Pass`."""

    causal: bool
    window: int | None
    ring: Axis
    how: How
    reach: int | None


# A graph that has the number of a plan in it is made again for each plan. So a model that is traced with its batches as
# arguments computes a number from that of the batch (an argument) and that of what its layer wants (a constant); such
# numbers are negative, and are looked up when the graph runs.
_WANTED = 1 << 16
_batches: weakref.WeakValueDictionary[int, Batch] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)
_wanted: dict[Wanted, int] = {}


def numbered(batch: Batch) -> int:
    """A number for a batch, by which it is found as long as it lives."""
    number = next(_numbers)
    _batches[number] = batch
    return number


def _wanted_number(causal: bool, window: int | None, ring: tuple, how: tuple, scores: tuple, reach: int | None) -> int:
    wanted = Wanted(causal, window, Axis(*ring), How(*how)._replace(scores=Scores(*scores)), reach)
    return _wanted.setdefault(wanted, len(_wanted))


_wanted_number._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def _plan(handle: int) -> Pass:
    return _by_handle[handle] if handle >= 0 else _found(-handle)


@lru_cache(maxsize=256)  # backward may come when nobody else has the batch any more
def _found(number: int) -> Pass:
    batch = _batches[number // _WANTED]
    causal, window, ring, how, reach = list(_wanted)[number % _WANTED]
    return interned(Pass(batch.mask(causal=causal, window=window), batch.tokens, batch.tokens, ring, how, reach))


def attend_later(
    q: Tensor, k: Tensor, v: Tensor, seed: int, ring: Axis, number: int, causal: bool, window: int | None, how: How
) -> tuple[Tensor, Tensor]:
    """`attend` to a batch that is known by its number (`numbered`), for traced models."""
    reach = kernels.reach(how.backend, q.dtype, how.scores)
    wanted = _wanted_number(causal, window, tuple(ring), tuple(how), tuple(how.scores), reach)
    out, lse, _ = torch.ops.usp.ring_forward(q, k, v, None, seed, -(number * _WANTED + wanted), False)
    return out, lse


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
    softcap: float | None = None,
    alibi: Sequence[float] | Tensor | None = None,
    bias: RelativeBias | None = None,
    dropout: tuple[float, int] | None = None,
    exchange: str = "ring",
    backend: str = "auto",
    float32_delta: bool = False,
) -> tuple[Float[Tensor, "batch seq_ring heads head_dim_v"], Float[Tensor, "batch heads seq_ring"]]:
    """Attention of a ring rank's queries to all keys, over the "ring" axis of the mesh alone.

    A piece of `hybrid_attention`, which see; its inputs are what `sequence_to_heads` returns. Ranks are not
    checked against each other here. With a plan, heads are those of this Ulysses rank in it; slopes and the columns of
    a bias are those of q's heads.

    Returns:
        out in q's dtype and lse, the natural log in float32 (float64 for float64); both differentiable.

    Raises:
        ValueError: if the shapes do not fit the partitions, or the backend cannot do it.
    """
    (ring, ulysses), keys = checked_axes(mesh, tokens), key_tokens or tokens
    checked_axes(mesh, keys)
    check_call(q, k, v, mask, tokens, keys, exchange, seq=tokens.seq_ring, key_seq=keys.seq_ring)
    scores = checked_scores(q, scale, softcap, alibi, bias, dropout)
    if key_tokens is None:
        check_ends(mask, tokens)
    groups = (plan or HeadPlan(q.shape[2], k.shape[2])).groups(ulysses.rank if plan else 0)
    if (q.shape[2], k.shape[2]) != (groups[-1].queries.stop, groups[-1].keys.stop):
        raise ValueError(
            f"q has {q.shape[2]} heads and k {k.shape[2]}, but Ulysses rank {ulysses.rank} of {plan} has "
            f"{groups[-1].queries.stop} and {groups[-1].keys.stop}"
        )
    first = plan.queries[ulysses.rank].start if plan else ulysses.rank * q.shape[2]
    table, seed = bias.table if bias else None, dropout[1] if dropout else 0
    differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, table) if x is not None)
    where = {"span": span_of(tokens, keys), "apart": striped_apart(tokens, keys)}
    backend = kernels.select(backend, q, v, scores, lse_gradient=differentiated, **where)
    how = How(groups, scores._replace(first_head=first), backend, exchange, float32_delta)
    return attend(q, k, v, table, seed, ring, mask, tokens, keys, how)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor | None,
    seed: int,
    ring: Axis,
    mask: Mask,
    tokens: Partition,
    keys: Tokens,
    how: How,
    local: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """`ring_attention` of checked arguments. With `local`, of one rank's queries to one rank's keys, both here."""
    ring = ALONE if local else ring
    if ring.size == 1 and how.exchange != "ring":
        how = how._replace(exchange="ring")
    reach = kernels.reach(how.backend, q.dtype, how.scores)
    handle = _handle(mask, tokens, keys, tuple(ring), tuple(how), tuple(how.scores), reach, local)
    out, lse, _ = torch.ops.usp.ring_forward(q, k, v, table, seed, handle, how.float32_delta)
    return out, lse


def check_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    tokens: Partition,
    keys: Partition,
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
    check_tensors(q=q, k=k, v=v)
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
    if exchange not in EXCHANGES:
        raise ValueError(f"exchange={exchange!r} is not one of {EXCHANGES}")


def check_tensors(**named: object) -> None:
    """All of them are tensors.

    Raises:
        ValueError: naming the first that is not.
    """
    for name, x in named.items():
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} is a {type(x).__name__} and not a tensor")


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


# `rest` is what rounding took from out, or empty; `dtable` is empty if there is no table.
torch.library.define(
    "usp::ring_forward",
    "(Tensor q, Tensor k, Tensor v, Tensor? table, SymInt seed, SymInt handle, bool float32_delta)"
    " -> (Tensor out, Tensor lse, Tensor rest)",
)
torch.library.define(
    "usp::ring_backward",
    "(Tensor? dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor? table, Tensor out, Tensor lse, Tensor rest,"
    " SymInt seed, SymInt handle) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dtable)",
)


@torch.library.impl("usp::ring_forward", "CompositeExplicitAutograd")
def _ring_forward(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, seed: int, handle: int, float32_delta: bool
) -> tuple[Tensor, Tensor, Tensor]:
    plan = _plan(handle)
    wide = accumulator_dtype(q.dtype)
    batch, seq, heads, _ = q.shape
    keeps_rest = float32_delta and q.dtype != wide
    out = q.new_zeros((batch, seq, heads, v.shape[3]), dtype=wide)
    lse = q.new_full((batch, heads, seq), -torch.inf, dtype=wide)
    with torch.autocast(q.device.type, enabled=False):
        for step, k_block, v_block in _arrivals(plan, k, v):
            for work in () if step.source is None else plan.work[step.source]:
                rows, block = work.rows, work.block
                seen = slice(block.q.start, block.q.stop)
                for heads, kv_heads in _slices(plan.how.groups):
                    part = kernels.forward(
                        *(plan.how.backend, q[rows, :, heads], k_block[rows, :, kv_heads], v_block[rows, :, kv_heads]),
                        *(block, plan.terms(work, heads, table, seed)),
                        centred=keeps_rest,
                    )
                    accumulate(out[rows, seen, heads], lse[rows, heads, seen], *part)
    rounded = out.to(q.dtype)
    return rounded, lse, (out - rounded).to(q.dtype) if keeps_rest else q.new_empty(0)


@torch.library.impl("usp::ring_backward", "CompositeExplicitAutograd")
def _ring_backward(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor | None,
    out: Tensor,
    lse: Tensor,
    rest: Tensor,
    seed: int,
    handle: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    plan = _plan(handle)
    wide = accumulator_dtype(q.dtype)
    dout = torch.zeros_like(out) if dout is None else dout
    dq = torch.zeros(q.shape, dtype=wide, device=q.device)
    dtable = q.new_empty(0) if table is None else torch.zeros(table.shape, dtype=torch.float64, device=q.device)
    gradients = (_GatheredGradients if plan.how.exchange == "all_gather" else _RingGradients)(plan, k, v)
    with torch.autocast(q.device.type, enabled=False):
        for step, k_block, v_block in _arrivals(plan, k, v):
            gradients.start(step)
            for work in () if step.source is None else plan.work[step.source]:
                rows, block = work.rows, work.block
                seen, keys = slice(block.q.start, block.q.stop), slice(block.k.start, block.k.stop)
                for heads, kv_heads in _slices(plan.how.groups):
                    dq_part, dk_part, dv_part, dtable_part = kernels.backward(
                        *(plan.how.backend, dout[rows, :, heads], q[rows, :, heads]),
                        *(k_block[rows, :, kv_heads], v_block[rows, :, kv_heads]),
                        *(out[rows, :, heads], lse[rows, heads], None if dlse is None else dlse[rows, heads]),
                        *(block, plan.terms(work, heads, table, seed)),
                        rest=rest[rows, :, heads] if rest.numel() else None,
                    )
                    dk, dv = gradients.of(step)  # asked for after a kernel, under which it came
                    dq[rows, seen, heads] += dq_part
                    dk[rows, keys, kv_heads] += dk_part
                    dv[rows, keys, kv_heads] += dv_part
                    if dtable_part is not None:
                        dtable[:, heads] += dtable_part
            gradients.wait(step)
    dk, dv = gradients.home
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dtable if table is None else dtable.to(table.dtype)


def _slices(groups: tuple[Group, ...]) -> list[tuple[slice, slice]]:
    return [(slice(q.start, q.stop), slice(k.start, k.stop)) for q, k in groups]


@torch.library.register_fake("usp::ring_forward")
def _(q: Tensor, k: Tensor, v: Tensor, table, seed, handle, float32_delta: bool) -> tuple[Tensor, Tensor, Tensor]:
    batch, seq, heads, _ = q.shape
    wide = accumulator_dtype(q.dtype)
    out, lse = q.new_empty((batch, seq, heads, v.shape[3])), q.new_empty((batch, heads, seq), dtype=wide)
    keeps_rest = float32_delta and q.dtype != wide
    return out, lse, q.new_empty(out.shape if keeps_rest else 0)


@torch.library.register_fake("usp::ring_backward")
def _(dout, dlse, q: Tensor, k: Tensor, v: Tensor, table, out, lse, rest, seed, handle):
    dtable = q.new_empty(0) if table is None else table.new_empty(table.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dtable


def _save(ctx, inputs, output) -> None:
    q, k, v, table, ctx.seed, ctx.handle, _ = inputs
    if isinstance(ctx.handle, int) and not torch.compiler.is_compiling():
        ctx.plan = _plan(ctx.handle)  # keeps it alive
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(q, k, v, table, *output)


def _gradient(ctx, dout: Tensor | None, dlse: Tensor | None, _):
    q, k, v, table, *saved = ctx.saved_tensors
    *grads, dtable = torch.ops.usp.ring_backward(dout, dlse, q, k, v, table, *saved, ctx.seed, ctx.handle)
    assert all(grad.shape == x.shape for grad, x in zip(grads, (q, k, v), strict=True))
    return *grads, None if table is None else dtable, None, None, None


def _no_second_gradient(ctx, *grads):
    raise RuntimeError("usp attention is differentiable once: its backward pass has no gradient of its own")


torch.library.register_autograd("usp::ring_forward", _gradient, setup_context=_save)
torch.library.register_autograd("usp::ring_backward", _no_second_gradient)


# ---------------------------------------------------------------------------------------------------
# How keys come by, and how their gradients get home.


def _arrivals(plan: Pass, k: Tensor, v: Tensor) -> Iterator[tuple[Step, Tensor, Tensor]]:
    """Step by step, the keys and values to compute with; the next ones travel meanwhile."""
    home = plan.home
    if plan.how.exchange == "all_gather":
        message = k.new_empty(k.numel() + v.numel())
        _pack(k, v, plan.columns[home], message)
        everyone = comm.all_gather(message, plan.ring.group, "all_gather")
        for step in plan.steps:
            yield step, *(_unpack(everyone[step.source], k, v) if step.source is not None else (k, v))
        return
    numels = [_numel(columns, k, v) for columns in plan.columns]
    exchange = comm.Exchange(plan.ring.group, "ring", max(numels), k.dtype, k.device)
    for step, message in exchange.travel(plan.steps, numels, home, lambda x: _pack(k, v, plan.columns[home], x)):
        yield step, *((k, v) if message is None else _unpack(message, k, v))


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
