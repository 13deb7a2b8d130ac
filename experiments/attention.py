"""Measure hybrid attention on real ranks: one point, or a sweep over meshes, layouts, lengths and workloads.

    python -m experiments.attention mesh.ring=4 mesh.ulysses=2 workload=h8_d128 seq=4096 layout=zigzag
    python -m experiments.attention -m experiment=sweep

Each point starts its own ranks on this machine and writes results/<name>/<point>/record.json. Under torchrun, the
ranks that are already running are used.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import subprocess
import sys
import time
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import mean, median

from experiments import ranks

SCHEMA = 1
CAPTION = (
    "Speed is calls per second of the slowest rank's CPU time: what one device a rank would reach if links were free.\n"
    "Wall time on this machine, where ranks share cores, hides imbalance. Balance is mean over largest CPU time.\n"
    "MB sent by the rank that sends most; memory growth of the rank that grows most; errors against float64."
)

_records: list[dict] = []  # of this process, in the order of the sweep


def main() -> None:
    """Run one point or a sweep; exit with 1 if a point failed."""
    import hydra

    from experiments.config import register

    register()
    hydra.main(version_base="1.3", config_path="../configs", config_name="attention")(point)()
    failed = any(record["status"] != "ok" for record in _records)
    if not failed:
        ranks.leave()
    if _records and int(os.environ.get("RANK", 0)) == 0:
        report(_records)
    sys.exit(failed)


def point(cfg) -> None:
    """One point of a sweep: run it, write its record."""
    from omegaconf import OmegaConf

    config = asdict(OmegaConf.to_object(cfg))  # pyright: ignore[reportArgumentType]
    record = run(config)
    _records.append(record)
    if int(os.environ.get("RANK", 0)) == 0:
        folder = Path(config["results"]) / record["point"]
        write(record, folder / "record.json")
        print(f"point {len(_records)}: {line(record)}", flush=True)


def check(config: dict) -> None:
    """What can be seen to be wrong before any process is started."""
    if config["dtype"] not in ("float64", "float32", "bfloat16", "float16"):
        raise ValueError(f"dtype={config['dtype']!r} is not one of float64, float32, bfloat16, float16")
    if config["measure"]["repeats"] < 1 or config["measure"]["warmup"] < 1:
        raise ValueError(f"measure.repeats and measure.warmup are at least 1: {config['measure']}")
    if config["measure"]["baseline"] and config["window"] is not None:
        raise ValueError(f"measure.baseline=true with window={config['window']}: the fused kernel has no window")


def run(config: dict) -> dict:
    """The record of a point, whatever happens to its ranks."""
    record = {
        "schema": SCHEMA,
        "experiment": "attention",
        "point": name(config),
        "config": config,
        "command": [sys.executable.rsplit("/", 1)[-1], "-m", "experiments.attention", *sys.argv[1:]],
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        **provenance(),
    }
    start_s = time.monotonic()
    try:
        check(config)
        if "RANK" in os.environ:
            measured = ranks.everyone(ranks.measure(config))
        else:
            measured = ranks.launch(ranks.measure_and_leave, config, config["mesh"]["ring"] * config["mesh"]["ulysses"])
        record |= {"status": "ok", "ranks": measured, "summary": summary(config, measured)}
    except Exception as error:
        record |= {"status": "failed", "reason": reason(error)}
    return record | {"seconds": round(time.monotonic() - start_s, 3)}


def reason(error: Exception) -> str:
    """The message of the rank that failed first, or of the launcher."""
    failures = getattr(error, "failures", None)
    if not failures:
        return f"{type(error).__name__}: {error}"
    rank, first = min(failures.items(), key=lambda item: item[1].timestamp)
    message = first.message if isinstance(first.message, str) else first.message["message"]
    return f"rank {rank} ended with code {first.exitcode}: {message.strip()}"


def name(config: dict) -> str:
    """A readable name of the point that no other configuration has."""
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:8]
    mesh, workload = config["mesh"], config["workload"]
    shape = f"h{workload['heads']}kv{workload['kv_heads']}d{workload['head_dim']}b{workload['batch']}"
    parts = f"u{mesh['ulysses']}r{mesh['ring']}", config["layout"]["name"], f"s{config['seq']}", shape, config["dtype"]
    return "-".join((*parts, digest))


def summary(config: dict, measured: list[dict]) -> dict:
    """The figures of the table, from the ranks' samples."""
    cpu_s = [median(rank["cpu_s"]) for rank in measured]
    errors: dict[str, float] = {}
    for result, error in (item for rank in measured for item in rank["error"].items()):
        if not math.isfinite(error):
            raise ValueError(f"{result} is wrong: its error against float64 is {error}")
        errors[result] = max(error, errors.get(result, 0.0))
    found = {
        "slowest_cpu_s": max(cpu_s),
        "speed_per_s": 1 / max(cpu_s),
        "balance": sum(cpu_s) / len(cpu_s) / max(cpu_s),
        "wall_s": median(max(samples) for samples in zip(*(rank["wall_s"] for rank in measured), strict=True)),
        "sent_bytes": max(sum(n for kind, n in rank["bytes"].items() if kind != "control") for rank in measured),
        "peak_growth_bytes": max(rank["peak_growth_bytes"] for rank in measured),
        "errors": errors,
    }
    if config["measure"]["baseline"]:
        # In each round the one-process kernel and the ranks ran one after the other: the median of the rounds' ratios.
        kernels = [rank["baseline_cpu_s"] for rank in measured if rank["baseline_cpu_s"]]
        alone = [mean(samples) for samples in zip(*kernels, strict=True)]
        together = [sum(samples) for samples in zip(*(rank["cpu_s"] for rank in measured), strict=True)]
        found["baseline_cpu_s"] = median(alone)
        found["efficiency"] = median(a / b for a, b in zip(alone, together, strict=True))
    return found


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
            **{package: version(package) for package in ("usp", "torch", "hydra-core")},
        },
        "machine": {"cpu": model, "cores": os.cpu_count(), "system": f"{platform.system()} {platform.release()}"},
    }


def write(record: dict, path: Path) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(record, indent=1) + "\n")
    part.replace(path)


def line(record: dict) -> str:
    """One line of progress."""
    if record["status"] != "ok":
        return f"{record['point']} FAILED after {record['seconds']:.1f} s: {record['reason'].splitlines()[-1][:200]}"
    found = record["summary"]
    return f"{record['point']}  {found['speed_per_s']:.2f} calls/s  ({record['seconds']:.1f} s)"


def report(records: list[dict]) -> None:
    """The table of a run on the terminal and, for a sweep, its picture beside the records."""
    from rich.console import Console
    from rich.table import Table

    efficiency = any("efficiency" in record.get("summary", {}) for record in records)
    texts = [describe(record["config"]) for record in records]
    varied = [key for key in texts[0] if len({text[key] for text in texts}) > 1]
    fixed = [text for key, text in texts[0].items() if key not in (*varied, "mesh", "layout", "seq")]
    shown = [key for key in texts[0] if key in ("mesh", "layout", "seq") or key in varied]
    measured = ["speed 1/s", "slowest CPU s", "balance", "wall s", "MB sent", "peak MiB", "error"]
    table = Table(title=", ".join(fixed), title_justify="left", caption=CAPTION, caption_justify="left")
    for column in (*shown, *measured, *(["efficiency"] if efficiency else [])):
        table.add_column(column, justify="left" if column in ("mesh", "layout") else "right")
    for record, text in zip(records, texts, strict=True):
        table.add_row(*(text[key] for key in shown), *figures(record))
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    for record in records:
        if record["status"] != "ok":
            print(f"failed: {record['point']}: {record['reason']}")
    folder = Path(records[0]["config"]["results"])
    print(f"records: {folder}/*/record.json")
    good = [record for record in records if record["status"] == "ok"]
    if len(good) > 1:
        from analysis.figures import speed

        print(f"picture: {speed(good, folder / 'speed.png')}")


def describe(config: dict) -> dict[str, str]:
    """What a point is, by column of the table."""
    mesh, workload = config["mesh"], config["workload"]
    return {
        "mesh": f"u{mesh['ulysses']}r{mesh['ring']}",
        "layout": config["layout"]["name"],
        "seq": str(config["seq"]),
        "heads": f"{workload['heads']}/{workload['kv_heads']} heads x {workload['head_dim']}",
        "batch": f"batch {workload['batch']}",
        "dtype": config["dtype"],
        "mask": ("causal" if config["causal"] else "full")
        + (f", window {config['window']}" if config["window"] is not None else ""),
        "pass": "forward + backward" if config["backward"] else "forward",
        "exchange": config["exchange"],
        "backend": f"backend {config['backend']}",
    }


def figures(record: dict) -> list[str]:
    """What was measured, as cells of the table."""
    if record["status"] != "ok":
        return ["failed"]
    found = record["summary"]
    worst = max(found["errors"].values(), default=None)
    cells = [
        f"{found['speed_per_s']:.2f}",
        f"{found['slowest_cpu_s']:.3f}",
        f"{found['balance']:.2f}",
        f"{found['wall_s']:.3f}",
        f"{found['sent_bytes'] / 1e6:.2f}",
        f"{found['peak_growth_bytes'] / 2**20:.0f}",
        "-" if worst is None else f"{worst:.1e}",
    ]
    return [*cells, f"{found['efficiency']:.3f}"] if "efficiency" in found else cells


if __name__ == "__main__":
    main()
