"""Slurm on this machine for as long as a command runs: two nodes of four CPUs each, whatever the machine has.

    python -m tests.slurm sinfo
    python -m tests.slurm python -m experiments.attention launcher=slurm mesh=u2r2

All its files are in a temporary folder, which SLURM_CONF names; nothing of another Slurm is touched. As root, where
munged, slurmctld and slurmd are installed.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

NODES = ("uspnode1", "uspnode2")  # names that only Slurm knows
CONFIGURATION = """
ClusterName=usp
SlurmctldHost=localhost
SlurmctldPort={controller}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def missing() -> str:
    """What a person has to do before Slurm can be started here; empty if nothing."""
    if absent := [x for x in ("munged", "slurmctld", "slurmd", "srun") if shutil.which(x, path=_path()) is None]:
        return f"{', '.join(absent)} not found: on Debian, apt-get install slurm-wlm munge"
    return "" if os.geteuid() == 0 else "Slurm is started as root: sudo make slurm"


def _path() -> str:
    """Where daemons are."""
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


@contextmanager
def cluster() -> Iterator[dict[str, str]]:
    """The environment in which Slurm's commands find it. What was started is ended, with its jobs."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="usp-slurm-")))
        folder.chmod(0o755)  # for the user munge
        environment = {**os.environ, "PATH": _path(), "SLURM_CONF": str(folder / "slurm.conf")}
        ports = _free_ports(1 + len(NODES))
        text = CONFIGURATION.format(folder=folder, controller=ports[0])
        for node, port in zip(NODES, ports[1:], strict=True):
            (folder / node).mkdir()
            text += f"NodeName={node} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs=4\n"
        (folder / "slurm.conf").write_text(text)
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        munge = folder / "munge"
        munge.mkdir(mode=0o755)
        (munge / "key").write_bytes(secrets.token_bytes(1024))
        (munge / "key").chmod(0o600)
        for path in (munge, munge / "key"):
            shutil.chown(path, "munge", "munge")

        def start(name: str, *command: str, **options) -> None:
            with (folder / f"{name}.log").open("w") as log:
                how = {"env": environment, "stdout": log, "stderr": log, "start_new_session": True}  # no Ctrl-C
                process = subprocess.Popen(command, **how, **options)
            stack.callback(_end, process)

        files = (f"--{name}-file={munge}/{name}" for name in ("key", "pid", "seed", "log"))
        who = {"user": "munge", "group": "munge", "extra_groups": []}
        start("munged", "munged", "--foreground", f"--socket={munge}/socket", *files, **who)
        _until((munge / "socket").exists, folder, "munged did not start")
        start("slurmctld", "slurmctld", "-D")
        for node in NODES:
            start(node, "slurmd", "-D", "-N", node)
        idle = [f"{node} idle" for node in NODES]
        _until(lambda: _said(environment, "sinfo", "-hN", "-o%N %T") == idle, folder, "the nodes did not come up")
        try:
            yield environment
        finally:
            _said(environment, "scancel", "--user=root")
            _until(lambda: not _said(environment, "squeue", "-h"), folder, "jobs did not end")


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        found = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in found:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in found]


def _said(environment: dict[str, str], *command: str) -> list[str]:
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    return result.stdout.splitlines()


def _until(true, folder: Path, message: str) -> None:
    end = time.monotonic() + 60
    while not true():
        if time.monotonic() > end:
            logs = [f"{path.name}:\n{path.read_text()[-2000:]}" for path in folder.glob("*.log")]
            raise RuntimeError("\n".join([message, *logs]))
        time.sleep(0.2)


def _end(process: subprocess.Popen) -> None:
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


if __name__ == "__main__":
    if text := missing():
        sys.exit(text)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # after what was started has been ended
    with cluster() as environment:
        code = subprocess.run(sys.argv[1:], env=environment).returncode
    sys.exit(code)
