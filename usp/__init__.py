"""usp: exact attention over sequences that do not fit on one device. Public names, resolved when used."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from usp import inference as inference
    from usp import nn as nn
    from usp.attention import Joint as Joint
    from usp.attention import hybrid_attention as hybrid_attention
    from usp.comm import Traffic as Traffic
    from usp.comm import measure_traffic as measure_traffic
    from usp.heads import HeadPlan as HeadPlan
    from usp.kernels import backends as backends
    from usp.kernels.scores import RelativeBias as RelativeBias
    from usp.masks import Mask as Mask
    from usp.masks import Region as Region
    from usp.merging import merge as merge
    from usp.mesh import init_mesh as init_mesh
    from usp.nn import HybridAttention as HybridAttention
    from usp.partitions import Layout as Layout
    from usp.partitions import Partition as Partition
    from usp.ring import ring_attention as ring_attention
    from usp.sharding import partition as partition
    from usp.sharding import positions as positions
    from usp.sharding import shard as shard
    from usp.sharding import unshard as unshard
    from usp.training import ShardedLoader as ShardedLoader
    from usp.training import Spread as Spread
    from usp.training import batch_mask as batch_mask
    from usp.training import count_targets as count_targets
    from usp.training import mean_over_ranks as mean_over_ranks
    from usp.training import sampler as sampler
    from usp.training import sequence_parallel_loss as sequence_parallel_loss
    from usp.training import shard_batch as shard_batch
    from usp.ulysses import heads_to_sequence as heads_to_sequence
    from usp.ulysses import sequence_to_heads as sequence_to_heads

_HOMES = {
    "HeadPlan": "heads",
    "HybridAttention": "nn",
    "Joint": "attention",
    "Layout": "partitions",
    "Mask": "masks",
    "Partition": "partitions",
    "Region": "masks",
    "RelativeBias": "kernels.scores",
    "ShardedLoader": "training",
    "Spread": "training",
    "Traffic": "comm",
    "backends": "kernels",
    "batch_mask": "training",
    "count_targets": "training",
    "heads_to_sequence": "ulysses",
    "hybrid_attention": "attention",
    "init_mesh": "mesh",
    "mean_over_ranks": "training",
    "measure_traffic": "comm",
    "merge": "merging",
    "partition": "sharding",
    "positions": "sharding",
    "ring_attention": "ring",
    "sampler": "training",
    "sequence_parallel_loss": "training",
    "sequence_to_heads": "ulysses",
    "shard": "sharding",
    "shard_batch": "training",
    "unshard": "sharding",
}
_PACKAGES = ["cost", "inference", "nn"]
__all__ = [*_HOMES, *_PACKAGES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str):
    if name in _PACKAGES:
        return import_module(f"usp.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'usp' has no attribute {name!r}")
    return getattr(import_module(f"usp.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
