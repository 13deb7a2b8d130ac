"""Points that belong together, each beside its published row, both relative to the best of their group."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import correlation, median

from analysis import published
from usp.inference.volumes import Rates, exposed


@dataclass(frozen=True)
class Line:
    """One point of a group."""

    record: dict
    adjusted: float  # what speeds are multiplied with, so that all points were measured on equally fast cores
    speed: float | None  # calls a second of the pass that the published row has, adjusted; None without a result
    relative: float | None  # to the fastest of the group
    published: published.Row | None
    published_relative: float | None


@dataclass(frozen=True)
class Group:
    """The meshes and layouts of one workload and length, on one machine, from pure Ulysses to pure ring."""

    lines: tuple[Line, ...]
    table: str | None

    @property
    def family(self) -> tuple[str, str]:
        """What its points have in common with those of other lengths, and the machine."""
        return family(self.lines[0].record), self.lines[0].record["machine"]["id"]

    @property
    def config(self) -> dict:
        """Of the first point; the others differ in mesh and layout."""
        return self.lines[0].record["config"]

    @property
    def pairs(self) -> list[tuple[float, float]]:
        """(measured, published) where both are known."""
        found = [(line.speed, line.published.calls_per_s) for line in self.lines if line.published]
        return [(a, b) for a, b in found if a is not None and b is not None]

    @property
    def rank_correlation(self) -> float | None:
        """Spearman's, between measured and published speeds; None for fewer than three pairs or all equal."""
        measured, there = ([pair[n] for pair in self.pairs] for n in (0, 1))
        if len(measured) < 3 or min(len(set(measured)), len(set(there))) < 2:
            return None
        return correlation(ranks(measured), ranks(there))


def world(config: dict) -> int:
    """Ranks of a point."""
    return math.prod(config["mesh"].get(axis, 1) for axis in ("data", "ring", "ulysses"))


def across(hosts: list[dict]) -> str:
    """Of the hosts of a record, in words, if there are several: how many, and the rate of their links if known."""
    if len(hosts) < 2:
        return ""
    rates = sorted({host["gbit_per_s"] for host in hosts if host["gbit_per_s"]})
    return f" on {len(hosts)} hosts" + (f" with {' to '.join(f'{rate:g}' for rate in rates)} Gbit/s" if rates else "")


def mesh_order(config: dict) -> tuple[int, int, bool]:
    """From pure Ulysses to pure ring; swapped axes last of the same degrees."""
    mesh = config["mesh"]
    return mesh["ring"], mesh["ulysses"], mesh["inner"] == "ring"


def mesh_label(config: dict) -> str:
    """A mesh in a name or a table: degrees, and the axis that is inside if it is not Ulysses."""
    mesh = config["mesh"]
    replicas = f"d{mesh['data']}" if mesh.get("data", 1) > 1 else ""
    swapped = "-ring_inside" if mesh["inner"] == "ring" else ""
    return f"{replicas}u{mesh['ulysses']}r{mesh['ring']}{swapped}"


def ranks(values: list[float]) -> list[float]:
    """1 for the smallest; equal values share the mean of their ranks."""
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) + 1) / 2 for value in values]


def family(record: dict) -> str:
    """What points must have in common, but for the length, to be compared: a title for tables and pictures."""
    config = record["config"]
    workload, beside = config["workload"], config["published"]
    window = "" if config["window"] is None else f" with window {config['window']}"
    count, hosts = world(config), record["hosts"]
    alone = count <= record["machine"]["cores"] or len(hosts) > 1
    usual = "wall" if alone else "cpu"  # a point without a result had none
    return ", ".join(
        (
            f"{workload['heads']}/{workload['kv_heads']} heads x {workload['head_dim']}",
            f"batch {workload['batch']}",
            config["dtype"],
            ("causal" if config["causal"] else "full") + window,
            "forward + backward" if config["backward"] else "forward",
            f"{count} ranks{across(hosts)}",
            *([] if config["exchange"] == "ring" else [f"exchange {config['exchange']}"]),
            *([] if config["backend"] == "auto" else [f"backend {config['backend']}"]),
            *([] if config["device"] == "auto" else [f"device {config['device']}"]),
            *([] if config["seed"] == 0 else [f"seed {config['seed']}"]),
            *([] if beside["table"] is None else [f"beside {beside['table']} / {beside['factor']}"]),
            f"{record.get('summary', {}).get('clock', usual)} time",
        )
    )


def forward_alone(config: dict) -> bool:
    """Whether the published table of a point with backward has rates of forward alone."""
    table = config["published"]["table"]
    return table in published.TITLES and config["backward"] and not published.rows(table)[0].backward


def speed(record: dict) -> float | None:
    """Calls a second of the pass that is compared, as measured."""
    if record["status"] != "ok":
        return None
    return record["summary"]["forward_speed_per_s" if forward_alone(record["config"]) else "speed_per_s"]


def groups(records: list[dict]) -> list[Group]:
    """In the order in which they first appear; records of other experiments are in none.

    Points whose speed is of CPU time were measured beside a fixed piece of work, the probe. Their speeds are adjusted
    to cores that do it in the median time of all points of the machine: other tenants slow cores down for seconds.
    """
    members: dict[str, list[dict]] = {}
    for record in records:
        if record["experiment"] != "attention":
            continue
        machine = record["machine"]["id"]
        key = f"{family(record)} {record['config']['seq']} {record['config']['published']['length']} {machine}"
        members.setdefault(key, []).append(record)
    usual = usual_probes(record for found in members.values() for record in found)
    return [_group(found, usual) for found in members.values()]


def usual_probes(records: Iterable[dict]) -> dict[str, float]:
    """By machine, the median of what the probe took beside each point whose speed is of CPU time."""
    probes: dict[str, list[float]] = {}
    for record in records:
        if probe_s := record.get("summary", {}).get("probe_s"):
            probes.setdefault(record["machine"]["id"], []).append(probe_s)
    return {machine: median(found) for machine, found in probes.items()}


def adjusted(record: dict, usual: dict[str, float]) -> float:
    """What the speed of a point is multiplied with, and its seconds are divided by, to be those of usual cores."""
    probe_s = record.get("summary", {}).get("probe_s")
    return probe_s / usual[record["machine"]["id"]] if probe_s else 1.0


def _group(records: list[dict], usual: dict[str, float]) -> Group:
    records = sorted(records, key=lambda r: mesh_order(r["config"]))
    rows = [published.find(record["config"]) for record in records]
    factors = [adjusted(record, usual) for record in records]
    measured = [speed(record) for record in records]
    speeds = [None if x is None else x * factor for x, factor in zip(measured, factors, strict=True)]
    best = max((x for x in speeds if x is not None), default=math.nan)
    there = max((row.calls_per_s for row in rows if row and row.calls_per_s), default=math.nan)
    lines = [
        Line(
            record,
            factor,
            x,
            None if x is None else x / best,
            row,
            None if row is None or row.calls_per_s is None else row.calls_per_s / there,
        )
        for record, factor, x, row in zip(records, factors, speeds, rows, strict=True)
    ]
    return Group(tuple(lines), records[0]["config"]["published"]["table"])


# ---------------------------------------------------------------------------------------------------
# Models.


def model_family(record: dict) -> str:
    """What points of experiments.model have in common if they compute the same: a title for tables and pictures."""
    config = record["config"]
    rows = config["mesh"]["data"] * config["batch"]
    own = {
        "train": f"{config['steps']} steps, learning rate {config['learning_rate']}",
        "evaluate": "loss",
        "generate": f"{config['new_tokens']} new tokens",
    }
    return ", ".join(
        (
            config["model"],
            config["phase"],
            f"{rows} sequence{'s' * (rows > 1)} of {config['seq']:,} tokens",
            own[config["phase"]],
            config["dtype"],
            *([] if config["device"] == "auto" else [f"device {config['device']}"]),
            *([] if config["seed"] == 0 else [f"seed {config['seed']}"]),
        )
    )


def model_job(record: dict) -> str:
    """How a point of experiments.model computes it, in words."""
    config, where = record["config"], across(record["hosts"])
    mesh = config["mesh"]
    degrees = [f"{name} {mesh[name]}" for name in ("data", "ring", "ulysses") if mesh[name] > 1]
    options = {"backend": "auto", "checkpoint": "none", "tile_mlp": None, "tile_loss": None}
    given = [f"{key} {config[key]}" for key, usual in options.items() if config[key] != usual]
    if not degrees:
        whose = [] if config["attention"] == "auto" else [f"attention {config['attention']}"]
        return ", ".join(("one process", *whose, *given))
    engine = [] if config["phase"] != "train" else ["fsdp" if config["engine"] == "auto" else config["engine"]]
    swapped = ["ring inside"] if mesh["inner"] == "ring" else []
    return ", ".join((" x ".join(degrees) + where, *swapped, config["layout"]["name"], *engine, *given))


def beside_one_process(records: list[dict]) -> list[tuple[dict, dict | None]]:
    """Each point of experiments.model, and that of one process which computes the same, if it has a result.

    One that runs transformers alone comes before one that runs this library's attention.
    """
    alone: dict[tuple[str, str], dict] = {}
    good = [record for record in records if record["status"] == "ok" and len(record["ranks"]) == 1]
    for record in sorted(good, key=lambda record: record["summary"]["attention"] == "transformers"):
        alone[model_family(record), record["machine"]["id"]] = record
    return [(record, alone.get((model_family(record), record["machine"]["id"]))) for record in records]


def loss_differences(record: dict, other: dict) -> list[float]:
    """By step."""
    pairs = zip(record["summary"]["losses"], other["summary"]["losses"], strict=True)
    return [abs(mine - theirs) for mine, theirs in pairs]


def same_tokens(record: dict, other: dict) -> int:
    """How many tokens two points wrote alike before the first that differs, in the sequence where that is soonest."""
    found = []
    for mine, theirs in zip(record["summary"]["tokens"], other["summary"]["tokens"], strict=True):
        differ = [n for n, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b]
        found.append(differ[0] if differ else len(mine))
    return min(found)


# ---------------------------------------------------------------------------------------------------
# Inference.

KEYS, QUERIES = "pass_kv", "pass_q"  # what travels


def inference_family(record: dict) -> str:
    """What points of experiments.decode or experiments.prefill have in common in one table: its title."""
    config = record["config"]
    workload = config["workload"]
    heads = f"{workload['heads']}/{workload['kv_heads']} heads x {workload['head_dim']}"
    if record["experiment"] == "prefill":
        own = mesh_label(config), config["layout"]["name"], f"{config['total']:,} tokens", f"batch {config['batch']}"
    else:
        out = "out everywhere" if config["gather"] else "out where the algorithm leaves it"
        window = [] if config["window"] is None else [f"window {config['window']}"]
        usual = [] if (config["block"], config["owner"]) == (16, "rotate") else [f"{config['owner']} {config['block']}"]
        own = f"{config['context']:,} tokens in the cache", f"{config['seq']} new", *window, *usual, out
    return ", ".join(
        (
            heads,
            *own,
            config["dtype"],
            *([f"{world(config)} ranks{across(record['hosts'])}"] if len(record["hosts"]) > 1 else []),
            *([] if config["backend"] == "auto" else [f"backend {config['backend']}"]),
            *([] if config["device"] == "auto" else [f"device {config['device']}"]),
            *([] if config["seed"] == 0 else [f"seed {config['seed']}"]),
        )
    )


def crossovers(records: Iterable[dict]) -> dict[str, str]:
    """From which share of cached tokens queries travel at less cost than keys, by what is called the cost.

    Records are prefills with a result that differ in share and algorithm. By rates: with the median of the rates that
    were measured beside all of them.
    """
    costs: dict[str, dict[float, dict[str, float]]] = {"sizes": {}, "rates": {}, "bytes": {}, "seconds": {}}
    records = list(records)
    measured = [record["summary"]["rates"] for record in records]
    given = [key for key in Rates._fields if measured[0].get(key) is not None] if measured else []
    rates = Rates(**{key: median(found[key] for found in measured) for key in given})
    for record in records:
        if (algorithm := record["config"]["algorithm"]) not in (KEYS, QUERIES):
            continue
        found, report, at = record["summary"], record["ranks"][0]["report"], record["config"]["share"]
        sizes = (
            report[key] for key in ("ring", "kv_bytes", "gathered_bytes", "q_bytes", "partial_bytes", "step_flops")
        )
        for cost, seconds in (("sizes", found["by_sizes_s"]), ("rates", exposed(*sizes, rates))):
            costs[cost][at] = {name: seconds[name] for name in (KEYS, QUERIES)}
        costs["bytes"].setdefault(at, {})[algorithm] = found["sent_bytes"]
        costs["seconds"].setdefault(at, {})[algorithm] = found["wall_s"]
    return {cost: crossover(by_share) for cost, by_share in costs.items()}


def crossover(costs: Mapping[float, Mapping[str, float]]) -> str:
    """In words: where pass_q begins to cost less than pass_kv as the share grows; shares without both are left out."""
    both = sorted((at, pair[QUERIES], pair[KEYS]) for at, pair in costs.items() if {KEYS, QUERIES} <= pair.keys())
    if not both:
        return "no share with both"
    if all(queries == keys for _, queries, keys in both):
        return "equal at every share"
    less = [queries < keys for _, queries, keys in both]
    if len(set(less)) == 1:
        return f"{QUERIES if less[0] else KEYS} at every share"
    first = less.index(True)
    if all(less[first:]):
        return f"between {both[first - 1][0]:g} and {both[first][0]:g}"
    return f"none: {QUERIES} at {', '.join(f'{at:g}' for (at, _, _), wins in zip(both, less, strict=True) if wins)}"
