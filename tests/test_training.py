"""Batches that are spread over ranks: targets, documents, losses, loaders, and what is refused on every rank."""

from __future__ import annotations

import dataclasses
import itertools
import re
import time
from collections.abc import Callable

import jaxtyping
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler
from torch.utils.data.distributed import DistributedSampler

import usp
from tests import oracle, pool
from usp import Layout, Mask, Partition, training


def as_a_user(function: Callable, *args):
    """On a rank, without the type checks of the tests: the library's own errors are the subject."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        return function(*args)
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


def targets_of(labels: list[int], documents: list[int]) -> list[int]:
    """The definition: the next token's label, if it is there and of the same document."""
    pairs = zip(documents, documents[1:], labels[1:], strict=False)
    return [label if here == there != 0 else -100 for here, there, label in pairs] + [-100]


# ---------------------------------------------------------------------------------------------------
# Batches.

SEQ = 13


def whole_batch() -> dict:
    """Two rows, the first packed, the second padded; and what a user may have beside."""
    generator = torch.Generator().manual_seed(0)
    return {
        "input_ids": torch.randint(1, 50, (2, SEQ), generator=generator),
        "labels": torch.randint(50, (2, SEQ), generator=generator, dtype=torch.int32),
        "attention_mask": torch.tensor([[1] * 4 + [2] * 9, [1] * 10 + [0] * 3]),
        "scores": torch.randn(2, SEQ, 3, generator=generator),
        "flags": torch.rand(2, SEQ, generator=generator) < 0.5,
        "temperature": 0.5,
        "step": torch.tensor(7),
        "token_type_ids": None,
    }


@pytest.mark.parametrize(("ring", "ulysses"), [(2, 2), (1, 3), (3, 1)])
def test_there_and_back(ranks, ring, ulysses):
    """Every tensor is cut by one index, and comes back whole; targets are of the whole sequence."""
    ranks(ring * ulysses)(_there_and_back, ring, ulysses)


def test_there_and_back_alone():
    _there_and_back(1, 1)


def _there_and_back(ring: int, ulysses: int) -> None:
    mesh = pool.mesh(ring, ulysses) if ring * ulysses > 1 else None
    batch = whole_batch()
    before = {name: x.clone() for name, x in batch.items() if isinstance(x, Tensor)}
    documents = batch["attention_mask"].tolist()
    wanted = [targets_of(*row) for row in zip(batch["labels"].tolist(), documents, strict=True)]
    for layout in Layout:
        mask = usp.batch_mask(batch, causal=True) if layout == "balanced" else None
        tokens = usp.partition(SEQ, mesh, layout, mask=mask)
        shard = usp.shard_batch(batch, mesh, tokens)
        spread = shard.pop("usp")
        assert (spread.tokens, spread.mask(causal=True)) == (tokens, usp.batch_mask(batch, causal=True))
        assert spread.mask(causal=True) is spread.mask(causal=True)
        assert (shard.pop("temperature"), shard.pop("step")) == (0.5, 7)
        kept = {"input_ids", "labels", "scores", "flags", "position_ids", "shift_labels"}
        assert shard.keys() == kept
        back = {name: usp.unshard(x, mesh, tokens) for name, x in shard.items()}
        assert all(torch.equal(back[name], batch[name]) for name in kept & batch.keys())
        assert back["position_ids"].tolist() == [list(range(SEQ))]
        assert (back["shift_labels"].tolist(), back["shift_labels"].dtype) == (wanted, torch.int32)
        padding = usp.positions(mesh, tokens)[0] >= SEQ
        for name, x in shard.items():
            assert x.shape[1] == tokens.seq_local
            assert (x[:, padding] == (-100 if name in ("labels", "shift_labels") else 0)).all()
            x.zero_()  # copies
    assert all(torch.equal(x, batch[name]) for name, x in before.items())


DOCUMENTS = {
    "nothing said": (None, None, None),
    "all ones and counted from 0": ([[0, 1, 2, 3, 4, 5]], [[1] * 6, [1] * 6], None),
    "one number": (None, [[3] * 6, [3] * 6], None),
    "restarts, for all rows": ([[0, 1, 0, 0, 1, 2]], None, [[1, 1, 2, 3, 3, 3]]),
    "restarts, by row": ([[0, 1, 2, 3, 0, 1], [0, 1, 0, 1, 2, 3]], None, [[1, 1, 1, 1, 2, 2], [1, 1, 2, 2, 2, 2]]),
    "numbers": (None, [[7, 7, 2, 2, 0, 0], [1] * 6], [[1, 1, 2, 2, 0, 0], [1] * 6]),
    "rows alike": (None, [[1, 1, 1, 1, 0, 0]] * 2, [[1, 1, 1, 1, 0, 0]]),
    "left, right, and nothing but padding": (None, [[0, 0, 1, 1, 1, 1], [0] * 6], [[0, 0, 1, 1, 1, 1], [0] * 6]),
    "holes": (None, [[1, 1, 0, 1, 1, 0], [1] * 6], [[1, 1, 0, 1, 1, 0], [1] * 6]),
    "left padding, counted from the first token": (
        [[1, 1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]],
        [[0, 0, 1, 1, 1, 1], [1] * 6],
        [[0, 0, 1, 1, 1, 1], [1] * 6],
    ),
    "left padding, counted from the row's begin, beside a packed row": (
        [[0, 1, 2, 3, 4, 5], [0, 1, 0, 1, 2, 3]],
        [[0, 0, 1, 1, 1, 1], [1] * 6],
        [[0, 0, 1, 1, 1, 1], [1, 1, 2, 2, 2, 2]],
    ),
    "numbers change where positions go on": (
        [[0, 1, 2, 3, 0, 1]],
        [[1, 1, 2, 2, 2, 2], [1, 1, 1, 1, 1, 0]],
        [[1, 1, 2, 2, 3, 3], [1, 1, 1, 1, 2, 0]],
    ),
}


@pytest.mark.parametrize(("positions", "numbers", "documents"), DOCUMENTS.values(), ids=DOCUMENTS)
def test_documents(positions, numbers, documents):
    """Who sees whom and what each token is to say, whatever says where documents are."""
    labels = torch.arange(12).view(2, 6)
    given = {"position_ids": positions, "attention_mask": numbers}
    batch = {"labels": labels} | {name: torch.tensor(x) for name, x in given.items() if x}
    tokens = Partition(6, "contiguous")
    shard = usp.shard_batch(batch, None, tokens)
    expected = documents or [[1] * 6]
    rows = expected * (2 // len(expected))
    assert shard["shift_labels"].tolist() == [targets_of(*x) for x in zip(labels.tolist(), rows, strict=True)]
    assert shard["usp"].mask(causal=False).rows == len(expected)
    i, j = torch.arange(6)[:, None], torch.arange(6)
    for (causal, window), (row, numbering) in itertools.product(
        [(True, None), (False, None), (True, 2), (False, 2)], enumerate(torch.tensor(rows))
    ):
        seen = (numbering[:, None] == numbering) & (numbering != 0)
        seen &= ((j <= i) | (not causal)) & ((i - j).abs() < (window or 6))
        mask = shard["usp"].mask(causal=causal, window=window)
        assert torch.equal(oracle.visible(mask, tokens, tokens, row), seen), mask
        assert mask == usp.batch_mask(batch, causal=causal, window=window)
    assert (shard["usp"].mask(causal=True) == Mask(causal=True)) == (documents is None)


def test_targets_that_are_given_stay():
    targets = torch.tensor([[3, -100, 1]])
    batch = {"labels": torch.tensor([[9, 9, 9]]), "shift_labels": targets}
    assert torch.equal(usp.shard_batch(batch, None, Partition(3, "contiguous"))["shift_labels"], targets)


def test_a_token_alone_has_no_target():
    shard = usp.shard_batch({"labels": torch.ones(2, 1, dtype=torch.long)}, None, Partition(1, "contiguous"))
    assert shard["shift_labels"].tolist() == [[-100], [-100]]


def test_a_long_batch_takes_no_loop_over_tokens():
    """131,072 tokens in 100 documents: a tenth of a second would be spent on Python's integers."""
    seq = 131_072
    positions = torch.arange(seq)[None] % 1_311
    batch = {"input_ids": torch.zeros_like(positions), "position_ids": positions}
    took_s = []
    for _ in range(3):
        start_s = time.process_time()
        assert len(usp.batch_mask(batch, causal=True).documents[0]) == 100
        took_s.append(time.process_time() - start_s)
    assert min(took_s) < 0.05  # 0.008 on a slow core


@pytest.mark.parametrize("step", [8, 1 << 22], ids=["piece by piece", "at once"])
def test_digest(step, monkeypatch):
    """No two of these are the same; how a tensor lies in memory makes no difference."""
    monkeypatch.setattr(training, "_PIECE", step)

    def two_of(value: float, dtype: torch.dtype) -> list[Tensor]:
        found = []
        for pair in itertools.combinations(range(12), 2):
            found.append(torch.zeros(1, 12, dtype=dtype))
            found[-1][0, list(pair)] = torch.tensor(value).to(dtype)
        return found

    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.bool, torch.uint8)
    tensors = [x for dtype in dtypes for x in two_of(1, dtype)]
    tensors += [x for dtype in dtypes[:3] for x in two_of(-0.0, dtype)]
    tensors += (
        two_of(-1, torch.int64)
        + two_of(-2, torch.int64)
        + two_of(torch.nan, torch.bfloat16)
        + two_of(2, torch.complex128)
    )
    tensors += [torch.zeros(1, 12, dtype=dtype) for dtype in (*dtypes, torch.complex128)]
    tensors += [torch.zeros(shape) for shape in ((2, 0), (0, 2), (1, 2, 0), (1, 1), (1,), (12,), (12, 1), (2, 6))]
    tensors += [torch.tensor([[n, 0]]) for n in (-100, -3, -2, 2, 99, 1 << 62, -(1 << 63))]  # ~n of each other too
    tensors += [torch.arange(12).view(4, 3), torch.arange(12).view(3, 4).T.contiguous()]
    digests = [training.digest(x) for x in tensors]
    assert len(set(digests)) == len(tensors)
    x = torch.arange(40, dtype=torch.uint8)
    for view in (x[1:17], x[1:34:2], x.view(5, 8).T, x[:1].expand(3, 9)):
        assert training.digest(view) == training.digest(view.clone(memory_format=torch.contiguous_format))


# ---------------------------------------------------------------------------------------------------
# What is refused.

WRONG = {
    "a dense mask": ({"attention_mask": torch.ones(2, 1, SEQ, SEQ)}, r"attention_mask is \(2, 1, 13, 13\).*usp.Mask"),
    "an additive mask": ({"attention_mask": torch.full((2, SEQ), -torch.inf)}, "attention_mask holds -inf"),
    "half a mask": ({"attention_mask": torch.full((2, SEQ), 0.5)}, "attention_mask holds 0.5"),
    "ids of a shard": ({"input_ids": torch.ones(2, 5, dtype=torch.long)}, r"'input_ids'. is \(2, 5\), .* 13 tokens"),
    "a label a row": ({"labels": torch.ones(2)}, r"labels is \(2,\) of torch.float32: give \(batch, seq\)"),
    "labels that cannot be -100": ({"labels": torch.ones(2, SEQ, dtype=torch.uint8)}, "uint8.*holds -100"),
    "rows that differ": ({"scores": torch.ones(3, SEQ)}, r"'scores'. is \(3, 13\), .* 2 rows \(of 'input_ids'\)"),
    "positions of three axes": ({"position_ids": torch.ones(3, 2, SEQ)}, r"position_ids is \(3, 2, 13\)"),
    "positions that jump": ({"position_ids": torch.arange(SEQ)[None] // 2 * 2}, "position_ids holds 2 at index 2 of"),
    "positions from 5": ({"position_ids": torch.arange(5, 5 + SEQ)[None]}, "position_ids holds 5 at index 0 of row 0"),
    "a shard": ({"usp": None}, "sharded already"),
    "text": ({"text": ["a", "b"]}, r"'text'. is a list: give tensors, numbers or None"),
    "no dict": (3, "the batch is a int"),
    "nothing": (dict.fromkeys(whole_batch()), r"the batch has no tensors, only .*'temperature'"),
    "a start": ({"tokens": {"start": 4}}, "tokens starts at 4"),
    "another mesh": ({"tokens": {"ring": 4, "ulysses": 1}}, r"ring=4 x ulysses=1, the mesh has ring=2 x ulysses=2"),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG)
def test_one_rank_has_a_wrong_batch(ranks, change, message):
    """All raise and say why; the next batch is taken."""
    first, own, *others = ranks(4)(as_a_user, _refused, change)
    assert re.search(message, own), own
    for text in (first, *others):
        assert text == f"another rank refused this call, so it was not begun: rank 1: {own}"


OTHER = {
    "another token": ({"input_ids": torch.ones(2, SEQ, dtype=torch.long)}, ["batch['input_ids']"]),
    "another dtype": ({"labels": torch.zeros(2, SEQ, dtype=torch.long)}, ["batch['labels']", "torch.int64", "int32"]),
    "a tensor fewer": ({"flags": None}, ["batch['flags']", "absent on rank 1"]),
    "a tensor more": ({"weights": torch.ones(2, SEQ)}, ["batch['weights']", "absent on rank 0, 2, 3"]),
    "another number": ({"temperature": 0.7}, ["('temperature', 0.7)"]),
    "another layout": ({"tokens": {"layout": "striped"}}, ["tokens", "'zigzag'", "'striped'"]),
}


@pytest.mark.parametrize(("change", "names"), OTHER.values(), ids=OTHER)
def test_one_rank_has_another_batch(ranks, change, names):
    """All raise; what is the same is not named."""
    for text in ranks(4)(as_a_user, _refused, change):
        assert all(name in text for name in (*names, "on rank 1", "on rank 0, 2, 3")), text
        assert text.count(" on rank 1") == 1


def _refused(change) -> str:
    mesh, batch = pool.mesh(2, 2), whole_batch()
    tokens = usp.partition(SEQ, mesh, "zigzag")
    own, of = batch, tokens
    if dist.get_rank() == 1:
        own = batch | change if isinstance(change, dict) else change
        of = dataclasses.replace(tokens, **own.pop("tokens", {})) if isinstance(own, dict) else tokens
    with pytest.raises(ValueError) as caught:
        usp.shard_batch(own, mesh, of)
    usp.shard_batch(batch, mesh, tokens)
    return str(caught.value)


# ---------------------------------------------------------------------------------------------------
# Losses.


@pytest.mark.parametrize("gradients", ["mean", "sum"])
def test_a_loss_of_ones_own(ranks, gradients):
    """Weighted squares, three micro-batches, a replica without rows: the mean of all, and the gradient for its use."""
    ranks(4)(_own_loss, gradients)


def _own_loss(gradients: str) -> None:
    mesh, seq = pool.mesh(1, 2, 2), 5
    replica = mesh.get_local_rank("data")
    tokens = usp.partition(seq, mesh, "contiguous")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 2, seq, generator=generator, dtype=torch.float64)  # micro-batch, row, token
    weights = torch.rand(3, 2, seq, generator=generator, dtype=torch.float64)
    whole = x.clone().requires_grad_()
    expected = (weights * whole.square()).sum() / weights.sum()
    (expected_grad,) = torch.autograd.grad(expected, whole)
    total, pairs = torch.zeros((), dtype=torch.float64), []
    for n in range(3):
        mine = slice(2) if replica == 0 else slice(0)  # the other replica has no rows, and calls all the same
        local = usp.shard(x[n, mine], mesh, tokens).requires_grad_()
        weight = usp.shard(weights[n, mine], mesh, tokens)
        loss = usp.mean_over_ranks(
            (weight * local.square()).sum(), weight.sum(), mesh, num_items=weights.sum(), gradients=gradients
        )
        (grad,) = torch.autograd.grad(3 * loss, local)
        pairs.append((grad, usp.shard(expected_grad[n, mine], mesh, tokens) * (3 * 4 if gradients == "mean" else 3)))
        total += loss.detach()
    assert all(torch.allclose(grad, wanted, rtol=1e-12, atol=0) for grad, wanted in pairs)
    assert torch.allclose(total, expected, rtol=1e-12, atol=0)


def test_targets_are_counted_over_all(ranks):
    """Two micro-batches on both ranks of one replica, none on the other."""
    assert ranks(4)(_counted) == [2 * (3 + 1)] * 4


def _counted() -> int:
    mesh = pool.mesh(2, 1, 2)
    given = [torch.tensor([[5, -100, 0], [0, -100, -100]]), torch.tensor([[-100, 7]])]
    return usp.count_targets(*([] if mesh.get_local_rank("data") else given), mesh=mesh)


LOSSES = {
    "a target too large": ({"targets": 11}, "targets hold 11, but logits are of a vocabulary of 11"),
    "another ignored number": ({"targets": -1}, "targets hold -1, .* or -100 where there is none"),
    "targets of other tokens": ({"targets": torch.zeros(1, 5, dtype=torch.long)}, r"targets \(1, 5\) of torch.int64"),
    "targets that are no whole numbers": ({"targets": torch.zeros(1, 4)}, "float32.*whole numbers"),
    "a word": ({"gradients": "average"}, "gradients='average' is not one of"),
    "fewer than no targets": ({"num_items": -3}, "num_items=-3: give the number of all targets"),
    "other numbers": ({"num_items": 7}, "num_items: 8.0 on rank 0, 2, 3, 7.0 on rank 1"),
}


@pytest.mark.parametrize(("change", "message"), LOSSES.values(), ids=LOSSES)
def test_one_rank_has_a_wrong_loss(ranks, change, message):
    """All ranks and replicas raise; nobody waits for a sum."""
    for text in ranks(4)(as_a_user, _refused_loss, change):
        assert re.search(message, text), text


def _refused_loss(change: dict) -> str:
    mesh = pool.mesh(1, 2, 2)
    logits, call = torch.zeros(1, 4, 11), {"targets": torch.zeros(1, 4, dtype=torch.int32), "num_items": 8}
    assert torch.allclose(usp.sequence_parallel_loss(logits, mesh=mesh, **call), torch.tensor(11.0).log() * 2)
    if dist.get_rank() == 1:
        if isinstance(change.get("targets"), int):
            change = {"targets": torch.tensor([[-100, 0, 0, change["targets"]]])}
        call = call | change
    with pytest.raises(ValueError) as caught:
        usp.sequence_parallel_loss(logits, mesh=mesh, **call)
    return str(caught.value)


def test_a_total_is_one_number():
    def mean(*args, **how) -> None:
        as_a_user(lambda: usp.mean_over_ranks(*args, None, **how))

    for total, count, text in (((3,), (), "total is (3,)"), ((), (2, 3), "count is (2, 3)")):
        with pytest.raises(ValueError, match=re.escape(text)):
            mean(torch.zeros(total), torch.ones(count))
    with pytest.raises(ValueError, match="gradients='max'"):
        mean(torch.zeros(()), 1, gradients="max")


# ---------------------------------------------------------------------------------------------------
# Loaders.


def samples(count: int, seq: int = 8) -> list[dict[str, Tensor]]:
    """Of one number each, packed in two documents that differ in length."""
    places = [[*range(n % 5 + 1), *range(seq - n % 5 - 1)] for n in range(count)]
    return [{"input_ids": torch.full((seq,), n), "position_ids": torch.tensor(x)} for n, x in enumerate(places)]


def test_a_loader(ranks):
    """Batches are the same in a sequence; replicas share out the samples; epochs differ; each batch is balanced."""
    found = ranks(4)(_loaded)
    for epoch in range(2):
        a, b, c, d = (drawn[epoch] for drawn in found)
        assert (a, c) == (b, d)
        assert sorted(a + c) == list(range(12))
    assert found[0][0] != found[0][1]
    alone = usp.ShardedLoader(DataLoader(samples(3)), None, "balanced")
    assert [batch["input_ids"].unique().tolist() for batch in alone] == [[0], [1], [2]]


def _loaded() -> list[list[int]]:
    mesh, data, found = pool.mesh(2, 1, 2), samples(12), []
    loader = usp.ShardedLoader(
        DataLoader(data, batch_size=2, sampler=usp.sampler(data, mesh, seed=1)), mesh, "balanced"
    )
    assert len(loader) == 3
    for epoch in range(2):
        loader.set_epoch(epoch)
        drawn = []
        for batch in loader:
            tokens = batch["usp"].tokens
            ids, positions = (usp.unshard(batch[name], mesh, tokens) for name in ("input_ids", "position_ids"))
            whole = [data[n] for n in ids[:, 0].tolist()]
            assert torch.equal(ids, torch.stack([x["input_ids"] for x in whole]))
            assert torch.equal(positions, torch.stack([x["position_ids"] for x in whole]))
            mask = Mask.from_position_ids(positions.tolist(), causal=True)
            assert tokens == usp.partition(8, mesh, "balanced", mask=mask)
            drawn += ids[:, 0].tolist()
        found.append(drawn)
    return found


def test_one_rank_has_a_wrong_loader(ranks):
    """A batch that fails, is another one or is missing on one rank is an error on all, replicas too."""
    for fails, misses, differs in ranks(4)(as_a_user, _wrong_loaders):
        assert "no such file" in fails
        assert "another batch: True on rank 0" in misses
        assert "batch['input_ids'] (ranks of a sequence draw the same samples: usp.sampler)" in differs


class Failing(list):
    def __getitem__(self, n):
        if n == 2:
            raise ValueError("no such file")
        return super().__getitem__(n)


def _wrong_loaders() -> list[str]:
    mesh, texts = pool.mesh(2, 1, 2), []
    for make in (Failing, lambda x: x[:2], lambda x: [x[5], *x[1:]]):
        data = samples(8)
        sampler = usp.sampler(data, mesh, shuffle=False)
        if dist.get_rank() == 1:
            data = make(data)
            sampler = usp.sampler(data, mesh, shuffle=False)
        with pytest.raises(ValueError) as caught:
            list(usp.ShardedLoader(DataLoader(data, sampler=sampler), mesh, "zigzag"))
        texts.append(str(caught.value))
    return texts


def test_replicas_need_their_own_samples(ranks):
    for rank, (text, other) in enumerate(ranks(4)(_wrong_samplers)):
        assert f"data=2 and this rank is replica {rank // 2}, but the loader's sampler is a RandomSampler" in text
        assert "num_replicas=4" in other
        assert "sampler=usp.sampler(dataset, mesh)" in other


def _wrong_samplers() -> list[str]:
    mesh, data, texts = pool.mesh(2, 1, 2), samples(8), []
    for sampler in (RandomSampler(data), DistributedSampler(data)):
        with pytest.raises(ValueError) as caught:
            usp.ShardedLoader(DataLoader(data, sampler=sampler), mesh, "zigzag")
        texts.append(str(caught.value))
    usp.ShardedLoader(DataLoader(data), None, "zigzag").set_epoch(1)  # in order, whatever the epoch
    return texts
