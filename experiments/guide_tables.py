"""The tables that the guide announces and does not have, and what it gets wrong; every figure is computed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from analysis import published
from experiments.guide_quantities import (
    CONTIGUOUS,
    ELEMENT_BYTES,
    FLOPS_PER_S,
    GB,
    GPUS,
    LINK_BYTES_PER_S,
    MEMORY_BYTES,
    MINUTE_S,
    MODEL,
    MS,
    NETWORK_BYTES_PER_S,
    NODE_BYTES_PER_S,
    SCALES,
    SEQ,
    SHORT,
    STRIPED,
    ZIGZAG,
    Count,
    attention_flops,
    batch_s,
    decode_s,
    gather_s,
    hop_bytes,
    largest_batch,
    layer_bytes,
    linear_flops,
    memory,
    model_attention_flops,
    most,
    prefill_s,
    qkv_bytes,
    ring_sent_bytes,
    speed_up,
    speed_up_at,
    step_pairs,
    tokens_to_hide,
    ulysses_sent_bytes,
)
from usp.blocks import blocks
from usp.masks import Mask
from usp.partitions import Layout, Partition

# ---------------------------------------------------------------------------------------------------
# The guide's missing tables.


class Table(NamedTuple):
    """Cells as text; the first column is aligned left, the others right, or left too if `words`."""

    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]
    notes: tuple[str, ...] = ()
    words: bool = False


def gb(count: Count, digits: int = 2) -> str:
    """In GB of 1e9 bytes."""
    scaled = math.floor(Fraction(count) * 10**digits / GB + Fraction(1, 2))  # where format would round half to even
    return f"{scaled / 10**digits:,.{digits}f}"


def side_by_side() -> Table:
    """4.6.2."""
    n, layer_s = GPUS, attention_flops(SEQ, SEQ) / GPUS / FLOPS_PER_S
    exposed_s = ulysses_sent_bytes(n) / LINK_BYTES_PER_S
    step_s, hop_s = layer_s / n, hop_bytes(n) / LINK_BYTES_PER_S
    share, heads = f"{SEQ // n:,}", f"{MODEL.heads // n} query and {MODEL.kv_heads // n} KV"
    kv = gb(memory(n).kv_bytes)
    least = tokens_to_hide(NETWORK_BYTES_PER_S)
    rows = [
        ("a GPU attends", f"{heads} heads, all tokens", f"all heads, {share} tokens of queries"),
        ("largest degree", f"{MODEL.kv_heads} KV heads ({MODEL.heads} if replicated)", "no limit"),
        ("communication", "4 all-to-alls: Q, K, V and out", f"{n - 1} hops of {gb(hop_bytes(n), 3)} GB"),
        ("GB sent", f"{gb(ulysses_sent_bytes(n))}, falling as 1/N",
         f"{gb(ring_sent_bytes(n))}, rising to {gb(hop_bytes(1))}"),
        ("exposed, NVLink", f"{_ms(exposed_s)} ms, {float(100 * exposed_s / layer_s):.3f} % of the layer",
         f"0: a hop takes {_ms(hop_s)} ms, a step {float(step_s):.2f} s"),
        ("kernel calls", f"1: {SEQ:,} x {SEQ:,}, {MODEL.heads // n} heads",
         f"{n}: {share} x {share}, {MODEL.heads} heads; {n - 1} merges"),
        ("FLOPs", f"{float(attention_flops(SEQ, SEQ) / n):.3g}",
         f"{float(n * attention_flops(Fraction(SEQ, n), Fraction(SEQ, n))):.3g}"),
        ("KV cache, GB", kv, kv),
        ("buffers, GB", f"{gb(qkv_bytes(Fraction(SEQ, n)))} for the all-to-all",
         f"{gb(hop_bytes(n), 3)} for the next block"),
        ("causal balance", "of itself", "by zigzag or striped tokens"),
        ("network", "all pairs at once: NVLink",
         f"neighbours: InfiniBand, from {float(2 * least):,.0f} tokens a GPU on (causal)"),
    ]  # fmt: skip
    title = "4.6.2 Ulysses against ring: 8 GPUs, 1M tokens, a layer and GPU"
    return Table(title, ("", "Ulysses 8", "ring 8"), rows, words=True)


def _ms(seconds: Fraction) -> str:
    return f"{float(seconds / MS):.1f}"


def scales() -> Table:
    """4.7.2."""
    printed = {8: "62.5", 32: "17.1"}  # lines 32 and 457
    rows = []
    for n in SCALES:
        found, guide = memory(n), printed.get(n, "")
        mlp_bytes = Fraction(3 * SEQ * MODEL.intermediate * ELEMENT_BYTES, n)
        cells = [*map(gb, found[:4]), gb(found.total_bytes), guide, gb(MEMORY_BYTES - found.total_bytes, 1)]
        cells += [str(largest_batch(n)), gb(mlp_bytes)]
        rows.append((str(n), *cells))
    header = (
        "GPUs", "weights", "KV", "Q, K, V", "overhead", "total", "guide", "headroom", "largest batch", "+ MLP at once",
    )  # fmt: skip
    real = memory(GPUS, params=MODEL.params)
    notes = (
        "Not in the total: the MLP's gate, up and product of all tokens (last column), the layer that FSDP gathers "
        f"({gb(layer_bytes())}, twice that with prefetch) and what arrives on the ring. Not everything halves: the "
        f"overhead and the gathered layer stay. All {MODEL.params:,} parameters: {gb(real.weights_bytes)} at 8.",
    )
    return Table("4.7.2 Memory at different scales: GB a GPU, 1M tokens, batch 1", header, rows, notes)


def complete_memory() -> Table:
    """4.9."""
    whole, eighth, last = memory(1), memory(GPUS), memory(32)
    no = {"overhead_bytes": Fraction(0)}
    scores = Fraction(SEQ * SEQ * MODEL.heads * ELEMENT_BYTES)
    kinds = {
        "naive": whole._replace(scores_bytes=scores, **no),
        "FlashAttention": whole._replace(**no),
        "+ FSDP 8": whole._replace(weights_bytes=eighth.weights_bytes, **no),
        "+ Ulysses 8 or ring 8": eighth,
        "ring 32, or Ulysses 8 x ring 4": last,
    }
    rows = [
        (name, *(gb(count) if count else "-" for count in (*found[:3], found.scores_bytes, found.overhead_bytes)),
         gb(found.total_bytes), "yes" if found.total_bytes <= MEMORY_BYTES else "no")
        for name, found in kinds.items()
    ]  # fmt: skip
    header = ("", "weights", "KV", "Q, K, V", "scores", "overhead", "total", "fits 80 GB")
    return Table("4.9 The complete memory picture: GB of the fullest GPU, 1M tokens, one request", header, rows)


def prefill() -> Table:
    """4.9.3."""
    rows = []
    for n in (8, 16, 32, 64, 128):
        cells = [f"{float(attention_flops(SEQ, SEQ) / n / FLOPS_PER_S):.2f}"]
        half = Fraction(1, 2)
        for seq, unit in ((SEQ, MINUTE_S), (SHORT, 1)):
            times = (prefill_s(seq, n, 1, False), prefill_s(seq, n, half, False), prefill_s(seq, n, half))
            cells += [f"{float(time / unit):.2f}" for time in times]
        ratio = prefill_s(SEQ, n, 1, False) / n / MODEL.layers / (hop_bytes(n) / NETWORK_BYTES_PER_S)
        rows.append((str(n), *cells, f"{float(ratio):.1f} / {float(ratio / 2):.1f}"))
    header = (
        "GPUs", "s a layer", "1M: full", "causal", "+ matrices", "128K: full", "causal", "+ matrices", "step/hop, IB",
    )  # fmt: skip
    notes = (
        "1M in minutes, 128K in seconds, at 175 TFLOP/s. A mask halves the pairs that attention has, not the matrices; "
        "causal: balanced.",
        "Step over hop of the ring between nodes, full and causal: above 1, the hop is hidden.",
    )
    return Table("4.9.3 Prefill", header, rows, notes)


def decode() -> Table:
    """4.9.4.3."""
    rows = [
        ("FSDP 8, NVLink", f"at least {_ms(gather_s(8, LINK_BYTES_PER_S))}", "gathering all weights"),
        ("FSDP 32, 4 nodes", f"at least {_ms(gather_s(32, NODE_BYTES_PER_S))}", "the same, through 8 adapters a node"),
        ("tensor 8 x ring 4, batch 1", f"at least {_ms(decode_s(SEQ, 1))}", "reading weights and KV"),
        ("tensor 8 x ring 4, batch 6", f"at least {_ms(decode_s(SEQ, 6))}", "reading weights, and KV of all six"),
    ]  # fmt: skip
    return Table("4.9.4.3 Decode: ms a token, 1M tokens", ("", "ms", "for"), rows, words=True)


def balance() -> Table:
    """4.8, counted."""
    rows = []
    for n in SCALES:
        found = [most(layout, n) for layout in (CONTIGUOUS, ZIGZAG, STRIPED)]
        own = Fraction(4 * n, 2 * n + 1)
        ups = (f"{up} = {float(up):.6f}" for up in (speed_up(n), own))
        rows.append((str(n), *(f"{float(x):g}" for x in found), *ups))
    header = ("GPUs", "contiguous", "zigzag", "striped", "speed-up (2N-1)/N", "guide 4N/(2N+1)")
    notes = (
        "Blocks of S/N x S/N of the GPU that has most, in the limit of long sequences; the guide counts 8 and 4.25 on "
        "8. With c = S/2N, contiguous has (4N-2) c^2 + c pairs there and zigzag 2N c^2 + c everywhere: count a token's "
        f"own key half, and the ratio is (2N-1)/N at any length. Whole, on 8 at 1M: {speed_up_at(GPUS, SEQ)}.",
    )
    return Table("4.8 Causal work, pair by pair", header, rows, notes)


def summary() -> Table:
    """4.10."""
    n = GPUS
    ups = ", ".join(f"{float(speed_up(x)):g}" for x in SCALES)
    times = {share: " / ".join(f"{float(prefill_s(SEQ, x, share, False) / MINUTE_S):.2f}" for x in SCALES)
             for share in (Fraction(1), Fraction(1, 2))}  # fmt: skip
    lines = " / ".join(f"{float(linear_flops(SEQ) / x / FLOPS_PER_S / MINUTE_S):.2f}" for x in SCALES)
    inside, between = tokens_to_hide(LINK_BYTES_PER_S), tokens_to_hide(NETWORK_BYTES_PER_S)
    rows = [
        ("degree", f"ring: no limit; Ulysses: {MODEL.kv_heads} KV heads, or {MODEL.heads} query heads (KV replicated)"),
        ("ring sends", f"N - 1 hops of 2 (S/N) K d e bytes a layer: {n - 1} x {gb(hop_bytes(n), 3)} GB on {n}"),
        ("hidden", f"from {float(inside):.0f} tokens a rank on inside a node, {float(between):.0f} between nodes; "
         f"causal, balanced: {float(2 * inside):.0f}, {float(2 * between):.0f}"),
        ("holds", f"two blocks of keys and values a layer, {gb(2 * hop_bytes(n), 3)} GB on {n}, not one"),
        ("KV cache", f"{gb(memory(n).kv_bytes)} GB a GPU on {n}, Ulysses or ring; {gb(memory(32).kv_bytes)} on 32"),
        ("causal", f"zigzag is (2N-1)/N times as fast as contiguous: {ups} on 8, 16, 32, 64"),
        ("prefill, 1M", f"{times[Fraction(1)]} min on 8 / 16 / 32 / 64; causal, balanced {times[Fraction(1, 2)]}"),
        ("", f"and {lines} min for matrices"),
        ("decode, 1M", f"FSDP at least {float(gather_s(8, LINK_BYTES_PER_S) / MS):.0f} ms a token on 8, "
         f"{float(gather_s(32, NODE_BYTES_PER_S) / MS):.0f} on 32; tensor 8 x ring 4 "
         f"at least {_ms(decode_s(SEQ, 1))}, {_ms(decode_s(SEQ, 6))} with batch 6"),
        ("batch on 32", f"{largest_batch(32)} with weights sharded over all, {largest_batch(32, 8)} with weights for "
         "decode (tensor 8)"),
        ("served", f"six requests and 500 tokens each: {float(batch_s(SEQ, 6) / MINUTE_S):.1f} min at 1M, "
         f"{float(batch_s(SHORT, 6)):.0f} s at 128K"),
    ]  # fmt: skip
    return Table("4.10 Summary", ("", ""), rows, words=True)


def tables() -> list[Table]:
    """In the guide's order."""
    return [side_by_side(), scales(), balance(), complete_memory(), prefill(), decode(), summary()]


# ---------------------------------------------------------------------------------------------------
# What the guide gets wrong.

SCORES, VALUES = (2.0, 1.0, 0.5, -1.0), (1.0, 2.0, 3.0, 4.0)  # of four keys, in two blocks


def softmax(scores: Sequence[float] = SCORES, values: Sequence[float] = VALUES) -> float:
    """All keys at once."""
    weights = [math.exp(score) for score in scores]
    return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)


def blockwise(
    scores: Sequence[float] = SCORES,
    values: Sequence[float] = VALUES,
    normalise_first: bool = False,
    block_maximum: bool = False,
) -> float:
    """Two blocks of keys one after the other, as lines 144 to 165 have it.

    Args:
        normalise_first: as line 148: the first block's output is divided by its sum, and at the end again.
        block_maximum: as lines 152 and 169: what was is rescaled to the second block's maximum.
    """
    half = len(scores) // 2
    peak = max(scores[:half])
    weights = [math.exp(score - peak) for score in scores[:half]]
    total = sum(weights)
    out = sum(w * v for w, v in zip(weights, values[:half], strict=True)) / (total if normalise_first else 1.0)
    block_peak = max(scores[half:])
    new_peak = max(peak, block_peak)
    rescale = math.exp(peak - (block_peak if block_maximum else new_peak))
    weights = [math.exp(score - new_peak) for score in scores[half:]]
    total = rescale * total + sum(weights)
    out = rescale * out + sum(w * v for w, v in zip(weights, values[half:], strict=True))
    return out / total


def measured(layout: Layout, ulysses: int = 1) -> float:
    """Published calls per second: 8 A100, NVLink, 128K tokens, 8 heads of 128."""
    wanted = {"length": 131072, "heads": 8, "head_dim": 128, "qkv": "separate", "layout": layout, "ulysses": ulysses}
    (rate,) = (
        row.calls_per_s
        for row in published.rows("a100_nvlink")
        if all(getattr(row, name) == value for name, value in wanted.items())
    )
    assert rate is not None
    return rate


def spread(layout: Layout, ring: int, seq: int) -> int:
    """Pairs by which ranks differ in a step, at most."""
    return max(max(step) - min(step) for step in step_pairs(layout, ring, seq))


def rectangles(layout: Layout, ring: int, rank: int) -> str:
    """What a rank computes with the keys of its neighbours and its own."""
    mask, tokens = Mask(causal=True), Partition(SEQ, layout, ring)
    found = []
    for source in range(rank - 1, rank + 2):
        for x in blocks(mask, tokens, rank, tokens, source):
            found.append(f"{x.q.start:,}-{x.q.stop:,} x {x.k.start:,}-{x.k.stop:,} {x.kind.value} (of GPU {source})")
    return ", ".join(found)


class Error(NamedTuple):
    """What the guide says, and what holds."""

    name: str
    lines: str
    says: str
    holds: str


def errors() -> list[Error]:
    """Those that change what one would conclude."""
    n, half = GPUS, Fraction(1, 2)
    layer_pairs = Fraction(SEQ, n)
    matrices = linear_flops(SEQ) / model_attention_flops(SEQ)
    short = linear_flops(SHORT) / model_attention_flops(SHORT)
    gains = {layout: measured(CONTIGUOUS, 8) / measured(CONTIGUOUS) for layout in (CONTIGUOUS,)}
    gains |= {layout: measured(layout, 8) / measured(layout) for layout in (ZIGZAG, STRIPED)}
    mlp_bytes = 3 * SEQ // n * MODEL.intermediate * ELEMENT_BYTES
    residual_bytes = SEQ // n * MODEL.hidden * ELEMENT_BYTES
    minutes, seconds = batch_s(SEQ, 6) / MINUTE_S, batch_s(SHORT, 6)
    z8, z32 = (prefill_s(SHORT, x, half) for x in (8, 32))
    a8, a32 = (prefill_s(SHORT, x, half, False) for x in (8, 32))
    return [
        Error("E1", "148, 163", "the first block's output is divided by its sum, and again at the end",
              f"divide once, at the end. Four keys: {blockwise(normalise_first=True):.4f} instead of "
              f"{softmax():.4f}, which dividing once gives"),
        Error("E2", "152, 169", "what was is rescaled by exp(m_old - m_new), m_new the block's maximum",
              f"by exp(m_old - max(m_old, m_block)). Four keys: {blockwise(block_maximum=True):.4f} instead of "
              f"{softmax():.4f}. Also missing: 1/sqrt(d), and rows that see no key (m = -inf)"),
        Error("E3", "67, 136", "never more than 125K tokens of KV",
              f"with the overlap of 4.5 two blocks, {2 * SEQ // n:,} tokens, {gb(2 * hop_bytes(n), 3)} GB a layer; "
              "three if the own shard is the cache"),
        Error("E4", "257", "64 times less work in a call of ring",
              f"{attention_flops(SEQ, SEQ) / n / attention_flops(layer_pairs, layer_pairs)} times: Ulysses has "
              f"{MODEL.heads // n} heads in a call, ring {MODEL.heads}"),
        Error("E5", "246-262, 309", "ring is slower as its blocks are too small for the GPU",
              f"a call has {MODEL.heads * SEQ // n // 128:,} tiles of 128 queries for 108 SMs. Published, 128K: "
              f"Ulysses is {gains[CONTIGUOUS]:.2f} times as fast as contiguous, {gains[ZIGZAG]:.2f} zigzag, "
              f"{gains[STRIPED]:.2f} striped; imbalance alone is {float(speed_up(n)):g}"),
        Error("E6", "221", "matrices add 4 %",
              f"{float(100 * matrices):.1f} % of full attention, {float(200 * matrices):.1f} % of causal; at 128K "
              f"{float(100 * short):.1f} % and {float(200 * short):.1f} %"),
        Error("E7", "490-491", "128K with zigzag: 16-26 s on 8, 4-6 s on 32",
              f"{float(z8):.1f} s and {float(z32):.1f} s with matrices, which zigzag leaves as they are; "
              f"attention alone {float(a8):.1f} s and {float(a32):.1f} s"),
        Error("E8", "543", "FSDP decodes in 74-89 ms a token, communication included",
              f"gathering takes {float(gather_s(8, LINK_BYTES_PER_S) / MS):.0f} ms on 8, "
              f"{float(gather_s(32, NODE_BYTES_PER_S) / MS):.0f} ms on 32, with nothing as long to hide it behind"),
        Error("E9", "558-565", "six requests of 1M tokens in 4.2 min, 1.4 a minute",
              f"{float(minutes):.1f} min, {float(6 / minutes):.2f} a minute: six prefills take six times as long, and "
              f"decode reads six times the KV, {_ms(decode_s(SEQ, 6))} ms a token"),
        Error("E10", "567-572", "six requests of 128K in 13 s, 28 a minute",
              f"{float(seconds):.0f} s, {float(360 / seconds):.1f} a minute, for the same reasons"),
        Error("E11", "465, 562", "batch 6 and 15 ms a token",
              f"two deployments: {largest_batch(32)} fit with weights sharded over 32, 15 ms need them on 8 (tensor "
              f"parallel), which leaves {largest_batch(32, 8)}; both of a group of 32 GPUs, not of a GPU"),
        Error("E12", "41", "batch 2 takes 103.5 GB",
              f"{gb(memory(n, 2).total_bytes)} GB: activations double too (105.5 with 2.0 GB of them)"),
        Error("E13", "410", "only RoPE depends on the order of tokens; FlashAttention handles zigzag's mask",
              "the causal mask depends on positions too, and kernels take full rectangles or the causal triangle, so "
              f"keys that arrive have to be cut. GPU 1 of 8, queries x keys: {rectangles(ZIGZAG, n, 1)}"),
        Error("E14", "338-340", "zigzag is another name for striped",
              f"two layouts: chunks i and 2N-1-i, or every N-th token. In a step, GPUs differ by "
              f"{spread(ZIGZAG, n, SEQ)} pairs with zigzag and up to {spread(STRIPED, n, SEQ):,} striped, of "
              f"{max(step_pairs(ZIGZAG, n, SEQ)[-1]):,}"),
        Error("E15", "23-34", "17.5 GB of headroom on 8",
              f"{gb(MEMORY_BYTES - memory(n).total_bytes)}, and not counted: the MLP of all tokens {gb(mlp_bytes)} (it "
              f"needs tiles), hidden states {gb(residual_bytes)}, the gathered layer {gb(layer_bytes())} or twice, the "
              f"all-to-all {gb(qkv_bytes(layer_pairs))}, the next block {gb(hop_bytes(n))}"),
    ]  # fmt: skip
