"""Keys and values of growing sequences, sharded over the mesh as attention left them."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from usp.heads import HeadPlan
from usp.ledger import OWNERS, Ledger, Row
from usp.masks import Span
from usp.mesh import axes
from usp.partitions import Partition
from usp.ring import check_tensors


class KVCache:
    """The keys and values of a batch of sequences, of one attention layer.

    They are kept as they are between the two all-to-alls: a rank has the KV heads of its Ulysses rank and the tokens
    of its ring rank. So a prefill leaves them where they were computed, and that is what decoding wants: heads over
    Ulysses ranks, tokens over ring ranks (Helix, arXiv 2507.07120, with TPA = ulysses and KVP = ring). No key moves
    in between, whatever layout a prompt had: masks are about global positions, which are kept with the keys.

    Tokens that are decoded are dealt to the ring ranks in blocks; see Note [Ledger] for who owns what. All memory is
    taken at once. Rows of the batch grow independently; each starts anew after `reset`.

    Args:
        mesh: a mesh with the axes "ring" and "ulysses", or None for one process.
        batch: sequences.
        capacity: tokens that a sequence may have. Every ring rank has room for its share and a little more.
        kv_heads: of the model.
        head_dim, head_dim_v: of keys and of values.
        dtype: of keys and values.
        block: how many decoded tokens go to one rank before the next one's turn.
        owner: who gets the next block: "rotate", ranks in turn, so that decoded tokens are even; "shortest", the rank
            that has fewest of the row, so that all tokens become even.
        replicate_kv: as in `hybrid_attention`, for more Ulysses ranks than KV heads; needs `heads`.
        heads: query heads of the model, if the cache is to know them.
        device: of the mesh's kind by default.

    Raises:
        ValueError: for sizes below 1, an unknown owner, or heads that cannot be dealt.
    """

    def __init__(
        self,
        mesh: DeviceMesh | None,
        *,
        batch: int,
        capacity: int,
        kv_heads: int,
        head_dim: int,
        head_dim_v: int | None = None,
        dtype: torch.dtype,
        block: int = 16,
        owner: str = "rotate",
        replicate_kv: bool = False,
        heads: int | None = None,
        device: torch.device | str | None = None,
    ):
        head_dim_v = head_dim if head_dim_v is None else head_dim_v
        sizes = {"batch": batch, "capacity": capacity, "kv_heads": kv_heads, "block": block}
        sizes |= {"head_dim": head_dim, "head_dim_v": head_dim_v} | ({} if heads is None else {"heads": heads})
        for name, size in sizes.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{name}={size!r}: a cache needs {name} as a whole number of at least 1")
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ValueError(f"dtype={dtype!r} is not a floating-point dtype of torch")
        if owner not in OWNERS:
            raise ValueError(f"owner={owner!r} is not one of {OWNERS}")
        if replicate_kv and heads is None:
            raise ValueError("replicate_kv=True deals query heads: give heads=, how many the model has")
        self.ring, self.ulysses = axes(mesh)
        self.batch, self.capacity, self.block, self.owner = batch, capacity, block, owner
        self.kv_heads, self.heads, self.replicate_kv = kv_heads, heads, replicate_kv
        self.head_dim, self.head_dim_v = head_dim, head_dim_v
        own = self.plan(heads or kv_heads).keys[self.ulysses.rank]
        slots = self._slots(capacity)
        device = torch.device(device or ("cpu" if mesh is None else mesh.device_type))
        with torch.inference_mode(False):  # written to with and without it
            self.k = torch.zeros((batch, slots, len(own), head_dim), dtype=dtype, device=device)
            self.v = torch.zeros((batch, slots, len(own), self.head_dim_v), dtype=dtype, device=device)
            self.slot_positions = torch.zeros((batch, slots), dtype=torch.int64)
        self.ledger = Ledger.empty(self.ring.size, batch)

    def __repr__(self) -> str:
        sizes = f"batch={self.batch}, capacity={self.capacity}, kv_heads={self.kv_heads}, head_dim={self.head_dim}"
        sizes += f", head_dim_v={self.head_dim_v}, dtype={self.k.dtype}, block={self.block}, owner={self.owner!r}"
        more = f", heads={self.heads}, replicate_kv={self.replicate_kv}" if self.heads else ""
        return f"KVCache({sizes}{more}; lengths={self.lengths})"

    @property
    def lengths(self) -> tuple[int, ...]:
        """By sequence: how long it is, which is the position of its next token. Padding before a prompt counts."""
        return self.ledger.lengths

    @property
    def start(self) -> int | tuple[int, ...]:
        """`lengths`, as `usp.partition(..., start=)` of a further turn wants it."""
        return self.lengths[0] if len(set(self.lengths)) == 1 else self.lengths

    @property
    def counts(self) -> tuple[tuple[int, ...], ...]:
        """[sequence][ring rank]: tokens kept there."""
        return self.ledger.counts

    @property
    def memory_bytes(self) -> int:
        """What this rank holds, used or not: keys, values, and 8 bytes a slot for positions on the CPU."""
        return self.k.nbytes + self.v.nbytes + self.slot_positions.nbytes

    def positions(self, row: int = 0) -> Int[Tensor, " slots"]:
        """Global positions of the tokens of a sequence that this rank keeps, in increasing order, on the CPU.

        Raises:
            ValueError: if there is no such sequence.
        """
        (row,) = self._rows([row])
        return self.slot_positions[row, : self.counts[row][self.ring.rank]]

    def _slots(self, capacity: int) -> int:
        """A rank's room for its share of so many tokens, and a little more."""
        return min(capacity, -(-capacity // self.ring.size) + 2 * max(self.block, self.ulysses.size, 2))

    def reserve(self, capacity: int) -> None:
        """Have room for at least so many tokens of a sequence; what is kept is copied. On every rank.

        Raises:
            ValueError: if it is not a whole number from 1.
        """
        if not isinstance(capacity, int) or isinstance(capacity, bool) or capacity < 1:
            raise ValueError(f"capacity={capacity!r}: a cache needs capacity as a whole number of at least 1")
        more = self._slots(capacity) - self.k.shape[1]
        self.capacity = max(self.capacity, capacity)
        if more > 0:
            with torch.inference_mode(False):
                self.k, self.v = (F.pad(x, (0, 0, 0, 0, 0, more)) for x in (self.k, self.v))
                self.slot_positions = F.pad(self.slot_positions, (0, more))

    def reset(self, rows: Iterable[int] | None = None) -> None:
        """Forget the sequences of these numbers, or all; on every rank. Their next token is at position 0.

        Raises:
            ValueError: if there is no such sequence.
        """
        chosen = range(self.batch) if rows is None else self._rows(rows)
        kept = (Row() if row in chosen else x for row, x in enumerate(self.ledger.rows))
        self.ledger = Ledger(self.ring.size, tuple(kept))

    def truncate(self, lengths: int | Sequence[int] | Tensor) -> None:
        """Forget what is at these positions and behind, one for each sequence or one for all: rejected tokens.

        On every rank. The next token stands at that position, and is dealt as if those behind it had never been.

        Raises:
            ValueError: if a sequence is not that long.
        """
        given = _whole("lengths", [lengths] * self.batch if isinstance(lengths, int) else lengths)
        if len(given) != self.batch or not all(0 <= x <= y for x, y in zip(given, self.lengths, strict=False)):
            raise ValueError(
                f"truncate to {given}: give each of the {self.batch} sequences a length from 0 to what it has, "
                f"{self.lengths}"
            )
        self.ledger = self.ledger.truncated(given)

    def _rows(self, rows: Iterable[int]) -> tuple[int, ...]:
        given = _whole("rows", rows)
        if wrong := sorted(set(given) - set(range(self.batch))):
            raise ValueError(f"rows={wrong}: the cache has the sequences 0 to {self.batch - 1}")
        return given

    def append(
        self,
        k: Float[Tensor, "batch new kv_heads head_dim"],
        v: Float[Tensor, "batch new kv_heads head_dim_v"],
        *,
        new: Sequence[int] | Tensor | None = None,
    ) -> None:
        """Keep more tokens of each sequence: the same whole tensors on every rank, of which each keeps its own.

        Nothing is sent, and ranks are not checked against each other. `decode_attention` does this, and attends.

        Args:
            k, v: all KV heads, in the cache's dtype.
            new: how many of the tokens of each sequence are real; all by default.

        Raises:
            ValueError: if shapes or dtype are other than the cache's, or a sequence has no room.
        """
        self.check_keys(k, v, self.kv_heads)
        counts = self.checked_new(k.shape[1], new)
        self.check_room(self.planned(counts).ledger)
        own = self.plan(self.heads or self.kv_heads).keys[self.ulysses.rank]
        self.store(k[:, :, own.start : own.stop], v[:, :, own.start : own.stop], counts)

    # What prefill and decode are made of.

    def plan(self, heads: int) -> HeadPlan:
        """Which heads each Ulysses rank has, for a model with so many query heads."""
        if self.heads not in (None, heads):
            raise ValueError(f"q has {heads} heads, but the cache was made for heads={self.heads}")
        return HeadPlan(heads, self.kv_heads, self.ulysses.size, self.replicate_kv)

    def checked_new(self, seq: int, new: Sequence[int] | Tensor | None) -> tuple[int, ...]:
        """How many of a call's `seq` tokens are real, by sequence.

        Raises:
            ValueError: if it is not a count for each.
        """
        counts = (seq,) * self.batch if new is None else _whole("new", new)
        if len(counts) != self.batch or not all(0 <= x <= seq for x in counts):
            raise ValueError(
                f"new={counts}: give each of the {self.batch} sequences how many of the {seq} tokens are its own"
            )
        return counts

    def check_keys(self, k: Tensor, v: Tensor, heads: int) -> None:
        """Keys and values of `heads` heads go with what is kept.

        Raises:
            ValueError: naming both.
        """
        check_tensors(k=k, v=v)
        for name, x, dim in (("k", k, self.head_dim), ("v", v, self.head_dim_v)):
            if x.ndim != 4 or (x.shape[0], *x.shape[2:]) != (self.batch, heads, dim):
                raise ValueError(f"{name} is {tuple(x.shape)} and must be ({self.batch}, tokens, {heads}, {dim})")
            if (x.dtype, x.device) != (self.k.dtype, self.k.device):
                raise ValueError(
                    f"{name} is {x.dtype} on {x.device}, but the cache is {self.k.dtype} on {self.k.device}"
                )
        if k.shape[1] != v.shape[1]:
            raise ValueError(f"k {tuple(k.shape)} and v {tuple(v.shape)} have different numbers of tokens")

    def check_room(self, ledger: Ledger) -> None:
        """There is room for all that it says.

        Raises:
            ValueError: naming the sequence and the sizes.
        """
        slots = self.k.shape[1]
        for row, counts in enumerate(ledger.counts):
            if sum(counts) > self.capacity:
                raise ValueError(
                    f"sequence {row} would have {sum(counts)} tokens, but the cache was made for capacity="
                    f"{self.capacity}: make a larger one, or reset or truncate the sequence"
                )
            if max(counts) > slots:
                raise ValueError(
                    f"ring rank {counts.index(max(counts))} would keep {max(counts)} tokens of sequence {row} and has "
                    f"room for {slots} of capacity={self.capacity}: a prefill's tokens stay where its partition has "
                    "them, which for prompts shorter than the longest of a batch is on few ranks in all layouts but "
                    "striped, and for turns of fewer tokens than ranks on the first in all; use striped, "
                    "decode_attention for short turns, owner='shortest', or a larger capacity"
                )

    def planned(self, new: tuple[int, ...]) -> Placement:
        """Where the next tokens go, without storing them."""
        return _placement(self.ledger, new, self.block, self.owner, self.ring.rank)

    def store(self, k: Tensor, v: Tensor, new: tuple[int, ...]) -> None:
        """`append` of checked tensors with this Ulysses rank's heads."""
        ledger, parts = self.planned(new)
        if parts and all(part.length == 1 for part in parts):  # a step: one write for all rows
            rows, tokens, slots, positions, _ = (list(x) for x in zip(*parts, strict=True))
            self.k[rows, slots], self.v[rows, slots] = k[rows, tokens], v[rows, tokens]
            self.slot_positions[rows, slots] = torch.tensor(positions)
        else:
            for row, token, slot, position, length in parts:
                here, there = slice(slot, slot + length), slice(token, token + length)
                self.k[row, here], self.v[row, here] = k[row, there], v[row, there]
                self.slot_positions[row, here] = torch.arange(position, position + length)
        self.ledger = ledger

    def store_turn(
        self, k: Tensor, v: Tensor, tokens: Partition, spans: Sequence[Sequence[Span]], ledger: Ledger
    ) -> None:
        """A prefill's keys and values (batch, seq_ring, heads, dim), of which the positions in `spans` stay, by row.

        `ledger` is what is kept then.
        """
        for row, kept in enumerate(spans):
            slot, index = self.counts[row][self.ring.rank], 0
            for run in tokens.runs(self.ring.rank, row):
                for span in kept:
                    part = run.between(*span)
                    here = slice(slot, slot + part.count)
                    there = slice(index + (part.start - run.start) // run.step, None)
                    self.k[row, here] = k[row, there][: part.count]
                    self.v[row, here] = v[row, there][: part.count]
                    self.slot_positions[row, here] = torch.arange(part.count) * part.step + part.start
                    slot += part.count
                index += run.count
        self.ledger = ledger


class Part(NamedTuple):
    """New tokens of a row that one rank keeps side by side: `length` of them from number `token` on."""

    row: int
    token: int
    slot: int
    position: int
    length: int


class Placement(NamedTuple):
    """A ledger with more tokens, and which of them one rank keeps."""

    ledger: Ledger
    parts: tuple[Part, ...]


@lru_cache(maxsize=8)  # the layers of a model keep the same tokens
def _placement(ledger: Ledger, new: tuple[int, ...], block: int, owner: str, rank: int) -> Placement:
    after = ledger.dealt(new, block, owner)
    parts = []
    for row, count in enumerate(new):
        position = first = after.lengths[row] - count
        while position < first + count:
            ours, end = after.dealt_to(row, position)
            if ours == rank:
                parts.append(Part(row, position - first, after.below(rank, row, position), position, end - position))
            position = end
    return Placement(after, tuple(parts))


def _whole(name: str, values: Iterable[int] | Tensor) -> tuple[int, ...]:
    """Whole numbers, from whatever holds them.

    Raises:
        ValueError: if something else is among them.
    """
    try:
        given = getattr(values, "tolist", lambda: list(values))()
        if any(isinstance(x, bool) for x in given):
            raise TypeError
        return tuple(operator.index(x) for x in given)
    except TypeError:
        raise ValueError(f"{name}={values!r} does not hold whole numbers, one a sequence") from None
