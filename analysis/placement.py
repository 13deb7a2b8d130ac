"""Where the axes of a mesh should lie on hosts with slow links: points of emulated clusters, rate by rate.

Note [Picks]
~~~~~~~~~~~~
What the cost model would have picked at a rate comes from constants that were fitted on the other rates of the study
alone: kernels, merging, links inside a host, what overlaps. The rate between hosts is not fitted, it is what was set,
and a host has one link, which its ranks share.

Note [Usual cores]
~~~~~~~~~~~~~~~~~~
Other tenants of a machine make its cores slower by up to a half, for seconds. So the part of a call in which the cores
compute (CPU seconds of all ranks / cores) is counted at their usual speed, by a fixed piece of work timed beside each
call, the probe; the part in which they wait for links stays as it was. Records have wall times as they were.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from statistics import mean, median

from analysis import compare
from analysis.fitting import fit, with_values
from analysis.measurements import Case, call_of
from usp.cost.hardware import Cluster, Hardware
from usp.cost.timing import Prediction, predict

PARTS = {"forward": "forward_", "forward + backward": ""}  # and how the speed of it is called in a summary
START = {
    "merge_bytes_per_s": 5e9,
    "hop_bytes_per_s": 2e9,
    "all_to_all_bytes_per_s": 2e9,
    "call_s": 5e-3,
    "overlap": 0.5,
}


@dataclass(frozen=True)
class Choice:
    """One mesh and layout at one rate, one part of a call; several records of it, which differ in seed, are rounds."""

    records: tuple[dict, ...]
    part: str
    usual_s: float  # what the probe takes on cores of usual speed; 0 if there were no probes

    @property
    def record(self) -> dict:
        return self.records[0]

    @property
    def name(self) -> str:
        return f"{compare.mesh_label(self.record['config'])} {self.record['config']['layout']['name']}"

    @property
    def kind(self) -> str:
        mesh = self.record["config"]["mesh"]
        if mesh["ring"] == 1 or mesh["ulysses"] == 1:
            return "Ulysses" if mesh["ring"] == 1 else "ring"
        return "hybrid" if mesh["inner"] == "ulysses" else "swapped"

    @property
    def calls_s(self) -> list[float]:
        """Wall time of each call in all rounds, of the rank that took longest, sorted; see Note [Usual cores]."""
        found = []
        for record in self.records:
            ranks, cores = record["ranks"], min(record["machine"]["cores"], len(record["ranks"]))
            names = f"{PARTS[self.part]}wall_s", f"{PARTS[self.part]}cpu_s", "probe_s"
            walls, busy, probes = (list(zip(*(rank[name] for rank in ranks), strict=True)) for name in names)
            for wall_s, cpu_s, probe_s in zip(walls, busy, probes, strict=True):
                usual = self.usual_s / mean(probe_s) if self.usual_s else 1.0
                found.append(max(wall_s) - sum(cpu_s) / cores * (1 - usual))
        return sorted(found)

    @property
    def seconds(self) -> float:
        """The median of the calls."""
        return median(self.calls_s)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Half of the calls took seconds between these."""
        calls_s = self.calls_s
        quarter = len(calls_s) // 4
        return calls_s[quarter], calls_s[-1 - quarter]


@dataclass(frozen=True)
class Rate:
    """All meshes at one rate."""

    gbit_per_s: float
    choices: tuple[Choice, ...]
    predicted_s: dict[str, float]  # by name; empty if there was nothing to fit on

    @property
    def best(self) -> Choice:
        return min(self.choices, key=lambda x: x.seconds)

    def fastest(self, kind: str) -> Choice | None:
        return min((x for x in self.choices if x.kind == kind), key=lambda x: x.seconds, default=None)

    @property
    def pick(self) -> Choice | None:
        """What is predicted to be fastest."""
        if not self.predicted_s:
            return None
        return min(self.choices, key=lambda x: self.predicted_s[x.name])

    def over(self, one: str, other: str) -> float | None:
        """Seconds of the fastest of a kind over those of another kind's."""
        a, b = self.fastest(one), self.fastest(other)
        return a.seconds / b.seconds if a and b else None

    @property
    def loss(self) -> float | None:
        """By how much what is picked takes longer than the best."""
        return self.pick.seconds / self.best.seconds - 1 if self.pick else None


@dataclass(frozen=True)
class Study:
    """One workload on one cluster, part of a call, by rate."""

    title: str
    part: str
    rates: tuple[Rate, ...]

    def crossovers(self, one: str, other: str) -> list[float]:
        """Rates (Gbit/s) at which two kinds are equally fast, on logarithmic scales between those measured."""
        known = [(rate.gbit_per_s, ratio) for rate in self.rates if (ratio := rate.over(one, other)) is not None]
        found = []
        for (a, x), (b, y) in pairwise(known):
            if (x < 1) != (y < 1):
                share = math.log(x) / (math.log(x) - math.log(y))
                found.append(math.exp(math.log(a) * (1 - share) + math.log(b) * share))
        return found


def studies(records: Iterable[dict]) -> list[Study]:
    """Of the records on emulated clusters that have a result; those of one workload and cluster are one study."""
    found: dict[str, list[dict]] = {}
    machines: dict[tuple, list[dict]] = {}
    for record in records:
        if record["experiment"] == "attention" and record["config"]["cluster"] and record["status"] == "ok":
            found.setdefault(title(record), []).append(record)
            machines.setdefault(_machine_of(record), []).append(record)
    usual_s = {name: usual_probe(members) for name, members in machines.items()}
    return [
        _study(name, part, members, machines[_machine_of(members[0])], usual_s[_machine_of(members[0])])
        for name, members in found.items()
        for part in _parts(members)
    ]


def _machine_of(record: dict) -> tuple:
    """Points for which one set of constants should hold."""
    cluster = record["config"]["cluster"]
    return record["machine"]["id"], record["config"]["dtype"], cluster["hosts"], cluster["ranks_per_host"]


def title(record: dict) -> str:
    """What the points of a study have in common."""
    config = record["config"]
    workload, cluster = config["workload"], config["cluster"]
    window = "" if config["window"] is None else f" with window {config['window']}"
    return ", ".join(
        (
            f"{workload['heads']}/{workload['kv_heads']} heads x {workload['head_dim']}",
            f"batch {workload['batch']}",
            f"{config['seq']:,} tokens",
            config["dtype"],
            ("causal" if config["causal"] else "full") + window,
            f"{cluster['hosts']} hosts x {cluster['ranks_per_host']} ranks",
            *([] if config["exchange"] == "ring" else [f"exchange {config['exchange']}"]),
            *([] if config["backend"] == "auto" else [f"backend {config['backend']}"]),
        )
    )


def _parts(records: Sequence[dict]) -> list[str]:
    return list(PARTS) if all(record["config"]["backward"] for record in records) else ["forward"]


def usual_probe(records: Iterable[dict]) -> float:
    """The median of what the probe took in all calls of all ranks."""
    return median(probe_s for record in records for rank in record["ranks"] for probe_s in rank["probe_s"])


def choices(records: Iterable[dict], part: str, usual_s: float) -> dict[float, list[Choice]]:
    """By rate, from pure Ulysses to pure ring."""
    found: dict[tuple, list[dict]] = {}
    for record in sorted(records, key=lambda x: (compare.mesh_order(x["config"]), x["config"]["seed"])):
        config = record["config"]
        key = config["cluster"]["gbit_per_s"], title(record), compare.mesh_label(config), config["layout"]["name"]
        found.setdefault(key, []).append(record)
    rates: dict[float, list[Choice]] = {}
    for (rate, *_), members in found.items():
        rates.setdefault(rate, []).append(Choice(tuple(members), part, usual_s))
    return rates


def _study(name: str, part: str, records: list[dict], all_records: list[dict], usual_s: float) -> Study:
    rates = choices(records, part, usual_s)
    found = []
    for rate in sorted(rates):
        of = fitted(all_records, rate, usual_s)
        predicted = {x.name: case(x).seconds(of) for x in rates[rate]} if of else {}
        found.append(Rate(rate, tuple(rates[rate]), predicted))
    return Study(name, part, tuple(found))


def fitted(records: Sequence[dict], without: float, usual_s: float) -> Hardware | None:
    """Constants from the points at all other rates; None if there are too few of them."""
    others = [record for record in records if record["config"]["cluster"]["gbit_per_s"] != without]
    cases = [case(x) for part in _parts(others) for some in choices(others, part, usual_s).values() for x in some]
    if len(cases) <= len(START) + 2:
        return None
    key = tuple((*one.what, one.measured_s) for one in cases)
    if key not in _fits:
        _fits[key] = _fit(others, cases, without)
    return _fits[key]


_fits: dict[tuple, Hardware] = {}  # a table and a picture of the same records need the same ones, seconds each


def _fit(others: Sequence[dict], cases: Sequence[Case], without: float) -> Hardware:
    dims = {str(record["config"]["workload"]["head_dim"]) for record in others}
    names = ["attention_flops_per_s", *["attention_backward_flops_per_s"] * (len(_parts(others)) > 1)]
    start = {f"{name}/{dim}": 2e10 for name in names for dim in dims} | START
    source = f"{len(others)} points of {others[0]['config']['name']} at other rates than {without:g} Gbit/s"
    return fit(_machine(source), cases, start, source, starts=1)


@cache
def _machine(source: str) -> Hardware:
    """Before anything is fitted: nothing limits a rate, and hops begin at once."""
    free = {"peak_flops_per_s": 1e18, "memory_bytes_per_s": 1e10, "link_bytes_per_s": 1e18, "network_bytes_per_s": 1e18,
            "hop_s": 1e-4, "network_hop_s": 2e-4, "step_s": 1e-4, "network_adapters": 1}  # fmt: skip
    return with_values(Hardware("this_machine", "this machine", {}), free, source, "assumed")


def case(choice: Choice) -> Case:
    """What was measured, and how it is predicted on a cluster with the link that was set."""
    config = choice.record["config"]
    workload, plan = call_of(config)
    shape = config["cluster"]
    link = {"network_hop_bytes_per_s": shape["gbit_per_s"] * 1e9 / 8}
    source = f"the limit of {shape['gbit_per_s']:g} Gbit/s that was set"

    def predicted(trial: Hardware, bound: bool) -> Prediction:
        cluster = Cluster(with_values(trial, link, source, "measured"), shape["hosts"], shape["ranks_per_host"])
        return predict(workload, plan, cluster, backward=choice.part != "forward", bound=bound)

    what = title(choice.record), f"{shape['gbit_per_s']:g} Gbit/s", choice.name, choice.part
    return Case("this machine", config["name"], what, choice.seconds, predicted, about=choice)
