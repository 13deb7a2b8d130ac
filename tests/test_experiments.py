"""The harness: every configuration composes, points run on real ranks, records are whole, failures are told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf

from analysis.figures import speed
from experiments import attention
from experiments.config import register

ROOT = Path(__file__).parent.parent
CONFIGS = ROOT / "configs"
OPTIONS = [f"{path.parent.name}={path.stem}" for path in CONFIGS.glob("*/*.yaml") if path.parent.name != "experiment"]
EXPERIMENTS = [f"experiment={path.stem}" for path in CONFIGS.glob("experiment/*.yaml")]


def composed(*overrides: str):
    register()
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose("attention", list(overrides))


@pytest.mark.parametrize("option", OPTIONS + EXPERIMENTS)
def test_every_option_composes(option):
    config = OmegaConf.to_object(composed(option))
    attention.check(attention.asdict(config))


@pytest.mark.parametrize(
    ("typo", "named"),
    [
        ("mesh.rings=2", "rings"),
        ("sequ=4096", "sequ"),
        ("seq=long", "long"),
        ("mesh=u3r5", "u3r5"),
        ("layout=zagzig", "zagzig"),
        ("backward=maybe", "maybe"),
    ],
)
def test_typos_fail_when_the_configuration_is_composed(typo, named):
    with pytest.raises(HydraException, match=typo.split("=")[0].split(".")[0]) as caught:
        composed(typo)
    assert named in str(caught.value) + str(caught.value.__cause__)


def run(*arguments: str, code: int = 0, launcher: tuple[str, ...] = ()) -> str:
    command = [sys.executable, "-m", *launcher, "experiments.attention", *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == code, result.stdout + result.stderr
    return result.stdout


def records(folder: Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*/record.json"))]


def test_a_sweep(tmp_path):
    """Two points on two ranks each: records, a table and a picture; speed is the slowest rank's."""
    text = run("-m", "mesh=u1r2,u2r1", "seq=256", f"results={tmp_path}", "measure.baseline=true")
    found = records(tmp_path)
    assert len(found) == 2
    assert (tmp_path / "speed.png").stat().st_size > 10_000
    assert not list(tmp_path.glob("**/*.part"))
    for record in found:
        assert record["status"] == "ok"
        assert record["schema"] == attention.SCHEMA
        assert record["config"]["seq"] == 256
        assert record["commit"]
        assert record["versions"]["torch"]
        assert [rank["rank"] for rank in record["ranks"]] == [0, 1]
        for rank in record["ranks"]:
            assert len(rank["cpu_s"]) == len(rank["wall_s"]) == len(rank["forward_cpu_s"]) == 3
            assert rank["kernels"] == {"sdpa": 4 if record["config"]["mesh"]["ring"] == 2 else 2}
            assert rank["bytes"]
        summary = record["summary"]
        slowest = max(sorted(rank["cpu_s"])[1] for rank in record["ranks"])
        assert summary["speed_per_s"] == pytest.approx(1 / slowest)
        assert summary["efficiency"] > 0
        assert set(summary["errors"]) == {"out", "dq", "dk", "dv"}
        assert 0 < max(summary["errors"].values()) < 5e-6
        assert f"{summary['speed_per_s']:.2f}" in text
        assert record["point"] in text
    assert "8/8 heads x 64, batch 1, float32, causal, forward + backward" in text


def test_the_error_in_a_record_is_of_the_result(tmp_path):
    """In bf16 it is that of bf16: the reference is not the run itself."""
    run("mesh=u2r2", "seq=256", f"results={tmp_path}", "dtype=bfloat16", "backward=false", "workload.kv_heads=2")
    (record,) = records(tmp_path)
    assert set(record["summary"]["errors"]) == {"out"}
    assert 1e-4 < record["summary"]["errors"]["out"] < 1e-2


def test_a_failed_point_is_a_record_and_an_exit_code(tmp_path):
    """The others run, the reason stands in the record, on the terminal and in the exit code."""
    text = run("-m", "mesh=u2r1,u1r2", "seq=256", "workload.kv_heads=1", f"results={tmp_path}", code=1)
    by_status = {record["status"]: record for record in records(tmp_path)}
    assert set(by_status) == {"ok", "failed"}
    message = "8 query heads and 1 KV heads do not divide over ulysses=2 ranks"
    assert message in by_status["failed"]["reason"]
    assert message in text


def test_bad_values_are_refused_before_ranks_start(tmp_path):
    text = run("dtype=float31", f"results={tmp_path}", code=1)
    assert "dtype='float31' is not one of" in text
    assert "measure.baseline=true with window=4" in run(
        "window=4", "measure.baseline=true", f"results={tmp_path}", code=1
    )


def test_ranks_that_torchrun_started(tmp_path):
    """One record, written by the first rank."""
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m")
    text = run("mesh=u1r2", "seq=128", f"results={tmp_path}", launcher=launcher)
    (record,) = records(tmp_path)
    assert record["status"] == "ok"
    assert len(record["ranks"]) == 2
    assert text.count("records:") == 1


def test_points_have_names_of_their_own():
    base = attention.asdict(OmegaConf.to_object(composed()))
    other = attention.asdict(OmegaConf.to_object(composed("seed=1")))
    assert attention.name(base) == attention.name(attention.asdict(OmegaConf.to_object(composed())))
    assert attention.name(base) != attention.name(other)


def test_a_record_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a" / "record.json"
    attention.write({"n": 1}, path)
    with pytest.raises(TypeError):
        attention.write({"n": object()}, path)
    assert json.loads(path.read_text()) == {"n": 1}
    assert [x.name for x in path.parent.iterdir()] == ["record.json"]


def test_the_picture_has_a_panel_for_each_workload(tmp_path):
    def record(ring: int, layout: str, seq: int) -> dict:
        return {
            "config": {
                "mesh": {"ring": ring, "ulysses": 4 // ring},
                "layout": {"name": layout},
                "workload": {"heads": 8, "kv_heads": 2, "head_dim": 64, "batch": 1},
                "seq": seq,
                "dtype": "float32",
                "backward": True,
            },
            "summary": {"speed_per_s": ring / seq},
            "machine": {"cpu": "a processor", "cores": 2},
            "versions": {"torch": "2"},
        }

    many = [record(r, x, s) for r in (1, 2, 4) for x in ("zigzag", "contiguous") for s in (128, 256, 512, 1024)]
    assert speed(many, tmp_path / "many.png").exists()
    assert speed(many[:1], tmp_path / "one.png").exists()


def test_a_result_that_is_not_a_number_fails_its_point():
    """NaN compares with nothing: a maximum would lose it."""
    config = {"measure": {"baseline": False}}
    rank = {"cpu_s": [1.0], "wall_s": [1.0], "bytes": {}, "peak_growth_bytes": 0}
    good, bad = {**rank, "error": {"out": 1e-7}}, {**rank, "error": {"out": float("nan")}}
    assert attention.summary(config, [good])["errors"] == {"out": 1e-7}
    with pytest.raises(ValueError, match=r"out is wrong.*nan"):
        attention.summary(config, [bad, good])


def test_provenance_without_git(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert attention.provenance()["commit"] is None
