"""Hosts emulated on this machine: where ranks are, what their links carry, what is left when they are gone."""

from __future__ import annotations

import fcntl
import glob
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from experiments import emulated_cluster, points, ranks
from experiments.config import plain
from tests import faults
from tests.test_experiments import ROOT, SMALL, composed, records, run_here

HERE = sys.platform == "linux" and os.geteuid() == 0 and all(map(shutil.which, ("ip", "tc", "nsenter")))
needs_root = pytest.mark.skipif(not HERE, reason="needs root, iproute2 and util-linux")
HOSTS = {"hosts": 2, "ranks_per_host": 2, "gbit_per_s": 1.0}
CONFIG = {"device": "cpu", "cluster": HOSTS}


def left() -> tuple[str, str, list[str], str]:
    """What a cluster could leave behind: namespaces, links, folders, mounts."""

    def told(*command: str) -> str:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    names = told("ip", "-oneline", "link").splitlines()
    links = " ".join(line.split(": ")[1] for line in names)
    folders = glob.glob(f"{tempfile.gettempdir()}/usp-hosts-*")
    return told("ip", "netns", "list"), links, folders, Path("/proc/mounts").read_text()


def namespaces() -> int:
    """Network namespaces that some process is in."""
    found = set()
    for path in glob.glob("/proc/[0-9]*/ns/net"):
        try:
            found.add(os.readlink(path))
        except OSError:  # it has ended
            continue
    return len(found)


def soon(condition, seconds: float = 10.0) -> bool:
    """Whether it comes true in time: the system takes namespaces away a moment after their last process."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


@pytest.fixture(autouse=True)
def _alone():
    """One test with hosts at a time, also if several processes run tests: they look at what all have made."""
    with Path(tempfile.gettempdir(), "usp-hosts.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# ---------------------------------------------------------------------------------------------------
# What is refused.


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["cluster.hosts=3"], "the mesh has 4 ranks, and cluster.hosts=3 x cluster.ranks_per_host=2 are 6"),
        (["cluster.hosts=0"], "cluster.hosts=0"),
        (["cluster.ranks_per_host=0"], "cluster.ranks_per_host=0"),
        (["cluster.gbit_per_s=0"], "cluster.gbit_per_s=0"),
        (["cluster.gbit_per_s=nan"], "cluster.gbit_per_s=nan"),
        (["device=cuda"], "device=cuda on an emulated cluster"),
    ],
)
def test_hosts_that_cannot_be(values, message):
    with pytest.raises(ValueError, match=message):
        points.check(plain(composed("launcher=emulated_cluster", *values)))


@pytest.mark.parametrize(
    ("values", "given", "missing"),
    [
        (["cluster.hosts=4"], "'hosts': 4", "ranks_per_host or gbit_per_s"),
        (
            ["experiment=two_level", "launcher=basic", "cluster.gbit_per_s=1"],
            "'gbit_per_s': 1.0",
            "hosts or ranks_per_host",
        ),
    ],
)
def test_a_part_of_a_cluster(tmp_path, values, given, missing):
    """Is no cluster: the record of such a point says what is missing and who has it."""
    run_here(*values, "hydra.mode=RUN", *SMALL, f"results={tmp_path}", code=1)
    (record,) = records(tmp_path)
    assert record["status"] == "unsupported"
    assert f"cluster has {{{given}}} and no {missing}: launcher=emulated_cluster" in record["reason"]


def test_no_cluster_at_all():
    assert plain(composed())["cluster"] is None


@pytest.mark.parametrize(
    ("name", "answer", "message"),
    [
        ("os.geteuid", lambda: 1000, "needs root"),
        ("shutil.which", lambda program: None if program == "tc" else program, r"\['tc'\] are missing"),
    ],
)
def test_a_machine_that_cannot_have_hosts(tmp_path, monkeypatch, name, answer, message):
    """Is told so, as the record of every point."""
    monkeypatch.setattr(f"experiments.emulated_cluster.{name}", answer)
    with pytest.raises(ValueError, match=message):
        emulated_cluster.check_machine()
    text = run_here("launcher=emulated_cluster", *SMALL, f"results={tmp_path}", code=1)
    assert "an emulated cluster needs" in text
    assert [record["status"] for record in records(tmp_path)] == ["unsupported"]


def test_ranks_that_run_already_have_hosts_of_their_own(monkeypatch):
    monkeypatch.setattr(points, "RUNNING", True)
    with pytest.raises(ValueError, match="these ranks run already"):
        points.check(plain(composed("launcher=emulated_cluster")))


# ---------------------------------------------------------------------------------------------------
# Ranks, links and bytes.


@needs_root
@pytest.mark.parametrize("mesh", ["u2r2", "u2r2_ring_inside"])
def test_a_point_on_two_hosts(tmp_path, mesh):
    """The inner axis stays inside hosts; what interfaces count is what ranks count; no call beats the link."""
    options = "launcher=emulated_cluster", f"mesh={mesh}", "cluster.gbit_per_s=0.05", "seq=2048", "measure=smoke"
    run_here(*options, f"results={tmp_path}")
    (record,) = records(tmp_path)
    assert (record["status"], record["launcher"]) == ("ok", "emulated_cluster")
    assert [host["ranks"] for host in record["hosts"]] == [[0, 1], [2, 3]]
    assert {(host["interface"], host["gbit_per_s"]) for host in record["hosts"]} == {("eth0", 0.05)}
    for rank in record["ranks"]:
        (host,) = [host["host"] for host in record["hosts"] if rank["rank"] in host["ranks"]]
        inner, outer = ("ulysses", "ring") if mesh == "u2r2" else ("ring", "ulysses")
        assert (rank["host"], rank["clock"]) == (host, "wall")
        assert [rank[f"{outer}_rank"], rank[f"{inner}_rank"]] == list(divmod(rank["rank"], 2))
    kinds = ("ring", "ring_grad") if mesh == "u2r2" else ("all_to_all",)
    for host, link in zip(record["hosts"], record["summary"]["links"], strict=True):
        away = sum(record["ranks"][rank]["bytes"][kind] for rank in host["ranks"] for kind in kinds)
        assert link["host"] == host["host"]
        assert link["counted_bytes"] == away
        assert 1.0 <= link["interface_bytes"] / away < 1.03
        assert record["summary"]["wall_s"] > 0.9 * away * 8 / 0.05e9
    assert max(record["summary"]["errors"].values()) < 5e-6


@needs_root
def test_the_same_command_continues(tmp_path):
    """A rate is part of a point; what has a record is not measured again; a table and a picture are made."""
    sweep = "-m", "launcher=emulated_cluster", *SMALL, "mesh=u2r2,u4r1", f"results={tmp_path}"
    run_here(*sweep, "cluster.gbit_per_s=1")
    first = {record["point"]: record["started"] for record in records(tmp_path)}
    text = run_here(*sweep, "cluster.gbit_per_s=1,2")
    found = {record["point"]: record["started"] for record in records(tmp_path)}
    assert len(first) == 2
    assert len(found) == 4
    assert first.items() <= found.items()
    assert "2 hosts x 2 ranks" in text
    assert (tmp_path / "two_level_2x2.png").stat().st_size > 10_000


# ---------------------------------------------------------------------------------------------------
# What goes wrong, and what is left.


@needs_root
def test_nothing_is_left_behind():
    before, count = left(), namespaces()
    for _ in range(5):
        found = emulated_cluster.launch(faults.rank_and_world, CONFIG, 4, 60.0)
        assert [(rank["rank"], rank["world"]) for rank in found] == [(n, 4) for n in range(4)]
    assert left() == before
    assert soon(lambda: namespaces() == count)


@needs_root
@pytest.mark.parametrize(
    ("function", "status", "reason"),
    [
        (faults.die, "crash", r"rank 1: ended by signal 9 \(SIGKILL\)"),
        (faults.leave_early, "crash", "rank 1: ended with exit code 7"),
        (faults.want_memory, "oom", "rank 1"),
        (faults.refuse, "unsupported", "nobody can do this"),
    ],
)
def test_the_first_failure_is_the_one_that_is_told(function, status, reason):
    before, count = left(), namespaces()
    with pytest.raises(ranks.PointFailed, match=reason) as caught:
        emulated_cluster.launch(function, CONFIG, 4, 60.0)
    assert caught.value.status == status
    assert left() == before
    assert soon(lambda: namespaces() == count)


@needs_root
@pytest.mark.parametrize("how", ["power", "cable"])
def test_a_host_that_disappears_in_the_middle_of_a_point(tmp_path, monkeypatch, how):
    """Without power it is told at once, without a cable when the time is up; the next point has hosts again."""
    lost = threading.Event()
    go = emulated_cluster._Host.go

    def disappear(host) -> None:
        if how == "power":
            host.process.kill()
        else:
            host.run("ip", "link", "set", emulated_cluster.INTERFACE, "down")
        lost.set()

    def go_and_disappear(host) -> None:
        go(host)
        if host.ranks[0].host == 1 and not lost.is_set():
            threading.Timer(1.5, disappear, [host]).start()

    monkeypatch.setattr(emulated_cluster._Host, "go", go_and_disappear)
    # The first point would take half a minute: it is still under way when the host goes.
    sweep = [
        "-m",
        "launcher=emulated_cluster",
        "mesh=u1r4",
        "measure=smoke",
        "timeout_s=8",
        "cluster.gbit_per_s=0.01,1",
    ]
    start_s = time.monotonic()
    run_here(*sweep, "seq=1024", f"results={tmp_path}", code=1)
    found = {record["config"]["cluster"]["gbit_per_s"]: record for record in records(tmp_path)}
    assert found[1.0]["status"] == "ok"
    broken = found[0.01]
    assert [host["ranks"] for host in broken["hosts"]] == [[0, 1], [2, 3]]
    if how == "power":
        assert broken["status"] == "crash"
        assert "host 1 is gone, with all of its processes" in broken["reason"]
        assert broken["seconds"] < 8
    else:
        assert broken["status"] == "timeout"
        assert sorted(broken["stacks"]) == ["0", "1", "2", "3"]
        assert all("measure" in stack for stack in broken["stacks"].values())
    assert time.monotonic() - start_s < 60


@needs_root
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_hosts_end_with_the_program(tmp_path, how):
    """However that ends."""
    before, count = left(), namespaces()
    program = (
        "import signal; from experiments import emulated_cluster; from tests import faults\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored\n"
        f"config = {CONFIG | {'folder': str(tmp_path)}}\n"
        "if __name__ == '__main__': emulated_cluster.launch(faults.tell_process, config, 4, 600.0)\n"
    )
    path = tmp_path / "program.py"
    path.write_text(program)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, str(path)], cwd=ROOT, env=environment, stderr=subprocess.PIPE)
    assert soon(lambda: len(list(tmp_path.glob("[0-9]*"))) >= 2, 60)  # host names differ, process numbers may not
    assert namespaces() == count + 3
    process.send_signal(how)
    process.wait(30)
    assert soon(lambda: namespaces() == count)
    assert soon(lambda: left() == before)


def test_what_hosts_a_record_names():
    config = {"cluster": HOSTS | {"hosts": 3}, "mesh": {"ring": 3, "ulysses": 2, "inner": "ulysses"}}
    found = points.hosts_of(config)
    assert [host["ranks"] for host in found] == [[0, 1], [2, 3], [4, 5]]
    assert len({host["host"] for host in found}) == 3
    alone = points.hosts_of(config | {"cluster": None})
    assert [host["ranks"] for host in alone] == [list(range(6))]
    assert json.dumps(found + alone)
