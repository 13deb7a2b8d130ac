"""What happens on the rank processes, whatever they measure: start them, count and time calls, tell what was found.

Imports neither Hydra nor a plotting library, so that ranks start fast.
"""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import hashlib
import multiprocessing
import multiprocessing.connection
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import usp


def of_step(task: Mapping[str, str]) -> dict[str, str]:
    """What torchrun would tell a rank, of the environment of a task of Slurm: a step's tasks are the ranks.

    Nothing for a batch script and for the only task of a step, which start ranks of their own, and for what torchrun
    has started. A MASTER_ADDR or MASTER_PORT that is there already stays.

    Raises:
        ValueError: if the step has several nodes and Slurm does not say where the first one is.
    """
    if "RANK" in task or int(task.get("SLURM_STEP_NUM_TASKS", "1")) < 2:
        return {}
    by_node: list[str] = []
    for part in task["SLURM_STEP_TASKS_PER_NODE"].split(","):  # 4(x2),3
        tasks, _, nodes = part.rstrip(")").partition("(x")
        by_node += int(nodes or "1") * [tasks]
    found = {
        "RANK": task["SLURM_PROCID"],
        "WORLD_SIZE": task["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": task["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": by_node[int(task["SLURM_NODEID"])],
    }
    if "MASTER_ADDR" not in task:
        found["MASTER_ADDR"] = _first_address(task["SLURM_STEP_NODELIST"]) if len(by_node) > 1 else "127.0.0.1"
    if "MASTER_PORT" not in task:  # below those that a system gives away by itself
        place = 101 * int(task["SLURM_JOB_ID"]) + int(task["SLURM_STEP_ID"])
        found["MASTER_PORT"] = str(10_000 + place % 20_000)
    return found


def _first_address(nodes: str) -> str:
    """Of the first host of Slurm's list: its name, or if that is only Slurm's, what Slurm itself uses."""
    try:
        name = _scontrol("hostnames", nodes).split()[0]
        try:
            socket.getaddrinfo(name, None)
        except OSError:
            fields = _scontrol("node", name, "--oneliner").split()
            return next(field.removeprefix("NodeAddr=") for field in fields if field.startswith("NodeAddr="))
        return name
    except (OSError, LookupError, StopIteration, subprocess.SubprocessError) as error:
        cure = "export MASTER_ADDR=<host of task 0>"
        raise ValueError(f"scontrol did not say where the first node of {nodes} is ({error}): {cure}") from None


def _scontrol(*what: str) -> str:
    return subprocess.run(["scontrol", "show", *what], capture_output=True, text=True, check=True, timeout=60).stdout


STEP = of_step(os.environ)  # not empty: this process is one of several tasks of a Slurm step
os.environ |= STEP
RUNNING = {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()  # it is one of ranks that run already
FIRST = not RUNNING or os.environ["RANK"] == "0"
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
GRACE_S = 2.0  # how long after the first failure, or after the deadline, the other ranks may still report


class PointFailed(Exception):
    """A point that has no result. `status` is oom, crash, timeout or unsupported; `stacks` of the ranks, if it hung."""

    def __init__(self, status: str, reason: str, stacks: dict[str, str] | None = None):
        super().__init__(reason)
        self.status, self.reason, self.stacks = status, reason, stacks or {}


def classify(error: BaseException) -> str:
    """The status that an exception means: a refused call is a ValueError, everywhere in this library."""
    signs = "out of memory", "can't allocate memory", "cannot allocate memory", "bad_alloc"
    if isinstance(error, MemoryError) or any(sign in str(error).lower() for sign in signs):
        return "oom"
    return "unsupported" if isinstance(error, ValueError) else "crash"


# ---------------------------------------------------------------------------------------------------
# Ranks as processes of this machine.


def launch(
    function: Callable[[dict], dict], config: dict, world: int, timeout_s: float, preload: tuple[str, ...] = ()
) -> list[dict]:
    """function(config) on `world` new processes that form one job; the results by rank.

    Processes are forked from one that has imported torch and `preload`. They end when the process that started them
    ends, however that happens. Where ranks share cores, each stays on one, and processes of the lowest priority keep
    every core busy: a rank that outlives the others would run faster beside an idle core, and imbalance would look
    small.

    Raises:
        PointFailed: with what happened first. All ranks are ended. After `timeout_s` each tells where it stands.
    """
    context = processes(preload)
    store = dist.TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False)
    alive, lifeline = context.Pipe(duplex=False)  # nothing is ever sent: it closes when this process ends
    kills = kernel_kills()
    ranks: list[_Rank] = []
    idle = range(CORES if shared(config["device"], world) else 0)
    fillers = [context.Process(target=_fill, args=(core, alive), daemon=True) for core in idle]
    try:
        for filler in fillers:
            filler.start()
        for rank in range(world):
            ranks.append(_Rank(context, function, config, rank, world, store.port, timeout_s, alive))
        return collect(ranks, time.monotonic() + timeout_s + GRACE_S, kills)
    finally:
        for rank in ranks:
            rank.end()
        for filler in fillers:
            filler.kill()
            filler.join()
        alive.close()
        lifeline.close()


def processes(preload: tuple[str, ...] = ()):
    """Where new processes come from: one that has imported torch and `preload`."""
    if multiprocessing.get_start_method() not in multiprocessing.get_all_start_methods():
        multiprocessing.set_start_method("forkserver", force=True)  # joblib's own is unknown to the ranks
    context = multiprocessing.get_context("forkserver")
    # The last is what autograd.grad imports when it is given gradients: half a second in every rank of every point.
    usual = ["experiments.ranks", "usp.nn", "usp.inference.decode", "torch.fx.experimental.symbolic_shapes"]
    context.set_forkserver_preload([*usual, *preload])
    return context


class _Rank:
    """A rank seen from the process that started it."""

    def __init__(self, context, function, config: dict, rank: int, world: int, port: int, timeout_s: float, alive):
        self.reports, reporter = context.Pipe(duplex=False)
        self.stack, stack_writer = context.Pipe(duplex=False)
        self.report: tuple | None = None  # ("ok", result, time) or (status, reason, time)
        self.process = context.Process(
            target=_work,
            args=(function, config, rank, world, port, timeout_s, reporter, stack_writer, alive),
            daemon=True,
        )
        self.process.start()
        reporter.close()
        stack_writer.close()

    def receive(self) -> None:
        """What the rank says; a rank that died has said so."""
        try:
            self.report = self.reports.recv()
        except EOFError:
            self.process.join(GRACE_S)
            self.report = "died", ending(self.process.exitcode), time.time()

    def where(self) -> str:
        """The stack that the rank wrote when its time was up."""
        os.set_blocking(self.stack.fileno(), False)
        text = b""
        with suppress(BlockingIOError):
            while part := os.read(self.stack.fileno(), 1 << 16):
                text += part
        return text.decode() or "no stack: the rank had not begun, or was stopped"

    def end(self) -> None:
        if self.report is not None and self.report[0] == "ok":
            self.process.join(GRACE_S)  # it leaves by itself
        self.process.kill()
        self.process.join()
        self.reports.close()
        self.stack.close()


def collect(ranks: Sequence[Any], deadline: float, kills: int, patience_s: float = GRACE_S / 4) -> list[dict]:
    """What all ranks report, until the deadline; so long after the first failure the others may still say more.

    A rank has `reports`, what `receive` reads its `report` from, and `where` it stands.
    """
    failed = False
    while missing := [rank for rank in ranks if rank.report is None]:
        left = max(0.0, deadline - time.monotonic())
        ready = multiprocessing.connection.wait([rank.reports for rank in missing], timeout=left)
        for rank in missing:
            if rank.reports in ready:
                rank.receive()
        if not ready:
            break
        if not failed and any(rank.report and rank.report[0] != "ok" for rank in ranks):
            failed = True  # the others may know better what it was
            deadline = min(deadline, time.monotonic() + patience_s)
    reports = {n: rank.report for n, rank in enumerate(ranks) if rank.report is not None}
    bad = {n: report for n, report in reports.items() if report[0] != "ok"}
    if bad:
        # Ranks that lost a neighbour complain too: the one that died comes first, then the first to complain.
        n = min(bad, key=lambda n: (bad[n][0] != "died", bad[n][2]))
        status, reason, _ = bad[n]
        if status == "died":
            status = "oom" if "SIGKILL" in reason and kernel_kills() > kills else "crash"
        raise PointFailed(status, f"rank {n}: {reason}")
    if len(reports) < len(ranks):
        waiting = [n for n in range(len(ranks)) if n not in reports]
        stacks = {str(n): ranks[n].where() for n in range(len(ranks))}
        raise PointFailed("timeout", f"ranks {waiting} had no result when the time was up", stacks)
    return [reports[n][1] for n in range(len(ranks))]


def ending(code: int | None) -> str:
    if code is not None and code < 0:
        return f"ended by signal {-code} ({signal.Signals(-code).name})"
    return f"ended with exit code {code}"


def kernel_kills() -> int:
    """How many processes this system has killed for want of memory since it started, where it says so."""
    path = Path("/proc/vmstat")
    lines = path.read_text().splitlines() if path.exists() else []
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


def _work(
    function: Callable[[dict], dict],
    config: dict,
    rank: int,
    world: int,
    port: int,
    timeout_s: float,
    reports: Connection,
    stack: Connection,
    alive: Connection,
) -> None:
    """The life of a rank of this machine alone."""
    threading.Thread(target=end_with, args=(alive,), daemon=True).start()
    if any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # host names need not resolve

    def enter(late_s: float) -> None:
        store = dist.TCPStore("127.0.0.1", port, world, wait_for_workers=False)
        join(config["device"], late_s, store, rank, world)

    live(function, config, timeout_s, enter, reports, stack.fileno())


def live(
    function: Callable[[dict], dict],
    config: dict,
    timeout_s: float,
    enter: Callable[[float], None],
    reports: Connection,
    stack: int,
) -> None:
    """Enter the job, with a timeout for its collectives, and report function(config), or what went wrong."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started it ends it
    faulthandler.dump_traceback_later(timeout_s, file=stack)
    try:
        enter(timeout_s + 2 * GRACE_S)  # the launcher's deadline comes first, also if this rank began late
        result = function(config)
    except BaseException as error:
        reports.send((classify(error), f"{type(error).__name__}: {error}", time.time()))
        time.sleep(timeout_s)  # stay, or the others would complain about a closed connection
        raise
    reports.send(("ok", result, time.time()))
    leave()


def _stay_on(number: int) -> None:
    """Keep this process on one core, where the system can."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[number % len(cores)]})


def _fill(core: int, alive: Connection) -> None:
    """Compute attention in whatever time is left on a core."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(19)
    _stay_on(core)
    threading.Thread(target=end_with, args=(alive,), daemon=True).start()
    torch.set_num_threads(1)
    x = torch.randn(1, 4, 512, 64)
    while True:
        F.scaled_dot_product_attention(x, x, x)


def end_with(alive: Connection) -> None:
    """End this process when the one that started it has ended."""
    with suppress(EOFError, OSError):
        alive.recv_bytes()
    os.kill(os.getpid(), signal.SIGKILL)


# ---------------------------------------------------------------------------------------------------
# On a rank.


def own_devices(wanted: str, local_world: int) -> bool:
    """Whether each of this machine's ranks gets a device of its own."""
    return wanted != "cpu" and torch.cuda.device_count() >= max(1, local_world)


def shared(wanted: str, world: int) -> bool:
    """Whether `world` ranks on this machine share its cores."""
    return world > CORES and not own_devices(wanted, world)


@contextmanager
def machine(alone: bool) -> Iterator[None]:
    """This machine for one point alone, if wall time is to be measured, or with others that do not need it alone."""
    with Path(tempfile.gettempdir(), f"usp-{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


def join(wanted: str, timeout_s: float, store: dist.Store | None = None, rank: int = 0, world: int = 0) -> None:
    """Join torch.distributed: by the store, or from the environment (torchrun, Slurm). Once joined, nothing.

    A rank gets a device of its own if this machine has one for each of its ranks, else the CPU and one thread, on one
    core where ranks share them.

    Raises:
        ValueError: if devices are asked for and there are not enough.
    """
    if dist.is_initialized():
        return
    torch.set_num_threads(1)
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", world)))
    own = own_devices(wanted, local_world)
    if wanted == "cuda" and not own:
        devices = torch.cuda.device_count()
        raise ValueError(f"device=cuda needs {local_world} devices on this machine, which has {devices}: device=cpu")
    if own:
        torch.cuda.set_device(local_rank)
    elif local_world > CORES:
        _stay_on(local_rank)
    where = {"store": store, "rank": rank, "world_size": world} if store else {}
    dist.init_process_group("nccl" if own else "gloo", timeout=timedelta(seconds=timeout_s), **where)


def mesh_of(config: dict) -> DeviceMesh:
    """The mesh of a point over all ranks; those of its inner axis are consecutive."""
    degrees = {axis: config["mesh"].get(axis, 1) for axis in ("data", "ring", "ulysses")}
    inner = config["mesh"]["inner"]
    outer = next(axis for axis in ("ring", "ulysses") if axis != inner)
    return usp.init_mesh(**degrees, order=("data", outer, inner), device_type=device().type)


def leave() -> None:
    """End torch.distributed, all ranks together: a rank that exits with live gloo threads may abort."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def everyone(mine: Any) -> list:
    """What each rank has, on all ranks of a running job."""
    ranks: list = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    return ranks


def job() -> str | None:
    """The Slurm job that this process is in, as squeue and sacct name it."""
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        return f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    return os.environ.get("SLURM_JOB_ID")


def told(mine: bool) -> bool:
    """What the first rank says, on every rank of a running job."""
    if not dist.is_initialized():
        return mine
    said = [mine]
    dist.broadcast_object_list(said)
    return said[0]


def device() -> torch.device:
    """This rank's, once it has joined."""
    cuda = dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


def wait(_=None) -> None:
    """Until this rank's device has done what it was given."""
    if device().type == "cuda":
        torch.cuda.synchronize()


def local_world() -> int:
    """Ranks of the running job on this host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))


def several_hosts() -> bool:
    return local_world() < dist.get_world_size()


def shares_cores() -> bool:
    """Whether ranks of the running job compute on this rank's cores too."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else CORES
    return device().type != "cuda" and local_world() > cores


def wall_tells() -> bool:
    """Whether wall time is the speed of the running job: each rank has a device or a core of its own, or links between
    hosts are part of it."""
    return device().type == "cuda" or local_world() <= CORES or several_hosts()


def counted(call: Callable[[], Any], mesh: DeviceMesh) -> tuple[Any, dict]:
    """What a call returns, and this rank's sample of it: what it sent, which kernels ran, by how much memory grew."""
    here = device()
    before_bytes = reset_peak_memory(here)
    with usp.measure_traffic() as traffic:
        result = call()
        wait()
    return result, {
        "rank": dist.get_rank(),
        "ring_rank": mesh.get_local_rank("ring"),
        "ulysses_rank": mesh.get_local_rank("ulysses"),
        "device": torch.cuda.get_device_name(here) if here.type == "cuda" else "cpu",
        "clock": "wall" if wall_tells() else "cpu",
        "host": host_id(),
        "bytes": dict(traffic.bytes),
        "bytes_to_rank": [traffic.to_rank[rank] for rank in range(dist.get_world_size())],
        "messages": dict(traffic.messages),
        "kernels": dict(traffic.kernels),
        "peak_growth_bytes": peak_memory(here) - before_bytes,
    }


def clocked(
    forward: Callable, backward: Callable | None, *, warmup: int, repeats: int, **options
) -> dict[str, list[float]]:
    """`timed` with probes where ranks share cores, and without CPU time of what a device does.

    With several hosts also link_bytes: what this rank's host sent to others in a call, by the counter of its interface.
    """
    dist.barrier()
    before_bytes = sent_by_host()
    samples = timed(
        forward, backward, wait, warmup=warmup, repeats=repeats, probe=probe if shares_cores() else None, **options
    )
    if before_bytes is not None and several_hosts():
        samples["link_bytes"] = [((sent_by_host() or 0) - before_bytes) / (warmup + repeats)]
    if device().type == "cuda":
        samples = {name: values for name, values in samples.items() if not name.endswith("compute_s")}
    return samples


def timed(
    forward: Callable,
    backward: Callable | None,
    wait: Callable,
    *,
    warmup: int,
    repeats: int,
    before: Callable[[], None] = lambda: None,
    after: Callable[[], None] = lambda: None,
    probe: Callable[[], float] | None = None,
) -> dict[str, list[float]]:
    """Seconds of every call on this rank, after `warmup` calls that do not count.

    wall_s; cpu_s, of the whole process; compute_s, CPU time of the calling thread outside communication. Each also of
    the forward part. All ranks start a call together, and none starts the next before all are done. A part is over when
    `wait` has returned for its result: work may go on after a call has returned. `backward` gets forward's result.
    `before` comes before every call that counts and `after` after every call, outside of what is timed.
    `probe` is taken before and after each call, on all ranks at once; probe_s is the mean of the two.
    """
    samples: dict[str, list[float]] = {part + clock: [] for part in ("", "forward_") for clock in CLOCKS}
    samples["probe_s"] = []
    for call in range(-warmup, repeats):
        if call >= 0:
            before()
        dist.barrier()
        before_s = probe() if probe else 0.0
        dist.barrier()
        with usp.measure_traffic() as traffic:
            start = _clocks(traffic)
            result = forward()
            wait(result)
            middle = _clocks(traffic)
            if backward:
                wait(backward(result))
            end = _clocks(traffic)
        del result
        dist.barrier()
        after_s = probe() if probe else 0.0
        after()
        if call >= 0:
            samples["probe_s"].append((before_s + after_s) / 2)
            for part, stop in (("forward_", middle), ("", end)):
                for clock, a, b in zip(CLOCKS, start, stop, strict=True):
                    samples[part + clock].append(b - a)
    return samples


CLOCKS = ("wall_s", "cpu_s", "compute_s")


def host_id() -> str:
    """Of this host, without its name."""
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


def place() -> dict:
    """This host and its link to others, as far as the system tells: interface and nominal rate."""
    name = interface()
    speed = Path(f"/sys/class/net/{name}/speed")
    try:
        gbit_per_s = int(speed.read_text()) / 1000 if name else None
    except (OSError, ValueError):
        gbit_per_s = None
    return {
        "host": host_id(),
        "cores": CORES,
        "interface": name,
        "gbit_per_s": gbit_per_s if gbit_per_s and gbit_per_s > 0 else None,
    }


def interface() -> str | None:
    """Through which this host reaches the first rank's, where ranks were found running; None where it is not known."""
    if "MASTER_ADDR" not in os.environ:
        return None
    if name := os.environ.get("GLOO_SOCKET_IFNAME"):
        return name
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((os.environ["MASTER_ADDR"], 9))  # sends nothing
            own = socket.inet_aton(probe.getsockname()[0])
            for _, name in socket.if_nameindex():
                with suppress(OSError):  # has no address
                    request = struct.pack("256s", name.encode()[:15])
                    if fcntl.ioctl(probe.fileno(), _ADDRESS_OF, request)[20:24] == own:
                        return name
    except OSError:
        pass
    return None


_ADDRESS_OF = 0x8915  # SIOCGIFADDR of Linux; elsewhere another number, and nothing is found


def sent_by_host() -> int | None:
    """Bytes that this host has sent through its interface so far; None where the system does not count them."""
    name, path = interface(), Path("/proc/self/net/dev")
    lines = path.read_text().splitlines() if name and path.exists() else []
    counters = [line.partition(":")[2].split() for line in lines if line.strip().startswith(f"{name}:")]
    return int(counters[0][8]) if counters else None


def probe() -> float:
    """CPU seconds of a fixed piece of work: how fast this core is just now."""
    x = torch.ones(1, 4, 512, 64)
    F.scaled_dot_product_attention(x, x, x)
    start_s = time.thread_time()
    for _ in range(4):
        F.scaled_dot_product_attention(x, x, x)
    return time.thread_time() - start_s


def _clocks(traffic: usp.Traffic) -> tuple[float, float, float]:
    return time.perf_counter(), time.process_time(), time.thread_time() - traffic.cpu_s


ROWS = 8  # of each rank that are compared with float64 when not the whole result is
Errors = dict[str, tuple[float, float]]  # by result: the largest error, and the largest expected value


def error(found: Tensor, expected: Tensor) -> tuple[float, float]:
    """Largest error, and largest expected value."""
    return (found.double() - expected).abs().max().item(), expected.abs().max().item()


def worst(errors: list[tuple[float, float]]) -> tuple[float, float]:
    """The largest of both. torch's maximum of something that is not a number is not a number; Python's forgets it."""
    largest = torch.tensor(errors, dtype=torch.float64).amax(0)
    return largest[0].item(), largest[1].item()


def reset_peak_memory(device: torch.device) -> int:
    """Give free memory back and start counting the peak anew, where the system can; bytes in use now."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    elif sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    return peak_memory(device)


def peak_memory(device: torch.device) -> int:
    """Largest bytes in use since the reset: allocated on a device, resident on a CPU (there, on systems other than
    Linux, since the start)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "linux":
        status = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
