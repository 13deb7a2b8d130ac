"""What happens on the rank processes: start them, measure one point, tell what was measured.

Imports neither Hydra nor a plotting library, so that ranks start fast.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import resource
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record

import usp
import usp.nn


def launch(function: Callable[[dict], dict], config: dict, world: int) -> list[dict]:
    """function(config) on `world` new processes of this machine, by PyTorch's elastic launcher; results by rank.

    Processes are forked from one that has imported torch (0.5 s for 8 ranks; seconds with spawn). An exception
    on a rank ends all of them and is raised here as a ChildFailedError.
    """
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    multiprocessing.set_forkserver_preload(["experiments.ranks"])
    if any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # host names need not resolve
    launched = LaunchConfig(
        run_id=f"usp-{os.getpid()}-{time.monotonic_ns()}",
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        start_method="forkserver",
    )
    results = elastic_launch(launched, function)(config)
    return [results[rank] for rank in range(world)]


@record
def measure_and_leave(config: dict) -> dict:
    """`measure` on a rank that was started for this point alone."""
    measured = measure(config)
    leave()
    return measured


def leave() -> None:
    """End torch.distributed, all ranks together: a rank that exits with live gloo threads may abort."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def measure(config: dict) -> dict:
    """One point on this rank: run the attention, count and time it, hold it against float64."""
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(seconds=config["timeout_s"]))
    mesh = usp.init_mesh(ring=config["mesh"]["ring"], ulysses=config["mesh"]["ulysses"], device_type="cpu")
    tokens = usp.partition(config["seq"], mesh, config["layout"]["name"])
    mask = usp.Mask(causal=config["causal"], window=config["window"])
    q, k, v, dout = (usp.shard(_whole(config, n), mesh, tokens) for n in range(4))
    q, k, v = (x.requires_grad_(config["backward"]) for x in (q, k, v))
    attention = usp.HybridAttention(mesh, exchange=config["exchange"], backend=config["backend"])

    def call() -> tuple[list[Tensor], float]:
        """Results, and CPU seconds when forward was done."""
        out = attention(q, k, v, tokens, mask)
        forward_s = time.process_time()
        grads = torch.autograd.grad(out, (q, k, v), dout) if config["backward"] else ()
        return [out.detach(), *grads], forward_s

    before_bytes = _reset_peak_memory()
    with usp.measure_traffic() as traffic:
        results, _ = call()
    peak_growth_bytes = _peak_memory() - before_bytes
    for _ in range(config["measure"]["warmup"] - 1):
        call()
    rank = {
        "rank": dist.get_rank(),
        "ring_rank": mesh.get_local_rank("ring"),
        "ulysses_rank": mesh.get_local_rank("ulysses"),
        "bytes": dict(traffic.bytes),
        "messages": dict(traffic.messages),
        "kernels": dict(traffic.kernels),
        "peak_growth_bytes": peak_growth_bytes,
        "error": _errors(config, results, mesh, tokens, mask) if config["measure"]["reference"] else {},
        "cpu_s": [],
        "forward_cpu_s": [],
        "wall_s": [],
        "baseline_cpu_s": [],
    }
    del results
    for _ in range(config["measure"]["repeats"]):
        # As many copies as there are cores, so that caches and clocks are shared in both halves of a round.
        if config["measure"]["baseline"] and dist.get_rank() < (os.cpu_count() or 1):
            rank["baseline_cpu_s"].append(_fused_on_one_process(config))
        dist.barrier()
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        _, forward_s = call()
        rank["cpu_s"].append(time.process_time() - cpu_s)
        rank["wall_s"].append(time.perf_counter() - wall_s)
        rank["forward_cpu_s"].append(forward_s - cpu_s)
    return rank


def everyone(mine: dict) -> list[dict]:
    """What all ranks measured, for jobs whose ranks were started by somebody else (torchrun)."""
    ranks: list = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    return ranks


def _whole(config: dict, n: int) -> Tensor:
    """The n-th of q, k, v, dout: the whole tensor, the same on every rank and every mesh."""
    workload = config["workload"]
    heads = workload["kv_heads"] if n in (1, 2) else workload["heads"]
    generator = torch.Generator().manual_seed(4 * config["seed"] + n)
    shape = workload["batch"], config["seq"], heads, workload["head_dim"]
    return torch.randn(shape, generator=generator).to(getattr(torch, config["dtype"]))


def _errors(config: dict, results: list[Tensor], mesh, tokens: usp.Partition, mask: usp.Mask) -> dict[str, float]:
    """Largest errors of out, dq, dk, dv against float64 on one process, relative to the largest value.

    The whole sequence, for this rank's share of the heads.
    """
    with torch.no_grad():
        whole = [usp.unshard(x, mesh, tokens) for x in results]
    world, kv_heads = dist.get_world_size(), config["workload"]["kv_heads"]
    groups = config["workload"]["heads"] // kv_heads
    first, end = dist.get_rank() * kv_heads // world, (dist.get_rank() + 1) * kv_heads // world
    if first == end:
        return {}
    queries, keys = slice(first * groups, end * groups), slice(first, end)
    q, k, v, dout = (_whole(config, n)[:, :, heads].double() for n, heads in enumerate((queries, keys, keys, queries)))
    q, k, v = (x.requires_grad_(config["backward"]) for x in (q, k, v))
    alone = usp.Partition(config["seq"], usp.Layout.CONTIGUOUS)
    out = usp.hybrid_attention(q, k, v, None, alone, mask=mask, backend="tiled")
    expected = [out.detach(), *(torch.autograd.grad(out, (q, k, v), dout) if config["backward"] else ())]
    found = [x[:, :, heads] for x, heads in zip(whole, (queries, queries, keys, keys), strict=False)]
    return {
        name: ((x - y).abs().max() / y.abs().max()).item()
        for name, x, y in zip(("out", "dq", "dk", "dv"), found, expected, strict=False)
    }


def _fused_on_one_process(config: dict) -> float:
    """CPU seconds of PyTorch's fused attention over the whole sequence, with backward if the point has it."""
    from einops import rearrange

    q, k, v, dout = (rearrange(_whole(config, n), "b s h d -> b h s d") for n in range(4))
    q, k, v = (x.requires_grad_(config["backward"]) for x in (q, k, v))
    start = time.process_time()
    out = F.scaled_dot_product_attention(q, k, v, is_causal=config["causal"], enable_gqa=True)
    if config["backward"]:
        torch.autograd.grad(out, (q, k, v), dout)
    return time.process_time() - start


def _reset_peak_memory() -> int:
    """Give free memory back and start counting the peak anew, where the system can; bytes resident now."""
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    return _peak_memory()


def _peak_memory() -> int:
    """Largest resident bytes since the reset (on other systems since the start)."""
    if sys.platform == "linux":
        status = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
