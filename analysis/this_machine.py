"""This machine's constants from its own records: fitted on every third point, the others predicted.

Links are memory copies here and not in the clock, which counts what the slowest rank computes. So a prediction is the
kernels, the merging and the packing of all-to-alls of one rank, and a fixed time a call.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from analysis import compare
from analysis import records as kept
from analysis.fitting import fit, with_values, yaml_text
from analysis.measurements import ELEMENT_BYTES, Case, call_of
from usp.cost.hardware import UNITS, Cluster, Constant, Hardware
from usp.cost.timing import CALIBRATED, Constants, Prediction, attention_parts

EVERY = 3  # of the points, by name, one is fitted on
START = {"merge_bytes_per_s": 2e10, "all_to_all_bytes_per_s": 5e9, "call_s": 1e-3}
MEMORY_BYTES_PER_S = 1e10  # of a core: sums of gradients take it, kernels stay far below it
RATES = ("attention_flops_per_s", "attention_backward_flops_per_s")


def main(folders: Sequence[Path]) -> None:
    records = usable(kept.load(*folders))
    of, fitted, others = calibrated(records)
    for title, cases in (("fitted on", fitted), ("not fitted on", others)):
        print(f"{title}:")
        for case in cases:
            error = f"{case.error(of):+.1%}"
            print(f"  {case.what[0]:52} {case.what[1]:18} {case.measured_s * 1e3:8.1f} ms, predicted {error}")
    print(f"median error: fitted on {middle(fitted, of):.1%}, not fitted on {middle(others, of):.1%}")
    path = folders[0] / f"hardware_{of.name}.yaml"
    path.write_text(yaml_text(of, f"# Fitted to {len(records)} records of this machine."))
    print(f"constants: {path}")


def usable(records: Sequence[dict]) -> list[dict]:
    """Points of attention whose clock is CPU time.

    Raises:
        SystemExit: if there are too few, or they are of several machines.
    """
    found = [x for x in records if x["experiment"] == "attention" and x["status"] == "ok"]
    found = [x for x in found if x["summary"]["clock"] == "cpu" and x["config"]["exchange"] == "ring"]
    if len(machines := {x["machine"]["id"] for x in found}) > 1:
        sys.exit(f"records of several machines: {sorted(machines)}; give the folders of one")
    if len(found) < 2 * EVERY:
        sys.exit(f"{len(found)} points with CPU time: at least {2 * EVERY} are needed, as `make sweep` gives")
    return sorted(found, key=lambda record: record["point"])


def middle(cases: Sequence[Case], of: Hardware) -> float:
    """The median of absolute errors."""
    return median(abs(case.error(of)) for case in cases)


def calibrated(records: Sequence[dict]) -> tuple[Hardware, list[Case], list[Case]]:
    """The machine, the cases it was fitted on, and the others. Records are of one machine, by name of their points."""
    usual = compare.usual_probes(records)
    mine = [record for n, record in enumerate(records) if n % EVERY == 0]
    fitted = [case for record in mine for case in cases_of(record, usual)]
    others = [case for record in records if record not in mine for case in cases_of(record, usual)]
    dims = sorted({record["config"]["workload"]["head_dim"] for record in mine})
    wanted = RATES if any(record["config"]["backward"] for record in mine) else RATES[:1]
    start = {f"{name}/{dim}": 5e10 for name in wanted for dim in dims} | START
    commits = ", ".join(sorted({(record["commit"] or "unknown")[:7] for record in records}))
    source = f"{len(mine)} of {len(records)} records of {records[0]['config']['name']}, commit {commits}"
    of = fit(_nothing(records[0], source), fitted, start, source)
    return _bounded(replace(of, covers=_covers(records)), source), fitted, others


def cases_of(record: dict, usual: dict[str, float]) -> list[Case]:
    """The forward pass of a point and, if it has one, forward and backward; seconds on cores of usual speed."""
    config, summary = record["config"], record["summary"]
    workload, plan = call_of(config)

    def case(what: str, speed: str, passes: tuple[bool, ...]) -> Case:
        def predicted(trial: Hardware, bound: bool) -> Prediction:
            constants = Constants(Cluster(trial, 1, plan.world), bound)
            parts: dict[str, float] = {}
            for backward in passes:
                for name, seconds in attention_parts(workload, plan, constants, backward=backward).items():
                    parts[name] = parts.get(name, 0.0) + seconds * (name != "ring")
            parts["fixed"] += len(passes) * constants.extra("call_s")
            return Prediction(sum(parts.values()), parts, CALIBRATED, ())

        seconds = 1 / summary[speed] / compare.adjusted(record, usual)
        return Case(record["machine"]["id"], config["name"], (record["point"], what), seconds, predicted, about=record)

    if not config["backward"]:
        return [case("forward", "speed_per_s", (False,))]
    both = case("forward + backward", "speed_per_s", (False, True))
    alone = [case("forward", "forward_speed_per_s", (False,))] if "forward_speed_per_s" in summary else []
    return [*alone, both]


def _covers(records: Sequence[dict]) -> dict[str, tuple[int, int]]:
    configs = [record["config"] for record in records]
    sizes = {
        "seq": [x["seq"] for x in configs],
        "head_dim": [x["workload"]["head_dim"] for x in configs],
        "ranks": [compare.world(x) for x in configs],
        "element_bytes": [ELEMENT_BYTES[x["dtype"]] for x in configs],
    }
    return {name: (min(found), max(found)) for name, found in sizes.items()} | {"nodes": (1, 1)}


def _nothing(record: dict, source: str) -> Hardware:
    """A machine without a datasheet, before its fit: nothing limits a rate."""
    free = {"peak_flops_per_s": 1e18, "memory_bytes_per_s": MEMORY_BYTES_PER_S, "link_bytes_per_s": 1e18, "hop_s": 1e-9,
            "step_s": 1e-9, "overlap": 1.0}  # fmt: skip
    return with_values(Hardware(record["machine"]["id"], record["machine"]["cpu"], {}), free, source)


def _bounded(of: Hardware, source: str) -> Hardware:
    """The highest fitted rates stand for what a datasheet would promise."""
    rates = [value for name in RATES if name in of for value in of.constants[name].value.values()]
    copies = of["all_to_all_bytes_per_s"]
    more = {
        "peak_flops_per_s": (max(rates), f"no datasheet: the highest rate of {source}"),
        "memory_bytes_per_s": (MEMORY_BYTES_PER_S, "no datasheet: set, not fitted"),
        "link_bytes_per_s": (copies, f"no datasheet: copies of {source}"),
        "hop_bytes_per_s": (copies, f"set, not fitted: copies of {source}"),
        "hop_s": (1e-9, "set, not fitted: not in the clock"),
        "step_s": (1e-9, "set, not fitted: in call_s"),
        "overlap": (1.0, "set, not fitted: not in the clock"),
        "node_ranks": (of.covers["ranks"][1], "the ranks of the records"),
    }
    found = {name: Constant(value, UNITS[name], "fitted", text) for name, (value, text) in more.items()}
    return replace(of, constants={**of.constants, **found})
