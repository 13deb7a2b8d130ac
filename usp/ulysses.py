"""Trade sequence shards for head shards inside a Ulysses group, and back."""

from __future__ import annotations

import math

from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from usp import comm
from usp.mesh import axes


def sequence_to_heads(
    x: Float[Tensor, "batch seq_local heads head_dim"], mesh: DeviceMesh | None
) -> Float[Tensor, "batch seq_ring heads_local head_dim"]:
    """All tokens of the ring rank, this rank's share of the heads. Differentiable.

    (U-1)/U of x's bytes leave the rank, as one all-to-all.
    """
    return _trade(x, mesh, "all_to_all", "b s (p h) d -> p b s h d", "p b s h d -> b (p s) h d")


def heads_to_sequence(
    x: Float[Tensor, "batch seq_ring heads_local head_dim"], mesh: DeviceMesh | None
) -> Float[Tensor, "batch seq_local heads head_dim"]:
    """The inverse of `sequence_to_heads`. Differentiable."""
    return _trade(x, mesh, "all_to_all", "b (p s) h d -> p b s h d", "p b s h d -> b s (p h) d")


def lse_to_sequence(
    lse: Float[Tensor, "batch heads_local seq_ring"], mesh: DeviceMesh | None
) -> Float[Tensor, "batch heads seq_local"]:
    """`heads_to_sequence` for lse. Differentiable."""
    return _trade(lse, mesh, "lse", "b h (p s) -> p b h s", "p b h s -> b (p h) s")


def _trade(x: Tensor, mesh: DeviceMesh | None, kind: str, cut: str, join: str) -> Tensor:
    """Cut x into a part for each rank p, exchange the parts, and join what came."""
    ulysses = axes(mesh)[1]
    if ulysses.size == 1:
        return x
    return rearrange(comm.all_to_all(rearrange(x, cut, p=ulysses.size), ulysses.group, kind), join)


def check_heads(heads: int, kv_heads: int, ulysses: int) -> None:
    """Nothing, if the heads divide over the Ulysses axis.

    Raises:
        ValueError: naming the largest degree that works.
    """
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads over {kv_heads} KV heads: each KV head serves equally many query heads")
    if kv_heads % ulysses:
        common = math.gcd(heads, kv_heads)
        largest = max(degree for degree in range(1, ulysses + 1) if common % degree == 0)
        raise ValueError(
            f"{heads} query heads and {kv_heads} KV heads do not divide over ulysses={ulysses} ranks; "
            f"the largest Ulysses degree up to {ulysses} that works is {largest}: give the other ranks to the ring"
        )
