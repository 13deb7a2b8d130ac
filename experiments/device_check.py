"""Check and time the library's kernels on one device: right against float64, and how fast for which block size.

    python -m experiments.device_check
    python -m experiments.device_check --dry-run     on this machine's CPU, small

Needs the library and a device, neither Hydra nor a process group: the ranks of a ring are played one after another.
Writes one record.json. Exits with 1 if a result is wrong.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

import usp
from analysis.records import SCHEMA
from experiments.points import provenance, write
from usp import kernels, merging
from usp.blocks import Block, blocks
from usp.kernels.scores import Scores, Terms, checked_scores

LIMIT = 0.01  # the largest error in half precision that passes, of the reference's largest value; 5e-6 in float32
WARMUP, REPEATS = 3, 10
NAMES = ("out", "lse", "dq", "dk", "dv")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.device_check", description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, with small sizes")
    parser.add_argument("--results", type=Path, default=Path("results/device_check"), help="folder of the record")
    arguments = parser.parse_args()
    if not arguments.dry_run and not torch.cuda.is_available():
        parser.error("there is no CUDA device; --dry-run goes through everything on the CPU")
    device = torch.device("cpu" if arguments.dry_run else "cuda")
    record = run(device)
    path = arguments.results / record["point"] / "record.json"
    write(record, path)
    for line in record["conformance"]:
        print(f"{'ok   ' if line['ok'] else 'WRONG'} {line['case']}: {line.get('reason') or errors(line['errors'])}")
    for line in record["rates"]:
        parts = ", ".join(f"{name} {rate / 1e12:.3f} TFLOP/s" for name, rate in line["flop_per_s"].items())
        print(f"rate  {line['case']}: {line.get('reason') or parts}")
    print(f"{record['status']}: {path}")
    sys.exit(record["status"] != "ok")


def errors(found: dict[str, float]) -> str:
    return ", ".join(f"{name} {error:.1e}" for name, error in found.items())


def run(device: torch.device) -> dict:
    small = device.type == "cpu"
    where = "cpu" if small else torch.cuda.get_device_name(device)
    start_s = time.monotonic()
    record = {
        "schema": SCHEMA,
        "experiment": "device_check",
        "point": f"{where}-torch{torch.__version__}".replace(" ", "_").replace("+", "_"),
        "config": {"name": "device_check", "device": where, "warmup": WARMUP, "repeats": REPEATS},
        "command": [Path(sys.executable).name, "-m", "experiments.device_check", *sys.argv[1:]],
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        **provenance(),
        "conformance": conformance(device, 96 if small else 1024),
        "rates": rates(device, (64, 128) if small else (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)),
    }
    lines = record["conformance"] + record["rates"]
    wrong = [line["case"] for line in lines if not line.get("ok", "reason" not in line)]
    record["status"] = "crash" if wrong else "ok"
    if wrong:
        record["reason"] = f"{len(wrong)} cases are wrong or did not run: {', '.join(wrong)}"
    return record | {"seconds": round(time.monotonic() - start_s, 3)}


# ---------------------------------------------------------------------------------------------------
# Conformance.


def conformance(device: torch.device, seq: int) -> list[dict]:
    """Rings of four ranks over layouts and masks, with a gradient through lse, then head shapes and dtypes."""
    masks = {
        "causal": usp.Mask(causal=True),
        "full": usp.Mask(causal=False),
        "window": usp.Mask(causal=True, window=seq // 5),
        "two-sided window": usp.Mask(causal=False, window=seq // 7),
        "packed": usp.Mask.packed([seq // 3, seq // 2, seq - seq // 3 - seq // 2], causal=True),
    }
    found = [
        check(device, torch.bfloat16, (4, 2, 64), seq, layout, mask, name)
        for layout in ("contiguous", "zigzag", "striped")
        for name, mask in masks.items()
    ]
    for heads, kv_heads, head_dim in ((4, 4, 128), (3, 1, 32), (6, 2, 96), (2, 1, 256)):
        found.append(
            check(device, torch.bfloat16, (heads, kv_heads, head_dim), seq, "zigzag", masks["window"], "window")
        )
    for dtype in (torch.float16, torch.float32):
        found.append(check(device, dtype, (4, 2, 64), seq, "zigzag", masks["window"], "window"))
    for options in ({"softcap": 3.0}, {"alibi": (0.5, 0.25, 0.06, 0.0)}, {"dropout": (0.3, 7)}):
        for name in ("causal", "full"):
            found.append(check(device, torch.bfloat16, (4, 2, 64), seq, "zigzag", masks[name], name, options))
    return found


def check(
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    seq: int,
    layout: str,
    mask: usp.Mask,
    name: str,
    options: dict | None = None,
) -> dict:
    """One case, with the backend that `auto` takes there, against float64 on the CPU."""
    heads, kv_heads, head_dim = shape
    generator = torch.Generator().manual_seed(0)

    def normal(count: int) -> Tensor:
        return torch.randn(2, seq, count, head_dim, generator=generator).to(dtype)

    q, k, v, dout = normal(heads), normal(kv_heads), normal(kv_heads), normal(heads)
    # A gradient through lse takes columns that a head of the largest size does not have.
    dlse = torch.randn(2, heads, seq, generator=generator) if head_dim < 256 else None
    options = options or {}
    what = f"{layout}, {name}, {heads}/{kv_heads} heads x {head_dim}, {str(dtype).removeprefix('torch.')}"
    what += "".join(f", {option}={value}" for option, value in options.items())
    tokens = usp.Partition(seq, usp.Layout(layout), ring=4)
    try:
        there = [None if x is None else x.to(device) for x in (q, k, v, dout, dlse)]
        given = dict.fromkeys(("scale", "softcap", "alibi", "bias", "dropout")) | options
        scores, seed = checked_scores(there[0], **given), options.get("dropout", (0.0, 0))[1]
        backend = kernels.select("auto", there[0], there[2], scores, lse_gradient=dlse is not None, span=seq)
        actual = [x.cpu().double() for x in ring_on_paper(backend, *there, mask, tokens, scores, seed)]
    except Exception as error:  # device time is rare: the other cases still run
        return {"case": what, "errors": {}, "ok": False, "reason": f"{type(error).__name__}: {error}"}
    exact = [x.double() for x in (q, k, v, dout)]
    expected = one_process(*exact, None if dlse is None else dlse.double(), mask, options)
    found = {
        name: ((x - y).abs().max() / y.abs().max()).item() for name, x, y in zip(NAMES, actual, expected, strict=True)
    }
    limit = LIMIT if dtype.itemsize == 2 else 5e-6
    return {
        "case": f"{what}, {backend}",
        "errors": found,
        "ok": all(error <= limit for error in found.values()),
    }


def one_process(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor | None, mask: usp.Mask, options: dict
) -> list[Tensor]:
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    tokens = usp.Partition(q.shape[1], usp.Layout.CONTIGUOUS)
    out, lse = usp.hybrid_attention(q, k, v, None, tokens, mask=mask, backend="tiled", return_lse=True, **options)
    loss = (out * dout).sum() + (0.0 if dlse is None else (lse * dlse).sum())
    return [out.detach(), lse.detach(), *torch.autograd.grad(loss, (q, k, v))]


def ring_on_paper(
    backend: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    mask: usp.Mask,
    tokens: usp.Partition,
    scores: Scores,
    seed: int,
) -> list[Tensor]:
    """out, lse, dq, dk, dv of a ring whose ranks are played one after another; tokens need no padding."""
    wide = merging.accumulator_dtype(q.dtype)
    reach = kernels.reach(backend, q.dtype, scores)
    held = [  # the tokens of each rank
        torch.cat([torch.arange(start, start + step * count, step) for start, step, count in tokens.runs(rank)])
        for rank in range(tokens.ring)
    ]
    dq, dk, dv = (torch.zeros_like(x, dtype=wide) for x in (q, k, v))
    out, lse = (
        torch.zeros_like(dout),
        torch.full(dout.shape[:3], -torch.inf, dtype=wide, device=q.device).mT.contiguous(),
    )
    for rank in range(tokens.ring):
        mine = held[rank]
        work = [
            (source, block)
            for source in range(tokens.ring)
            for block in blocks(mask, tokens, rank, tokens, source, reach=reach)
        ]

        def terms(source: int, block: Block, mine: Tensor = mine) -> Terms:
            i, j = mine[block.q.start : block.q.stop], held[source][block.k.start : block.k.stop]
            return scores.at(slice(0, q.shape[2]), 0, i, j, None, seed)

        my_out, my_lse = torch.zeros_like(out[:, mine], dtype=wide), lse[:, :, mine]
        for source, block in work:
            rows = slice(block.q.start, block.q.stop)
            tensors = q[:, mine], k[:, held[source]], v[:, held[source]]
            part = kernels.forward(backend, *tensors, block, terms(source, block))
            merging.accumulate(my_out[:, rows], my_lse[:, :, rows], *part)
        out[:, mine], lse[:, :, mine] = my_out.to(q.dtype), my_lse
        my_dlse = None if dlse is None else dlse[:, :, mine]
        for source, block in work:
            theirs = held[source]
            tensors = dout[:, mine], q[:, mine], k[:, theirs], v[:, theirs], out[:, mine], my_lse, my_dlse
            parts = kernels.backward(backend, *tensors, block, terms(source, block))
            rows, columns = mine[block.q.start : block.q.stop], theirs[block.k.start : block.k.stop]
            dq[:, rows] += parts[0]
            dk[:, columns] += parts[1]
            dv[:, columns] += parts[2]
    return [out, lse, dq, dk, dv]


# ---------------------------------------------------------------------------------------------------
# Rates.


def rates(device: torch.device, sizes: tuple[int, ...]) -> list[dict]:
    """Floating point operations a second of one square block, by its size: 4 x rows x columns x heads x head_dim
    forward (half of it visible if causal), 2.5 times as many backward."""
    found = []
    for heads, kv_heads, head_dim in ((8, 8, 64), (8, 8, 128), (32, 8, 128)):
        for size in sizes:
            for causal in (False, True):
                try:
                    found.append(rate(device, size, heads, kv_heads, head_dim, causal))
                except Exception as error:
                    case = f"{size} x {size}, {heads}/{kv_heads} heads x {head_dim}, causal={causal}"
                    found.append({"case": case, "flop_per_s": {}, "reason": f"{type(error).__name__}: {error}"})
    return found


def rate(device: torch.device, size: int, heads: int, kv_heads: int, head_dim: int, causal: bool) -> dict:
    def normal(count: int) -> Tensor:
        return torch.randn(1, size, count, head_dim, device=device, dtype=torch.bfloat16)

    q, k, v, dout = normal(heads), normal(kv_heads), normal(kv_heads), normal(heads)
    scores = Scores(scale=head_dim**-0.5)
    backend = kernels.select("auto", q, v, scores, lse_gradient=False, span=size)
    tokens = usp.Partition(size, usp.Layout.CONTIGUOUS)
    (block,) = blocks(usp.Mask(causal=causal), tokens, 0, tokens, 0)
    terms = Terms(scores.scale)
    out, lse = kernels.forward(backend, q, k, v, block, terms)
    samples = {
        "forward": timed(device, lambda: kernels.forward(backend, q, k, v, block, terms)),
        "backward": timed(device, lambda: kernels.backward(backend, dout, q, k, v, out, lse, None, block, terms)),
    }
    flop = 4 * size * size * heads * head_dim * (0.5 if causal else 1.0)
    work = {"forward": flop, "backward": 2.5 * flop}
    return {
        "case": f"{size} x {size}, {heads}/{kv_heads} heads x {head_dim}, {'causal' if causal else 'full'}, {backend}",
        "size": size,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "causal": causal,
        "backend": backend,
        "seconds": samples,
        "flop_per_s": {name: work[name] / median(seconds) for name, seconds in samples.items()},
    }


def timed(device: torch.device, call: Callable) -> list[float]:
    """Wall seconds of single calls, each begun and ended with an idle device."""
    samples = []
    for n in range(-WARMUP, REPEATS):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start_s = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if n >= 0:
            samples.append(time.perf_counter() - start_s)
    return samples


if __name__ == "__main__":
    main()
