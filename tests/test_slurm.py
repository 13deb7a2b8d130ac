"""Ranks that Slurm started. What is marked runs on Slurm: `make slurm` starts one on this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import attention, points, ranks
from tests.test_experiments import ROOT, SMALL, composed, plain, records

COMMAND = ["python", "-m", "experiments.attention"]


def a_point(tmp_path: Path, *overrides: str) -> dict:
    return plain(composed("mesh=u1r2", f"results={tmp_path}", *SMALL, *overrides))


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
