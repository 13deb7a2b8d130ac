"""What is right: attention written from the definition, dense, in float64; and how far a result may be from it.

Nothing here reads the library's blocks, regions or layouts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from usp import Mask, Partition

LIMIT = 0.01  # no tolerance is above this share of the reference's largest value
EXACT = {torch.float64: 1e-12, torch.float32: 5e-6}
FACTOR = {"out": 2.0, "lse": 2.0, "grad": 3.0}  # half precision: times plain PyTorch's own error

worst: dict[tuple[str, str], tuple[float, str]] = {}


def visible(mask: Mask, queries: Partition, keys: Partition, row: int) -> Tensor:
    """(seq, key_seq) of bool, over real tokens, straight from the docstring of Mask."""
    q_start, k_start = (p.start if isinstance(p.start, int) else p.start[row] for p in (queries, keys))
    i = torch.arange(queries.seq)[:, None] + q_start
    j = torch.arange(keys.seq)[None, :] + k_start
    seen = torch.ones(queries.seq, keys.seq, dtype=torch.bool)
    if mask.causal:
        seen &= j <= i
    if mask.window is not None:
        seen &= i - j < mask.window
        if not mask.causal:
            seen &= j - i < mask.window
    if mask.documents is not None:
        spans = mask.documents[row if len(mask.documents) > 1 else 0]
        key_spans = (mask.key_documents or mask.documents)[row if len(mask.documents) > 1 else 0]
        together = torch.zeros_like(seen)
        for (a, b), (c, d) in zip(spans, key_spans, strict=True):
            together |= (i >= a) & (i < b) & (j >= c) & (j < d)
        seen &= together
    if mask.regions is not None:
        for queries_span, keys_span, low, high in mask.regions[row if len(mask.regions) > 1 else 0]:
            (a, b), (c, d) = queries_span, keys_span
            shown = (i >= a) & (i < b) & (j >= c) & (j < d)
            shown &= torch.ones_like(shown) if low is None else j - i >= low
            shown &= torch.ones_like(shown) if high is None else j - i <= high
            seen |= shown
    return seen


@dataclass(frozen=True)
class Options:
    """What a score is besides scale q k; `bias` names how an offset finds its row of a table."""

    scale: float | None = None
    softcap: float | None = None
    alibi: tuple[float, ...] | None = None
    bias: str | None = None
    dropout: tuple[float, int] | None = None


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    options: Options = Options(),
    sinks: Tensor | None = None,
    table: Tensor | None = None,
    positions: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Plain softmax attention in q's dtype; seen is (batch, seq, key_seq). Rows without keys: out 0, lse -inf.

    A sink is one more score of each row, whose value is zero; lse is of the keys alone. Positions of queries and keys
    are (batch, seq) and (batch, key_seq).
    """
    groups, scale = q.shape[2] // k.shape[2], options.scale
    k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[3] ** -0.5 if scale is None else scale)
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    if positions is not None:
        offset = positions[1][:, None, :] - positions[0][:, :, None]
        if options.alibi is not None:
            slopes = torch.tensor(options.alibi, dtype=torch.float64)[:, None, None]
            scores = scores - (slopes * offset[:, None].abs()).to(scores.dtype)
        if table is not None:
            scores = scores + table.to(scores.dtype)[bucket(options.bias, offset, len(table))].permute(0, 3, 1, 2)
    seen = seen[:, None]
    empty = ~seen.any(-1)
    scores = scores.masked_fill(~seen, -torch.inf).masked_fill(empty[..., None], 0.0)
    with_sinks = scores
    if sinks is not None:
        column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        with_sinks = torch.cat([scores, column], -1)
    p = torch.softmax(with_sinks, -1)[..., : scores.shape[-1]].masked_fill(empty[..., None], 0.0)
    lse = torch.logsumexp(scores, -1).masked_fill(empty, -torch.inf)
    if options.dropout is not None and positions is not None:
        p = p * kept(*options.dropout, p.shape[1], *positions) / (1 - round(options.dropout[0] * 2**32) / 2**32)
    return torch.einsum("bhij,bjhd->bihd", p, v), lse


def bucket(form: str | None, offset: Tensor, count: int) -> Tensor:
    """The row of a table of `count` rows for key position - query position."""
    if form == "clipped":
        return offset.clamp(-(count // 2), count // 2) + count // 2
    assert form in ("t5 encoder", "t5 decoder")
    if form == "t5 encoder":
        count //= 2
        far, first = offset.abs(), (offset > 0) * count
    else:
        far, first = -offset.clamp(max=0), 0
    half = count // 2  # as many are exact; the others reach up to a distance of 20
    more = torch.log(far.clamp(min=1).float() / half) / math.log(20 / half) * (count - half)
    return first + torch.where(far < half, far, (half + more.to(torch.int64)).clamp(max=count - 1))


def kept(p: float, seed: int, heads: int, i: Tensor, j: Tensor) -> Tensor:
    """(batch, heads, seq, key_seq): whether dropout keeps a pair. From Note [Dropout], in unsigned words."""
    low = 0xFFFFFFFF

    def mix(x: Tensor) -> Tensor:
        x = ((x ^ x // 65536) * 0x85EBCA6B) & low
        x = ((x ^ x // 8192) * 0xC2B2AE35) & low
        return x ^ x // 65536

    row = torch.arange(len(i))[:, None, None]
    head = torch.arange(heads)[None, :, None]
    words = [torch.tensor(0), torch.tensor(1)]
    for part in (torch.tensor(seed & low), torch.tensor(seed >> 32), row, head, i[:, None, :]):
        words = [(mix(word ^ part) + 0x9E3779B9) & low for word in words]
    x = (words[0][..., None] ^ mix(j)[:, None, None, :]) * (words[1] | 1)[..., None] & low
    x = (x ^ x // 65536) * 0x85EBCA6B & low
    x = (x ^ x // 8192) * 0xC2B2AE35 & low
    return torch.where(x < 2**31, x, x - 2**32) >= round(p * 2**32) - 2**31


@dataclass
class Answer:
    """out, lse and the gradients of (out dout + lse dlse), by name; dsinks and dtable if there are such."""

    values: dict[str, Tensor]
    plain: dict[str, Tensor] | None = None  # the same by plain PyTorch in half precision

    @cached_property
    def usual(self) -> dict[str, float]:
        """How far plain PyTorch is off in half precision."""
        assert self.plain is not None
        return {name: relative_error(x, self.values[name]) for name, x in self.plain.items()}


def answer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    seen: Tensor,
    options: Options = Options(),
    sinks: Tensor | None = None,
    table: Tensor | None = None,
    positions: tuple[Tensor, Tensor] | None = None,
) -> Answer:
    """The float64 reference for inputs of any dtype."""
    more = seen, options, positions
    wide = (None if x is None else x.double() for x in (sinks, table))
    exact = _differentiate(*(x.double() for x in (q, k, v, dout)), dlse, *wide, *more)
    if q.dtype in EXACT:
        return Answer(exact)
    return Answer(exact, _differentiate(q, k, v, dout, dlse, sinks, table, *more))


def _differentiate(q, k, v, dout, dlse, sinks, table, seen, options, positions) -> dict[str, Tensor]:
    leaves = {
        name: x.detach().requires_grad_()
        for name, x in zip(("q", "k", "v", "sinks", "table"), (q, k, v, sinks, table), strict=True)
        if x is not None
    }
    more = leaves.get("sinks"), leaves.get("table"), positions
    out, lse = attention(leaves["q"], leaves["k"], leaves["v"], seen, options, *more)
    loss = (out * dout).sum()
    if dlse is not None:
        loss = loss + torch.where(lse == -torch.inf, 0.0, lse * dlse.to(lse.dtype)).sum()
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    found = {f"d{name}": x for name, x in zip(leaves, gradients, strict=True)}
    return {"out": out.detach(), "lse": lse.detach()} | found


def relative_error(actual: Tensor, reference: Tensor, whole: Tensor | None = None, size: float = 0.0) -> float:
    """Largest difference over the (whole) reference's largest value, which counts as `size` if it is smaller.

    Infinities must agree; NaN is infinitely wrong.
    """
    if actual.shape != reference.shape:
        return torch.inf
    actual, reference = actual.double(), reference.double()
    difference = torch.where(actual == reference, 0.0, (actual - reference).abs())
    whole = reference if whole is None else whole
    size = max(size, whole[whole.isfinite()].abs().max().item() if whole.isfinite().any() else 1.0)
    error = difference.max().item()
    return error / size if size and error == error else torch.inf if error else 0.0


def tolerance(name: str, dtype: torch.dtype, expected: Answer) -> float:
    """Relative to the reference's largest value."""
    if dtype in EXACT:
        return EXACT[dtype]
    kind = "grad" if name.startswith("d") else name
    return min(LIMIT, FACTOR[kind] * expected.usual[name])


def note_worst(dtype: str, what: str, error: float, where: str) -> None:
    """Keep it for the summary at the end of the test run."""
    if error >= worst.get((dtype, what), (-1.0, ""))[0]:
        worst[dtype, what] = (error, where)
