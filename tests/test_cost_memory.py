"""What the memory model says is what tensors take when the library runs."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import usp
import usp.nn
from tests import pool
from usp import Mask, comm, cost, merging
from usp.cost.memory import CAUSAL, Memory, attention_memory, largest_batch, memory
from usp.cost.workload import Model, Plan, Workload
from usp.inference import KVCache, decode_attention, prefill_attention
from usp.kernels import sdpa

cost_memory = sys.modules["usp.cost.memory"]  # where the name in usp.cost is the function


class Live(TorchDispatchMode):
    """Bytes of all tensors that operators made and that are alive, and the most there were after any operator.

    What an operator takes for itself and gives back is not seen: a kernel's scratch, a copy to add other dtypes.
    """

    def __init__(self):
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak_bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        if function.namespace == "usp":  # of which the operators inside are to be seen
            with self:
                return function.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **(kwargs or {}))
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in given:
                storage = x.untyped_storage()
                self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        if self.bytes > self.peak_bytes:
            time.sleep(0.002)  # gloo's threads let go of a message a little after it is there
            self.peak_bytes = max(self.peak_bytes, self.bytes)
        return result

    @property
    def bytes(self) -> int:
        self.storages = {key: pair for key, pair in self.storages.items() if not pair[0].expired()}
        return sum(size for _, size in self.storages.values())


@dataclass(frozen=True)
class Call:
    """One attention call, forward and, if it is differentiated, backward."""

    ring: int = 1
    ulysses: int = 1
    layout: str = "zigzag"
    seq: int = 1024
    mask: Mask = CAUSAL
    heads: int = 8
    kv_heads: int = 2
    replicate_kv: bool = False
    exchange: str = "ring"
    dtype: torch.dtype = torch.bfloat16
    batch: int = 1
    head_dim: int = 32

    @property
    def plan(self) -> Plan:
        return Plan(self.ring, self.ulysses, layout=self.layout, replicate_kv=self.replicate_kv, exchange=self.exchange)

    @property
    def workload(self) -> Workload:
        return Workload(
            *(self.batch, self.seq, self.heads, self.kv_heads, self.head_dim, self.mask),
            element_bytes=self.dtype.itemsize,
        )


def live_bytes(call: Call, train: bool) -> int:
    """On a rank: the most bytes that one call has beside the q, k and v that it is given."""
    mesh = pool.mesh(call.ring, call.ulysses) if call.ring * call.ulysses > 1 else None
    tokens = call.plan.tokens(call.seq, call.mask)
    shape = call.batch, tokens.seq_local
    q, k, v = (
        torch.randn(*shape, heads, call.head_dim).to(call.dtype).requires_grad_(train)
        for heads in (call.heads, call.kv_heads, call.kv_heads)
    )
    weight = torch.randn(*shape, call.heads, call.head_dim).to(call.dtype)
    # CPU kernels do a window's far edge by reversing copies, which kernels with windows do not: see sdpa.py.
    with mock.patch.object(sdpa, "_in_order", lambda x, dim, low: x), Live() as live:
        out = usp.hybrid_attention(
            q, k, v, mesh, tokens, mask=call.mask, replicate_kv=call.replicate_kv, exchange=call.exchange
        )
        if train:
            live.peak_bytes = 0  # of backward alone
            total = (out * weight).sum()
            del out
            torch.autograd.grad(total, (q, k, v))
    return live.peak_bytes


class Norm(torch.autograd.Function):
    """As large as a fused one: it makes one tensor and keeps its input."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, dout):
        return dout


SMALL = Model("small", 3, 64, 8, 4, 16, 192, 512)  # most in its head or its attention
WIDE = Model("wide", 3, 64, 8, 4, 8, 1024, 64)  # in its MLP
NARROW = Model("narrow", 3, 256, 2, 1, 8, 64, 64)  # in its residuals
UNGATED = replace(WIDE, name="ungated", gated=False)


@dataclass(frozen=True)
class Layers:
    """A model whose training and prefill are run, weights beside."""

    plan: Plan = Plan()  # noqa: RUF009
    model: Model = SMALL
    batch: int = 1
    seq: int = 512
    mask: Mask = CAUSAL

    @property
    def name(self) -> str:
        plan = self.plan
        tile = "" if plan.tile_mlp is None else f" tile={plan.tile_mlp}"
        return f"{self.model.name} {plan.ring}x{plan.ulysses} {plan.exchange}{tile}{' checkpoint' * plan.checkpoint}"


def layers_bytes(run: Layers, phase: str) -> int:
    """On a rank: the most bytes of what is neither weights, their gradients nor caches."""
    model, plan, dtype = run.model, run.plan, torch.bfloat16
    mesh = pool.mesh(plan.ring, plan.ulysses) if plan.ring * plan.ulysses > 1 else None
    tokens = plan.tokens(run.seq, run.mask)
    shapes = {
        "q": (model.heads * model.head_dim, model.hidden),
        "k": (model.kv_heads * model.head_dim, model.hidden),
        "v": (model.kv_heads * model.head_dim, model.hidden),
        "o": (model.hidden, model.heads * model.head_dim),
        "gate": (model.intermediate, model.hidden),
        "up": (model.intermediate, model.hidden),
        "down": (model.hidden, model.intermediate),
    }

    def weight(*shape):
        x = (torch.randn(*shape) / 16).to(dtype).requires_grad_(phase == "train")
        x.grad = torch.zeros_like(x) if phase == "train" else None
        return x

    weights = [{name: weight(*shape) for name, shape in shapes.items()} for _ in range(model.layers)]
    head = weight(model.vocab, model.hidden)
    caches = [
        KVCache(mesh, batch=run.batch, capacity=run.seq, kv_heads=model.kv_heads, head_dim=model.head_dim, dtype=dtype)
        for _ in weights
    ]
    targets = torch.zeros(run.batch, tokens.seq_local, dtype=torch.int64)
    start = torch.randn(run.batch, tokens.seq_local, model.hidden).to(dtype).requires_grad_(phase == "train")

    def attention(q, k, v, number):
        if phase == "train":
            return usp.hybrid_attention(q, k, v, mesh, tokens, mask=run.mask, exchange=plan.exchange)
        algorithm = "all_gather" if plan.exchange == "all_gather" else "pass_kv"
        return prefill_attention(q, k, v, mesh, tokens, caches[number], mask=run.mask, algorithm=algorithm)[0]

    def layer(x, number):
        w = weights[number]
        normed = Norm.apply(x)
        q, k, v = (F.linear(normed, w[name]).unflatten(-1, (-1, model.head_dim)) for name in "qkv")
        out = attention(q, k, v, number)
        del q, k, v
        x = x + F.linear(out.flatten(2), w["o"])
        del out
        normed = Norm.apply(x)

        def mlp(x):
            if not model.gated:
                return F.linear(F.silu(F.linear(x, w["up"])), w["down"])
            return F.linear(F.silu(F.linear(x, w["gate"])) * F.linear(x, w["up"]), w["down"])

        return x + (usp.nn.tiled_mlp(mlp, normed, tile=plan.tile_mlp) if plan.tile_mlp else mlp(normed))

    def loss(x):
        return usp.nn.tiled_cross_entropy(x, lambda x: F.linear(x, head), targets, tile=plan.tile_mlp or run.seq)

    with Live() as live, torch.set_grad_enabled(phase == "train"):
        x = start.clone()
        for number in range(model.layers):
            x = checkpoint(layer, x, number, use_reentrant=False) if plan.checkpoint else layer(x, number)
        x = Norm.apply(x)
        if phase == "train":
            total = loss(x)
            del x
            total.backward()
        else:
            F.linear(x[:, -1:], head).float()
    return live.peak_bytes


# ---------------------------------------------------------------------------------------------------


FULL, WINDOW, PADDED = Mask(causal=False), Mask(causal=True, window=300), Mask.padded([900, 400], 1024, causal=True)
CALLS = [
    Call(),
    Call(ulysses=2),
    Call(ring=2),
    Call(ring=2, ulysses=2),
    Call(ring=4),
    Call(ring=4, mask=FULL, seq=1001),
    Call(ring=4, layout="contiguous"),
    Call(ring=4, layout="striped"),
    Call(ring=4, layout="contiguous", mask=WINDOW),
    Call(ring=2, layout="balanced", mask=Mask.packed([700, 324], causal=True)),
    Call(ring=2, ulysses=2, mask=PADDED, batch=2),
    Call(ring=2, ulysses=2, dtype=torch.float32, batch=2),
    Call(ring=2, ulysses=2, exchange="all_gather"),
    Call(ring=4, exchange="all_gather", seq=1000),
    Call(ulysses=2, heads=9, kv_heads=3),
    Call(ulysses=4, replicate_kv=True),
    Call(ulysses=2, heads=9, kv_heads=3, replicate_kv=True),
    Call(ulysses=2, heads=9, kv_heads=3, replicate_kv=True, dtype=torch.float32),
    Call(ring=2, ulysses=2, heads=9, kv_heads=3, replicate_kv=True),
]


def on_ranks(ranks, function, plan: Plan, *args, predicted_bytes: float) -> int:
    """The most of any rank; of three times, if it is too much: a busy machine may keep gloo's threads longer."""
    for _ in range(3):
        found = max(ranks(plan.world)(function, *args)) if plan.world > 1 else function(*args)
        if found <= predicted_bytes + 16:
            break
    return found


@pytest.mark.parametrize(
    "call", CALLS, ids=lambda x: f"{x.ring}x{x.ulysses} {x.layout} {x.exchange} {x.heads}/{x.kv_heads}"
)
def test_attention_calls(ranks, call):
    """Every tensor is accounted for, forward and backward; in backward the loss is one more number."""
    for train in (False, True):
        predicted_bytes = attention_memory(call.workload, call.plan, train=train).total_bytes
        measured_bytes = on_ranks(ranks, live_bytes, call.plan, call, train, predicted_bytes=predicted_bytes)
        assert measured_bytes - 16 * train <= predicted_bytes <= measured_bytes


LAYERS = [
    (Layers(), 0.001),
    (Layers(Plan(2, 2)), 0.001),
    (Layers(Plan(2, 2, exchange="all_gather"), batch=2), 0.001),
    (Layers(Plan(checkpoint=True)), 0.001),
    (Layers(Plan(2, 2, tile_mlp=64)), 0.001),
    (Layers(Plan(2, 2, tile_mlp=64, checkpoint=True), batch=2), 0.001),
    (Layers(model=WIDE), 0.001),
    (Layers(Plan(2, 2, checkpoint=True), WIDE), 0.001),
    (Layers(model=UNGATED), 0.001),
    (Layers(model=NARROW), 0.001),
    (Layers(Plan(tile_mlp=128), WIDE), 0.03),  # of the last tile's result and gradient, one is not there yet
    (Layers(Plan(tile_mlp=150, checkpoint=True), WIDE, batch=2), 0.03),
    (Layers(Plan(tile_mlp=128), UNGATED), 0.03),
]


@pytest.mark.parametrize("phase", ["prefill", "train"])
@pytest.mark.parametrize(("run", "tolerance"), LAYERS, ids=lambda x: x.name if isinstance(x, Layers) else "")
def test_layers(ranks, run, tolerance, phase):
    """The activations of a model, as `memory` describes it."""
    found = memory(run.model, run.plan, run.seq, run.batch, phase)
    beside = ("weights", "gradients", "optimizer", "KV cache", "spare slots")
    predicted_bytes = found.total_bytes - sum(found.always.get(name, 0) for name in beside)
    most_bytes = predicted_bytes / (1 - tolerance)
    measured_bytes = on_ranks(ranks, layers_bytes, run.plan, run, phase, predicted_bytes=most_bytes)
    assert predicted_bytes == pytest.approx(measured_bytes, rel=tolerance)
    peaks = {"small": ("ring", "head backward", "ring backward"), "narrow": ("MLP", "head backward")}
    assert found.peak in peaks.get(run.model.name, ("MLP", "MLP backward"))


def messages(run: Layers) -> list[tuple[int, int]]:
    """On a rank: bytes given to and taken from each all-to-all of attention and its backward, in order."""
    sizes = []
    exchange = comm.all_to_all

    def followed(x, *args):
        out = exchange(x, *args)
        sizes.append((x.nbytes, out.nbytes))
        return out

    mesh, tokens = pool.mesh(run.plan.ring, run.plan.ulysses), run.plan.tokens(run.seq, run.mask)
    q, k, v = (
        torch.randn(run.batch, tokens.seq_local, heads, run.model.head_dim, dtype=torch.bfloat16, requires_grad=True)
        for heads in (run.model.heads, run.model.kv_heads, run.model.kv_heads)
    )
    with mock.patch.object(comm, "all_to_all", followed):
        usp.hybrid_attention(q, k, v, mesh, tokens, mask=run.mask, replicate_kv=run.plan.replicate_kv).sum().backward()
    return sizes


@pytest.mark.parametrize("plan", [Plan(1, 2), Plan(2, 2), Plan(1, 4, replicate_kv=True), Plan(1, 2, layout="striped")])
def test_all_to_all_staging(ranks, plan):
    run = Layers(plan, Model("", 1, 64, 8, 2, 16, 64, 64), batch=2, seq=200)
    workload = run.model.attention(run.batch, run.seq, CAUSAL)
    moments = attention_memory(workload, plan).moments | attention_memory(workload, plan, train=True).moments
    names = ["to heads", "to sequence", "dout to heads", "gradients to sequence"]
    for found in ranks(plan.world)(messages, run):
        assert len(found) == len(names)
        for name, (sent, arrived) in zip(names, found, strict=True):
            assert moments[name]["all-to-all, arrived"] == arrived
            assert moments[name]["all-to-all, sent or cut"] >= sent
            if not plan.replicate_kv:
                assert moments[name]["all-to-all, sent or cut"] == sent


# ---------------------------------------------------------------------------------------------------
# Caches.


def cache_bytes(model: Model, plan: Plan, capacity: int, batch: int, block: int) -> int:
    """On a rank: what a layer's cache takes there; positions are on the host."""
    cache = KVCache(
        pool.mesh(plan.ring, plan.ulysses) if plan.world > 1 else None,
        batch=batch,
        capacity=capacity,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        dtype=torch.bfloat16,
        heads=model.heads,
        replicate_kv=plan.replicate_kv,
        block=block,
    )
    return cache.k.untyped_storage().nbytes() + cache.v.untyped_storage().nbytes()


MESHES = [Plan(), Plan(4, 1), Plan(1, 2), Plan(2, 2), Plan(1, 4, replicate_kv=True), Plan(2, 2, replicate_kv=True)]


@pytest.mark.parametrize("plan", MESHES, ids=lambda x: f"{x.ring}x{x.ulysses}{' replicated' * x.replicate_kv}")
@pytest.mark.parametrize(("capacity", "batch", "block"), [(1, 1, 16), (50, 3, 16), (1001, 2, 4), (4096, 1, 1)])
def test_caches(ranks, plan, capacity, batch, block):
    """Exactly what a cache allocates on the rank with most of it, in all layers."""
    model = Model("nine heads", 5, 64, 9, 3, 8, 64, 64)
    args = model, plan, capacity, batch, block
    measured_bytes = max(ranks(plan.world)(cache_bytes, *args)) if plan.world > 1 else cache_bytes(*args)
    for phase in ("prefill", "decode"):
        found = memory(model, plan, capacity, batch, phase, block=block).always
        assert found["KV cache"] + found.get("spare slots", 0) == model.layers * measured_bytes
    assert "KV cache" not in memory(model, plan, capacity, batch, "train").always


def decode_bytes(model: Model, plan: Plan, batch: int) -> int:
    """On a rank: the most bytes of a step's attention, beside q, k, v and the cache."""
    mesh = pool.mesh(plan.ring, plan.ulysses) if plan.world > 1 else None
    sizes = {"kv_heads": model.kv_heads, "head_dim": model.head_dim, "dtype": torch.bfloat16}
    cache = KVCache(mesh, batch=batch, capacity=64, **sizes)
    k, v = torch.randn(2, batch, 32, model.kv_heads, model.head_dim).bfloat16()
    cache.append(k, v)
    q = torch.randn(batch, 1, model.heads, model.head_dim).bfloat16()
    with Live() as live:
        decode_attention(q, k[:, :1], v[:, :1], mesh, cache, mask=CAUSAL, algorithm="helix")
    return live.peak_bytes


@pytest.mark.parametrize("plan", [Plan(), Plan(2, 2), Plan(4, 1)])
def test_decoding_takes_little(ranks, plan):
    """A step's attention takes about what is predicted; a few small tensors on the way to all ranks are not counted."""
    model, batch = replace(SMALL, head_dim=128), 16
    moment = memory(model, plan, 64, batch, "decode").moments["attention"]
    own = ("residual", "its norm", "q, k, v")
    predicted_bytes = sum(size_bytes for name, size_bytes in moment.items() if name not in own)
    most_bytes = predicted_bytes / 0.85
    measured_bytes = on_ranks(ranks, decode_bytes, plan, model, plan, batch, predicted_bytes=most_bytes)
    assert predicted_bytes == pytest.approx(measured_bytes, rel=0.15)


# ---------------------------------------------------------------------------------------------------
# Arithmetic.


def test_a_million_tokens_of_llama_70b():
    """Exact, by hand: 80 layers of 8192, 64 query and 8 KV heads of 128, MLPs of 28672; GB of 1e9 bytes."""
    model, seq = cost.model("llama3_70b"), 10**6
    ring, ulysses = (memory(model, Plan(*mesh, weights="fsdp"), seq, 1, "prefill") for mesh in ((8, 1), (1, 8)))
    assert model.params == 70_553_706_496
    assert model.kv_bytes(seq) == 327_680_000_000
    for found in (ring, ulysses):
        assert found.always["weights"] == 2 * 70_553_706_496 // 8
        assert found.always["KV cache"] == 40_960_000_000
        moments = found.moments
        assert moments["ring"]["q, k, v"] == 2_560_000_000
        assert moments["ring"]["residual"] == 2_048_000_000
        assert moments["MLP"]["inside of the MLP"] == 21_504_000_000 == 3 * 125_000 * 28672 * 2
        norms_bytes = 2 * 8192 * 2
        assert moments["MLP"]["gathered layers"] == 2 * (1_711_276_032 + norms_bytes)
    assert ulysses.moments["to heads"]["all-to-all, arrived"] == 2_560_000_000
    assert "spare slots" not in ulysses.always
    assert ring.moments["ring"]["keys and values of other ranks"] == 2 * 512_000_000  # one is sent, one arrives
    assert "to heads" not in ring.moments
    single = memory(model, Plan(8, 1, weights="fsdp"), seq, 1, "prefill", prefetch=False).moments["MLP"]
    assert single["gathered layers"] == 1_711_276_032 + norms_bytes
    large = memory(model, Plan(4, 8, weights="fsdp"), seq, 1, "prefill")
    assert large.always["KV cache"] == 10_240_000_000
    assert large.moments["ring"]["q, k, v"] == 640_000_000


def test_an_mlp_that_is_not_tiled_does_not_fit():
    """125,000 tokens a rank: 21.5 GB of an MLP on 80 GB that hold 17.6 GB of weights and 41 GB of keys and values."""
    model, plan = cost.model("llama3_70b"), Plan(8, 1, weights="fsdp")
    whole, tiled = (memory(model, x, 10**6, 1, "prefill") for x in (plan, replace(plan, tile_mlp=4096)))
    assert whole.peak == "MLP"
    assert whole.total_bytes > 80e9
    assert tiled.moments["MLP"]["inside of a tile, or all results"] == 125_000 * 8192 * 2
    assert tiled.total_bytes < whole.total_bytes - 9e9


def test_largest_batch():
    """Five sequences of a million tokens with tensor=8 x ring=4: (80 - 19.6) / 10.24 GB, and as all batches tried."""
    model, plan = cost.model("llama3_70b"), Plan(ring=4, tensor=8, tile_mlp=4096)
    options = {"reserved_bytes": 2 * 10**9}
    assert largest_batch(model, plan, 80e9, 10**6, "decode", **options) == 5
    assert largest_batch(model, plan, 19e9, 10**6, "decode", **options) == 0
    assert largest_batch(model, plan, 80e9, 1000, "decode", limit=7) == 7
    for phase in ("prefill", "decode", "train"):
        for plan in (Plan(2, 2), Plan(2, 2, weights="fsdp", tile_mlp=64, checkpoint=True)):
            totals = [memory(SMALL, plan, 512, batch, phase).total_bytes for batch in range(1, 40)]
            assert totals == sorted(totals)
            for memory_bytes in (totals[0] - 1, totals[0], totals[6] + 1, totals[20] - 1):
                fitting = sum(total <= memory_bytes for total in totals)
                assert largest_batch(SMALL, plan, memory_bytes, 512, phase) == fitting


def test_weights_and_what_training_adds():
    """Whole or sharded over all ranks; tensor parallel shards matrices, embedding and head, not norms."""
    model, norms = cost.model("llama3_8b"), (2 * 32 + 1) * 4096
    train = {
        plan: memory(model, plan, 4096, 1, "train")
        for plan in (Plan(2, 2), Plan(2, 2, 2, weights="fsdp"), Plan(2, 2, tensor=4))
    }
    whole, fsdp, tensor = (found.always for found in train.values())
    assert whole["weights"] == whole["gradients"] == 2 * model.params
    assert whole["optimizer"] == 12 * model.params
    assert fsdp["weights"] == fsdp["gradients"] == 2 * model.params // 8
    assert fsdp["optimizer"] == 12 * model.params // 8
    assert tensor["weights"] == 2 * ((model.params - norms) // 4 + norms)
    assert memory(model, Plan(), 4096, 1, "train", element_bytes=4).always["optimizer"] == 8 * model.params
    assert "optimizer" not in memory(model, Plan(), 4096, 1, "prefill").always
    gathered = list(train.values())[1].moments
    assert gathered["MLP backward"]["gathered layers"] == 2 * 2 * (model.layer_params + 2 * 4096)
    assert gathered["MLP backward"]["gradient of the gathered layer"] == 2 * (model.layer_params + 2 * 4096)
    assert gathered["head backward"]["gathered head"] == 2 * model.vocab * 4096
    tied = cost.model("smollm2_135m")
    assert memory(tied, Plan(), 64, 1, "decode").always["weights"] == 2 * tied.params
    more = memory(model, Plan(tensor=16), 64, 1, "decode").always  # KV heads that two tensor ranks have
    assert more["KV cache"] == 32 * 64 * 2 * 128 * 2
    assert more["weights"] > 2 * model.params // 16


def test_windows_of_layers():
    """A cache keeps what windows hide; of the layers' attention, that with most counts."""
    plan = Plan(4, 1, layout="contiguous", tile_mlp=16)
    mixed, narrow = (replace(SMALL, windows=windows) for windows in ((64, None, 64), (64, 64, 64)))
    whole, some, none = (memory(x, plan, 4096, 1, "prefill") for x in (SMALL, mixed, narrow))
    assert whole == some
    assert whole.always == none.always
    assert none.moments["ring"]["keys and values of other ranks"] == 2 * 63 * 4 * 2 * 16 * 2
    assert whole.moments["ring"]["keys and values of other ranks"] == 2 * 1024 * 4 * 2 * 16 * 2


def test_units():
    found = Memory({"a": 10**9, "nothing": 0}, {"x": {"b": 1}, "y": {"c": 10**9}})
    assert (found.peak, found.parts, found.total_bytes) == ("y", {"a": 10**9, "c": 10**9}, 2 * 10**9)
    assert (found.gb, found.gib) == (2.0, 2 * 10**9 / 2**30)
    assert memory(SMALL, Plan(), 64, 1, "decode", reserved_bytes=7).parts["reserved"] == 7


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"phase": "serve"}, "phase='serve' is not one of"),
        ({"batch": 0}, "batch=0"),
        ({"seq": 0}, "seq=0"),
        ({"reserved_bytes": -1}, "reserved_bytes=-1"),
        ({"plan": Plan(tensor=3)}, "tensor=3 does not go with 8 query and 4 KV heads"),
        ({"plan": Plan(ulysses=8)}, "the largest Ulysses degree is 4"),
        ({"plan": Plan(ulysses=2, tensor=4)}, "the largest Ulysses degree is 1"),
    ],
)
def test_refusals(change, message):
    with pytest.raises(ValueError, match=message):
        memory(**{"model": SMALL, "plan": Plan(), "seq": 64, "batch": 1, "phase": "prefill"} | change)


def test_a_few_ranks_of_a_large_ring_tell(monkeypatch):
    """Under one band, all ranks have no moment with more than those that are looked at."""

    def totals() -> list[int]:
        for cached in (cost_memory._trip, cost_memory._programs):
            cached.cache_clear()
        return [
            attention_memory(Workload(1, seq, 2, 1, 8, mask), Plan(ring, layout=layout), train=train).total_bytes
            for ring, seq in ((11, 400), (12, 12 * 8), (17, 1000), (24, 24 * 16 - 7))
            for layout in ("contiguous", "zigzag", "striped")
            for mask in (Mask(causal=True), Mask(causal=False), Mask(True, 30), Mask(False, 100), Mask(True, 300))
            for train in (False, True)
        ]

    some = totals()
    monkeypatch.setattr(cost_memory, "_ENDS", 100)
    assert totals() == some


def test_what_is_widened_at_once():
    assert merging.TILE == cost_memory.WIDENED
