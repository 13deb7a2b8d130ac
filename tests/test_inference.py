"""Prefill and decode over a sharded KV cache: token by token equal to dense attention in float64."""

from __future__ import annotations

import csv
import itertools
import random
import re
from functools import partial
from pathlib import Path

import jaxtyping
import numpy
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import usp
from analysis import published
from tests import inference, pool
from tests.inference import Decode, Reject, Reset, Story, Turn
from usp import Mask
from usp.heads import runs
from usp.inference import KVCache, Rates, decode_attention, prefill_attention
from usp.inference.volumes import DECODE, PREFILL, decode_volume, exposed
from usp.ledger import OWNERS

MESHES = [(ring, ulysses) for ring in (1, 2, 3, 4, 6, 8) for ulysses in (1, 2, 4) if ring * ulysses <= 8]


def told(ranks, story: Story) -> list:
    world = story.ring * story.ulysses
    return ranks(world)(inference.check, story)[0] if world > 1 else inference.check(story)


@pytest.mark.parametrize("algorithm", DECODE)
def test_two_hundred_tokens(ranks, algorithm):
    told(ranks, Story(2, 2, (Turn((13, 13)), Decode(200, algorithm))))


@pytest.mark.parametrize("algorithm", DECODE)
@pytest.mark.parametrize(("ring", "ulysses"), [mesh for mesh in MESHES if mesh[0] * mesh[1] <= 4])
def test_every_mesh(ranks, ring, ulysses, algorithm):
    """From nothing, and further, with and without gathering; heads that do not divide over the ring."""
    layout = ("contiguous", "zigzag", "striped")[DECODE.index(algorithm) % 3]
    events = Decode(5, algorithm), Turn((11, 11, 11), layout), Decode(10, algorithm), Decode(5, algorithm, gather=False)
    told(ranks, Story(ring, ulysses, events, batch=3, heads=8, kv_heads=4))


@pytest.mark.parametrize(("ring", "ulysses"), [mesh for mesh in MESHES if mesh[0] * mesh[1] > 4])
def test_every_large_mesh(ranks, ring, ulysses):
    """The same, all algorithms in turns: from nothing, after a prompt, and without gathering."""
    events = [Decode(1, algorithm) for algorithm in DECODE] + [Turn((11, 11, 11), "zigzag")]
    events += [Decode(2, algorithm) for algorithm in DECODE]
    events += [Decode(1, algorithm, gather=False) for algorithm in DECODE]
    told(ranks, Story(ring, ulysses, tuple(events), batch=3, heads=8, kv_heads=4))


LAYOUTS = ("contiguous", "zigzag", "striped")
SQUARE = [  # every mesh has every layout and every algorithm, every layout every algorithm
    (*mesh, layout, PREFILL[(n + m) % 3])
    for n, mesh in enumerate([(1, 1), (2, 1), (4, 1), (2, 2), (3, 2), (8, 1)])
    for m, layout in enumerate(LAYOUTS)
]


@pytest.mark.parametrize(("ring", "ulysses", "layout", "algorithm"), SQUARE)
def test_turns(ranks, ring, ulysses, layout, algorithm):
    """Prompts of unequal lengths, decoding between them, turns of a token and of more than all before, chunks."""
    others = [x for x in LAYOUTS if x != layout]
    events = (
        Turn((17, 5, 0), layout, algorithm),
        Decode(3),
        Turn((1, 1, 1), layout, algorithm),
        Decode(3, seq=2),
        Turn((4, 30, 9), others[0], algorithm),
        *(Turn((6, 6, 6), layout, algorithm) for _ in range(3)),
        Turn((40, 40, 3), others[1], algorithm),
        Decode(2),
    )
    told(ranks, Story(ring, ulysses, events, batch=3, owner="shortest", capacity=400))


EVERYTHING = (
    Turn((9, 21), "zigzag", "pass_q"),
    Decode(3, "pass_q"),
    Decode(2, "helix", seq=3),
    Turn((7, 7), "contiguous", "pass_kv"),
    Decode(3, "tree"),
    Decode(2, "all_to_all", seq=2, gather=False),
    Decode(2, "gather_q", seq=3),
    Turn((5, 2), "zigzag", "all_gather"),
    Decode(2),
)
OPTIONS = {
    "window": {"window": 6},
    "long window": {"window": 23},
    "both ways": {"causal": False},
    "both ways, window": {"causal": False, "window": 7},
    "first tokens beside a window": {"window": 5, "first": 2},
    "sinks": {"sinks": True},
    "sinks and a window": {"sinks": True, "window": 4},
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi": True},
    "alibi, both ways": {"alibi": True, "causal": False},
    "alibi on the fused kernel": {"alibi": True, "backend": "sdpa"},
    "relative bias": {"bias": "t5 decoder"},
    "offsets clipped": {"bias": "clipped", "window": 9},
    "values of another dim": {"head_dim_v": 12},
    "large blocks": {"block": 16},
    "blocks of one": {"block": 1, "owner": "shortest"},
    "everything written out": {"backend": "tiled", "softcap": 2.0, "sinks": True, "window": 11},
    "one KV head": {"kv_heads": 1, "replicate_kv": True},
    "heads that do not divide": {"heads": 9, "kv_heads": 3},
    "no groups": {"heads": 3, "kv_heads": 3, "head_dim": 4, "head_dim_v": 4},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(ranks, name):
    """Half of them on 2 x 2 ranks and half on a ring of 3, in one story each with all algorithms."""
    ring, ulysses = ((2, 2), (3, 1))[list(OPTIONS).index(name) % 2]
    told(ranks, Story(ring, ulysses, EVERYTHING, **OPTIONS[name]))


@pytest.mark.parametrize(
    ("algorithm", "dtype"),
    [*itertools.product(DECODE, [torch.bfloat16]), ("helix", torch.float32), ("tree", torch.float16)],
)
def test_lower_precision(ranks, algorithm, dtype):
    """Many tokens whose lse differ between ranks by what bfloat16 would round away, on a base that is not 2."""
    events = Turn((64, 40), "zigzag", "pass_q"), Decode(20, algorithm), Turn((9, 9), "striped", "pass_kv"), Decode(4)
    told(ranks, Story(4, 1, events, dtype=dtype, head_dim=16, head_dim_v=16))


def test_rejected_tokens(ranks):
    """Drafts are decoded together and partly taken back, also across blocks, turns and to nothing; rows begin anew."""
    events = (
        Turn((6, 11), "zigzag"),
        *(event for n in range(6) for event in (Decode(1, DECODE[n % 5], seq=5), Reject((n % 6, (5 - n) % 6)))),
        Reject((9, 2)),
        Decode(3, seq=3),
        Reset((1,)),
        Turn((0, 8), "striped"),
        Decode(4, seq=2),
        Reject((4, 16)),
        Decode(3),
    )
    for owner in ("rotate", "shortest"):
        told(ranks, Story(2, 2, events, owner=owner))
        told(ranks, Story(4, 1, events, owner=owner, block=1))


def test_rejected_tokens_may_have_been_anything(ranks):
    """What a slot held before is nobody's: not even NaN gets into what comes after."""
    assert all(ranks(2)(_rejected_nan))


def _rejected_nan() -> bool:
    mesh = pool.mesh(2, 1)
    made = {"batch": 3, "capacity": 90, "kv_heads": 2, "head_dim": 8, "dtype": torch.float32}
    clean, used = KVCache(mesh, **made), KVCache(mesh, **made)
    for cache in (clean, used):
        prefill(mesh, cache, seq=9, batch=3, mask=Mask.padded([9, 2, 5], 9, causal=True))
    draft = torch.full((3, 30, 4, 8), torch.nan)
    decode_attention(draft, draft[:, :, :2], draft[:, :, :2], mesh, used, mask=CAUSAL)
    used.truncate(clean.lengths)
    for algorithm, seq in itertools.product(DECODE, (1, 3)):
        outs = [decode(mesh, cache, seq=seq, batch=3, algorithm=algorithm) for cache in (clean, used)]
        assert torch.equal(*outs), (algorithm, seq)
    for algorithm in PREFILL:
        more = {"seq": 4, "batch": 3, "start": clean.start, "algorithm": algorithm}
        outs = [prefill(mesh, cache, **more)[0] for cache in (clean, used)]
        assert torch.equal(*outs), algorithm
        assert outs[0].isfinite().all()
    return True


def test_sequences_come_and_go(ranks):
    """Not every row has new tokens in every step; some have none at all yet."""
    events = (
        Decode(2, "helix", new=(1, 0, 1, 0, 0)),
        Turn((0, 9, 0, 4, 0), "contiguous"),
        Decode(2, "pass_q", seq=3, new=(3, 0, 1, 2, 0)),
        Decode(2, "tree", seq=2, new=(0, 0, 0, 0, 1)),
        Reset((0, 3)),
        Decode(2, "gather_q", new=(1, 1, 0, 1, 1)),
        Decode(2, "all_to_all", seq=4, new=(0, 4, 4, 1, 2), gather=False),
    )
    for ring, ulysses in ((1, 1), (4, 1), (2, 2), (8, 1)):
        told(ranks, Story(ring, ulysses, events, batch=5))


def test_tokens_that_nobody_sees_are_not_kept():
    """Also where a region's band, and not its end, hides them; nor the holes between packed texts."""
    x = torch.ones(1, 8, 2, 4)
    masks = {
        (0, 1, 2): Mask(False, documents=[[]], regions=[[usp.Region((0, 3), (0, 8), high=0)]]),
        (3, 4, 5, 6, 7): Mask(False, documents=[[]], regions=[[usp.Region((5, 8), (0, 8), low=-2)]]),
        (0, 1, 4, 5, 6): Mask(True, documents=[[(0, 2), (4, 7)]]),
        (0, 1, 2, 3, 4, 5, 6, 7): Mask(True, 2),
    }
    for kept, mask in masks.items():
        cache = KVCache(None, batch=1, capacity=20, kv_heads=2, head_dim=4, dtype=torch.float32)
        prefill_attention(x, x, x, None, usp.partition(8, None, "contiguous"), cache, mask=mask)
        assert tuple(cache.positions().tolist()) == kept
        assert cache.lengths == (kept[-1] + 1,)


def test_left_padding(ranks):
    """Prompts that end together: positions count on from there, and padding is not kept."""
    told(ranks, Story(2, 2, (Turn((12, 3), "zigzag", side="left"), Decode(5), Decode(2, seq=3)), window=9))


@pytest.mark.parametrize("algorithm", DECODE)
def test_queries_of_another_sequence(ranks, algorithm):
    """Cross attention: nothing is kept, and every step sees the same."""
    events = Turn((13, 6), "zigzag"), Decode(3, algorithm, keep=False), Decode(2, algorithm, seq=4, keep=False)
    told(ranks, Story(4, 1, events, causal=False))
    told(ranks, Story(2, 2, events))


def test_one_sequence_on_many_ranks(ranks):
    """A batch smaller than the group, heads fewer than ranks, and ranks that keep nothing yet."""
    for algorithm in DECODE:
        events = Decode(4, algorithm), Decode(2, algorithm, seq=3), Decode(3, algorithm, gather=False)
        told(ranks, Story(8, 1, events, batch=1, heads=2, kv_heads=1, block=16))


def drawn(seed: int) -> Story:
    """Anything that may happen to a cache, in any order."""
    draw = random.Random(seed)
    ring, ulysses = draw.choice([(1, 1), (2, 1), (1, 2), (2, 2), (3, 1), (4, 1)])
    batch, events = draw.randint(1, 4), []
    lengths = [0] * batch
    for _ in range(12):
        kind = draw.random()
        if kind < 0.3:
            new = [draw.choice((0, 1, draw.randint(1, 20))) for _ in lengths]
            new[draw.randrange(batch)] += 1
            events.append(Turn(tuple(new), draw.choice(LAYOUTS), draw.choice((*PREFILL, "auto"))))
        elif kind < 0.8:
            seq, algorithm = draw.randint(1, 3), draw.choice(DECODE)
            new = [draw.randint(0, seq) for _ in lengths] if draw.random() < 0.4 else [seq] * batch
            events.append(Decode(1, algorithm, seq, draw.random() < 0.6, tuple(new)))
        elif kind < 0.93:
            new = [-draw.randint(0, min(6, length)) for length in lengths]
            events.append(Reject(tuple(-x for x in new)))
        else:
            row = draw.randrange(batch)
            new = [-lengths[row] if n == row else 0 for n in range(batch)]
            events.append(Reset((row,)))
        lengths = [x + y for x, y in zip(lengths, new, strict=True)]
    heads = draw.choice([(4, 2), (4, 4), (6, 3), (8, 2), (9, 3)])
    window, options = (
        draw.choice((None, None, 5, 30)),
        draw.choice(({}, {"sinks": True}, {"softcap": 2.0}, {"alibi": True})),
    )
    kept = {"block": draw.choice((1, 3, 16)), "owner": draw.choice(OWNERS)}
    sizes = {"batch": batch, "heads": heads[0], "kv_heads": heads[1], "capacity": 2000}
    return Story(ring, ulysses, tuple(events), window=window, causal=draw.random() < 0.8, **sizes, **kept, **options)


@pytest.mark.parametrize("seed", range(8))
def test_drawn_stories(ranks, seed):
    told(ranks, drawn(seed))


def test_odd_head_dims_in_half_precision(ranks):
    """lse travels as columns of out; whatever their number and however few elements there are."""
    for algorithm in DECODE:
        events = Turn((5,), "zigzag", "pass_q"), Decode(2, algorithm), Decode(2, algorithm, gather=False)
        sizes = {"batch": 1, "heads": 1, "kv_heads": 1, "head_dim": 7, "head_dim_v": 9, "backend": "tiled"}
        told(ranks, Story(2, 1, events, dtype=torch.bfloat16, **sizes))


# ---------------------------------------------------------------------------------------------------
# What moves, and what does not.


def test_no_key_moves_between_prefill_and_decode(ranks):
    """What a prefill on ulysses x ring leaves is what helix wants: heads over Ulysses ranks, tokens over ring ranks."""
    assert all(ranks(8)(_hand_over))


def _hand_over() -> bool:
    mesh = pool.mesh(4, 2)
    cache = KVCache(mesh, batch=2, capacity=96, kv_heads=4, head_dim=8, dtype=torch.float32)
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 64, heads, 8, generator=generator) for heads in (8, 4, 4))
    tokens = usp.partition(64, mesh, "zigzag")
    shards = [usp.shard(x, mesh, tokens) for x in (q, k, v)]
    with usp.measure_traffic() as prefill:
        prefill_attention(*shards, mesh, tokens, cache, mask=Mask(True))
    # The prefill sent what a forward pass without any cache sends.
    with usp.measure_traffic() as forward:
        usp.hybrid_attention(*shards, mesh, tokens, mask=Mask(True))
    assert prefill.bytes == forward.bytes, (prefill.bytes, forward.bytes)
    where, before = (cache.k.data_ptr(), cache.v.data_ptr()), (cache.k.clone(), cache.v.clone())
    heads, row = slice(2 * cache.ulysses.rank, 2 * cache.ulysses.rank + 2), tokens.runs(cache.ring.rank)
    own = torch.cat([torch.arange(run.start, run.start + run.count) for run in row])
    assert torch.equal(cache.k[:, :16], k[:, own, heads])
    step = [torch.randn(2, 1, heads, 8, generator=generator) for heads in (8, 4, 4)]
    with usp.measure_traffic() as decode:
        decode_attention(
            *(x[:, :, share] for x, share in zip(step, (slice(*_own(cache, 8)), heads, heads), strict=True)),
            *(mesh, cache),
            mask=Mask(True),
            algorithm="helix",
            gather=False,
        )
    sizes = {"batch": 2, "heads": 4, "head_dim": 8, "head_dim_v": 8, "element_bytes": 4}
    volume = decode_volume("helix", ring=4, rank=cache.ring.rank, **sizes)
    assert {kind: count for kind, count in decode.bytes.items() if kind != "control"} == {
        "partials": volume["partials"][0]
    }
    assert (cache.k.data_ptr(), cache.v.data_ptr()) == where
    changed = (cache.k != before[0]).flatten(2).any(2) | (cache.v != before[1]).flatten(2).any(2)
    ours = [row for row in range(2) if cache.counts[row][cache.ring.rank] > 16]
    assert changed.nonzero().tolist() == [[row, 16] for row in ours]  # the new token's slot, at its owner
    return True


def _own(cache: KVCache, heads: int) -> tuple[int, int]:
    own = cache.plan(heads).queries[cache.ulysses.rank]
    return own.start, own.stop


class _Largest(TorchDispatchMode):
    """The largest tensor that an operator made, in bytes."""

    def __init__(self):
        super().__init__()
        self.bytes, self.calls = 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        self.calls += 1
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in given:
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"seq": 3},
        {"backend": "tiled", "softcap": 5.0},
        {"head_dim_v": 32},
        {"alibi": tuple(0.1 * n for n in range(8))},
        {"dtype": torch.float32, "alibi": tuple(0.1 * n for n in range(8)), "backend": "sdpa"},
    ],
    ids=str,
)
def test_a_step_takes_no_memory_and_no_calls_that_grow(how):
    """Eight times the context: the same operators with results of the same size, far below 1 MiB."""
    made = []
    dtype, head_dim_v, seq = how.get("dtype", torch.bfloat16), how.get("head_dim_v", 64), how.get("seq", 1)
    options = {name: how[name] for name in ("backend", "softcap", "alibi") if name in how}
    for context in (4000, 32000):
        cache = KVCache(
            None, batch=2, capacity=context + 100, kv_heads=2, head_dim=64, head_dim_v=head_dim_v, dtype=dtype
        )
        chunk = torch.zeros(2, context, 2, 64, dtype=dtype)
        cache.append(chunk, chunk[..., :head_dim_v])
        q, k = torch.ones(2, seq, 8, 64, dtype=dtype), torch.ones(2, seq, 2, 64, dtype=dtype)
        step = partial(decode_attention, q, k, k[..., :head_dim_v], None, cache, mask=Mask(True), **options)
        step()
        with _Largest() as largest:
            step()
        made.append(largest)
    assert made[1].bytes <= 1 << 20
    copies = how.keys() & {"alibi", "head_dim_v"} or how.get("backend") == "tiled"
    if not copies:  # which are made in pieces, so that there are more of them
        assert (made[0].calls, made[0].bytes) == (made[1].calls, made[1].bytes)


def test_helix_sends_least_of_what_takes_whole_queries():
    """Why `auto` is helix: also where out is gathered afterwards, which tree does by itself."""
    for ring, batch, heads, dim, size in itertools.product(
        (2, 3, 4, 8, 16), (1, 7, 64), (1, 8, 64), (16, 128), (2, 4, 8)
    ):
        sizes = {
            "ring": ring,
            "batch": batch,
            "heads": heads,
            "head_dim": dim,
            "head_dim_v": dim,
            "element_bytes": size,
        }
        total = dict.fromkeys(("helix", "tree", "all_to_all", "gather_q"), 0)
        for rank in range(ring):
            own = len(runs(heads, ring)[rank])
            for algorithm in total:
                volume = decode_volume(algorithm, rank=rank, **sizes)
                total[algorithm] += sum(count for count, _ in volume.values())
                total[algorithm] += 0 if algorithm == "tree" else (ring - 1) * batch * own * dim * size
        assert min(total, key=total.__getitem__) == "helix", sizes


def test_the_choice_is_that_of_the_published_measurements():
    """Llama 3 405B on 4 nodes (arXiv 2411.01783, table 4): 16 query heads and one KV head of 128 on a ring rank."""
    path = Path(published.__file__).with_name("context_parallel_ttft_pass_kv_pass_q.csv")
    rows = [{name: float(x) for name, x in row.items()} for row in csv.DictReader(path.read_text().splitlines())]
    assert len(rows) == 14
    lost = {}
    for name, rates in (("sizes", Rates()), ("rates", Rates(flops_per_s=515e12, bytes_per_s=26e9))):
        lost[name] = []
        for row in rows:
            new, cached = row["new_tokens"], row["cached_tokens"]
            kv, q = (new + cached) / 4 * 2 * 128 * 2, new / 4 * 16 * 128 * 2
            pairs = new * (cached + new / 2)
            found = exposed(4, kv, kv, q, new / 4 * 16 * (128 * 2 + 4), 4 * pairs * 16 * 128 / 16, rates)
            chosen = min(("pass_kv", "pass_q"), key=found.__getitem__)
            lost[name].append(row[f"{chosen}_ttft_ms"] - min(row["pass_kv_ttft_ms"], row["pass_q_ttft_ms"]))
    assert not any(lost["sizes"])
    assert sum(map(bool, lost["rates"])) == 2  # next to the tie, where the table itself is not smooth
    assert sum(lost["rates"]) < 25  # ms, of 82,000


def test_rates_decide(ranks):
    """A short turn on a long cache: by sizes queries travel, if hops hide keys, if messages are slow one collective."""
    chosen = {}
    for name, rates in {
        "sizes": None,
        "slow computing": Rates(flops_per_s=1.0),
        "slow messages": Rates(latency_s=1.0),
    }.items():
        reports = told(ranks, Story(4, 1, (Turn((80, 80)), Turn((2, 2))), heads=4, kv_heads=4, rates=rates))
        chosen[name] = reports[1][0]
    assert chosen == {"sizes": "pass_q", "slow computing": "pass_kv", "slow messages": "all_gather"}


# ---------------------------------------------------------------------------------------------------
# What is refused.


CAUSAL = Mask(True)


@pytest.fixture
def as_in_production():
    """Without the type checks of the tests: the library's own errors are the subject."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def prefill(mesh, cache, *, seq=8, start=0, layout="contiguous", mask=CAUSAL, **how):
    tokens = usp.partition(seq, mesh, layout, start=start)
    dtype = how.pop("dtype", torch.float32)
    batch = how.pop("batch", 2)
    shards = [torch.ones(batch, tokens.seq_local, heads, 8, dtype=dtype) for heads in (how.pop("heads", 4), 2, 2)]
    return prefill_attention(*shards, mesh, tokens, cache, mask=mask, **how)


def decode(mesh, cache, *, seq=1, mask=CAUSAL, **how):
    dtype = how.pop("dtype", torch.float32)
    batch = how.pop("batch", 2)
    q, k, v = (torch.ones(batch, seq, heads, 8, dtype=dtype) for heads in (how.pop("heads", 4), 2, 2))
    q, k, v = (how.pop(name, x) for name, x in {"q": q, "k": k, "v": v}.items())
    return decode_attention(q, k, v, mesh, cache, mask=mask, **how)


def prefill_tokens(mesh, cache, tokens):
    x = torch.ones(2, 2, 2, 8)
    return prefill_attention(x, x, x, mesh, tokens, cache, mask=CAUSAL)


def needs_gradient(mesh, cache):
    q = torch.ones(2, 1, 4, 8, requires_grad=True)
    return decode_attention(q, q[:, :, :2], q[:, :, :2], mesh, cache, mask=Mask(True))


REFUSED = {
    "prefill: algorithm": (
        partial(prefill, start=5, algorithm="ring"),
        r"algorithm='ring' is not one of \('auto', 'pass_kv'",
    ),
    "prefill: start": (
        partial(prefill, start=3),
        r"start at position 3 of sequence 0, of which the cache has 5: .*cache.start",
    ),
    "prefill: room": (
        partial(prefill, seq=40, start=5),
        r"sequence 0 would have 45 tokens.*capacity=40: make a larger",
    ),
    "prefill: dtype": (partial(prefill, start=5, dtype=torch.float64), r"k is torch.float64 .*cache is torch.float32"),
    "prefill: mask": (partial(prefill, start=5, mask=None), r"mask is a NoneType"),
    "prefill: rows": (
        partial(prefill, start=5, mask=Mask(True, documents=[[(0, 9)]] * 3)),
        r"tells 3 batch rows apart, but the batch is 2",
    ),
    "prefill: another sequence's keys": (
        partial(prefill, start=5, mask=Mask(False, documents=[[(0, 9)]], key_documents=[[(0, 4)]])),
        "key_documents",
    ),
    "prefill: backend": (
        partial(prefill, start=5, backend="sdpa", softcap=2.0),
        r"backend='sdpa' cannot do softcap=2.0",
    ),
    "decode: pass_kv": (partial(decode, algorithm="pass_kv"), r"algorithm='pass_kv' is not one of .*prefill_attention"),
    "decode: auto": (partial(decode, gather=False), r"algorithm='auto' with gather=False.*name one"),
    "decode: bias": (partial(decode, bias=1.0), "bias is a float"),
    "decode: new as a number": (partial(decode, new=1), "new=1 does not hold whole numbers"),
    "decode: new with halves": (partial(decode, new=[0.5, 1]), "does not hold whole numbers"),
    "decode: a list": (partial(decode, q=[1.0]), "q is a list and not a tensor"),
    "decode: sinks as a list": (partial(decode, sinks=[0.0] * 4), "sinks is a list and not a tensor"),
    "decode: gather": (partial(decode, gather="no"), "gather='no' is neither True nor False"),
    "decode: sinks that learn": (
        partial(decode, sinks=torch.zeros(4, requires_grad=True)),
        "one of q, k, v, sinks and bias.table requires a gradient",
    ),
    "decode: another sequence's keys": (
        partial(decode, mask=Mask(False, documents=[[(0, 9)]], key_documents=[[(0, 4)]])),
        "key_documents",
    ),
    "prefill: tokens": (lambda mesh, cache: prefill_tokens(mesh, cache, 8), "tokens is a int: make it with"),
    "prefill: rates": (partial(prefill, start=5, rates=1e9), "rates=1000000000.0: give usp.inference.Rates"),
    "prefill: bias": (partial(prefill, start=5, bias=1.0), "bias is a float"),
    "decode: heads": (partial(decode, heads=3), r"3 query heads and 2 KV heads"),
    "decode: batch": (
        partial(decode, q=torch.ones(3, 1, 4, 8)),
        r"q has 3 sequences; algorithm='helix' with gather=True takes 2",
    ),
    "decode: dtype": (
        partial(decode, dtype=torch.bfloat16),
        r"q is torch.bfloat16 on cpu, but the cache is torch.float32",
    ),
    "decode: room": (partial(decode, seq=36), r"sequence 0 would have 41 tokens.*capacity=40"),
    "decode: nothing to see": (
        partial(decode, mask=Mask.packed([5], causal=True)),
        r"shows nothing to the token at position 5 of sequence 0",
    ),
    "decode: new": (
        partial(decode, new=(1, 2)),
        r"new=\(1, 2\): give each of the 2 sequences how many of the 1 tokens",
    ),
    "decode: k alone": (partial(decode, v=None), "v is a NoneType and not a tensor"),
    "decode: mask": (partial(decode, mask=torch.ones(3)), "mask is a Tensor and not a usp.Mask"),
    "decode: mask rows": (partial(decode, mask=Mask(True, documents=[[(0, 9)]] * 3)), "tells 3 batch rows apart"),
    "decode: slopes": (partial(decode, alibi=(0.1,)), "one slope for each of the 4 query heads"),
    "decode: sinks": (partial(decode, sinks=torch.ones(3)), "one score for each of the 4 query heads"),
    "decode: gradients": (needs_gradient, "requires a gradient, and a cache has none: call this under"),
    "decode: head_dim": (partial(decode, q=torch.ones(2, 1, 4, 9)), r"must be \(sequences, tokens, heads, 8\)"),
    "decode: no cache": (lambda mesh, cache: decode(mesh, None), "cache is a NoneType"),
    "decode: another mesh": (lambda mesh, cache: decode(None, cache), "was made for ring=2 x ulysses=2"),
}


@pytest.mark.parametrize("rank", [-1, 3], ids=["all ranks", "one rank"])
@pytest.mark.parametrize("name", REFUSED)
def test_refusals_come_from_every_rank(ranks, name, rank):
    """Before anything is sent or kept; the next call works."""
    _, message = REFUSED[name]
    if name == "decode: another mesh":
        rank = -1  # mesh=None is one process, which asks nobody
    for n, answer in enumerate(ranks(4)(_refused, name, rank)):
        assert re.search(message, answer), answer
        assert answer.startswith("another rank refused this call") == (rank == 3 and n != 3)


def _refused(name: str, rank: int) -> str:
    mesh, call = pool.mesh(2, 2), REFUSED[name][0]
    cache = KVCache(mesh, batch=2, capacity=40, kv_heads=2, head_dim=8, dtype=torch.float32)
    prefill(mesh, cache, seq=5)
    before = cache.ledger, cache.k.clone()
    if rank not in (-1, dist.get_rank()):
        call = partial(prefill, start=5) if name.startswith("prefill") else decode
    jaxtyping.config.update("jaxtyping_disable", True)  # as in production: the library's own errors are the subject
    try:
        with usp.measure_traffic() as traffic, pytest.raises(ValueError) as caught:
            call(mesh, cache)
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
    assert traffic.payload_bytes == 0
    assert cache.ledger == before[0]
    assert torch.equal(cache.k, before[1])
    decode(mesh, cache)
    assert cache.lengths == (6, 6)
    return str(caught.value)


DIFFERENT = {
    "algorithm": ({"algorithm": "tree"}, "algorithm.*tree"),
    "mask": ({"mask": Mask(True, 3)}, "window=3"),
    "new": ({"new": (1, 0)}, r"new: \(1, 1\) on rank 0, 1, 3, \(1, 0\) on rank 2"),
    "what is cached": ({}, "what the cache holds"),
    "scale": ({"scale": 0.25}, r"Scores\(scale=0.25"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_that_differ(ranks, name):
    """Also in what their caches hold: a rank that missed a step is told."""
    for answer in ranks(4)(_different, name):
        assert "ranks made different calls" in answer
        assert re.search(DIFFERENT[name][1], answer), answer


def _different(name: str) -> str:
    mesh = pool.mesh(2, 2)
    cache = KVCache(mesh, batch=2, capacity=40, kv_heads=2, head_dim=8, dtype=torch.float32)
    prefill(mesh, cache, seq=5)
    if name == "what is cached" and dist.get_rank() == 2:
        cache.truncate(4)
    with pytest.raises(ValueError) as caught:
        decode(mesh, cache, **(DIFFERENT[name][0] if dist.get_rank() == 2 else {}))
    if name == "what is cached" and dist.get_rank() != 2:
        cache.truncate(4)
    decode(mesh, cache)
    return str(caught.value)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"batch": 0}, "batch=0: a cache needs batch as a whole number of at least 1"),
        ({"capacity": 0}, "capacity=0"),
        ({"block": 0}, "block=0"),
        ({"owner": "longest"}, "owner='longest' is not one of"),
        ({"replicate_kv": True}, "replicate_kv=True deals query heads: give heads="),
        ({"heads": 0}, "heads=0: a cache needs heads"),
        ({"head_dim_v": 0}, "head_dim_v=0"),
        ({"capacity": 40.0}, "capacity=40.0"),
        ({"block": True}, "block=True"),
        ({"dtype": torch.int64}, "dtype=torch.int64 is not a floating-point dtype"),
        ({"mesh": "ring"}, "mesh is a str: make it with usp.init_mesh"),
        ({"heads": 3}, "3 query heads and 2 KV heads"),
    ],
)
def test_a_cache_that_cannot_be(how, message, as_in_production):
    with pytest.raises(ValueError, match=message):
        KVCache(**{"mesh": None, "batch": 2, "capacity": 8, "kv_heads": 2, "head_dim": 4, "dtype": torch.float32} | how)


def test_what_a_cache_tells(as_in_production):
    cache = KVCache(None, batch=2, capacity=30, kv_heads=2, head_dim=4, head_dim_v=6, dtype=torch.bfloat16)
    assert cache.memory_bytes == 2 * 30 * (2 * (4 + 6) * 2 + 8)
    k, v = torch.ones(2, 7, 2, 4, dtype=torch.bfloat16), torch.ones(2, 7, 2, 6, dtype=torch.bfloat16)
    cache.append(k, v, new=(7, 3))
    assert (cache.lengths, cache.start, cache.counts) == ((7, 3), (7, 3), ((7,), (3,)))
    assert cache.positions(1).tolist() == [0, 1, 2]
    cache.truncate(3)
    assert cache.start == 3
    cache.reset([0])
    assert cache.lengths == (0, 3)
    assert "lengths=(0, 3)" in repr(cache)
    for wrong in ([4, 3], [0], -1):
        with pytest.raises(ValueError, match="give each of the 2 sequences a length from 0"):
            cache.truncate(wrong)
    for wrong in ([0.0, 1], True, [True, False], None, "33", torch.tensor([0.5, 1.0])):
        with pytest.raises(ValueError, match="does not hold whole numbers"):
            cache.truncate(wrong)
        with pytest.raises(ValueError, match="does not hold whole numbers"):
            cache.reset([wrong])
    for right in ([0, 2], (0, 2), torch.tensor([0, 2]), numpy.array([0, 2])):
        cache.truncate(right)
        assert (cache.lengths, type(cache.lengths[1])) == ((0, 2), int)
    cache.reset(torch.tensor([1]))
    assert cache.lengths == (0, 0)
    for call in (cache.reset, lambda rows: cache.positions(rows[0])):
        with pytest.raises(ValueError, match=r"rows=\[2\]: the cache has the sequences 0 to 1"):
            call([2])
    with pytest.raises(ValueError, match=r"v is \(2, 7, 2, 4\) and must be \(2, tokens, 2, 6\)"):
        cache.append(k, k)


@pytest.mark.parametrize("mode", ["autocast", "inference_mode", "views"])
def test_surroundings_do_not_matter(mode):
    """Autocast changes no number, a cache outlives inference mode, and tensors may have any strides."""

    def story(cache) -> list:
        generator = torch.Generator().manual_seed(1)
        q, k, v = (torch.randn(2, 20, heads, 8, generator=generator) for heads in (4, 2, 2))
        if mode == "views":
            q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
        tokens = usp.partition(9, None, "contiguous")
        outs = [prefill_attention(q[:, :9], k[:, :9], v[:, :9], None, tokens, cache, mask=CAUSAL)[0]]
        for first, end in ((9, 10), (10, 13), (13, 20)):
            step = (x[:, first:end] for x in (q, k, v))
            outs.append(decode_attention(*step, None, cache, mask=CAUSAL))
        return outs

    made = {"batch": 2, "capacity": 60, "kv_heads": 2, "head_dim": 8, "dtype": torch.float32}
    expected = story(KVCache(None, **made))
    if mode == "inference_mode":
        with torch.inference_mode():
            cache = KVCache(None, **made)
            found = story(cache)
        cache.reset()
        again = story(cache)
        assert all(map(torch.equal, again, expected))
    else:
        with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
            found = story(KVCache(None, **made))
    assert all(map(torch.equal, found, expected))


def test_results_may_be_viewed_in_any_shape(ranks):
    assert all(ranks(4)(_contiguous))


def _contiguous() -> bool:
    for mesh, lse in itertools.product((None, pool.mesh(2, 2)), (False, True)):
        cache = KVCache(mesh, batch=2, capacity=40, kv_heads=2, head_dim=8, dtype=torch.float32)
        for algorithm in DECODE:
            found = decode(mesh, cache, seq=2, algorithm=algorithm, return_lse=lse)
            assert all(x.is_contiguous() for x in (found if lse else [found]))
    return True


def test_short_prompts_of_a_batch_may_fill_one_rank(ranks):
    """In all layouts but striped a short prompt is on few ranks. What does not fit is refused, by what to do."""
    for answer in ranks(4)(_filled):
        assert re.search(r"ring rank 0 would keep \d+ tokens of sequence 1 and has room for \d+ .*striped", answer)


def _filled() -> str:
    mesh = pool.mesh(4, 1)
    cache = KVCache(mesh, batch=2, capacity=200, kv_heads=2, head_dim=8, dtype=torch.float32, block=1)
    prefill(mesh, cache, seq=180, layout="striped", mask=Mask.padded([180, 50], 180, causal=True))
    cache.reset()
    prefill(mesh, cache, seq=200, mask=Mask.padded([200, 45], 200, causal=True))
    with pytest.raises(ValueError) as caught:
        prefill(mesh, cache, seq=200, start=(200, 45), mask=Mask(True, documents=[[], [(0, 90)]]))
    return str(caught.value)


@pytest.mark.parametrize(("ring", "ulysses"), [(1, 1), (2, 2), (4, 1)])
def test_more_room(ranks, ring, ulysses):
    """A cache that is full refuses, and goes on after `reserve` as one that had the room from the beginning."""
    found = ranks(4)(_grown, ring, ulysses) if ring * ulysses > 1 else [_grown(1, 1)]
    assert all(found)


def _grown(ring: int, ulysses: int) -> bool:
    mesh = pool.mesh(ring, ulysses) if ring * ulysses > 1 else None
    sizes = {"batch": 2, "kv_heads": 2, "head_dim": 4, "dtype": torch.float64, "block": 1}
    small, large = (KVCache(mesh, capacity=capacity, **sizes) for capacity in (12, 100))
    generator = torch.Generator().manual_seed(0)
    for n in range(60):
        q, k, v = (torch.randn(2, 1, h, 4, generator=generator, dtype=torch.float64) for h in (4, 2, 2))
        if n == 12:
            with pytest.raises(ValueError, match="capacity=12"):
                decode_attention(q, k, v, mesh, small, mask=Mask(causal=True))
            small.reserve(30)
        elif n == 30:
            small.reserve(30)  # has it
            small.reserve(90)
        out, expected = (decode_attention(q, k, v, mesh, x, mask=Mask(causal=True)) for x in (small, large))
        assert torch.equal(out, expected)
    with pytest.raises(ValueError, match="capacity=True"):
        small.reserve(True)
    return small.lengths == (60, 60) and small.capacity == 90 and small.memory_bytes <= large.memory_bytes
