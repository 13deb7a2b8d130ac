"""Everything that leaves a rank: hops, all-to-all, gathers, agreement. All of it is counted here.

Groups are known by name (a string survives a custom-op boundary); the name "" is a group of one, where
nothing is sent.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from usp.blocks import Hop, Step
from usp.mesh import Axis


def _group(name: str) -> dist.ProcessGroup:
    return distributed_c10d._resolve_process_group(name)  # pyright: ignore


def size_and_rank(group: str) -> tuple[int, int]:
    """Of a group, and this process's place in it."""
    process_group = _group(group)
    return process_group.size(), process_group.rank()


# ---------------------------------------------------------------------------------------------------
# Counting.


@dataclass
class Traffic:
    """What this rank sent and computed while being measured, and what sending cost it.

    Kinds: "ring" (keys and values on hops), "ring_grad" (their gradients), "all_gather" and "reduce_scatter"
    (the same, when gathered), "all_to_all" (q, k, v, out and their gradients), "lse", "joint" (what joint queries
    see on other ranks), "unshard", "loss" (totals and counts), "logits" (from which a model's next tokens are drawn),
    "control" (agreement; 16 bytes a group); in prefill and decode also "queries" (on hops or gathered), "partials"
    (out and lse of a part of the keys), "out" (gathered). A message is one send to one peer, or one collective.
    """

    bytes: Counter[str] = field(default_factory=Counter)
    to_rank: Counter[int] = field(default_factory=Counter)  # bytes by the job's rank that got them: hops, all-to-alls
    messages: Counter[str] = field(default_factory=Counter)
    kernels: Counter[str] = field(default_factory=Counter)  # block kernel calls by backend
    cpu_s: float = 0.0  # CPU time of the calling threads inside these operations; waiting takes none

    @property
    def payload_bytes(self) -> int:
        """Bytes of all kinds but "control"."""
        return sum(count for kind, count in self.bytes.items() if kind != "control")


_measuring: list[Traffic] = []  # backward runs on other threads, where context variables do not reach


@contextmanager
def measure_traffic() -> Iterator[Traffic]:
    """Count what this rank sends, forward and backward, inside the `with`."""
    traffic = Traffic()
    _measuring.append(traffic)
    try:
        yield traffic
    finally:
        _measuring[:] = [x for x in _measuring if x is not traffic]


def _sent(kind: str, size_bytes: int, group: str = "", to: Mapping[int, int] | None = None) -> None:
    """One message; `to` are its bytes by rank of the group, where it is known who gets them."""
    for traffic in _measuring:
        traffic.bytes[kind] += size_bytes
        traffic.messages[kind] += 1
        for peer, peer_bytes in (to or {}).items():
            traffic.to_rank[dist.get_global_rank(_group(group), peer)] += peer_bytes


@contextmanager
def _operation(what: str) -> Iterator[None]:
    """Around every call of torch.distributed: time it, and say what it means that it failed."""
    start_s = time.thread_time()
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"{what} failed ({error}). If another rank stayed away, stopped or never made this call, this process "
            "group cannot be used again: rebuild it (destroy_process_group, init_process_group, init_mesh)."
        ) from error
    finally:
        for traffic in _measuring:
            traffic.cpu_s += time.thread_time() - start_s


def ran(backend: str) -> None:
    """Count one kernel call."""
    for traffic in _measuring:
        traffic.kernels[backend] += 1


# ---------------------------------------------------------------------------------------------------
# Hops.


class Exchange:
    """Messages between the ranks of a group, one step after another.

    `start` posts a step's hops and returns the buffers being filled, `wait` ends the step. Buffers come from
    `empty` and go back by `recycle`; they belong to the exchange, so several may be under way. Each has room for the
    largest message, `largest` elements, so that any of them serves for any.
    """

    def __init__(self, group: str, kind: str, largest: int, dtype: torch.dtype, device: torch.device):
        self.group, self.kind, self.largest, self.dtype, self.device = group, kind, largest, dtype, device
        self._free: list[Tensor] = []
        self._pending: list[dist.Work] = []

    def empty(self, numel: int) -> Tensor:
        whole = self._free.pop() if self._free else torch.empty(self.largest, dtype=self.dtype, device=self.device)
        return whole[:numel]

    def recycle(self, buffer: Tensor) -> None:
        self._free.append(buffer.as_strided((self.largest,), (1,)))

    def start(self, send: Sequence[tuple[Hop, Tensor]], receive: Sequence[tuple[Hop, int]]) -> list[Tensor]:
        buffers = [self.empty(numel) for _, numel in receive]
        if send or receive:
            group = _group(self.group)
            operations = [
                dist.P2POp(dist.isend, tensor, group=group, group_peer=hop.peer, tag=hop.source) for hop, tensor in send
            ]
            operations += [
                dist.P2POp(dist.irecv, buffer, group=group, group_peer=hop.peer, tag=hop.source)
                for (hop, _), buffer in zip(receive, buffers, strict=True)
            ]
            for hop, tensor in send:
                _sent(self.kind, tensor.nbytes, self.group, {hop.peer: tensor.nbytes})
            with _operation("a hop"):
                self._pending = dist.batch_isend_irecv(operations)
        return buffers

    def travel(
        self, steps: Sequence[Step], numels: Sequence[int], own: int, message: Callable[[Tensor], object]
    ) -> Iterator[tuple[Step, Tensor | None]]:
        """Step by step, the message of the step's source; the next ones travel meanwhile.

        None for this rank's own, source `own`, which `message` writes into a buffer if it is to travel, and in steps
        without a source. numels[source] are the elements of each message.
        """
        held: dict[int, Tensor] = {}
        if numels[own]:
            message(held.setdefault(own, self.empty(numels[own])))
        for step in steps:
            receive = [(hop, numels[hop.source]) for hop in (step.receive,) if hop]
            arriving = self.start([(hop, held[hop.source]) for hop in step.send], receive)
            yield step, None if step.source in (own, None) else held[step.source]
            self.wait()
            for source in step.spent:
                if source in held:
                    self.recycle(held.pop(source))
            held.update((hop.source, buffer) for (hop, _), buffer in zip(receive, arriving, strict=True))

    def wait(self) -> None:
        with _operation("a hop"):
            for work in self._pending:
                work.wait()
        self._pending = []


# ---------------------------------------------------------------------------------------------------
# Collectives.


def all_to_all(x: Tensor, send: Sequence[int], receive: Sequence[int], group: str, kind: str) -> Tensor:
    """x's first send[0] rows go to rank 0, the next send[1] to rank 1, ...; receive[n] rows come from rank n.

    The result has sum(receive) rows, in the order of the ranks. Without autograd.
    """
    process_group = _group(group)
    out = x.new_empty((sum(receive), *x.shape[1:]))
    row_bytes = math.prod(x.shape[1:]) * x.element_size()
    to = {n: rows * row_bytes for n, rows in enumerate(send) if rows and n != process_group.rank()}
    _sent(kind, sum(to.values()), group, to)
    with _operation("an all-to-all"):
        dist.all_to_all_single(out, x.contiguous(), list(receive), list(send), group=process_group)
    return out


def all_gather(x: Tensor, group: str, kind: str) -> Tensor:
    """(...) of every rank, as (ranks, ...); without autograd."""
    process_group = _group(group)
    out = x.new_empty((process_group.size(), *x.shape))
    _sent(kind, x.numel() * x.element_size() * (process_group.size() - 1))
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # new in 2.13
    with _operation("an all-gather"):
        gather(out.flatten(0, 1), x.contiguous(), group=process_group)
    return out


def all_gather_uneven(x: Tensor, counts: Sequence[int], group: str, kind: str) -> Tensor:
    """(counts[n], ...) of each rank n, one behind the other; without autograd."""
    if len(set(counts)) == 1:
        return all_gather(x, group, kind).flatten(0, 1)
    return all_to_all(torch.cat([x] * len(counts)), [len(x)] * len(counts), counts, group, kind)


def all_reduce(x: Tensor, group: str, kind: str, *, largest: bool = False) -> None:
    """The sum over ranks, or the largest, in place; counted as a reduce-scatter and an all-gather."""
    process_group = _group(group)
    _sent(kind, 2 * (process_group.size() - 1) * x.numel() * x.element_size() // process_group.size())
    with _operation("an all-reduce"):
        dist.all_reduce(x, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=process_group)


def reduce_scatter(x: Tensor, group: str, kind: str) -> Tensor:
    """(ranks, ...) of every rank to the sum over ranks of this rank's part (...), in rank order."""
    ones = [1] * len(x)
    return all_to_all(x, ones, ones, group, kind).sum(0)


# ---------------------------------------------------------------------------------------------------
# Agreement.

_ERROR = 1 << 62


def agree(axes: Sequence[Axis], facts: Mapping[str, object], error: str | None) -> None:
    """All ranks of the axes make the same call, or all of them raise.

    One all_reduce a group before any payload (16 bytes, kind "control"); only if something differs do the ranks
    tell each other what. The groups stay usable.

    Args:
        axes: the mesh's axes; together their groups connect all ranks.
        facts: what must be equal on all ranks, by name.
        error: what this rank found wrong with its own call.

    Raises:
        ValueError: with this rank's own error, or what the others reported, or what differs and where.
    """
    groups = [axis.group for axis in axes if axis.size > 1]
    if not groups:
        if error:
            raise ValueError(error)
        return
    digest = hashlib.blake2b(repr(sorted(facts.items())).encode(), digest_size=7).digest()
    mine = int.from_bytes(digest, "big")
    pair = torch.tensor([mine, -mine] if error is None else [_ERROR, _ERROR], device=_control_device(groups[0]))
    with _operation("the agreement at the start of a call"):
        for group in groups:
            _sent("control", pair.nbytes)
            dist.all_reduce(pair, dist.ReduceOp.MAX, group=_group(group))
    highest, negated = pair.tolist()
    if highest == -negated:
        return
    reports: list[tuple[str, dict[str, str], str | None]] = [
        (str(dist.get_rank()), {name: str(value) for name, value in facts.items()}, error)
    ]
    for group in groups:
        process_group = _group(group)
        gathered: list[list] = [[] for _ in range(process_group.size())]
        dist.all_gather_object(gathered, reports, group=process_group)
        reports = [report for part in gathered for report in part]
    raise ValueError(error or _difference(reports))


T = TypeVar("T")


def agreed(axes: Sequence[Axis], check: Callable[[], T], facts: Callable[[T], Mapping[str, object]], *, ask: bool) -> T:
    """What `check` finds of this rank's call, if every rank's call is right and all are the same.

    Args:
        check: raises what is wrong with the call.
        facts: what must be equal on all ranks, by name, of what was found.
        ask: the other ranks. Without it only this rank's call is looked at.

    Raises:
        ValueError: on all ranks, as `agree` does.
    """
    ask = ask and any(axis.size > 1 for axis in axes)  # facts may be work, such as a hash of a batch
    try:
        found = check()
    except Exception as mistake:
        if ask:
            text = str(mistake) if isinstance(mistake, ValueError) else f"{type(mistake).__name__}: {mistake}"
            agree(axes, {}, text)
        raise
    if ask:
        agree(axes, facts(found), None)
    return found


def _difference(reports: list[tuple[str, dict[str, str], str | None]]) -> str:
    if failed := [f"rank {rank}: {error}" for rank, _, error in reports if error]:
        return f"another rank refused this call, so it was not begun: {failed[0]}"
    lines = []
    for name in dict.fromkeys(name for _, facts, _ in reports for name in facts):
        holders: dict[str, list[str]] = {}
        for rank, facts, _ in reports:
            holders.setdefault(facts.get(name, "absent"), []).append(rank)
        if len(holders) > 1:
            lines.append(f"{name}: " + ", ".join(f"{value} on rank {', '.join(r)}" for value, r in holders.items()))
    return "ranks made different calls, so none was begun. " + "; ".join(lines)


def _control_device(group: str) -> torch.device:
    backend = dist.get_backend(_group(group))
    return torch.device("cuda", torch.cuda.current_device()) if "nccl" in backend else torch.device("cpu")
