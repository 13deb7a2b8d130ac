"""Shards are exact copies, come back whole, and their gradients follow Note [Gradients of shards]."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import usp
from tests import pool
from usp import Layout, Mask, Region
from usp.mesh import axes

LAYOUTS = [Layout.CONTIGUOUS, Layout.ZIGZAG, Layout.STRIPED]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_there_and_back(ranks, layout):
    """Any length, any dim; integers, so that equal means equal."""
    for world, ring in ((1, 1), (4, 2), (4, 1), (4, 4), (6, 3)):
        assert ranks(world)(_round_trip, ring, world // ring, layout) == [True] * world


def _round_trip(ring: int, ulysses: int, layout: Layout) -> bool:
    mesh = pool.mesh(ring, ulysses)
    for seq in (1, 2, 7, 24, 31):
        tokens = usp.partition(seq, mesh, layout)
        for dim in (0, 1, 2, -1):
            shape = [2, 2, 2]
            shape[dim] = seq
            x = torch.arange(4 * seq).view(shape)
            local = usp.shard(x, mesh, tokens, dim=dim, fill=-100)
            assert local.shape[dim] == tokens.seq_local
            assert local.untyped_storage().nbytes() == local.numel() * local.element_size()
            assert torch.equal(usp.unshard(local, mesh, tokens, dim=dim), x)
        place = usp.positions(mesh, tokens)
        ids = usp.shard(torch.arange(seq)[None], mesh, tokens, fill=-100)
        assert torch.equal(torch.where(place < seq, place, -100), ids)
        everyone = [torch.empty_like(place) for _ in range(ring * ulysses)]
        dist.all_gather(everyone, place)
        assert torch.equal(torch.cat(everyone, 1).sort().values, torch.arange(tokens.padded)[None])
    return True


def test_one_ring_rank_holds_its_chunks(ranks):
    """Zigzag over 2 ring ranks: the four ranks of ring rank r hold chunks r and 3 - r together."""
    found = dict.fromkeys(range(2), ())
    for ring_rank, place in ranks(8)(_chunks):
        found[ring_rank] += tuple(place)
    assert sorted(found[0]) == [*range(8), *range(24, 32)]
    assert sorted(found[1]) == [*range(8, 24)]


def _chunks() -> tuple[int, list[int]]:
    mesh = pool.mesh(2, 4)
    return axes(mesh)[0].rank, usp.positions(mesh, usp.partition(32, mesh, "zigzag"))[0].tolist()


def test_positions_restart_in_documents():
    tokens = usp.Partition(8, "contiguous")
    mask = Mask(causal=True, documents=(((0, 3), (3, 8)), ((2, 8),)))
    expected = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [0, 0, 0, 1, 2, 3, 4, 5]])
    assert torch.equal(usp.positions(None, tokens, mask=mask), expected)
    later = usp.Partition(3, "contiguous", start=(5, 2))
    assert torch.equal(usp.positions(None, later), torch.tensor([[5, 6, 7], [2, 3, 4]]))
    assert torch.equal(usp.positions(None, later, mask=mask), torch.tensor([[2, 3, 4], [0, 1, 2]]))


def test_positions_where_regions_are_told_apart_by_row():
    """Documents for all rows beside regions for each; a mask of regions alone does not say where documents begin."""
    tokens = usp.Partition(6, "contiguous")
    two = [[Region((0, 2), (0, 2))], []]
    mask = Mask(True, documents=[[(0, 4), (4, 6)]], regions=two)
    assert usp.positions(None, tokens, mask=mask).tolist() == [[0, 1, 2, 3, 0, 1]] * 2
    for mask in (
        Mask.from_attention_mask([[1, 1, 1, 1, 0, 0], [1, 0, 1, 1, 1, 1]], causal=True),
        Mask.from_cu_seqlens([0, 6], [0, 9], causal=True),
    ):
        with pytest.raises(ValueError, match="has regions and no documents to count positions in"):
            usp.positions(None, tokens, mask=mask)


def test_shards_do_not_share_memory():
    x = torch.arange(8)
    local = usp.shard(x, None, usp.Partition(8, "contiguous"), dim=0)
    x.zero_()
    assert torch.equal(local, torch.arange(8))


def test_gradients_of_shards(ranks):
    """The loss is the sum over ranks: shard gives this rank's share, unshard adds up what all ranks want."""
    assert ranks(6)(_shard_gradients) == [True] * 6


def _shard_gradients() -> bool:
    mesh = pool.mesh(3, 2)
    tokens = usp.partition(13, mesh, "zigzag")
    rank = dist.get_rank()
    x = torch.arange(13.0, requires_grad=True)
    local = usp.shard(x, mesh, tokens, dim=0)
    weight = torch.arange(1.0, local.numel() + 1) * (rank + 1)
    (share,) = torch.autograd.grad((local * weight).sum(), x)
    dist.all_reduce(share)
    weights = usp.unshard(weight, mesh, tokens, dim=0)
    assert torch.equal(share, weights)

    local = usp.shard(x.detach(), mesh, tokens, dim=0).requires_grad_()
    whole = usp.unshard(local, mesh, tokens, dim=0)
    (grad,) = torch.autograd.grad((whole * torch.arange(13.0) * (rank + 1)).sum(), local)
    return torch.equal(grad, usp.shard(torch.arange(13.0) * 21, mesh, tokens, dim=0))


def test_wrong_lengths_are_refused():
    tokens = usp.Partition(8, "contiguous")
    with pytest.raises(ValueError, match=r"dim 1 of x is 9 long.*seq=8"):
        usp.shard(torch.zeros(1, 9), None, tokens)
    with pytest.raises(ValueError, match=r"dim 1 of x is 9 long.*is 8"):
        usp.unshard(torch.zeros(1, 9), None, tokens)
    with pytest.raises(ValueError, match=r"ring=2 x ulysses=1, the mesh has ring=1"):
        usp.shard(torch.zeros(1, 8), None, usp.Partition(8, "contiguous", 2))
