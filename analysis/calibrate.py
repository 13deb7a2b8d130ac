"""Constants of hardware from what was measured: published tables, or records of experiments on this machine.

    python -m analysis.calibrate                    fit usp/cost/hardware/*.yaml and write docs/residuals.md
    python -m analysis.calibrate --check            write nothing; exit with 1 if something would change
    python -m analysis.calibrate results/sweep      fit this machine on a third of the points, predict the others

What is fitted is the cost model itself, `usp.cost.timing` with trial constants (`analysis.fitting`), to cases of
`analysis.measurements`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from analysis import measurements as m
from analysis.fitting import DIGITS, fit, values, with_values, yaml_text
from analysis.measurements import Case
from usp.cost.hardware import HARDWARE, UNITS, Constant, Hardware, hardware

USP, CP = "arXiv 2405.07719", "arXiv 2411.01783"

# ---------------------------------------------------------------------------------------------------
# Which constants come from which rows.


@dataclass(frozen=True)
class Job:
    """A fit: the same constants from all of its cases, or from those that are not held out.

    `kept` is what is held out when the constants are made that the library comes with.
    """

    hardware: str
    cases: tuple[Case, ...]
    start: Mapping[str, float]
    rows: str  # that it is fitted on, in words
    given: tuple[Mapping[str, Constant], ...] = ()
    held: Mapping[str, Callable[[Case], bool]] = field(default_factory=dict)
    kept: str = ""
    covers: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    base: Hardware | None = None  # datasheets; of the hardware, if it is not given
    shown: tuple[str, ...] = ("",)  # fits that the page has besides the one that is kept

    def fitted_on(self, held: str) -> list[Case]:
        return [case for case in self.cases if not held or not self.held[held](case)]

    def prepared(self) -> Hardware:
        """What is known before the fit."""
        base = self.base or datasheet(self.hardware)
        for more in self.given:
            base = replace(base, constants={**base.constants, **more})
        return replace(base, covers=self.covers)

    def run(self, held: str) -> Hardware:
        """The fit to the rows that are not held out."""
        rows = self.fitted_on(held)
        text = f"{self.rows}{f', without {held}' if held else ''} ({len(rows)} rows)"
        return fit(self.prepared(), rows, self.start, text)


def datasheet(name: str) -> Hardware:
    """Hardware as its maker describes it."""
    read = hardware(name)
    return replace(read, constants={k: x for k, x in read.constants.items() if x.kind == "datasheet"}, covers={})


def _given(values: Mapping[str, float], source: str, kind: str = "assumed") -> dict[str, Constant]:
    return {
        name: Constant(float(f"{value:.{DIGITS - 1}e}"), UNITS[name], kind, source) for name, value in values.items()
    }


def _layouts(*names: str) -> dict[str, Callable[[Case], bool]]:
    return {name: lambda case, name=name: case.about.layout == name for name in names}


LAYOUTS = ("striped", "zigzag", "contiguous")
_SMALL = "too small to be told apart in these rows"
ATTENTION = ("attention_flops_per_s", "attention_backward_flops_per_s", "merge_bytes_per_s", "step_s", "hop_s",
             "all_to_all_bytes_per_s", "overlap")  # fmt: skip


def used(table: str) -> tuple[Case, ...]:
    """Rows of an attention table that a fit may use."""
    return tuple(case for case in m.attention(table) if not case.outside and not case.doubt)


def _covers(cases: Iterable[Case]) -> dict[str, tuple[int, int]]:
    rows = [case.about for case in cases]

    def between(values: Iterable[int]) -> tuple[int, int]:
        return min(values := list(values)), max(values)

    return {
        "seq": between(row.length for row in rows),
        "head_dim": between(row.head_dim for row in rows),
        "ranks": between(row.gpus for row in rows),
        "nodes": (1, 1),
        "element_bytes": (2, 2),
    }


def a100() -> Job:
    rows = used("a100_nvlink")
    start = {
        "attention_flops_per_s/32": 1.6e14, "attention_flops_per_s/128": 2.3e14, "merge_bytes_per_s": 2e11,
        "step_s": 1e-4, "all_to_all_bytes_per_s": 3.4e10, "call_s": 2e-3,
    }  # fmt: skip
    hidden = "hops hide in these rows; from 20 GB/s up the mean error changes by 0.1 %"
    given = _given({"hop_s": 2e-5}, _SMALL), _given({"hop_bytes_per_s": 1.5e11, "overlap": 1.0}, hidden)
    text = f"{USP} repository, a100_nvlink, 131,072 tokens, separate"
    held, shown = _layouts(*LAYOUTS), ("", *LAYOUTS)
    return Job("a100_80gb", rows, start, text, given, held, "striped", _covers(rows), shown=shown)


def pcie4() -> Job:
    return _pcie("a100_80gb_pcie", "a100_pcie", "65,536 tokens", (32,), (2, 4))


def l20() -> Job:
    return _pcie("l20_48gb", "l20_pcie", "131,072 tokens", (32, 128), (2, 4, 8))


def _pcie(name: str, table: str, length: str, heads: tuple[int, ...], a2a: tuple[int, ...]) -> Job:
    """Links that are slow enough to tell hops, all-to-alls and how far hops hide apart."""
    rows = used(table)
    rates = {f"attention_flops_per_s/{dim}": 8e13 for dim in heads}
    start = rates | {"merge_bytes_per_s": 3e11, "hop_bytes_per_s": 1e10, "overlap": 0.5, "call_s": 1.5e-3}
    start |= {f"all_to_all_bytes_per_s/{n}": 4e9 for n in a2a}
    given = (_given({"hop_s": 2e-5, "step_s": 5e-5}, _SMALL),)
    text = f"{USP} repository, {table}, {length}, separate"
    return Job(name, rows, start, text, given, _layouts(*LAYOUTS), "", _covers(rows), shown=LAYOUTS)


def backward(base: Hardware) -> Job:
    """Of 8 x A100, from the rows without a ring, whose time is that of the kernels."""
    rows = m.attention("a100_nvlink_backward")
    held = {"rings": lambda case: case.about.ring > 1}
    start = {"attention_backward_flops_per_s/128": 2e14}
    text = f"{USP} repository, a100_nvlink_backward (65,536 tokens without a mask)"
    covers = {**base.covers, "seq": (65536, 131072)}
    return Job("a100_80gb", rows, start, text, held=held, kept="rings", base=base, covers=covers, shown=())


def a800(like: Hardware) -> Job:
    """The matrices, and collectives between them, from data parallel steps; attention as on the A100."""
    taken = {
        name: replace(like.constants[name], kind="borrowed", source=f"a100_80gb: {like.constants[name].source}")
        for name in ATTENTION
    }
    held = {"Ulysses, and under 2,048 tokens": lambda case: case.about.plan.ulysses > 1 or case.about.seq < 2048}
    start = {"linear_flops_per_s": 2.2e14, "collective_bytes_per_s": 1.5e11}
    text = f"{USP}, figure 5 (data_parallel.csv)"
    covers = {**like.covers, "seq": (2048, 131072), "head_dim": (128, 128), "ranks": (1, 8)}
    return Job("a800_80gb", m.data_parallel(), start, text, (taken,), held, next(iter(held)), covers, shown=())


def a800_hops(fitted: Hardware) -> Hardware:
    """A hop of a ring is a step of a collective over the same links."""
    source = "as collective_bytes_per_s: a collective is a ring of such hops"
    return replace(
        fitted, constants={**fitted.constants, **_given({"hop_bytes_per_s": fitted["collective_bytes_per_s"]}, source)}
    )


def a100_in_models(fitted: Hardware, like: Hardware) -> Hardware:
    """The same chip has the same rate in matrices; the links of the A800 are slower."""
    taken = {}
    for name, why in (("linear_flops_per_s", "the same chip"), ("collective_bytes_per_s", "whose links are slower")):
        source = f"a800_80gb, {why}: {like.constants[name].source}"
        taken[name] = replace(like.constants[name], kind="borrowed", source=source)
    return replace(fitted, constants={**fitted.constants, **taken})


def networked(one: Hardware, like: Hardware) -> Hardware:
    """Links between nodes: of what the datasheet promises the same share as where it was measured."""
    share = (
        like["network_hop_bytes_per_s"] / like["network_bytes_per_s"],
        like["network_all_to_all_bytes_per_s"] / like["network_bytes_per_s"],
    )
    source = f"h100_96gb, of the datasheet {share[0]:.0%} in hops and {share[1]:.0%} in all-to-alls: {CP}, table 5"
    assumed = {
        "network_hop_s": like["network_hop_s"],
        "network_hop_bytes_per_s": share[0] * one["network_bytes_per_s"],
        "network_all_to_all_s": like["network_all_to_all_s"],
        "network_all_to_all_bytes_per_s": share[1] * one["network_bytes_per_s"],
    }
    return replace(one, constants={**one.constants, **_given(assumed, source, "borrowed")})


def h100() -> Job:
    steps = dict(m.ring_steps())
    rate = steps.pop("attention_flops_per_s")
    text = f"{CP}, table 5: a line through the smallest and the largest size"
    table = {"128": float(f"{rate:.{DIGITS - 1}e}")}
    given = (
        {"attention_flops_per_s": Constant(table, "FLOP/s", "measured", f"{CP}, table 5: mean of two miss rates")},
        _given(steps, text, "measured"),
        _given({"collective_bytes_per_s": 4.5e11}, "the datasheet's: not told apart from linear_flops_per_s"),
    )
    held = {"pass_q": lambda case: case.about[2] == "pass_q"}
    start = {"linear_flops_per_s": 6e14, "turn_s": 0.5, "overlap": 0.8}
    covers = {"head_dim": (128, 128), "nodes": (1, m.RING), "ranks": (1, m.RING), "element_bytes": (2, 2)}
    covers |= {"seq": (8192, 131072), "batch": (1, 1)}
    text = f"{CP}, table 4: TTFT, and by how much pass_q is faster at 1,280 and 3,200 new tokens"
    apart = m.turn_differences()
    cases = tuple(case for case in m.turns() if case.about not in [(*one.about[:2], "pass_q") for one in apart])
    return Job("h100_96gb", (*cases, *apart), start, text, given, held, "pass_q", covers)


def decode(base: Hardware) -> Job:
    cases = tuple(case for case in m.decode_steps() if case.what[0] == "CP1 TP8")
    text = f"{CP}, table 6: TTIT of TP8, MLPs in FP8"
    return Job("h100_96gb", cases, {"decode_layer_s": 1.5e-4}, text, base=base, covers=base.covers, shown=())


@dataclass(frozen=True)
class Calibration:
    """All of the library's hardware that is fitted, and what the same fits give with other rows held out."""

    hardware: Mapping[str, Hardware]
    jobs: tuple[Job, ...]
    others: Mapping[str, Mapping[str, Mapping[str, float]]]  # hardware, what is held out, constant

    def other(self, job: Job, held: str) -> Hardware:
        """Hardware with the constants of a fit whose constants the library does not come with."""
        return with_values(job.prepared(), self.others[job.hardware][held], held or "all rows")


def fit_all() -> Calibration:
    """Everything that is fitted on published rows."""
    others: dict[str, dict[str, dict[str, float]]] = {}

    def kept(job: Job) -> Hardware:
        for held in ("", *job.held):
            if held != job.kept and held in job.shown:
                others.setdefault(job.hardware, {})[held] = values(job.run(held), job.start)
        return job.run(job.kept)

    sxm = kept(backward(kept(a100())))
    prefill = kept(decode(kept(h100())))
    like = networked(a800_hops(kept(a800(sxm))), prefill)
    found = [networked(a100_in_models(sxm, like), prefill), kept(pcie4()), kept(l20()), like, prefill]
    return Calibration({one.name: one for one in found}, jobs({one.name: one for one in found}), others)


def stored() -> Calibration:
    """The same from the files, without a fit."""
    found = {name: hardware(name) for name in FITTED}
    return Calibration(found, jobs(found), json.loads(OTHERS.read_text()))


def jobs(found: Mapping[str, Hardware]) -> tuple[Job, ...]:
    sxm, prefill = found["a100_80gb"], found["h100_96gb"]
    return a100(), backward(sxm), pcie4(), l20(), a800(sxm), h100(), decode(prefill)


# ---------------------------------------------------------------------------------------------------
# Files.

FITTED = ("a100_80gb", "a100_80gb_pcie", "l20_48gb", "a800_80gb", "h100_96gb")
OTHERS = Path(__file__).parent / "held_out.json"
PAGE = Path(__file__).parent.parent / "docs" / "residuals.md"


def files(found: Calibration) -> dict[Path, str]:
    """What is written, by path."""
    from analysis.residuals import page

    written = {}
    for name, one in found.hardware.items():
        path = HARDWARE / f"{name}.yaml"
        written[path] = yaml_text(one, path.read_text().partition("\n")[0])
    written[OTHERS] = json.dumps(found.others, indent=1) + "\n"
    written[PAGE] = page(found)
    return written


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m analysis.calibrate", description="Fit the constants of hardware to what was measured."
    )
    parser.add_argument("records", nargs="*", type=Path, help="fit this machine to the records below these folders")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file would change")
    args = parser.parse_args()
    if args.records:
        from analysis import this_machine

        this_machine.main(args.records)
        return
    written = files(fit_all())
    changed = [path for path, text in written.items() if not path.exists() or path.read_text() != text]
    for path in changed:
        if not args.check:
            path.write_text(written[path])
        print(f"{'would change' if args.check else 'written'}: {path.relative_to(PAGE.parent.parent)}")
    sys.exit(bool(args.check and changed))


if __name__ == "__main__":
    main()
