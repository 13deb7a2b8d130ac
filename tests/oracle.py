"""What is right: attention written from the definition, dense, in float64; and how far a result may be from it.

Nothing here reads the library's blocks, regions or layouts.
"""

from __future__ import annotations

from dataclasses import dataclass

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


def attention(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float | None = None, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Plain softmax attention in q's dtype; seen is (batch, seq, key_seq). Rows without keys: out 0, lse -inf.

    A sink is one more score of each row, whose value is zero; lse is of the keys alone.
    """
    groups = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[3] ** -0.5 if scale is None else scale)
    seen = seen[:, None]
    empty = ~seen.any(-1)
    scores = scores.masked_fill(~seen, -torch.inf).masked_fill(empty[..., None], 0.0)
    with_sinks = scores
    if sinks is not None:
        column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        with_sinks = torch.cat([scores, column], -1)
    p = torch.softmax(with_sinks, -1)[..., : scores.shape[-1]].masked_fill(empty[..., None], 0.0)
    lse = torch.logsumexp(scores, -1).masked_fill(empty, -torch.inf)
    return torch.einsum("bhij,bjhd->bihd", p, v), lse


@dataclass
class Answer:
    """out, lse and the gradients of (out dout + lse dlse), by name; dsinks if there are sinks."""

    values: dict[str, Tensor]
    plain: dict[str, Tensor] | None = None  # the same by plain PyTorch in half precision


def answer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    seen: Tensor,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Answer:
    """The float64 reference for inputs of any dtype."""
    wide = None if sinks is None else sinks.double()
    exact = _differentiate(*(x.double() for x in (q, k, v, dout)), dlse, seen, scale, wide)
    if q.dtype in EXACT:
        return Answer(exact)
    return Answer(exact, _differentiate(q, k, v, dout, dlse, seen, scale, sinks))


def _differentiate(q, k, v, dout, dlse, seen, scale, sinks) -> dict[str, Tensor]:
    leaves = {
        name: x.detach().requires_grad_()
        for name, x in zip(("q", "k", "v", "sinks"), (q, k, v, sinks), strict=True)
        if x is not None
    }
    out, lse = attention(leaves["q"], leaves["k"], leaves["v"], seen, scale, leaves.get("sinks"))
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
    assert expected.plain is not None
    kind = "grad" if name.startswith("d") else name
    return min(LIMIT, FACTOR[kind] * relative_error(expected.plain[name], expected.values[name]))


def note_worst(dtype: str, what: str, error: float, where: str) -> None:
    """Keep it for the summary at the end of the test run."""
    if error >= worst.get((dtype, what), (-1.0, ""))[0]:
        worst[dtype, what] = (error, where)
