"""Points of a sweep as Slurm jobs: launcher=slurm. Each point is a job, and its tasks are the ranks.

The command that submits them waits for them, tells how each went, and writes the record of a job that died without one.
It alone writes its journal: jobs, which run on other machines, write records.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra_plugins.hydra_submitit_launcher.config import BaseQueueConf
from omegaconf import OmegaConf

from analysis.compare import world
from experiments import points, ranks
from experiments.config import JOURNAL, entries, note, wanted

PLAIN_RANKS = 4  # of a node, where nothing is said of its GPUs
LATE_S = 10.0  # how long after a job's end its record may still be on its way, on a shared file system
POLLS_S = 1.0, 15.0  # between questions to Slurm: at first, and of jobs that take long
LINES = 10  # of what each rank of a lost job wrote to stderr

SUBMITTED = {"launcher": "slurm", "hosts": []}  # of records that no rank has written
ENDED = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"}
ENDED |= {"REVOKED", "TIMEOUT", "UNKNOWN"}


# ---------------------------------------------------------------------------------------------------
# Where the sweep was started.


@dataclass
class Job:
    """A point in the queue."""

    submitted: Any  # submitit's
    config: dict
    path: Path  # of the record that it will write
    before: list[dict]  # the records of the point that are there already
    started: float | None = None  # when it was first seen to run
    ended: float | None = None  # when it was first seen to have ended

    @property
    def id(self) -> str:
        return self.submitted.job_id


def sweep(experiment: points.Experiment, configs: list[dict], command: list[str], settings: dict) -> None:
    """Submit the points that have no record yet, and wait until all have one.

    Raises:
        ValueError: naming a setting that cannot be kept.
    """
    check(settings)
    groups: dict[tuple[int, int], list[dict]] = {}
    for config in filter(wanted, configs):
        path = Path(config["results"]) / points.name(experiment, config) / "record.json"
        if record := points.measured(path, config):
            tell(experiment, record, path)
            continue
        try:
            points.check(config)
            experiment.check(config)
            groups.setdefault(shape(config, settings), []).append(config)
        except Exception as error:
            refuse(experiment, config, command, ranks.classify(error), f"{type(error).__name__}: {error}")
    jobs: list[Job] = []
    try:
        for (nodes, tasks), group in groups.items():
            try:
                with uninterrupted():  # a job that is in the queue is known here
                    jobs += submit(experiment, group, command, settings | {"nodes": nodes, "tasks_per_node": tasks})
            except RuntimeError as error:  # submitit's, of what sbatch said
                for config in group:
                    text = f"sbatch refused {nodes} nodes x {tasks} tasks: {error}"
                    refuse(experiment, config, command, "unsupported", text)
        if jobs and sys.stdout.isatty():
            print(f"{len(jobs)} jobs: {' '.join(job.id for job in jobs)}; Ctrl-C cancels them", flush=True)
        watch(experiment, jobs, command)
    finally:
        if jobs:  # those that have not ended: Ctrl-C
            subprocess.run(["scancel", *(job.id for job in jobs)], check=False)


def check(settings: dict) -> None:
    """Of a sweep's settings, and of where it was started.

    Raises:
        ValueError: naming what cannot be.
    """
    if ranks.RUNNING:
        raise ValueError("launcher=slurm submits jobs, but this is a rank of a job: launcher=basic")
    if settings["nodes"] is not None:
        raise ValueError(f"hydra.launcher.nodes={settings['nodes']}: it is each mesh's ranks / tasks_per_node")
    if settings["gpus_per_task"] is not None:
        text = "a rank finds its GPU among those of its node: hydra.launcher.gpus_per_node"
        raise ValueError(f"hydra.launcher.gpus_per_task={settings['gpus_per_task']}: {text}")
    if settings["max_num_timeout"]:
        text = "a point cannot go on where it was: hydra.launcher.timeout_min"
        raise ValueError(f"hydra.launcher.max_num_timeout={settings['max_num_timeout']}: {text}")
    if settings["signal_delay_s"] is not None:
        text = "ranks do not listen to the signal before the end: hydra.launcher.timeout_min"
        raise ValueError(f"hydra.launcher.signal_delay_s={settings['signal_delay_s']}: {text}")
    if missing := [program for program in ("sbatch", "srun", "squeue", "scancel") if shutil.which(program) is None]:
        raise ValueError(f"launcher=slurm needs {missing}: start it where jobs are submitted, or launcher=basic")


def shape(config: dict, settings: dict) -> tuple[int, int]:
    """Nodes, and ranks of each.

    Raises:
        ValueError: naming the values, if the mesh does not fill nodes, or the job would end before the point's time.
    """
    count = world(config)
    full = next(x for x in (settings["tasks_per_node"], settings["gpus_per_node"], PLAIN_RANKS) if x is not None)
    if full < 1:
        raise ValueError(f"hydra.launcher.tasks_per_node={full}: a node has at least 1 rank")
    if count > full and count % full:
        even = max(fewer for fewer in range(1, full) if count % fewer == 0)
        text = f"hydra.launcher.tasks_per_node={even} does"
        raise ValueError(f"the {count} ranks of mesh={config['mesh']} do not fill nodes of {full}: {text}")
    limit_s = 60 * settings["timeout_min"]
    if config["timeout_s"] >= limit_s:
        text = f"timeout_s={config['timeout_s']} is not within the {limit_s} s of hydra.launcher.timeout_min"
        raise ValueError(f"{text}={settings['timeout_min']}: the job would end before the point could tell why")
    return max(1, count // full), min(count, full)


def submit(experiment: points.Experiment, configs: list[dict], command: list[str], settings: dict) -> list[Job]:
    """Jobs of one size; several are an array.

    Raises:
        RuntimeError: what sbatch said.
    """
    import submitit

    cpus = [f"--cpus-per-task={settings['cpus_per_task']}"] if settings["cpus_per_task"] else []  # srun inherits none
    shared = OmegaConf.structured(BaseQueueConf).keys()
    values = {key if key in shared else f"slurm_{key}": value for key, value in settings.items()}
    folder = values.pop("submitit_folder")
    del values["slurm_max_num_timeout"]
    executor = submitit.AutoExecutor(folder=folder, cluster="slurm", slurm_max_num_timeout=0)
    executor.update_parameters(**values, slurm_srun_args=["--kill-on-bad-exit=1", *cpus])
    paths = [Path(config["results"]) / points.name(experiment, config) / "record.json" for config in configs]
    before = [list(kept(path).values()) for path in paths]
    submitted = executor.map_array(task, *zip(*((experiment, config, command) for config in configs), strict=True))
    return [Job(*job) for job in zip(submitted, configs, paths, before, strict=True)]


def watch(experiment: points.Experiment, jobs: list[Job], command: list[str]) -> None:
    """Tell of each job when it has ended, and take it off the list."""
    since = time.monotonic()
    while jobs:
        if (found := states(job.id for job in jobs)) is not None:
            for job in list(jobs):
                if settled(experiment, job, *found.get(job.id, ("UNKNOWN", "None")), command):
                    jobs.remove(job)
        if jobs:
            time.sleep(min(POLLS_S[1], max(POLLS_S[0], (time.monotonic() - since) / 20)))


def settled(experiment: points.Experiment, job: Job, state: str, reason: str, command: list[str]) -> bool:
    """Whether a job has ended and its record has been told."""
    now = time.monotonic()
    if state == "RUNNING" and job.started is None:
        job.started = now
    if state not in ENDED:  # or was put into the queue again
        job.ended = None
        return False
    job.ended = job.ended or now
    texts = written(job)
    verdict = f"Slurm job {job.id}: {state}" + (f", {reason}" if reason not in ("None", "") else "")
    known = {
        "status": status(state, texts.values()),
        "stderr": {n: text.splitlines()[-LINES:] for n, text in texts.items()},
    }
    for path, record in kept(job.path).items():
        if record.get("job") == job.id and record not in job.before:
            if record["status"] == "crash":  # told by ranks that lost one: Slurm may know why
                ended_by_slurm = state not in ("COMPLETED", "FAILED")
                record |= known | ({"reason": f"{verdict}; {record['reason']}"} if ended_by_slurm else {})
                points.write(record, path)
            tell(experiment, record, path)
            return True
    if state == "COMPLETED" and (record := points.measured(job.path, job.config)):  # by another sweep meanwhile
        tell(experiment, record, job.path)
        return True
    if now < job.ended + LATE_S:
        return False
    said = [text.strip().split("\n")[-1] for text in texts.values() if text.strip()]
    record = points.begun(experiment, job.config, command) | SUBMITTED | {"job": job.id} | known
    record |= {"reason": "; ".join([verdict, *(said[:1] or ["nothing on stderr"])])}
    record |= {"seconds": round(job.ended - (job.started or job.ended), 3)}
    tell(experiment, record, keep(record, job.path))
    return True


def written(job: Job) -> dict[str, str]:
    """What each rank of a job wrote to stderr, or where that goes to stdout."""
    found = {}
    for n in range(job.submitted.num_tasks):
        paths = job.submitted.task(n).paths
        path = paths.stderr if paths.stderr.exists() else paths.stdout
        found[str(n)] = path.read_bytes().decode(errors="replace") if path.exists() else ""
    return found


def status(state: str, texts: Iterable[str]) -> str:
    """Of a point whose job Slurm has ended, by what ranks and Slurm wrote too."""
    if state == "OUT_OF_MEMORY" or any("oom-kill" in text or "oom_kill" in text for text in texts):
        return "oom"
    return "timeout" if state in ("TIMEOUT", "DEADLINE") else "crash"


def states(ids: Iterable[str]) -> dict[str, tuple[str, str]] | None:
    """State and reason of jobs, of those that Slurm still knows; None if it does not answer."""
    arrays = sorted({id.split("_")[0] for id in ids})
    question = ["squeue", "--noheader", "--array", "--states=all", "--format=%i|%T|%r", f"--jobs={','.join(arrays)}"]
    answer = subprocess.run(question, capture_output=True, text=True, check=False)
    if answer.returncode:
        return {} if "Invalid job id" in answer.stderr else None
    lines = [line.strip().split("|", 2) for line in answer.stdout.splitlines()]
    return {id: (state, reason) for id, state, reason in lines}


def kept(path: Path) -> dict[Path, dict]:
    """The records of a point, by file."""
    found = {}
    for file in (path, path.with_name("failed.json")):
        try:
            record = json.loads(file.read_text())
        except (OSError, ValueError):
            continue
        if isinstance(record, dict):
            found[file] = record
    return found


def refuse(experiment: points.Experiment, config: dict, command: list[str], status: str, reason: str) -> None:
    """The record of a point that no job was submitted for."""
    record = points.begun(experiment, config, command) | SUBMITTED | {"status": status}
    path = Path(config["results"]) / record["point"] / "record.json"
    record |= {"reason": reason, "seconds": 0.0}
    tell(experiment, record, keep(record, path))


def keep(record: dict, path: Path) -> Path:
    with points.claimed(path.parent):
        return points.keep(record, path)


def tell(experiment: points.Experiment, record: dict, path: Path) -> None:
    note({"point": record["point"], "status": record["status"], "record": str(path)})
    points.progress(experiment, record, entries())


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C waits."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# ---------------------------------------------------------------------------------------------------
# In a job.


def task(experiment: points.Experiment, config: dict, command: list[str]) -> None:
    """One task of a job: a rank, or the process that starts the only one."""
    import submitit

    here = submitit.JobEnvironment()
    # submitit would let a cancelled job live on, and make an error of the word that its time is nearly up.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(getattr(signal, f"SIG{here.USR_SIG}"), signal.SIG_IGN)
    os.environ[JOURNAL] = str(here.paths.folder / "points.jsonl")
    points.point(experiment, OmegaConf.create(config), command)
    ranks.leave()
