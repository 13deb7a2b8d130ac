"""The typed form of the configuration: unknown keys and wrong types fail when Hydra composes it."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING


@dataclass
class Mesh:
    ulysses: int = MISSING
    ring: int = MISSING


@dataclass
class Workload:
    heads: int = MISSING
    kv_heads: int = MISSING
    head_dim: int = MISSING
    batch: int = MISSING


@dataclass
class Layout:
    name: str = MISSING


@dataclass
class Measure:
    warmup: int = 1
    repeats: int = 3
    reference: bool = True  # compare every result with float64 on one process
    baseline: bool = False  # time the one-process fused kernel in the same run


@dataclass
class Attention:
    """Configuration of experiments.attention."""

    mesh: Mesh = field(default_factory=Mesh)
    workload: Workload = field(default_factory=Workload)
    layout: Layout = field(default_factory=Layout)
    measure: Measure = field(default_factory=Measure)
    seq: int = 4096
    causal: bool = True
    window: int | None = None
    dtype: str = "float32"
    backward: bool = True
    exchange: str = "ring"
    backend: str = "auto"
    seed: int = 0
    timeout_s: float = 120.0  # a rank that waits longer for another ends the point
    name: str = "attention"
    results: str = "results/${name}"


def register() -> None:
    """Make the schema known to Hydra."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store("schema", Attention)
