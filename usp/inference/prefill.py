"""Attention of a prompt, or of a further turn or chunk of it, to itself and to all that a cache holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from usp import comm, kernels
from usp.attention import check_sinks, own_heads
from usp.blocks import Columns, blocks, carried, needed, span_of, striped_apart
from usp.heads import HeadPlan
from usp.inference.cache import KVCache
from usp.inference.partials import round_trip
from usp.inference.volumes import PREFILL, Rates, Report, exposed
from usp.kernels.scores import RelativeBias, Scores, checked_scores
from usp.ledger import Ledger
from usp.masks import Mask, Span, joined
from usp.merging import with_sinks
from usp.mesh import axes
from usp.partitions import Partition
from usp.ring import How, attend, check_call
from usp.sharding import checked_axes
from usp.ulysses import lse_to_sequence, to_heads, to_sequence

Result = Tensor | tuple[Tensor, Tensor]


def prefill_attention(
    q: Float[Tensor, "batch seq_local heads head_dim"],
    k: Float[Tensor, "batch seq_local kv_heads head_dim"],
    v: Float[Tensor, "batch seq_local kv_heads head_dim_v"],
    mesh: DeviceMesh | None,
    tokens: Partition,
    cache: KVCache,
    *,
    mask: Mask,
    algorithm: str = "auto",
    rates: Rates | None = None,
    sinks: Float[Tensor, " heads"] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi: Sequence[float] | Tensor | None = None,
    bias: RelativeBias | None = None,
    backend: str = "auto",
    check_ranks: bool = True,
    return_lse: bool = False,
) -> tuple[Result, Report]:
    """Keep new tokens in the cache, and attend from them to all that it then holds. Without gradients.

    The tokens are a new prompt, or with `usp.partition(n, mesh, layout, start=cache.start)` a further turn or the next
    chunk. They stay on the ring rank that has them; so what `tokens` deals out evenly is kept evenly. Tokens that the
    mask shows to nobody are padding and are not kept: for prompts of different lengths in one batch,
    `usp.Mask.padded(lengths, seq, side)`, or for a further turn documents from 0 to where each sequence ends.

    Algorithms, for N ring ranks, T new tokens and P before them, H query and K KV heads of dim d, e bytes an element:

    - "pass_kv": keys and values travel round the ring, (N-1)/N (P + T) 2 K d e bytes a rank, each hop under the
      attention to the keys before. Wins where T / (T + P) is large, and whenever the hops hide: T of at least
      N C K e / (2 H BW) for a computing rate C and a bandwidth BW (arXiv 2411.01783, equation 2).
    - "pass_q": queries travel, (N-1)/N T H d e bytes, and what they found comes back by an all-to-all that nothing
      hides, (N-1)/N T H (d e + 4) (same paper, algorithm 3). Wins for a short turn on a long cache: with nothing
      hidden, where T / (T + P) < 2 K / H / (2 + 4 / (d e)).
    - "all_gather": all keys first, in one collective of as many bytes as pass_kv plus padding to the longest rank.
      Wins where messages cost more than their bytes; takes memory for all keys.
    - "auto": the least communication that the computation does not hide (`usp.inference.volumes.exposed`), by `rates`;
      without them by sizes alone. The report has every number that it looked at.

    Args:
        q, k, v: this rank's shards of the new tokens, as for `hybrid_attention`.
        tokens: their partition; starts where the cached sequences end, row by row.
        mask: in global positions, over cached and new tokens.
        algorithm: one of the above.
        rates: how fast the ranks compute and send.
        sinks, scale, softcap, alibi, bias, backend, check_ranks, return_lse: as in `hybrid_attention`.

    Returns:
        (out, report); with `return_lse` ((out, lse), report). Rows that are padding have out 0 and lse -inf.

    Raises:
        ValueError: on every rank, before anything is sent or kept, if the arguments do not fit together, the cache has
            no room, or the ranks' calls or caches differ.
    """
    call = comm.agreed(
        axes(mesh),
        lambda: _checked(
            q, k, v, mesh, tokens, cache, mask, algorithm, rates, sinks, scale, softcap, alibi, bias, backend
        ),
        lambda call: {
            "shapes and dtypes of q, k, v, sinks, bias.table": [
                None if x is None else (tuple(x.shape), str(x.dtype)) for x in (q, k, v, sinks, bias and bias.table)
            ],
            "tokens": tokens,
            "mask": mask,
            "cache": cache,
            "what the cache holds": cache.ledger,
            "scale, softcap, alibi, bias": call.scores,
            "options": {"algorithm": algorithm, "rates": rates, "backend": backend, "return_lse": return_lse},
        },
        ask=check_ranks,
    )
    ring, ulysses, plan = cache.ring, cache.ulysses, call.plan
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        q, k, v = to_heads([q, k, v], "qkk", plan, ulysses)
        cache.store_turn(k, v, tokens, call.spans, call.ledger)
        table = None if bias is None else own_heads(bias.table, plan.queries, ulysses, dim=1)
        exchange = "all_gather" if call.report.algorithm == "all_gather" else "ring"
        own = plan.queries[ulysses.rank]
        how = How(plan.groups(ulysses.rank), call.scores.of(own), call.backend, exchange, False)
        held = call.held
        where = {"ring": ring, "mask": mask, "tokens": tokens, "keys": held, "how": how}
        here = partial(attend, table=table, seed=0, **where)
        k, v = (x[:, : max(1, held.seq_ring)] for x in (cache.k, cache.v))
        if call.report.algorithm == "pass_q" and ring.size > 1:
            need = _needed(mask, tokens, held)
            visited = [[need[source][rank] for source in range(ring.size)] for rank in range(ring.size)]
            out, lse = round_trip(
                *(q, [tuple(q.shape)] * ring.size, visited, ring, v.shape[3]),
                lambda source, x: here(x, k, v, local=(source, ring.rank)),
            )
        else:
            out, lse = here(q, k, v)
        own_sinks = None if sinks is None else own_heads(sinks, plan.queries, ulysses, dim=0)
        (out,) = to_sequence([with_sinks(out, lse, own_sinks)], "q", plan, ulysses)
        return ((out, lse_to_sequence(lse, plan, ulysses)) if return_lse else out), call.report


class _Call(NamedTuple):
    """A call that has been found right."""

    plan: HeadPlan
    spans: tuple[tuple[Span, ...], ...]  # by batch row: positions of new tokens that are kept
    ledger: Ledger  # with them
    held: Ledger  # the same, of one row if all rows are alike
    scores: Scores
    backend: str
    report: Report


def _checked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mesh: DeviceMesh | None,
    tokens: Partition,
    cache: KVCache,
    mask: Mask,
    algorithm: str,
    rates: Rates | None,
    sinks: Tensor | None,
    scale: float | None,
    softcap: float | None,
    alibi: Sequence[float] | Tensor | None,
    bias: RelativeBias | None,
    backend: str,
) -> _Call:
    """The call, if this rank alone sees nothing wrong with it.

    Raises:
        ValueError: naming the values.
    """
    check_cache(cache, mesh)
    checked_axes(mesh, tokens)
    check_call(q, k, v, mask, tokens, tokens, "ring", seq=tokens.seq_local, key_seq=tokens.seq_local)
    cache.check_keys(k, v, cache.kv_heads)
    scores = checked_scores(q, scale, softcap, alibi, bias, None)
    check_sinks(sinks, q)
    check_no_gradient(q, k, v, sinks, bias and bias.table)
    if algorithm not in ("auto", *PREFILL):
        raise ValueError(f"algorithm={algorithm!r} is not one of {('auto', *PREFILL)}")
    if rates is not None and not isinstance(rates, Rates):
        raise ValueError(f"rates={rates!r}: give usp.inference.Rates(flops_per_s, bytes_per_s, latency_s)")
    plan = cache.plan(q.shape[2])
    spans = tuple(_kept(mask, tokens, row) for row in range(cache.batch))
    for row, (kept, length) in enumerate(zip(spans, cache.lengths, strict=True)):
        if kept and tokens.span(row)[0] != length:
            raise ValueError(
                f"tokens start at position {tokens.span(row)[0]} of sequence {row}, of which the cache has {length}: "
                "make their partition with start=cache.start, or reset the sequence first"
            )
    ledger = cache.ledger.turned(tokens, spans)
    cache.check_room(ledger)
    held = ledger.alike()
    where = {"span": span_of(tokens, held), "apart": striped_apart(tokens, held)}
    able = kernels.select(backend, q, v, scores, lse_gradient=False, **where)
    report = _report(algorithm, mask, tokens, held, cache, plan, q.element_size(), rates or Rates())
    return _Call(plan, spans, ledger, held, scores, able, report)


def check_cache(cache: KVCache, mesh: DeviceMesh | None) -> None:
    """The cache is one, of this mesh.

    Raises:
        ValueError: naming both.
    """
    if not isinstance(cache, KVCache):
        raise ValueError(f"cache is a {type(cache).__name__}: make a usp.inference.KVCache(mesh, ...)")
    ring, ulysses = axes(mesh)
    if (cache.ring, cache.ulysses) != (ring, ulysses):
        raise ValueError(
            f"the cache was made for ring={cache.ring.size} x ulysses={cache.ulysses.size}, the mesh has ring="
            f"{ring.size} x ulysses={ulysses.size}, or other groups: make it with this mesh"
        )


def check_no_gradient(*tensors: Tensor | None) -> None:
    """Nobody waits for a gradient.

    Raises:
        ValueError: if somebody does.
    """
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        raise ValueError(
            "one of q, k, v, sinks and bias.table requires a gradient, and a cache has none: call this under "
            "torch.no_grad()"
        )


def _kept(mask: Mask, tokens: Partition, row: int) -> tuple[Span, ...]:
    """The positions of new tokens that the mask shows to anybody, as spans in order."""
    if mask.key_documents is not None:
        raise ValueError("the mask has key_documents, of another sequence than the queries': give that its own cache")
    start, stop = tokens.span(row)
    shown: list[Span] = []
    for (q_first, q_end), (first, end), low, high in mask.disjoint_regions(row):
        first = max(start, first if low is None else max(first, q_first + low))
        shown.append((first, min(stop, end if high is None else min(end, q_end + high))))
    return joined(shown)


def _report(
    algorithm: str,
    mask: Mask,
    tokens: Partition,
    held: Ledger,
    cache: KVCache,
    plan: HeadPlan,
    element_bytes: int,
    rates: Rates,
) -> Report:
    """What will be done, and why."""
    queries, keys, lse_bytes = max(map(len, plan.queries)), max(map(len, plan.keys)), max(4, element_bytes)
    longest = max(range(cache.batch), key=lambda row: held.span(row)[1])
    length, cached = held.span(longest)[1], cache.lengths[longest]
    rows = cache.batch * tokens.seq_ring * queries
    kv_columns = _largest_message(mask, tokens, held) if tokens.ring > 1 else 0
    slot_bytes = cache.batch * keys * (cache.head_dim + cache.head_dim_v) * element_bytes
    kv_bytes, gathered_bytes = kv_columns * slot_bytes, held.seq_ring * slot_bytes
    q_bytes = rows * cache.head_dim * element_bytes
    partial_bytes = rows * (cache.head_dim_v * element_bytes + lse_bytes)
    step_flops = 0.0
    if tokens.ring > 1 and rates.flops_per_s < math.inf:
        batch = cache.batch if len(held.rows) == 1 and len(tokens.starts) == 1 and mask.rows == 1 else 1
        pairs = batch * _pairs(mask, tokens, held)
        step_flops = 2 * pairs * queries * (cache.head_dim + cache.head_dim_v) / tokens.ring**2
    sizes = kv_bytes, gathered_bytes, q_bytes, partial_bytes, step_flops
    exposed_s = exposed(tokens.ring, *sizes, rates)
    chosen = min(PREFILL, key=exposed_s.__getitem__) if algorithm == "auto" else algorithm
    return Report(chosen, length - cached, cached, tokens.ring, *sizes, rates, exposed_s)


@lru_cache(maxsize=16)  # the layers of a model ask the same
def _needed(mask: Mask, tokens: Partition, held: Ledger) -> tuple[tuple[Columns, ...], ...]:
    return needed(mask, tokens, held)


def _largest_message(mask: Mask, tokens: Partition, held: Ledger) -> int:
    """Keys of the ring rank of which most travel."""
    return max(sum(map(len, x)) for x in carried(_needed(mask, tokens, held)))


@lru_cache(maxsize=16)
def _pairs(mask: Mask, tokens: Partition, held: Ledger) -> int:
    """Visible pairs of new queries and keys, of all batch rows that may differ."""
    rows = max(mask.rows, len(tokens.starts), len(held.rows))
    return sum(
        block.pairs
        for row in range(rows)
        for rank in range(tokens.ring)
        for source in range(tokens.ring)
        for block in blocks(mask, tokens, rank, held, source, row)
    )
