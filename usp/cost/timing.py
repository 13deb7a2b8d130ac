"""How long it takes: exact counts divided by the constants of a cluster.

    a kernel        max(FLOPs / rate, bytes / memory bandwidth) + launch
    a message       latency + bytes / bandwidth of the links it takes, shared with whom it shares them: what leaves a
                    node at once shares its network adapters, and alone nothing is faster than one of them
    a ring pass     played through (`simulation`): each step is the longer of computing and sending
    an all-to-all, what merges partial results, collectives between matrices: nothing hides them

With `bound=True`, and wherever a cluster has no fitted constant, what datasheets promise is taken instead: full rate,
full bandwidth, no launches. Such a time is a lower bound, and the prediction says so and names what was missing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import NamedTuple

from usp.blocks import Load
from usp.cost import counts
from usp.cost.hardware import Cluster
from usp.cost.placement import hops, neighbours, spans_nodes, spread
from usp.cost.simulation import Timeline, simulate
from usp.cost.workload import Model, Plan, Workload, check_sizes
from usp.inference.volumes import PREFILL, Rates, exposed
from usp.masks import Mask

CALIBRATED, EXTRAPOLATED, LOWER_BOUND = "calibrated", "extrapolated", "lower bound"
PHASES = ("prefill", "decode", "train")
_WIDE_BYTES = 4  # of what is merged and of gradients on their way


@dataclass(frozen=True)
class Prediction:
    """Seconds and where they go.

    `basis` says what they are worth: "calibrated", "extrapolated" (sizes outside of those that constants were fitted
    on, or constants of other hardware) or "lower bound" (one is missing; what the datasheet promises stands for it).
    `notes` names what is outside or missing.
    """

    seconds: float
    parts: Mapping[str, float]  # seconds that add up to them, by what they go to
    basis: str
    notes: tuple[str, ...]

    @property
    def regime(self) -> str:
        """What most of the time goes to: "compute", "memory", "link" or "latency"."""
        groups: dict[str, float] = {}
        for part, seconds in self.parts.items():
            group = _REGIMES[part]
            groups[group] = groups.get(group, 0.0) + seconds
        return max(groups, key=groups.__getitem__)

    @property
    def exposed_s(self) -> float:
        """Communication that no computation hides."""
        return sum(seconds for part, seconds in self.parts.items() if _REGIMES[part] == "link")


_REGIMES = {
    "attention": "compute",
    "matrices": "compute",
    "head": "compute",
    "weights": "memory",
    "cache": "memory",
    "merge": "memory",
    "ring": "link",
    "all_to_all": "link",
    "gather": "link",
    "tensor": "link",
    "gradients": "link",
    "partials": "link",
    "fixed": "latency",
}


class Constants:
    """A cluster's constants as they are used for one prediction; remembers what was missing or outside."""

    def __init__(self, cluster: Cluster, bound: bool = False):
        self.cluster, self.hardware, self.bound = cluster, cluster.hardware, bound
        self.missing: set[str] = set()
        self.outside: set[str] = set()
        self.borrowed: dict[str, set[str]] = {}  # by whose they are

    def fitted(self, name: str, size: int | None = None) -> float | None:
        """A fitted constant (at a size), None where it is to be a bound or there is none."""
        if self.bound:
            return None
        if name not in self.hardware:
            self.missing.add(name)
            return None
        if self.hardware.constants[name].kind == "borrowed":
            whose = self.hardware.constants[name].source.partition(":")[0]
            self.borrowed.setdefault(whose, set()).add(name)
        if size is None:
            return self.hardware[name]
        value, known = self.hardware.at(name, size)
        if not known:
            self.outside.add(f"{name} at {size}")
        return value

    def extra(self, name: str) -> float:
        """Seconds that a bound leaves out."""
        return self.fitted(name) or 0.0

    def rate(self, name: str, size: int | None = None) -> float:
        """FLOP/s, at most the peak."""
        return min(self.fitted(name, size) or math.inf, self.hardware["peak_flops_per_s"])

    def link(self, name: str, size: int | None = None) -> float:
        """Bytes/s of one rank inside a node."""
        return self.fitted(name, size) or self.hardware["link_bytes_per_s"]

    @property
    def network(self) -> float:
        """Bytes/s of one adapter to another node; not faster than a rank inside, where only that was measured."""
        if found := self.fitted("network_hop_bytes_per_s"):
            return found
        return min(self.hardware["network_bytes_per_s"], self.fitted("hop_bytes_per_s") or math.inf)

    @property
    def network_hop_s(self) -> float:
        found = self.fitted("network_hop_s")
        return self.extra("hop_s") if found is None else found

    @property
    def overlap(self) -> float:
        found = self.fitted("overlap")
        return 1.0 if found is None else found

    def collective_s(self, size_bytes: float, ranks: int, first: int, world: int) -> float:
        """Seconds in which each of so many ranks, `first` apart, gets from the others (ranks - 1) / ranks of a size."""
        if ranks == 1:
            return 0.0
        away_bytes, per_node = size_bytes * (ranks - 1) / ranks, self.cluster.per_node
        per_s = self.link("collective_bytes_per_s")
        if spans_nodes(ranks, first, world, per_node):
            senders = max(1, per_node // first)  # ranks of one group in a node share what comes into it
            adapters = self.cluster.adapters / min(first, per_node)  # of each of the groups in a node
            per_s = min(per_s, self.network * min(senders, ranks, adapters))
        return away_bytes / per_s

    def checked(self, outside: Iterable[str], strict: bool) -> tuple[str, tuple[str, ...]]:
        """Basis and notes of a prediction.

        Raises:
            ValueError: if it must be calibrated and is not.
        """
        self.outside.update(outside)
        notes = [f"no {name}: datasheet instead" for name in sorted(self.missing)]
        notes += [f"not calibrated for {what}" for what in sorted(self.outside)]
        notes += [
            f"borrowed from {whose}: {', '.join(sorted(names))}" for whose, names in sorted(self.borrowed.items())
        ]
        fitted = not self.outside and not self.borrowed
        basis = LOWER_BOUND if self.missing or self.bound else CALIBRATED if fitted else EXTRAPOLATED
        if strict and basis != CALIBRATED:
            raise ValueError(
                f"{self.hardware.name!r} is not calibrated for this ({'; '.join(notes) or 'bound=True'}): fit it "
                "(python -m analysis.calibrate), or leave strict=True for a prediction that says what it is"
            )
        return basis, tuple(notes)

    def uncovered(self, plan: Plan, seq: int, batch: int, head_dim: int, element_bytes: int) -> list[str]:
        """Which sizes lie outside of what the constants were fitted on."""
        nodes = -(-plan.world // self.cluster.per_node)
        sizes = {"seq": seq, "batch": batch, "head_dim": head_dim, "element_bytes": element_bytes}
        sizes |= {"ranks": plan.sequence_ranks, "nodes": nodes}
        found = []
        for name, (least, most) in self.hardware.covers.items():
            if not least <= sizes[name] <= most:
                found.append(f"{name}={sizes[name]:,} (fitted on {least:,} to {most:,})")
        return found


def _check_ranks(plan: Plan, cluster: Cluster) -> None:
    if plan.world > cluster.ranks:
        raise ValueError(f"{plan.world} ranks on {cluster.name}, which has {cluster.ranks}")


def predict(
    workload: Workload,
    plan: Plan,
    cluster: Cluster,
    *,
    backward: bool = False,
    bound: bool = False,
    strict: bool = False,
) -> Prediction:
    """One attention call of ring x ulysses ranks (times data x tensor, which do the same beside).

    Args:
        backward: forward and backward.
        bound: a lower bound, from datasheets alone.
        strict: refuse what the constants were not fitted on.

    Raises:
        ValueError: if the cluster has too few ranks, heads cannot be dealt, or `strict` and not calibrated.
    """
    _check_ranks(plan, cluster)
    constants = Constants(cluster, bound)
    parts = attention_parts(workload, plan, constants, backward=False)
    if backward:
        parts = _sum(parts, attention_parts(workload, plan, constants, backward=True))
    parts["fixed"] += (1 + backward) * constants.extra("call_s")  # of a call that is waited for, not of one in a model
    outside = constants.uncovered(plan, workload.seq, workload.batch, workload.head_dim, workload.element_bytes)
    basis, notes = constants.checked(outside, strict)
    return Prediction(sum(parts.values()), parts, basis, notes)


def _sum(*some: Mapping[str, float], times: float = 1.0) -> dict[str, float]:
    found: dict[str, float] = {}
    for parts in some:
        for name, seconds in parts.items():
            found[name] = found.get(name, 0.0) + times * seconds
    return found


def attention_parts(workload: Workload, plan: Plan, constants: Constants, *, backward: bool) -> dict[str, float]:
    """Seconds of one pass, by part; of the Ulysses rank with most heads, since the others wait for it."""
    timeline, work = ring_pass(workload, plan, constants, backward=backward)
    return {
        "attention": work.kernels_s,
        "merge": work.merge_s,
        "ring": timeline.exposed_s,
        "all_to_all": _all_to_all_s(workload, plan, constants, backward),
        "fixed": work.launches_s,
    }


class Work(NamedTuple):
    """Seconds of a rank with keys of one source, or of all."""

    kernels_s: float
    merge_s: float
    launches_s: float


def ring_pass(workload: Workload, plan: Plan, constants: Constants, *, backward: bool) -> tuple[Timeline, Work]:
    """The ring played through, and what its busiest rank does."""
    tokens = plan.tokens(workload.seq, workload.mask)
    queries, keys, calls = _most_heads(workload, plan)
    rows = workload.batch if workload.mask.rows == 1 else 1
    dim_v, element_bytes = workload.head_dim_v or 0, workload.element_bytes
    flops_per_s = constants.rate(f"attention{'_backward' * backward}_flops_per_s", workload.head_dim)
    memory_per_s = constants.hardware["memory_bytes_per_s"]
    step_s = constants.extra("step_s")
    added_bytes = rows * (2 * _WIDE_BYTES + element_bytes)  # a block's element is read, its sum is read and kept

    @cache
    def of(load: Load) -> Work:
        flops = counts.call_flops(rows * load.pairs, queries, workload.head_dim, dim_v, backward=backward)
        moved = rows * element_bytes * (load.rows * queries + load.columns * keys) * workload.dims
        if backward:  # dq, dk and dv are sums, of one pass over memory; merging outputs by their lse takes several
            added = load.rows * queries * workload.head_dim + load.columns * keys * workload.dims
            merge_per_s = math.inf if constants.bound else memory_per_s
        else:
            added = load.rows * queries * dim_v
            merge_per_s = constants.fitted("merge_bytes_per_s") or math.inf
        kernels_s = max(flops / flops_per_s, moved / memory_per_s)
        return Work(kernels_s, added * added_bytes / merge_per_s, step_s * calls * load.blocks)

    work = counts.work(workload.mask, tokens)
    if plan.ring == 1:
        total = sum(sum(of(load)) for load in work[0].values())
        timeline = Timeline(total, (total,), (total,), ())
    else:
        compute_s = [{source: sum(of(load)) for source, load in row.items()} for row in work]
        timeline = _simulated(workload, plan, constants, compute_s, backward)
    busiest = max(range(plan.ring), key=timeline.compute_s.__getitem__)
    return timeline, Work(*map(sum, zip((0.0, 0.0, 0.0), *map(of, work[busiest].values()), strict=True)))


@lru_cache(maxsize=4096)
def _most_heads(workload: Workload, plan: Plan) -> tuple[int, int, int]:
    """Query heads, KV heads and kernel calls of the Ulysses ranks that have most of each."""
    heads = plan.heads(workload)
    calls = max(len(heads.groups(u)) for u in range(plan.ulysses))
    return max(map(len, heads.queries)), max(map(len, heads.keys)), calls


def _simulated(
    workload: Workload,
    plan: Plan,
    constants: Constants,
    compute_s: list[dict[int, float]],
    backward: bool,
) -> Timeline:
    tokens = plan.tokens(workload.seq, workload.mask)
    _, keys, _ = _most_heads(workload, plan)
    token_bytes = workload.batch * keys * workload.dims * workload.element_bytes
    gradient_bytes = workload.batch * keys * workload.dims * max(_WIDE_BYTES, workload.element_bytes)
    visits, sizes = counts.journeys(workload.mask, tokens, tokens)
    hop_s, hop_per_s = constants.extra("hop_s"), constants.link("hop_bytes_per_s")
    per_node = constants.cluster.per_node
    axis = plan.ring, plan.ring_stride, plan.world
    inside = not spans_nodes(*axis, per_node)
    if plan.exchange == "all_gather":
        busiest = [sum(row.values()) for row in compute_s]
        size = plan.ring * tokens.seq_ring * token_bytes
        sizes_bytes = (size, size * gradient_bytes / token_bytes) if backward else (size,)
        gathered = sum(constants.collective_s(x, *axis) for x in sizes_bytes)
        total = max(busiest) + gathered + (hop_s if inside else constants.network_hop_s)
        return Timeline(total, tuple(busiest), (total,) * plan.ring, ())
    network, network_hop_s = (math.inf, 0.0) if inside else (constants.network, constants.network_hop_s)

    @cache
    def message_s(source: int, gradient: bool, crossing: int) -> float:
        size = sizes[source] * (gradient_bytes if gradient else token_bytes)
        if not crossing:
            return hop_s + size / hop_per_s
        return network_hop_s + size * max(1.0, crossing / constants.cluster.adapters) / network

    options = {"backward": backward, "overlap": constants.overlap}
    timelines = [
        simulate(visits, compute_s, message_s, node_of=nodes.__getitem__, rings=rings, **options)
        for nodes, rings in neighbours(*axis, per_node)
    ]
    return max(timelines, key=lambda x: x.total_s)


def _all_to_all_s(workload: Workload, plan: Plan, constants: Constants, backward: bool) -> float:
    """Both exchanges of a pass: of the rank that sends most."""
    if plan.ulysses == 1:
        return 0.0
    sent = counts.all_to_all_bytes(workload, plan, backward=backward)
    others, cluster = plan.ulysses - 1, constants.cluster
    together, away, leaving = spread(plan.ulysses, plan.ulysses_stride, plan.world, cluster.per_node)
    if fitted_per_s := constants.fitted("all_to_all_bytes_per_s", max(2, together)):  # packing in it is of all bytes
        seconds = sent / fitted_per_s + 2 * constants.extra("hop_s")
    else:
        seconds = sent * (1 - away / others) / constants.hardware["link_bytes_per_s"]
    if away:
        rank_per_s = constants.fitted("network_all_to_all_bytes_per_s")
        messages = away if rank_per_s else max(away, leaving / cluster.adapters)  # through one adapter
        latency_s = max(constants.extra("network_all_to_all_s"), constants.network_hop_s)
        seconds += sent * (messages / others) / (rank_per_s or constants.network) + 2 * latency_s
    return seconds


# ---------------------------------------------------------------------------------------------------
# Models.


def predict_model(
    model: Model,
    plan: Plan,
    cluster: Cluster,
    *,
    seq: int,
    batch: int,
    phase: str,
    mask: Mask | None = None,
    element_bytes: int = 2,
    bound: bool = False,
    strict: bool = False,
) -> Prediction:
    """One prefill, one training step, or one decode step of a model.

    Args:
        seq: tokens of a sequence; of a decode step, those in the cache.
        batch: sequences of one data replica.
        phase: "prefill" (forward without logits but the last), "train" (forward and backward, with logits; the
            optimizer's own work is not in it), or "decode" (one token for every sequence).
        mask: causal by default; a layer's window is added to it.

    Raises:
        ValueError: for an unknown phase, and what `predict` raises.
    """
    if phase not in PHASES:
        raise ValueError(f"phase={phase!r} is not one of {PHASES}")
    check_sizes(seq=seq, batch=batch, element_bytes=element_bytes)
    _check_ranks(plan, cluster)
    check_heads(model, plan)
    constants = Constants(cluster, bound)
    mask = mask or Mask(causal=True)
    if phase == "decode":
        parts = _decode_parts(model, plan, constants, seq, batch, mask, element_bytes)
    else:
        parts = _layers_parts(model, plan, constants, seq, batch, mask, element_bytes, train=phase == "train")
    outside = constants.uncovered(plan, seq, batch, model.head_dim, element_bytes)
    basis, notes = constants.checked(outside, strict)
    return Prediction(sum(parts.values()), parts, basis, notes)


def check_heads(model: Model, plan: Plan) -> None:
    """Every rank has heads.

    Raises:
        ValueError: if tensor parallelism does not divide them, or there are more Ulysses ranks than heads to deal.
    """
    if model.heads % plan.tensor or (model.kv_heads % plan.tensor and plan.tensor % model.kv_heads):
        raise ValueError(
            f"tensor={plan.tensor} ranks do not divide {model.heads} query heads and {model.kv_heads} KV heads"
        )
    plan.heads(model.attention(1, 1, Mask(causal=True), tensor=plan.tensor))


def _layers_parts(
    model: Model,
    plan: Plan,
    constants: Constants,
    seq: int,
    batch: int,
    mask: Mask,
    element_bytes: int,
    *,
    train: bool,
) -> dict[str, float]:
    """Forward, and backward when training, through all layers."""
    tokens = batch * plan.tokens(seq, mask).seq_local  # of a rank, before tensor parallel ranks share them
    again = 1 if train and plan.checkpoint else 0
    layers: dict[str, float] = {}
    for one, count in model.masks(mask).items():
        call = model.attention(batch, seq, one, element_bytes, plan.tensor)
        forward = attention_parts(call, plan, constants, backward=False)
        layers = _sum(layers, _sum(forward, times=count * (1 + again)))
        if train:
            layers = _sum(layers, _sum(attention_parts(call, plan, constants, backward=True), times=count))
    passes = 3 + again if train else 1
    layers = _sum(layers, _sum(_matrices(model, plan, constants, tokens, element_bytes), times=passes))
    head = _head(model, plan, constants, tokens if train else batch, element_bytes)
    layers = _sum(layers, _sum(head, times=3 if train else 1))
    if plan.tensor > 1:  # two gathers and two scatters of the hidden states a layer and pass
        size = tokens * model.hidden * element_bytes
        collectives = 4 * (1 + again) + (6 if train else 0)
        layers["tensor"] = model.layers * collectives * constants.collective_s(size, plan.tensor, 1, plan.world)
    once_s = _shared_s(model, plan, constants, element_bytes)
    if plan.weights == "fsdp":  # the next layer comes while this one is computed; gradients are scattered
        times = 2 + 1 if train else 1
        hiding_s = sum(seconds for part, seconds in layers.items() if _REGIMES[part] != "link" or part == "ring")
        layers["gather"] = max(0.0, times * once_s - hiding_s)  # while a ring waits too, or less work would be slower
    elif train:
        layers["gradients"] = 2 * once_s  # an all-reduce is a scatter and a gather
    return layers


def _shared_s(model: Model, plan: Plan, constants: Constants, element_bytes: int) -> float:
    """Of one gather of all weights from, or one scatter of all gradients to, the ranks that share them."""
    ends = (1 if model.tied else 2) * model.vocab * model.hidden  # embedding and head
    size = (model.layers * model.layer_params + ends) * element_bytes / plan.tensor
    return constants.collective_s(size, plan.data * plan.sequence_ranks, plan.tensor, plan.world)


def _head(model: Model, plan: Plan, constants: Constants, tokens: int, element_bytes: int) -> dict[str, float]:
    """Logits of so many tokens: computing them, or reading the head where that takes longer."""
    computing_s = model.head_flops(tokens) / plan.tensor / constants.rate("linear_flops_per_s")
    read_bytes = model.vocab * model.hidden * element_bytes / plan.tensor
    reading_s = read_bytes / constants.hardware["memory_bytes_per_s"]
    return {"head": computing_s} if computing_s >= reading_s else {"weights": reading_s}


def _matrices(model: Model, plan: Plan, constants: Constants, tokens: int, element_bytes: int) -> dict[str, float]:
    """Of all layers' matrices with so many tokens: computing with them, or reading them where that takes longer."""
    keys = 2 * model.hidden * model.head_dim * model.kv_heads
    own = keys * max(1, model.kv_heads // plan.tensor) / model.kv_heads  # a rank has a KV head at least
    met = (model.active_params - keys) / plan.tensor + own  # by a token
    computing_s = 2 * tokens * met / constants.rate("linear_flops_per_s")
    read = (model.met_params(tokens) - keys) / plan.tensor + own
    reading_s = read * element_bytes / constants.hardware["memory_bytes_per_s"]
    part = "matrices" if computing_s >= reading_s else "weights"
    return {part: model.layers * max(computing_s, reading_s)}


def _decode_parts(
    model: Model, plan: Plan, constants: Constants, context: int, batch: int, mask: Mask, element_bytes: int
) -> dict[str, float]:
    """One token for every sequence: weights and cache are read once, and all of out is put together on every rank."""
    memory_per_s = constants.hardware["memory_bytes_per_s"]
    parts = _matrices(model, plan, constants, batch, element_bytes)
    parts = _sum(parts, _head(model, plan, constants, batch, element_bytes))
    call = model.attention(batch, context, mask, element_bytes, plan.tensor)
    cache_bytes = 0
    for one, count in model.masks(mask).items():
        seen = context if one.window is None else min(one.window, context)
        slot_bytes = max(map(len, plan.heads(call).keys)) * call.dims * element_bytes
        cache_bytes += count * batch * -(-seen // plan.ring) * slot_bytes
    parts["cache"] = cache_bytes / memory_per_s
    if plan.weights == "fsdp":
        parts["gather"] = max(0.0, _shared_s(model, plan, constants, element_bytes) - sum(parts.values()))
    partials_s = 0.0
    for axis, (ranks, stride) in enumerate(((plan.ring, plan.ring_stride), (plan.ulysses, plan.ulysses_stride))):
        volumes = [counts.decode_volumes(call, plan, rank, 0)[axis] for rank in range(plan.ring)]
        most = {kind: max(x.get(kind, (0, 0)) for x in volumes) for volume in volumes for kind in volume}
        if plan.algorithm == "pass_q" and axis == 0 and plan.ring > 1:  # the largest share passes all ranks, one by one
            size = -(-batch // plan.ring) * max(map(len, plan.heads(call).queries)) * call.head_dim * element_bytes
            most["queries"] = (plan.ring - 1) * size, plan.ring - 1
        if not most:
            continue
        far = spans_nodes(ranks, stride, plan.world, constants.cluster.per_node)
        per_s = constants.network if far else constants.link("hop_bytes_per_s")
        latency_s = constants.network_hop_s if far else constants.extra("hop_s")
        for kind, (size, messages) in most.items():
            one_by_one = kind == "queries" and plan.algorithm == "pass_q"
            sharing = _sharing(ranks, stride, plan.world, constants.cluster, hop=one_by_one)
            partials_s += size * sharing / per_s + messages * latency_s
    parts["partials"] = model.layers * partials_s
    if plan.tensor > 1:
        size = 2 * 2 * batch * model.hidden * element_bytes  # two all-reduces, each a scatter and a gather
        parts["tensor"] = model.layers * constants.collective_s(size, plan.tensor, 1, plan.world)
    parts["fixed"] = model.layers * constants.extra("decode_layer_s")
    return parts


def predict_turn(
    model: Model,
    plan: Plan,
    cluster: Cluster,
    *,
    new: int,
    cached: int,
    batch: int = 1,
    algorithm: str = "auto",
    element_bytes: int = 2,
    bound: bool = False,
) -> tuple[Prediction, str]:
    """Time to the first token of a prefill of `new` tokens behind `cached` ones; and the algorithm, as "auto" picks it.

    Balanced shards (zigzag), whole or tensor-parallel weights. Exposed communication is that of
    `usp.inference.volumes.exposed` by the cluster's rates.

    Raises:
        ValueError: for an unknown algorithm, sizes below their least, a model with windows, weights that are gathered,
            or what `predict_model` raises.
    """
    check_sizes(new=new, batch=batch, element_bytes=element_bytes)
    check_sizes(0, cached=cached)
    _check_ranks(plan, cluster)
    check_heads(model, plan)
    if model.windows or plan.weights != "whole" or plan.exchange != "ring":
        raise ValueError(
            f"a turn of {model.name!r}, weights={plan.weights!r}, exchange={plan.exchange!r}: turns are predicted for "
            "layers without windows, and weights that are whole or tensor-parallel; algorithm= says what travels"
        )
    constants = Constants(cluster, bound)
    call = model.attention(batch, new + cached, Mask(causal=True), element_bytes, plan.tensor)
    heads = plan.heads(call)
    queries, keys, ring = max(map(len, heads.queries)), max(map(len, heads.keys)), plan.ring
    pairs = new * cached + new * (new + 1) / 2
    step_flops = batch * 2 * pairs * queries * call.dims / ring**2
    flops_per_s = constants.rate("attention_flops_per_s", call.head_dim)
    rows = batch * -(-new // ring)
    sizes = {
        "kv_bytes": batch * -(-(new + cached) // ring) * keys * call.dims * element_bytes,
        "q_bytes": rows * queries * call.head_dim * element_bytes,
        "partial_bytes": rows * queries * ((call.head_dim_v or 0) * element_bytes + max(4, element_bytes)),
    }
    by_algorithm: dict[str, float] = dict.fromkeys(PREFILL, 0.0)
    if ring > 1:
        rates = _rates(plan, constants, flops_per_s)
        by_algorithm = exposed(ring, gathered_bytes=sizes["kv_bytes"], step_flops=step_flops, rates=rates, **sizes)
    if algorithm == "auto":
        algorithm = min(by_algorithm, key=by_algorithm.__getitem__)
    if algorithm not in by_algorithm:
        raise ValueError(f"algorithm={algorithm!r} is not 'auto' or one of {list(by_algorithm)}")
    tokens = batch * -(-new // plan.sequence_ranks)
    parts = {
        "attention": model.layers * ring * step_flops / flops_per_s,
        **_matrices(model, plan, constants, tokens, element_bytes),
        "ring": model.layers * by_algorithm[algorithm],
        "all_to_all": model.layers * _all_to_all_s(replace(call, seq=new), plan, constants, backward=False),
        "fixed": constants.extra("turn_s"),
    }
    if plan.tensor > 1:
        size = 4 * tokens * model.hidden * element_bytes
        parts["tensor"] = model.layers * constants.collective_s(size, plan.tensor, 1, plan.world)
    outside = constants.uncovered(plan, new + cached, batch, model.head_dim, element_bytes)
    basis, notes = constants.checked(outside, strict=False)
    return Prediction(sum(parts.values()), parts, basis, notes), algorithm


def _rates(plan: Plan, constants: Constants, flops_per_s: float) -> Rates:
    """Of the ranks of a ring, inside a node or across nodes."""
    axis, cluster = (plan.ring, plan.ring_stride, plan.world), constants.cluster
    if spans_nodes(*axis, cluster.per_node):
        hop_per_s, exchange_per_s = (constants.network / _sharing(*axis, cluster, hop=hop) for hop in (True, False))
        hop_s, exchange_s = constants.network_hop_s, constants.extra("network_all_to_all_s")
        exchange_per_s = constants.fitted("network_all_to_all_bytes_per_s") or exchange_per_s
    else:
        hop_per_s, hop_s = constants.link("hop_bytes_per_s"), constants.extra("hop_s")
        exchange_per_s, exchange_s = constants.link("all_to_all_bytes_per_s", plan.ring), hop_s
    return Rates(flops_per_s, hop_per_s, hop_s, constants.overlap, exchange_per_s, exchange_s)


def _sharing(ranks: int, stride: int, world: int, cluster: Cluster, *, hop: bool) -> float:
    """How many ranks' messages share one adapter where all send at once: to the next of a group, or to all others."""
    where = ranks, stride, world, cluster.per_node
    senders = hops(*where) if hop else spread(*where).leaving / (ranks - 1)
    return max(1.0, senders / cluster.adapters)
