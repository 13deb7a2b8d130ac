"""docs/gradients.md, kept: a model wrapped by DDP or FSDP2 over data x ring x ulysses learns as one process does."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import usp
from tests import pool
from usp import Mask, Region

DATA, RING, ULYSSES, SEQ, WIDTH, HEADS, KV_HEADS = 2, 2, 2, 13, 24, 6, 2
MASK = Mask(True, documents=[[(0, 5), (5, SEQ)]], regions=[[Region((0, SEQ), (SEQ, SEQ + 2))]])


class Model(nn.Module):
    """Projections with a norm before, sinks and learned joint tokens inside one attention, and a residual."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.o = nn.Linear(WIDTH, 8 * HEADS), nn.Linear(8 * HEADS, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, 8 * KV_HEADS), nn.Linear(WIDTH, 8 * KV_HEADS)
        self.sinks = nn.Parameter(torch.randn(HEADS))
        self.registers = nn.Parameter(torch.randn(1, 2, KV_HEADS, 16))  # keys and values that everybody sees
        self.double()

    def forward(self, x: Tensor, mesh, tokens: usp.Partition) -> Tensor:
        normal = self.norm(x)
        q, k, v = (layer(normal).unflatten(2, (-1, 8)) for layer in (self.q, self.k, self.v))
        joint = usp.Joint(*self.registers.expand(len(x), -1, -1, -1).chunk(2, dim=3), start=SEQ)
        out = usp.hybrid_attention(
            *(q, k, v, mesh, tokens), mask=MASK, joint=joint, sinks=self.sinks, replicate_kv=True
        )
        return x + self.o(out.flatten(2))


def batch() -> tuple[Tensor, Tensor]:
    """A sample for each data-parallel replica, and what they should become; some tokens are not counted."""
    generator = torch.Generator().manual_seed(1)
    x, wanted = (torch.randn(DATA, SEQ, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    wanted[1, :7] = torch.nan  # ignored
    return x, wanted


def loss_of(out: Tensor, wanted: Tensor, count: int) -> Tensor:
    """Summed over the tokens that count, over the count of the whole batch."""
    ignored = wanted.isnan()
    return torch.where(ignored, 0.0, (out - wanted.nan_to_num()).square()).sum() / count


def alone() -> dict[str, Tensor]:
    model = Model()
    x, wanted = batch()
    count = int((~wanted.isnan()[..., 0]).sum())
    loss_of(model(x, None, usp.Partition(SEQ, "contiguous")), wanted, count).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp", "fsdp, divided by one"])
def test_as_one_process(ranks, wrapper):
    expected = alone()
    for found in ranks(DATA * RING * ULYSSES)(_gradients, wrapper):
        assert found.keys() == expected.keys()
        for name, grad in found.items():
            assert torch.allclose(grad, expected[name], rtol=1e-10, atol=1e-12), name


def _gradients(wrapper: str) -> dict[str, Tensor]:
    mesh = pool.mesh(RING, ULYSSES, DATA)
    world, replica = dist.get_world_size(), mesh.get_local_rank("data")
    tokens = usp.partition(SEQ, mesh, "zigzag")
    x, wanted = batch()
    count = int((~wanted.isnan()[..., 0]).sum())
    shard = usp.shard(x[replica : replica + 1], mesh, tokens)
    target = usp.shard(wanted[replica : replica + 1], mesh, tokens, fill=torch.nan)
    model: nn.Module = Model()
    if wrapper == "ddp":
        model = DistributedDataParallel(model)
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    factor = world
    if wrapper == "fsdp, divided by one":
        model.set_gradient_divide_factor(1.0)
        factor = 1
    (factor * loss_of(model(shard, mesh, tokens), target, count)).backward()
    found = {name.removeprefix("module."): parameter.grad for name, parameter in model.named_parameters()}
    return {name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad for name, grad in found.items()}
