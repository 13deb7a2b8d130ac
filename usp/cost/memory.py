"""Which bytes a rank holds, and when: of one attention call, and of a model.

Note [Moments]
~~~~~~~~~~~~~~
Some bytes are there always: weights, caches, what backward will need. The others come and go, and not together: what
an MLP makes is gone before the next attention. So memory is what is always there and the largest *moment*. Those of an
attention call follow what `usp/ulysses.py`, `usp/ring.py` and `usp/comm.py` allocate:

    to heads         q, k and v in one message to each rank; then what arrives, and what is cut from that
    ring             out and lse in float32; messages of keys and values, of which one is computed with and one arrives
                     (more where a rank's keys leave late); a block's result, and a tile of it in float32
    to sequence      as to heads, of out

and backward the other way round: dout to heads; dq, and dk and dv at home and on their way, all in float32, with the
messages of keys and values and the gradients of two blocks, as one is still there while the next is made; the way back.

Not counted: what a kernel takes for itself, what a communication library buffers, what an allocator cannot use, and
what an optimizer takes for its step. `reserved_bytes` is for them, and for the context of a device. What is counted,
the tests compare with every tensor that is alive in real runs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from usp.blocks import Step, batch_rows, programs, sizes
from usp.cost.counts import journeys, of_rings
from usp.cost.workload import Model, Plan, Workload, check_sizes
from usp.heads import HeadPlan
from usp.masks import Mask
from usp.partitions import Layout, Partition

PHASES = ("prefill", "decode", "train")
MOMENTS_BYTES = 8  # of Adam, a parameter: two in float32
MASTER_BYTES = 4  # a parameter in float32, where it is not one already
WIDENED = 1 << 26  # elements of a block's result that are widened at once, on a device
CAUSAL = Mask(causal=True)

Parts = dict[str, int]  # bytes by name


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank: what is always there, and what is there at a moment beside it; see Note [Moments].

    `gb` are 1e9 bytes, as datasheets of accelerators count, `gib` 2^30.
    """

    always: Mapping[str, int]
    moments: Mapping[str, Mapping[str, int]]

    def __post_init__(self) -> None:
        object.__setattr__(self, "always", _there(self.always))
        object.__setattr__(self, "moments", {name: _there(parts) for name, parts in self.moments.items()})

    @property
    def peak(self) -> str:
        """The moment with most bytes."""
        return max(self.moments, key=lambda moment: sum(self.moments[moment].values()))

    @property
    def parts(self) -> dict[str, int]:
        """What is there at the peak, by name."""
        return {**self.always, **self.moments[self.peak]}  # of other names

    @property
    def total_bytes(self) -> int:
        return sum(self.parts.values())

    @property
    def gb(self) -> float:
        return self.total_bytes / 1e9

    @property
    def gib(self) -> float:
        return self.total_bytes / 2**30


def _there(parts: Mapping[str, int]) -> Parts:
    return {name: size_bytes for name, size_bytes in parts.items() if size_bytes}


# ---------------------------------------------------------------------------------------------------
# One attention call.


def attention_memory(workload: Workload, plan: Plan, *, train: bool = False, cached: bool = False) -> Memory:
    """Of one `hybrid_attention`, on the rank that holds most: what it allocates beside the q, k and v that it is given.

    With `train` it is that of backward, with dout and what was kept for it. With `cached` it is that of
    `prefill_attention`, whose keys and values by heads are those of the cache.

    Raises:
        ValueError: if the heads cannot be dealt to the Ulysses ranks.
    """
    return _largest(
        Memory({}, _backward(x, _kept(x)) if train else _forward(x, cached)) for x in _sizes(workload, plan)
    )


@dataclass(frozen=True)
class _Sizes:
    """Elements of a rank's tensors in one attention call."""

    element_bytes: int
    exchanged: bool  # between Ulysses ranks
    q: int  # of the rank's tokens, all heads
    kv: int
    out: int
    sent_kv: int  # kv, once for every Ulysses rank that takes a head
    q_heads: int  # of the ring rank's tokens, this rank's heads
    kv_heads: int
    out_heads: int
    lse: int
    own_queries: int  # of one token, by heads
    own_kv: int
    own_out: int
    gathered: int  # ring ranks whose keys are here at once; 0 where they travel
    message: int  # of keys and values, the largest
    call_rows: int  # of the batch in a kernel call
    dim: int
    dim_v: int
    trip: _Trip

    @property
    def wide_bytes(self) -> int:
        """Of an element in what is summed: float32, or float64 for float64."""
        return max(4, self.element_bytes)


def _sizes(workload: Workload, plan: Plan, tokens: Partition | None = None) -> Iterator[_Sizes]:
    """Of each Ulysses rank with heads of other numbers; each on the ring rank with most of everything."""
    tokens, heads = tokens or plan.tokens(workload.seq, workload.mask), plan.heads(workload)
    local, ring = workload.batch * tokens.seq_local, workload.batch * tokens.seq_ring
    dim, dim_v = workload.head_dim, workload.dims - workload.head_dim
    gathered = plan.ring if plan.exchange == "all_gather" and plan.ring > 1 else 0
    dealt, shares = _shares(heads)
    for queries, keys, groups in shares:
        trip = _trip(workload.mask, tokens, groups)
        rows = workload.batch if trip.alike else 1
        yield _Sizes(
            element_bytes=workload.element_bytes,
            exchanged=plan.ulysses > 1,
            q=local * workload.heads * dim,
            kv=local * workload.kv_heads * workload.dims,
            out=local * workload.heads * dim_v,
            sent_kv=local * dealt * workload.dims,
            q_heads=ring * queries * dim,
            kv_heads=ring * keys * workload.dims,
            out_heads=ring * queries * dim_v,
            lse=ring * queries,
            own_queries=queries,
            own_kv=keys * workload.dims,
            own_out=queries * dim_v,
            gathered=gathered,
            message=workload.batch * trip.columns * keys * workload.dims,
            call_rows=rows,
            dim=dim,
            dim_v=dim_v,
            trip=trip,
        )


@lru_cache(maxsize=1024)
def _shares(heads: HeadPlan) -> tuple[int, list[tuple[int, int, tuple[tuple[int, int], ...]]]]:
    """KV heads, once for every rank that has one; of each rank with other numbers its query and KV heads, and those of
    its kernel calls."""
    found = {}
    for rank, (queries, keys) in enumerate(zip(heads.queries, heads.keys, strict=True)):
        groups = tuple((len(x.queries), len(x.keys)) for x in heads.groups(rank))
        found[groups] = len(queries), len(keys), groups
    return sum(map(len, heads.keys)), list(found.values())


def _forward(x: _Sizes, cached: bool) -> dict[str, Parts]:
    e, wide = x.element_bytes, x.wide_bytes
    by_heads = {"q, k, v by heads": (x.q_heads + (0 if cached else x.kv_heads)) * e} if x.exchanged else {}

    def parts(at: _At) -> Parts:
        rows = x.call_rows * at.q
        results = {"results of blocks": rows * (x.dim_v * e + wide)}
        if at.added:  # with its weights, and a tile of out in float32
            tile = min(rows * x.dim_v, WIDENED) * wide if e < wide else 0
            results |= {"what is merged": rows * wide + tile}
        return _visiting(x, at) | results

    ring = by_heads | {"out in float32": x.out_heads * wide, "lse": x.lse * wide} | _most(map(parts, x.trip.at))
    if not x.exchanged:
        return {"ring": ring}
    qkv = x.q_heads + x.kv_heads
    out = {"out by heads": x.out_heads * e, "lse": x.lse * wide}
    return {
        "to heads": _exchanged(x.q + x.sent_kv, qkv, qkv, e),
        "ring": ring,
        "to sequence": by_heads | out | _exchanged(x.out_heads, x.out, x.out, e),
    }


def _backward(x: _Sizes, kept: Parts) -> dict[str, Parts]:
    """With what was kept, until it is used. Forward has less at each of its moments."""
    e, wide = x.element_bytes, x.wide_bytes
    qkv = x.q_heads + x.kv_heads
    sums = kept | {
        "dout by heads": x.out_heads * e,
        "dq in float32": x.q_heads * wide,
        "dk, dv in float32": x.kv_heads * max(1, x.gathered) * wide,
    }

    def parts(at: _At) -> Parts:
        travelling = {"dk, dv on their way": 0 if x.gathered else x.message * at.gradients * wide}
        results = {"gradients of blocks": x.call_rows * (at.q * x.dim + at.k * (x.dim + x.dim_v)) * e}
        return sums | travelling | results | (rounded if at.last else _visiting(x, at))

    rounded = {"dq, dk, dv by heads": qkv * e if e < wide else 0}
    if x.gathered:  # before they are rounded, all ranks' are summed
        rounded = {"dk, dv of all ranks": x.kv_heads * (x.gathered + 1) * wide}
    moments = {"ring backward": _most(map(parts, x.trip.at))}
    if x.exchanged:
        moments = {
            "dout to heads": kept | {"dout": x.out * e} | _exchanged(x.out, x.out_heads, x.out_heads, e)
        } | moments
        back = _exchanged(qkv, x.q + x.sent_kv, x.q + x.kv, e)
        moments["gradients to sequence"] = {"dq, dk, dv by heads": qkv * e} | back
    return moments


def _visiting(x: _Sizes, at: _At) -> Parts:
    """Keys and values that travel or are gathered, this rank's own message among them."""
    numel = x.kv_heads * (x.gathered + 1) if x.gathered else x.message * at.messages
    return {"keys and values of other ranks": 0 if at.last else numel * x.element_bytes}


def _most(found: Iterable[Parts]) -> Parts:
    return max(found, key=lambda parts: sum(parts.values()))


def _kept(x: _Sizes) -> Parts:
    """From forward to backward, beside q, k and v that the call is given."""
    qkv = {"q, k, v by heads": (x.q_heads + x.kv_heads) * x.element_bytes} if x.exchanged else {}
    return qkv | {"out by heads": x.out_heads * x.element_bytes, "lse": x.lse * x.wide_bytes}


def _exchanged(sent: int, arrived: int, result: int, element_bytes: int) -> dict[str, int]:
    """An all-to-all: the message that is sent is gone before the result is cut from what arrived."""
    return {
        "all-to-all, sent or cut": max(sent, result) * element_bytes,
        "all-to-all, arrived": arrived * element_bytes,
    }


def _largest(found: Iterable[Memory]) -> Memory:
    return max(found, key=lambda x: x.total_bytes)


class _At(NamedTuple):
    """What a rank has at one moment of a ring pass: messages of keys, those of gradients, and kernels' results."""

    messages: int
    gradients: int
    q: int  # queries x heads whose results are there: of a kernel call, and of the one before until it is done
    k: int  # keys x KV heads
    added: bool = False  # whether they are being added
    last: bool = False  # whether the pass is over, and messages of keys are gone


class _Trip(NamedTuple):
    """What of the ring passes depends on tokens, mask and numbers of heads alone."""

    alike: bool  # whether all batch rows are one kernel call
    columns: int  # tokens of the largest message
    at: frozenset[_At]


Calls = Mapping[int, list[tuple[int, int]]]  # of a rank, by source: queries and keys of each block, or those x heads


@lru_cache(maxsize=256)
def _trip(mask: Mask, tokens: Partition, groups: tuple[tuple[int, int], ...]) -> _Trip:
    """`groups` of query and KV heads are a kernel call each."""
    found: set[_At] = set()
    alike, columns, programs = _programs(mask, of_rings(tokens))
    for rank, program, some in programs:
        calls = {source: [(q * m, k * n) for q, k in pairs for m, n in groups] for source, pairs in some.items()}
        found.update(_travel(program, rank, bool(columns[rank]), calls))
    return _Trip(alike, max(columns), frozenset(found))


@lru_cache(maxsize=64)
def _programs(mask: Mask, tokens: Partition) -> tuple[bool, tuple[int, ...], list[tuple[int, tuple[Step, ...], Calls]]]:
    """Whether batch rows are alike; by source the tokens of its message; ranks with their steps and blocks."""
    visits, columns = journeys(mask, tokens, tokens)
    ranks = _telling(mask, tokens)
    some = zip(ranks, programs(visits, ranks), sizes(mask, tokens, tokens, ranks), strict=True)
    return batch_rows(mask, tokens, tokens) == 1, columns, list(some)


def _telling(mask: Mask, tokens: Partition) -> Sequence[int]:
    """Ring ranks among which those are that hold most. Under one band (a test tries them all) these are at the ends or
    in the middle of a large ring."""
    ring = tokens.ring
    alike = mask.rows == 1 and len(mask.disjoint_regions(0)) == 1 and tokens.layout != Layout.BALANCED
    if not alike or ring <= 2 * _ENDS + 2:
        return range(ring)
    return (*range(_ENDS), ring // 2 - 1, ring // 2, *range(ring - _ENDS, ring))


_ENDS = 4


def _travel(program: Sequence[Step], rank: int, sends: bool, calls: Calls) -> Iterator[_At]:
    """As `Exchange.travel` and `_RingGradients` hold messages. Their buffers serve again, so there are as many as ever.

    What arrives has its place before what is spent gives its back. A gradient is born at its first visitor, after the
    kernel that makes it, and gone when it was sent.
    """
    held, sums = {rank} if sends else set(), set()
    messages, gradients, q, k = len(held), 0, 0, 0
    for step in program:
        arriving = {step.receive.source} if step.receive else set()
        messages = max(messages, len(held | arriving))
        sums |= {hop.source for hop in step.grad_receive}
        gradients = max(gradients, len(sums))
        if step.source is not None:
            for more_q, more_k in calls.get(step.source, ()):
                yield _At(messages, gradients, q + more_q, k + more_k)
                q, k = more_q, more_k
                sums |= {step.source} - {rank}
                gradients = max(gradients, len(sums))
                yield _At(messages, gradients, q, k, added=True)
            sums |= {step.source} - {rank}
            gradients = max(gradients, len(sums))
        yield _At(messages, gradients, q, k)
        sums -= {hop.source for hop in step.grad_send} | {rank}
        held = held - set(step.spent) | arriving
    yield _At(messages, gradients, q, k, last=True)


# ---------------------------------------------------------------------------------------------------
# A model.


def memory(
    model: Model,
    plan: Plan,
    seq: int,
    batch: int,
    phase: str,
    *,
    mask: Mask = CAUSAL,
    element_bytes: int = 2,
    prefetch: bool = True,
    block: int = 16,
    reserved_bytes: int = 0,
) -> Memory:
    """Of a model, on the rank that holds most.

    Layers are x + attention(norm(x)) and x + mlp(norm(x)); a norm makes one tensor and keeps its input. Weights,
    gradients and activations are of one dtype.

    - Weights: `plan.tensor` shards matrices, embedding and head, not norms; "fsdp" shards all of that over the data,
      ring and Ulysses ranks, too, and gathers a unit at a time: a layer, the embedding, the head (`prefetch`: the next
      unit as well). Backward of a sharded unit has its whole gradient before it is reduced.
    - The MLP holds two tensors of its width and their product (gate, up; without a gate: up and what is made of it).
      With `plan.tile_mlp` those are of a tile of tokens, and so are the logits of a loss, as in `usp.nn`.
    - Logits are in `element_bytes` and once more in float32: of the last tokens, or, when training, of all.
    - Training keeps, of each layer, what its matrices and norms were given, and what its attention keeps; with
      `plan.checkpoint` its input, and all of that of one layer at a time. Gradients are there always (as when they are
      summed over micro-batches). Adam has two moments and, of half precision, a copy in float32.
    - Caches are `usp.inference.KVCache`, which never forget what a window hides. Slot positions, 8 bytes a slot, are on
      the host.
    - Decoding, every rank has the one new token of all sequences.

    Args:
        seq: tokens of the whole sequence; of the cache, when decoding.
        batch: sequences of one data replica.
        phase: "prefill", "decode" or "train".
        mask: that of layers without a window.
        prefetch: whether a unit is gathered while the one before computes.
        block: of the cache.
        reserved_bytes: for what is not counted; see Note [Moments].

    Raises:
        ValueError: for an unknown phase, sizes below 1, or heads that do not go over the tensor or Ulysses ranks.
    """
    if phase not in PHASES:
        raise ValueError(f"phase={phase!r} is not one of {PHASES}")
    check_sizes(seq=seq, batch=batch, element_bytes=element_bytes, block=block)
    check_sizes(0, reserved_bytes=reserved_bytes)
    _check_tensor(model, plan)
    layer, end = _units(model, plan)
    shards = plan.world // plan.tensor if plan.weights == "fsdp" else 1
    params = _up(model.layers * layer + (1 if model.tied else 2) * end + model.hidden, shards)
    always = {"weights": params * element_bytes}
    gathered, head = {}, {}
    if shards > 1:
        gathered = {"gathered layers": (1 + prefetch) * layer * element_bytes}
        head = {"gathered head": end * element_bytes}
    if phase == "train":
        adam_bytes = MOMENTS_BYTES + (MASTER_BYTES if element_bytes < 4 else 0)
        always |= {"gradients": params * element_bytes, "optimizer": params * adam_bytes}
        if shards > 1:
            gathered |= {"gradient of the gathered layer": layer * element_bytes}
            head |= {"gradient of the gathered head": end * element_bytes}
            head |= {"gathered layer": prefetch * layer * element_bytes}  # the last, which backward needs next
    tokens = plan.tokens(seq, mask)
    found = []
    for one in model.masks(mask):
        for x in _sizes(model.attention(batch, seq, one, element_bytes, plan.tensor), plan, tokens):
            if phase == "train":
                kept, moments = _train(model, plan, x, batch, tokens)
            else:
                kept = _cache(model, plan, x, seq, batch, block)
                moments = (_prefill if phase == "prefill" else _decode)(model, plan, x, batch, tokens)
            moments = {name: (head if "head" in name.split() else gathered) | some for name, some in moments.items()}
            found.append(Memory(always | kept | {"reserved": reserved_bytes}, moments))
    return _largest(found)


def largest_batch(
    model: Model, plan: Plan, memory_bytes: float, seq: int, phase: str, *, limit: int = 1 << 20, **options
) -> int:
    """The most sequences of a data replica, up to `limit`, with which `memory` fits; 0 if one does not.

    Options are those of `memory`, and so are errors.
    """

    def fits(batch: int) -> bool:
        return memory(model, plan, seq, batch, phase, **options).total_bytes <= memory_bytes

    low, high = 0, 1  # low fits
    while high <= limit and fits(high):
        low, high = high, 2 * high
    return low + bisect_left(range(low + 1, min(high, limit + 1)), True, key=lambda batch: not fits(batch))


def _check_tensor(model: Model, plan: Plan) -> None:
    heads, kv_heads, tensor = model.heads, model.kv_heads, plan.tensor
    if heads % tensor or (kv_heads % tensor and tensor % kv_heads):
        raise ValueError(
            f"tensor={tensor} does not go with {heads} query and {kv_heads} KV heads: it divides the query heads, and "
            "divides the KV heads or is a multiple of them"
        )


def _units(model: Model, plan: Plan) -> tuple[int, int]:
    """Parameters of a layer, and of the embedding or the head, on a tensor rank."""
    kv_heads = max(1, model.kv_heads // plan.tensor)
    attention = 2 * model.hidden * model.head_dim * (model.heads // plan.tensor + kv_heads)
    return attention + _mlp_params(model, plan) + 2 * model.hidden, _up(model.vocab, plan.tensor) * model.hidden


def _mlp_params(model: Model, plan: Plan) -> int:
    return _up(model.layer_params - model.attention_params, plan.tensor)


def _cache(model: Model, plan: Plan, x: _Sizes, seq: int, batch: int, block: int) -> Parts:
    """As `KVCache._slots` has it: this rank's share of so many tokens, and a little more."""
    share = _up(seq, plan.ring)
    slots = min(seq, share + 2 * max(block, plan.ulysses, 2))
    slot_bytes = model.layers * batch * x.own_kv * x.element_bytes
    return {"KV cache": share * slot_bytes, "spare slots": (slots - share) * slot_bytes}


def _mlp(model: Model, plan: Plan, tokens: int) -> int:
    """Elements of a tensor of the MLP's width."""
    return tokens * max(1, model.experts_per_token) * _up(model.intermediate, plan.tensor)


def _prefill(model: Model, plan: Plan, x: _Sizes, batch: int, tokens: Partition) -> dict[str, Parts]:
    qkv = (x.q + x.kv) * x.element_bytes
    return _inference(model, plan, batch, tokens.seq_local, x.element_bytes, qkv, _forward(x, True))


def _decode(model: Model, plan: Plan, x: _Sizes, batch: int, tokens: Partition) -> dict[str, Parts]:
    e, wide = x.element_bytes, x.wide_bytes
    numbers = batch * x.own_out, batch * x.own_queries  # of out and lse
    message = numbers[0] * e + numbers[1] * wide
    attention = {
        "out in float32": numbers[0] * wide,
        "lse": numbers[1] * wide,
        "results of blocks": message + numbers[0] * wide,
        "partial results, sent and arrived": 2 * message if plan.ring > 1 else 0,
    }
    qkv = x.element_bytes * (x.q + x.kv) // tokens.seq_local
    return _inference(model, plan, batch, 1, e, qkv, {"attention": attention})


def _inference(
    model: Model, plan: Plan, batch: int, seq: int, e: int, qkv_bytes: int, attention: dict[str, Parts]
) -> dict[str, Parts]:
    """Of this rank's `seq` tokens of each sequence."""
    hidden = _up(batch * seq, plan.tensor) * model.hidden * e
    whole = batch * seq * model.hidden * e
    residual = {"residual": hidden, "its norm": hidden}
    if plan.tensor > 1:
        residual |= {"its norm of all tensor ranks": whole}
    tile = min(seq, plan.tile_mlp or seq)
    inside = (3 if model.gated else 2) * _mlp(model, plan, batch * tile) * e
    mlp = {"inside of the MLP": max(inside, 2 * whole)}  # or its result and the next residual
    if tile < seq:
        mlp = {"results of tiles": whole, "inside of a tile, or all results": max(inside, whole)}
        mlp |= {"tiles": whole} if batch > 1 else {}  # of one sequence they are views
    logits = batch * _up(model.vocab, plan.tensor)
    moments = {name: residual | {"q, k, v": qkv_bytes} | parts for name, parts in attention.items()}
    return moments | {
        "MLP": {"input of the layer": hidden} | residual | mlp,
        "head": residual | {"logits": logits * e, "logits in float32": logits * 4},
    }


def _train(model: Model, plan: Plan, x: _Sizes, batch: int, tokens: Partition) -> tuple[Parts, dict[str, Parts]]:
    e, sharded = x.element_bytes, plan.weights == "fsdp" and plan.world > plan.tensor
    local = batch * tokens.seq_local
    hidden = _up(local, plan.tensor) * model.hidden * e
    tiled = plan.tile_mlp is not None and plan.tile_mlp < tokens.seq_local
    tile = batch * (plan.tile_mlp or 0) if tiled else local
    logits = tile * _up(model.vocab, plan.tensor)
    inside = (4 if model.gated else 2) * _mlp(model, plan, tile) * e
    # Of one layer: what its attention still needs when its MLP is done with, and the rest.
    given = hidden if plan.checkpoint else 0  # which is there as one of the inputs of layers
    attention = {"inputs of attention": 2 * hidden - given}
    call = {"q, k, v, out": (x.q_heads + x.kv_heads + x.out_heads) * e + x.lse * x.wide_bytes}
    layer = attention | call | {"inputs of the MLP": 2 * hidden, "inside of the MLP": 0 if tiled else inside}
    layer |= {"out of this rank": x.out * e} if x.exchanged else {}
    if plan.checkpoint:
        kept, last = {"inputs of layers": model.layers * hidden}, {}
    else:
        kept, last = {"other layers": (model.layers - 1) * sum(layer.values())}, layer
    beside = {"gradient of the residual": hidden}
    if plan.tensor > 1:
        beside |= {"hidden states of all tensor ranks": 2 * local * model.hidden * e}
    moments = {name: attention | beside | parts for name, parts in _backward(x, call).items()}
    width, matrix = _mlp(model, plan, tile), model.hidden * _up(model.intermediate, plan.tensor)
    # Of all inside, as its product is gone; or of a matrix and what comes from it.
    gradients = max((2 if model.gated else 1) * width, width + matrix) * e
    mlp = {"gradients inside the MLP": gradients}
    head = {
        "last norm": 2 * hidden,
        "logits": logits * e,
        "their logarithms in float32": logits * 4,
        "gradients of logits": logits * (4 + e),
    }
    if tiled:
        whole = local * model.hidden * e
        mlp = {"gradients of tiles": whole, "inside of a tile, or all gradients": max(inside + gradients, whole)}
        if not sharded:  # autograd adds tiles' gradients of weights up before it hands them on
            mlp |= {"gradients of matrices": _mlp_params(model, plan) * e}
            head |= {"gradient of the head": _up(model.vocab, plan.tensor) * model.hidden * e}
    return kept, moments | {"MLP backward": layer | beside | mlp, "head backward": last | beside | head}


def _up(count: int, parts: int) -> int:
    """Of the part that is not smaller than the others."""
    return -(-count // parts)
