"""What can go wrong on a rank, and a sweep under fire.

python -m tests.faults 20     kills a running sweep that often at random moments and says what was lost
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from experiments import ranks

ROOT = Path(__file__).parent.parent


def hang(config: dict) -> dict:
    """The last rank never comes to the barrier."""
    if dist.get_rank() == dist.get_world_size() - 1:
        stuck()
    dist.barrier()
    return {}


def stuck() -> None:
    time.sleep(1000)


def die(config: dict) -> dict:
    """Rank 1 is killed while the others wait for it."""
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    return {}


def leave_early(config: dict) -> dict:
    """Rank 1 exits without a word."""
    if dist.get_rank() == 1:
        os._exit(7)
    dist.barrier()
    return {}


def want_memory(config: dict) -> dict:
    """Rank 1 asks for more than there is."""
    if dist.get_rank() == 1:
        torch.empty(1 << 60, dtype=torch.uint8)
    dist.barrier()
    return {}


def refuse(config: dict) -> dict:
    raise ValueError("nobody can do this")


def rank_and_world(config: dict) -> dict:
    return {"rank": dist.get_rank(), "world": dist.get_world_size(), "config": config}


def cores(config: dict) -> dict:
    """Where this rank may run."""
    return {"cores": sorted(os.sched_getaffinity(0))}


def tell_process(config: dict) -> dict:
    """Leave this process's number where the test looks for it, then stay."""
    Path(config["folder"], str(os.getpid())).touch()
    time.sleep(1000)
    return {}


def pretend(config: dict) -> dict:
    """A step with known times in place of attention: the first call is slow, work goes on after a call returns."""
    calls = iter([config["first_s"]] + 100 * [config["later_s"]])
    slower_s = config["slower_s"] * dist.get_rank()

    def step():
        time.sleep(next(calls))
        return time.perf_counter() + config["after_s"] + slower_s  # when the work will be done

    def wait(done: float) -> None:
        time.sleep(max(0.0, done - time.perf_counter()))

    samples = ranks.timed(step, None, wait, warmup=config["measure"]["warmup"], repeats=config["measure"]["repeats"])
    rank = {"clock": "wall", "device": "cpu", "bytes": {}, "messages": {}, "kernels": {}, "peak_growth_bytes": 0}
    return {"all": ranks.everyone(rank | samples | {"error": {}})}


def bombard(kills: int, seed: int, longest_s: float, folder: Path, *overrides: str) -> list[str]:
    """Kill a sweep that often, a while after it began to measure, and let the same command continue; what happened.

    Raises:
        AssertionError: if a record is half written, or one that was there is gone or has changed.
    """
    command = [sys.executable, "-m", "experiments.attention", "-m", *overrides, f"results={folder}"]
    moments, log = random.Random(seed), []
    for n in range(kills):
        sweep = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        before = good(folder)
        wait_s = moments.uniform(0.0, longest_s)
        runs = len(list(folder.glob("runs/*")))
        while sweep.poll() is None and not begun(folder, runs):
            time.sleep(0.01)
        try:
            sweep.wait(wait_s)
            ended = f"had ended by itself with {sweep.returncode}"
        except subprocess.TimeoutExpired:
            sweep.kill()
            sweep.wait()
            ended = f"killed {wait_s:.1f} s after its first point"
        after = good(folder)
        for path, text in before.items():
            assert after.get(path) == text, f"{path} was lost"
        log.append(f"{n + 1}: {ended}, {len(before)} records before, {len(after)} after")
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    after = good(folder)
    noted = [json.loads(line) for path in folder.glob("runs/*") for line in path.read_text().splitlines()]
    assert {entry["point"] for entry in noted if "point" in entry} <= after.keys()
    leftovers = list(folder.glob("*/*.part"))
    assert not leftovers, leftovers
    log.append(f"last run to its end: {len(after)} records")
    return log


def begun(folder: Path, runs: int) -> bool:
    """Whether there is one more run than there were, whose points are being measured."""
    newest = sorted(folder.glob("runs/*"))
    return len(newest) > runs and len(newest[-1].read_text().splitlines()) > 1


def good(folder: Path) -> dict[str, str]:
    """The text of every record; each must be whole."""
    found = {}
    for path in folder.glob("*/record.json"):
        found[path.parent.name] = path.read_text()
        assert json.loads(found[path.parent.name])["status"] == "ok"
    return found


if __name__ == "__main__":
    points = (
        "mesh=u1r2,u2r1",
        "layout=contiguous,zigzag,striped",
        "seq=64,128,192,256,320,384,448,512",
        "measure=smoke",
    )
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    with tempfile.TemporaryDirectory() as name:
        print("\n".join(bombard(int(sys.argv[1]), seed, 5.0, Path(name), *points)))
