"""Attention as a module."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from usp.attention import Joint, Result, hybrid_attention
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
        exchange: str = "ring",
        backend: str = "auto",
        check_ranks: bool = True,
        return_lse: bool = False,
    ):
        super().__init__()
        self.mesh = mesh
        self.options = {
            "replicate_kv": replicate_kv,
            "scale": scale,
            "exchange": exchange,
            "backend": backend,
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
    ) -> Result | tuple[Result, Result]:
        """Shapes, result and errors as in `hybrid_attention`."""
        tensors = {"joint": joint, "sinks": sinks}
        return hybrid_attention(q, k, v, self.mesh, tokens, mask=mask, key_tokens=key_tokens, **tensors, **self.options)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.options.items())
