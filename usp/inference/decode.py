"""Attention of one or a few new tokens of each sequence to all that a cache holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache, reduce
from typing import NamedTuple

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from usp import comm, kernels
from usp.attention import check_sinks
from usp.blocks import Block
from usp.heads import Group, HeadPlan, runs
from usp.inference.cache import KVCache
from usp.inference.partials import packed, round_trip, unpacked
from usp.inference.prefill import check_cache, check_no_gradient
from usp.inference.volumes import DECODE
from usp.kernels.scores import RelativeBias, Scores, Terms, checked_scores
from usp.ledger import Ledger
from usp.masks import Mask, Span, joined
from usp.merging import accumulate, accumulator_dtype, combined, per_row, with_sinks
from usp.mesh import Axis, axes
from usp.ring import check_tensors

Result = Tensor | tuple[Tensor, Tensor]


def decode_attention(
    q: Float[Tensor, "rows seq heads head_dim"],
    k: Float[Tensor, "batch seq kv_heads head_dim"] | None,
    v: Float[Tensor, "batch seq kv_heads head_dim_v"] | None,
    mesh: DeviceMesh | None,
    cache: KVCache,
    *,
    mask: Mask,
    algorithm: str = "auto",
    gather: bool = True,
    new: Sequence[int] | Tensor | None = None,
    sinks: Float[Tensor, " all_heads"] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi: Sequence[float] | Tensor | None = None,
    bias: RelativeBias | None = None,
    backend: str = "auto",
    check_ranks: bool = True,
    return_lse: bool = False,
) -> Result:
    """Keep the next tokens of each sequence, and attend from them to all that the cache then holds. No gradients.

    With several tokens a sequence (speculative decoding) each sees what the mask shows it, by global position; those
    that are rejected are taken back by `cache.truncate`. (An inf or NaN in the values of one of them may reach the
    others of that step, as in any fused kernel; nothing after it.) Ranks that keep nothing of a sequence yet take part
    all the same. A message has out in q's dtype and lse in float32 (float64 for float64).

    Algorithms; formulas for N ring ranks, a batch of B, H query heads on a Ulysses rank, e bytes an element, are those
    of Note [Decode algorithms]:

    - "helix": every rank has all queries; one all-to-all sends each rank the (out, lse) of its heads, packed:
      (N-1)/N B H (d e + 4) bytes. Fewest bytes and messages of all that leave a rank its heads, which is what the
      output projection of a tensor-parallel model wants. The price is a query projection that is not sharded over
      the ring. (Helix Parallelism, arXiv 2507.07120.)
    - "all_to_all": queries are gathered first, if each rank projects its own heads: (N-1)/N B H d e bytes more and one
      more collective than helix. Wins over it where reading the whole query projection takes longer than that.
    - "gather_q": the same with lse gathered and out reduced and scattered, 2 (N-1)/N B H d e + 4 (N-1) B H bytes in
      three collectives (vLLM's decode context parallelism). Never fewer than all_to_all; for comparison, and for
      networks that reduce.
    - "tree": every rank has all queries, and two all-reduces, of the largest lse and of numerators and denominators,
      leave all of out everywhere: 2 (N-1)/N B H 4 (d + 2) bytes in float32. Wins where every rank wants all of out
      and the network reduces in itself, or has a latency that grows with the logarithm of N only. (Tree Attention,
      arXiv 2408.04093, which has three.)
    - "pass_q": each rank has some sequences of the batch; their queries go round the ring, and an all-to-all returns
      what they found: (N-1)/N B H (2 d e + 4) bytes in N-1 hops and one collective. Wins where hops hide under the
      attention: few ranks, long contexts, a batch of at least N. (arXiv 2411.01783, algorithm 4; sequences are dealt
      without padding the batch.)
    - "auto": helix, whatever the sizes: with all queries everywhere it sends least in the fewest messages, also where
      out is gathered afterwards.

    Moving the keys instead ("pass_kv") would send (N-1)/N P 2 K d e bytes for P cached tokens, for each token.

    Args:
        q, k, v: with `gather`, the new tokens of all sequences with all heads, the same on every rank. Without, the
            heads of this Ulysses rank, and of those the queries that the algorithm takes: all of them (helix, tree),
            this ring rank's share of the heads (gather_q, all_to_all) or of the sequences (pass_q); shares are
            `usp.heads.runs(count, ring)[ring rank]`. k and v of all sequences either way: their owner keeps them.
            Without k and v nothing is kept, and queries stand behind what the cache holds: cross attention.
        cache: what `prefill_attention` filled; its new tokens are at positions `cache.lengths`, row by row.
        mask: in global positions. Documents must reach as far as the new tokens.
        algorithm: one of the above.
        gather: give every rank all of out, in one more collective a mesh axis. Without it, out is left as the
            algorithm leaves it: this rank's heads (helix, gather_q, all_to_all), its sequences (pass_q), or whole.
        new: how many of the tokens of each sequence are real, if not all: the others get out 0 and lse -inf.
        sinks, scale, softcap, alibi, bias, backend, check_ranks, return_lse: as in `hybrid_attention`; sinks, slopes
            and columns of a bias are those of the query heads that q has, or without `gather` its Ulysses rank.

    Returns:
        out (rows, seq, heads, head_dim_v) in q's dtype; with `return_lse` (out, lse), lse (rows, heads, seq).

    Raises:
        ValueError: on every rank, before anything is sent or kept, if the arguments do not fit together, a sequence
            has no room, the mask shows a new token nothing, or the ranks' calls or caches differ.
    """
    call = comm.agreed(
        axes(mesh),
        lambda: _checked(
            *(q, k, v, mesh, cache, mask, algorithm, gather, new),
            *(sinks, scale, softcap, alibi, bias, backend),
        ),
        lambda call: {
            # Without gather each rank has other heads and sequences.
            "shapes of q and k": [None if x is None else tuple(x.shape if gather else x.shape[1:2]) for x in (q, k)],
            "dtypes of sinks and bias.table": [x if x is None else str(x.dtype) for x in (sinks, bias and bias.table)],
            "mask": mask,
            "cache": cache,
            "what the cache holds": cache.ledger,
            "new": call.new,
            "scale, softcap, alibi, bias": call.asked,
            "options": {"algorithm": algorithm, "gather": gather, "backend": backend, "return_lse": return_lse},
        },
        ask=check_ranks,
    )
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        return _decode(call, q, k, v, cache, gather, sinks, bias, return_lse)


class _Call(NamedTuple):
    """A call that has been found right. Heads are those of this Ulysses rank."""

    algorithm: str
    ledger: Ledger  # with the new tokens, if they are kept
    first: tuple[int, ...]  # by sequence, the position of the first new token
    new: tuple[int, ...]
    queries: range  # its heads, in the tensors that the call has
    keys: range
    everybody: tuple[int, ...]  # query heads of every Ulysses rank
    groups: tuple[Group, ...]
    asked: Scores  # as far as all ranks ask the same
    scores: Scores  # of its heads
    mask: Mask
    backend: str


def _checked(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    mesh: DeviceMesh | None,
    cache: KVCache,
    mask: Mask,
    algorithm: str,
    gather: bool,
    new: Sequence[int] | Tensor | None,
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
    check_tensors(q=q, **({} if k is None and v is None else {"k": k, "v": v}))
    ring, ulysses = cache.ring, cache.ulysses
    if not isinstance(mask, Mask):
        raise ValueError(f"mask is a {type(mask).__name__} and not a usp.Mask")
    if mask.key_documents is not None:
        raise ValueError("the mask has key_documents: what a cache holds is one sequence, positions say which part")
    if not isinstance(gather, bool):
        raise ValueError(f"gather={gather!r} is neither True nor False")
    if mask.rows not in (1, cache.batch):
        raise ValueError(f"the mask tells {mask.rows} batch rows apart, but the cache has {cache.batch} sequences")
    if algorithm not in ("auto", *DECODE):
        cure = ": a token's queries are far less than all keys; prefill_attention moves them" * (algorithm == "pass_kv")
        raise ValueError(f"algorithm={algorithm!r} is not one of {('auto', *DECODE)}{cure}")
    if algorithm == "auto" and not gather:
        raise ValueError(
            "algorithm='auto' with gather=False: which queries a rank gives and what of out it gets depends on the "
            "algorithm, so name one"
        )
    algorithm = "helix" if algorithm == "auto" else algorithm
    if q.ndim != 4 or q.shape[1] < 1 or q.shape[3] != cache.head_dim:
        raise ValueError(f"q is {tuple(q.shape)} and must be (sequences, tokens, heads, {cache.head_dim})")
    if (q.dtype, q.device) != (cache.k.dtype, cache.k.device):
        raise ValueError(f"q is {q.dtype} on {q.device}, but the cache is {cache.k.dtype} on {cache.k.device}")
    heads, plan = _heads(q, cache, algorithm, gather)
    rows = cache.batch
    if not gather and algorithm == "pass_q":
        rows = len(runs(rows, ring.size)[ring.rank])
    if q.shape[0] != rows:
        raise ValueError(f"q has {q.shape[0]} sequences; algorithm={algorithm!r} with gather={gather} takes {rows}")
    queries, keys = plan.queries[ulysses.rank], plan.keys[ulysses.rank]
    if not gather:
        queries, keys = range(len(queries)), range(len(keys))
    counts, ledger = cache.checked_new(q.shape[1], new), cache.ledger
    if k is not None and v is not None:
        cache.check_keys(k, v, cache.kv_heads if gather else len(keys))
        if k.shape[1] != q.shape[1]:
            raise ValueError(f"q {tuple(q.shape)} and k {tuple(k.shape)} have different numbers of tokens")
        ledger = cache.planned(counts).ledger
        cache.check_room(ledger)
    _visible(mask, ledger, cache.lengths, counts, ring.rank)  # raises, if the mask shows a token nothing
    like = q.new_empty((1, 1, heads, cache.head_dim))
    scores = checked_scores(like, scale, softcap, alibi, bias, None)
    check_sinks(sinks, like)
    check_no_gradient(q, k, v, sinks, bias and bias.table)
    v_like = q.new_empty((1, 1, 1, cache.head_dim_v))
    span = max(cache.lengths) + q.shape[1]
    backend = kernels.select(backend, like, v_like, scores, lse_gradient=False, span=span)
    return _Call(
        *(algorithm, ledger, cache.lengths, counts, queries, keys, tuple(map(len, plan.queries))),
        *(plan.groups(ulysses.rank), scores if gather else scores._replace(alibi=None), scores.of(queries)),
        *(mask, backend),
    )


def _heads(q: Tensor, cache: KVCache, algorithm: str, gather: bool) -> tuple[int, HeadPlan]:
    """How many query heads options are given for, and who has which.

    Raises:
        ValueError: if q has not as many as it should.
    """
    if gather:
        return q.shape[2], cache.plan(q.shape[2])
    ring, ulysses = cache.ring, cache.ulysses
    share = algorithm in ("gather_q", "all_to_all")
    if cache.heads is None and cache.kv_heads % ulysses.size:
        raise ValueError(
            f"gather=False with {cache.kv_heads} KV heads on ulysses={ulysses.size} ranks, which do not divide: make "
            "the cache with heads=, how many query heads the model has"
        )
    plan = cache.plan(cache.heads or q.shape[2] * ulysses.size * (ring.size if share else 1))
    heads = len(plan.queries[ulysses.rank])
    expected = len(runs(heads, ring.size)[ring.rank]) if share else heads
    if q.shape[2] != expected:
        raise ValueError(
            f"q has {q.shape[2]} heads; algorithm={algorithm!r} with gather=False takes {expected} on ring rank "
            f"{ring.rank} of {ring.size}, of the {heads} heads of its Ulysses rank"
            + ("" if cache.heads else "; if they do not divide, make the cache with heads=")
        )
    return heads, plan


# ---------------------------------------------------------------------------------------------------
# What a rank finds among its own keys.

Spans = tuple[Span, ...]  # of slots: not empty, increasing, apart from each other


@lru_cache(maxsize=64)  # the layers of a model ask the same
def _visible(
    mask: Mask, ledger: Ledger, first: tuple[int, ...], new: tuple[int, ...], rank: int
) -> tuple[tuple[Spans, ...], ...]:
    """[sequence][new token]: the slots of a ring rank that it sees. A slot's position is increasing, so spans remain.

    Raises:
        ValueError: if the mask shows a token nothing at all, wherever it may be.
    """
    found = []
    for row, count in enumerate(new):
        seen = []
        for position in range(first[row], first[row] + count):
            spans = []
            for queries, (start, stop), low, high in mask.disjoint_regions(row):
                start = start if low is None else max(start, position + low)
                stop = stop if high is None else min(stop, position + high + 1)
                if queries[0] <= position < queries[1] and start < stop:
                    spans.append((start, stop))
            if not spans:
                raise ValueError(
                    f"the mask shows nothing to the token at position {position} of sequence {row}: {mask}; its "
                    "documents and regions must reach as far as the tokens that are decoded"
                )
            seen.append(joined((ledger.below(rank, row, a), ledger.below(rank, row, b)) for a, b in spans))
        found.append(tuple(seen))
    return tuple(found)


class _Part(NamedTuple):
    """Sequences and tokens that are done together: what all of them see, and what some of them see."""

    rows: range
    tokens: range
    full: Spans
    fringe: Spans


@lru_cache(maxsize=64)
def _parts(seen: tuple[tuple[Spans, ...], ...], rows: range, seq: int, limit: int) -> tuple[_Part, ...]:
    """Few parts, each with at most `limit` slots in its fringe over all its rows."""
    return tuple(_halved(seen, rows, range(seq), limit))


def _halved(seen: tuple[tuple[Spans, ...], ...], rows: range, tokens: range, limit: int) -> Iterator[_Part]:
    some = [seen[row][n] for row in rows for n in tokens if n < len(seen[row])]
    if not some:
        return
    full = reduce(_both, some)
    fringe = _less(joined(span for spans in some for span in spans), full)
    if len(rows) * sum(b - a for a, b in fringe) <= limit or len(rows) == len(tokens) == 1:
        yield _Part(rows, tokens, full, fringe)
    elif len(rows) > 1:
        for half in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
            yield from _halved(seen, half, tokens, limit)
    else:
        for half in (tokens[: len(tokens) // 2], tokens[len(tokens) // 2 :]):
            yield from _halved(seen, rows, half, limit)


def _both(xs: Spans, ys: Spans) -> Spans:
    return tuple((max(a, c), min(b, d)) for a, b in xs for c, d in ys if max(a, c) < min(b, d))


def _less(xs: Spans, ys: Spans) -> Spans:
    edges = [0, *(x for span in ys for x in span), max((b for _, b in xs), default=0)]
    return _both(xs, tuple(zip(edges[::2], edges[1::2], strict=True)))


_FRINGE = 1 << 17  # elements of keys that some see, in one go
_COPIED = 1 << 18  # elements of keys and values in one go, where a backend copies them: nothing grows with the context


def _local(call: _Call, cache: KVCache, q: Tensor, rows: range, table: Tensor | None) -> tuple[Tensor, Tensor]:
    """(out, lse) of these sequences' queries (rows, seq, heads, head_dim) over this rank's keys, unrounded."""
    wide, seq, scores = accumulator_dtype(q.dtype), q.shape[1], call.scores
    out = q.new_zeros((*q.shape[:3], cache.head_dim_v), dtype=wide)
    lse = q.new_full((q.shape[0], q.shape[2], seq), -torch.inf, dtype=wide)
    slot_numel = cache.k.shape[2] * (cache.head_dim + cache.head_dim_v)
    seen = _visible(call.mask, call.ledger, call.first, call.new, cache.ring.rank)
    limit = -1 if scores.by_position else _FRINGE // slot_numel
    for part in _parts(seen, rows, seq, limit):
        kept, tokens = slice(*_ends(part.rows)), slice(*_ends(part.tokens))
        here = slice(kept.start - rows.start, kept.stop - rows.start)
        full, position, chunk = part.full, call.first[part.rows.start] + part.tokens.start, None
        if scores.alibi:  # of a single token: a kernel wants its keys all before it or all behind
            cut = call.ledger.below(cache.ring.rank, part.rows.start, position + 1)
            full = (*_both(full, ((0, cut),)), *_both(full, ((cut, cache.k.shape[1]),)))
        if kernels.copies(call.backend, cache.head_dim, cache.head_dim_v, scores):
            chunk = max(1, _COPIED // (slot_numel * len(part.rows)))
        for heads, kv_heads in ((slice(*_ends(x)), slice(*_ends(y))) for x, y in call.groups):
            to, to_lse, ask = out[here, tokens, heads], lse[here, heads, tokens], q[here, tokens, heads]
            k, v = cache.k[kept, :, kv_heads], cache.v[kept, :, kv_heads]
            for a, b in (x for span in full for x in _pieces(span, chunk)):
                i = j = None
                if scores.by_position:
                    i, j = torch.tensor([position]), cache.slot_positions[part.rows.start, a:b]
                found = _full(call.backend, ask, k[:, a:b], v[:, a:b], scores.at(heads, 0, i, j, table, 0))
                accumulate(to, to_lse, *found)
            for a, b in part.fringe:
                shown = _shown([seen[row][tokens] for row in part.rows], len(part.tokens), a, b).to(q.device)
                found = _some(ask, k[:, a:b], v[:, a:b], shown, scores)
                merged, to_lse[:] = combined((to, found[0]), (to_lse, found[1]))
                to.copy_(merged)
    for row in rows:
        if call.new[row] < seq:  # what is no token
            out[row - rows.start, call.new[row] :] = 0.0
            lse[row - rows.start, :, call.new[row] :] = -torch.inf
    return out, lse


def _ends(x: range) -> tuple[int, int]:
    return x.start, x.stop


def _pieces(span: Span, size: int | None) -> Iterator[Span]:
    first, end = span
    size = size or end - first
    yield from ((n, min(end, n + size)) for n in range(first, end, size))


def _full(backend: str, q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> tuple[Tensor, Tensor]:
    """All queries see all keys. Query heads of one KV head are rows of one head, so that keys are read once."""
    groups = 1 if terms.i is not None else q.shape[2] // k.shape[2]
    block = Block(range(q.shape[1] * groups), range(k.shape[1]))
    out, lse = kernels.forward(backend, rearrange(q, "b t (h g) d -> b (t g) h d", g=groups), k, v, block, terms)
    return (
        rearrange(out, "b (t g) h d -> b t (h g) d", g=groups),
        rearrange(lse, "b h (t g) -> b (h g) t", g=groups),
    )


def _shown(seen: Sequence[Sequence[Spans]], seq: int, first: int, end: int) -> Tensor:
    """(rows, seq, end - first) of bool: which of these slots each token sees."""
    most = max((len(spans) for row in seen for spans in row), default=0)
    padded = [[[*spans, *[(0, 0)] * (most - len(spans))] for spans in [*row, *[()] * (seq - len(row))]] for row in seen]
    edges = torch.tensor(padded)[..., None]
    slots = torch.arange(first, end)
    return ((edges[..., 0, :] <= slots) & (slots < edges[..., 1, :])).any(2)


def _some(q: Tensor, k: Tensor, v: Tensor, shown: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    """A few keys, of which each query sees some or none."""
    comm.ran("dense")
    wide = accumulator_dtype(q.dtype)
    q = rearrange(q.to(wide), "b t (h g) d -> b t h g d", h=k.shape[2])
    score = torch.einsum("bthgd,bshd->bhgts", q, k.to(wide)) * scores.scale
    if scores.softcap is not None:
        score = scores.softcap * torch.tanh(score / scores.softcap)
    score.masked_fill_(~shown[:, None, None], -torch.inf)
    lse = torch.logsumexp(score, -1)
    p = torch.exp(score - torch.where(lse == -torch.inf, 0.0, lse)[..., None])
    v = torch.where(shown.any(1)[..., None, None], v.to(wide), 0.0)  # what nobody sees may be anything
    out = torch.einsum("bhgts,bshd->bthgd", p, v)
    return rearrange(out, "b t h g d -> b t (h g) d"), rearrange(lse, "b h g t -> b (h g) t")


# ---------------------------------------------------------------------------------------------------
# Between ranks.


def _decode(
    call: _Call,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cache: KVCache,
    gather: bool,
    sinks: Tensor | None,
    bias: RelativeBias | None,
    return_lse: bool,
) -> Result:
    """`decode_attention` of a call that has been found right, on all ranks."""
    ring, ulysses, own = cache.ring, cache.ulysses, slice(*_ends(call.queries))
    if k is not None and v is not None:
        keys = slice(*_ends(call.keys))
        cache.store(k[:, :, keys], v[:, :, keys], call.new)
    table = None if bias is None else bias.table[:, own]
    rows, heads = runs(cache.batch, ring.size), runs(len(call.queries), ring.size)
    everybody = range(cache.batch)
    mine = rows[ring.rank], range(len(call.queries))  # sequences and heads of the result
    if gather:
        q = q[:, :, own]
    if ring.size == 1:
        out, lse = _local(call, cache, q, everybody, table)
    elif call.algorithm == "pass_q":
        q = q[slice(*_ends(mine[0]))] if gather else q
        shapes = [(len(x), *q.shape[1:]) for x in rows]
        visited = [[bool(x) for x in rows]] * ring.size
        out, lse = round_trip(
            *(q, shapes, visited, ring, cache.head_dim_v), lambda source, x: _local(call, cache, x, rows[source], table)
        )
    else:
        mine = everybody, heads[ring.rank]
        counts = [len(x) for x in heads]
        if call.algorithm in ("gather_q", "all_to_all"):
            share = q[:, :, slice(*_ends(mine[1]))] if gather else q
            q = _gathered(share, 2, counts, ring, "queries")
        out, lse = _local(call, cache, q, everybody, table)
        if call.algorithm == "tree":
            mine = everybody, range(len(call.queries))
            out, lse = _tree(out, lse, ring)
        elif call.algorithm == "gather_q":
            out, lse = _reduced(out, lse, counts, ring, q.dtype)
        else:
            x = packed(out.to(q.dtype), lse).movedim(2, 0).contiguous()
            arrived = comm.all_to_all(x, counts, [len(mine[1])] * ring.size, ring.group, "partials")
            parts = arrived.unflatten(0, (ring.size, len(mine[1]))).movedim(1, 3)
            out, lse = combined(*zip(*(unpacked(x, cache.head_dim_v) for x in parts), strict=True))
    if sinks is not None:
        out = with_sinks(out, lse, sinks[own][slice(*_ends(mine[1]))])
    out = out.to(cache.k.dtype)
    if gather and ring.size * ulysses.size > 1:
        x = packed(out, lse) if return_lse else out
        if call.algorithm != "tree":
            dim, counts = (0, [len(x) for x in rows]) if call.algorithm == "pass_q" else (2, [len(x) for x in heads])
            x = _gathered(x, dim, counts, ring, "out")
        x = _gathered(x, 2, call.everybody, ulysses, "out")
        out, lse = unpacked(x, cache.head_dim_v) if return_lse else (x, lse)
    return (out.contiguous(), lse.contiguous()) if return_lse else out.contiguous()


def _gathered(x: Tensor, dim: int, counts: Sequence[int], axis: Axis, kind: str) -> Tensor:
    """All ranks' parts of x, behind each other in `dim`, of which each rank has its count."""
    if axis.size == 1:
        return x
    return comm.all_gather_uneven(x.movedim(dim, 0).contiguous(), counts, axis.group, kind).movedim(0, dim)


def _tree(out: Tensor, lse: Tensor, ring: Axis) -> tuple[Tensor, Tensor]:
    """Merged over the ring, everywhere, by two all-reduces."""
    peak = lse.clone()
    comm.all_reduce(peak, ring.group, "partials", largest=True)
    peak = torch.where(peak == -torch.inf, 0.0, peak)
    weight = per_row(torch.exp(lse - peak))
    sums = torch.cat([out * weight, weight], dim=3)
    comm.all_reduce(sums, ring.group, "partials")
    total = sums[..., -1:]
    out = sums[..., :-1] / torch.where(total == 0, 1.0, total)
    return out, peak + torch.log(rearrange(total, "b t h 1 -> b h t"))


def _reduced(out: Tensor, lse: Tensor, counts: Sequence[int], ring: Axis, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Merged over the ring, by heads: every rank weighs its own part, and the parts add up."""
    own = runs(sum(counts), ring.size)[ring.rank]
    total = torch.logsumexp(comm.all_gather(lse, ring.group, "lse"), 0)
    weight = torch.exp(lse - torch.where(total == -torch.inf, 0.0, total))
    x = (out * per_row(weight)).to(dtype).movedim(2, 0).contiguous()
    arrived = comm.all_to_all(x, counts, [len(own)] * ring.size, ring.group, "partials")
    parts = arrived.unflatten(0, (ring.size, len(own)))
    return parts.sum(0, dtype=out.dtype).movedim(0, 2), total[:, slice(*_ends(own))]
