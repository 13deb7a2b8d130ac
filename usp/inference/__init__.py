"""Inference over a KV cache that is sharded over the mesh: prefill and decode. Public names, resolved when used."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from usp.inference.cache import KVCache as KVCache
    from usp.inference.decode import decode_attention as decode_attention
    from usp.inference.prefill import prefill_attention as prefill_attention
    from usp.inference.volumes import Rates as Rates
    from usp.inference.volumes import Report as Report

_HOMES = {
    "KVCache": "cache",
    "Rates": "volumes",
    "Report": "volumes",
    "decode_attention": "decode",
    "prefill_attention": "prefill",
}
__all__ = list(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module 'usp.inference' has no attribute {name!r}")
    return getattr(import_module(f"usp.inference.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
