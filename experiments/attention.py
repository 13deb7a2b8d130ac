"""Measure hybrid attention on real ranks: one point, or a sweep over meshes, layouts, lengths and workloads.

    python -m experiments.attention mesh.ring=4 mesh.ulysses=2 workload=h8_d128 seq=4096 layout=zigzag
    python -m experiments.attention -m experiment=sweep

Each point starts its own ranks on this machine and writes results/<name>/<point>/record.json. A point that has a good
record is not measured again (force=true does), so the same command continues what was interrupted. Under torchrun, the
ranks that are already running are used.
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
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import mean, median

from analysis.records import SCHEMA
from experiments import ranks
from experiments.ranks import FIRST, RUNNING

LIMITS = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 0.05, "float16": 0.05}  # what is above is not rounding
COMMAND = [Path(sys.executable).name, "-m", "experiments.attention", *sys.argv[1:]]


def main() -> None:
    """Run one point or a sweep; exit with 1 if a point has no result."""
    import hydra

    from experiments.config import CONFIGS, entries, journal, register

    register()
    hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="attention")(point)()
    ranks.leave()
    log = journal()
    if log is None or not FIRST:  # as with --help
        return
    done = [entry for entry in entries() if "point" in entry]
    sys.exit(report([json.loads(Path(entry["record"]).read_text()) for entry in done], log.parent.parent))


def point(cfg) -> None:
    """One point of a sweep: measure it unless it has been measured, keep its record, tell how it went."""
    from omegaconf import OmegaConf

    from experiments.config import entries, note, wanted

    config: dict = OmegaConf.to_container(cfg, resolve=True, enum_to_str=True)  # pyright: ignore[reportAssignmentType]
    if not wanted(config):
        return
    if RUNNING:
        ranks.join(config["device"], 2 * config["timeout_s"])
        if len(names := set(ranks.everyone(name(config)))) > 1:
            sys.exit(f"ranks were started with different commands: {sorted(names)}")
    path = Path(config["results"]) / name(config) / "record.json"
    with claimed(path.parent) if FIRST else nullcontext():
        record = measured(path, config) if FIRST else None
        if not ranks.told(record is not None):
            record = run(config, path)
            broken = RUNNING and record["status"] not in ("ok", "unsupported")
            if first_to_tell(path) if broken else FIRST:
                path = keep(record, path)
            if broken:
                sys.exit(f"{line(record)}\nthese ranks cannot go on; the same command continues")
    if FIRST:
        note({"point": name(config), "status": record["status"], "record": str(path)})
        progress(record, entries())


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
    """What can be seen to be wrong before any process is started.

    Raises:
        ValueError: naming the values.
    """
    from analysis import published

    if config["measure"]["repeats"] < 1 or config["measure"]["warmup"] < 1:
        raise ValueError(f"measure.repeats and measure.warmup are at least 1: {config['measure']}")
    if config["measure"]["baseline"] and config["window"] is not None:
        raise ValueError(f"measure.baseline=true with window={config['window']}: the fused kernel has no window")
    if not 0 < config["timeout_s"] < math.inf:
        raise ValueError(f"timeout_s={config['timeout_s']} is not a time to wait")
    if min(config["mesh"].values()) < 1:
        raise ValueError(f"every degree of the mesh is at least 1: {config['mesh']}")
    table, length, factor = (config["published"][key] for key in ("table", "length", "factor"))
    if table is None and (length is not None or config["published"]["only"]):
        raise ValueError("published.length and published.only need a published.table")
    if table is not None:
        if length is not None and length != config["seq"] * factor:
            raise ValueError(
                f"seq={config['seq']} is not published.length={length} / published.factor={factor}: set the length and "
                "the factor, or published.table=null for a length of your own"
            )
        if published.rows(table)[0].backward and not config["backward"]:
            raise ValueError(f"published.table={table} has rates of forward + backward: backward=true")


def run(config: dict, path: Path) -> dict:
    """The record of a point, which will be kept at `path`, whatever happens to its ranks."""
    record = {
        "schema": SCHEMA,
        "experiment": "attention",
        "point": name(config),
        "hash": digest(config),
        "config": config,
        "seed": config["seed"],
        "command": COMMAND,
        "launcher": "torchrun" if RUNNING else "own",
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        **provenance(),
    }
    start_s = time.monotonic()
    try:
        check(config)
        if RUNNING:
            samples = among_running(config, record, path)
        else:
            world = config["mesh"]["ring"] * config["mesh"]["ulysses"]
            with ranks.machine(alone=not ranks.shared(config["device"], world)):
                samples = ranks.launch(ranks.measure, config, world, config["timeout_s"])
        record |= {"status": "ok", "ranks": samples, "summary": summary(config, samples)}
    except ranks.PointFailed as failure:
        record |= {"status": failure.status, "reason": failure.reason}
        if failure.stacks:
            record["stacks"] = failure.stacks
    except Exception as error:
        record |= {"status": ranks.classify(error), "reason": f"{type(error).__name__}: {error}"}
    return record | {"seconds": round(time.monotonic() - start_s, 3)}


def among_running(config: dict, record: dict, path: Path) -> list[dict]:
    """What all ranks measured, where torchrun has started them.

    After the time is up every rank writes where it stands; the first keeps that in the record and ends the job.
    """
    mine = path.parent / f"stack.{os.environ['RANK']}.part"

    def give_up() -> None:
        stacks = {file.suffixes[0][1:]: file.read_text() for file in sorted(path.parent.glob("stack.*.part"))}
        late = {"status": "timeout", "reason": "not all ranks had a result when the time was up", "stacks": stacks}
        late["seconds"] = config["timeout_s"]
        keep(record | late, path)
        print(
            f"{line(record | late)}\nthese ranks cannot go on; the same command continues", file=sys.stderr, flush=True
        )
        os._exit(1)

    timer = threading.Timer(config["timeout_s"] + ranks.GRACE_S, give_up)
    timer.daemon = True
    mine.parent.mkdir(parents=True, exist_ok=True)
    with mine.open("w") as file:
        faulthandler.dump_traceback_later(config["timeout_s"], file=file)
        if FIRST:
            timer.start()
        try:
            return ranks.everyone(ranks.measure(config))
        finally:
            faulthandler.cancel_dump_traceback_later()
            timer.cancel()
            mine.unlink(missing_ok=True)


def digest(config: dict) -> str:
    """What identifies a point: its configuration without what says where and how it is kept."""
    from experiments.config import NOT_MEASURED

    kept = {key: value for key, value in config.items() if key not in NOT_MEASURED}
    kept["published"] = {key: value for key, value in config["published"].items() if key != "only"}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def name(config: dict) -> str:
    """A readable name of the point that no other configuration has."""
    mesh, workload = config["mesh"], config["workload"]
    shape = f"h{workload['heads']}kv{workload['kv_heads']}d{workload['head_dim']}b{workload['batch']}"
    parts = f"u{mesh['ulysses']}r{mesh['ring']}", config["layout"]["name"], f"s{config['seq']}", shape, config["dtype"]
    return "-".join((*parts, digest(config)[:8]))


def summary(config: dict, samples: list[dict]) -> dict:
    """The figures of the table, from the ranks' samples: the slowest rank counts.

    Speed is one over the seconds of a call: wall seconds where every rank has a device or a core of its own, else
    seconds that the slowest rank computes, outside communication: what one device a rank would take if links were free.
    Those are counted in probes, a fixed piece of work beside each call, since other tenants slow cores down by up to a
    half for seconds; they become seconds by the median of the point's probes, and in a table by that of all its points.
    """
    clock = samples[0]["clock"]

    def seconds(part: str) -> list[float]:
        """Of a call, by rank."""
        if clock == "wall":
            return [median(rank[f"{part}wall_s"]) for rank in samples]
        calls = [zip(rank[f"{part}compute_s"], rank["probe_s"], strict=True) for rank in samples]
        return [median(work_s / probe_s for work_s, probe_s in rank) * probe for rank in calls]

    def slowest(part: str) -> float:
        return max(seconds(part)) if clock == "cpu" else wall(part)

    def wall(part: str) -> float:
        """Of a call; ranks wait for each other within calls, so it is that of the slowest in each."""
        return median(max(calls) for calls in zip(*(rank[f"{part}wall_s"] for rank in samples), strict=True))

    probe = median(probe_s for rank in samples for probe_s in rank["probe_s"]) if clock == "cpu" else None
    found = {
        "clock": clock,
        "device": samples[0]["device"],
        "kernels": sorted({kernel for rank in samples for kernel in rank["kernels"]}),
        "speed_per_s": 1 / slowest(""),
        "forward_speed_per_s": 1 / slowest("forward_"),
        "probe_s": probe,
        "compute_s": max((median(rank["compute_s"]) for rank in samples if "compute_s" in rank), default=None),
        "cpu_s": max(median(rank["cpu_s"]) for rank in samples),
        "wall_s": wall(""),
        "balance": mean(seconds("")) / max(seconds("")),
        "sent_bytes": max(sum(n for kind, n in rank["bytes"].items() if kind != "control") for rank in samples),
        "messages": max(sum(n for kind, n in rank["messages"].items() if kind != "control") for rank in samples),
        "peak_growth_bytes": max(rank["peak_growth_bytes"] for rank in samples),
        "errors": errors(samples),
    }
    limit = LIMITS[config["dtype"]]
    if wrong := {result: error for result, error in found["errors"].items() if error > limit}:
        raise ArithmeticError(f"errors against float64 are above {limit}: {wrong}")
    if config["measure"]["baseline"]:
        # In each round the one-process kernel and the ranks ran one after the other: the median of the rounds' ratios.
        kernels = [rank["baseline_cpu_s"] for rank in samples if rank["baseline_cpu_s"]]
        alone = [mean(seconds) for seconds in zip(*kernels, strict=True)]
        together = [sum(seconds) for seconds in zip(*(rank["cpu_s"] for rank in samples), strict=True)]
        found["baseline_cpu_s"] = median(alone)
        found["efficiency"] = median(a / b for a, b in zip(alone, together, strict=True))
    return found


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
            **{package: installed(package) for package in ("usp", "torch", "hydra-core")},
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


def line(record: dict) -> str:
    """What happened to a point, in one line."""
    if record["status"] != "ok":
        return f"{record['point']}: {record['status']} after {record['seconds']:.1f} s: {record['reason']}"
    return f"{record['point']}: {record['summary']['speed_per_s']:.2f} calls/s"


def progress(record: dict, log: list[dict]) -> None:
    """A line for a person who watches; a point without a result is told in any case."""
    total = sum(entry.get("points", 0) for entry in log)
    statuses = [entry["status"] for entry in log if "point" in entry]
    failed = sum(status != "ok" for status in statuses)
    text = f"[{len(statuses) - failed} done, {failed} failed, {max(0, total - len(statuses))} left] {line(record)}"
    if record["status"] != "ok":
        print(text, file=sys.stderr, flush=True)
    elif sys.stdout.isatty():
        print(text, flush=True)


def report(records: list[dict], folder: Path) -> int:
    """Tables on the terminal, a CSV and, for a sweep, the pictures beside the records; the exit code."""
    from analysis import records as kept
    from analysis import tables

    if not records:
        print("no point: nothing of what was asked for is in the published table", file=sys.stderr)
        return 1
    tables.show(records)
    failed = [record for record in records if record["status"] != "ok"]
    print(f"records: {folder}/*/record.json")
    print(f"table: {kept.to_csv(records, folder / 'table.csv')}")
    if sum(record["status"] == "ok" for record in records) > 1:
        from analysis import figures

        print(f"pictures: {figures.speed(records, folder / 'speed.png')}")
        print(f"          {figures.heatmap(records, folder / 'heatmap.png')}")
    if failed:
        print(f"{len(failed)} of {len(records)} points have no result:")
        for record in failed:
            print(f"  {line(record)}")
    return int(bool(failed))


if __name__ == "__main__":
    from experiments.attention import main  # the module that other processes can import, not this copy of it

    main()
