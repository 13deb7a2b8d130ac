"""Slurm as a launcher. What is marked runs on Slurm: `make slurm` starts one on this machine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra.errors import HydraException
from omegaconf import OmegaConf

from experiments import attention, config, points, ranks, slurm
from tests.test_experiments import ROOT, SMALL, composed, plain, records

SETTINGS = {"tasks_per_node": None, "gpus_per_node": None, "timeout_min": 60}
UNSET = {"nodes": None, "gpus_per_task": None, "max_num_timeout": 0, "signal_delay_s": None}
COMMAND = ["python", "-m", "experiments.attention"]


def a_point(tmp_path: Path, *overrides: str) -> dict:
    return plain(composed("mesh=u1r2", f"results={tmp_path}", *SMALL, *overrides))


# ---------------------------------------------------------------------------------------------------
# Settings.


def test_its_settings_are_those_of_submitit():
    given = ("partition=gpu", "account=us", "gpus_per_node=8", "+additional_parameters.exclusive=true")
    overrides = [f"{'+' * x.startswith('+')}hydra.launcher.{x.lstrip('+')}" for x in given]
    found = composed("launcher=slurm", *overrides, hydra=True).hydra
    assert found.mode.name == "MULTIRUN"  # in a single run Hydra would forget the launcher
    assert (found.launcher.partition, found.launcher.gpus_per_node) == ("gpu", 8)
    with pytest.raises(HydraException, match="partitoin"):
        composed("launcher=slurm", "hydra.launcher.partitoin=gpu", hydra=True)


@pytest.mark.parametrize(
    ("given", "mesh", "expected"),
    [
        ({}, {"ulysses": 2, "ring": 2}, (1, 4)),
        ({}, {"ulysses": 1, "ring": 3}, (1, 3)),
        ({}, {"ulysses": 4, "ring": 2}, (2, 4)),
        ({"gpus_per_node": 8}, {"ulysses": 4, "ring": 2}, (1, 8)),
        ({"gpus_per_node": 8, "tasks_per_node": 2}, {"ulysses": 4, "ring": 2, "data": 2}, (8, 2)),
    ],
)
def test_nodes_follow_from_the_mesh(given, mesh, expected):
    assert slurm.shape({"mesh": mesh, "timeout_s": 300.0}, SETTINGS | given) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "the 6 ranks of .* do not fill nodes of 4: hydra.launcher.tasks_per_node=3 does"),
        ({"tasks_per_node": 0}, "tasks_per_node=0: a node has at least 1 rank"),
        ({"tasks_per_node": 3, "timeout_min": 5}, "timeout_s=300.0 is not within the 300 s of .*timeout_min=5"),
    ],
)
def test_what_no_job_can_be_made_of(given, message):
    with pytest.raises(ValueError, match=message):
        slurm.shape({"mesh": {"ulysses": 3, "ring": 2}, "timeout_s": 300.0}, SETTINGS | given)


@pytest.mark.parametrize("name", ["nodes", "gpus_per_task", "max_num_timeout", "signal_delay_s"])
def test_settings_that_would_be_ignored_are_refused(name):
    with pytest.raises(ValueError, match=f"hydra.launcher.{name}=3"):
        slurm.check(UNSET | {name: 3})


def test_without_slurm_it_says_so(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match=r"launcher=slurm needs .*sbatch.*launcher=basic"):
        slurm.check(UNSET)


# ---------------------------------------------------------------------------------------------------
# A task is a rank.

TASK = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_NODELIST": "localhost,far[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "3,2(x2)",
    "SLURM_NODEID": "2",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "1",
}


@pytest.fixture
def scontrol(tmp_path, monkeypatch):
    """Two of the answers of Slurm's own: a list of nodes taken apart, and a node."""
    program = tmp_path / "scontrol"
    program.write_text(
        "#!/bin/sh\n"
        '[ "$2" = hostnames ] && echo "$3" | tr , "\\n" || echo "NodeName=$3 NodeAddr=10.0.0.7 NodeHostName=x Port=1"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


@pytest.mark.usefixtures("scontrol")
def test_a_task_of_a_step_is_a_rank():
    found = ranks.of_step(TASK)
    assert found == {
        "RANK": "6",
        "WORLD_SIZE": "7",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(10_000 + (101 * 1234 + 2) % 20_000),
    }
    assert ranks.of_step(TASK | {"SLURM_NODEID": "0"})["LOCAL_WORLD_SIZE"] == "3"
    other = ranks.of_step(TASK | {"SLURM_STEP_ID": "3"}), ranks.of_step(TASK | {"SLURM_JOB_ID": "1235"})
    assert len({found["MASTER_PORT"], *(x["MASTER_PORT"] for x in other)}) == 3
    mine = ranks.of_step(TASK | {"MASTER_ADDR": "mine", "MASTER_PORT": "1"})
    assert not {"MASTER_ADDR", "MASTER_PORT"} & mine.keys()


@pytest.mark.usefixtures("scontrol")
def test_a_node_that_only_slurm_knows_by_name():
    assert ranks.of_step(TASK | {"SLURM_STEP_NODELIST": "no-such-host.invalid"})["MASTER_ADDR"] == "10.0.0.7"


def test_a_step_on_one_node_asks_nobody(monkeypatch):
    monkeypatch.setenv("PATH", "")
    alone = TASK | {"SLURM_STEP_TASKS_PER_NODE": "7", "SLURM_STEP_NODELIST": "far1", "SLURM_NODEID": "0"}
    assert ranks.of_step(alone)["MASTER_ADDR"] == "127.0.0.1"
    with pytest.raises(ValueError, match=r"first node of localhost,far\[1-2\].*export MASTER_ADDR"):
        ranks.of_step(TASK)


def test_what_starts_its_own_ranks():
    """A batch script, which is task 0 of no step; the only task of a step; and what torchrun started in one."""
    batch = {key: value for key, value in TASK.items() if "STEP" not in key} | {"SLURM_PROCID": "0"}
    for other in ({}, batch, TASK | {"SLURM_STEP_NUM_TASKS": "1"}, TASK | {"RANK": "0"}):
        assert ranks.of_step(other) == {}


def test_a_record_names_its_job(tmp_path, monkeypatch):
    """As squeue does; an element of an array by its place."""
    known = a_point(tmp_path)
    assert "job" not in points.begun(attention.EXPERIMENT, known, COMMAND)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert points.begun(attention.EXPERIMENT, known, COMMAND)["job"] == "7"
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "5")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "1")
    assert points.begun(attention.EXPERIMENT, known, COMMAND)["job"] == "5_1"


# ---------------------------------------------------------------------------------------------------
# Where the sweep was started, with a pretended Slurm.


def test_what_is_submitted(tmp_path, monkeypatch):
    """Points of one size are one array; what sbatch and srun are told is what was set."""
    for name in ("sbatch", "srun"):
        (tmp_path / name).write_text("#!/bin/sh\necho Submitted batch job 12\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    given = ("partition=gpu", "account=us", "cpus_per_task=3", "array_parallelism=1", "timeout_min=20")
    overrides = [*(f"hydra.launcher.{x}" for x in given), "+hydra.launcher.additional_parameters.exclusive=true"]
    launcher = composed("launcher=slurm", f"results={tmp_path}", "name=x", *overrides, hydra=True).hydra.launcher
    settings = OmegaConf.to_container(launcher, resolve=True)
    del settings["_target_"]
    configs = [a_point(tmp_path), a_point(tmp_path, "seed=1")]
    old = points.begun(attention.EXPERIMENT, configs[1], COMMAND) | {"status": "crash", "reason": "old", "job": "12_1"}
    points.write(old, tmp_path / old["point"] / "record.json")
    jobs = slurm.submit(attention.EXPERIMENT, configs, COMMAND, settings | {"nodes": 2, "tasks_per_node": 1})
    assert [(job.id, job.submitted.num_tasks, job.before) for job in jobs] == [("12_0", 2, []), ("12_1", 2, [old])]
    (script,) = tmp_path.glob(".submitit/12/*.sh")
    lines = script.read_text().splitlines()
    expected = {"partition=gpu", "account=us", "cpus-per-task=3", "array=0-1%1", "time=20", "exclusive", "job-name=x"}
    expected |= {"nodes=2", "ntasks-per-node=1"}
    assert {f"#SBATCH --{x}" for x in expected} <= set(lines)
    (srun,) = (line for line in lines if line.startswith("srun"))
    assert "--kill-on-bad-exit=1 --cpus-per-task=3" in srun


class Queue:
    """Jobs that were submitted, and what Slurm says of each when it is asked."""

    def __init__(self, tmp_path: Path, monkeypatch):
        self.said: list[dict[str, tuple[str, str]] | None] = []
        self.jobs: list[SimpleNamespace] = []
        self.cancelled: list[str] = []
        self.stderr, self.stdout = tmp_path / "job.err", tmp_path / "job.out"
        self.stderr.write_text("one\ntwo\n")
        self.settings = SETTINGS | UNSET
        monkeypatch.setenv(config.JOURNAL, str(tmp_path / "runs" / "x.jsonl"))
        monkeypatch.setattr(slurm, "POLLS_S", (0.0, 0.0))
        monkeypatch.setattr(slurm, "LATE_S", 0.0)
        monkeypatch.setattr(slurm, "submit", self.submit)
        monkeypatch.setattr(slurm, "states", self.states)
        monkeypatch.setattr(slurm.shutil, "which", lambda name: name)
        monkeypatch.setattr(slurm.subprocess, "run", self.run)
        monkeypatch.setattr(points, "provenance", dict)

    def submit(self, experiment, configs, command, settings):
        new = []
        for point in configs:
            task = SimpleNamespace(paths=SimpleNamespace(stderr=self.stderr, stdout=self.stdout))
            job = SimpleNamespace(job_id=str(len(self.jobs) + 1), num_tasks=2, task=lambda n, task=task: task)
            job.settings, job.config = settings, point
            self.jobs.append(job)
            path = Path(point["results"]) / points.name(experiment, point) / "record.json"
            new.append(slurm.Job(job, point, path, list(slurm.kept(path).values())))
        return new

    def states(self, ids):
        said = self.said.pop(0)
        if isinstance(said, BaseException):
            raise said
        return said

    def run(self, command, **_):
        assert command[0] == "scancel"
        self.cancelled += command[1:]

    def sweep(self, *configs: dict) -> list[dict]:
        """What was noted of the points, with their records."""
        slurm.sweep(attention.EXPERIMENT, list(configs), COMMAND, self.settings)
        return [entry | {"record": json.loads(Path(entry["record"]).read_text())} for entry in config.entries()]


@pytest.fixture
def queue(tmp_path, monkeypatch):
    return Queue(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("state", "reason", "stderr", "status"),
    [
        ("CANCELLED", "None", "x\nslurmstepd: error: *** JOB 1 CANCELLED ***\n", "crash"),
        ("NODE_FAIL", "NodeDown", "", "crash"),
        ("TIMEOUT", "TimeLimit", "", "timeout"),
        ("OUT_OF_MEMORY", "OutOfMemory", "", "oom"),
        ("FAILED", "NonZeroExitCode", "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=1.0\n", "oom"),
    ],
)
def test_a_job_that_is_lost_becomes_a_record(queue, tmp_path, state, reason, stderr, status):
    """With Slurm's word, and what the job's stderr said last."""
    queue.stderr.write_text(stderr)
    queue.said = [None, {"1": ("PENDING", "Priority")}, {"1": ("RUNNING", "None")}, {"1": (state, reason)}]
    ((note),) = queue.sweep(a_point(tmp_path))
    record = note["record"]
    assert (note["status"], record["status"], record["launcher"], record["job"]) == (status, status, "slurm", "1")
    why = "" if reason == "None" else f", {reason}"
    said = stderr.splitlines()[-1] if stderr else "nothing on stderr"
    assert record["reason"] == f"Slurm job 1: {state}{why}; {said}"
    assert record["stderr"] == {"0": stderr.splitlines(), "1": stderr.splitlines()}
    assert queue.cancelled == []


def test_a_lost_job_does_not_end_the_sweep(queue, tmp_path):
    """Sizes are submitted apart; a job that Slurm forgot is lost too; the good record of a forced point stays."""
    first, second = a_point(tmp_path, "force=true"), a_point(tmp_path, "mesh=u4r2")
    good = points.begun(attention.EXPERIMENT, first, COMMAND) | {"status": "ok", "summary": {"speed_per_s": 1.0}}
    path = tmp_path / good["point"] / "record.json"
    points.write(good, path)
    queue.said = [{"2": ("FAILED", "NonZeroExitCode")}]
    assert [note["status"] for note in queue.sweep(first, second)] == ["crash", "crash"]
    assert [(job.settings["nodes"], job.settings["tasks_per_node"]) for job in queue.jobs] == [(1, 2), (2, 4)]
    assert json.loads(path.read_text()) == good
    lost = json.loads(path.with_name("failed.json").read_text())
    assert lost["reason"] == "Slurm job 1: UNKNOWN; two"


def test_the_record_of_a_job_is_told(queue, tmp_path):
    """Also a failed one; not one that an earlier job of the same number left, nor that of an element put back."""
    point = a_point(tmp_path)
    old = points.begun(attention.EXPERIMENT, point, COMMAND) | {"job": "1", "status": "crash", "reason": "old"}
    path = tmp_path / old["point"] / "record.json"
    points.write(old | {"seconds": 1.0}, path)
    ended = {"1": ("FAILED", "NonZeroExitCode")}

    class Late(dict):
        def get(self, *_):
            points.write(old | {"seconds": 2.0, "status": "timeout"}, path)
            return ended["1"]

    queue.said = [{"1": ("PENDING", "BeginTime")}, Late()]
    (note,) = queue.sweep(point)
    assert (note["status"], note["record"]["reason"], note["record"]["seconds"]) == ("timeout", "old", 2.0)


def test_what_ranks_could_not_know_is_added_to_their_record(queue, tmp_path):
    """Where Slurm ended one of them, the others only knew that it had gone."""
    point = a_point(tmp_path)
    told = points.begun(attention.EXPERIMENT, point, COMMAND) | {"job": "1", "status": "crash", "reason": "lost"}
    queue.stderr.rename(queue.stdout)  # hydra.launcher.stderr_to_stdout=true
    queue.stdout.write_bytes(b"\xff\nsrun: error: n1: task 1: Out Of Memory\n")

    class Told(dict):
        def get(self, *_):
            points.write(told | {"seconds": 2.0}, tmp_path / told["point"] / "record.json")
            return "OUT_OF_MEMORY", "None"

    queue.said = [Told()]
    (note,) = queue.sweep(point)
    assert (note["status"], note["record"]["status"], note["record"]["reason"]) == (
        "oom",
        "oom",
        "Slurm job 1: OUT_OF_MEMORY; lost",
    )
    assert note["record"]["stderr"]["0"] == ["\N{REPLACEMENT CHARACTER}", "srun: error: n1: task 1: Out Of Memory"]


def test_what_is_measured_or_refused_is_not_submitted(queue, tmp_path):
    good, bad, odd = a_point(tmp_path), a_point(tmp_path, "measure.repeats=0"), a_point(tmp_path, "mesh=u3r2")
    record = points.begun(attention.EXPERIMENT, good, COMMAND) | {"status": "ok", "summary": {"speed_per_s": 1.0}}
    points.write(record, tmp_path / record["point"] / "record.json")
    notes = queue.sweep(good, bad, odd)
    assert [note["status"] for note in notes] == ["ok", "unsupported", "unsupported"]
    assert "measure.repeats" in notes[1]["record"]["reason"]
    assert "do not fill nodes of 4" in notes[2]["record"]["reason"]
    assert queue.jobs == []


def test_what_sbatch_refuses_is_a_record(queue, tmp_path, monkeypatch):
    def refuse(*_):
        raise RuntimeError("invalid partition specified: gpu")

    monkeypatch.setattr(slurm, "submit", refuse)
    (note,) = queue.sweep(a_point(tmp_path))
    assert note["status"] == "unsupported"
    assert note["record"]["reason"] == "sbatch refused 1 nodes x 2 tasks: invalid partition specified: gpu"


def test_an_interrupted_sweep_cancels_what_has_not_ended(queue, tmp_path):
    queue.said = [{"1": ("FAILED", "None"), "2": ("RUNNING", "None")}, KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        queue.sweep(a_point(tmp_path), a_point(tmp_path, "seed=1"))
    assert queue.cancelled == ["2"]


# ---------------------------------------------------------------------------------------------------
# On Slurm.


def on_slurm(test):
    return pytest.mark.slurm(pytest.mark.timeout(600)(test))


def ready() -> None:
    if shutil.which("sinfo") is None or subprocess.run(["sinfo"], capture_output=True).returncode:
        pytest.fail("no Slurm answers here: make slurm")


def start(*arguments: str, before: tuple[str, ...] = (), what: tuple[str, ...] = ("-m", "experiments.attention")):
    ready()
    command = [*before, sys.executable, *what, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": ROOT, "env": environment}
    return subprocess.Popen(command, **how)


def output(process: subprocess.Popen, *codes: int) -> str:
    text, _ = process.communicate(timeout=300)
    assert process.returncode in (codes or (0,)), text
    return text


def in_queue(name: str) -> list[str]:
    """State of each job of a name that has not ended."""
    squeue = ["squeue", "--noheader", "--array", f"--name={name}", "--format=%T"]
    return subprocess.run(squeue, capture_output=True, text=True, check=True).stdout.split()


def until(true) -> None:
    end = time.monotonic() + 120
    while not true():
        assert time.monotonic() < end
        time.sleep(0.1)


LONG = ("mesh=u1r2", "seq=16384", "measure.repeats=100")


@on_slurm
def test_a_sweep_of_jobs(tmp_path):
    """Two sizes, the larger on two nodes; the same command again submits nothing."""
    command = ("launcher=slurm", "mesh=u1r2,u4r2", f"results={tmp_path}", "name=sizes", *SMALL)
    text = output(start(*command))
    found = {record["config"]["mesh"]["ulysses"]: record for record in records(tmp_path)}
    assert {n: (record["status"], record["launcher"]) for n, record in found.items()} == {
        1: ("ok", "slurm"),
        4: ("ok", "slurm"),
    }
    assert [len(found[n]["ranks"]) for n in (1, 4)] == [2, 8]
    assert all(record["job"].isdigit() for record in found.values())
    told = subprocess.run(["scontrol", "show", "job", found[4]["job"]], capture_output=True, text=True).stdout
    assert "NumNodes=2" in told
    assert all(f"{record['summary']['speed_per_s']:.2f}" in text for record in found.values())
    assert output(start(*command)) == text
    assert records(tmp_path) == sorted(found.values(), key=lambda record: record["point"])
    jobs = subprocess.run(["squeue", "-h", "--states=all", "--name=sizes"], capture_output=True, text=True).stdout
    assert len(jobs.splitlines()) == 2


@on_slurm
def test_srun_in_an_allocation(tmp_path):
    """Its tasks are the ranks; the only task of a step and a batch script start their own."""
    salloc = ("salloc", "--quiet", "--ntasks=4")
    command = ("mesh=u2r2", f"results={tmp_path}", *SMALL)
    four = ("srun", "--kill-on-bad-exit", "--ntasks=4")
    text = output(start(*command, before=(*salloc, *four)))
    assert text.count("records:") == 1
    (record,) = records(tmp_path)
    assert (record["status"], record["launcher"], len(record["ranks"])) == ("ok", "slurm", 4)
    assert record["job"].isdigit()
    output(start(*command, before=(*salloc, *four)))
    assert records(tmp_path) == [record]
    output(start(*command, "force=true", before=(*salloc, "srun", "--ntasks=1")))
    (own,) = records(tmp_path)
    assert (own["status"], own["launcher"], len(own["ranks"])) == ("ok", "own", 4)
    assert int(own["job"]) > int(record["job"])


@on_slurm
def test_the_rank_that_fails_is_the_one_that_is_told(tmp_path):
    """Rank 1 wants too much memory; rank 0 only loses its neighbour, and Slurm kills all."""
    script = tmp_path / "short.py"
    script.write_text(
        "from dataclasses import replace\nimport os\nfrom experiments import attention, points\n"
        "def short(config):\n"
        "    if os.environ['RANK'] == '1':\n        raise MemoryError('a test')\n"
        "    return attention.measure(config)\n"
        "points.main(replace(attention.EXPERIMENT, measure=short))\n"
    )
    before = ("srun", "--kill-on-bad-exit", "--ntasks=2")
    output(
        start("mesh=u1r2", f"results={tmp_path}/x", *SMALL, before=before, what=(str(script),)), 1, 143
    )  # of rank 1, or of rank 0, which Slurm ends
    (record,) = records(tmp_path / "x")
    assert (record["status"], record["reason"], record["launcher"]) == ("oom", "MemoryError: a test", "slurm")


@on_slurm
def test_a_job_that_is_cancelled_in_the_middle_of_a_point(tmp_path):
    """Becomes a record; the other point is measured."""
    sweep = start(
        "launcher=slurm", "mesh=u1r2", *SMALL[:3], "seq=64,16384", "measure.repeats=1000", f"results={tmp_path}"
    )
    until(lambda: list(tmp_path.glob("*s16384*/stack.0.part")))  # it measures
    (folder,) = tmp_path.glob(".submitit/*_1")
    subprocess.run(["scancel", folder.name], check=True)
    text = output(sweep, 1)
    found = {record["config"]["seq"]: record for record in records(tmp_path)}
    assert {seq: record["status"] for seq, record in found.items()} == {64: "ok", 16384: "crash"}
    assert found[16384]["reason"].startswith(f"Slurm job {folder.name}: CANCELLED")
    assert found[16384]["job"] == folder.name
    assert any("CANCELLED" in line for lines in found[16384]["stderr"].values() for line in lines)
    assert "1 of 2 points have no result" in text


@on_slurm
def test_a_point_that_hangs_in_a_job(tmp_path):
    text = output(start("launcher=slurm", *LONG, "timeout_s=3", f"results={tmp_path}"), 1)
    (record,) = records(tmp_path)
    assert (record["status"], record["launcher"], set(record["stacks"])) == ("timeout", "slurm", {"0", "1"})
    assert "timeout after 3.0 s" in text


@on_slurm
def test_what_slurm_refuses_is_a_record(tmp_path):
    text = output(start("launcher=slurm", *LONG, "hydra.launcher.partition=none", f"results={tmp_path}"), 1)
    (record,) = records(tmp_path)
    assert record["status"] == "unsupported"
    assert "sbatch refused 1 nodes x 2 tasks" in record["reason"]
    assert "invalid partition" in text


@on_slurm
def test_an_interrupted_sweep_leaves_no_jobs(tmp_path):
    name = f"interrupted{os.getpid()}"
    sweep = start("launcher=slurm", *LONG, "seed=0,1", "timeout_s=200", f"results={tmp_path}", f"name={name}")
    until(lambda: "RUNNING" in in_queue(name))
    sweep.send_signal(signal.SIGINT)
    sweep.communicate(timeout=60)
    assert sweep.returncode != 0
    until(lambda: not in_queue(name))
    assert records(tmp_path) == []
