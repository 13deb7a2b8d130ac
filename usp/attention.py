"""Hybrid attention: to heads, around the ring, back to the sequence."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from usp import comm, kernels
from usp.masks import Mask
from usp.mesh import axes
from usp.partitions import Partition
from usp.ring import attend, check_call, check_ends
from usp.sharding import checked_axes
from usp.ulysses import check_heads, heads_to_sequence, lse_to_sequence, sequence_to_heads


def hybrid_attention(
    q: Float[Tensor, "batch seq_local heads head_dim"],
    k: Float[Tensor, "batch key_seq_local kv_heads head_dim"],
    v: Float[Tensor, "batch key_seq_local kv_heads head_dim_v"],
    mesh: DeviceMesh | None,
    tokens: Partition,
    *,
    mask: Mask,
    key_tokens: Partition | None = None,
    scale: float | None = None,
    exchange: str = "ring",
    backend: str = "auto",
    check_ranks: bool = True,
    return_lse: bool = False,
) -> (
    Float[Tensor, "batch seq_local heads head_dim_v"]
    | tuple[Float[Tensor, "batch seq_local heads head_dim_v"], Float[Tensor, "batch heads seq_local"]]
):
    """Exact softmax attention of a sequence that is spread over a ring x ulysses mesh.

    USP (arXiv 2405.07719): an all-to-all inside each Ulysses group gives every rank all tokens of its ring rank
    and its share of the heads; the ring (Liu et al., arXiv 2310.01889) then brings the other ring ranks' keys; a
    second all-to-all takes `out` back. Differentiable once, in q, k and v and through lse.

    Args:
        q, k, v: this rank's shards, as `usp.shard` makes them. Query head h reads KV head
            h // (heads // kv_heads); KV heads divide over the Ulysses axis. Any strides.
        mesh: a mesh with the axes "ring" and "ulysses" (`usp.init_mesh`), or None for one process.
        tokens: the partition of the queries, and of the keys unless they have their own.
        mask: what each query may see; there is no default.
        key_tokens: the keys' own partition, for cross attention and chunked prefill.
        scale: positive factor of the scores; head_dim ** -0.5 by default.
        exchange: "ring", keys travel from rank to rank under the computation; or "all_gather", all keys are
            gathered first (for links where many small messages cost more than memory).
        backend: one of `usp.backends()`, or "auto" for the first that can.
        check_ranks: let the ranks agree on the call before anything is sent (16 bytes a group). Without it, calls
            that differ between ranks hang or give wrong results.
        return_lse: also return log(sum(exp(scores))), natural log, float32 (float64 for float64).

    Returns:
        out, in q's dtype; with `return_lse` (out, lse). Rows that see no key have out 0, lse -inf and gradient 0.

    Raises:
        ValueError: on every rank and before any payload, if this rank's arguments do not fit together or the
            ranks' calls differ. The groups stay usable.
        RuntimeError: if a rank stays away until the process group's timeout; the group must then be rebuilt.
    """
    keys, error, checked = key_tokens or tokens, None, None
    try:
        ring, ulysses = checked_axes(mesh, tokens)
        checked_axes(mesh, keys)
        check_call(q, k, v, mask, tokens, keys, scale, exchange, seq=tokens.seq_local, key_seq=keys.seq_local)
        if key_tokens is None:
            check_ends(mask, tokens)
        check_heads(q.shape[2], k.shape[2], ulysses.size)
        differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        checked = ring, kernels.select(backend, q, v, lse_gradient=return_lse and differentiated)
    except Exception as mistake:
        if not check_ranks or mesh is None:
            raise
        error = str(mistake) if isinstance(mistake, ValueError) else f"{type(mistake).__name__}: {mistake}"
    if check_ranks:
        facts = {
            "shapes of q, k, v": [tuple(getattr(x, "shape", ())) for x in (q, k, v)],
            "dtypes of q, k, v": [str(getattr(x, "dtype", None)) for x in (q, k, v)],
            "requires_grad of q, k, v": [getattr(x, "requires_grad", None) for x in (q, k, v)],
            "grad mode": torch.is_grad_enabled(),
            "tokens": tokens,
            "key_tokens": keys,
            "mask": mask,
            "options": {"scale": scale, "exchange": exchange, "backend": backend, "return_lse": return_lse},
        }
        comm.agree(axes(mesh), facts, error)
    assert checked is not None
    ring, backend = checked

    q, k, v = (sequence_to_heads(x, mesh) for x in (q, k, v))
    out, lse = attend(q, k, v, ring, mask, tokens, keys, scale, exchange, backend)
    out = heads_to_sequence(out, mesh)
    return (out, lse_to_sequence(lse, mesh)) if return_lse else out
