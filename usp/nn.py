"""Attention as a module."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from usp.attention import Joint, Result, hybrid_attention
from usp.kernels.scores import RelativeBias
from usp.masks import Mask
from usp.partitions import Partition


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
