"""Tiled layers give what the layers give, in a tile's memory."""

from __future__ import annotations

import jaxtyping
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import usp
import usp.nn
from tests.oracle import EXACT

BATCH, SEQ, WIDTH, HIDDEN, VOCABULARY = 2, 12, 8, 20, 30
TILES = (1, 4, 5, 100)  # 4 divides the length, 5 does not
HALF = 1.5  # times the error that bfloat16 has without tiles


class Mlp(nn.Module):
    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN)
        self.down, self.dropout = nn.Linear(HIDDEN, WIDTH, bias=False), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.dropout(F.silu(self.gate(x)) * self.up(x)))


class Model(nn.Module):
    """An MLP, a norm, a head and its loss; without a tile, as anybody writes them."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        torch.manual_seed(0)
        self.mlp, self.norm, self.head = Mlp(dropout), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.double()

    def forward(self, x: Tensor, targets: Tensor, tile: int | None) -> Tensor:
        if tile is None:
            logits = self.head(self.norm(x + self.mlp(x)))
            wide = torch.promote_types(logits.dtype, torch.float32)
            return F.cross_entropy(logits.flatten(0, 1).to(wide), targets.flatten(), reduction="sum")
        normal = self.norm(x + usp.nn.tiled_mlp(self.mlp, x, tile=tile))
        return usp.nn.tiled_cross_entropy(normal, self.head, targets, tile=tile)


def batch(seq: int = SEQ) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, seq, WIDTH, generator=generator, dtype=torch.float64)
    targets = torch.randint(VOCABULARY, (BATCH, seq), generator=generator)
    targets[0, : seq // 2] = targets[1, -1] = -100
    return x, targets


def results(dtype: torch.dtype, tile: int | None, wanted: str = "everything") -> dict[str, Tensor]:
    """The loss and every gradient that there is."""
    model = Model().to(dtype)
    x, targets = batch()
    x = x.to(dtype).requires_grad_(wanted in ("everything", "input"))
    model.requires_grad_(wanted != "input")
    if wanted == "all but a head":
        model.head.requires_grad_(False)
    loss = model(x, targets, tile)
    loss.backward()
    leaves = {"x": x, **dict(model.named_parameters())}
    return {"loss": loss.detach()} | {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def error(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected.double()).abs().max() / expected.double().abs().max()).item()


def same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = EXACT[torch.float64]) -> None:
    assert found.keys() == expected.keys()
    for name, x in found.items():
        assert error(x, expected[name]) <= tolerance, name


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16], ids=["float64", "float32", "bfloat16"]
)
def test_tiles_give_what_the_layers_give(dtype, tile):
    found, whole = results(dtype, tile), results(dtype, None)
    assert found["loss"].dtype == torch.promote_types(dtype, torch.float32)
    if dtype != torch.bfloat16:
        same(found, whole, EXACT[dtype])
        return
    expected = results(torch.float64, None)
    own = max(error(whole[name], expected[name]) for name in expected)
    assert found.keys() == expected.keys()
    assert max(error(found[name], expected[name]) for name in expected) <= HALF * own


@pytest.mark.parametrize("wanted", ["input", "weights", "all but a head"])
def test_only_what_is_wanted_has_a_gradient(wanted):
    same(results(torch.float64, 5, wanted), results(torch.float64, None, wanted))


def test_without_gradients():
    model, (x, targets) = Model(), batch()
    with torch.no_grad():
        loss = model(x, targets, 5)
    assert not loss.requires_grad
    assert torch.allclose(loss, model(x, targets, None), rtol=1e-12)


def test_the_gradients_of_several_calls_add_up():
    model, (x, targets) = Model(), batch()
    for part in (slice(0, 7), slice(7, SEQ)):
        model(x[:, part], targets[:, part], 3).backward()
    expected = {name: grad for name, grad in results(torch.float64, None).items() if name not in ("x", "loss")}
    same({name: parameter.grad for name, parameter in model.named_parameters()}, expected)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_ignored_tokens_do_not_count(value):
    model, (x, targets) = Model(), batch()
    ignored = targets == -100
    leaf = x.masked_fill(ignored[..., None], value).requires_grad_()
    found = usp.nn.tiled_cross_entropy(leaf, model.head, targets, tile=5)
    expected = F.cross_entropy(model.head(x[~ignored]), targets[~ignored], reduction="sum")
    leaves = list(model.head.parameters())
    *grads, dx = torch.autograd.grad(found, [*leaves, leaf])
    same(dict(enumerate([found, *grads])), dict(enumerate([expected, *torch.autograd.grad(expected, leaves)])))
    assert (dx[ignored] == 0).all()
    assert (dx[~ignored] != 0).all()


def test_nothing_but_ignored_tokens():
    head, x = Model().head, torch.full((1, SEQ, WIDTH), torch.nan, dtype=torch.float64, requires_grad=True)
    loss = usp.nn.tiled_cross_entropy(x, head, torch.full((1, SEQ), 7), tile=5, ignore_index=7)
    loss.backward()
    assert loss.item() == 0
    assert all((leaf.grad == 0).all() for leaf in (x, *head.parameters()))


def test_dropout_is_the_same_when_a_tile_is_computed_again():
    mlp, (x, _) = Model(dropout=0.5).mlp, batch()
    leaves = [x.requires_grad_(), *mlp.parameters()]
    torch.manual_seed(2)
    found = usp.nn.tiled_mlp(mlp, x, tile=5)
    torch.rand(3)  # another state than forward's
    grads = torch.autograd.grad(found.square().sum(), leaves)
    torch.manual_seed(2)
    expected = torch.cat([mlp(part) for part in x.split(5, 1)], 1)
    wanted = torch.autograd.grad(expected.square().sum(), leaves)
    same(dict(enumerate([found, *grads])), dict(enumerate([expected, *wanted])))


class Largest(TorchDispatchMode):
    """The most elements that one operator returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(x.numel() for x in tree_leaves(result) if isinstance(x, Tensor))])
        return result


def test_nothing_is_as_long_as_the_sequence_and_as_wide_as_hidden_or_vocabulary():
    seq, tile = 400, 10
    model, (x, targets) = Model(), batch(seq)
    x.requires_grad_()

    def elements(tile: int | None) -> tuple[int, int]:
        kept = {}
        with Largest() as largest, saved_tensors_hooks(lambda x: kept.setdefault(x.data_ptr(), x), lambda x: x):
            model(x, targets, tile).backward()
        return largest.numel, sum(x.numel() for x in kept.values())

    rows, weights = BATCH * seq, max(x.numel() for x in model.parameters())
    assert elements(None)[0] == rows * VOCABULARY
    largest, kept = elements(tile)
    assert largest == max(rows * WIDTH, BATCH * tile * VOCABULARY, weights)
    # x, the norm's input, statistics and result, targets; not one activation of a tile.
    assert kept <= rows * (3 * WIDTH + 3) + sum(x.numel() for x in model.parameters())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, x, t: usp.nn.tiled_mlp(m, x, tile=0), r"tile=0 is not a whole number"),
        (lambda m, x, t: usp.nn.tiled_mlp(m, x, tile=2.0), r"tile=2\.0 is not"),
        (lambda m, x, t: usp.nn.tiled_mlp(m, x, tile=True), r"tile=True is not"),
        (
            lambda m, x, t: usp.nn.tiled_mlp(m, x[0], tile=4),
            r"x \(12, 8\) must be \(batch, seq, width\): use x\[None\]",
        ),
        (lambda m, x, t: usp.nn.tiled_mlp(m, [x], tile=4), r"x is a list and not a tensor"),
        (
            lambda m, x, t: usp.nn.tiled_mlp(lambda x: (x, x), x, tile=4),
            r"returned a tuple of Tensor, Tensor for a tile",
        ),
        (lambda m, x, t: usp.nn.tiled_mlp(lambda x: x[:, 1:], x, tile=4), r"returned a tensor \(2, 3, 8\) for a tile"),
        (lambda m, x, t: usp.nn.tiled_cross_entropy(x, m, t, tile=-1), r"tile=-1 is not"),
        (lambda m, x, t: usp.nn.tiled_cross_entropy(x, m, t[:, 1:], tile=4), r"targets \(2, 11\) are not one for each"),
        (
            lambda m, x, t: usp.nn.tiled_cross_entropy(x, m, t.int(), tile=4),
            r"targets are torch\.int32.*use targets\.long",
        ),
        (
            lambda m, x, t: usp.nn.tiled_cross_entropy(x, lambda x: None, t, tile=4),
            r"head returned a NoneType for a tile",
        ),
    ],
)
def test_mistakes_are_named(call, message):
    jaxtyping.config.update("jaxtyping_disable", True)  # as in production: the library's own errors are the subject
    try:
        with pytest.raises(ValueError, match=message):
            call(Model().mlp, *batch())
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


# ---------------------------------------------------------------------------------------------------
# Wrapped, on ranks.


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp", "fsdp, layers too", "fsdp, layers alone"])
def test_as_one_process(ranks, wrapper):
    expected = {name: grad for name, grad in results(torch.float64, None).items() if name not in ("x", "loss")}
    for found in ranks(2)(_accumulated, wrapper):
        same(found, expected)


def _accumulated(wrapper: str) -> dict[str, Tensor]:
    """A rank's half of the tokens in two calls; in the first half of the first row are ignored tokens alone."""
    world, rank = dist.get_world_size(), dist.get_rank()
    model: nn.Module = Model()
    layers = {"mlp": model.mlp, "head": model.head}
    if wrapper == "ddp":
        model = DistributedDataParallel(model)
    for name, layer in (layers | {"": model}).items():
        if name == "" and wrapper.startswith("fsdp") and wrapper != "fsdp, layers alone":
            fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
        elif name and "layers" in wrapper:
            fully_shard(layer, mesh=init_device_mesh("cpu", (world,)))
    x, targets = (part.chunk(world, 1)[rank] for part in batch())
    for row in range(BATCH):
        (world * model(x[row : row + 1], targets[row : row + 1], 2)).backward()
    found = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        if hasattr(grad, "full_tensor"):
            grad = grad.full_tensor()
        elif wrapper != "ddp":  # of nobody's: this rank's share
            dist.all_reduce(grad)
            grad /= world
        found[name.removeprefix("module.")] = grad
    return found
