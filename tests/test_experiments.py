"""The harness: every configuration composes, points run on real ranks, records are whole, failures are told."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf

import usp
import usp.kernels
from experiments import attention, device_check, points, ranks, traffic
from experiments.config import CONFIGS, plain, register, scaled
from tests import faults

ROOT = Path(__file__).parent.parent
GROUPS = {path.name for path in CONFIGS.iterdir() if path.is_dir()} - {"experiment", "phase", "plan", "setup"}
OPTIONS = [f"{group}={path.stem}" for group in sorted(GROUPS) for path in CONFIGS.glob(f"{group}/*.yaml")]
OTHERS = {"decode", "prefill", "model", "training"}  # experiments of other commands
EXPERIMENTS = sorted({path.stem for path in CONFIGS.glob("experiment/*.yaml")} - OTHERS)


def composed(*overrides: str, hydra: bool = False):
    register()
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose("attention", list(overrides), return_hydra_config=hydra)


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_composes(option):
    attention.check(plain(composed(option)))


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_composes(experiment):
    """With the first and with the last of every list."""
    params = composed(f"experiment={experiment}", hydra=True).hydra.sweeper.params
    for end in (0, -1):
        first = [f"{key}={value.split(',')[end]}" for key, value in params.items()]
        config = plain(composed(f"experiment={experiment}", *first))
        attention.check(config)
        assert config["name"] == experiment


@pytest.mark.parametrize(
    ("typo", "named"),
    [
        ("mesh.rings=2", "rings"),
        ("sequ=4096", "sequ"),
        ("seq=long", "long"),
        ("mesh=u3r5", "u3r5"),
        ("layout=zagzig", "zagzig"),
        ("layout.name=zagzig", "zagzig"),
        ("dtype=float31", "float31"),
        ("measure.reference=all", "all"),
        ("exchange=rnig", "rnig"),
        ("backend=spda", "spda"),
        ("published.table=h100", "h100"),
        ("backward=maybe", "maybe"),
        ("published.tabel=a100_pcie", "tabel"),
        ("launcher=jobslib", "jobslib"),
    ],
)
def test_typos_fail_when_the_configuration_is_composed(typo, named):
    with pytest.raises(HydraException) as caught:
        composed(typo)
    assert named in str(caught.value) + str(caught.value.__cause__)


def run(*arguments: str, code: int = 0, launcher: tuple[str, ...] = (), timeout_s: float = 120) -> str:
    """What a command printed."""
    command = [sys.executable, "-m", *launcher, "experiments.attention", *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s)
    assert result.returncode == code, result.stdout + result.stderr
    return result.stdout + result.stderr


def run_here(*arguments: str, code: int = 0) -> str:
    """The same in this process, where nothing has to be imported first; with ranks of its own as ever."""
    text = io.StringIO()
    with (
        mock.patch.dict(os.environ),
        mock.patch.object(sys, "argv", ["experiments.attention", *arguments]),
        redirect_stdout(text),
        redirect_stderr(text),
        pytest.raises(SystemExit) as ended,
    ):
        attention.main()
    assert ended.value.code == code, text.getvalue()
    return text.getvalue()


def records(folder: Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*/record.json"))]


SMALL = ("workload.heads=4", "workload.kv_heads=4", "workload.head_dim=8", "seq=64", "measure=smoke")
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m")


# ---------------------------------------------------------------------------------------------------
# Points and sweeps.


def test_a_sweep(tmp_path):
    """Two points on two ranks each: records, a table and a picture; speed is the slowest rank's."""
    text = run("-m", "mesh=u1r2,u2r1", "seq=256", f"results={tmp_path}", "measure.baseline=true")
    found = records(tmp_path)
    assert len(found) == 2
    assert (tmp_path / "speed.png").stat().st_size > 10_000
    assert (tmp_path / "heatmap.png").stat().st_size > 5_000
    assert not list(tmp_path.glob("**/*.part"))
    assert len((tmp_path / "table.csv").read_text().splitlines()) == 3
    for record in found:
        assert record["status"] == "ok"
        assert record["schema"] == points.SCHEMA
        assert record["config"]["seq"] == 256
        assert record["hash"].startswith(record["point"].rsplit("-", 1)[1])
        assert record["commit"]
        assert record["seed"] == 0
        assert record["versions"]["torch"]
        assert record["command"][1:4] == ["-m", "experiments.attention", "-m"]
        assert [rank["rank"] for rank in record["ranks"]] == [0, 1]
        for rank in record["ranks"]:
            assert len(rank["cpu_s"]) == len(rank["wall_s"]) == len(rank["forward_cpu_s"]) == 3
            assert rank["kernels"] == {"sdpa": 4 if record["config"]["mesh"]["ring"] == 2 else 2}
            assert rank["bytes"].keys() == rank["messages"].keys() != set()
            assert all(a < b for a, b in zip(rank["forward_wall_s"], rank["wall_s"], strict=True))
        summary = record["summary"]
        assert summary["clock"] == ("wall" if ranks.CORES >= 2 else "cpu")
        assert summary["efficiency"] > 0
        assert set(summary["errors"]) == {"out", "dq", "dk", "dv"}
        assert 0 < max(summary["errors"].values()) < 5e-6
        assert f"{summary['speed_per_s']:.2f}" in text
    assert "8/8 heads x 64, batch 1, float32, causal, forward + backward, 2 ranks" in text
    assert "left]" not in text  # progress is for terminals


def test_speed_is_of_the_slowest_rank():
    """CPU time where ranks share cores, in probes, wall time of whole calls where they do not."""
    config = {"measure": {"baseline": False, "repeats": 3}, "dtype": "float32"}
    base = {"device": "cpu", "kernels": {"sdpa": 1}, "bytes": {"ring": 5, "control": 100}, "messages": {"ring": 1}}
    base |= {"peak_growth_bytes": 1, "error": {}, "cpu_s": [9.0] * 3, "probe_s": [0.1] * 3}
    base |= {"forward_compute_s": [1.0] * 3, "forward_wall_s": [1.0] * 3}
    fast = base | {"compute_s": [1.0, 1.0, 9.0], "wall_s": [3.0, 5.0, 4.0]}
    slow = base | {"compute_s": [2.0, 2.0, 2.0], "wall_s": [4.0, 4.0, 4.0]}
    shared = attention.figures(config, [rank | {"clock": "cpu"} for rank in (fast, slow)])
    assert shared["speed_per_s"] == pytest.approx(1 / 2.0)
    assert shared["balance"] == pytest.approx(0.75)
    assert shared["sent_bytes"] == 5
    disturbed = fast | {"compute_s": [3.0, 3.0, 3.0], "probe_s": [0.3, 0.3, 0.3]}  # on a core a third as fast
    assert attention.figures(config, [disturbed | {"clock": "cpu"}, slow | {"clock": "cpu"}])["balance"] == 0.75
    alone = attention.figures(config, [rank | {"clock": "wall", "probe_s": []} for rank in (fast, slow)])
    assert alone["speed_per_s"] == 1 / 4.0  # calls took 4, 5 and 4 seconds


def test_a_wrong_result_is_no_result():
    """However fast: an error that no rounding explains fails the point."""
    config = {"measure": {"baseline": False, "repeats": 1}, "dtype": "bfloat16"}
    times = {key: [1.0] for key in ("wall_s", "forward_wall_s", "cpu_s", "compute_s")}
    rank = {
        "clock": "wall",
        "device": "cpu",
        "kernels": {},
        "bytes": {},
        "messages": {},
        "peak_growth_bytes": 0,
    } | times
    assert attention.figures(config, [rank | {"error": {"out": (0.01, 1.0)}}])["errors"] == {"out": 0.01}
    with pytest.raises(ArithmeticError, match=r"above 0\.05"):
        attention.figures(config, [rank | {"error": {"out": (0.1, 1.0)}}])


def test_what_is_sent_is_what_was_predicted():
    config = {"workload": {"batch": 1, "heads": 2, "kv_heads": 2, "head_dim": 8}, "mesh": {"ulysses": 2, "ring": 1}}
    config |= {"seq": 16, "causal": True, "window": None, "dtype": "float32", "backward": False}
    config |= {"exchange": "ring", "replicate_kv": False}
    found = attention.predicted(config | {"layout": {"name": "zigzag"}})
    assert found == {(0, 0): {"all_to_all": (8 * 8 * 4 * 4, 2)}, (0, 1): {"all_to_all": (8 * 8 * 4 * 4, 2)}}
    samples = [
        {
            "rank": u,
            "ring_rank": 0,
            "ulysses_rank": u,
            "bytes": {"all_to_all": 1024, "control": 16},
            "messages": {"all_to_all": 2},
        }
        for u in range(2)
    ]
    points.check_traffic(samples, found)
    samples[1]["messages"] = {"all_to_all": 3}
    with pytest.raises(ArithmeticError, match=r"rank 1 sent messages .*3.* was predicted"):
        attention.summary(config | {"layout": {"name": "zigzag"}}, samples)


def test_wall_time_is_measured_alone():
    """Points side by side that would share the machine wait for each other; those in CPU time do not."""
    entered = []

    def point(alone: bool) -> None:
        with ranks.machine(alone):
            entered.append(alone)

    with ranks.machine(alone=False):
        shared, alone = (threading.Thread(target=point, args=(x,)) for x in (False, True))
        shared.start()
        shared.join(10)
        alone.start()
        alone.join(0.3)
        assert entered == [False]
    alone.join(10)
    assert entered == [False, True]


@pytest.mark.parametrize("reference", ["whole", "rows"])
def test_the_error_in_a_record_is_of_the_result(tmp_path, reference):
    """In bf16 it is that of bf16: the reference is not the run itself."""
    wanted = ("workload.kv_heads=2", f"measure.reference={reference}", "window=50", "layout=striped")
    run_here("mesh=u2r2", "seq=250", f"results={tmp_path}", "dtype=bfloat16", *wanted)
    (record,) = records(tmp_path)
    found = record["summary"]["errors"]
    assert set(found) == ({"out", "dq", "dk", "dv"} if reference == "whole" else {"out", "dq"})
    assert 1e-4 < min(found.values()) < max(found.values()) < 1e-2


def test_a_result_that_is_not_a_number_fails_its_point():
    """NaN compares with nothing: a maximum would lose it. Ranks without results do not count."""
    ranks_good = [{"error": {"out": (1e-7, 2.0)}}, {"error": {}}, {"error": {"out": (3e-7, 3.0)}}]
    assert points.errors(ranks_good) == {"out": 3e-7 / 3.0}
    nothing = {"error": {"out": (1e-7, 2.0), "dq": (1e-8, 0.0)}}  # one key a row: no gradient, and nothing to divide by
    assert points.errors([nothing])["dq"] == 1e-8 / 0.02
    with pytest.raises(ArithmeticError, match=r"out is wrong.*nan"):
        points.errors([{"error": {"out": (float("nan"), 2.0)}}, *ranks_good])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"measure.repeats": 0}, "measure.repeats and measure.warmup are at least 1"),
        ({"measure.warmup": 0}, "measure.repeats and measure.warmup are at least 1"),
        ({"window": 4, "measure.baseline": True}, "measure.baseline=true with window=4"),
        ({"mesh.ring": 0}, "every degree of the mesh is at least 1"),
        ({"timeout_s": 0.0}, "timeout_s=0.0 is not a time to wait"),
        ({"published.table": "a100_pcie", "published.length": 8000}, "seq=4096 is not published.length=8000"),
        ({"published.length": 4096}, "published.length and published.only need a published.table"),
        ({"published.table": "a100_nvlink_backward", "backward": False}, "has rates of forward + backward"),
    ],
)
def test_bad_values_are_refused_before_ranks_start(values, message):
    config = composed()
    for key, value in values.items():
        OmegaConf.update(config, key, value)
    with pytest.raises(ValueError) as caught:
        attention.check(plain(config))
    assert message in str(caught.value)


def test_a_refused_point_is_a_record(tmp_path):
    text = run_here("measure.repeats=0", f"results={tmp_path}", code=1)
    assert "unsupported after" in text
    assert "measure.repeats and measure.warmup are at least 1" in text
    assert [record["status"] for record in records(tmp_path)] == ["unsupported"]


@pytest.mark.parametrize("factor", [3, 0])
def test_a_length_is_scaled_by_a_factor_that_divides_it(factor):
    """Any other makes a point that is refused, not a sweep that stops."""
    assert scaled(131072, 16) == 8192
    config = plain(composed("experiment=usp_gqa", "published.length=32768", f"published.factor={factor}"))
    with pytest.raises(ValueError, match=f"published.length=32768 / published.factor={factor}"):
        attention.check(config)


def test_points_have_names_of_their_own():
    """Where and how long a record is kept does not make another point."""
    name, base = partial(points.name, attention.EXPERIMENT), plain(composed())
    assert name(base) != name(plain(composed("seed=1")))
    for same in ("results=elsewhere", "force=true", "timeout_s=9", "name=x", "published.only=true"):
        assert name(base) == name(plain(composed(same)))


def test_a_record_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a" / "record.json"
    points.write({"n": 1}, path)
    with pytest.raises(TypeError):
        points.write({"n": object()}, path)
    assert json.loads(path.read_text()) == {"n": 1}
    with points.claimed(path.parent):  # the next one cleans up
        assert sorted(x.name for x in path.parent.iterdir()) == [".lock", "record.json"]


def test_provenance_without_git(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert points.provenance()["commit"] is None


# ---------------------------------------------------------------------------------------------------
# What is measured once is kept.


def test_the_same_command_runs_what_is_missing_or_failed(tmp_path):
    command = ("-m", "mesh=u1r2,u2r1,u1r1", f"results={tmp_path}", *SMALL)
    run_here(*command)
    first = {record["point"]: record for record in records(tmp_path)}
    kept, lost, failed = sorted(first)
    assert kept.startswith("u1r1")
    (tmp_path / lost / "record.json").write_text("{")  # somebody's editor
    points.write(first[failed] | {"status": "crash", "reason": "a test"}, tmp_path / failed / "record.json")
    time.sleep(1)  # records tell the second in which they began
    run_here(*command)
    second = {record["point"]: record for record in records(tmp_path)}
    assert second.keys() == first.keys()
    assert second[kept] == first[kept]
    assert second[lost]["started"] > first[lost]["started"]
    assert second[failed]["status"] == "ok"
    run_here(*command[2:], "mesh=u1r1", "force=true")
    third = {record["point"]: record for record in records(tmp_path)}
    assert third[kept]["started"] > second[kept]["started"]
    with mock.patch.object(ranks, "GRACE_S", 0.0):
        run_here(*command[2:], "mesh=u1r2", "force=true", "timeout_s=0.001", code=1)  # too short, and no loss
    fourth = {record["point"]: record for record in records(tmp_path)}
    assert fourth == third
    assert json.loads(next(tmp_path.glob("*/failed.json")).read_text())["status"] != "ok"
    assert third[lost] == second[lost]


def test_a_sweep_that_is_killed_again_and_again(tmp_path):
    """kill -9 loses the point that runs and nothing else. Longer: python -m tests.faults 20"""
    small = ("mesh=u1r2,u2r1", "seq=64,128,192", *SMALL[:3], SMALL[-1])
    log = faults.bombard(2, 1, 1.0, tmp_path, *small)
    assert log[-1] == "last run to its end: 6 records"


def test_two_sweeps_at_once(tmp_path):
    """Started in the same moment, with points in common: all rows of both can be read back."""
    command = [sys.executable, "-m", "experiments.attention", "-m", "mesh=u1r2", f"results={tmp_path}", *SMALL]
    sweeps = [
        subprocess.Popen([*command, f"seed={seeds}"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for seeds in ("1,2", "2,3")
    ]
    texts = [sweep.communicate(timeout=120)[0] for sweep in sweeps]
    assert [sweep.returncode for sweep in sweeps] == [0, 0]
    assert all("records:" in text for text in texts)
    assert {record["config"]["seed"] for record in records(tmp_path)} == {1, 2, 3}
    runs = [[json.loads(x) for x in path.read_text().splitlines()] for path in tmp_path.glob("runs/*.jsonl")]
    assert sorted(len(entries) for entries in runs) == [3, 3]
    assert all(entries[0] == {"points": 2} for entries in runs)


def test_points_side_by_side(tmp_path):
    """Under joblib points run in other processes; the command that started them still reports them all."""
    text = run("mesh=u1r2,u2r1", "seq=64,128", f"results={tmp_path}", *SMALL[:3], "launcher=joblib", "-m")
    assert len(records(tmp_path)) == 4
    assert text.count("u1r2") == text.count("u2r1") == 2
    assert len((tmp_path / "table.csv").read_text().splitlines()) == 5


def test_a_published_table_alone(tmp_path):
    """published.only leaves out what the table does not have, and the count of points knows it."""
    table = ("-m", "experiment=usp_a100", "published.factor=1024", f"results={tmp_path}", "workload=h2_d32")
    text = run_here(*table, "published.length=131072", "mesh=u4r2,u2r4,u1r8", "layout=contiguous,zigzag")
    assert {record["config"]["mesh"]["ulysses"] for record in records(tmp_path)} == {1, 2}
    (log,) = tmp_path.glob("runs/*.jsonl")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert lines[0] == {"points": 4}
    assert len(lines) == 5
    assert "111.21" in text  # published: 2 heads, ulysses 2 x ring 4, contiguous
    assert "Rank correlation: 128 tokens" in text
    text = run_here(*table, "published.length=1024", "mesh=u1r8", "layout=zigzag", code=1)
    assert text.startswith("no point:")


# ---------------------------------------------------------------------------------------------------
# Failures.


def test_a_failing_point_is_a_record_and_an_exit_code(tmp_path):
    """The others run, the reason stands in the record, on the terminal as it happens and in the exit code."""
    start_s = time.monotonic()
    text = run_here(
        "-m", "mesh.ring=1", "mesh.ulysses=1,2,3,4", f"results={tmp_path}", *SMALL, "workload.kv_heads=2", code=1
    )
    by_degree = {record["config"]["mesh"]["ulysses"]: record for record in records(tmp_path)}
    assert [by_degree[n]["status"] for n in (1, 2, 3, 4)] == ["ok", "ok", "unsupported", "unsupported"]
    for degree in (3, 4):
        message = f"4 query heads and 2 KV heads on ulysses={degree} ranks"
        assert message in by_degree[degree]["reason"]
        assert text.count(message) == 2  # as it happened, and at the end
    assert "[2 done, 1 failed, 1 left]" in text
    assert "2 of 4 points have no result" in text
    assert time.monotonic() - start_s < 60


@pytest.mark.parametrize(
    ("function", "status", "reason"),
    [
        (faults.die, "crash", "rank 1: ended by signal 9 (SIGKILL)"),
        (faults.leave_early, "crash", "rank 1: ended with exit code 7"),
        (faults.want_memory, "oom", "rank 1: RuntimeError: "),
        (faults.refuse, "unsupported", "ValueError: nobody can do this"),
    ],
)
def test_the_first_failure_is_the_one_that_is_told(function, status, reason):
    """Not that of a rank which lost its neighbour; and the next point runs."""
    start_s = time.monotonic()
    with pytest.raises(ranks.PointFailed) as caught:
        ranks.launch(function, {"device": "cpu"}, 4, 60.0)
    assert caught.value.status == status
    assert reason in caught.value.reason
    assert time.monotonic() - start_s < 20
    results = ranks.launch(faults.rank_and_world, {"device": "cpu", "n": 5}, 4, 60.0)
    assert results == [{"rank": rank, "world": 4, "config": {"device": "cpu", "n": 5}} for rank in range(4)]


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="processes cannot be kept on cores here")
def test_ranks_that_share_cores_stay_on_one_each():
    own = os.sched_getaffinity(0)
    found = [rank["cores"] for rank in ranks.launch(faults.cores, {"device": "cpu"}, ranks.CORES + 1, 60.0)]
    assert [len(cores) for cores in found] == [1] * (ranks.CORES + 1)
    assert {core for cores in found for core in cores} == own
    (alone,) = ranks.launch(faults.cores, {"device": "cpu"}, 1, 60.0)
    assert set(alone["cores"]) == own


def test_what_is_want_of_memory():
    for error in (MemoryError(), RuntimeError("CUDA error: out of memory"), RuntimeError("std::bad_alloc")):
        assert ranks.classify(error) == "oom"
    assert ranks.classify(RuntimeError("no")) == "crash"
    assert ranks.classify(ValueError("refused")) == "unsupported"


def test_a_hang_is_ended_with_every_stack():
    with pytest.raises(ranks.PointFailed) as caught:
        ranks.launch(faults.hang, {"device": "cpu"}, 3, 2.0)
    assert caught.value.status == "timeout"
    assert set(caught.value.stacks) == {"0", "1", "2"}
    assert "in stuck" in caught.value.stacks["2"]
    assert all("in barrier" in caught.value.stacks[rank] for rank in ("0", "1"))


def test_a_point_that_takes_too_long_is_a_record_with_stacks(tmp_path):
    text = run_here("mesh=u1r2", "timeout_s=0.5", "seq=16384", f"results={tmp_path}", code=1)
    (record,) = records(tmp_path)
    assert record["status"] == "timeout"
    assert set(record["stacks"]) == {"0", "1"}
    assert "timeout after" in text


def test_ranks_end_with_the_process_that_started_them(tmp_path):
    """However it ends: nothing is left that would disturb the next sweep."""
    code = (
        "from experiments import ranks\nfrom tests import faults\nimport sys\n"
        "ranks.launch(faults.tell_process, {'device': 'cpu', 'folder': sys.argv[1]}, 2, 600.0)\n"
    )
    starter = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT)
    end = time.monotonic() + 60
    while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < end:
        time.sleep(0.05)
    started = [int(path.name) for path in tmp_path.iterdir()]
    assert len(started) == 2
    starter.send_signal(signal.SIGKILL)
    starter.wait()
    end = time.monotonic() + 10
    while any(alive(process) for process in started) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(alive(process) for process in started)


def alive(process: int) -> bool:
    """A process that has ended but whose parent has not asked yet is not alive."""
    status = Path(f"/proc/{process}/status")
    try:
        return "State:\tZ" not in status.read_text()
    except OSError:
        return False


# ---------------------------------------------------------------------------------------------------
# Ranks that torchrun started.


def test_ranks_that_torchrun_started(tmp_path):
    """A sweep on two running ranks of which one comes late: one record a point; a refused point is one more record."""
    late = (
        "import os, runpy, sys, time\ntime.sleep(1.5 * int(os.environ['RANK']))\n"
        "sys.argv[0] = 'experiments.attention'\nrunpy.run_module('experiments.attention', run_name='__main__')\n"
    )
    script = tmp_path / "late.py"
    script.write_text(late)
    command = [sys.executable, "-m", *TORCHRUN[:-1], str(script), "-m", "mesh=u1r2,u2r1,u4r1", f"results={tmp_path}/x"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for code in (1, 1):  # the second time what is good is kept, and all ranks know it
        result = subprocess.run(
            [*command, *SMALL], cwd=ROOT, capture_output=True, text=True, timeout=120, env=environment
        )
        assert result.returncode == code, result.stderr
        found = {record["config"]["mesh"]["ulysses"]: record for record in records(tmp_path / "x")}
        assert {n: record["status"] for n, record in found.items()} == {1: "ok", 2: "ok", 4: "unsupported"}
        assert "4 ranks, but the job has 2" in found[4]["reason"]
        assert [len(found[n]["ranks"]) for n in (1, 2)] == [2, 2]
        assert result.stdout.count("records:") == 1
    assert len(list((tmp_path / "x/runs").iterdir())) == 2  # of the first rank alone


def test_a_rank_that_fails_under_torchrun_is_the_one_that_is_told(tmp_path):
    """Rank 1 wants too much memory; rank 0 only loses its neighbour."""
    script = tmp_path / "short.py"
    script.write_text(
        "import os\nfrom dataclasses import replace\nfrom experiments import attention, points\n"
        "def short(config):\n"
        "    if os.environ['RANK'] == '1':\n        raise MemoryError('a test')\n"
        "    return attention.measure(config)\n"
        "points.main(replace(attention.EXPERIMENT, measure=short))\n"
    )
    command = [sys.executable, "-m", *TORCHRUN[:-1], str(script), "mesh=u1r2", f"results={tmp_path}/x", *SMALL]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, env=environment)
    assert result.returncode == 1
    (record,) = records(tmp_path / "x")
    assert (record["status"], record["reason"]) == ("oom", "MemoryError: a test")


def test_a_hang_under_torchrun(tmp_path):
    """Every rank's stack is in the record, and the job ends."""
    text = run("mesh=u1r2", "timeout_s=1", "seq=16384", f"results={tmp_path}", launcher=TORCHRUN, code=1, timeout_s=60)
    (record,) = records(tmp_path)
    assert record["status"] == "timeout"
    assert set(record["stacks"]) == {"0", "1"}
    assert "the same command continues" in text


def test_what_a_rank_says_of_ranks_that_gave_up_is_not_the_reason(tmp_path):
    """Rank 0 hangs, rank 1 waits for it: when rank 0 has given up, rank 1 complains, and the stacks stay."""
    script = tmp_path / "hang.py"
    script.write_text(
        "from dataclasses import replace\nimport time\nimport torch\nimport torch.distributed as dist\n"
        "from experiments import attention, points\n"
        "def hang(config):\n"
        "    if dist.get_rank() == 0:\n        time.sleep(1000)\n"
        "    dist.recv(torch.zeros(1), 0)\n"
        "points.main(replace(attention.EXPERIMENT, measure=hang))\n"
    )
    command = [sys.executable, "-m", *TORCHRUN[:-1], str(script), "mesh=u1r2", "timeout_s=3", f"results={tmp_path}/x"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run([*command, *SMALL], cwd=ROOT, capture_output=True, timeout=60, env=environment)
    assert result.returncode == 1
    (record,) = records(tmp_path / "x")
    assert (record["status"], set(record["stacks"])) == ("timeout", {"0", "1"})


# ---------------------------------------------------------------------------------------------------
# Time.

SECONDS = {"device": "cpu", "dtype": "float32", "measure": {"warmup": 1, "repeats": 5, "baseline": False}}


def reported(**seconds: float) -> dict:
    """The figures that every one of two ranks would report of a step with known times."""
    config = SECONDS | {"first_s": 0.0, "later_s": 0.0, "after_s": 0.0, "slower_s": 0.0} | seconds
    both = [attention.figures(config, rank["all"]) for rank in ranks.launch(faults.pretend, config, 2, 60.0)]
    assert both[0] == both[1]
    return both[0]


def test_a_call_is_over_when_its_work_is():
    """Work that goes on for 50 ms after the call has returned counts, on the slowest rank."""
    assert 0.05 <= reported(after_s=0.05)["wall_s"] < 0.075
    assert 0.08 <= reported(after_s=0.05, slower_s=0.03)["wall_s"] < 0.11


def test_the_first_call_does_not_count():
    assert 0.009 < reported(first_s=0.3, later_s=0.01)["wall_s"] < 0.02


# ---------------------------------------------------------------------------------------------------
# The device check.


def test_bytes_of_masks_are_counted_as_predicted():
    """Of every mask and layout; a window sends the window, documents that end with the shards nothing."""
    lines = {(x.layout, x.mask): x for x in traffic.table(4096, 2)}
    assert len(lines) == 24
    for line in lines.values():
        assert line.counted_bytes == line.predicted_bytes, line
    assert lines["contiguous", "full"].share == 1.0
    assert lines["contiguous", "causal"].share == 0.5
    window = lines["contiguous", "causal, window 1,024"]
    assert window.counted_bytes == 3 * 1023 * 2 * traffic.HEAD_DIM * traffic.WIDE_BYTES
    assert lines["contiguous", "16 documents of equal length"].counted_bytes == 0


def test_the_device_check_goes_through_on_a_cpu_without_hydra(tmp_path):
    code = (
        "import sys\nsys.modules |= dict.fromkeys(('hydra', 'omegaconf', 'rich', 'matplotlib'))\n"
        "from experiments import device_check, points\n"
        "def version(package):\n    raise points.PackageNotFoundError(package)\n"
        "points.version = version\n"  # only a copy of the repository, nothing installed
        f"sys.argv = ['device_check', '--dry-run', '--results', {str(tmp_path)!r}]\ndevice_check.main()\n"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    (record,) = records(tmp_path)
    assert record["status"] == "ok"
    assert len(record["conformance"]) == 27
    assert all(set(line["errors"]) == {"out", "lse", "dq", "dk", "dv"} for line in record["conformance"])
    assert {line["size"] for line in record["rates"]} == {64, 128}
    assert all(rate > 0 for line in record["rates"] for rate in line["flop_per_s"].values())
    assert "WRONG" not in result.stdout
    listed = [sys.executable, "-m", "analysis.records", str(tmp_path), "--csv", str(tmp_path / "x.csv")]
    assert subprocess.run(listed, cwd=ROOT, capture_output=True).returncode == 0


def test_the_device_check_sees_a_wrong_kernel(monkeypatch):
    right = usp.kernels.sdpa.forward

    def wrong(*arguments):
        out, lse = right(*arguments)
        return out, lse + 0.5

    monkeypatch.setattr(usp.kernels.sdpa, "forward", wrong)
    mask = usp.Mask(causal=True)
    line = device_check.check(torch.device("cpu"), torch.bfloat16, (4, 2, 64), 96, "zigzag", mask, "causal")
    assert not line["ok"]
