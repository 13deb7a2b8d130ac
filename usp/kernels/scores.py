"""What a score is besides scale x (q k): softcap, ALiBi, relative bias, dropout.

    score = softcap(scale q k) + bias         softcap(x) = cap tanh(x / cap)
    bias  = -slope |i - j|                    ALiBi (Press et al., arXiv 2108.12409), one slope a query head
          = table[bucket(j - i), head]        relative bias (T5, arXiv 1910.10683)
    out   = sum_j p_j kept(i, j) v_j / (1 - p)    dropout: after softmax, lse is that of all keys

i and j are the global positions of query and key, so none of these depends on mesh, layout or block.

Note [Dropout]
~~~~~~~~~~~~~~
A pair is kept iff a hash of (seed, batch row, query head, i, j), 32 bits taken as a number from -2^31 on, is at
least 2^32 p - 2^31, where p is rounded to 32 bits. No generator, no state: every rank, layout, backend and
recomputation takes the same decision.
The finaliser of MurmurHash3 (public domain) mixes a query's two words once a row; a pair then costs three
products of 32 bits:

    mix(x)      x ^= x >> 16, x *= 0x85ebca6b, x ^= x >> 13, x *= 0xc2b2ae35, x ^= x >> 16    (mod 2^32)
    word(w)     w = mix(w ^ part) + 0x9e3779b9 for part in (seed mod 2^32, seed / 2^32, batch row, head, i)
    a, m        word(0), word(1) | 1          64 bits a query, so that no two queries drop alike
    hash        x = (a ^ mix(j)) m, x ^= x >> 16, x *= 0x85ebca6b, x ^= x >> 13, x *= 0xc2b2ae35
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

SMALLEST, LARGEST = 1e-30, 1e30  # of numbers that options may be, so that float32 holds what they make
PAIRS = 1 << 32
_WORD = PAIRS - 1
_FACTORS = 0x85EBCA6B, 0xC2B2AE35


class RelativeBias(NamedTuple):
    """A bias that depends on how far the key is from the query: table[buckets[n], head] is added to the score.

    n counts the `starts` that are at most `key position - query position`: buckets[0] is for what lies before the
    first of them. The table is differentiable, and the same on every rank; its gradient is this rank's share.

    Args:
        table: (any number of buckets, heads), finite: what nobody may see belongs into the mask.
        starts: increasing offsets at which another bucket begins.
        buckets: rows of the table, one more than starts.
    """

    table: Float[Tensor, "buckets heads"]
    starts: tuple[int, ...]
    buckets: tuple[int, ...]

    @classmethod
    def t5(cls, table: Float[Tensor, "buckets heads"], *, bidirectional: bool, max_distance: int = 128) -> RelativeBias:
        """The buckets of T5: one for each small distance, logarithmic up to max_distance, one for all beyond.

        The table is the weight of its `relative_attention_bias`. An encoder is bidirectional, a decoder is not. T5
        itself attends with scale=1.0.

        Raises:
            ValueError: if there are too few buckets for that, or max_distance is not beyond the small ones.
        """
        return cls(table, *_t5(table.shape[0], bidirectional, max_distance))

    @classmethod
    def clipped(cls, table: Float[Tensor, "buckets heads"]) -> RelativeBias:
        """One bucket for each offset from -n to n; what is further off has the last one's.

        Raises:
            ValueError: if the table does not have 2 n + 1 rows.
        """
        count = table.shape[0]
        if count % 2 == 0:
            raise ValueError(f"table has {count} rows: one for each offset from -n to n, so 2 n + 1")
        return cls(table, tuple(range(1 - count // 2, count // 2 + 1)), tuple(range(count)))


def _t5(count: int, bidirectional: bool, max_distance: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return _t5_buckets(count, bidirectional, max_distance)


_t5._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]  # not traced, as `ring._handle`


@lru_cache
def _t5_buckets(count: int, bidirectional: bool, max_distance: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(starts, buckets); the logarithm in float32 as models do it, since it decides where buckets begin."""
    side = count // 2 if bidirectional else count
    exact = side // 2
    if exact < 1 or (bidirectional and count % 2) or max_distance <= exact:
        raise ValueError(
            f"{count} buckets, bidirectional={bidirectional}, max_distance={max_distance}: give an even number of "
            f"at least {4 if bidirectional else 2} buckets, and a max_distance beyond the {exact} that are exact"
        )
    distance = torch.arange(1, max_distance + 1, dtype=torch.float32, device="cpu")
    far = exact + (torch.log(distance / exact) / math.log(max_distance / exact) * (side - exact)).floor()
    bucket = [0, *torch.where(distance < exact, distance, far.clamp(max=side - 1)).long().tolist()]
    back = [bucket[n] for n in range(max_distance, -1, -1)]  # for offsets -max_distance to 0
    on = [side + x for x in bucket[1:]] if bidirectional else [0] * max_distance
    offsets = list(enumerate([*back, *on], -max_distance))
    changes = [(offset, after) for (_, before), (offset, after) in pairwise(offsets) if before != after]
    return tuple(x for x, _ in changes), (back[0], *(x for _, x in changes))


class Scores(NamedTuple):
    """What a call's scores are made of, as far as it is no tensor; hashable. Heads are those of one rank."""

    scale: float
    softcap: float | None = None
    alibi: tuple[float, ...] | None = None  # slopes
    starts: tuple[int, ...] = ()  # of a relative bias
    buckets: tuple[int, ...] | None = None
    dropout: float = 0.0
    first_head: int = 0  # what the first head is in the whole model

    @property
    def options(self) -> dict[str, object]:
        """What is asked for besides a scale, by the names of `hybrid_attention`."""
        given = {
            "softcap": self.softcap,
            "alibi": self.alibi,
            "bias": None if self.buckets is None else f"RelativeBias of {len(self.buckets)} steps",
            "dropout": self.dropout or None,
        }
        return {name: value for name, value in given.items() if value is not None}

    @property
    def by_position(self) -> bool:
        return not self.options.keys() <= {"softcap"}

    def of(self, heads: range) -> Scores:
        """The scores of the model, for a rank that has these heads."""
        slopes = None if self.alibi is None else self.alibi[heads.start : heads.stop]
        return self._replace(alibi=slopes, first_head=heads.start)

    def at(
        self, heads: slice, batch: int, i: Tensor | None, j: Tensor | None, table: Tensor | None, seed: int
    ) -> Terms:
        """For one kernel call: these heads, the batch rows from this one on, these positions."""
        return Terms(
            scale=self.scale,
            softcap=self.softcap,
            slopes=None if self.alibi is None else self.alibi[heads],
            table=None if table is None else table[:, heads],
            starts=self.starts,
            buckets=self.buckets,
            dropout=self.dropout,
            seed=seed,
            batch=batch,
            head=self.first_head + heads.start,
            i=i,
            j=j,
        )


def checked_scores(
    q: Tensor,
    scale: float | None,
    softcap: float | None,
    alibi: Sequence[float] | Tensor | None,
    bias: RelativeBias | None,
    dropout: tuple[float, int] | None,
) -> Scores:
    """The terms of scores of q (batch, seq, heads, head_dim).

    Raises:
        ValueError: naming the option, its value and what is allowed.
    """
    heads = q.shape[2]
    for name, value in (("scale", scale), ("softcap", softcap)):
        if value is not None and not (_is_number(value) and SMALLEST <= value <= LARGEST):
            raise ValueError(
                f"{name}={value!r} is not a number from {SMALLEST} to {LARGEST}; leave it out for the usual"
            )
    slopes = None if alibi is None else _checked_slopes(alibi, heads)
    starts, buckets = ((), None) if bias is None else _checked_steps(bias, q)
    return Scores(
        scale=q.shape[3] ** -0.5 if scale is None else float(scale),
        softcap=None if softcap is None else float(softcap),
        alibi=slopes,
        starts=starts,
        buckets=buckets,
        dropout=0.0 if dropout is None else _checked_dropout(dropout),
    )


def _is_number(x: object) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool)


def _is_whole(x: object) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _checked_slopes(alibi: Sequence[float] | Tensor, heads: int) -> tuple[float, ...]:
    if isinstance(alibi, Tensor):
        if alibi.requires_grad:
            raise ValueError("alibi requires a gradient: slopes are constants here; alibi.detach() for fixed ones")
        alibi = alibi.tolist()
    if not isinstance(alibi, list | tuple) or not all(_is_number(x) for x in alibi):
        raise ValueError(f"alibi={alibi!r} is not a tuple of numbers, one for each of the {heads} query heads")
    if len(alibi) != heads or not all(0 <= x <= LARGEST for x in alibi):
        raise ValueError(
            f"alibi={alibi}: give one slope for each of the {heads} query heads, not negative and at most {LARGEST}"
        )
    return tuple([float(x) for x in alibi])


def _checked_steps(bias: RelativeBias, q: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(starts, buckets) of a bias."""
    if not isinstance(bias, RelativeBias):
        shape = f" of {tuple(bias.shape)}" if isinstance(bias, Tensor) else ""
        raise ValueError(
            f"bias is a {type(bias).__name__}{shape}: a dense bias is as large as all scores, and would have to be cut "
            "by layout and mesh for every rank; give it by positions, as usp.RelativeBias(table, starts, buckets)"
        )
    table, starts, buckets = bias
    if not isinstance(table, Tensor) or table.ndim != 2 or not table.is_floating_point():
        raise ValueError(f"bias.table is {table}: give (buckets, heads) in floating point")
    if table.shape[1] != q.shape[2] or table.device != q.device:
        raise ValueError(
            f"bias.table is {tuple(table.shape)} on {table.device}: give a column for each of the {q.shape[2]} query "
            f"heads, on {q.device}"
        )
    for name, values in (("starts", starts), ("buckets", buckets)):
        if not isinstance(values, list | tuple) or not all([_is_whole(x) and abs(x) < 1 << 62 for x in values]):  # noqa: C419
            raise ValueError(f"bias.{name}={values!r} is not a tuple of whole numbers")
    if any(starts[n] >= starts[n + 1] for n in range(len(starts) - 1)):
        raise ValueError(f"bias.starts={starts} does not increase")
    if len(buckets) != len(starts) + 1 or not all(0 <= x < table.shape[0] for x in buckets):
        raise ValueError(
            f"bias.buckets={buckets}: give {len(starts) + 1} rows of the table, which are 0 to {table.shape[0] - 1}"
        )
    return tuple(starts), tuple(buckets)


def _checked_dropout(dropout: tuple[float, int]) -> float:
    """p, as near as 32 bits have it."""
    pair = isinstance(dropout, list | tuple) and len(dropout) == 2 and _is_number(dropout[0])
    count = round(dropout[0] * PAIRS) if pair and 0 <= dropout[0] < 1 else PAIRS
    if count == PAIRS or not isinstance(dropout[1], int) or not 0 <= dropout[1] < 1 << 63:
        raise ValueError(
            f"dropout={dropout!r}: give (p, seed), 0 <= p < 1 and a whole number from 0 to 2^63 - 1, the same on all "
            "ranks of a sequence; another one for each layer, step and data replica"
        )
    return count / PAIRS


class Terms(NamedTuple):
    """What one kernel call's scores are made of."""

    scale: float
    softcap: float | None = None
    slopes: tuple[float, ...] | None = None  # one a query head
    table: Tensor | None = None  # (buckets, heads)
    starts: tuple[int, ...] = ()
    buckets: tuple[int, ...] | None = None
    dropout: float = 0.0
    seed: int = 0
    batch: int = 0  # what the first batch row and the first head are in the whole: for dropout
    head: int = 0
    i: Tensor | None = None  # global positions of queries (rows,) and keys (columns,) if needed: int64, on the CPU
    j: Tensor | None = None

    def on(self, device: torch.device) -> Terms:
        """With the positions there."""
        return self if self.i is None or self.j is None else self._replace(i=self.i.to(device), j=self.j.to(device))

    def of(self, heads: slice, rows: slice, columns: slice) -> Terms:
        """For a part of the call."""
        return self._replace(
            slopes=None if self.slopes is None else self.slopes[heads],
            table=None if self.table is None else self.table[:, heads],
            head=self.head + heads.start,
            i=None if self.i is None else self.i[rows],
            j=None if self.j is None else self.j[columns],
        )

    def add_bias(self, scores: Tensor) -> Tensor | None:
        """Add ALiBi and relative bias to scores (batch, heads, rows, columns); returns the buckets of the latter."""
        if self.slopes is not None:
            i, j = self._places()
            i, j = ((x - i[0]).to(scores.dtype) for x in (i, j))
            scores.addcmul_(scores.new_tensor(self.slopes)[:, None, None], (j - i[:, None]).abs_(), value=-1)
        if self.table is None or self.buckets is None:
            return None
        i, j = self._places()
        starts, buckets = (torch.tensor(x, dtype=torch.int64, device=i.device) for x in (self.starts, self.buckets))
        buckets = buckets[torch.bucketize(j - i[:, None], starts, right=True)]
        scores += self.table.T.to(scores.dtype)[:, buckets]
        return buckets

    def _places(self) -> tuple[Tensor, Tensor]:
        assert self.i is not None
        assert self.j is not None
        return self.i, self.j

    def kept(self, batch: int, heads: int) -> Tensor:
        """Which pairs dropout keeps, (batch, heads, rows, columns); Note [Dropout]."""
        i, j = self._places()
        rows = torch.arange(self.batch, self.batch + batch, device=i.device)[:, None, None]
        head = torch.arange(self.head, self.head + heads, device=i.device)[:, None]
        words = []
        for first in (0, 1):
            word = torch.full_like(i, first)
            for part in (self.seed & _WORD, self.seed >> 32, rows, head, i):
                word = _mix(word ^ part) + 0x9E3779B9 & _WORD
            words.append(_signed(word)[..., None])
        x = words[0] ^ _signed(_mix(j))
        x.mul_(words[1] | 1)
        for shift, factor in zip((16, 13), _FACTORS, strict=True):
            x.bitwise_xor_((x >> shift).bitwise_and_((1 << 32 - shift) - 1)).mul_(factor - (1 << 32))
        return x >= int(self.dropout * PAIRS) - (1 << 31)


def _mix(x: Tensor) -> Tensor:
    """Of 32 bits in int64; products wrap around, and their low 32 bits are right."""
    for shift, factor in zip((16, 13), _FACTORS, strict=True):
        x = (x ^ x >> shift) * factor & _WORD
    return x ^ x >> 16


def _signed(x: Tensor) -> Tensor:
    """32 bits as the int32 that has them."""
    return ((x + (1 << 31) & _WORD) - (1 << 31)).to(torch.int32)
