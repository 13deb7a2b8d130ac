"""A point of a sweep on real ranks, whatever it measures: claimed, run, kept as a record, told, reported.

What is measured is an `Experiment`. Each point starts its own ranks on this machine and writes
results/<name>/<point>/record.json; under torchrun or srun, the ranks that are already running are used.
"""

from __future__ import annotations

import faulthandler
import fcntl
import hashlib
import json
import math
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import mean, median

from analysis.compare import world
from analysis.records import SCHEMA
from experiments import emulated_cluster, ranks
from experiments.ranks import FIRST, RUNNING
from usp.cost.counts import Volume

LIMITS = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 0.05, "float16": 0.05}  # what is above is not rounding


@dataclass(frozen=True)
class Experiment:
    """What a point measures. A configuration is the resolved one, as plain values."""

    name: str  # of its module and of its configuration: python -m experiments.<name>, configs/<name>.yaml
    label: Callable[[dict], str]  # of a configuration, for a reader; a point's name adds the hash
    check: Callable[[dict], None]  # raises ValueError for what can be seen to be wrong before any process is started
    measure: Callable[[dict], dict]  # on every rank: its sample
    summary: Callable[[dict, list[dict]], dict]  # the figures of the table, of a configuration and the ranks' samples
    line: Callable[[dict], str]  # a summary in a few words, for a person who watches
    prepare: Callable[[dict], None] = lambda config: None  # what ranks will find made, after the check; may raise too
    preload: tuple[str, ...] = ()  # modules that would take every rank seconds to import


def main(experiment: Experiment) -> None:
    """Run one point or a sweep; exit with 1 if a point has no result."""
    import hydra

    from experiments.config import CONFIGS, entries, journal, register

    command = [Path(sys.executable).name, "-m", f"experiments.{experiment.name}", *sys.argv[1:]]

    task = partial(point, experiment, command=command)  # may run in another process
    register()
    hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name=experiment.name)(task)()
    ranks.leave()
    log = journal()
    if log is None or not FIRST:  # as with --help
        return
    done = [entry for entry in entries() if "point" in entry]
    found = [json.loads(Path(entry["record"]).read_text()) for entry in done]
    sys.exit(report(experiment, found, log.parent.parent))


def point(experiment: Experiment, cfg, command: list[str]) -> None:
    """One point of a sweep: measure it unless it has been measured, keep its record, tell how it went."""
    from experiments.config import entries, note, plain, wanted

    config = plain(cfg)
    if not wanted(config):
        return
    own, places = name(experiment, config), []
    if RUNNING:
        ranks.join(config["device"], 2 * config["timeout_s"])
        names, places = zip(*ranks.everyone((own, ranks.place())), strict=True)
        if len(set(names)) > 1:
            sys.exit(f"ranks were started with different commands: {sorted(set(names))}")
    path = Path(config["results"]) / own / "record.json"
    with claimed(path.parent) if FIRST else nullcontext():
        record = measured(path, config) if FIRST else None
        if not ranks.told(record is not None):
            record = run(experiment, config, path, command, places)
            broken = RUNNING and record["status"] not in ("ok", "unsupported")
            if first_to_tell(path) if broken else FIRST:
                path = keep(record, path)
            elif broken:
                time.sleep(ranks.GRACE_S / 4)  # Slurm may kill all as soon as one has gone: after the record
            if broken:
                sys.exit(f"{line(experiment, record)}\nthese ranks cannot go on; the same command continues")
    if FIRST:
        note({"point": own, "status": record["status"], "record": str(path)})
        progress(experiment, record, entries())


def measured(path: Path, config: dict) -> dict | None:
    """The good record of this point, if there is one and it is not to be made again."""
    if config["force"] or not path.exists():
        return None
    try:
        record = json.loads(path.read_text())
        kept = (record["schema"], record["hash"], record["status"]) == (SCHEMA, digest(config), "ok")
    except (ValueError, KeyError, TypeError):  # somebody's editor
        return None
    return record if kept else None


def keep(record: dict, path: Path) -> Path:
    """Write the record of a point; beside its good record, which stays, if this one has no result. Where it is."""
    if record["status"] != "ok" and measured(path, record["config"] | {"force": False}):
        path = path.with_name("failed.json")
    write(record, path)
    return path


def first_to_tell(path: Path) -> bool:
    """Whether this is the first rank of a running job that failed; the others complain about what it left."""
    try:
        (path.parent / "failure.part").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Nobody else measures this point meanwhile. The system lets go when this process ends, however it ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for part in folder.glob("*.part"):  # of a process that was killed while it wrote
            part.unlink(missing_ok=True)
        yield


def check(config: dict) -> None:
    """What is wrong in any experiment, as far as it can be seen before any process is started.

    Raises:
        ValueError: naming the values.
    """
    if "measure" in config and min(config["measure"]["repeats"], config["measure"]["warmup"]) < 1:
        raise ValueError(f"measure.repeats and measure.warmup are at least 1: {config['measure']}")
    if not 0 < config["timeout_s"] < math.inf:
        raise ValueError(f"timeout_s={config['timeout_s']} is not a time to wait")
    if missing := [key for key, value in (config["cluster"] or {}).items() if value is None]:
        given = {key: value for key, value in config["cluster"].items() if value is not None}
        raise ValueError(
            f"cluster has {given} and no {' or '.join(missing)}: launcher=emulated_cluster has all of them, and other "
            "launchers have no cluster"
        )
    if config["cluster"] and RUNNING:
        raise ValueError(
            "launcher=emulated_cluster makes hosts of its own, and these ranks run already: launcher=basic"
        )
    if min(config["mesh"][axis] for axis in ("ring", "ulysses")) < 1 or config["mesh"].get("data", 1) < 1:
        raise ValueError(f"every degree of the mesh is at least 1: {config['mesh']}")
    if config["cluster"]:
        emulated_cluster.check(config, world(config))


def hosts_of(config: dict, places: Sequence[dict] = ()) -> list[dict]:
    """Where the ranks of a point are, host by host, with the link of each to the others; `places` of running ranks."""
    if config["cluster"] and None not in config["cluster"].values():
        places = emulated_cluster.places(config["cluster"])
    places = places or [ranks.place()] * world(config)
    found: dict[str, dict] = {}
    for rank, place in enumerate(places):
        found.setdefault(place["host"], place | {"ranks": []})["ranks"].append(rank)
    return list(found.values())


def begun(experiment: Experiment, config: dict, command: list[str], places: Sequence[dict] = ()) -> dict:
    """The record of a point, as far as it is known before anything is measured."""
    job = ranks.job()
    slurm = ranks.STEP or os.environ.get("SUBMITIT_EXECUTOR") == "slurm"  # the latter: also of a job of one rank
    own = "emulated_cluster" if config["cluster"] else "own"
    return {
        "schema": SCHEMA,
        "experiment": experiment.name,
        "point": name(experiment, config),
        "hash": digest(config),
        "config": config,
        "seed": config["seed"],
        "command": command,
        "launcher": "slurm" if slurm else "torchrun" if RUNNING else own,
        **({"job": job} if job else {}),
        "hosts": hosts_of(config, places),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        **provenance(),
    }


def run(experiment: Experiment, config: dict, path: Path, command: list[str], places: Sequence[dict] = ()) -> dict:
    """The record of a point, which will be kept at `path`, whatever happens to its ranks."""
    record = begun(experiment, config, command, places)
    start_s = time.monotonic()
    try:
        check(config)
        experiment.check(config)
        experiment.prepare(config)
        if RUNNING:
            samples = among_running(experiment, config, record, path)
        else:
            count, launch = world(config), emulated_cluster.launch if config["cluster"] else ranks.launch
            with ranks.machine(alone=bool(config["cluster"]) or not ranks.shared(config["device"], count)):
                samples = launch(experiment.measure, config, count, config["timeout_s"], experiment.preload)
        record |= {"status": "ok", "ranks": samples, "summary": experiment.summary(config, samples)}
    except ranks.PointFailed as failure:
        record |= {"status": failure.status, "reason": failure.reason}
        if failure.stacks:
            record["stacks"] = failure.stacks
    except Exception as error:
        record |= {"status": ranks.classify(error), "reason": f"{type(error).__name__}: {error}"}
    return record | {"seconds": round(time.monotonic() - start_s, 3)}


def among_running(experiment: Experiment, config: dict, record: dict, path: Path) -> list[dict]:
    """What all ranks measured, where torchrun or Slurm has started them.

    After the time is up every rank writes where it stands; the first keeps that in the record and ends the job. The
    others leave a little later if nobody ends them.
    """
    mine = path.parent / f"stack.{os.environ['RANK']}.part"

    def give_up() -> None:
        stacks = {file.suffixes[0][1:]: file.read_text() for file in sorted(path.parent.glob("stack.*.part"))}
        late = {"status": "timeout", "reason": "not all ranks had a result when the time was up", "stacks": stacks}
        late["seconds"] = config["timeout_s"]
        if first_to_tell(path):
            keep(record | late, path)
        text = f"{line(experiment, record | late)}\nthese ranks cannot go on; the same command continues"
        print(text, file=sys.stderr, flush=True)
        os._exit(1)

    leave = give_up if FIRST else partial(os._exit, 1)
    timer = threading.Timer(config["timeout_s"] + ranks.GRACE_S * (1 if FIRST else 2), leave)
    timer.daemon = True
    mine.parent.mkdir(parents=True, exist_ok=True)
    with mine.open("w") as file:
        faulthandler.dump_traceback_later(config["timeout_s"], file=file)
        timer.start()
        try:
            return ranks.everyone(experiment.measure(config))
        finally:
            faulthandler.cancel_dump_traceback_later()
            timer.cancel()
            mine.unlink(missing_ok=True)


def digest(config: dict) -> str:
    """What identifies a point: its configuration without what says where and how it is kept."""
    from experiments.config import NOT_MEASURED

    kept = {key: value for key, value in config.items() if key not in NOT_MEASURED}
    if "published" in kept:
        kept["published"] = {key: value for key, value in kept["published"].items() if key != "only"}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def name(experiment: Experiment, config: dict) -> str:
    """A readable name of the point that no other configuration has."""
    return f"{experiment.label(config)}-{digest(config)[:8]}"


def workload_label(config: dict) -> str:
    workload = config["workload"]
    return f"h{workload['heads']}kv{workload['kv_heads']}d{workload['head_dim']}b{workload['batch']}"


def figures(config: dict, samples: list[dict]) -> dict:
    """What every summary has, from the ranks' samples: the slowest rank counts.

    Speed is one over the seconds of a call: wall seconds where every rank has a device or a core of its own, else
    seconds that the slowest rank computes, outside communication: what one device a rank would take if links were free.
    Those are counted in probes, a fixed piece of work beside each call, since other tenants slow cores down by up to a
    half for seconds; they become seconds by the median of the point's probes, and in a table by that of all its points.

    Raises:
        ArithmeticError: if a result is further from float64 than rounding explains.
    """
    found = {
        "clock": samples[0]["clock"],
        "device": samples[0]["device"],
        "kernels": sorted({kernel for rank in samples for kernel in rank["kernels"]}),
        "speed_per_s": 1 / slowest_s(samples),
        "probe_s": _probe_s(samples),
        "compute_s": max((median(rank["compute_s"]) for rank in samples if "compute_s" in rank), default=None),
        "cpu_s": max(median(rank["cpu_s"]) for rank in samples),
        "wall_s": _wall_s(samples),
        "balance": mean(_rank_s(samples)) / max(_rank_s(samples)),
        "sent_bytes": max(sum(payload(rank["bytes"]).values()) for rank in samples),
        "messages": max(sum(payload(rank["messages"]).values()) for rank in samples),
        "peak_growth_bytes": max(rank["peak_growth_bytes"] for rank in samples),
        "errors": errors(samples),
        "links": links(samples),
    }
    limit = LIMITS[config["dtype"]]
    if wrong := {result: error for result, error in found["errors"].items() if error > limit}:
        raise ArithmeticError(f"errors against float64 are above {limit}: {wrong}")
    return found


def payload(counts: dict[str, int]) -> dict[str, int]:
    """Bytes or messages by kind without the agreement of ranks, which is 16 bytes a group."""
    return {kind: count for kind, count in counts.items() if kind != "control"}


def links(samples: list[dict]) -> list[dict] | None:
    """Of each host, bytes that it sent to others in a call: counted by its ranks, and by its interface.

    None within one host, and where ranks used collectives, whose ways are not known.
    """
    if "link_bytes" not in samples[0]:
        return None
    if any(sum(rank["bytes_to_rank"]) != sum(payload(rank["bytes"]).values()) for rank in samples):
        return None
    host_of = {rank["rank"]: rank["host"] for rank in samples}
    found = []
    for host in dict.fromkeys(host_of.values()):
        own = [rank for rank in samples if rank["host"] == host]
        away = [[x for n, x in enumerate(rank["bytes_to_rank"]) if host_of[n] != host] for rank in own]
        sent = max(rank["link_bytes"][0] for rank in own)
        found.append({"host": host, "counted_bytes": sum(map(sum, away)), "interface_bytes": sent})
    return found


def check_traffic(
    samples: list[dict], predicted: Mapping[tuple[int, int], Volume], *, beside: Container[str] = ()
) -> None:
    """Every rank, (ring rank, Ulysses rank), sent what was predicted, by kind; kinds of what is `beside` are not.

    Raises:
        ArithmeticError: naming the first rank that did not.
    """
    for rank in samples:
        volume = predicted[rank["ring_rank"], rank["ulysses_rank"]]
        for n, what in enumerate(("bytes", "messages")):
            counted = {kind: number for kind, number in payload(rank[what]).items() if kind not in beside}
            expected = {kind: pair[n] for kind, pair in volume.items()}
            if counted != expected:
                raise ArithmeticError(f"rank {rank['rank']} sent {what} {counted}, and {expected} was predicted")


def slowest_s(samples: list[dict], part: str = "") -> float:
    """Seconds of a call, or of a part of it such as "forward_", of the slowest rank, by the clock of the samples."""
    return max(_rank_s(samples, part)) if samples[0]["clock"] == "cpu" else _wall_s(samples, part)


def _rank_s(samples: list[dict], part: str = "") -> list[float]:
    """Of a call, by rank."""
    probe_s = _probe_s(samples)
    if probe_s is None:
        return [median(rank[f"{part}wall_s"]) for rank in samples]
    calls = [zip(rank[f"{part}compute_s"], rank["probe_s"], strict=True) for rank in samples]
    return [median(work_s / beside_s for work_s, beside_s in rank) * probe_s for rank in calls]


def _wall_s(samples: list[dict], part: str = "") -> float:
    """Of a call; ranks wait for each other within calls, so it is that of the slowest in each."""
    return median(max(calls) for calls in zip(*(rank[f"{part}wall_s"] for rank in samples), strict=True))


def _probe_s(samples: list[dict]) -> float | None:
    """Where CPU time is the clock, what the probe took."""
    if samples[0]["clock"] == "wall":
        return None
    return median(probe_s for rank in samples for probe_s in rank["probe_s"])


def errors(samples: list[dict]) -> dict[str, float]:
    """By result, the largest error of any rank over the largest value of any rank.

    A result that is next to nothing, like the gradient of rows that see one key, counts as a hundredth of the largest.

    Raises:
        ArithmeticError: if one is not a number.
    """
    found: dict[str, tuple[float, float]] = {}
    for result in {result: None for rank in samples for result in rank["error"]}:
        pairs = [rank["error"][result] for rank in samples if result in rank["error"]]
        if not all(math.isfinite(error) for error, _ in pairs):
            raise ArithmeticError(f"{result} is wrong: its errors against float64 are {[error for error, _ in pairs]}")
        found[result] = max(error for error, _ in pairs), max(largest for _, largest in pairs)
    size = max((largest for _, largest in found.values()), default=1.0)
    return {result: error / max(largest, 0.01 * size) for result, (error, largest) in found.items()}


def provenance() -> dict:
    """Which code ran where."""

    def git(*args: str) -> str:
        try:
            result = subprocess.run(
                ["git", *args], capture_output=True, text=True, cwd=Path(__file__).parent, check=False
            )
        except OSError:  # no git here
            return ""
        return result.stdout.strip()

    model = platform.processor() or platform.machine()
    if (info := Path("/proc/cpuinfo")).exists():
        lines = [x.split(":", 1)[1].strip() for x in info.read_text().splitlines() if x.startswith("model name")]
        model = lines[0] if lines else model
    return {
        "commit": git("rev-parse", "HEAD") or None,
        "dirty": bool(git("status", "--porcelain")),
        "versions": {
            "python": platform.python_version(),
            **{package: installed(package) for package in ("usp", "torch", "transformers", "hydra-core")},
        },
        "machine": {
            "id": hashlib.sha256(f"{platform.node()} {model}".encode()).hexdigest()[:8],
            "cpu": model,
            "cores": ranks.CORES,
            "system": f"{platform.system()} {platform.release()}",
        },
    }


def installed(package: str) -> str | None:
    """Its version; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def write(record: dict, path: Path) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    with part.open("w") as file:
        file.write(json.dumps(record, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def line(experiment: Experiment, record: dict) -> str:
    """What happened to a point, in one line."""
    if record["status"] != "ok":
        return f"{record['point']}: {record['status']} after {record['seconds']:.1f} s: {record['reason']}"
    return f"{record['point']}: {experiment.line(record['summary'])}"


def progress(experiment: Experiment, record: dict, log: list[dict]) -> None:
    """A line for a person who watches; a point without a result is told in any case."""
    total = sum(entry.get("points", 0) for entry in log)
    statuses = [entry["status"] for entry in log if "point" in entry]
    failed = sum(status != "ok" for status in statuses)
    left = max(0, total - len(statuses))
    text = f"[{len(statuses) - failed} done, {failed} failed, {left} left] {line(experiment, record)}"
    if record["status"] != "ok":
        print(text, file=sys.stderr, flush=True)
    elif sys.stdout.isatty():
        print(text, flush=True)


def report(experiment: Experiment, records: list[dict], folder: Path) -> int:
    """Tables on the terminal, a CSV and, for a sweep, the pictures beside the records; the exit code."""
    from analysis import records as kept
    from analysis import tables

    if not records:
        print("no point: nothing of what was asked for is in the published table", file=sys.stderr)
        return 1
    tables.SHOWN[experiment.name](records)
    failed = [record for record in records if record["status"] != "ok"]
    print(f"records: {folder}/*/record.json")
    print(f"table: {kept.to_csv(records, folder / 'table.csv')}")
    if len(records) - len(failed) > 1:
        for path in kept.pictures(experiment.name, records, folder):
            print(f"picture: {path}")
    if failed:
        print(f"{len(failed)} of {len(records)} points have no result:")
        for record in failed:
            print(f"  {line(experiment, record)}")
    return int(bool(failed))
