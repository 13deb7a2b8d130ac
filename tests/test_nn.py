"""Tiled layers give what the layers give, in a tile's memory; a checkpointed block does not repeat its attention."""

from __future__ import annotations

from functools import partial

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
from torch.utils.checkpoint import checkpoint

import usp
import usp.nn
from tests import pool
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


HEADS, KV_HEADS, HEAD_DIM, TOKENS = 8, 4, 4, 16


class Block(nn.Module):
    """Attention with sinks, and a tiled MLP."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.o = nn.Linear(WIDTH, HEADS * HEAD_DIM), nn.Linear(HEADS * HEAD_DIM, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, KV_HEADS * HEAD_DIM), nn.Linear(WIDTH, KV_HEADS * HEAD_DIM)
        self.sinks, self.mlp, self.norm = nn.Parameter(torch.randn(HEADS)), Mlp(), nn.LayerNorm(WIDTH)
        self.double()

    def forward(self, x: Tensor, mesh, tokens: usp.Partition, sinks: bool) -> Tensor:
        q, k, v = (layer(x).unflatten(2, (-1, HEAD_DIM)) for layer in (self.q, self.k, self.v))
        mask = usp.Mask(causal=True)
        out = usp.hybrid_attention(q, k, v, mesh, tokens, mask=mask, sinks=self.sinks if sinks else None)
        x = x + self.o(out.flatten(2))
        return x + usp.nn.tiled_mlp(self.mlp, self.norm(x), tile=3)


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (1, 2), (2, 2), (4, 1), (1, 4)])
def test_a_checkpointed_block_sends_only_what_goes_to_heads_again(ranks, ring, ulysses, sinks):
    for plain, kept, dropped in ranks(ring * ulysses)(_checkpointed, ring, ulysses, sinks):
        same(kept["grads"], plain["grads"], 0.0)
        same(dropped["grads"], plain["grads"], 0.0)
        assert kept["forward"] == plain["forward"] == dropped["forward"]
        again = {"bytes": {"control": plain["forward"]["bytes"]["control"]}, "messages": {}, "kernels": {}}
        again["messages"]["control"] = plain["forward"]["messages"]["control"]
        if ulysses > 1:
            heads_away = (HEADS + 2 * KV_HEADS) * (ulysses - 1) // ulysses
            again["bytes"]["all_to_all"] = BATCH * TOKENS // (ring * ulysses) * heads_away * HEAD_DIM * 8
            again["messages"]["all_to_all"] = 1
        for what, more in again.items():
            names = plain["backward"][what].keys() | more.keys()
            expected = {name: plain["backward"][what].get(name, 0) + more.get(name, 0) for name in names}
            assert kept["backward"][what] == expected
        assert sum(dropped["backward"]["kernels"].values()) > sum(kept["backward"]["kernels"].values())


def _checkpointed(ring: int, ulysses: int, sinks: bool) -> list[dict]:
    """What a rank sent and computed, and its gradients: without checkpointing, with attention kept, and dropped."""
    mesh = pool.mesh(ring, ulysses)
    tokens = usp.partition(TOKENS, mesh, "zigzag")
    x = usp.shard(batch(TOKENS)[0], mesh, tokens)
    keeping = partial(checkpoint, use_reentrant=False, context_fn=usp.nn.keep_attention)
    found = []
    for how in (lambda block, *args: block(*args), keeping, partial(checkpoint, use_reentrant=False)):
        block, leaf = Block(), x.clone().requires_grad_()
        with usp.measure_traffic() as forward:
            out = how(block, leaf, mesh, tokens, sinks)
        with usp.measure_traffic() as backward:
            out.square().sum().backward()
        grads = {name: p.grad for name, p in block.named_parameters() if p.grad is not None} | {"x": leaf.grad}
        sent = {"forward": forward, "backward": backward}
        counted = {
            part: {what: dict(getattr(traffic, what)) for what in ("bytes", "messages", "kernels")}
            for part, traffic in sent.items()
        }
        found.append(counted | {"grads": grads})
    return found


@pytest.mark.parametrize("outside", ["checkpoint", "fsdp"])
def test_a_checkpointed_block_of_fsdp(ranks, outside):
    for found, expected, counted in ranks(4)(_sharded, outside):
        same(found, expected)
        (ring, kernels), (plain_ring, plain_kernels) = counted
        assert (ring, kernels) == (plain_ring, plain_kernels)


class Checkpointed(nn.Module):
    def __init__(self, block: nn.Module):
        super().__init__()
        self.block = block

    def forward(self, *args) -> Tensor:
        return checkpoint(self.block, *args, use_reentrant=False, context_fn=usp.nn.keep_attention)


def _sharded(outside: str) -> tuple[dict[str, Tensor], dict[str, Tensor], list[tuple]]:
    """Gradients summed over ranks of FSDP2 and of the plain block, and each one's hops and kernel calls in backward."""
    mesh = pool.mesh(2, 2)
    tokens = usp.partition(TOKENS, mesh, "zigzag")
    x, flat = usp.shard(batch(TOKENS)[0], mesh, tokens), init_device_mesh("cpu", (4,))
    grads, counted = [], []
    for wrapped in (True, False):
        block = model = Block()
        if wrapped:
            model = Checkpointed(block)
            fully_shard(block.mlp, mesh=flat).set_gradient_divide_factor(1.0)
            fully_shard(block if outside == "checkpoint" else model, mesh=flat).set_gradient_divide_factor(1.0)
        out = model(x, mesh, tokens, True)
        with usp.measure_traffic() as traffic:
            out.square().sum().backward()
        counted.append((traffic.bytes["ring"], sum(traffic.kernels.values())))
        grads.append({name: p.grad for name, p in block.named_parameters()})
    for grad in grads[1].values():
        dist.all_reduce(grad)
    return {name: grad.full_tensor() for name, grad in grads[0].items()}, grads[1], counted
