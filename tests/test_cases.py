"""What users of other libraries met, as calls of this one: cases.json, a row a failure, told in our own words.

python -m tests.test_cases          every row and its outcome
python -m tests.test_cases F029     some of them

A row is right if the results equal the definition in float64 within the row's tolerance, or if every rank refuses
the call by an error that names what the row lists, before any payload, and the next call on the same groups is right.
Rows of what is not built yet say what they wait for, and must be refused until then.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import itertools
import json
import math
import random
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import jaxtyping
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import usp
import usp.cost
import usp.inference
from experiments.model import tokens_of
from tests import compiled, hybrid, inference, oracle, pool
from usp import Mask, Partition, comm, kernels
from usp.blocks import blocks
from usp.inference.volumes import DECODE, PREFILL
from usp.kernels.scores import Terms
from usp.ledger import OWNERS, Ledger
from usp.mesh import axes

ROWS = json.loads(Path(__file__).with_name("cases.json").read_text())
DEFAULTS = {"batch": 1, "heads": 4, "head_dim": 8, "dtype": "float32", "start": 0, "options": {}}
TOLERANCE = {"out": 1e-5, "lse": 1e-5, "grad": 5e-5}  # absolute, and relative to each value
LONG = 1000  # tokens of which the reference is a matter of seconds: one rank makes it, for one head
WHERE = {"out": 1, "lse": 2, "dq": 1, "dk": 1, "dv": 1}  # dim of the tokens


def _shown(row: dict):
    return pytest.param(row, id=f"{row['id']} {row['what']}", marks=[pytest.mark.hf] * ("needs" in row))


@pytest.mark.parametrize("row", [_shown(row) for row in ROWS])
def test_case(ranks, row):
    assert outcome(ranks, row)


def test_rows_are_complete():
    """Every row says where it was met, and has an operation; ids name one failure each."""
    for row in ROWS:
        assert {"id", "source", "kind", "what", "op"} <= row.keys()
        assert row["op"] in OPERATIONS
        assert set(row.get("checks", ())) <= CHECKS.keys()
        makers = row.get("mask", {}).keys() - {"causal", "window"}
        assert not makers or "documents" in row, "what a constructor makes is held to documents that are written out"


def outcome(ranks, row: dict) -> str:
    """What happened, in words; an AssertionError if it was not right."""
    if row["op"] != "attention":
        return OPERATIONS[row["op"]](ranks, row)
    shown = []
    for variant in variants(row):
        world = variant["mesh"][0] * variant["mesh"][1] * variant.get("inner", 1)
        (answer, *_) = on_ranks(ranks(world), attention, variant)
        shown.append(answer)
    worst = {name: max(x[name] for x in shown) for name in shown[0] if name != "refused"}
    text = "equal to float64" + (f" in {len(shown)} variants" if len(shown) > 1 else "")
    text += ", worst error " + ", ".join(f"{name} {error:.0e}" for name, error in worst.items()) if worst else ""
    if "refused" in shown[0]:
        otherwise = f"with {row['without']}" if "without" in row else "sharded by the library"
        text = f"refused: {shown[0]['refused']}" + (f"; {otherwise}: {text}" if worst else "")
    return text


def variants(row: dict) -> list[dict]:
    """The row itself and its variants, with defaults filled in."""
    changes = [{}, *row.get("variants", ())]
    if sweep := row.get("sweep"):
        changes = [dict(zip(sweep, values, strict=True)) for values in itertools.product(*sweep.values())]
    found = []
    for change in changes:
        call = DEFAULTS | row | change
        found.append(call | {"kv_heads": call.get("kv_heads", call["heads"])})
    return found


def on_ranks(pool, function: Callable, *args) -> list:
    return pool(_as_a_user, function, args)


def _as_a_user(function: Callable, args: tuple):
    """On a rank, without the type checks of the tests: the library's own errors are the subject."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        return function(*args)
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


# ---------------------------------------------------------------------------------------------------
# One call.


def mask_of(row: dict) -> Mask:
    """Made the way the row gives it; of documents by their lengths, if it gives nothing else."""
    given = row["mask"]
    kind = {name: given[name] for name in ("causal", "window") if name in given}
    makers = {
        "cu_seqlens": Mask.from_cu_seqlens,
        "position_ids": Mask.from_position_ids,
        "attention_mask": Mask.from_attention_mask,
    }
    for name, make in makers.items():
        if name in given:
            return make(torch.tensor(given[name]), **kind)
    return Mask.packed(row["documents"], **kind) if row.get("documents") else Mask(**kind)


class Call:
    """A row's call on this rank: whole inputs, the same everywhere, and what the library makes of them."""

    def __init__(self, row: dict, mesh: DeviceMesh | None = None, seed: int = 0):
        self.row, seed = row, seed + row.get("seed", 0)
        ring_size, ulysses = row["mesh"]
        self.mesh = mesh or (pool.mesh(ring_size, ulysses) if ring_size * ulysses > 1 else None)
        self.mask = mask_of(row)
        key_seq = row.get("key_seq", row["seq"])
        self.tokens = Partition(row["seq"], row["layout"], ring_size, ulysses, row["start"])
        self.key_tokens = Partition(key_seq, row["layout"], ring_size, ulysses) if "key_seq" in row else None
        dims = row["head_dim"], row.get("head_dim_v", row["head_dim"])
        q_shape = row["batch"], row["seq"], row["heads"]
        k_shape = row["batch"], key_seq, row["kv_heads"]
        shapes = [(*q_shape, dims[0]), (*k_shape, dims[0]), (*k_shape, dims[1]), (*q_shape, dims[1])]
        q, k, v, dout = (normal(seed + n, *shape) for n, shape in enumerate(shapes))
        dlse = normal(seed + 4, row["batch"], row["heads"], row["seq"])
        q, k, v = INPUTS[row["inputs"]](q, k, v) if "inputs" in row else (q, k, v)
        if row.get("dout") == "expanded":
            dout.fill_(0.7)
        for n, real in enumerate(at_least(row.get("real", row["seq"]), row["batch"])):
            dout[n, real:] = 0.0  # rows of padding are nobody's
        if "dout_on" in row:
            owned = torch.zeros(row["seq"])
            for rank, positions in enumerate(everyone(usp.positions(self.mesh, self.tokens)[0])):
                owned[positions[positions < row["seq"]]] = float(rank in row["dout_on"])
            dout = dout * owned[:, None, None]
        dtype = getattr(torch, row["dtype"])
        self.q, self.k, self.v, self.dout = (x.to(dtype) for x in (q, k, v, dout))
        self.sinks = torch.tensor(row["sinks"], dtype=dtype) if "sinks" in row else None
        self.dlse = dlse.to(torch.promote_types(dtype, torch.float32)) if row.get("lse_loss") else None

    def run(self, **changes: Tensor) -> dict[str, Tensor]:
        """The whole out, lse, dq, dk and dv, put together from all ranks."""
        q, k, v = (changes.get(name, getattr(self, name)) for name in "qkv")
        dout = changes.get("dout", self.dout)
        keys = self.key_tokens or self.tokens
        arrange = ARRANGEMENTS[self.row.get("arrange", "plain")]
        shards = arrange(*(usp.shard(x, self.mesh, t) for x, t in ((q, self.tokens), (k, keys), (v, keys))))
        before = [x.clone() for x in shards]
        leaves = [x.requires_grad_() if x.is_leaf else x for x in shards]
        q, k, v = embedded(self, *leaves)
        wrap = WRAPS[self.row.get("wrap", "plain")]
        sinks = [] if self.sinks is None else [self.sinks.clone().requires_grad_()]
        out, lse = wrap(self.attention)(q, k, v, sinks=sinks[0] if sinks else None)
        results, grads = [out], [DOUTS[self.row.get("dout", "plain")](usp.shard(dout, self.mesh, self.tokens))]
        if self.dlse is not None:
            results.append(lse)
            grads.append(usp.shard(self.dlse, self.mesh, self.tokens, dim=2))
        gradients = torch.autograd.grad(results, [*leaves, *sinks], grads)
        assert all(torch.equal(x, y) for x, y in zip(leaves, before, strict=True)), "inputs were changed"
        assert [(x.shape, x.dtype) for x in gradients] == [(x.shape, x.dtype) for x in (*leaves, *sinks)]
        self.own_lse = lse
        local = dict(zip(WHERE, (out.detach(), lse.detach(), *gradients[:3]), strict=True))
        whole = {"dsinks": hybrid.summed(gradients[3], self.mesh)} if sinks else {}
        for name, x in local.items():
            tokens = keys if name in ("dk", "dv") else self.tokens
            whole[name] = usp.unshard(x, self.mesh, tokens, dim=WHERE[name])
        return whole

    def attention(self, q: Tensor, k: Tensor, v: Tensor, **changes) -> tuple[Tensor, Tensor]:
        options = {"mask": self.mask, "key_tokens": self.key_tokens, **self.row["options"], **changes}
        return usp.hybrid_attention(q, k, v, self.mesh, self.tokens, return_lse=True, **options)

    def scores(self) -> oracle.Options:
        named = [field.name for field in dataclasses.fields(oracle.Options)]
        return oracle.Options(**{name: value for name, value in self.row["options"].items() if name in named})

    def expected(self) -> dict[str, Tensor]:
        """The definition, in float64. Of long sequences only the last head."""
        seen = torch.stack([visible(self.row, n) for n in range(self.row["batch"])])
        q, k, v = (x.double().requires_grad_() for x in (self.q, self.k, self.v))
        sinks = [] if self.sinks is None else [self.sinks.double().requires_grad_()]
        heads = some_heads(self.row)
        dlse = None if self.dlse is None else self.dlse.double()[:, heads]
        embedded_q, embedded_k, _ = embedded(self, q, k, v, whole=True)
        out, lse = oracle.attention(
            *(x[:, :, heads] for x in (embedded_q, embedded_k, v)),
            seen,
            self.scores(),
            *(sinks or [None]),
            None,
            tuple(torch.arange(x.seq)[None] + x.span()[0] for x in (self.tokens, self.key_tokens or self.tokens)),
        )
        loss = (out * self.dout.double()[:, :, heads]).sum()
        if dlse is not None:
            loss = loss + torch.where(lse == -torch.inf, 0.0, lse * dlse).sum()
        gradients = torch.autograd.grad(loss, (q, k, v, *sinks))
        found = {"out": out.detach(), "lse": lse.detach()}
        found |= {name: x[:, :, heads] for name, x in zip(("dq", "dk", "dv"), gradients, strict=False)}
        return found | ({"dsinks": gradients[3]} if sinks else {})


def visible(row: dict, n: int) -> Tensor:
    """(seq, key_seq) of bool in batch row n.

    From lengths that are written out, and not from what the library makes of masks and position ids.
    """
    i = torch.arange(row["seq"])[:, None] + row["start"]
    j = torch.arange(row.get("key_seq", row["seq"]))[None]
    seen = j <= i if row["mask"]["causal"] else torch.ones(len(i), j.shape[1], dtype=torch.bool)
    if "window" in row["mask"]:
        seen &= i - j < row["mask"]["window"]
    if row.get("documents"):
        together, first = torch.zeros_like(seen), 0
        for length in row["documents"][n if len(row["documents"]) > 1 else 0]:
            together |= (i >= first) & (i < first + length) & (j >= first) & (j < first + length)
            first += length
        seen &= together
    return seen


def some_heads(row: dict) -> slice:
    return slice(row["heads"] - 1, None) if row["seq"] > LONG else slice(None)


def attention(row: dict) -> dict[str, float | str]:
    """On a rank: the worst errors, and the message if the row has something refused."""
    found: dict[str, float | str] = {}
    if "refused" in row:
        found["refused"] = refused(row)
    if "dense_mask" in row or "v_dtype" in row:
        return found
    call = Call(row, *beside(row))
    results = call.run()
    if row["seq"] <= LONG or dist.get_rank() == 0:  # the results are whole, and the same everywhere
        found |= compared(row, results, call.expected())
    for name in row.get("checks", ()):
        CHECKS[name](call, results)
    return found


def compared(row: dict, results: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    tolerance = row.get("tolerance", TOLERANCE)
    found = {}
    for name, reference in expected.items():
        actual = results[name].double()
        if name != "dsinks":
            actual = actual[:, some_heads(row)] if name == "lse" else actual[:, :, some_heads(row)]
        assert not actual.isnan().any(), f"{name} holds NaN"
        assert torch.equal(actual.isinf(), reference.isinf()), f"{name} is infinite elsewhere"
        kind = tolerance["grad" if name.startswith("d") else name]
        finite = reference.isfinite()
        error = (actual - reference)[finite].abs() / (1 + reference[finite].abs())
        found[name] = error.max().item() if error.numel() else 0.0
        assert found[name] <= kind, f"{name} is off by {found[name]:.1e}, allowed {kind:.0e}"
    return found


def refused(row: dict) -> str:
    """The message with which the call is refused on this rank; then a right call on the same groups."""
    changes, row = row["options"], row | {"options": {}}
    changes = {name: value for name, value in changes.items() if name != row.get("without")}
    call = Call(row)
    keys = call.key_tokens or call.tokens
    q, k, v = (usp.shard(x, call.mesh, t) for x, t in ((call.q, call.tokens), (call.k, keys), (call.v, keys)))
    rank = dist.get_rank()
    if "local" in row:
        q, k, v = (torch.zeros(x.shape[0], row["local"][rank], *x.shape[2:]) for x in (q, k, v))
    if "key_local" in row:
        k, v = (torch.zeros(x.shape[0], row["key_local"][rank], *x.shape[2:]) for x in (k, v))
    if "v_dtype" in row:
        v = v.to(getattr(torch, row["v_dtype"]))
    if "dense_mask" in row:
        changes["mask"] = torch.rand(row["seq"], row["seq"]) < 0.5
    if "forget_start" in row:
        call.tokens = Partition(row["seq"], row["layout"], *row["mesh"])
    start_s = time.monotonic()
    with usp.measure_traffic() as traffic, pytest.raises((ValueError, TypeError)) as caught:
        call.attention(q, k, v, **changes)
    assert traffic.payload_bytes == 0
    assert time.monotonic() - start_s < 20
    message = str(caught.value)
    assert all(name in message for name in row["refused"]), message
    plain = row | {"heads": 4, "kv_heads": 4, "seq": 16, "mask": {"causal": True}, "start": 0, "key_seq": 16}
    call = Call(plain)
    compared(plain, call.run(), call.expected())
    return message


def beside(row: dict) -> tuple:
    """With an inner axis that is not of this library: a mesh of its own for each of its ranks, and other inputs."""
    if "inner" not in row:
        return ()
    mesh = init_device_mesh("cpu", (*row["mesh"], row["inner"]), mesh_dim_names=("ring", "ulysses", "tensor"))
    assert dist.get_process_group_ranks(mesh.get_group("ring")) == [dist.get_rank() % 2, dist.get_rank() % 2 + 2]
    return mesh, 100 * mesh.get_local_rank("tensor")


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def at_least(value: int | list[int], count: int) -> list[int]:
    return [value] * count if isinstance(value, int) else value


def everyone(x: Tensor) -> list[Tensor]:
    found = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(found, x)
    return found


def large_later_keys(q, k, v):
    k[:, k.shape[1] // 2 :] *= 3
    return q, k, v


def large_queries(q, k, v):
    return 4 * q, k, v


def rows_apart(q, k, v):
    return q, k, v + 10 * torch.arange(v.shape[0])[:, None, None, None]


def value_is_its_head(q, k, v):
    return q, k, torch.arange(v.shape[2], dtype=v.dtype)[:, None].expand_as(v).clone()


INPUTS = {function.__name__: function for function in (large_later_keys, large_queries, rows_apart, value_is_its_head)}


def packed(q, k, v):
    """Slices of one tensor (batch, seq, 3, heads, head_dim)."""
    whole = torch.stack([q, k, v], 2).requires_grad_()
    return whole.unbind(2)


def transposed(*shards):
    """(batch, heads, seq, head_dim) in memory."""
    return [x.transpose(1, 2).contiguous().transpose(1, 2) for x in shards]


ARRANGEMENTS = {"plain": lambda *x: x, "packed": packed, "transposed": transposed}
DOUTS = {
    "plain": lambda x: x,
    "expanded": lambda x: x[:1, :1, :1, :1].expand_as(x),
    "transposed": lambda x: transposed(x)[0],
}
WRAPS = {
    "plain": lambda function: function,
    "checkpoint": lambda function: lambda *x, **how: checkpoint(function, *x, use_reentrant=False, **how),
}


def embedded(call: Call, q: Tensor, k: Tensor, v: Tensor, whole: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """q and k with their positions in them, as a model would do it; positions come from the library, or are counted."""
    how = call.row.get("embed")
    if how is None:
        return q, k, v
    restart = call.mask if how == "table" else None
    positions = torch.arange(call.row["seq"])
    if whole and restart is not None:
        positions = torch.cat([torch.arange(length) for length in call.row["documents"][0]])
    elif not whole:
        positions = usp.positions(call.mesh, call.tokens, mask=restart)[0]
    if how == "table":
        table = normal(7, 64, q.shape[3]).to(q.dtype)
        return q + table[positions][:, None], k + table[positions][:, None], v
    half = q.shape[3] // 2
    angles = torch.arange(64)[:, None] * 10_000.0 ** (-torch.arange(half) / half)  # for more tokens than there are
    cos, sin = (f(angles).to(q.dtype)[positions][:, None] for f in (torch.cos, torch.sin))

    def rotated(x: Tensor) -> Tensor:
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], 3)

    return rotated(q), rotated(k), v


# ---------------------------------------------------------------------------------------------------
# What a row asks for besides.


def check_positions(call: Call, results: dict) -> None:
    """The library's positions, put together, restart at each document."""
    place = usp.positions(call.mesh, call.tokens, mask=call.mask)
    whole = usp.unshard(place, call.mesh, call.tokens)[0].tolist()
    assert whole == [n for length in call.row["documents"][0] for n in range(length)]


def check_padding(call: Call, results: dict) -> None:
    for n, real in enumerate(at_least(call.row["real"], call.row["batch"])):
        assert (results["out"][n, real:] == 0).all()
        assert (results["lse"][n, :, real:] == -torch.inf).all()
        assert all((results[name][n, real:] == 0).all() for name in ("dq", "dk", "dv"))


def check_repeats(call: Call, results: dict) -> None:
    for _ in range(2):
        again = call.run()
        assert all(torch.equal(again[name], x) for name, x in results.items())


def check_jitter(call: Call, results: dict) -> None:
    """Every rank waits up to 5 ms before each communication, in nine more runs."""
    delays, operation = random.Random(dist.get_rank()), comm._operation

    def late(what: str):
        time.sleep(delays.uniform(0, 0.005))
        return operation(what)

    with mock.patch.object(comm, "_operation", late):
        for _ in range(9):
            again = call.run()
            assert all(torch.equal(again[name], x) for name, x in results.items())


def check_own_lse(call: Call, results: dict) -> None:
    assert call.own_lse.shape == (call.row["batch"], call.row["heads"], call.tokens.seq_local)


def check_rows_alone(call: Call, results: dict) -> None:
    """Each batch row equals its own call."""
    for n in range(call.row["batch"]):
        given = call.row["mask"]
        if "attention_mask" in given:
            given = given | {"attention_mask": [given["attention_mask"][n]]}
        real = at_least(call.row.get("real", call.row["seq"]), call.row["batch"])[n]
        documents = [call.row["documents"][n]] if "documents" in call.row else None
        alone = Call(call.row | {"batch": 1, "mask": given, "real": real, "documents": documents})
        parts = {name: getattr(call, name)[n : n + 1] for name in ("q", "k", "v", "dout")}
        for name, x in alone.run(**parts).items():
            assert torch.allclose(x, results[name][n : n + 1], rtol=1e-6, atol=1e-6), (n, name)


def check_shares(call: Call, results: dict) -> None:
    """Gradients that come from one rank's queries alone, for each rank."""
    for rank in range(dist.get_world_size()):
        row = call.row | {"dout_on": [rank]}
        alone = Call(row)
        compared(row, alone.run(), alone.expected())


def check_group_works(call: Call, results: dict) -> None:
    one = torch.ones(1)
    dist.all_reduce(one)
    assert one == dist.get_world_size()


def check_window(call: Call, results: dict) -> None:
    """Another first token changes what sees it, and nothing else."""
    k, v = call.k.clone(), call.v.clone()
    k[:, 0] += 1
    v[:, 0] += 1
    changed = (call.run(k=k, v=v)["out"] != results["out"]).flatten(2).any(-1)[0]
    assert changed.nonzero().flatten().tolist() == list(range(call.row["mask"]["window"]))


def check_linear_in_v(call: Call, results: dict) -> None:
    """out is linear in v for fixed pairs, so forward and backward dropped the same ones."""
    through_out, through_v = (results["out"] * call.dout).sum(), (call.v * results["dv"]).sum()
    assert (through_out - through_v).abs() < 1e-4 * through_out.abs()


def check_mean_over_seeds(call: Call, results: dict) -> None:
    """Of 200 seeds: what there is without dropout, within five standard errors."""
    p, _ = call.row["options"]["dropout"]
    q, k, v = (usp.shard(x, call.mesh, call.tokens) for x in (call.q, call.k, call.v))
    plain = call.attention(q, k, v, dropout=None)[0]
    outs = torch.stack([call.attention(q, k, v, dropout=(p, seed))[0] for seed in range(200)])
    assert ((outs.mean(0) - plain).abs() < 5 * outs.std(0) / len(outs) ** 0.5).all()


def check_head_order(call: Call, results: dict) -> None:
    groups = call.row["heads"] // call.row["kv_heads"]
    expected = torch.arange(call.row["heads"]) // groups
    assert torch.allclose(results["out"], expected[:, None].to(results["out"]), atol=1e-6)


def check_first_rows(call: Call, results: dict) -> None:
    """Row 0 is v[0]; row 1, on the next rank, sees keys 0 and 1."""
    groups = call.row["heads"] // call.row["kv_heads"]
    v = call.v.repeat_interleave(groups, 2)
    assert torch.allclose(results["out"][:, 0], v[:, 0], atol=1e-6)
    k = call.k.clone()
    k[:, 2:] += 1
    again = call.run(k=k)["out"]
    assert torch.equal(again[:, :2], results["out"][:, :2])
    assert not torch.equal(again[:, 2], results["out"][:, 2])


CHECKS = {name.removeprefix("check_"): x for name, x in globals().copy().items() if name.startswith("check_")}


# ---------------------------------------------------------------------------------------------------
# Rows that are not one call.


def local_documents(ranks, row: dict) -> str:
    found = on_ranks(ranks(row["mesh"][0]), _local_documents, row)
    assert found == row["expect"]
    return f"{found}"


def _local_documents(row: dict) -> list[int]:
    """Where positions restart or jump in this rank's share."""
    mesh = pool.mesh(*row["mesh"])
    tokens = usp.partition(row["seq"], mesh, row["layout"])
    place = usp.positions(mesh, tokens, mask=mask_of(row))[0].tolist()
    return [0, *(n for n in range(1, len(place)) if place[n] != place[n - 1] + 1), len(place)]


def parts(ranks, row: dict) -> str:
    """lse of every backend on each part, and their merge, against all keys at once."""
    row = variants(row)[0]
    heads, dim, total = row["heads"], row["head_dim"], sum(row["parts"])
    q = normal(0, 1, row["seq"], heads, dim).float()
    k, v = (normal(n, 1, total, heads, dim).float() for n in (1, 2))
    seen = torch.ones(1, row["seq"], total, dtype=torch.bool)
    expected_out, expected_lse = oracle.attention(q.double(), k.double(), v.double(), seen)
    for backend in usp.backends():
        merged, first = None, 0
        for length in row["parts"]:
            piece = slice(first, first + length)
            tokens, keys = Partition(row["seq"], "contiguous"), Partition(length, "contiguous")
            (block,) = blocks(Mask(causal=False), tokens, 0, keys, 0)
            out, lse = kernels.forward(backend, q, k[:, piece], v[:, piece], block, Terms(dim**-0.5))
            reference = torch.einsum("bihd,bjhd->bhij", q.double(), k[:, piece].double()) * dim**-0.5
            assert (lse - reference.logsumexp(-1)).abs().max() < 1e-5, backend
            merged = (out, lse) if merged is None else usp.merge(*merged, out, lse)
            first += length
        assert (merged[0] - expected_out).abs().max() < 1e-5
        assert (merged[1] - expected_lse).abs().max() < 1e-5
    return f"equal to float64 on {', '.join(usp.backends())}"


def merge(ranks, row: dict) -> str:
    """Parts of constant out and lse, in every order; with a third part that must come through bit by bit."""

    def part(out: float | str, lse: float | str) -> tuple[Tensor, Tensor]:
        return torch.full((1, 4, 2, 4), float(out)), torch.full((1, 2, 4), float(lse))

    def folded(some) -> tuple[Tensor, Tensor]:
        total = some[0]
        for other in some[1:]:
            total = usp.merge(*total, *other)
        return total

    given, expected = [part(*x) for x in row["parts"]], part(*row["expect"])
    for order in itertools.permutations(given):
        for x, y in zip(folded(order), expected, strict=True):
            assert torch.allclose(x, y, rtol=1e-6, atol=1e-6)
    if row.get("third"):
        third = normal(0, 1, 4, 2, 4).float(), normal(1, 1, 2, 4).float()
        for order in itertools.permutations([*given, third]):
            assert all(torch.equal(x, y) for x, y in zip(folded(order), third, strict=True))
    return f"out {row['expect'][0]}, lse {row['expect'][1]} in every order"


def merge_orders(ranks, row: dict) -> str:
    shape = 1, row["seq"], row["heads"], row["head_dim"]
    q = normal(0, *shape)
    k, v = (normal(n, 1, 4 * row["parts"], *shape[2:]) for n in (1, 2))
    given = []
    for n in range(row["parts"]):
        seen = torch.ones(1, row["seq"], 4, dtype=torch.bool)
        given.append([x.float() for x in oracle.attention(q, k[:, 4 * n : 4 * n + 4], v[:, 4 * n : 4 * n + 4], seen)])
    everything = oracle.attention(q, k, v, torch.ones(1, row["seq"], 4 * row["parts"], dtype=torch.bool))
    orders, worst = random.Random(0), 0.0
    results = []
    for _ in range(row["orders"]):
        some = orders.sample(given, len(given))
        left = some[0]
        for other in some[1:]:
            left = usp.merge(*left, *other)
        tree = list(some)
        while len(tree) > 1:  # neighbours first, then what they gave
            tree = [*tree[2:], usp.merge(*tree[0], *tree[1])]
        results += [left, tree[0]]
    for result in results:
        for x, y, first in zip(result, everything, results[0], strict=True):
            assert (x - y).abs().max() < 1e-5
            worst = max(worst, (x - first).abs().max().item())
    assert worst < 2e-6
    return f"{row['orders']} orders, folded and as a tree, differ by at most {worst:.0e}"


def layout(ranks, row: dict) -> str:
    world = row["mesh"][0] * row["mesh"][1]
    for seq in row["seqs"]:
        found = on_ranks(ranks(world), _layout, row, seq)
        held = [position for _, positions in found for position in positions if position < seq]
        assert sorted(held) == list(range(seq))
        if row.get("chunks"):  # two of 2R chunks for each ring rank
            size = seq // (2 * row["mesh"][0])
            for rank in range(row["mesh"][0]):
                chunks = {position // size for place, positions in found if place == rank for position in positions}
                assert chunks == {rank, 2 * row["mesh"][0] - 1 - rank}
    if "mask" in row:
        on_ranks(ranks(world), attention, variants(row | {"seq": row["seqs"][0]})[0])
    return f"each of {row['seqs']} tokens is on one rank and comes back"


def _layout(row: dict, seq: int) -> tuple[int, list[int]]:
    mesh = pool.mesh(*row["mesh"])
    tokens = usp.partition(seq, mesh, row["layout"])
    x = torch.arange(3 * seq).view(3, seq)
    assert torch.equal(usp.unshard(usp.shard(x, mesh, tokens), mesh, tokens), x)
    return axes(mesh)[0].rank, usp.positions(mesh, tokens)[0].tolist()


def padding(ranks, row: dict) -> str:
    world, lengths = row["mesh"][0] * row["mesh"][1], []
    for seq in row["seqs"]:
        tokens = Partition(seq, row["layout"], *row["mesh"])
        assert tokens.padded % tokens.multiple == 0
        assert 0 <= tokens.padded - seq < tokens.multiple
        assert Partition(tokens.padded, row["layout"], *row["mesh"]).padded == tokens.padded
        on_ranks(ranks(world), _layout, row, seq)
        lengths.append(tokens.padded)
    return f"{row['seqs']} are padded to {lengths}"


def multiple(ranks, row: dict) -> str:
    for ring_size, ulysses, name, expected in row["cases"]:
        assert Partition(1, name, ring_size, ulysses).multiple == expected
        for seq in (expected - 1, expected, 3 * expected):
            found = on_ranks(ranks(ring_size * ulysses), _layout, {"mesh": [ring_size, ulysses], "layout": name}, seq)
            assert sorted(x for _, positions in found for x in positions if x < seq) == list(range(seq))
    return "multiples " + ", ".join(f"{x[3]} for {x[2]} on ring {x[0]} x ulysses {x[1]}" for x in row["cases"])


def replicas(ranks, row: dict) -> str:
    found = on_ranks(ranks(8), _replicas, row)
    assert found[:4] == found[4:]
    assert sorted(place for place, _ in found[:4]) == [(r, u) for r in range(2) for u in range(2)]
    return "both replicas have the same places and positions"


def _replicas(row: dict) -> tuple[tuple[int, int], list[int]]:
    mesh = pool.mesh(*row["mesh"], row["data"])
    tokens = usp.partition(row["seq"], mesh, row["layout"])
    for name in ("ring", "ulysses", "data"):
        members = dist.get_process_group_ranks(mesh.get_group(name))
        gathered = [None] * 8
        dist.all_gather_object(gathered, members)
        assert sorted(itertools.chain(*{tuple(x) for x in gathered})) == list(range(8))
        assert len(members) == 2
    return tuple(axis.rank for axis in axes(mesh)), usp.positions(mesh, tokens)[0].tolist()


def bad_meshes(ranks, row: dict) -> str:
    messages = []
    for ring_size, ulysses, data in row["meshes"]:
        answers = on_ranks(ranks(row["world"]), _bad_mesh, ring_size, ulysses, data)
        for message in answers:
            for text in (f"data={data}", f"ulysses={ulysses}", f"ring={ring_size}", str(row["world"])):
                assert text in message, message
        messages.append(answers[0])
    return f"refused: {messages[0]}"


def _bad_mesh(ring_size: int, ulysses: int, data: int) -> str:
    with pytest.raises(ValueError) as caught:
        usp.init_mesh(ring=ring_size, ulysses=ulysses, data=data, device_type="cpu")
    return str(caught.value)


def half(ranks, row: dict) -> str:
    """Root mean square errors of a ring over those of one process, same backend, with and without an offset of v."""
    row = variants(row)[0]
    (ratios, *_) = on_ranks(ranks(row["mesh"][0]), _half, row)
    assert all(ratio <= row["at_most"] for ratio in ratios.values()), ratios
    return "error over that of one process: " + ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())


def _half(row: dict) -> dict[str, float]:
    ratios: dict[str, float] = {}
    for offset in (0.0, 4.0):
        call = Call(row)
        call.v = (call.v.double() + offset).to(call.v.dtype)
        spread, expected = call.run(), call.expected()
        alone = Call(row | {"mesh": [1, 1]})
        alone.v = call.v
        single = alone.run()
        assert spread["lse"].dtype == torch.float32
        assert (spread["lse"] - expected["lse"]).abs().max() < 1e-4
        for name in ("out", "dq", "dk", "dv"):
            error, base = ((x[name].double() - expected[name]).square().mean().sqrt().item() for x in (spread, single))
            ratios[f"{name} with v + 4" if offset else name] = error / base
    return ratios


def one_layout(ranks, row: dict) -> str:
    """`shard`, `hybrid_attention`, `unshard` and `positions` all take the partition; none takes a layout."""
    for function in (usp.shard, usp.unshard, usp.positions, usp.hybrid_attention, usp.ring_attention):
        parameters = inspect.signature(function).parameters
        assert "tokens" in parameters
        assert "layout" not in parameters
    message = on_ranks(ranks(2), _two_layouts, row)[1]
    return f"the partition carries the layout; ranks that differ in it: {message}"


def _two_layouts(row: dict) -> str:
    mesh = pool.mesh(*row["mesh"])
    tokens = Partition(row["seq"], "zigzag" if dist.get_rank() else "contiguous", *row["mesh"])
    x = usp.shard(normal(0, 1, row["seq"], 2, 8), mesh, tokens)
    with pytest.raises(ValueError, match=r"contiguous.*zigzag|zigzag.*contiguous") as caught:
        usp.hybrid_attention(x, x, x, mesh, tokens, mask=Mask(causal=True))
    return str(caught.value)


def entry_points(ranks, row: dict) -> str:
    found = on_ranks(ranks(row["mesh"][0] * row["mesh"][1]), _entry_points, variants(row)[0])
    assert all(found)
    return "a changed key of any rank changes the output of all, by the function, the module and the pieces"


def _entry_points(row: dict) -> bool:
    call = Call(row)
    mesh, tokens, mask = call.mesh, call.tokens, call.mask

    def by_pieces(q, k, v):
        heads = [usp.sequence_to_heads(x, mesh) for x in (q, k, v)]
        return usp.heads_to_sequence(usp.ring_attention(*heads, mesh, tokens, mask=mask)[0], mesh)

    points = [
        lambda q, k, v: usp.hybrid_attention(q, k, v, mesh, tokens, mask=mask),
        lambda q, k, v: usp.HybridAttention(mesh)(q, k, v, tokens, mask),
        by_pieces,
    ]
    placed = [x[0] for x in everyone(usp.positions(mesh, tokens)[0])]  # a token of every rank
    for point in points:
        q, k, v = (usp.shard(x, mesh, tokens) for x in (call.q, call.k, call.v))
        before = point(q, k, v)
        for position in placed:
            other = call.k.clone()
            other[:, position] += 1
            after = point(q, usp.shard(other, mesh, tokens), v)
            assert (after != before).flatten(3).any(3).all()
    return True


def rank_fails(ranks, row: dict) -> str:
    """A pool of its own: its groups cannot be used afterwards."""
    short = pool.Pool(4, timeout_s=5)
    try:
        on_ranks(short, _rank_fails, variants(row)[0])
    except AssertionError as error:
        text = str(error)
    else:
        raise AssertionError("nobody noticed")
    finally:
        short.close()
    first, *others = text.split("\nrank ")
    own = "ValueError: the loader is empty"
    assert first.startswith("rank 2:"), text
    assert own in first
    assert len(others) == 3
    assert all("If another rank stayed away" in x for x in others)
    return f"rank 2: {own}; then the others: RuntimeError, another rank stayed away, rebuild the group"


def _rank_fails(row: dict) -> None:
    call = Call(row)
    shards = [usp.shard(x, call.mesh, call.tokens) for x in (call.q, call.k, call.v)]
    if dist.get_rank() == 2:
        raise ValueError("the loader is empty")
    start_s = time.monotonic()
    try:
        call.attention(*shards)
    finally:
        assert time.monotonic() - start_s < 15


def degenerate(ranks, row: dict) -> str:
    row = variants(row)[0]
    call = Call(row)
    compared(row, call.run(), call.expected())
    on_ranks(ranks(1), _world_of_one, row)
    for ring_size, ulysses, data in row["meshes"]:
        message = on_ranks(ranks(1), _bad_mesh, ring_size, ulysses, data)[0]
        assert f"ring={ring_size}" in message
        assert f"ulysses={ulysses}" in message
    return "equal to float64 without a group and in a group of one; degrees of 0 and -1 are refused"


def _world_of_one(row: dict) -> None:
    call = Call(row, pool.mesh(1, 1))
    compared(row, call.run(), call.expected())


def sequence(ranks, row: dict) -> str:
    ring_size, ulysses = row["mesh"]
    on_ranks(ranks(ring_size * ulysses), _sequence, row)
    return f"{len(row['calls'])} calls, backward in the order {row['backward']}: equal to float64, outputs kept"


def _sequence(row: dict) -> None:
    calls = [variants(row | call)[0] for call in row["calls"]]
    original = F.scaled_dot_product_attention
    kept = []
    for each in calls:
        if "refused" in each:
            refused(each)
            kept.append(None)
            continue
        call = Call(each)
        shards = [usp.shard(x, call.mesh, call.tokens).requires_grad_() for x in (call.q, call.k, call.v)]
        out, lse = call.attention(*shards)
        kept.append((call, shards, [x.detach().clone() for x in shards], out, lse, out.detach().clone()))
    for n in row["backward"]:
        call, shards, _, out, lse, _ = kept[n]
        dout = usp.shard(call.dout, call.mesh, call.tokens)
        values = [out.detach(), lse.detach(), *torch.autograd.grad(out, shards, dout)]
        whole = {
            name: usp.unshard(x, call.mesh, call.tokens, dim=WHERE[name]) for name, x in zip(WHERE, values, strict=True)
        }
        compared(call.row, whole, call.expected())
    for each in kept:
        if each is not None:
            _, shards, before, out, _, first = each
            assert torch.equal(out, first)
            assert all(torch.equal(x, y) for x, y in zip(shards, before, strict=True))
    assert F.scaled_dot_product_attention is original


def copies(ranks, row: dict) -> str:
    ring_size, ulysses = row["mesh"]
    on_ranks(ranks(ring_size * ulysses), _copies, row)
    return "the shard keeps its values, in a storage of its own size"


def _copies(row: dict) -> None:
    mesh = pool.mesh(*row["mesh"])
    tokens = usp.partition(row["seq"], mesh, row["layout"])
    x = torch.arange(row["seq"], dtype=torch.float32)[None]
    local = usp.shard(x, mesh, tokens)
    before = local.clone()
    x.zero_()
    assert torch.equal(local, before)
    assert local.untyped_storage().nbytes() == local.numel() * local.element_size()


def memory(ranks, row: dict) -> str:
    row = variants(row)[0]
    texts = []
    for uneven in (False, True):
        peaks = []
        for ring_size in (2, row["mesh"][0]):
            call = row | {"mesh": [ring_size, 1], "seq": ring_size * row["seq_local"]}
            peaks.append(max(on_ranks(ranks(ring_size), _live_chunks, call, uneven)))
        assert peaks[1] <= row["at_most"]
        assert peaks[1] <= 1.1 * peaks[0]
        texts.append(
            f"{peaks[0]:.1f} on a ring of 2, {peaks[1]:.1f} on a ring of 8" + " (messages of other sizes)" * uneven
        )
    return "chunks of k and v at once: " + "; ".join(texts)


def _live_chunks(row: dict, uneven: bool) -> float:
    """The most chunks that were alive when a step of forward began: the rank's own, and every message and buffer.

    Uneven: of every rank's tokens another number are padding, so that messages differ in size. Backward's gradients
    use the same buffers.
    """
    call, peak, alive = Call(row), 0, []
    if uneven:
        size = row["seq_local"]
        shares = [[1] * (size - 3 * n) + [0] * 3 * n for n in range(row["mesh"][0])]
        call.mask = Mask.from_attention_mask([list(itertools.chain(*shares))], causal=False)
    chunk = 2 * call.k.nbytes // row["mesh"][0]
    empty, start = comm.Exchange.empty, comm.Exchange.start

    def followed(self, numel):
        x = empty(self, numel)
        alive.append((StorageWeakRef(x.untyped_storage()), x.untyped_storage().nbytes()))
        return x

    def counted(self, *args):
        nonlocal peak
        found = start(self, *args)
        sizes = {reference.cdata: size for reference, size in alive if not reference.expired()}
        peak = max(peak, chunk + sum(sizes.values()))
        return found

    with (
        mock.patch.object(comm.Exchange, "empty", followed),
        mock.patch.object(comm.Exchange, "start", counted),
    ):
        shards = [usp.shard(x, call.mesh, call.tokens) for x in (call.q, call.k, call.v)]
        call.attention(*shards)
    return peak / chunk


def joint(ranks, row: dict) -> str:
    """Keys that every rank holds, on several meshes."""
    for ring_size, ulysses in row["meshes"]:
        call = hybrid.Beside(
            *(ring_size, ulysses, row["layout"], mask_of(row)),
            **{name: row[name] for name in ("seq", "heads", "kv_heads", "joint")},
            queries=False,
            batch=1,
        )
        on_ranks(ranks(ring_size * ulysses), hybrid.joint_equals_the_whole, [call])
    return f"equal to attention over {row['joint']} + {row['seq']} keys in float64, on {len(row['meshes'])} meshes"


def sent_bytes(ranks, row: dict) -> str:
    found = on_ranks(ranks(row["mesh"][0]), _sent_bytes, variants(row)[0])
    assert found == [row["expect"]] * len(found)
    return f"{found[0]} bytes from every rank"


def _sent_bytes(row: dict) -> int:
    call = Call(row)
    shards = [usp.shard(x, call.mesh, call.tokens) for x in (call.q, call.k, call.v)]
    with usp.measure_traffic() as traffic:
        call.attention(*shards)
    return traffic.payload_bytes


def flops(ranks, row: dict) -> str:
    """As the cost model counts them; nothing runs."""
    ring, ulysses = row["mesh"]

    def of(mask: Mask) -> tuple[int, ...]:
        sizes = {key: row[key] for key in ("batch", "seq", "heads", "kv_heads", "head_dim")}
        return usp.cost.flops(usp.cost.Workload(mask=mask, **sizes), usp.cost.Plan(ring, ulysses))

    found = of(Mask(**row["mask"]))
    first, last = row["between"]
    assert first <= sum(found) <= last
    assert set(found) == {row.get("each", sum(found))}
    assert sum(of(Mask(causal=False))) == row.get("full", sum(found))
    return f"{sum(found):,} FLOPs, {found[0]:,} of the first process"


def throughput(ranks, row: dict) -> str:
    """As the table of experiments.model has them, of a step's seconds."""
    ring, ulysses = row["mesh"]
    mesh = {"data": row["data"], "ring": ring, "ulysses": ulysses}
    config = {"phase": "train", "mesh": mesh, "batch": row["batch"], "seq": row["seq"]}
    found = tokens_of(config) / row["step_s"]
    assert [found, found / math.prod(mesh.values())] == row["expect"]
    return f"{found:,.0f} tokens a second of all, {found / math.prod(mesh.values()):,.0f} a process"


def compiled_once(ranks, row: dict) -> str:
    """In processes of its own, where signatures are not checked: checks cannot be traced."""
    text = compiled.printed()
    assert text.count("equal, compiled once: ring") == 2, text
    return "equal, compiled once"


def balance(ranks, row: dict) -> str:
    """The layout that is made for the mask: equal work, and the attention is right."""
    (row,) = variants(row)
    for work in on_ranks(ranks(row["mesh"][0]), balanced_work, row):
        assert work == row["expect"]
    return f"work {row['expect']}, equal to float64"


def balanced_work(row: dict) -> list[int]:
    call = Call(row | {"layout": "contiguous"})
    tokens = call.tokens = usp.partition(row["seq"], call.mesh, "balanced", mask=call.mask)
    compared(row, call.run(), call.expected())
    shares = range(row["mesh"][0])
    return [sum(block.pairs for s in shares for block in blocks(call.mask, tokens, r, tokens, s)) for r in shares]


# ---------------------------------------------------------------------------------------------------
# A cache that grows.


EVENTS = {"turn": inference.Turn, "decode": inference.Decode}


def story(ranks, row: dict) -> str:
    """Turns and steps by every decode algorithm, each equal to float64 on every rank; keys that move are refused."""
    count = 0
    for variant in row.get("variants", [{}]):
        told = row | variant
        for algorithm in DECODE:
            events = []
            for event in told["events"]:
                name = next(name for name in EVENTS if name in event)
                how = {key: value for key, value in event.items() if key != name}
                how |= {"algorithm": algorithm} if name == "decode" else {}
                value = tuple(event[name]) if name == "turn" else event[name]
                events.append(EVENTS[name](value, **how))
            sizes = {name: told[name] for name in ("batch", "heads", "kv_heads")} | {"block": told.get("block", 4)}
            case = inference.Story(*told["mesh"], tuple(events), dtype=torch.float32, **sizes)
            ranks(case.ring * case.ulysses)(inference.check, case)
            count += 1
    refusal = on_ranks(ranks(row["mesh"][0] * row["mesh"][1]), _moving_keys, row["mesh"])[0]
    return f"equal to float64 in {count} runs, {len(DECODE)} algorithms; refused: {refusal}"


def _cache(mesh, row: dict, **more) -> usp.inference.KVCache:
    sizes = {"batch": 1, "capacity": 64, "kv_heads": 1, "head_dim": 8, "dtype": torch.float32}
    sizes |= {name: row[name] for name in ("batch", "capacity", "kv_heads") if name in row}
    return usp.inference.KVCache(mesh, **sizes | more)


def _moving_keys(shape: list[int]) -> str:
    mesh = pool.mesh(*shape)
    x = torch.ones(1, 1, 1, 8)
    with pytest.raises(ValueError, match="algorithm='pass_kv'") as refused:
        usp.inference.decode_attention(x, x, x, mesh, _cache(mesh, {}), mask=Mask(True), algorithm="pass_kv")
    return str(refused.value)


def even(ranks, row: dict) -> str:
    for owner in OWNERS:
        tokens = Partition(row["prompt"], "zigzag", row["ring"])
        ledger = before = Ledger.empty(row["ring"], 1).turned(tokens, [[tokens.span()]])
        for step in range(row["steps"]):
            ledger = ledger.dealt((1,), row["block"], owner)
            assert max(ledger.counts[0]) - min(ledger.counts[0]) <= row["block"]
            assert sum(ledger.counts[0]) == row["prompt"] + step + 1
        grown = [b - a for a, b in zip(before.counts[0], ledger.counts[0], strict=True)]
        assert max(grown) <= -(-row["steps"] // row["ring"])
    return f"{ledger.counts[0]} tokens"


def choice(ranks, row: dict) -> str:
    """What `auto` does for the last tokens of a sequence, and that all algorithms find the same."""
    found = on_ranks(ranks(2), _choice, row)[0]
    assert found == row["expect"], found
    return f"by new tokens of {row['length']}: {found}; all equal to float64"


def _choice(row: dict) -> dict[str, str]:
    mesh, found = pool.mesh(*row["mesh"]), {}
    length, batch, shape = row["length"], row["batch"], (row["heads"], row["kv_heads"], row["kv_heads"])
    q, k, v = (normal(n, batch, length, heads, 8).float() for n, heads in enumerate(shape))
    seen = torch.ones(length, length, dtype=torch.bool).tril().expand(batch, -1, -1)
    expected, _ = oracle.attention(q.double(), k.double(), v.double(), seen)
    for new in row["expect"]:
        outs = []
        for algorithm in (*PREFILL, "auto"):
            cache = _cache(mesh, row, block=1)
            cache.append(k[:, : length - int(new)], v[:, : length - int(new)])
            tokens = usp.partition(int(new), mesh, "zigzag", start=cache.start)
            shards = (usp.shard(x[:, length - int(new) :], mesh, tokens) for x in (q, k, v))
            out, report = usp.inference.prefill_attention(
                *shards, mesh, tokens, cache, mask=Mask(True), algorithm=algorithm
            )
            outs.append(usp.unshard(out, mesh, tokens))
            found[new] = report.algorithm
        assert max((out - expected[:, length - int(new) :]).abs().max() for out in outs) < 1e-5
        assert max((out - outs[0]).abs().max() for out in outs) < 1e-6
    return found


def full_cache(ranks, row: dict) -> str:
    answers = on_ranks(ranks(2), _full_cache, row)
    assert all("17" in text and "16" in text for text in answers)
    return f"equal to float64 until it is full; refused: {answers[0]}"


def _full_cache(row: dict) -> str:
    """Steps until there is no room; what the refusal says."""
    mesh, capacity = pool.mesh(*row["mesh"]), row["capacity"]
    angles = torch.arange(capacity + 1)[:, None] * 10_000.0 ** (-torch.arange(4) / 4)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    q, k, v = (normal(n, 1, capacity + 1, heads, 8) for n, heads in enumerate((row["heads"], 1, 1)))

    def rotated(x: Tensor, at: Tensor) -> Tensor:
        a, b = x[..., :4], x[..., 4:]
        return torch.cat([a * cos[at] - b * sin[at], a * sin[at] + b * cos[at]], 3)

    everywhere = torch.arange(capacity + 1)
    seen = torch.ones(1, capacity + 1, capacity + 1, dtype=torch.bool).tril()
    expected, _ = oracle.attention(rotated(q, everywhere), rotated(k, everywhere), v, seen)
    cache = _cache(mesh, row)
    tokens = usp.partition(row["prompt"], mesh, "zigzag")
    prompt = (usp.shard(x[:, : row["prompt"]].float(), mesh, tokens) for x in (q, k, v))
    q_, k_, v_ = prompt
    at = usp.positions(mesh, tokens)[0]
    out, _ = usp.inference.prefill_attention(
        rotated(q_, at).float(), rotated(k_, at).float(), v_, mesh, tokens, cache, mask=Mask(True)
    )
    assert (usp.unshard(out, mesh, tokens) - expected[:, : row["prompt"]]).abs().max() < 1e-5
    while True:
        n, now = cache.lengths[0], torch.tensor(cache.lengths)
        step = (rotated(q[:, n : n + 1], now), rotated(k[:, n : n + 1], now), v[:, n : n + 1])
        call = usp.inference.decode_attention, *(x.float() for x in step), mesh, cache
        if n == capacity:
            with pytest.raises(ValueError, match="capacity") as refused:
                call[0](*call[1:], mask=Mask(True))
            assert cache.lengths == (capacity,)
            return str(refused.value)
        assert (call[0](*call[1:], mask=Mask(True)) - expected[:, n : n + 1]).abs().max() < 1e-5


# ---------------------------------------------------------------------------------------------------
# Training.


def near(name: str, actual: Tensor, expected: Tensor, tolerance: float) -> float:
    """The worst error, absolute and relative to each value."""
    assert actual.isfinite().all(), f"{name} is not finite"
    worst = ((actual.double() - expected).abs() / (1 + expected.abs())).max().item()
    assert worst <= tolerance, f"{name} is off by {worst:.1e}, allowed {tolerance:.0e}"
    return worst


def loss(ranks, row: dict) -> str:
    """Cross entropy of sharded logits, and its gradient, as of one process that has all micro-batches and samples."""
    row = {"data": 1} | row
    found = on_ranks(ranks(row["mesh"][0] * row["mesh"][1] * row["data"]), _loss, row)
    counts, losses, errors, shards = zip(*found, strict=True)
    assert len(set(losses)) == 1, "ranks have other losses"
    for name in ("labels", "shift_labels"):
        if name in row["expect"]:
            assert [shard[name][0] for shard in shards] == row["expect"][name]
    if "targets" in row["expect"]:
        assert _targets(row)[1].flatten().tolist() == row["expect"]["targets"]  # and theirs is what ranks are held to
    assert set(counts) == {row["expect"]["count"]}
    assert losses[0] == row["expect"].get("loss", losses[0])
    return f"loss {losses[0]:.4f} over {counts[0]} targets, worst error of loss and gradient {max(errors):.0e}"


def _loss(row: dict) -> tuple[int, float, float, dict[str, list]]:
    """On a rank: targets counted, the loss of all micro-batches, the worst error, the last micro-batch's labels."""
    mesh = pool.mesh(*row["mesh"], row["data"])
    tokens = usp.partition(row["seq"], mesh, row["layout"])
    replica = dist.get_rank() // (tokens.ring * tokens.ulysses)
    batches, wanted = _targets(row)
    logits = normal(0, len(wanted), row["data"], row["seq"], row["vocabulary"]).float()
    if row.get("ignored_logits"):
        logits[wanted == -100] = float(row["ignored_logits"])

    counted = wanted != -100
    whole = logits.double().requires_grad_()
    chosen = whole[counted].log_softmax(-1)[torch.arange(int(counted.sum())), wanted[counted]]
    expected = -chosen.sum() / max(1, len(chosen))
    (expected_grad,) = torch.autograd.grad(expected, whole)

    shards = [usp.shard_batch({name: x[[replica]] for name, x in batch.items()}, mesh, tokens) for batch in batches]
    count = usp.count_targets(*(x["shift_labels"] for x in shards), mesh=mesh)
    total, errors = torch.zeros(()), []
    for n, shard in enumerate(shards):
        assert torch.equal(usp.unshard(shard["shift_labels"], mesh, tokens), wanted[n, [replica]])
        local = usp.shard(logits[n, [replica]], mesh, tokens).requires_grad_()
        part = usp.sequence_parallel_loss(
            local, shard["shift_labels"], mesh, num_items=count if len(shards) > 1 else None, gradients="sum"
        )
        (grad,) = torch.autograd.grad(part, local)
        assert (grad[shard["shift_labels"] == -100] == 0).all()
        grad = usp.unshard(grad, mesh, tokens)
        errors.append(near("a gradient", grad, expected_grad[n, [replica]], row["tolerance"]["grad"]))
        total += part.detach()
    errors.append(near("the loss", total, expected.detach(), row["tolerance"]["loss"]))
    kept = {name: shards[-1][name].tolist() for name in ("labels", "shift_labels") if name in shards[-1]}
    return count, total.item(), max(errors), kept


def _targets(row: dict) -> tuple[list[dict[str, Tensor]], Tensor]:
    """Micro-batches as a loader gives them, and the targets that they should have, (micro-batch, sample, seq)."""
    seq = row["seq"]
    if "labels" in row:
        labels = torch.tensor([row["labels"]])
        lengths = row.get("documents", [[seq]])[0]
        lasts = list(itertools.accumulate(lengths))
        wanted = [row["labels"][n + 1] if n + 1 not in lasts else -100 for n in range(seq)]
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        return [{"labels": labels, "position_ids": positions}], torch.tensor([[wanted]])
    local = seq // (row["mesh"][0] * row["mesh"][1])
    drawn = torch.randint(row["vocabulary"], (len(row["valid"]), row["data"], seq), generator=torch.manual_seed(1))
    for n, valid in enumerate(row["valid"]):  # of each rank, in contiguous shards
        gone = [k >= real for real in valid for k in range(local)]
        drawn[n].masked_fill_(torch.tensor(gone).view(row["data"], seq), -100)
    return [{"shift_labels": x} for x in drawn], drawn


class _OneAttention(nn.Module):
    def __init__(self, row: dict):
        super().__init__()
        torch.manual_seed(0)
        self.dim, inner = row["head_dim"], row["heads"] * row["head_dim"]
        self.q, self.o = nn.Linear(inner, inner, bias=False), nn.Linear(inner, inner, bias=False)
        self.k, self.v = (nn.Linear(inner, row["kv_heads"] * row["head_dim"], bias=False) for _ in range(2))

    def forward(self, x: Tensor, mesh, tokens: Partition) -> Tensor:
        q, k, v = (layer(x).unflatten(2, (-1, self.dim)) for layer in (self.q, self.k, self.v))
        return self.o(usp.hybrid_attention(q, k, v, mesh, tokens, mask=Mask(causal=True)).flatten(2))


ENGINES = ("none", "ddp", "fsdp2")


def train_step(ranks, row: dict) -> str:
    """Loss, gradients and their norm of one step: summed by hand, by DDP and by FSDP2 over all ranks, and alone."""
    row = variants({"data": 1} | row)[0]
    expected_loss, expected, expected_norm = _step_alone(row)
    norms = []
    for engine in ENGINES:
        found = on_ranks(ranks(row["mesh"][0] * row["mesh"][1] * row["data"]), _step, row, engine)
        assert len({value for value, _, _ in found}) == 1, f"{engine}: ranks have other losses"
        for value, gradients, norm in found:
            near(f"{engine}: the loss", torch.tensor(value), expected_loss, row["tolerance"]["loss"])
            assert gradients.keys() == expected.keys()
            for name, gradient in gradients.items():
                near(f"{engine}: {name}", gradient, expected[name], row["tolerance"]["grad"])
            assert abs(norm / expected_norm - 1) <= row["tolerance"]["norm"], (engine, norm, expected_norm)
            norms.append(norm)
    return (
        f"loss {expected_loss:.4f}, gradient norm {max(norms):.6f} by {', '.join(ENGINES)}; alone {expected_norm:.6f}"
    )


def _step_inputs(row: dict) -> tuple[Tensor, Tensor]:
    shape = row["data"], row["seq"], row["heads"] * row["head_dim"]
    return normal(1, *shape).float(), normal(2, *shape).float()


def _step_alone(row: dict) -> tuple[Tensor, dict[str, Tensor], float]:
    """In float64. A constant loss adds itself to the mean, and nothing to the gradients."""
    model = _OneAttention(row).double()
    x, wanted = (x.double() for x in _step_inputs(row))
    value = (model(x, None, Partition(row["seq"], "contiguous")) - wanted).square().mean()
    value.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), row.get("clip", torch.inf))
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return value.detach() + row.get("constant", 0.0), gradients, norm.item()


def _step(row: dict, engine: str) -> tuple[float, dict[str, Tensor], float]:
    """On a rank: the loss, and what an optimiser gets: gradients and the norm that they were clipped by."""
    mesh = pool.mesh(*row["mesh"], row["data"])
    tokens = usp.partition(row["seq"], mesh, row["layout"])
    replica = dist.get_rank() // (tokens.ring * tokens.ulysses)
    x, wanted = (usp.shard(x[[replica]], mesh, tokens) for x in _step_inputs(row))
    model: nn.Module = _OneAttention(row)
    if engine == "ddp":
        model = DistributedDataParallel(model)
    elif engine == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    of_tokens = (model(x, mesh, tokens) - wanted).square().mean(2) + row.get("constant", 0.0)
    gradients = "sum" if engine == "none" else "mean"
    value = usp.mean_over_ranks(of_tokens.sum(), of_tokens.numel(), mesh, gradients=gradients)
    value.backward()
    if engine == "none":
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
    norm = nn.utils.clip_grad_norm_(model.parameters(), row.get("clip", torch.inf))
    found = {name.removeprefix("module."): parameter.grad for name, parameter in model.named_parameters()}
    found |= {"norm": norm}
    found = {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in found.items()}
    norm = found.pop("norm").item()
    return value.item(), found, norm


def sampler(ranks, row: dict) -> str:
    """Which samples each rank gets, by epoch; then one rank's data are others'."""
    ring_size, ulysses = row["mesh"]
    sequence = ring_size * ulysses
    found = on_ranks(ranks(sequence * row["data"]), _sampler, row)
    for ids, _ in found:
        assert len({tuple(x) for x in ids}) == row["epochs"], "epochs have one order"
    for epoch in range(row["epochs"]):
        drawn = [ids[epoch] for ids, _ in found]
        groups = [drawn[n : n + sequence] for n in range(0, len(drawn), sequence)]
        assert all(ids == group[0] for group in groups for ids in group)
        assert sorted(itertools.chain(*(group[0] for group in groups))) == list(range(row["samples"]))
    messages = [text for _, text in found]
    own = range(row["odd_rank"] // sequence * sequence, (row["odd_rank"] // sequence + 1) * sequence)
    for rank, text in enumerate(messages):
        assert "batch['input_ids']" in text
        assert f"on rank {row['odd_rank']}" in text
        assert ("another rank refused" in text) == (rank not in own)
    text = f"{row['samples']} samples in {row['data']} disjoint parts; if rank {row['odd_rank']} has others: "
    return text + messages[row["odd_rank"]]


def _sampler(row: dict) -> tuple[list[list[int]], str]:
    mesh = pool.mesh(*row["mesh"], row["data"])

    def loader(first: int) -> usp.ShardedLoader:
        samples = [{"input_ids": torch.full((row["seq"],), first + n)} for n in range(row["samples"])]
        dealt = usp.sampler(samples, mesh, seed=row["seed"])
        return usp.ShardedLoader(DataLoader(samples, batch_size=row["batch"], sampler=dealt), mesh, row["layout"])

    given, ids = loader(0), []
    for epoch in range(row["epochs"]):
        given.set_epoch(epoch)
        ids.append([n for batch in given for n in batch["input_ids"][:, 0].tolist()])
    with pytest.raises(ValueError) as caught:
        next(iter(loader(100 if dist.get_rank() == row["odd_rank"] else 0)))
    return ids, str(caught.value)


def model(ranks, row: dict) -> str:
    """A small Llama on shards: equal to one process, or named as unfit."""
    from tests import models

    said = []
    ring, ulysses = row["mesh"]
    for rank in ranks(ring * ulysses)(models.step, "llama", "plain", ring, ulysses, row["layout"], {}, {}, None):
        (loss, logits, grads), (whole, whole_logits, whole_grads) = rank, models.alone("llama", "plain")
        assert abs(loss - whole) <= 1e-5 * abs(whole)
        near("logits", logits, whole_logits, 1e-4)
        for name, grad in grads.items():
            near(name, grad, whole_grads[name], 1e-4)
    for name in row.get("implementations", ()):
        for message in ranks(ring * ulysses)(models.other_attention, name, ring, ulysses):
            assert name in message
            said.append(message)
    if "implementations" in row:
        assert all(ranks(ring * ulysses)(models.first_reaches_last, ring, ulysses))
    if "unfit" in row:
        what, named = row["unfit"]
        for message in ranks(ring * ulysses)(models.refusal, what, ring, ulysses):
            assert named in message
            said.append(message)
    return "equal to one process; refused: " + said[0]


OPERATIONS: dict[str, Callable] = {
    "attention": attention,
    "balance": balance,
    "bytes": sent_bytes,
    **{
        function.__name__: function
        for function in (
            *(
                bad_meshes,
                choice,
                compiled_once,
                copies,
                degenerate,
                entry_points,
                even,
                flops,
                full_cache,
                half,
                joint,
                layout,
                local_documents,
                memory,
                merge,
            ),
            *(merge_orders, multiple, one_layout, padding, parts, rank_fails, replicas, sequence, story),
            *(loss, model, sampler, throughput, train_step),
        )
    },
}


def main() -> None:
    """Print a line a row; end with 1 if one is not right."""
    wanted, failed = set(sys.argv[1:]), 0
    if unknown := wanted - {row["id"] for row in ROWS}:
        sys.exit(f"no row {', '.join(sorted(unknown))} in cases.json")
    torch.set_num_threads(1)
    pools = pool.Pools()
    try:
        for row in ROWS:
            if wanted and row["id"] not in wanted:
                continue
            if "needs" in row and not importlib.util.find_spec(row["needs"]):
                print(f"{row['id']}  {row['what']} ({row['source']})\n      not run: needs {row['needs']}, see make hf")
                continue
            try:
                text = outcome(pools.of, row)
            except Exception:
                failed += 1
                text = "WRONG\n" + traceback.format_exc(limit=-3)
            print(f"{row['id']}  {row['what']} ({row['source']})\n      {text}", flush=True)
    finally:
        pools.close()
    count = sum(not wanted or row["id"] in wanted for row in ROWS)
    print(f"\n{count} rows, {failed} wrong")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
