"""Constants fitted to published tables: files, page and what they promise, and a fit to records of this machine."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from analysis import calibrate, fitting, published, residuals, this_machine
from analysis import measurements as m
from analysis.measurements import Case
from usp.cost.hardware import HARDWARE, UNITS, Constant, Hardware, hardware, known_hardware, read_hardware
from usp.cost.timing import LOWER_BOUND
from usp.cost.workload import plain_yaml


@cache
def stored() -> calibrate.Calibration:
    return calibrate.stored()


def every_case() -> list[Case]:
    attention = [case for table in m.MACHINES for case in m.attention(table)]
    return [*attention, *m.end_to_end(), *m.data_parallel(), *m.turns(), *m.whole_prompts(), *m.decode_steps()]


def error(cases: list[Case]) -> tuple[float, float]:
    found = [abs(case.error(stored().hardware[case.machine])) for case in cases]
    return sum(found) / len(found), max(found)


# ---------------------------------------------------------------------------------------------------
# Files.


def test_page_is_that_of_the_files() -> None:
    """Constants or the model changed and the page did not: `python -m analysis.calibrate` writes both."""
    assert residuals.page(stored()) == calibrate.PAGE.read_text()


@pytest.mark.parametrize("name", calibrate.FITTED)
def test_files_are_as_they_are_written(name: str) -> None:
    """Somebody edited a file of constants by hand."""
    text = (HARDWARE / f"{name}.yaml").read_text()
    assert fitting.yaml_text(hardware(name), text.partition("\n")[0]) == text


@pytest.mark.parametrize("name", known_hardware())
def test_reader_reads_yaml(name: str) -> None:
    """Numbers that are text to a reader of YAML, as 1e-05 is, or a form that only ours reads."""
    yaml = pytest.importorskip("yaml")
    text = (HARDWARE / f"{name}.yaml").read_text()
    assert plain_yaml(text) == yaml.safe_load(text)


def test_quick_fits_give_what_the_files_hold() -> None:
    """The fit changed and constants did not. The others take a minute: `python -m analysis.calibrate --check`."""
    for job in stored().jobs:
        if len(job.start) <= 2:
            fitted = job.run(job.kept)
            assert fitting.values(fitted, job.start) == fitting.values(hardware(job.hardware), job.start), job.rows


def test_a_number_is_one_in_json_and_yaml() -> None:
    yaml = pytest.importorskip("yaml")
    for value in (1e-9, 5e-5, 0.002136, 0.6201, 1.0, 8.0, 1234.0, 3.12e14, 8e10, 1.195e14):
        text = fitting.number(value)
        assert json.loads(text) == yaml.safe_load(text) == value, text


def test_ceilings_are_the_datasheets() -> None:
    """A fitted rate above the peak would make the bound more than the prediction."""
    base = calibrate.datasheet("l20_48gb")
    values = {"attention_flops_per_s/32": 1e20, "overlap": 3.0, "hop_bytes_per_s": 1e20}
    found = fitting.values(fitting.with_values(base, values, "test"), values)
    assert list(found.values()) == [base["peak_flops_per_s"], 1.0, base["link_bytes_per_s"]]


def test_nelder_mead() -> None:
    point, value = fitting.nelder_mead(lambda x: (x[0] - 3) ** 2 + abs(x[1] + 1), [0.0, 0.0], 0.5)
    assert point == pytest.approx([3, -1], abs=1e-2)
    assert value < 1e-3


# ---------------------------------------------------------------------------------------------------
# What was published.


def test_published_columns_are_the_formulas() -> None:
    """Seconds of a training step come from FLOPs by a formula: it must be the one that was used."""
    cases = [*m.end_to_end(), *m.data_parallel()]
    assert len(cases) == 48
    for case in cases:
        step = case.about
        ratio = step.flops(0.5) / step.flops(1.0)
        rounding = 0.006 / step.causal + 0.06 / step.full
        assert step.causal / step.full == pytest.approx(ratio, rel=rounding), case.what


def test_counts_of_rows() -> None:
    rows = [row for table in m.MACHINES for row in published.rows(table)]
    assert (sum(not row.backward for row in rows), sum(row.backward for row in rows)) == (298, 16)
    assert sum(row.calls_per_s is None for row in rows) == 1
    assert sum(not row.causal for row in rows) == 12
    assert all(row.doubt for row in rows if not row.causal)


def test_bounds() -> None:
    """What datasheets promise is never slower than a prediction, nor than what was measured where nothing speaks
    against the number."""
    for case in every_case():
        of = stored().hardware[case.machine]
        bound = case.predict(of, True).seconds
        assert bound <= case.seconds(of) * (1 + 1e-12), (case.source, case.what)
        if not case.doubt:
            assert bound <= case.measured_s, (case.source, case.what)


# ---------------------------------------------------------------------------------------------------
# How good it is.


def test_a100() -> None:
    rows = [case for case in m.attention("a100_nvlink") if not case.outside]
    assert len(rows) == 63
    average, worst = error(rows)
    assert average <= 0.03, "the best fit known before, to all of the rows"
    assert worst <= 0.117
    held = [case for case in rows if case.about.layout == "striped"]
    average, worst = error(held)
    assert average <= 0.04
    assert worst <= 0.13


@pytest.mark.parametrize(("table", "count"), [("a100_pcie", 9), ("l20_pcie", 24)])
def test_pcie(table: str, count: int) -> None:
    rows = [case for case in m.attention(table) if not case.outside]
    assert len(rows) == count
    assert error(rows)[0] <= 0.03


def test_rows_held_out_of_the_other_fits() -> None:
    """Each layout, held out in turn: 8 % on average at most, with PCIe, where rows are few."""
    found = [(job, held, of) for job, held, of in residuals.fits(stored()) if held in calibrate.LAYOUTS]
    assert len(found) == 9
    for job, held, of in found:
        out = [case for case in job.cases if case not in job.fitted_on(held)]
        average = residuals.errors(out, of)[0]
        assert average <= (0.04 if job.hardware == "a100_80gb" else 0.08), (job.hardware, held)


def test_prefill() -> None:
    assert error(list(m.turns()))[0] <= 0.04
    choices = residuals.turn_choices(stored())
    assert len(choices) == 14
    assert sum(lost_s for *_, lost_s in choices) <= 0.010


def test_training_steps() -> None:
    """Nothing is fitted on them."""
    cases, of = list(m.end_to_end()), stored().hardware["a800_80gb"]
    assert not any(case in job.cases for job in stored().jobs for case in cases)
    assert error(cases)[0] <= 0.11
    rest = [case for case in cases if not residuals.strange(case)]
    assert len(cases) - len(rest) == 7
    assert error(rest)[0] <= 0.07
    assert residuals.rank_correlation(rest, of) >= 0.6


def test_decisions() -> None:
    losses = [group[-1] for group in residuals.decisions(stored()) if residuals.counts(group[1])]
    assert len(losses) == 9
    assert sum(losses) / 9 <= 0.03
    assert max(losses) <= 0.08


def test_basis_of_fitted_rows() -> None:
    """A constant that is missing makes a bound of what should be calibrated."""
    for job in stored().jobs:
        for case in job.fitted_on(job.kept):
            found = case.predict(hardware(job.hardware), False)
            assert found.basis != LOWER_BOUND, (case.source, case.what, found.notes)


# ---------------------------------------------------------------------------------------------------
# This machine.


def machine() -> Hardware:
    values = {"attention_flops_per_s/32": 5e10, "attention_backward_flops_per_s/32": 6e10, "merge_bytes_per_s": 2e9,
              "all_to_all_bytes_per_s": 3e9, "call_s": 5e-3}  # fmt: skip
    free = {"peak_flops_per_s": 1e18, "memory_bytes_per_s": 1e10, "link_bytes_per_s": 1e18, "hop_s": 1e-9,
            "step_s": 1e-9, "overlap": 1.0}  # fmt: skip
    base = {name: Constant(value, UNITS[name], "measured", "test") for name, value in free.items()}
    return fitting.with_values(Hardware("here", "here", base), values, "test")


def sweep(noise: float) -> list[dict]:
    """Records of the sweep's points as that machine would have made them, on cores of two speeds."""
    made = []
    for n, (ulysses, ring, layout, seq) in enumerate(
        (u, 4 // u, layout, seq) for u in (4, 2, 1) for layout in ("contiguous", "zigzag") for seq in (512, 2048)
    ):
        config = {
            "name": "sweep", "mesh": {"ulysses": ulysses, "ring": ring}, "layout": {"name": layout}, "seq": seq,
            "workload": {"batch": 2, "heads": 32, "kv_heads": 32, "head_dim": 32}, "dtype": "float32",
            "causal": True, "window": None, "backward": True, "exchange": "ring",
            "replicate_kv": False,
        }  # fmt: skip
        summary = {"clock": "cpu", "probe_s": 0.01 * (1 + n % 2), "speed_per_s": 1.0, "forward_speed_per_s": 1.0}
        record = {
            "experiment": "attention", "status": "ok", "point": f"u{ulysses}r{ring}-{layout}-{seq}",
            "machine": {"id": "here", "cpu": "a processor"}, "commit": "0123456", "config": config, "summary": summary,
        }  # fmt: skip
        slower = summary["probe_s"] / 0.015
        for case in this_machine.cases_of(record, {"here": summary["probe_s"]}):
            key = "forward_speed_per_s" if case.what[1] == "forward" else "speed_per_s"
            summary[key] = 1 / (case.seconds(machine()) * slower * (1 + noise * (-1) ** n))
        made.append(record)
    return sorted(made, key=lambda record: record["point"])


def test_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    records = sweep(0.03)
    of, fitted, others = this_machine.calibrated(records)
    assert (len(fitted), len(others)) == (8, 16)
    assert not {id(case.about) for case in fitted} & {id(case.about) for case in others}
    assert this_machine.middle(others, of) <= 0.15
    monkeypatch.setattr(this_machine.kept, "load", lambda *folders: records)
    this_machine.main([tmp_path])
    assert "not fitted on" in capsys.readouterr().out
    read = read_hardware(tmp_path / "hardware_here.yaml")
    assert read.covers["seq"] == [512, 2048]
    assert "4 of 12 records of sweep, commit 0123456" in read.constants["call_s"].source
    assert replace(of, name=read.name, covers=read.covers) == read
    assert all(case.predict(of, True).seconds <= case.seconds(of) for case in fitted + others)


def test_this_machine_refuses() -> None:
    records = sweep(0.0)
    with pytest.raises(SystemExit, match="at least 6"):
        this_machine.usable(records[:4])
    with pytest.raises(SystemExit, match="several machines"):
        this_machine.usable([*records, {**records[0], "machine": {"id": "there"}}])
    assert math.isfinite(this_machine.middle(this_machine.calibrated(records)[1], machine()))
