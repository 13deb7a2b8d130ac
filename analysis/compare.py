"""Points that belong together, each beside its published row, both relative to the best of their group."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import correlation, median

from analysis import published


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


def ranks(values: list[float]) -> list[float]:
    """1 for the smallest; equal values share the mean of their ranks."""
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) + 1) / 2 for value in values]


def family(record: dict) -> str:
    """What points must have in common, but for the length, to be compared: a title for tables and pictures."""
    config = record["config"]
    workload, mesh, beside = config["workload"], config["mesh"], config["published"]
    window = "" if config["window"] is None else f" with window {config['window']}"
    world = mesh["ring"] * mesh["ulysses"]
    usual = "wall" if world <= record["machine"]["cores"] else "cpu"  # a point without a result had none
    return ", ".join(
        (
            f"{workload['heads']}/{workload['kv_heads']} heads x {workload['head_dim']}",
            f"batch {workload['batch']}",
            config["dtype"],
            ("causal" if config["causal"] else "full") + window,
            "forward + backward" if config["backward"] else "forward",
            f"{world} ranks",
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
    probes: dict[str, list[float]] = {}
    for record in records:
        if record["experiment"] != "attention":
            continue
        machine = record["machine"]["id"]
        key = f"{family(record)} {record['config']['seq']} {record['config']['published']['length']} {machine}"
        members.setdefault(key, []).append(record)
        if probe_s := record.get("summary", {}).get("probe_s"):
            probes.setdefault(machine, []).append(probe_s)
    usual = {machine: median(found) for machine, found in probes.items()}
    return [_group(found, usual.get(found[0]["machine"]["id"])) for found in members.values()]


def _group(records: list[dict], usual_probe_s: float | None) -> Group:
    records = sorted(records, key=lambda r: (r["config"]["mesh"]["ring"], r["config"]["mesh"]["ulysses"]))
    rows = [published.find(record["config"]) for record in records]
    probes = [record.get("summary", {}).get("probe_s") for record in records]
    adjusted = [probe / usual_probe_s if probe and usual_probe_s else 1.0 for probe in probes]
    measured = [speed(record) for record in records]
    speeds = [None if x is None else x * factor for x, factor in zip(measured, adjusted, strict=True)]
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
        for record, factor, x, row in zip(records, adjusted, speeds, rows, strict=True)
    ]
    return Group(tuple(lines), records[0]["config"]["published"]["table"])
