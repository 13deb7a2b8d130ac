"""What a mask saves on the ring: bytes that were sent, beside what the blocks say, as a share of a dense ring's.

    python -m experiments.traffic
    python -m experiments.traffic --seq 65536 --ring 8 --csv traffic.csv

Real ranks run forward and backward of small heads; what is counted does not depend on how many there are.
"""

from __future__ import annotations

import argparse
import csv
import random
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

import usp
from experiments import ranks
from usp.balance import balanced
from usp.blocks import carried, needed, ring_order, schedule

LAYOUTS = ("contiguous", "zigzag", "striped", "balanced")
HEADS, HEAD_DIM, WIDE_BYTES = 1, 8, 4  # float32 all the way: gradients travel in float32


@dataclass(frozen=True)
class Line:
    """One row of the table; bytes of all ranks together, keys forward and back and their gradients."""

    mask: str
    layout: str
    counted_bytes: int
    predicted_bytes: int
    dense_bytes: int

    @property
    def share(self) -> float:
        return self.counted_bytes / self.dense_bytes


def masks(seq: int) -> dict[str, usp.Mask]:
    """Dense ones, windows of 1,024 tokens, and packed documents of the sequence."""
    lengths, left = [], seq
    lengths_of = random.Random(0)
    while left:  # as in a packed training batch: many short documents and a few long ones
        lengths.append(min(left, int(lengths_of.lognormvariate(6.0, 1.2)) + 16))
        left -= lengths[-1]
    return {
        "full": usp.Mask(causal=False),
        "causal": usp.Mask(causal=True),
        "causal, window 1,024": usp.Mask(causal=True, window=1024),
        "two-sided window 1,024": usp.Mask(causal=False, window=1024),
        "16 documents of equal length": usp.Mask.packed([seq // 16] * 16, causal=True),
        f"{len(lengths)} documents of 16 to {max(lengths):,}": usp.Mask.packed(lengths, causal=True),
    }


def table(seq: int, ring: int, timeout_s: float = 600.0) -> list[Line]:
    """Every mask and layout on `ring` new processes of this machine."""
    lines = []
    config = {"seq": seq, "ring": ring, "device": "cpu"}
    counted = ranks.launch(count, config, ring, timeout_s)
    dense = predicted(usp.Mask(causal=False), usp.Partition(seq, "contiguous", ring))
    for layout in LAYOUTS:
        for name, mask in masks(seq).items():
            sent = sum(rank[f"{layout} {name}"] for rank in counted)
            lines.append(Line(name, layout, sent, predicted(mask, partition(seq, ring, layout, mask)), dense))
    return lines


def count(config: dict) -> dict[str, int]:
    """On a rank: what it sends under every mask and layout, forward and backward."""
    mesh = usp.init_mesh(ring=config["ring"], ulysses=1, device_type="cpu")
    found = {}
    for layout in LAYOUTS:
        for name, mask in masks(config["seq"]).items():
            tokens = partition(config["seq"], config["ring"], layout, mask)
            q, k, v = (torch.randn(1, tokens.seq_local, HEADS, HEAD_DIM, requires_grad=True) for _ in range(3))
            with usp.measure_traffic() as traffic:
                usp.hybrid_attention(q, k, v, mesh, tokens, mask=mask).sum().backward()
            found[f"{layout} {name}"] = traffic.payload_bytes
    return found


def partition(seq: int, ring: int, layout: str, mask: usp.Mask) -> usp.Partition:
    """`usp.partition`, also for a ring that is not there."""
    return balanced(mask, seq, ring, 1) if layout == "balanced" else usp.Partition(seq, layout, ring)


def predicted(mask: usp.Mask, tokens: usp.Partition) -> int:
    """Every source's message on each of its hops, twice, and its gradient as often, the way home included."""
    need = needed(mask, tokens, tokens)
    token_bytes = HEADS * 2 * HEAD_DIM * WIDE_BYTES
    visits = schedule(need, ring_order(tokens.ring))
    hops = [len(stops) - 1 for stops in visits]
    return sum(3 * n * token_bytes * sum(map(len, columns)) for n, columns in zip(hops, carried(need), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.traffic", description=__doc__.splitlines()[0])
    parser.add_argument("--seq", type=int, default=32768, help="tokens of the whole sequence")
    parser.add_argument("--ring", type=int, default=8, help="ranks")
    parser.add_argument("--csv", type=Path, help="write the table there too")
    arguments = parser.parse_args()
    lines = table(arguments.seq, arguments.ring)
    print(f"{arguments.seq:,} tokens on a ring of {arguments.ring}: bytes of all ranks, forward and backward, float32")
    print(f"{'mask':32} {'layout':11} {'counted':>12} {'predicted':>12} {'of a full ring':>14}")
    for x in lines:
        print(f"{x.mask:32} {x.layout:11} {x.counted_bytes:12,} {x.predicted_bytes:12,} {x.share:14.1%}")
    if arguments.csv:
        with arguments.csv.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("mask", "layout", "counted_bytes", "predicted_bytes", "dense_bytes", "share"))
            writer.writerows(
                (x.mask, x.layout, x.counted_bytes, x.predicted_bytes, x.dense_bytes, f"{x.share:.4f}") for x in lines
            )
    wrong = [x for x in lines if x.counted_bytes != x.predicted_bytes]
    sys.exit(f"{len(wrong)} rows differ from the prediction" if wrong else 0)


if __name__ == "__main__":
    main()
