"""Hybrid attention: to heads, around the ring, back to the sequence."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from usp import comm, kernels
from usp.blocks import batch_rows, span_of, striped_apart
from usp.heads import HeadPlan
from usp.kernels.scores import RelativeBias, Scores, checked_scores
from usp.masks import Mask
from usp.merging import merge, with_sinks
from usp.mesh import Axis, axes
from usp.partitions import Layout, Partition
from usp.ring import How, attend, attend_later, check_call, check_ends, check_tensors
from usp.sharding import checked_axes, gather
from usp.ulysses import lse_to_sequence, to_heads, to_sequence

Result = Tensor | tuple[Tensor, Tensor]


class Joint(NamedTuple):
    """A few tokens that every rank holds whole, beside the sharded ones: text beside an image, for instance.

    Everybody attends to their keys, as far as the mask says; with queries, they attend to everybody. They are the
    tokens from the global position `start` on, where no sharded token is (`usp.partition(..., start=)` moves those).
    Gradients are this rank's share: summed over ring and Ulysses ranks they are the gradient. All ranks take part in
    their backward, so all put both results into their loss, with weight 0 where they do not count.

    Args:
        k, v: (batch, joint_seq, kv_heads, head_dim | head_dim_v), the same on every rank.
        q: (batch, joint_seq, heads, head_dim), or None if they are only attended to.
        start: global position of the first.
    """

    k: Tensor
    v: Tensor
    q: Tensor | None = None
    start: int = 0


def hybrid_attention(
    q: Float[Tensor, "batch seq_local heads head_dim"],
    k: Float[Tensor, "batch key_seq_local kv_heads head_dim"],
    v: Float[Tensor, "batch key_seq_local kv_heads head_dim_v"],
    mesh: DeviceMesh | None,
    tokens: Partition,
    *,
    mask: Mask,
    key_tokens: Partition | None = None,
    joint: Joint | None = None,
    replicate_kv: bool = False,
    sinks: Float[Tensor, " heads"] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi: Sequence[float] | Tensor | None = None,
    bias: RelativeBias | None = None,
    dropout: tuple[float, int] | None = None,
    exchange: str = "ring",
    backend: str = "auto",
    float32_delta: bool = False,
    check_ranks: bool = True,
    return_lse: bool = False,
) -> Result | tuple[Result, Result]:
    """Exact softmax attention of a sequence that is spread over a ring x ulysses mesh.

    USP (arXiv 2405.07719): an all-to-all inside each Ulysses group gives every rank all tokens of its ring rank
    and its share of the heads; the ring (Liu et al., arXiv 2310.01889) then brings the other ring ranks' keys; a
    second all-to-all takes `out` back. Differentiable once, in all tensors and through lse.

    Args:
        q, k, v: this rank's shards, as `usp.shard` makes them. Query head h reads KV head
            h // (heads // kv_heads). Heads are dealt to the Ulysses ranks in runs that differ by at most one KV
            head (`usp.HeadPlan`). Any strides.
        mesh: a mesh with the axes "ring" and "ulysses" (`usp.init_mesh`), or None for one process.
        tokens: the partition of the queries, and of the keys unless they have their own.
        mask: what each query may see; there is no default.
        key_tokens: the keys' own partition, for cross attention and chunked prefill.
        joint: tokens that every rank holds whole, besides.
        replicate_kv: deal query heads evenly, and give a KV head to every Ulysses rank that has some of its query
            heads: for up to as many ranks as query heads. Gradients of such a KV head are summed.
        sinks: for each query head a score that takes its part of the softmax and has no value (as in gpt-oss), the
            same on every rank. Its gradient is this rank's share.
        scale: positive factor of the scores; head_dim ** -0.5 by default.
        softcap: scores become softcap tanh(scores / softcap), before any bias (as in Gemma 2).
        alibi: for each query head a slope: -slope |i - j| is added to the score of the query at i and the key at j
            (Press et al., arXiv 2108.12409). Positions are global, over documents too. Constants; a tuple is best.
        bias: a learned bias by the distance between query and key, `RelativeBias.t5(table, ...)` for T5's.
        dropout: (p, seed): each pair of query and key is dropped with probability p after the softmax, and the others
            are divided by 1 - p. What is dropped depends on the seed, the batch row, the head and the two positions,
            not on mesh, layout or backend: give each layer, step and data replica a seed of its own. lse is without.
        exchange: "ring", keys travel from rank to rank under the computation; or "all_gather", all keys are
            gathered first (for links where many small messages cost more than memory).
        backend: one of `usp.backends()`, or "auto" for the first that can all of this (docs/support.md).
        float32_delta: in half precision, keep also what rounding took from out (as much memory as out), for the
            rowsum(dout out) of the backward pass: closer dq and dk where v is not centred (docs/design.md). What merges
            joint tokens still comes from rounded results. In float32 and float64 there is nothing to keep.
        check_ranks: let the ranks agree on the call before anything is sent (16 bytes a group). Without it, calls
            that differ between ranks hang or give wrong results.
        return_lse: also return log(sum(exp(scores))), natural log, float32 (float64 for float64); of the keys alone,
            without sinks.

    Returns:
        out, in q's dtype; with `return_lse` (out, lse). Rows that see no key have out 0, lse -inf and gradient 0.
        With joint queries a pair: this for the sharded tokens, and this for the joint ones, whole on every rank.

    Raises:
        ValueError: on every rank and before any payload, if this rank's arguments do not fit together or the
            ranks' calls differ. The groups stay usable.
        RuntimeError: if a rank stays away until the process group's timeout; the group must then be rebuilt.
    """
    keys = key_tokens or tokens

    def check() -> tuple[Axis, Axis, HeadPlan, Partition | None, Scores, str]:
        ring, ulysses = checked_axes(mesh, tokens)
        checked_axes(mesh, keys)
        check_call(q, k, v, mask, tokens, keys, exchange, seq=tokens.seq_local, key_seq=keys.seq_local)
        scores = checked_scores(q, scale, softcap, alibi, bias, dropout)
        beside = None if joint is None else _checked_joint(joint, q, k, v, mask, tokens, keys)
        if key_tokens is None:
            check_ends(mask, tokens, beside)
        plan = HeadPlan(q.shape[2], k.shape[2], ulysses.size, replicate_kv)
        check_sinks(sinks, q)
        inputs = (q, k, v, sinks, bias.table if bias else None, *(joint[:3] if joint else ()))
        differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in inputs if x is not None)
        through_lse = differentiated and (return_lse or joint is not None or sinks is not None)
        everyone = (tokens, keys) if beside is None else (tokens, keys, beside)
        where = {"span": span_of(*everyone), "apart": striped_apart(*everyone)}
        return (
            ring,
            ulysses,
            plan,
            beside,
            scores,
            kernels.select(backend, q, v, scores, lse_gradient=through_lse, **where),
        )

    def facts(checked: tuple) -> dict[str, object]:
        tensors = {"q": q, "k": k, "v": v, "sinks": sinks, "bias.table": bias and bias.table}
        if joint is not None:
            tensors |= {f"joint.{name}": getattr(joint, name) for name in "kvq"}
        named = ", ".join(tensors)
        return {
            f"shapes of {named}": [tuple(getattr(x, "shape", ())) for x in tensors.values()],
            f"dtypes of {named}": [str(getattr(x, "dtype", None)) for x in tensors.values()],
            f"requires_grad of {named}": [getattr(x, "requires_grad", None) for x in tensors.values()],
            "grad mode": torch.is_grad_enabled(),
            "tokens": tokens,
            "key_tokens": keys,
            "mask": mask,
            "scale, softcap, alibi, bias": checked[4],
            "dropout": dropout,
            "options": {
                "joint.start": joint and joint.start,
                "replicate_kv": replicate_kv,
                "exchange": exchange,
                "backend": backend,
                "float32_delta": float32_delta,
                "return_lse": return_lse,
            },
        }

    ring, ulysses, plan, beside, scores, able = comm.agreed(axes(mesh), check, facts, ask=check_ranks)

    q, k, v = to_heads([q, k, v], "qkk", plan, ulysses)
    table = None if bias is None else own_heads(bias.table, plan.queries, ulysses, dim=1)
    how = How(plan.groups(ulysses.rank), scores.of(plan.queries[ulysses.rank]), able, exchange, float32_delta)
    here = partial(attend, table=table, seed=dropout[1] if dropout else 0, ring=ring, mask=mask, how=how)
    out, lse = here(q, k, v, tokens=tokens, keys=keys)
    own_sinks = None if sinks is None else own_heads(sinks, plan.queries, ulysses, dim=0)
    joint_result = None
    if joint is not None:
        assert beside is not None
        joint_k, joint_v = (own_heads(x, plan.keys, ulysses) for x in (joint.k, joint.v))
        to_joint = here(q, joint_k, joint_v, tokens=tokens, keys=beside, local=(ring.rank, 0))
        out, lse = merge(out, lse, *to_joint)
        if joint.q is not None:
            joint_q = own_heads(joint.q, plan.queries, ulysses)
            to_keys = here(joint_q, k, v, tokens=beside, keys=keys, local=(0, ring.rank))
            among = here(joint_q, joint_k, joint_v, tokens=beside, keys=beside, local=(0, 0))
            joint_out, joint_lse = _over_ring(*to_keys, ring, among)
            joint_out = _all_heads(with_sinks(joint_out, joint_lse, own_sinks), 2, plan, ulysses)
            joint_result = (joint_out, _all_heads(joint_lse, 1, plan, ulysses)) if return_lse else joint_out
    (out,) = to_sequence([with_sinks(out, lse, own_sinks)], "q", plan, ulysses)
    result = (out, lse_to_sequence(lse, plan, ulysses)) if return_lse else out
    return result if joint_result is None else (result, joint_result)


def traced_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ranks: tuple[Axis, Axis],
    number: int,
    *,
    causal: bool,
    window: int | None,
    sinks: Tensor | None,
    scale: float | None,
    softcap: float | None,
    dropout: tuple[float, int] | None,
    replicate_kv: bool,
    exchange: str,
    backend: str,
) -> Tensor:
    """`hybrid_attention` in a model that is traced with its batches as arguments; ranks and shapes are not checked.

    Who has which tokens, and what they see, is looked up by the batch's number (`ring.numbered`) when the graph runs.
    So one graph serves every batch of the same shapes, whatever its documents.
    """
    ring, ulysses = ranks
    plan = HeadPlan(q.shape[2], k.shape[2], ulysses.size, replicate_kv)
    scores = checked_scores(q, scale, softcap, None, None, dropout)
    differentiated = torch.is_grad_enabled() and sinks is not None
    able = kernels.select(backend, q, v, scores, lse_gradient=differentiated, span=0)
    q, k, v = to_heads([q, k, v], "qkk", plan, ulysses)
    how = How(plan.groups(ulysses.rank), scores.of(plan.queries[ulysses.rank]), able, exchange, False)
    out, lse = attend_later(q, k, v, dropout[1] if dropout else 0, ring, number, causal, window, how)
    own_sinks = None if sinks is None else own_heads(sinks, plan.queries, ulysses, dim=0)
    return to_sequence([with_sinks(out, lse, own_sinks)], "q", plan, ulysses)[0]


def check_sinks(sinks: Tensor | None, q: Tensor) -> None:
    """One for each query head of q, where q is.

    Raises:
        ValueError: naming both.
    """
    if sinks is None:
        return
    check_tensors(sinks=sinks)
    if sinks.shape != q.shape[2:3] or not sinks.is_floating_point() or sinks.device != q.device:
        raise ValueError(
            f"sinks is {tuple(sinks.shape)} of {sinks.dtype} on {sinks.device}: give one score for each of the "
            f"{q.shape[2]} query heads, floating point, on {q.device}"
        )


def _checked_joint(
    joint: Joint, q: Tensor, k: Tensor, v: Tensor, mask: Mask, tokens: Partition, keys: Partition
) -> Partition:
    """The partition of the joint tokens, which are whole on every rank."""
    if not isinstance(joint, Joint) or not all(isinstance(x, Tensor) for x in (joint.k, joint.v)):
        raise ValueError(f"joint is a {type(joint).__name__}: give usp.Joint(k, v, q or None, start) of tensors")
    if not isinstance(joint.start, int) or joint.start < 0:
        raise ValueError(f"joint.start={joint.start!r} is not a position from 0, the same for all batch rows")
    length = joint.k.shape[1] if joint.k.ndim == 4 else 0
    for name, x, like in (("joint.k", joint.k, k), ("joint.v", joint.v, v), ("joint.q", joint.q, q)):
        if x is not None:
            expected = (like.shape[0], length, *like.shape[2:])
            if tuple(x.shape) != expected or length < 1 or (x.dtype, x.device) != (q.dtype, q.device):
                raise ValueError(
                    f"{name} is {tuple(x.shape)} of {x.dtype} on {x.device} and must be {expected} of {q.dtype} on "
                    f"{q.device}: batch, heads and dim of the sharded tensor, at least one token, as many as joint.k"
                )
    beside = Partition(length, Layout.CONTIGUOUS, start=joint.start)
    for what, other in (("queries", tokens), ("keys", keys)):
        for row in range(len(other.starts)):
            first, end = other.span(row)
            if max(first, joint.start) < min(end, joint.start + length):
                raise ValueError(
                    f"joint tokens at {joint.start} to {joint.start + length} overlap the {what} at {first} to {end}: "
                    f"put them in front (start=0, and partition(..., start={length})) or behind (start={end})"
                )
    batch_rows(mask, tokens, beside)  # raises, if masks, layouts and starts of the two do not go together
    if joint.q is not None:
        batch_rows(mask, beside, keys)
    return beside


def own_heads(x: Tensor, dealt: tuple[range, ...], ulysses: Axis, dim: int = 2) -> Tensor:
    """This rank's heads of something that has all of them."""
    heads = dealt[ulysses.rank]
    return x.narrow(dim, heads.start, len(heads))


def _over_ring(out: Tensor, lse: Tensor, ring: Axis, other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Joint queries' results over all ring ranks' keys, which are small, and over one more set of keys."""
    batch = out.shape[0]
    for part in zip(*(gather(x, ring, "joint").split(batch) for x in (out, lse)), strict=True):
        other = merge(*other, *part)
    return other


def _all_heads(x: Tensor, dim: int, plan: HeadPlan, ulysses: Axis) -> Tensor:
    """All ranks' heads of something that is whole in its tokens."""
    if ulysses.size == 1:
        return x
    counts = [len(heads) for heads in plan.queries]
    x = x.movedim(dim, 0)
    x = torch.nn.functional.pad(x, [0, 0] * (x.ndim - 1) + [0, max(counts) - len(x)])
    parts = gather(x, ulysses, "joint").split(max(counts))
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)]).movedim(0, dim)
