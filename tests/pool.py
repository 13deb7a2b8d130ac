"""Rank processes that stay alive between tests. A hang is a failure that prints every rank's stack."""

from __future__ import annotations

import faulthandler
import itertools
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from pathlib import Path

import jaxtyping
import torch
import torch.distributed as dist

import usp
import usp.nn  # with all that it needs: ranks are forked from a process that has it

DEADLINE_S = 60.0
# Beside the tests, what autograd.grad imports when it is given gradients, and FSDP: seconds in every rank.
PRELOADED = ["tests.hybrid", "torch.fx.experimental.symbolic_shapes", "torch.distributed.fsdp"]


class Pool:
    """`world` processes of one gloo job."""

    def __init__(self, world: int, timeout_s: float = DEADLINE_S):
        self.folder = tempfile.TemporaryDirectory()
        folder = Path(self.folder.name)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.stacks = [folder / f"stack{rank}" for rank in range(world)]
        self.pipes, self.processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            args = (rank, world, str(folder / "store"), theirs, str(self.stacks[rank]), timeout_s)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        self.alive = True

    def __call__(self, function, *args, deadline_s: float = DEADLINE_S) -> list:
        """function(*args) on every rank; the results by rank.

        An exception on a rank is raised here with its traceback. A rank that dies or does not answer ends the pool.
        """
        for pipe in self.pipes:
            pipe.send((function, args))
        answers: list = [None] * len(self.pipes)
        failures = []  # the first to fail comes first: the others often only complain about it
        waiting = dict(zip(self.pipes, range(len(self.pipes)), strict=True))
        end = time.monotonic() + deadline_s
        while waiting:
            ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                failures += [f"ranks {sorted(waiting.values())} hang after {deadline_s} s\n{self._stacks()}"]
                self.close()
                raise AssertionError("\n".join(failures))
            for pipe in ready:
                rank = waiting.pop(pipe)  # type: ignore[index]
                try:
                    answers[rank] = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    self.processes[rank].join()
                    code = self.processes[rank].exitcode
                    self.close()
                    raise AssertionError(f"rank {rank} died with exit code {code}") from None
                if not answers[rank][0]:
                    failures.append(f"rank {rank}:\n{answers[rank][1]}")
        if failures:
            raise AssertionError("\n".join(failures))
        return [result for _, result in answers]

    def close(self) -> None:
        self.alive = False
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()

    def _stacks(self) -> str:
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        return "\n".join(f"--- rank {n}\n{path.read_text()}" for n, path in enumerate(self.stacks) if path.exists())


class Pools:
    def __init__(self):
        self.by_world: dict[int, Pool] = {}

    def of(self, world: int) -> Pool:
        if world not in self.by_world or not self.by_world[world].alive:
            for other in [n for n in self.by_world if n > 9]:  # the rare large ones do not stay
                self.by_world.pop(other).close()
            self.by_world[world] = Pool(world)
        return self.by_world[world]

    def close(self) -> None:
        for pool in self.by_world.values():
            pool.close()


@lru_cache
def mesh(ring: int, ulysses: int, data: int = 1, order: tuple[str, ...] = ("data", "ring", "ulysses")):
    """On a rank: the mesh of the whole pool, made once."""
    return usp.init_mesh(ring=ring, ulysses=ulysses, data=data, order=order, device_type="cpu")


_turns = itertools.count()


@contextmanager
def one_rank_checks_types() -> Iterator[None]:
    """On a rank: its turn to check shapes and types in signatures comes once in as many calls as there are ranks.

    Every call is checked on one rank, every rank checks: checks are half of the time of a small call.
    """
    before = jaxtyping.config.jaxtyping_disable
    turn = next(_turns) % dist.get_world_size() == dist.get_rank() if dist.is_initialized() else True
    jaxtyping.config.update("jaxtyping_disable", before or not turn)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", before)


def start_gloo(rank: int, world: int, store: str, timeout_s: float) -> None:
    if any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # host names need not resolve
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout_s),
    )


def _serve(rank: int, world: int, store: str, pipe, stack_file: str, timeout_s: float) -> None:
    stack = Path(stack_file).open("w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    torch.set_num_threads(1)
    start_gloo(rank, world, store, timeout_s)
    while True:
        function, args = pipe.recv()
        try:
            answer = True, function(*args)
        except BaseException:
            answer = False, traceback.format_exc()
        pipe.send(answer)
