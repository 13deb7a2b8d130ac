"""Which mesh to take: every way to spread a model, or one attention call, over a cluster, by predicted time.

Note [Plans]
~~~~~~~~~~~~
All ranks of the cluster are used: data x ring x ulysses x tensor of them. Weights are whole on every rank, sharded
over all of them (fsdp) or cut by tensor parallel ranks of one node (tp). Of memory options the first that fits is
taken: the MLP of all tokens at once, then in tiles; when training, all activations kept, then layers' inputs alone.
What does not fit at all, or has more ranks than heads, tokens or sequences, is listed with that reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from usp.cost import counts
from usp.cost.hardware import Cluster
from usp.cost.memory import Memory, largest_batch, memory
from usp.cost.timing import PHASES, Prediction, check_heads, predict, predict_model
from usp.cost.workload import INNER, Model, Plan, Workload, check_sizes
from usp.inference.volumes import DECODE
from usp.masks import Mask
from usp.partitions import Layout

TILE = 8192  # tokens of an MLP tile, where all at once do not fit
LAYOUTS = (Layout.ZIGZAG, Layout.STRIPED, Layout.CONTIGUOUS)  # of equals the first is better


@dataclass(frozen=True)
class Candidate:
    """One plan: what it takes, or why it cannot be."""

    plan: Plan
    reason: str = ""  # why not; empty if it can be
    prediction: Prediction | None = None  # of the whole batch
    memory: Memory | None = None  # of the rank that holds most
    largest_batch: int = 0  # sequences of all replicas that fit
    layer_bytes: int = 0  # that a rank sends in one layer's attention (of a layer that sends most), in one pass or step

    @property
    def weights(self) -> str:
        """How weights are kept, in words."""
        kept = {"whole": f"tp {self.plan.tensor}" if self.plan.tensor > 1 else "whole", "fsdp": "fsdp"}
        both = self.plan.weights == "fsdp" and self.plan.tensor > 1
        return f"tp {self.plan.tensor} + fsdp" if both else kept[self.plan.weights]


@dataclass(frozen=True)
class Ranking:
    """All plans of a model on a cluster, the feasible ones first, by predicted time."""

    model: Model
    cluster: Cluster
    seq: int
    batch: int
    phase: str
    candidates: tuple[Candidate, ...]

    @property
    def feasible(self) -> tuple[Candidate, ...]:
        return tuple(x for x in self.candidates if not x.reason)

    @property
    def best(self) -> Candidate | None:
        """The fastest that fits; None if none does."""
        return next(iter(self.feasible), None)


def plan(
    model: Model,
    cluster: Cluster,
    seq: int,
    batch: int,
    phase: str,
    *,
    window: int | None = None,
    element_bytes: int = 2,
    reserved_bytes: int = 2_000_000_000,
    strict: bool = False,
) -> Ranking:
    """Every way to run a prefill, a decode step or a training step on all ranks of a cluster; see Note [Plans].

    Args:
        seq: tokens of a sequence; for "decode" those in the cache.
        batch: sequences of all replicas together.
        phase: "prefill", "decode" or "train".
        window: how far back a query of every layer looks, besides what the model says.
        element_bytes: of weights, activations and the cache.
        reserved_bytes: of a device's memory that are not the model's: context, kernels, fragmentation.
        strict: plans that the cluster's constants were not fitted on are not feasible.

    Raises:
        ValueError: for an unknown phase, or sizes below 1.
    """
    if phase not in PHASES:
        raise ValueError(f"phase={phase!r} is not one of {PHASES}")
    check_sizes(seq=seq, batch=batch, element_bytes=element_bytes)
    check_sizes(0, reserved_bytes=reserved_bytes)
    job = _Job(model, cluster, seq, batch, phase, Mask(True, window), element_bytes, reserved_bytes, strict)
    found = [job.candidate(one) for one in job.plans()]
    found.sort(key=lambda x: (bool(x.reason), x.prediction.seconds if x.prediction else 0.0))  # stable
    return Ranking(model, cluster, seq, batch, phase, tuple(found))


class Choice(NamedTuple):
    """A mesh for one attention call, and how long the call takes on it."""

    plan: Plan
    prediction: Prediction


def plan_attention(
    workload: Workload, cluster: Cluster, *, backward: bool = False, layouts: Sequence[Layout | str] = LAYOUTS
) -> tuple[Choice, ...]:
    """Every mesh of all ranks of a cluster for one attention call, the fastest first.

    That is ring x Ulysses degrees, layouts, and on several nodes which of two axes lies inside them. Meshes with more
    Ulysses ranks than query heads are left out; those with more than KV heads have `replicate_kv`. Memory is not asked.

    Args:
        backward: forward and backward.
        layouts: to choose from; of equals the first is better, and a ring of one has only that.

    Raises:
        ValueError: for no layouts, or what `predict` raises.
    """
    if not layouts:
        raise ValueError(f"layouts={layouts!r}: give at least one of {[str(x) for x in Layout]}")
    found = []
    for ulysses in _divisors(cluster.ranks):
        ring = cluster.ranks // ulysses
        if ulysses > workload.heads:
            continue
        for inner in INNER if min(ring, ulysses, cluster.nodes, cluster.per_node) > 1 else INNER[:1]:
            for layout in layouts if ring > 1 else layouts[:1]:
                one = Plan(ring, ulysses, layout=layout, replicate_kv=ulysses > workload.kv_heads, inner=inner)
                found.append(Choice(one, predict(workload, one, cluster, backward=backward)))
    return tuple(sorted(found, key=lambda x: x.prediction.seconds))  # stable


@dataclass(frozen=True)
class _Job:
    model: Model
    cluster: Cluster
    seq: int
    batch: int
    phase: str
    mask: Mask
    element_bytes: int
    reserved_bytes: int
    strict: bool

    def plans(self) -> Iterator[Plan]:
        """All divisions of the ranks, and what each may choose besides."""
        ranks = self.cluster.ranks
        for tensor in _divisors(ranks):
            for ulysses in _divisors(ranks // tensor):
                for ring in _divisors(ranks // (tensor * ulysses)):
                    data = ranks // (tensor * ulysses * ring)
                    kv_heads = max(1, self.model.kv_heads // tensor)
                    replicate = ulysses > kv_heads
                    layouts = LAYOUTS if ring > 1 and self.phase != "decode" else (Layout.CONTIGUOUS,)
                    sharded = tensor < ranks and (tensor == 1 or self.phase == "train")
                    for weights in ("whole", "fsdp") if sharded else ("whole",):
                        for layout in layouts:
                            yield Plan(ring, ulysses, data, tensor, layout, replicate, weights)

    def candidate(self, one: Plan) -> Candidate:
        if reason := self.impossible(one):
            return Candidate(one, reason)
        needs = None
        for option in self.options(one):
            needs = self.memory(option)
            if needs.total_bytes <= self.room_bytes:
                return self.priced(option, needs)
        assert needs is not None
        largest = max(needs.parts, key=needs.parts.__getitem__)
        return Candidate(
            one,
            f"needs {needs.gb:.1f} GB of {self.cluster.hardware['memory_bytes'] / 1e9:.1f} GB "
            f"({largest}: {needs.parts[largest] / 1e9:.1f})",
            memory=needs,
        )

    @property
    def room_bytes(self) -> float:
        return self.cluster.hardware["memory_bytes"]

    def impossible(self, one: Plan) -> str:
        """Why this cannot be, whatever the memory; or nothing."""
        if self.batch % one.data:
            return f"{self.batch} sequences do not divide over data {one.data}"
        if self.cluster.per_node % one.tensor:
            return f"tensor {one.tensor} leaves the node of {self.cluster.per_node}"
        if self.phase != "decode" and one.tokens(self.seq, self.mask).padded > 2 * self.seq:
            return f"{one.sequence_ranks} ranks for {self.seq} tokens"
        try:
            check_heads(self.model, one)
        except ValueError as error:
            return str(error).split(":")[0] if "tensor" in str(error) else str(error)
        return ""

    def options(self, one: Plan) -> Iterator[Plan]:
        """The plan, and what it may do to need less memory."""
        yield one
        if self.phase != "decode":
            yield replace(one, tile_mlp=TILE)
        if self.phase == "train":
            yield replace(one, tile_mlp=TILE, checkpoint=True)

    def memory(self, one: Plan) -> Memory:
        return memory(
            self.model, one, self.seq, self.batch // one.data, self.phase,
            mask=self.mask, element_bytes=self.element_bytes, reserved_bytes=self.reserved_bytes,
        )  # fmt: skip

    def priced(self, one: Plan, needs: Memory) -> Candidate:
        rows = self.batch // one.data
        algorithms = DECODE if self.phase == "decode" and one.ring > 1 else (one.algorithm,)
        try:
            priced = [(self.predict(replace(one, algorithm=name), rows), name) for name in algorithms]
        except ValueError as error:  # strict, and not calibrated
            return Candidate(one, str(error).partition(": fit it")[0], memory=needs)
        prediction, name = min(priced, key=lambda x: x[0].seconds)
        most = largest_batch(
            self.model, one, self.room_bytes, self.seq, self.phase,
            mask=self.mask, element_bytes=self.element_bytes, reserved_bytes=self.reserved_bytes,
        )  # fmt: skip
        chosen = replace(one, algorithm=name)
        if self.phase == "decode":
            volumes = counts.decode_traffic(self.call(one, rows, self.mask), chosen)
            sent = max(sum(size for size, _ in volume.values()) for volume in volumes)
        else:
            masks, train = self.model.masks(self.mask), self.phase == "train"
            sent = max(counts.most_sent(self.call(one, rows, mask), one, backward=train) for mask in masks)
        return Candidate(chosen, "", prediction, needs, most * one.data, sent)

    def call(self, one: Plan, rows: int, mask: Mask) -> Workload:
        return self.model.attention(rows, self.seq, mask, self.element_bytes, one.tensor)

    def predict(self, one: Plan, rows: int) -> Prediction:
        return predict_model(
            self.model, one, self.cluster, seq=self.seq, batch=rows, phase=self.phase,
            mask=self.mask, element_bytes=self.element_bytes, strict=self.strict,
        )  # fmt: skip


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
