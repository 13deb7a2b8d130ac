"""On a rank: sequences that are prefilled, decoded, taken back and begun anew, held against dense attention."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

import usp
from tests import hybrid, oracle, pool
from usp import Mask, Partition
from usp.heads import runs
from usp.inference import KVCache, decode_attention, prefill_attention
from usp.inference.volumes import decode_volume


@dataclass(frozen=True)
class Turn:
    """New tokens of every sequence, so many each; the shorter ones padded on a side."""

    lengths: tuple[int, ...]
    layout: str = "zigzag"
    algorithm: str = "auto"
    side: str = "right"


@dataclass(frozen=True)
class Decode:
    """Steps of one or several tokens of every sequence, of which `new` are real, if not all."""

    steps: int
    algorithm: str = "auto"
    seq: int = 1
    gather: bool = True
    new: tuple[int, ...] | None = None
    keep: bool = True  # the tokens; else queries alone


@dataclass(frozen=True)
class Reject:
    """The last tokens, so many of each sequence."""

    counts: tuple[int, ...]


@dataclass(frozen=True)
class Reset:
    rows: tuple[int, ...]


@dataclass(frozen=True)
class Story:
    """What happens to a cache, and of what kind it is."""

    ring: int
    ulysses: int
    events: tuple
    batch: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    head_dim_v: int = 8
    dtype: torch.dtype = torch.float64
    causal: bool = True
    window: int | None = None
    first: int = 0  # so many tokens at the beginning are seen by all, beside a window
    sinks: bool = False
    softcap: float | None = None
    alibi: bool = False
    bias: str | None = None
    capacity: int = 600
    block: int = 4
    owner: str = "rotate"
    backend: str = "auto"
    replicate_kv: bool = False
    rates: usp.inference.Rates | None = None


class Told:
    """A story as it goes on, on this rank; with all that was found and expected so far."""

    def __init__(self, story: Story):
        self.story = story
        self.mesh = pool.mesh(story.ring, story.ulysses) if story.ring * story.ulysses > 1 else None
        self.cache = KVCache(
            self.mesh,
            batch=story.batch,
            capacity=story.capacity,
            kv_heads=story.kv_heads,
            head_dim=story.head_dim,
            head_dim_v=story.head_dim_v,
            dtype=story.dtype,
            block=story.block,
            owner=story.owner,
            heads=story.heads,
            replicate_kv=story.replicate_kv,
        )
        self.generator = torch.Generator().manual_seed(7)
        wide = torch.float64 if story.dtype == torch.float64 else torch.float32
        self.sinks = self.normal(story.heads).to(wide) if story.sinks else None
        self.table = self.normal(11 if story.bias == "clipped" else 12, story.heads).to(wide) if story.bias else None
        self.slopes = hybrid.slopes(story.heads) if story.alibi else None
        dims = story.head_dim, story.head_dim_v
        self.kept = [
            [torch.empty(0, story.kv_heads, dim, dtype=story.dtype) for dim in dims] for _ in range(story.batch)
        ]
        self.at = [torch.empty(0, dtype=torch.int64) for _ in range(story.batch)]
        self.found: list[tuple[Tensor, Tensor]] = []
        self.expected: list[tuple[Tensor, Tensor]] = []
        self.plain: list[tuple[Tensor, Tensor]] = []
        self.judged, self.common = 0, hashlib.sha256()  # what every rank must have alike

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def tokens(self, seq: int) -> tuple[Tensor, ...]:
        """Whole q, k, v of so many new tokens."""
        story = self.story
        shapes = (story.heads, story.head_dim), (story.kv_heads, story.head_dim), (story.kv_heads, story.head_dim_v)
        return tuple(self.normal(story.batch, seq, *shape).to(story.dtype) for shape in shapes)

    def mask(self, documents=None) -> Mask:
        story = self.story
        regions = None
        if story.first:
            ends = [10000] if documents is None else [row[-1][1] if row else 0 for row in documents]
            regions = [[usp.Region((0, end), (0, story.first), high=0)] if end else [] for end in ends]
        return Mask(story.causal, story.window, documents=documents, regions=regions)

    def options(self, heads: range) -> dict:
        """For a call whose queries have these heads."""
        own = slice(heads.start, heads.stop)
        return {
            "softcap": self.story.softcap,
            "sinks": None if self.sinks is None else self.sinks[own],
            "alibi": None if self.slopes is None else self.slopes[own],
            "bias": None if self.table is None else hybrid.relative_bias(self.story.bias or "", self.table[:, own]),
            "backend": self.story.backend,
            "return_lse": True,
        }

    def judge(
        self,
        row: int,
        q: Tensor,
        at: Tensor,
        mask: Mask,
        heads: range,
        out: Tensor,
        lse: Tensor,
        everywhere: bool = True,
    ) -> None:
        """Note what queries (seq, heads, dim) of a sequence found in what it has, and what they should have found.

        If every rank has it all, one of them looks, and the others have the same.
        """
        if everywhere and self.mesh is not None:
            for x in (out, lse):
                self.common.update(x.clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy().tobytes())
            self.judged += 1
            if self.judged % dist.get_world_size() != dist.get_rank():
                return
        self.found.append((out, lse))
        k, v = self.kept[row]
        end = int(max([*self.at[row].tolist(), *at.tolist(), 0])) + 1
        whole = Partition(end, "contiguous")
        seen = oracle.visible(mask, whole, whole, row)[at][:, self.at[row]]
        scores = oracle.Options(softcap=self.story.softcap, alibi=self.slopes, bias=self.story.bias)
        more = scores, self.sinks, self.table, (at[None], self.at[row][None])
        tensors = q[None], k[None], v[None]
        own = slice(heads.start, heads.stop)
        for some, into in (([x.double() for x in tensors], self.expected), (tensors, self.plain)):
            if some is not tensors or self.story.dtype not in oracle.EXACT:
                expected_out, expected_lse = oracle.attention(*some, seen[None], *more)
                into.append((expected_out[0, :, own], expected_lse[0, own]))

    def keep(self, row: int, k: Tensor, v: Tensor, at: Tensor) -> None:
        self.kept[row] = [torch.cat(pair) for pair in zip(self.kept[row], (k, v), strict=True)]
        self.at[row] = torch.cat([self.at[row], at])

    def turn(self, event: Turn):
        seq, start = max(event.lengths), self.cache.lengths
        tokens = usp.partition(seq, self.mesh, event.layout, start=self.cache.start)
        left = event.side == "left"
        documents = None
        if set(event.lengths) != {seq}:
            documents = [
                [(first + (seq - count if left else 0), first + (seq if left else count))]
                if left or not first
                else [(0, first + count)]
                for first, count in zip(start, event.lengths, strict=True)
            ]
            documents = [row if count else [] for row, count in zip(documents, event.lengths, strict=True)]
        mask = self.mask(documents)
        q, k, v = self.tokens(seq)
        (out, lse), report = prefill_attention(
            *(usp.shard(x, self.mesh, tokens) for x in (q, k, v)),
            *(self.mesh, tokens, self.cache),
            mask=mask,
            algorithm=event.algorithm,
            rates=self.story.rates,
            **self.options(range(self.story.heads)),
        )
        out, lse = usp.unshard(out, self.mesh, tokens), usp.unshard(lse, self.mesh, tokens, dim=2)
        for row, count in enumerate(event.lengths):
            real = slice(seq - count, seq) if left else slice(0, count)
            at = torch.arange(start[row], start[row] + seq)[real]
            self.keep(row, k[row, real], v[row, real], at)
            heads = range(self.story.heads)
            self.judge(row, q[row, real], at, mask, heads, out[row, real], lse[row, :, real])
            padding = torch.ones(seq, dtype=torch.bool)
            padding[real] = False
            assert not out[row, padding].any()
            assert (lse[row, :, padding] == -torch.inf).all()
        assert event.algorithm in ("auto", report.algorithm)
        return report

    def decode(self, event: Decode) -> None:
        story, cache, ring = self.story, self.cache, self.cache.ring
        plan = cache.plan(story.heads)
        own, own_keys = plan.queries[cache.ulysses.rank], plan.keys[cache.ulysses.rank]
        for step in range(event.steps):
            first, new = cache.lengths, event.new or (event.seq,) * story.batch
            whole, k, v = self.tokens(event.seq)
            rows, heads, q = range(story.batch), range(story.heads), whole
            keys = k, v
            if not event.gather:
                q, heads = q[:, :, own.start : own.stop], own
                keys = tuple(x[:, :, own_keys.start : own_keys.stop] for x in (k, v))
                share = runs(len(own), ring.size)[ring.rank]
                if event.algorithm == "pass_q":
                    rows = runs(story.batch, ring.size)[ring.rank]
                    q = q[rows.start : rows.stop]
                if event.algorithm in ("gather_q", "all_to_all"):
                    q = q[:, :, share.start : share.stop]
                if event.algorithm in ("gather_q", "all_to_all", "helix"):
                    heads = range(own.start + share.start, own.start + share.stop)
            mask = self.mask()
            with usp.measure_traffic() as traffic, pool.one_rank_checks_types():
                out, lse = decode_attention(
                    *(q, *(keys if event.keep else (None, None)), self.mesh, cache),
                    mask=mask,
                    algorithm=event.algorithm,
                    gather=event.gather,
                    new=event.new,
                    check_ranks=step < 2,  # a third of the time of a step on 8 ranks
                    **self.options(range(story.heads) if event.gather else own),
                )
            if not event.gather:
                self.check_volume(event, traffic, len(own))
            assert out.shape == (len(rows), event.seq, len(heads), story.head_dim_v)
            assert lse.shape == (len(rows), len(heads), event.seq)
            assert out.dtype == story.dtype
            assert lse.dtype == (torch.float64 if story.dtype == torch.float64 else torch.float32)
            for row in range(story.batch):
                at = torch.arange(first[row], first[row] + new[row])
                if event.keep:
                    self.keep(row, k[row, : new[row]], v[row, : new[row]], at)
                if row in rows:
                    here, real = row - rows.start, slice(0, new[row])
                    found = out[here, real], lse[here, :, real]
                    self.judge(row, whole[row, real], at, mask, heads, *found, everywhere=event.gather)
                    assert not out[here, new[row] :].any()
                    assert (lse[here, :, new[row] :] == -torch.inf).all()

    def check_volume(self, event: Decode, traffic: usp.Traffic, heads: int) -> None:
        story, ring = self.story, self.cache.ring
        volume = decode_volume(
            event.algorithm,
            ring=ring.size,
            rank=ring.rank,
            batch=story.batch,
            heads=heads,
            head_dim=story.head_dim,
            head_dim_v=story.head_dim_v,
            element_bytes=story.dtype.itemsize,
            seq=event.seq,
        )
        counted = {kind: (traffic.bytes[kind], traffic.messages[kind]) for kind in traffic.bytes if kind != "control"}
        assert counted == dict(volume), (event, counted, volume)

    def reject(self, event: Reject) -> None:
        lengths = [length - count for length, count in zip(self.cache.lengths, event.counts, strict=True)]
        self.cache.truncate(lengths)
        self._forget(lengths)

    def reset(self, event: Reset) -> None:
        self.cache.reset(event.rows)
        self._forget([0 if row in event.rows else length for row, length in enumerate(self.cache.lengths)])

    def _forget(self, lengths: list[int]) -> None:
        for row, length in enumerate(lengths):
            left = self.at[row] < length
            self.kept[row], self.at[row] = [x[left] for x in self.kept[row]], self.at[row][left]
        assert list(self.cache.lengths) == lengths

    def check_cache(self) -> None:
        """Every rank has what its counts say, and together they have each key once."""
        cache, heads = self.cache, self.cache.plan(self.story.heads).keys[self.cache.ulysses.rank]
        for row in range(self.story.batch):
            mine = cache.positions(row)
            assert (mine.diff() > 0).all()
            everyone = [mine.tolist()]
            if self.mesh is not None:
                everyone = [None] * dist.get_world_size()
                dist.all_gather_object(everyone, (mine.tolist(), cache.ring.rank, cache.ulysses.rank))
                everyone = [x for x, _, ulysses in everyone if ulysses == cache.ulysses.rank]
            assert sorted(x for some in everyone for x in some) == self.at[row].tolist()
            order = torch.searchsorted(self.at[row], mine)
            for held, whole in zip((cache.k, cache.v), self.kept[row], strict=True):
                assert torch.equal(held[row, : len(mine)], whole[order, heads.start : heads.stop])

    def errors(self) -> dict[str, tuple[float, float]]:
        """Of out and lse, relative to the largest value: what was found, and plain PyTorch in the same dtype."""
        answers = {}
        for n, name in enumerate(("out", "lse")):
            found, expected, plain = (
                torch.cat([torch.empty(0), *(x[n].flatten() for x in some)])
                for some in (self.found, self.expected, self.plain or self.found)
            )
            measure = partial(oracle.relative_error, reference=expected)
            answers[name] = (measure(found), measure(plain)) if len(found) else (0.0, 0.0)
        return answers


def tell(story: Story) -> dict:
    """The errors of a whole story, and the reports of its prefills."""
    told, reports = Told(story), []
    for event in story.events:
        report = getattr(told, type(event).__name__.lower())(event)
        reports += [report] if report else []
        told.check_cache()
    return {
        "errors": told.errors(),
        "reports": [(x.algorithm, dict(x.exposed_s)) for x in reports],
        "common": told.common.hexdigest(),
    }


def check(story: Story) -> list:
    """Tell it, and hold the errors against what the dtype allows; the reports."""
    answer = tell(story)
    if story.ring * story.ulysses > 1:
        everyone: list = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, answer["common"])
        assert len(set(everyone)) == 1, "ranks have different results"
    for name, (error, plain) in answer["errors"].items():
        exact = oracle.EXACT.get(story.dtype)
        limit = min(oracle.LIMIT, oracle.FACTOR[name] * plain) if exact is None else exact
        if name == "lse":  # which is never in half precision
            limit = min(limit, 1e-4)
        assert error <= limit, (name, error, limit)
    return answer["reports"]
