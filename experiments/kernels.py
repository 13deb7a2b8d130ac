"""How fast and how exact the kernels are on one core, options included, without any process group.

    python -m experiments.kernels
    python -m experiments.kernels --rows 64 128 256 512      also with other tiles

CPU seconds (median of interleaved calls) as ratios to the fused op, and errors against float64.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from torch import Tensor

import usp
from usp.kernels import sdpa, tiled
from usp.kernels.scores import Terms

SHAPES = ((16, 128, 8, 8, 64), (1, 1024, 8, 8, 64), (1, 2048, 8, 2, 64), (1, 4096, 4, 4, 128), (1, 8192, 2, 1, 64))
OPTIONS = {
    "none": {},
    "softcap": {"softcap": 30.0},
    "alibi": {"alibi": (0.5, 0.25, 0.06, 0.004)},
    "bias": {"bias": usp.RelativeBias.t5(torch.zeros(32, 4, requires_grad=True), bidirectional=True)},
    "dropout": {"dropout": (0.1, 0)},
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.kernels", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[tiled.ROWS], help="rows of a tile")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tiles(arguments.rows, arguments.repeats)
    options(arguments.repeats)
    rounding()


def tiles(rows: list[int], repeats: int) -> None:
    """The written-out backend over the fused one, plain attention in float32."""
    print("tiled / sdpa, float32, CPU seconds: forward backward")
    print(f"{'batch x seq, heads/kv x dim':32}" + "".join(f"{f'{count} rows':>14}" for count in rows))
    for batch, seq, heads, kv_heads, dim in SHAPES:
        for high in (None, 0):
            q, k, v, dout = (torch.randn(batch, seq, x, dim) for x in (heads, kv_heads, kv_heads, heads))
            terms = Terms(dim**-0.5)
            out, lse = sdpa.forward(q, k, v, None, high, terms)
            calls: dict[tuple, Callable] = {}
            for count in (0, *rows):  # 0: the fused op
                backend = tiled if count else sdpa
                calls[count, 0] = partial(in_tiles, count, backend.forward, q, k, v, None, high, terms)
                calls[count, 1] = partial(
                    in_tiles, count, backend.backward, dout, q, k, v, out, lse, None, None, high, terms
                )
            found = interleaved(calls, repeats)
            name = f"{batch} x {seq}, {heads}/{kv_heads} x {dim}{', causal' if high == 0 else ''}"
            ratios = [f"{found[x, 0] / found[0, 0]:7.2f}{found[x, 1] / found[0, 1]:7.2f}" for x in rows]
            print(f"{name:32}" + "".join(ratios), flush=True)


def in_tiles(rows: int, call: Callable, *arguments) -> None:
    usual, tiled.ROWS = tiled.ROWS, rows or tiled.ROWS
    call(*arguments)
    tiled.ROWS = usual


def options(repeats: int) -> None:
    """Forward and backward of one call with an option, over the fused op without."""
    print("\nforward and backward with an option / sdpa without, 2,048 tokens, 4 heads x 64, causal, CPU seconds")
    print(f"{'':12}" + "".join(f"{f'{name}, {x}':>20}" for x in ("float32", "bfloat16") for name in usp.backends()))
    lines = {name: f"{name:12}" for name in OPTIONS}
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = (torch.randn(1, 2048, 4, 64).to(dtype).requires_grad_() for _ in range(3))
        calls: dict[tuple, Callable] = {}
        for name, given in OPTIONS.items():
            for backend, can in usp.backends().items():
                if name == "none" or name in can.options:
                    calls[name, backend] = partial(both_ways, q, k, v, backend=backend, **given)
        found = interleaved(calls, repeats)
        for name in OPTIONS:
            for backend in usp.backends():
                ratio = found.get((name, backend), 0.0) / found["none", "sdpa"]
                lines[name] += f"{f'{ratio:.2f}' if ratio else 'refused':>20}"
    print("\n".join(lines.values()), flush=True)


def both_ways(q: Tensor, k: Tensor, v: Tensor, **how) -> None:
    tokens = usp.Partition(q.shape[1], "contiguous")
    usp.hybrid_attention(q, k, v, None, tokens, mask=usp.Mask(causal=True), **how).float().sum().backward()


def rounding() -> None:
    """What delta from the rounded out costs in bfloat16, by how far v is from zero."""
    print("\nbfloat16, 1,024 tokens, 4 heads x 64, full: relative error (norm) of dq and dk, in percent")
    print(
        f"{'v shifted by':14}{'plain PyTorch':>18}" + "".join(f"{x:>18}{'float32_delta':>18}" for x in usp.backends())
    )
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, 1024, 4, 64) for _ in range(4))
    tokens, mask = usp.Partition(1024, "contiguous"), usp.Mask(causal=False)
    for shift in (0, 1, 5, 20):
        rounded = [x.bfloat16() for x in (q, k, v + shift, dout)]

        def gradients(wide: torch.dtype, attention: Callable, rounded=rounded) -> tuple[Tensor, ...]:
            leaves = [x.to(wide).requires_grad_() for x in rounded[:3]]
            return torch.autograd.grad(attention(*leaves), leaves[:2], rounded[3].to(wide))

        exact = gradients(torch.float64, plain)
        ways: list[Callable] = [plain]
        for backend in usp.backends():
            for delta in (False, True):
                how = {"mask": mask, "backend": backend, "float32_delta": delta}
                ways.append(lambda q, k, v, how=how: usp.hybrid_attention(q, k, v, None, tokens, **how))
        cells = []
        for way in ways:
            pairs = zip(gradients(torch.bfloat16, way), exact, strict=True)
            cells.append(" ".join(f"{100 * ((x - y).norm() / y.norm()).item():.2f}" for x, y in pairs))
        print(f"{shift:<14}" + "".join(f"{cell:>18}" for cell in cells), flush=True)


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = torch.softmax(torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[3] ** -0.5, -1)
    return torch.einsum("bhij,bjhd->bihd", p, v)


def interleaved(calls: dict[tuple, Callable], repeats: int) -> dict[tuple, float]:
    """Median CPU seconds of each, in turns, after one call to warm up."""
    samples: dict[tuple, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 1):
        for name, call in calls.items():
            start_s = time.thread_time()
            call()
            if turn:
                samples[name].append(time.thread_time() - start_s)
    return {name: median(x) for name, x in samples.items()}


if __name__ == "__main__":
    main()
