"""What a training loop needs: batches that are spread over the ranks of a sequence, their targets and their loss.

Note [Batches]
~~~~~~~~~~~~~~
All ranks of a sequence (ring x Ulysses) have the same whole batch; each data-parallel replica has another one. From
the whole batch, before anything is cut, follow two things that a shard alone no longer shows: the target of each
token, which may be on another rank, and which tokens see each other. So labels are shifted and documents are found
first, and then everything is cut by one index.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from usp import comm
from usp.masks import Mask
from usp.merging import accumulator_dtype
from usp.mesh import Axis, axes, data_axis
from usp.partitions import Layout, Partition
from usp.ring import numbered
from usp.sharding import checked_axes, partition, shard

IGNORED = -100  # the target of what does not count, as in torch.nn.functional.cross_entropy
TARGETS = ("labels", "shift_labels")
GRADIENTS = ("mean", "sum")


class Spread:
    """How a batch lies on the mesh: who has which tokens, and what they see of each other.

    `shard_batch` makes it, under the key "usp". A model that is not of transformers reads `tokens` and `mask` from it
    and gives them to `hybrid_attention`.
    """

    def __init__(self, tokens: Partition, show: Callable[[bool, int | None], Mask], last: Tensor | None = None):
        self.tokens, self.last = tokens, last  # `last`: the largest of all position ids
        self.number = numbered(self)
        self._show = show
        self._masks: dict[tuple[bool, int | None], Mask] = {}

    def __repr__(self) -> str:
        return f"Spread({self.tokens}, {self.mask(causal=True)})"

    def mask(self, *, causal: bool, window: int | None = None) -> Mask:
        """The documents of the batch, with causality and window as an attention layer wants them; made once each."""
        if (causal, window) not in self._masks:
            self._masks[causal, window] = self._show(causal, window)
        return self._masks[causal, window]


def shard_batch(
    batch: Mapping[str, Any], mesh: DeviceMesh | None, tokens: Partition, *, check_ranks: bool = True
) -> dict[str, Any]:
    """This rank's tokens of a whole batch, which every rank of the sequence has.

    Documents are what `position_ids` that restart at 0 say, or the numbers of a 2D `attention_mask`, whose zeros are
    padding. Nobody sees another's document, and no target crosses one: the last token of a document has none, nor has
    padding.

    Args:
        batch: tensors (batch, seq, ...) by name. Those with a meaning here, all optional: "input_ids",
            "inputs_embeds", "labels" (not shifted: what is at each token), "shift_labels" (what each token is to
            say), "position_ids" (also (1, seq)), "attention_mask". Every other tensor is cut along with them. None is
            left out; plain numbers stay.
        tokens: a partition of as many tokens as the batch has.
        check_ranks: compare a hash of all tensors between the ranks of the sequence first, since ranks that got other
            samples compute nonsense without an error.

    Returns:
        a dict with each tensor (batch, tokens.seq_local, ...), copies, and besides

        - "position_ids", for rotary embeddings: as given, or counted from 0;
        - "shift_labels", if there were labels: -100 where there is no target; "labels" are cut too;
        - "usp", a `Spread`. It stands for the attention mask, which is left out.

        Padding at the end, up to a multiple of the ranks, is 0, and -100 in labels.

    Raises:
        ValueError: on every rank, for shapes that do not fit, masks that are not (batch, seq), position ids that
            neither go on nor restart at 0, or ranks with different batches (naming which tensors differ).
    """

    def check() -> _Whole:
        checked_axes(mesh, tokens)
        if tokens.starts != (0,):
            raise ValueError(
                f"a batch is a sequence from position 0, but tokens starts at {tokens.start}: leave start out"
            )
        tensors, others = sorted_out(batch, tokens.seq)
        return _Whole(tensors, others, documents_of(tensors), tokens)

    whole = comm.agreed(axes(mesh), check, _Whole.facts, ask=check_ranks)
    return whole.others | cut(whole.tensors, whole.documents, mesh, tokens)


class _Whole(NamedTuple):
    """A batch that has been found right."""

    tensors: dict[str, Tensor]
    others: dict[str, Any]
    documents: Tensor | None
    tokens: Partition

    def facts(self) -> dict[str, object]:
        """What the ranks of a sequence must have alike."""
        same: dict[str, object] = {
            f"batch[{name!r}] (ranks of a sequence draw the same samples: usp.sampler)": digest(x)
            for name, x in self.tensors.items()
        }
        return same | {"what is no tensor": sorted(map(repr, self.others.items())), "tokens": self.tokens}


def cut(
    tensors: dict[str, Tensor], documents: Tensor | None, mesh: DeviceMesh | None, tokens: Partition
) -> dict[str, Any]:
    """`shard_batch` of what has been found right."""
    some = next(iter(tensors.values()))
    tensors = {name: x for name, x in tensors.items() if name != "attention_mask"}
    if "position_ids" not in tensors:
        tensors["position_ids"] = torch.arange(tokens.seq, device=some.device)[None]
    if "labels" in tensors and "shift_labels" not in tensors:
        tensors["shift_labels"] = shifted(tensors["labels"], documents)
    shards = {name: shard(x, mesh, tokens, fill=IGNORED if name in TARGETS else 0) for name, x in tensors.items()}
    return shards | {"usp": Spread(tokens, shown(documents), tensors["position_ids"].max())}


def batch_mask(batch: Mapping[str, Any], *, causal: bool, window: int | None = None) -> Mask:
    """What the tokens of a whole batch see of each other: for `usp.partition(..., "balanced", mask=)`.

    Raises:
        ValueError: as `shard_batch`.
    """
    return shown(documents_of(sorted_out(batch, None)[0]))(causal, window)


def shifted(labels: Int[Tensor, "batch seq"], documents: Int[Tensor, "rows seq"] | None = None) -> Tensor:
    """What each token is to say: the label of the next token if that is of its document, else -100.

    Args:
        documents: the number of each token's document, 0 for padding; one row for all, or one a batch row.
    """
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    if documents is None:
        return targets
    following = F.pad(documents[:, 1:], (0, 1))
    return torch.where((documents == following) & (documents != 0), targets, IGNORED)


def sorted_out(batch: Mapping[str, Any], seq: int | None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a batch, and what is none.

    Raises:
        ValueError: naming what does not fit.
    """
    if not isinstance(batch, Mapping):
        raise ValueError(f"the batch is a {type(batch).__name__}: give a dict of tensors by name")
    tensors = {name: x for name, x in batch.items() if isinstance(x, Tensor) and x.ndim}
    others = {name: x for name, x in batch.items() if name not in tensors and x is not None}
    if "usp" in batch:
        raise ValueError("the batch has a key 'usp': it has been sharded already")
    if not tensors:
        raise ValueError(f"the batch has no tensors, only {sorted(batch)}: give 'input_ids' (batch, seq)")
    if wrong := [name for name, x in others.items() if not isinstance(x, int | float | Tensor)]:
        raise ValueError(f"batch[{wrong[0]!r}] is a {type(others[wrong[0]]).__name__}: give tensors, numbers or None")
    first = next((name for name in ("input_ids", "inputs_embeds", "labels") if name in tensors), next(iter(tensors)))
    count, length = (*tensors[first].shape, 0)[:2]
    length = length if seq is None else seq
    for name, x in tensors.items():
        shape = tuple(x.shape)
        if name == "attention_mask" and x.ndim != 2:
            raise ValueError(
                f"attention_mask is {shape}: give (batch, seq), 0 where padding is; a dense mask would make every rank "
                "compute and send everything, describe it by a usp.Mask instead"
            )
        if name == "position_ids" and x.ndim != 2:
            raise ValueError(f"position_ids is {shape}: give (batch, seq) or (1, seq)")
        if (name == "labels" and x.ndim != 2) or (name in TARGETS and not x.dtype.is_signed):
            raise ValueError(f"{name} is {shape} of {x.dtype}: give (batch, seq) of a type that holds {IGNORED}")
        if x.ndim < 2 or x.shape[0] not in ((count, 1) if name == "position_ids" else (count,)) or x.shape[1] != length:
            raise ValueError(
                f"batch[{name!r}] is {shape}, but the batch has {count} rows (of {first!r}) of {length} tokens"
                f"{'' if seq is None else ', as the partition says'}: every tensor is (batch, seq, ...), whole; leave "
                "out what is not cut by tokens"
            )
    return tensors, others


def documents_of(tensors: dict[str, Tensor]) -> Tensor | None:
    """The number of each token's document, 0 for padding, (rows, seq); None if all is one document.

    Raises:
        ValueError: naming what says nothing about documents.
    """
    documents = None
    if (mask := tensors.get("attention_mask")) is not None:
        documents = mask.to(torch.int64)
        if bool((documents != mask).any()) or bool((documents < 0).any()):
            raise ValueError(
                f"attention_mask holds {mask[(documents != mask) | (documents < 0)][0].item()}: 0 is padding, other "
                "tokens have the number of their document; describe what an additive mask says by a usp.Mask instead"
            )
    if (positions := tensors.get("position_ids")) is not None:
        documents = _told_apart(positions, documents)
    if documents is None or bool(((documents == documents[0, 0]) & (documents != 0)).all()):
        return None
    return documents[:1] if bool((documents == documents[:1]).all()) else documents  # one row serves for all


def _told_apart(positions: Tensor, documents: Tensor | None) -> Tensor | None:
    """Documents, told apart where positions restart too. Of padding, positions may be anything."""
    going_on = (positions == torch.arange(positions.shape[1], device=positions.device)).all(1)
    if bool(going_on.all()):
        return documents
    if documents is None:
        documents = torch.ones_like(positions, dtype=torch.int64)
    positions, going_on = positions.expand(len(documents), -1), going_on.expand(len(documents))
    real = documents != 0
    rows, columns = real.nonzero(as_tuple=True)
    at = positions[rows, columns]
    first = F.pad(rows[1:] != rows[:-1], (1, 0), value=True)[: len(rows)]
    begins = first | ((at == 0) & ~going_on[rows])
    follows = at == F.pad(at[:-1], (1, 0)) + 1
    if bool((wrong := ~going_on[rows] & (at != 0) & (first | ~follows)).any()):
        n = int(wrong.nonzero()[0])
        raise ValueError(
            f"position_ids holds {at[n]} at index {columns[n]} of row {rows[n]}: in a document they count from 0 by 1, "
            "and each 0 begins another; give those of the whole sequence, and the attention_mask if there is padding"
        )
    counted = torch.zeros_like(documents)
    counted[rows, columns] = begins.cumsum(0)
    return torch.where(real, documents * (len(at) + 1) + counted, 0)


def shown(documents: Tensor | None) -> Callable[[bool, int | None], Mask]:
    """The mask of documents by their numbers, for a causality and a window."""
    if documents is None:
        return Mask
    begins = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
    ends = begins.roll(-1, 1)
    spans: list[list[tuple[int, int]]] = [[] for _ in documents]
    numbers: list[list[int]] = [[] for _ in documents]
    (rows, firsts), (_, lasts) = begins.nonzero().T.tolist(), ends.nonzero().T.tolist()
    for row, first, last, number in zip(rows, firsts, lasts, documents[begins].tolist(), strict=True):
        if number:
            spans[row].append((first, last + 1))
            numbers[row].append(number)
    if any(len(set(row)) < len(row) for row in numbers):  # documents with holes
        return lambda causal, window: Mask.from_attention_mask(documents.tolist(), causal=causal, window=window)
    return lambda causal, window: Mask(causal, window, documents=tuple(map(tuple, spans)))


_PIECE = 1 << 22  # bytes that are hashed at a time: embeddings may be large, and this makes copies
_FACTORS = (-0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)  # splitmix64's: each bit reaches all others


def digest(x: Tensor) -> tuple[tuple[int, ...], str, int]:
    """Shape, dtype, and a hash of the bytes and their order."""
    flat = x.detach().contiguous().flatten().view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for first in range(0, len(flat), _PIECE):
        piece = flat[first : first + _PIECE]
        words = F.pad(piece, (0, -len(piece) % 8)).view(torch.int64)
        mixed = words + torch.arange(len(words), device=x.device) * _FACTORS[0]
        for factor, bits in zip(_FACTORS[1:], (30, 27), strict=True):
            mixed = (mixed ^ _shifted_down(mixed, bits)) * factor
        total = total * _FACTORS[0] + (mixed ^ _shifted_down(mixed, 31)).sum()
    return tuple(x.shape), str(x.dtype), int(total)


def _shifted_down(x: Tensor, bits: int) -> Tensor:
    """Without copies of the sign, by which x and ~x would come to the same."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


# ---------------------------------------------------------------------------------------------------
# The loss.


def sequence_parallel_loss(
    logits: Float[Tensor, "batch seq_local vocabulary"],
    targets: Int[Tensor, "batch seq_local"],
    mesh: DeviceMesh | None,
    *,
    num_items: int | Tensor | None = None,
    gradients: str = "mean",
    check_ranks: bool = True,
) -> Float[Tensor, ""]:
    """Mean cross entropy over the targets of all ranks and replicas that are not -100; the same value on every rank.

    A rank without a target adds 0. If nobody has one, the loss is 0. Logits of ignored tokens may be anything, NaN too.

    Args:
        targets: `shard_batch`'s "shift_labels".
        mesh: with an axis "data", replicas count too.
        num_items: divide by this many targets instead, for gradient accumulation: `count_targets` of all the
            micro-batches of a step.
        gradients: what will be done with the gradients of the ranks: "mean", as DDP and FSDP2 do over data x ring x
            ulysses, or "sum". The gradient, not the value, is scaled for it (docs/gradients.md).
        check_ranks: let the ranks agree first.

    Raises:
        ValueError: on every rank, if shapes, targets or options do not fit.
    """

    def check() -> float | None:
        if logits.shape[:-1] != targets.shape or targets.is_floating_point() or not targets.dtype.is_signed:
            raise ValueError(
                f"logits {tuple(logits.shape)} and targets {tuple(targets.shape)} of {targets.dtype}: give "
                "(batch, seq_local, vocabulary) and the targets of these tokens, whole numbers"
            )
        check_gradients(gradients)
        if not torch.compiler.is_compiling():  # this looks at numbers
            check_targets(targets, logits.shape[-1])
        return None if num_items is None else checked_items(num_items)

    def facts(items: float | None) -> dict[str, object]:
        return {"vocabulary": logits.shape[-1], "gradients": gradients, "num_items": items}

    everyone = (*axes(mesh), data_axis(mesh))
    items = comm.agreed(everyone, check, facts, ask=check_ranks)
    counted = targets != IGNORED
    # Not selected, as their number would have to be known on the host.
    logs = F.log_softmax(logits.masked_fill(~counted[..., None], 0.0), -1, dtype=accumulator_dtype(logits.dtype))
    total = F.nll_loss(logs.flatten(0, -2), targets.flatten().long(), ignore_index=IGNORED, reduction="sum")
    return mean_over_ranks(total, counted.sum(), mesh, num_items=items, gradients=gradients)


def mean_over_ranks(
    total: Float[Tensor, ""],
    count: int | Tensor,
    mesh: DeviceMesh | None,
    *,
    num_items: float | Tensor | None = None,
    gradients: str = "mean",
) -> Float[Tensor, ""]:
    """Any loss that adds up over tokens: the ranks' totals over the ranks' counts, with the right gradient.

    Args:
        total: this rank's sum, over its own tokens.
        count: how many it summed. All ranks of data x ring x ulysses call this; 0 is fine.
        num_items, gradients: as in `sequence_parallel_loss`.

    Raises:
        ValueError: for another word than "mean" or "sum", or what is not one number. Other ranks are not asked.
    """
    check_gradients(gradients)
    everyone = (*axes(mesh), data_axis(mesh))
    shapes = {"total": tuple(total.shape), "count": tuple(getattr(count, "shape", ()))}
    if wrong := [f"{name} is {shape}" for name, shape in shapes.items() if shape]:
        raise ValueError(f"{wrong[0]}: give one number, the sum over this rank's tokens")
    sums = torch.stack([x.to(total.device, torch.float64) for x in (total.detach(), torch.as_tensor(count))])
    whole, found = _summed(sums, everyone)
    items = found if num_items is None else found.new_tensor(checked_items(num_items))
    items = torch.where(items == 0, 1.0, items)
    factor = math.prod([axis.size for axis in everyone]) if gradients == "mean" else 1
    return _Mean.apply(total, (whole / items).to(total.dtype), (factor / items).to(total.dtype))  # pyright: ignore[reportReturnType]


class _Mean(torch.autograd.Function):
    """`value`, whose gradient in `total` is `slope`."""

    @staticmethod
    def forward(total: Tensor, value: Tensor, slope: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        (slope,) = ctx.saved_tensors
        return grad * slope, None, None


def count_targets(*targets: Int[Tensor, ...], mesh: DeviceMesh | None) -> int:
    """How many targets are not -100, over all given tensors, ranks and replicas: the `num_items` of a step.

    A rank may have another number of tensors than others, or none.
    """
    device = targets[0].device if targets else torch.device("cpu" if mesh is None else mesh.device_type)
    count = torch.zeros(1, dtype=torch.int64, device=device)
    for x in targets:
        count += (x != IGNORED).sum()
    return int(_summed(count, (*axes(mesh), data_axis(mesh))))


def _summed(x: Tensor, everyone: tuple[Axis, ...]) -> Tensor:
    """Over all ranks of the axes; without autograd."""
    return torch.ops.usp.summed(x, [axis.group for axis in everyone if axis.size > 1])


torch.library.define("usp::summed", "(Tensor x, str[] groups) -> Tensor")  # so that a loss does not break a graph


@torch.library.impl("usp::summed", "CompositeExplicitAutograd")
def _sum(x: Tensor, groups: list[str]) -> Tensor:
    x = x.clone()
    for group in groups:
        comm.all_reduce(x, group, "loss")
    return x


@torch.library.register_fake("usp::summed")
def _(x: Tensor, groups: list[str]) -> Tensor:
    return torch.empty_like(x)


def check_targets(targets: Tensor, vocabulary: int) -> Tensor:
    """Which of them count; the others are -100.

    To be asked before the ranks agree: a kernel's own complaint would end one rank, and the others would wait for it.

    Raises:
        ValueError: naming one that is not in the vocabulary.
    """
    counted = targets != IGNORED
    if bool((wrong := counted & ((targets < 0) | (targets >= vocabulary))).any()):
        raise ValueError(
            f"targets hold {targets[wrong][0]}, but logits are of a vocabulary of {vocabulary}: targets are from 0 to "
            f"{vocabulary - 1}, or {IGNORED} where there is none"
        )
    return counted


def check_gradients(gradients: str) -> None:
    if gradients not in GRADIENTS:
        raise ValueError(f"gradients={gradients!r} is not one of {GRADIENTS}: what is done with the ranks' gradients")


def checked_items(num_items: float | Tensor) -> float:
    if (isinstance(num_items, Tensor) and num_items.numel() != 1) or not 0 <= float(num_items) < math.inf:
        raise ValueError(f"num_items={num_items}: give the number of all targets of a step, as count_targets does")
    return float(num_items)


# ---------------------------------------------------------------------------------------------------
# Data.


def sampler(
    dataset: Sized, mesh: DeviceMesh | None, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False
) -> DistributedSampler:
    """PyTorch's DistributedSampler over the data axis: ranks of one sequence draw the same samples, replicas others."""
    data = data_axis(mesh)
    how = {"num_replicas": data.size, "rank": data.rank, "shuffle": shuffle, "seed": seed, "drop_last": drop_last}
    return DistributedSampler(dataset, **how)  # pyright: ignore[reportArgumentType]


class ShardedLoader:
    """Batches of a DataLoader, each spread over the ranks of a sequence by `shard_batch`.

    Every rank loads whole batches. Ranks of one sequence must get the same ones and data-parallel replicas others, for
    which `sampler` is made; a hash of every batch is compared between the ranks of a sequence. All ranks and replicas
    go through the loader together: an error on one of them, or an end before the others', is an error on all.

    Args:
        loader: gives dicts of tensors (batch, seq, ...).
        layout: of each batch; "balanced" balances the documents of each, causal.
        check_ranks: see `shard_batch`.

    Raises:
        ValueError: if there are replicas and the loader's sampler does not deal samples to them.
    """

    def __init__(self, loader: DataLoader, mesh: DeviceMesh | None, layout: Layout | str, *, check_ranks: bool = True):
        data, drawn = data_axis(mesh), loader.sampler
        if data.size > 1:
            dealt = (getattr(drawn, "num_replicas", None), getattr(drawn, "rank", None))
            if dealt != (data.size, data.rank):
                raise ValueError(
                    f"the mesh has data={data.size} and this rank is replica {data.rank}, but the loader's sampler is "
                    f"a {type(drawn).__name__} of num_replicas={dealt[0]}, rank={dealt[1]}: give the DataLoader "
                    "sampler=usp.sampler(dataset, mesh)"
                )
        self.loader, self.mesh, self.layout, self.check_ranks = loader, mesh, layout, check_ranks

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        batches = iter(self.loader)
        while (whole := self._next(batches)) is not None:
            yield whole.others | cut(whole.tensors, whole.documents, self.mesh, whole.tokens)

    def _next(self, batches: Iterator[Any]) -> _Whole | None:
        """The next batch, the same on the ranks of a sequence; None if nobody has another."""
        end: Any = object()

        def check() -> _Whole | None:
            batch = next(batches, end)
            if batch is end:
                return None
            tensors, others = sorted_out(batch, None)
            documents = documents_of(tensors)
            mask = shown(documents)(True, None) if self.layout == Layout.BALANCED else None
            tokens = partition(next(iter(tensors.values())).shape[1], self.mesh, self.layout, mask=mask)
            return _Whole(tensors, others, documents, tokens)

        def left(whole: _Whole | None) -> dict[str, object]:
            return {"another batch": whole is not None}

        def facts(whole: _Whole | None) -> dict[str, object]:
            return left(whole) | (whole.facts() if whole else {})

        def sequence() -> _Whole | None:
            return comm.agreed(axes(self.mesh), check, facts, ask=self.check_ranks)

        # Replicas have other batches, but must not wait in a collective for one that has refused its own.
        return comm.agreed((data_axis(self.mesh),), sequence, left, ask=self.check_ranks)

    def set_epoch(self, epoch: int) -> None:
        """Shuffle anew, the same on every rank, if the loader's sampler shuffles by epochs; for trainers, which ask."""
        getattr(self.loader.sampler, "set_epoch", lambda _: None)(epoch)
