"""Attention as a module, and what else is large in the layers around it: hidden activations, logits, recomputation.

Note [Tiles]
~~~~~~~~~~~~
Where tokens do not meet (an MLP, a head and its loss), a tile of them can be computed alone. Each tile is checkpointed:
what it made on its way is dropped and made again in backward, one tile at a time, so that tile x hidden or tile x
vocabulary elements are there at once and not seq x as many. Nothing else changes: a tile is an ordinary call of
the module, with its hooks, frozen weights and random numbers, and autograd adds up the tiles' gradients of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from usp.attention import Joint, Result, hybrid_attention
from usp.kernels.scores import RelativeBias
from usp.masks import Mask
from usp.merging import accumulator_dtype
from usp.partitions import Partition
from usp.ring import check_tensors


class HybridAttention(nn.Module):
    """`hybrid_attention` with its options fixed at construction. It has no parameters."""

    def __init__(
        self,
        mesh: DeviceMesh | None,
        *,
        replicate_kv: bool = False,
        scale: float | None = None,
        softcap: float | None = None,
        alibi: Sequence[float] | Tensor | None = None,
        exchange: str = "ring",
        backend: str = "auto",
        float32_delta: bool = False,
        check_ranks: bool = True,
        return_lse: bool = False,
    ):
        super().__init__()
        self.mesh = mesh
        self.options = {
            "replicate_kv": replicate_kv,
            "scale": scale,
            "softcap": softcap,
            "alibi": alibi,
            "exchange": exchange,
            "backend": backend,
            "float32_delta": float32_delta,
            "check_ranks": check_ranks,
            "return_lse": return_lse,
        }

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tokens: Partition,
        mask: Mask,
        key_tokens: Partition | None = None,
        *,
        joint: Joint | None = None,
        sinks: Tensor | None = None,
        bias: RelativeBias | None = None,
        dropout: tuple[float, int] | None = None,
    ) -> Result | tuple[Result, Result]:
        """Shapes, result and errors as in `hybrid_attention`."""
        return hybrid_attention(
            *(q, k, v, self.mesh, tokens),
            mask=mask,
            key_tokens=key_tokens,
            joint=joint,
            sinks=sinks,
            bias=bias,
            dropout=dropout,
            **self.options,
        )

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.options.items())


# ---------------------------------------------------------------------------------------------------
# Tiles.


def tiled_mlp(
    module: Callable[[Tensor], Tensor], x: Float[Tensor, "batch seq width"], *, tile: int
) -> Float[Tensor, "batch seq width_out"]:
    """module(x), a tile of tokens at a time, forward and backward: see Note [Tiles].

    The same numbers, but for the rounding of the weights' gradients, which are summed over tiles in their own dtype.

    Args:
        module: what does with every token the same, whatever the others are: an MLP, a norm. It is called once a tile,
            and once more in backward.
        tile: tokens at a time, of each batch row.

    Raises:
        ValueError: if tile is not a whole number from 1 on, x is not (batch, seq, width), or the module does not return
            one tensor with a row for each token.
    """
    check_tensors(x=x)
    _check_rows("x", x, tile)

    def checked(part: Tensor) -> Tensor:
        out = module(part)
        _check_result("module", out, part)
        return out

    return torch.cat(_tiles(checked, tile, x), 1)


def tiled_cross_entropy(
    hidden: Float[Tensor, "batch seq width"],
    head: Callable[[Tensor], Tensor],
    targets: Int[Tensor, "batch seq"],
    *,
    tile: int,
    ignore_index: int = -100,
) -> Float[Tensor, ""]:
    """The sum of the tokens' cross entropy of head(hidden), with the logits of a tile at a time: see Note [Tiles].

    A sum, since a loss is the sum over ranks (docs/gradients.md): divide it by the count of the whole batch. Ignored
    tokens go into the head as 0, whatever they hold (NaN too), and have gradient 0. A rank whose targets are all
    ignored has loss 0 and calls the head as often as the others, so that wrapped modules stay in step.

    Args:
        head: from (batch, tokens, width) to logits (batch, tokens, vocabulary), each token alone; finite at 0.
        targets: int64, in the vocabulary or ignore_index. Others are an error of PyTorch (on a device, of the device):
            looking would make the host wait.
        tile: tokens at a time, of each batch row.
        ignore_index: the target that does not count.

    Returns:
        In float32 (float64 for float64 logits), in which the softmax is computed too.

    Raises:
        ValueError: if tile is not a whole number from 1 on, hidden is not (batch, seq, width), targets are not one
            int64 for each token, or the head does not return one tensor with a row for each token.
    """
    check_tensors(hidden=hidden, targets=targets)
    _check_rows("hidden", hidden, tile)
    if targets.shape != hidden.shape[:2]:
        raise ValueError(
            f"targets {tuple(targets.shape)} are not one for each token of hidden {tuple(hidden.shape)}: shift "
            "them, and shard them as the tokens are, with ignore_index for tokens that have none"
        )
    if targets.dtype != torch.int64:
        raise ValueError(f"targets are {targets.dtype}, which does not hold classes: use targets.long()")

    def summed(part: Tensor, labels: Tensor) -> Tensor:
        # Not selected: their number would have to be known on the host, and ranks would do different work.
        part = part.masked_fill((labels == ignore_index)[..., None], 0.0)
        logits = head(part)
        _check_result("head", logits, part)
        logs = F.log_softmax(logits, -1, dtype=accumulator_dtype(logits.dtype))
        return F.nll_loss(logs.flatten(0, 1), labels.flatten(), ignore_index=ignore_index, reduction="sum")

    return torch.stack(_tiles(summed, tile, hidden, targets)).sum()


def _tiles(function: Callable[..., Tensor], tile: int, *xs: Tensor) -> list[Tensor]:
    # Contiguous, since modules reshape what they get by view.
    parts = zip(*([part.contiguous() for part in x.split(tile, 1)] for x in xs), strict=True)
    if not torch.is_grad_enabled():
        return [function(*part) for part in parts]
    return [checkpoint(function, *part, use_reentrant=False) for part in parts]


def _check_rows(name: str, x: Tensor, tile: int) -> None:
    if isinstance(tile, bool) or not isinstance(tile, int) or tile < 1:
        raise ValueError(f"tile={tile!r} is not a whole number of tokens from 1 on: use 1024, for instance")
    if x.ndim != 3:
        raise ValueError(f"{name} {tuple(x.shape)} must be (batch, seq, width): use {name}[None] for a single row")


def _check_result(name: str, out: object, part: Tensor) -> None:
    if isinstance(out, Tensor) and out.ndim == 3 and out.shape[:2] == part.shape[:2]:
        return
    found = f"a tensor {tuple(out.shape)}" if isinstance(out, Tensor) else f"a {type(out).__name__}"
    if isinstance(out, tuple | list):
        found += f" of {', '.join(type(x).__name__ for x in out)}"
    raise ValueError(
        f"{name} returned {found} for a tile {tuple(part.shape)}, and not one tensor with a row for each token: give a "
        "function that returns that alone, and is of each token (what counts over tokens, as a router's loss, is not)"
    )


# ---------------------------------------------------------------------------------------------------
# Recomputation.


def keep_attention() -> tuple[AbstractContextManager, AbstractContextManager]:
    """The `context_fn` of a checkpointed block whose attention is not computed again.

    `torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False, context_fn=usp.nn.keep_attention)` keeps what the
    ring and the way back to the sequence returned: lse, and out, twice if there are Ulysses ranks. Backward makes the
    rest again, projections and the way of q, k and v to heads, but no hop and no kernel call. The ranks' agreement
    (16 bytes a group) and what joint queries gather are sent again.
    """
    return create_selective_checkpoint_contexts([torch.ops.usp.ring_forward.default, torch.ops.usp.to_sequence.default])
