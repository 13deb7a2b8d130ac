"""A cluster of several hosts on this machine: network namespaces, joined by links of a given rate.

Note [Emulated hosts]
~~~~~~~~~~~~~~~~~~~~~
A host is a process tree with a network, a host name and process numbers of its own. Its only way out is one link to
a switch (a bridge in a namespace of its own), limited to a rate in each direction by a token bucket (tc tbf). Ranks
are started on each host by PyTorch's elastic launcher and find each other over the network, as on real nodes; within
a host they speak over its loopback, which is not limited.

The namespaces have no names and nothing of them is in the network of this machine: they are kept by their processes
alone. A host's first process is the first of its process numbers too, and it dies with the process that made it: when
a point is over, or this program is killed in the middle of it, the system takes processes and links away.

Hosts share this machine's cores: each stays on its part of them, or on one where there are more hosts than cores.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path

from experiments import ranks

_NEW_NETWORK, _NEW_PROCESSES, _NEW_NAME, _NEW_MOUNTS = 0x40000000, 0x20000000, 0x04000000, 0x00020000  # unshare(2)
_DEATH_SIGNAL = 1  # of prctl(2)
INTERFACE = "eth0"  # on every host
PORT = 29500
BURST = "256kb"  # of a token bucket: smaller ones cut large packets up, which makes more bytes of headers
QUEUE = "400ms"  # what waits for longer is dropped


def check(config: dict, count: int) -> None:
    """What is wrong with the hosts of a point, on whatever machine.

    Raises:
        ValueError: for values that cannot be, or a mesh that does not fill the hosts.
    """
    hosts, per_host, rate = (config["cluster"][key] for key in ("hosts", "ranks_per_host", "gbit_per_s"))
    if min(hosts, per_host) < 1 or hosts > 200:
        raise ValueError(f"cluster.hosts={hosts} (1 to 200), cluster.ranks_per_host={per_host} (at least 1)")
    if not 0.001 <= rate <= 1000:
        raise ValueError(f"cluster.gbit_per_s={rate}: from 0.001 to 1000")
    if count != hosts * per_host:
        raise ValueError(
            f"the mesh has {count} ranks, and cluster.hosts={hosts} x cluster.ranks_per_host={per_host} are "
            f"{hosts * per_host}: change the mesh or the cluster"
        )
    if config["device"] == "cuda":
        raise ValueError("device=cuda on an emulated cluster, whose hosts have cores alone: device=cpu")


def check_machine() -> None:
    """Whether this machine can have hosts.

    Raises:
        ValueError: naming what is missing and the cure.
    """
    missing = [program for program in ("ip", "tc", "nsenter") if shutil.which(program) is None]
    if sys.platform != "linux" or missing:
        raise ValueError(
            "an emulated cluster needs Linux with ip, tc and nsenter (packages iproute2 and util-linux); "
            f"this is {sys.platform}, and {missing} are missing: launcher=basic"
        )
    if os.geteuid() != 0:
        raise ValueError(
            "an emulated cluster needs root, to make network namespaces: run as root (sudo), or launcher=basic"
        )


def launch(
    function: Callable[[dict], dict], config: dict, count: int, timeout_s: float, preload: tuple[str, ...] = ()
) -> list[dict]:
    """function(config) on new ranks of new hosts; otherwise as `ranks.launch`.

    Raises:
        ValueError: if this machine cannot have hosts.
        PointFailed: with what happened first. All hosts are gone then.
    """
    check_machine()
    context = ranks.processes((*preload, "torch.distributed.launcher.api", "experiments.emulated_cluster"))
    alive, lifeline = context.Pipe(duplex=False)  # nothing is ever sent: it closes when this process ends
    kills = ranks.kernel_kills()
    made: list[_Host] = []
    with tempfile.TemporaryDirectory(prefix="usp-hosts-") as folder:
        switch = _Namespace(context, _switch, alive, folder)
        try:
            made += [
                _Host(context, n, function, config, timeout_s, folder, alive) for n in range(config["cluster"]["hosts"])
            ]
            deadline = time.monotonic() + timeout_s + ranks.GRACE_S
            for member in (switch, *made):
                member.wait_until_made(deadline)
            _connect(switch, made, config["cluster"]["gbit_per_s"])
            for host in made:
                host.go()
            members = [rank for host in made for rank in host.ranks]
            assert len(members) == count
            return ranks.collect(members, deadline, kills, patience_s=ranks.GRACE_S)
        finally:
            for member in (*made, switch):
                member.end()
            lifeline.close()
            alive.close()


def _connect(switch: _Namespace, hosts: list[_Host], gbit_per_s: float) -> None:
    """A link from every host to the switch, limited in both directions."""
    bucket = ["root", "tbf", "rate", f"{round(gbit_per_s * 1e6)}kbit", "burst", BURST, "latency", QUEUE]
    switch.run("ip", "link", "add", "switch", "type", "bridge")
    switch.run("ip", "link", "set", "switch", "up")
    for n, host in enumerate(hosts):
        peer = ["peer", "name", INTERFACE, "netns", str(host.pid)]
        switch.run("ip", "link", "add", f"port{n}", "type", "veth", *peer)
        switch.run("ip", "link", "set", f"port{n}", "master", "switch", "up")
        switch.run("tc", "qdisc", "add", "dev", f"port{n}", *bucket)
        host.run("ip", "link", "set", "lo", "up")
        host.run("ip", "address", "add", f"{address(n)}/24", "dev", INTERFACE)
        host.run("ip", "link", "set", INTERFACE, "up")
        host.run("tc", "qdisc", "add", "dev", INTERFACE, *bucket)


def address(host: int) -> str:
    return f"10.77.0.{host + 1}"


def places(cluster: dict) -> list[dict]:
    """Where each rank is, as `ranks.place` tells it."""
    return [
        {
            "host": hashlib.sha256(f"host{host}".encode()).hexdigest()[:8],
            "cores": len(_cores(host, cluster["hosts"])),
            "interface": INTERFACE,
            "gbit_per_s": cluster["gbit_per_s"],
        }
        for host in range(cluster["hosts"])
        for _ in range(cluster["ranks_per_host"])
    ]


class _Namespace:
    """A process in namespaces of its own, seen from this program."""

    def __init__(self, context, life: Callable, alive: Connection, *arguments):
        self.told, word = context.Pipe()
        self.process = context.Process(target=life, args=(word, alive, *arguments))
        self.process.start()
        word.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def wait_until_made(self, deadline: float) -> None:
        if not self.told.poll(max(0.0, deadline - time.monotonic())):
            raise ranks.PointFailed("timeout", "a host of the emulated cluster was not there when the time was up")
        try:
            error = self.told.recv()
        except EOFError:
            error = "it ended"
        if error:
            raise ranks.PointFailed("unsupported", f"no namespace of the emulated cluster could be made: {error}")

    def run(self, *command: str) -> None:
        """A command in the network of this namespace."""
        done = subprocess.run(
            ["nsenter", f"--net=/proc/{self.pid}/ns/net", *command], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise ranks.PointFailed("unsupported", f"{' '.join(command)}: {done.stderr.strip()}")

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.told.close()


class _Host(_Namespace):
    """A host and its ranks."""

    def __init__(self, context, number: int, function, config: dict, timeout_s: float, folder: str, alive: Connection):
        per_host = config["cluster"]["ranks_per_host"]
        self.ranks, writers = [], []
        for rank in range(number * per_host, (number + 1) * per_host):
            reports, writer = context.Pipe(duplex=False)
            self.ranks.append(_Rank(reports, number, Path(folder, f"stack.{rank}")))
            writers.append(writer)
        super().__init__(context, _host, alive, number, function, config, timeout_s, folder, writers)
        for writer in writers:
            writer.close()

    def go(self) -> None:
        """The network is there."""
        with suppress(BrokenPipeError):  # the host is gone, as its ranks will tell
            self.told.send("go")

    def end(self) -> None:
        super().end()
        for rank in self.ranks:
            rank.reports.close()


class _Rank:
    """A rank seen from this program."""

    def __init__(self, reports: Connection, host: int, stack: Path):
        self.reports, self.host, self.stack = reports, host, stack
        self.report: tuple | None = None

    def receive(self) -> None:
        """What the rank says, or its host's launcher in its place; a host that is gone says nothing."""
        try:
            self.report = self.reports.recv()
        except Exception:  # also half a message
            self.report = "died", f"host {self.host} is gone, with all of its processes", time.time()

    def where(self) -> str:
        return (self.stack.exists() and self.stack.read_text()) or "no stack: the rank had not begun, or was stopped"


# ---------------------------------------------------------------------------------------------------
# In the namespaces.


def _switch(word: Connection, alive: Connection, folder: str) -> None:
    """Keep the bridge; if the program ends without it, remove what it would have removed."""
    _apart(word, "switch", _NEW_NETWORK | _NEW_NAME)
    wait([alive])
    shutil.rmtree(folder, ignore_errors=True)


def _host(
    word: Connection,
    alive: Connection,
    number: int,
    function: Callable[[dict], dict],
    config: dict,
    timeout_s: float,
    folder: str,
    writers: list[Connection],
) -> None:
    """A host's life: its first process starts the ranks; this one is outside, and takes it along when it ends."""
    os.sched_setaffinity(0, _cores(number, config["cluster"]["hosts"]))
    libc = _apart(word, f"host{number}", _NEW_NETWORK | _NEW_NAME | _NEW_PROCESSES | _NEW_MOUNTS)
    first = os.fork()
    if first:
        for writer in writers:
            writer.close()
        wait([alive, os.pidfd_open(first)])  # the program has ended, or the host has
        os._exit(0)
    libc.prctl(_DEATH_SIGNAL, signal.SIGKILL)
    _name_hosts(Path(folder, f"names{number}"), config["cluster"]["hosts"])
    if word.recv() == "go":
        _start_ranks(number, function, config, timeout_s, folder, writers)
    os._exit(0)


def _cores(number: int, hosts: int) -> set[int]:
    """Of this process's, those of one host."""
    cores = sorted(os.sched_getaffinity(0))
    if hosts > len(cores):
        return {cores[number % len(cores)]}
    return set(cores[number * len(cores) // hosts : (number + 1) * len(cores) // hosts])


def _apart(word: Connection, name: str, kinds: int) -> ctypes.CDLL:
    """Leave the namespaces of this machine, and say so."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started this ends it
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(kinds):
        word.send(os.strerror(ctypes.get_errno()))
        os._exit(1)
    libc.sethostname(name.encode(), len(name))
    word.send("")
    return libc


def _name_hosts(file: Path, hosts: int) -> None:
    """Let the names of all hosts be known on this one."""
    names = ["127.0.0.1 localhost"]
    for n in range(hosts):
        names += [f"{address(n)} host{n}", f"::ffff:{address(n)} host{n}"]
    file.write_text("\n".join(names) + "\n")
    for command in (["mount", "--make-rprivate", "/"], ["mount", "--bind", str(file), "/etc/hosts"]):
        subprocess.run(command, check=True)


def _start_ranks(
    number: int,
    function: Callable[[dict], dict],
    config: dict,
    timeout_s: float,
    folder: str,
    writers: list[Connection],
) -> None:
    """Through the elastic launcher of PyTorch, as `torchrun --nnodes ... --node-rank ...` does."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    hosts, per_host = config["cluster"]["hosts"], config["cluster"]["ranks_per_host"]
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    logging.getLogger("torch").setLevel(logging.CRITICAL)  # what it says of a failure is in the record
    how = LaunchConfig(
        min_nodes=hosts,
        max_nodes=hosts,
        nproc_per_node=per_host,
        run_id="point",
        rdzv_backend="static",
        rdzv_endpoint=f"{address(0)}:{PORT}",
        rdzv_configs={"rank": number, "timeout": timeout_s},
        local_addr=address(number),
        max_restarts=0,
        start_method="fork",  # this process has imported what ranks need, and has computed nothing
        logs_specs=DefaultLogsSpecs(log_dir=str(Path(folder, f"host{number}"))),
        shutdown_timeout=1,
    )
    try:
        elastic_launch(how, _rank)(function, config, timeout_s, folder, writers)
    except ChildFailedError as error:
        for rank, failure in error.failures.items():
            writers[rank - number * per_host].send(("died", ranks.ending(failure.exitcode), time.time()))
    except Exception as error:
        writers[0].send(("crash", f"the launcher of host {number}: {type(error).__name__}: {error}", time.time()))


def _rank(
    function: Callable[[dict], dict], config: dict, timeout_s: float, folder: str, writers: list[Connection]
) -> None:
    """A rank's life; where it is, it finds in the environment."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the launcher's own handler is inherited
    reports = writers[int(os.environ["LOCAL_RANK"])]
    with Path(folder, f"stack.{os.environ['RANK']}").open("w") as stack:
        ranks.live(function, config, timeout_s, partial(ranks.join, "cpu"), reports, stack.fileno())
