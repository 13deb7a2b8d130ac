"""What each layout makes of a mask: work per rank, needed pairs, useless transfers, time to plan; and measured time.

    python -m experiments.balance                     the table and a picture of who owns what, for 8 and 64 ranks
    python -m experiments.balance --measure 4 8       also run mixed documents on that many ranks of this machine

The table is counted and needs no process. `useless` is the share of what travels that its receiver does not see.
"""

from __future__ import annotations

import argparse
import csv
import random
import sysconfig
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch

import usp
from analysis import figures
from experiments import ranks
from experiments.traffic import LAYOUTS, partition
from usp.balance import balanced
from usp.blocks import blocks, carried, needed

MIXED = (16384, 8192, 2048, 2048, 1024, 1024, 512, 512, 256, 256, 256, 256)  # of 32,768 tokens
HEADS, HEAD_DIM = 1, 64


@dataclass(frozen=True)
class Line:
    """One row of the table."""

    seq: int
    ring: int
    mask: str
    layout: str
    becomes: str  # what the partition's layout is
    imbalance: float  # the busiest rank's work over the mean
    pairs: int  # (rank, source) of different ranks, where one sees keys of the other
    blocks: int  # runs of a rank
    useless: float | None  # share of the keys that travel; not counted on many ranks
    plan_ms: float  # CPU time of finding the partition


def masks(seq: int) -> dict[str, usp.Mask]:
    """Dense, windowed and packed; packed batches of the lengths that real texts have."""
    found = {
        "causal": usp.Mask(causal=True),
        "causal, window 1,024": usp.Mask(causal=True, window=1024),
        "8 documents of equal length": usp.Mask.packed([seq // 8] * 8, causal=True),
        "mixed documents": usp.Mask.packed([length * seq // 32768 for length in MIXED], causal=True),
    }
    for seed in (1, 2, 3):
        lengths = batch(seq, seed)
        found[f"batch {seed}: {len(lengths)} texts"] = usp.Mask.packed(lengths, causal=True)
    return found


def texts() -> list[int]:
    """Lengths of real texts: the modules of Python's standard library, four bytes a token."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return [max(1, file.stat().st_size // 4) for file in files]


def batch(seq: int, seed: int) -> list[int]:
    """Texts drawn until they fill the sequence; the last is cut."""
    lengths, left, drawn, pool = [], seq, random.Random(seed), texts()
    while left:
        lengths.append(min(left, drawn.choice(pool)))
        left -= lengths[-1]
    return lengths


def table(seq: int, ring: int) -> list[Line]:
    lines = []
    for name, mask in masks(seq).items():
        work = work_of_queries(mask, seq)
        for layout in LAYOUTS:
            balanced.cache_clear()
            start_s = time.thread_time()
            tokens = partition(seq, ring, layout, mask)
            plan_s = time.thread_time() - start_s
            lines.append(line(name, layout, mask, tokens, work, 1000 * plan_s))
    return lines


def line(name: str, layout: str, mask: usp.Mask, tokens: usp.Partition, work: list[int], plan_ms: float) -> Line:
    need = needed(mask, tokens, tokens)
    everyone = range(tokens.ring)
    pairs = [(rank, source) for rank in everyone for source in everyone if rank != source and need[rank][source]]
    loads = [
        sum(sum(work[run.start : run.start + run.step * run.count : run.step]) for run in tokens.runs(rank))
        for rank in everyone
    ]
    return Line(
        seq=tokens.seq,
        ring=tokens.ring,
        mask=name,
        layout=layout,
        becomes=str(tokens.layout),
        imbalance=max(loads) * tokens.ring / sum(loads),
        pairs=len(pairs),
        blocks=max(len(tokens.runs(rank)) for rank in everyone),
        useless=useless(mask, tokens, pairs, carried(need)) if tokens.ring <= 8 else None,
        plan_ms=plan_ms,
    )


def useless(
    mask: usp.Mask, tokens: usp.Partition, pairs: list[tuple[int, int]], messages: tuple[tuple[range, ...], ...]
) -> float:
    """The share of keys that come to a rank none of whose queries sees them."""
    sent = seen = 0
    for rank, source in pairs:
        sent += sum(map(len, messages[source]))
        seen += len({n for block in blocks(mask, tokens, rank, tokens, source) for n in block.k})
    return 1 - seen / sent if sent else 0.0


def work_of_queries(mask: usp.Mask, seq: int) -> list[int]:
    """By position: how many keys a query sees."""
    work = [0] * seq
    for (a, b), (c, d), low, high in mask.disjoint_regions():
        a, b, c, d = max(a, 0), min(b, seq), max(c, 0), min(d, seq)
        for i in range(a, b):
            first, last = c if low is None else max(c, i + low), d if high is None else min(d, i + high + 1)
            work[i] += max(0, last - first)
    return work


# ---------------------------------------------------------------------------------------------------
# Measured.


def measured(seq: int, ring: int, repeats: int, timeout_s: float = 900.0) -> dict[str, float]:
    """By layout: CPU seconds of the slowest rank, forward and backward of mixed documents, outside communication."""
    config = {"seq": seq, "ring": ring, "repeats": repeats, "device": "cpu"}
    samples = ranks.launch(time_layouts, config, ring, timeout_s)
    return {layout: max(rank[layout] for rank in samples) for layout in LAYOUTS}


def time_layouts(config: dict) -> dict[str, float]:
    """On a rank: the median time of every layout, in turns; in the time of a fixed piece of work beside each call."""
    mesh = usp.init_mesh(ring=config["ring"], ulysses=1, device_type="cpu")
    mask = masks(config["seq"])["mixed documents"]
    found: dict[str, list[float]] = {layout: [] for layout in LAYOUTS}
    probes: list[float] = []
    for _ in range(config["repeats"]):
        for layout in LAYOUTS:
            given = {"mask": mask} if layout == "balanced" else {}
            tokens = usp.partition(config["seq"], mesh, layout, **given)
            q, k, v = (torch.randn(1, tokens.seq_local, HEADS, HEAD_DIM, requires_grad=True) for _ in range(3))

            def forward(q=q, k=k, v=v, tokens=tokens):
                return usp.hybrid_attention(q, k, v, mesh, tokens, mask=mask)

            samples = ranks.timed(
                forward, lambda out: out.sum().backward(), lambda _: None, warmup=0, repeats=1, probe=ranks.probe
            )
            found[layout].append(samples["compute_s"][0] / samples["probe_s"][0])
            probes += samples["probe_s"]
    return {layout: median(x) * median(probes) for layout, x in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.balance", description=__doc__.splitlines()[0])
    parser.add_argument("--ring", type=int, nargs="+", default=[8, 64], help="ranks; 4,096 or 2,048 tokens each")
    parser.add_argument(
        "--results", type=Path, default=Path("results/balance"), help="folder of the CSV and the picture"
    )
    parser.add_argument("--measure", type=int, nargs="+", default=[], metavar="RANKS", help="run mixed documents too")
    parser.add_argument("--seq", type=int, default=65536, help="tokens of the measured runs")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    arguments.results.mkdir(parents=True, exist_ok=True)
    lines: list[Line] = []
    for ring in arguments.ring:
        seq = 32768 if ring <= 8 else 131072
        lines += (found := table(seq, ring))
        print(f"{seq:,} tokens on {ring} ring ranks")
        print(f"{'mask':30} {'layout':11} {'becomes':11}   work  pairs blocks  useless  plan ms")
        for x in found:
            share = "" if x.useless is None else f"{x.useless:.1%}"
            text = f"{x.mask:30} {x.layout:11} {x.becomes:11} {x.imbalance:6.3f} {x.pairs:6} {x.blocks:6}"
            print(f"{text} {share:>8} {x.plan_ms:8.1f}")
        given = masks(seq)
        owned = {name: {x: partition(seq, ring, x, mask) for x in LAYOUTS} for name, mask in given.items()}
        work = {name: work_of_queries(mask, seq) for name, mask in given.items()}
        path = figures.owners(owned, work, arguments.results / f"owners_{ring}.png")
        print(f"{path}\n", flush=True)
    with (arguments.results / "balance.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(asdict(lines[0])))
        writer.writeheader()
        writer.writerows(map(asdict, lines))
    for ring in arguments.measure:
        found = measured(arguments.seq, ring, arguments.repeats)
        best = found["balanced"]
        text = ", ".join(f"{layout} {seconds:.2f} s ({seconds / best:.2f})" for layout, seconds in found.items())
        print(f"mixed documents, {arguments.seq:,} tokens, {ring} ranks, slowest rank's CPU: {text}", flush=True)


if __name__ == "__main__":
    main()
