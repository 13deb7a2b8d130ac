"""The two-level study on made-up machines, where the right answers are known."""

from __future__ import annotations

import pytest

from analysis import figures, placement, tables
from analysis import records as kept
from analysis.fitting import with_values
from usp.cost.hardware import Cluster
from usp.cost.timing import predict

MESHES = {"u4r1": (4, 1, "ulysses"), "u2r2": (2, 2, "ulysses"), "u1r4": (1, 4, "ulysses"), "swapped": (2, 2, "ring")}
RATES = (0.1, 1.0, 10.0)
TRUTH = {
    "attention_flops_per_s/64": 5e10, "attention_backward_flops_per_s/64": 6e10, "merge_bytes_per_s": 4e9,
    "hop_bytes_per_s": 3e9, "all_to_all_bytes_per_s": 1.5e9, "call_s": 4e-3, "overlap": 0.8,
}  # fmt: skip


def point(mesh: str, rate: float, kv_heads: int, noise: float = 0.0, backward: bool = True) -> dict:
    """The record of a point as that machine would have made it."""
    ulysses, ring, inner = MESHES[mesh]
    config = {
        "name": "two_level", "seq": 8192, "causal": True, "window": None, "dtype": "bfloat16", "backward": backward,
        "exchange": "ring", "replicate_kv": True, "backend": "auto", "device": "auto", "seed": 0,
        "mesh": {"ulysses": ulysses, "ring": ring, "inner": inner}, "layout": {"name": "zigzag"},
        "workload": {"batch": 1, "heads": 8, "kv_heads": kv_heads, "head_dim": 64},
        "cluster": {"hosts": 2, "ranks_per_host": 2, "gbit_per_s": rate},
        "published": {"table": None, "length": None, "factor": 1, "only": False},
    }  # fmt: skip
    record = {
        "schema": kept.SCHEMA, "experiment": "attention", "status": "ok", "config": config, "started": f"{mesh} {rate}",
        "point": f"{mesh}-{rate}-{kv_heads}", "machine": {"id": "here", "cpu": "a processor", "cores": 2},
        "versions": {"torch": "2"}, "summary": {"forward_speed_per_s": 1.0, "speed_per_s": 1.0},
        "ranks": [{"wall_s": [1.0], "forward_wall_s": [1.0], "cpu_s": [1.0], "forward_cpu_s": [1.0], "probe_s": [0.0]}],
    }  # fmt: skip
    seconds: dict[str, list[float]] = {}
    for part, name in placement.PARTS.items():
        found = predicted(record, part) * (1 + noise)
        seconds[f"{name}cpu_s"], seconds["probe_s"] = 9 * [found / 2], 9 * [0.01]
        seconds[f"{name}wall_s"] = [found * x for x in (0.8, 0.9, 0.95, 1.0, 1.0, 1.0, 1.05, 1.1, 1.2)]
        record["summary"][f"{name}speed_per_s"] = 1 / found
    counted = 1_000_000
    links = [{"host": host, "counted_bytes": counted, "interface_bytes": 1.01 * counted} for host in "ab"]
    record["summary"] |= {"clock": "wall", "device": "cpu", "kernels": ["sdpa"], "links": links}
    record["ranks"] = [seconds] * 4
    return record


def predicted(record: dict, part: str) -> float:
    of = with_values(placement._machine("a test"), TRUTH, "a test")
    return placement.case(placement.Choice((record,), part, 0.0)).seconds(of)


def sweep(noise: float = 0.0, backward: bool = True) -> list[dict]:
    return [
        point(mesh, rate, kv_heads, noise * (-1) ** n, backward)
        for kv_heads in (8, 2)
        for rate in RATES
        for n, mesh in enumerate(MESHES)
    ]


@pytest.fixture(scope="module")
def found() -> list[placement.Study]:
    return placement.studies(sweep(0.02, backward=False))


def test_studies_hold_what_belongs_together(monkeypatch):
    monkeypatch.setattr(placement, "fitted", lambda *arguments: None)
    found = placement.studies(sweep())
    assert [(study.title.split(",")[0], study.part) for study in found] == [
        (heads, part) for heads in ("8/8 heads x 64", "8/2 heads x 64") for part in placement.PARTS
    ]
    for study in found:
        assert [rate.gbit_per_s for rate in study.rates] == sorted(RATES)
        assert [choice.kind for choice in study.rates[0].choices] == ["Ulysses", "hybrid", "swapped", "ring"]
        assert study.rates[0].best.seconds == min(choice.seconds for choice in study.rates[0].choices)
        first = study.rates[0].choices[0]
        assert first.quartiles == (pytest.approx(0.95 * first.seconds), pytest.approx(1.05 * first.seconds))


def test_picks_come_from_the_other_rates(found):
    """What was measured at a rate does not change what is predicted there; picks are good, seconds are met."""
    for study in found:
        for rate in study.rates:
            assert rate.loss is not None
            assert rate.loss < 0.05
            for choice in rate.choices:
                assert rate.predicted_s[choice.name] == pytest.approx(choice.seconds, rel=0.15)
    changed = sweep(0.02, backward=False)
    for record in changed:
        if record["config"]["cluster"]["gbit_per_s"] == 1.0:
            for rank in record["ranks"]:
                rank["forward_wall_s"] = [seconds / 3 for seconds in rank["forward_wall_s"]]
    again = placement.studies(changed)
    for study, before in zip(again, found, strict=True):
        assert study.rates[1].predicted_s == before.rates[1].predicted_s
        assert study.rates[0].predicted_s != before.rates[0].predicted_s


def test_the_link_is_the_one_that_was_set():
    """Bytes over the rate of one link for each host, which its ranks share: an all-to-all across two hosts by hand."""
    record = point("u4r1", 0.1, 8)
    case = placement.case(placement.Choice((record,), "forward", 0.0))
    of = with_values(placement._machine("a test"), TRUTH | {"all_to_all_bytes_per_s": 1e17}, "a test")
    tensor = 8192 // 4 * 8 * 64 * 2  # bytes of one rank's q
    away = 4 * tensor * 2 // 4 * 2  # of q, k, v, out half goes to the other host; of two ranks
    parts = case.predict(of, False).parts
    assert parts["all_to_all"] == pytest.approx(away / (0.1e9 / 8), rel=0.01)


def test_too_few_points_predict_nothing():
    """One rate has no others; then nothing is picked, and the table says so."""
    (study, _) = placement.studies([point(mesh, 1.0, 8) for mesh in MESHES])
    assert study.rates[0].pick is study.rates[0].loss is None
    assert study.rates[0].predicted_s == {}


def test_crossovers_lie_between_rates(found):
    for study in found:
        signs = [rate.over("Ulysses", "hybrid") < 1 for rate in study.rates]
        changes = [n for n in range(len(signs) - 1) if signs[n] != signs[n + 1]]
        for n, rate in zip(changes, study.crossovers("Ulysses", "hybrid"), strict=True):
            assert RATES[n] <= rate <= RATES[n + 1]


def test_a_crossover_by_hand():
    """Twice as long at 1 and half as long at 4 Gbit/s: equal at 2."""

    def choice(mesh: str, rate: float, seconds: float) -> placement.Choice:
        record = point(mesh, rate, 8)
        record["ranks"] = [{"forward_wall_s": [seconds], "forward_cpu_s": [0.0], "probe_s": [0.0]}]
        return placement.Choice((record,), "forward", 0.0)

    rates = tuple(
        placement.Rate(rate, (choice("u4r1", rate, seconds), choice("u2r2", rate, 1.0)), {})
        for rate, seconds in ((1.0, 2.0), (4.0, 0.5))
    )
    assert placement.Study("", "forward", rates).crossovers("Ulysses", "hybrid") == [pytest.approx(2.0)]
    assert rates[0].over("Ulysses", "hybrid") == 2.0
    assert rates[0].over("ring", "hybrid") is None


def test_rounds_are_one_choice():
    """Records that differ in seed: the median of all calls, of the slowest rank in each."""
    first, second = point("u2r2", 1.0, 8), point("u2r2", 1.0, 8)
    second["config"]["seed"] = 1
    for record, seconds in ((first, [1.0, 2.0, 3.0]), (second, [7.0, 8.0, 9.0, 2.5])):
        both = seconds, [x + 0.1 for x in seconds[:-1]] + [0.1]
        more = {"forward_cpu_s": len(seconds) * [0.5], "probe_s": len(seconds) * [0.0]}
        record["ranks"] = [{"forward_wall_s": walls, **more} for walls in both]
    (choice,) = placement.choices([second, first], "forward", 0.0)[1.0]
    assert choice.records == (first, second)
    assert choice.calls_s == pytest.approx([1.1, 2.1, 2.5, 3.0, 7.1, 8.1, 9.1])
    assert choice.seconds == 3.0
    assert choice.quartiles == (pytest.approx(2.1), pytest.approx(8.1))


def test_computing_is_counted_on_usual_cores():
    """Two ranks of 3 CPU seconds each on two cores that are half as fast as usual: 3 of 5 seconds become 1.5."""
    record = point("u2r2", 1.0, 8)
    slow = {"forward_wall_s": [5.0, 3.0], "forward_cpu_s": [3.0, 1.0], "probe_s": [0.2, 0.1]}
    record["ranks"] = [slow, slow | {"forward_wall_s": [4.0, 2.0]}]
    assert placement.Choice((record,), "forward", 0.1).calls_s == pytest.approx([3.0, 3.5])
    assert placement.Choice((record,), "forward", 0.0).calls_s == [3.0, 5.0]
    assert placement.usual_probe([record]) == pytest.approx(0.15)


def test_what_is_not_alike_is_not_one_study():
    records = [point("u2r2", 1.0, 8) for _ in range(4)]
    records[1]["config"]["seq"] = 4096
    records[2]["config"]["cluster"]["hosts"] = 4
    records[3]["config"]["cluster"] = None
    records.append(point("u4r1", 1.0, 8) | {"status": "crash"})
    found = placement.studies(records)
    assert len({study.title for study in found}) == 3
    assert all(len(study.rates[0].choices) == 1 for study in found)


def test_the_table_and_the_picture(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(placement, "fitted", lambda *arguments: None)
    records = sweep()
    lost = point("u4r1", 3.0, 8) | {"status": "timeout", "reason": "a test"}
    lost.pop("summary")
    tables.show([*records, lost])
    text = capsys.readouterr().out
    best = min(1e3 / record["summary"]["speed_per_s"] for record in records[:4])
    assert f"{best:.0f}*" in text
    assert "interfaces counted +1.00% to +1.00%" in text
    assert "u4r1-3.0-8: timeout" in text
    path = figures.two_level(records, tmp_path / "x.png")
    assert path.stat().st_size > 20_000
    assert [p.name for p in kept.pictures("attention", [*records, lost], tmp_path)] == ["two_level_2x2.png"]


def test_one_function_predicts_studies_and_plans():
    """A case is `predict` on the cluster that the record names."""
    record = point("u2r2", 0.3, 2)
    config = record["config"]
    from analysis.measurements import call_of

    of = with_values(placement._machine("a test"), TRUTH, "a test")
    link = with_values(of, {"network_hop_bytes_per_s": 0.3e9 / 8}, "a test", "measured")
    workload, plan = call_of(config)
    seconds = predict(workload, plan, Cluster(link, 2, 2), backward=True).seconds
    assert seconds == predicted(record, "forward + backward")
