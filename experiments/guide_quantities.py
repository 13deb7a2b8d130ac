"""What holds of the guide's example, Llama 3 70B and 1M tokens on A100s: bytes, FLOPs, seconds and causal work."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from usp.blocks import blocks
from usp.cost import model
from usp.cost.hardware import hardware
from usp.masks import Mask
from usp.partitions import Layout, Partition

MODEL, A100 = model("llama3_70b"), hardware("a100_80gb")
SEQ, SHORT, GPUS, ELEMENT_BYTES = 1_000_000, 128_000, 8, 2
SCALES = (8, 16, 32, 64)
PARAMS = 70 * 10**9  # the guide's; the model has MODEL.params
OVERHEAD_BYTES = 2 * 10**9  # the guide's, for buffers
FLOPS_PER_S = Fraction(175 * 10**12)  # of attention, as the guide assumes it achieved
MEMORY_BYTES_PER_S = Fraction(2 * 10**12)  # the guide's
MEMORY_BYTES = Fraction(A100["memory_bytes"])
LINK_BYTES_PER_S, NETWORK_BYTES_PER_S = Fraction(A100["link_bytes_per_s"]), Fraction(A100["network_bytes_per_s"])
NODE_BYTES_PER_S = NETWORK_BYTES_PER_S * int(A100["node_ranks"])
GB, MS, MINUTE_S = 10**9, Fraction(1, 1000), 60

Count = int | Fraction
CONTIGUOUS, ZIGZAG, STRIPED = Layout.CONTIGUOUS, Layout.ZIGZAG, Layout.STRIPED


# ---------------------------------------------------------------------------------------------------
# What holds: bytes, FLOPs, seconds.


def kv_bytes(tokens: Count) -> Fraction:
    """Keys and values of all layers."""
    return Fraction(MODEL.kv_bytes(tokens, ELEMENT_BYTES))  # pyright: ignore[reportArgumentType]


def qkv_bytes(tokens: Count) -> Fraction:
    """Q, K and V of one layer."""
    return Fraction(tokens) * (MODEL.heads + 2 * MODEL.kv_heads) * MODEL.head_dim * ELEMENT_BYTES


def hop_bytes(ring: Count, seq: int = SEQ) -> Fraction:
    """One message of the ring: keys and values of one layer and one rank's tokens."""
    return kv_bytes(Fraction(seq, ring)) / MODEL.layers


def ring_sent_bytes(ring: int) -> Fraction:
    """Of a rank in a layer: one hop less than steps."""
    return (ring - 1) * hop_bytes(ring)


def ulysses_sent_bytes(ulysses: int) -> Fraction:
    """Of a rank in a layer: all but its own share of its tokens' Q, K, V and out."""
    elements = Fraction(SEQ, ulysses) * (2 * MODEL.heads + 2 * MODEL.kv_heads) * MODEL.head_dim
    return Fraction(ulysses - 1, ulysses) * elements * ELEMENT_BYTES


def attention_flops(queries: Count, keys: Count) -> Fraction:
    """All heads of one layer, every query with every key."""
    return Fraction(4 * MODEL.heads * MODEL.head_dim) * queries * keys


def model_attention_flops(seq: Count) -> Fraction:
    """All layers, without a mask."""
    return MODEL.layers * attention_flops(seq, seq)


def linear_flops(tokens: Count) -> Fraction:
    """Matrices of all layers."""
    return Fraction(MODEL.linear_flops(tokens))  # pyright: ignore[reportArgumentType]


def layer_bytes() -> int:
    """Matrices of one layer."""
    return MODEL.layer_params * ELEMENT_BYTES


def prefill_s(seq: Count, gpus: Count, attention: Count = 1, linear: bool = True) -> Fraction:
    """Share `attention` of all pairs, and the matrices at the same rate."""
    flops = attention * model_attention_flops(seq) + (linear_flops(seq) if linear else 0)
    return flops / gpus / FLOPS_PER_S


def decode_s(seq: Count, batch: Count) -> Fraction:
    """A token of every sequence on tensor 8 x ring 4, reading memory alone: weights 1 of 8, KV 1 of 32."""
    weights_bytes = Fraction(MODEL.layers * layer_bytes(), 8)
    return (weights_bytes + batch * kv_bytes(seq) / 32) / MEMORY_BYTES_PER_S


def gather_s(gpus: Count, bytes_per_s: Count) -> Fraction:
    """All layers' weights from the other GPUs, once a token."""
    return MODEL.layers * (1 - Fraction(1, gpus)) * layer_bytes() / bytes_per_s


def batch_s(seq: Count, batch: Count, new_tokens: int = 500) -> Fraction:
    """Causal prefill, balanced, of so many requests on 32 GPUs, then their new tokens on tensor 8 x ring 4."""
    return batch * prefill_s(seq, 32, Fraction(1, 2)) + new_tokens * decode_s(seq, batch)


def tokens_to_hide(bytes_per_s: Count) -> Fraction:
    """Tokens of a rank from which a step takes as long as a hop; a causal mask, balanced, needs twice as many."""
    return ELEMENT_BYTES * FLOPS_PER_S * MODEL.kv_heads / (2 * MODEL.heads * Fraction(bytes_per_s))


class Memory(NamedTuple):
    """Bytes of the fullest GPU; `scores_bytes` where attention keeps them."""

    weights_bytes: Fraction
    kv_bytes: Fraction
    activations_bytes: Fraction
    overhead_bytes: Fraction = Fraction(OVERHEAD_BYTES)
    scores_bytes: Fraction = Fraction(0)

    @property
    def total_bytes(self) -> Fraction:
        return sum(self, Fraction(0))


def memory(gpus: Count, batch: Count = 1, params: int = PARAMS) -> Memory:
    """Weights sharded over all GPUs, and so is the sequence."""
    tokens = Fraction(SEQ) / gpus
    weights = Fraction(params * ELEMENT_BYTES) / gpus
    return Memory(weights, batch * kv_bytes(tokens), batch * qkv_bytes(tokens))


def largest_batch(gpus: Count, weight_shards: Count | None = None) -> int:
    """Sequences of 1M tokens that fit; weights are on as many shards as GPUs, or on fewer."""
    one, none = memory(gpus), memory(weight_shards or gpus, 0)
    return math.floor((MEMORY_BYTES - none.total_bytes) / (one.kv_bytes + one.activations_bytes))


# ---------------------------------------------------------------------------------------------------
# Causal work, counted.


@lru_cache
def pairs(layout: Layout, ring: int, seq: int) -> tuple[tuple[int, ...], ...]:
    """[rank][source]: (query, key) pairs of a causal mask."""
    mask, tokens, ranks = Mask(causal=True), Partition(seq, layout, ring), range(ring)
    return tuple(
        tuple(sum(block.pairs for block in blocks(mask, tokens, rank, tokens, source)) for source in ranks)
        for rank in ranks
    )


def rank_pairs(layout: Layout, ring: int, seq: int) -> list[int]:
    """Of each rank, over all steps."""
    return [sum(row) for row in pairs(layout, ring, seq)]


def step_pairs(layout: Layout, ring: int, seq: int) -> list[list[int]]:
    """[step][rank]: what ranks compute at the same time."""
    found = pairs(layout, ring, seq)
    return [[found[rank][(rank - step) % ring] for rank in range(ring)] for step in range(ring)]


@lru_cache
def rank_blocks(layout: Layout, ring: Count) -> tuple[Fraction, ...]:
    """Work of each rank in blocks of (seq / ring) x (seq / ring), in the limit of long sequences.

    With c tokens in half a rank's share it is exactly a c^2 + b c: two lengths give a, of which a block has 4.
    """
    one, two = (rank_pairs(layout, int(ring), 2 * int(ring) * c) for c in (1, 2))
    return tuple(Fraction(y - 2 * x, 8) for x, y in zip(one, two, strict=True))


def most(layout: Layout, ring: Count) -> Fraction:
    """Blocks of the rank that has most."""
    return max(rank_blocks(layout, ring))


def speed_up(ring: Count) -> Fraction:
    """Of zigzag over contiguous, by the rank that has most: (2N - 1)/N.

    With c tokens in half a rank's share, contiguous has (4N-2) c^2 + c pairs where it has most and zigzag 2N c^2 + c
    everywhere. The c is the diagonal's: count a token's own key half, and the ratio is this at any length.
    """
    return most(CONTIGUOUS, ring) / most(ZIGZAG, ring)


def speed_up_at(ring: int, seq: int, own_key: Count = 1) -> Fraction:
    """The same of a sequence, pair by pair; `own_key` is what a token's pair with itself counts."""
    less = (1 - own_key) * Fraction(seq, ring)
    slowest = [max(rank_pairs(layout, ring, seq)) - less for layout in (CONTIGUOUS, ZIGZAG)]
    return Fraction(slowest[0]) / slowest[1]
