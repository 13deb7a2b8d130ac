"""What tiles save and cost: memory and CPU time of an MLP, and of a head with its loss, forward and backward.

    python -m experiments.tiles
    python -m experiments.tiles --seqs 1024 --tiles 256 --dtype float32

Each case has a process of its own, on one core. Then how much of the weights' gradients bfloat16 loses by the number of
tiles over which they are summed.
"""

from __future__ import annotations

import argparse
import copy
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import usp.nn
from experiments import ranks

WIDTH, HIDDEN = 1024, 4096
HEAD_WIDTH, VOCABULARY = 576, 49_152
REPEATS = 3
SMALL = 8192, 256, 1024, 2000  # tokens, width, hidden and vocabulary where errors are measured


class Mlp(nn.Module):
    """Gate, up and down, without biases."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def mlp(module: nn.Module, x: Tensor, tile: int | None) -> Tensor:
    return module(x) if tile is None else usp.nn.tiled_mlp(module, x, tile=tile)


def head_loss(head: nn.Module, x: Tensor, targets: Tensor, tile: int | None) -> Tensor:
    if tile is not None:
        return usp.nn.tiled_cross_entropy(x, head, targets, tile=tile)
    logits = head(x).flatten(0, 1)
    return F.cross_entropy(logits if x.dtype == torch.float64 else logits.float(), targets.flatten(), reduction="sum")


def measure(config: dict) -> dict:
    """In a process of its own: by how much a first call makes memory grow, and CPU seconds of the fastest later one."""
    torch.manual_seed(0)
    dtype, tile = getattr(torch, config["dtype"]), config["tile"]
    width = WIDTH if config["layer"] == "mlp" else HEAD_WIDTH
    module = Mlp(WIDTH, HIDDEN) if config["layer"] == "mlp" else nn.Linear(HEAD_WIDTH, VOCABULARY, bias=False)
    module.to(dtype)

    def call(seq: int) -> None:
        x = torch.randn(1, seq, width, dtype=dtype, requires_grad=True)
        if config["layer"] == "mlp":
            out = mlp(module, x, tile)
            out.backward(torch.ones_like(out))
        else:
            head_loss(module, x, torch.randint(VOCABULARY, (1, seq)), tile).backward()
        module.zero_grad()

    call(8)  # what is loaded once
    before_bytes = ranks.reset_peak_memory(torch.device("cpu"))
    call(config["seq"])
    grown_bytes = ranks.peak_memory(torch.device("cpu")) - before_bytes
    taken_s = []
    for _ in range(REPEATS):
        start_s = time.thread_time()
        call(config["seq"])
        taken_s.append(time.thread_time() - start_s)
    return {"grown_bytes": grown_bytes, "cpu_s": min(taken_s)}


def errors(tile: int) -> list[float]:
    """Relative error (norm) of the weights' gradients against float64.

    Of an MLP and of a head in bfloat16, and of the MLP with float32 weights that autocast casts anew for every tile.
    """
    torch.manual_seed(0)
    seq, width, hidden, vocabulary = SMALL
    layers = Mlp(width, hidden).bfloat16(), nn.Linear(width, vocabulary, bias=False).bfloat16()
    x, grad, targets = *torch.randn(2, 1, seq, width).bfloat16(), torch.randint(vocabulary, (1, seq))

    def gradient(module: nn.Module, dtype: torch.dtype, tile: int, autocast: bool = False) -> Tensor:
        module = copy.deepcopy(module).to(dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False):
            if isinstance(module, Mlp):
                loss = (mlp(module, x.to(dtype), tile) * grad.to(dtype)).sum()
            else:
                loss = head_loss(module, x.to(dtype), targets, tile) / seq
        loss.backward()
        return torch.cat([parameter.grad.double().flatten() for parameter in module.parameters()])

    found = []
    for n, dtype in ((0, torch.bfloat16), (1, torch.bfloat16), (0, torch.float32)):
        wide = gradient(layers[n], torch.float64, seq)
        found.append(((gradient(layers[n], dtype, tile, dtype == torch.float32) - wide).norm() / wide.norm()).item())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.tiles", description=__doc__.splitlines()[0])
    parser.add_argument("--seqs", type=int, nargs="+", default=[4096, 16384], help="tokens")
    parser.add_argument("--tiles", type=int, nargs="+", default=[1024, 256], help="tokens of a tile, beside no tiles")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    arguments = parser.parse_args()
    sizes = {"mlp": f"{WIDTH} x {HIDDEN}", "head": f"{HEAD_WIDTH} x {VOCABULARY:,}"}
    print(f"Forward and backward, {arguments.dtype}, one core:")
    print(f"{'layer':>18} {'tokens':>8} {'tile':>6} {'MiB grown':>10} {'CPU s':>8} {'of untiled':>11}")
    for layer, size in sizes.items():
        for seq in arguments.seqs:
            whole_s = 0.0
            for tile in (None, *arguments.tiles):
                config = {"layer": layer, "seq": seq, "tile": tile, "dtype": arguments.dtype, "device": "cpu"}
                (found,) = ranks.launch(measure, config, 1, 900.0)
                whole_s = whole_s or found["cpu_s"]
                print(
                    f"{layer + ' ' + size:>18} {seq:8,} {tile or 'none':>6} {found['grown_bytes'] / 2**20:10,.0f} "
                    f"{found['cpu_s']:8.2f} {found['cpu_s'] / whole_s:11.2f}",
                    flush=True,
                )
    seq, width, hidden, vocabulary = SMALL
    print(f"Error (norm) of weight gradients in bfloat16 in percent, {seq:,} tokens, width {width}:")
    print(f"{'tiles':>6} {f'mlp ({hidden} hidden)':>20} {f'head ({vocabulary})':>14} {'mlp, cast a tile':>18}")
    for count in (1, 4, 16, 64):
        of_mlp, of_head, cast = (100 * x for x in errors(seq // count))
        print(f"{count:6} {of_mlp:20.2f} {of_head:14.2f} {cast:18.2f}", flush=True)


if __name__ == "__main__":
    main()
