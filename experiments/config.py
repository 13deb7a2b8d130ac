"""The typed form of the configuration: unknown keys, wrong types and unknown choices fail when Hydra composes it."""

from __future__ import annotations

import itertools
import json
import math
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from omegaconf import MISSING, DictConfig, OmegaConf

import usp
from analysis import published
from experiments.ranks import FIRST
from usp.inference.volumes import DECODE, PREFILL
from usp.ledger import OWNERS
from usp.ring import EXCHANGES

CONFIGS = Path(__file__).parent.parent / "configs"

# Members are written as in a command: OmegaConf reads an Enum by name.
LayoutName = Enum("LayoutName", ["contiguous", "zigzag", "striped"])
Axis = Enum("Axis", ["ulysses", "ring"])
Dtype = Enum("Dtype", ["float64", "float32", "bfloat16", "float16"])
Device = Enum("Device", ["auto", "cpu", "cuda"])
Reference = Enum("Reference", ["whole", "rows", "none"])
Exchange = Enum("Exchange", list(EXCHANGES))
Backend = Enum("Backend", ["auto", *usp.backends()])
DecodeAlgorithm = Enum("DecodeAlgorithm", ["auto", *DECODE])
PrefillAlgorithm = Enum("PrefillAlgorithm", ["auto", *PREFILL])
Owner = Enum("Owner", list(OWNERS))
Table = Enum("Table", list(published.TITLES))
ModelName = Enum("ModelName", ["tiny_llama", "smollm2"])
Phase = Enum("Phase", ["train", "evaluate", "generate"])
Whose = Enum("Whose", ["auto", "usp", "transformers"])
Engine = Enum("Engine", ["auto", "fsdp", "ddp"])
Checkpoint = Enum("Checkpoint", ["none", "attention_kept", "all"])


@dataclass
class Mesh:
    ulysses: int = MISSING
    ring: int = MISSING
    inner: Axis = Axis["ulysses"]  # whose ranks are consecutive, so on one host if they fit


@dataclass
class DataMesh(Mesh):
    data: int = 1  # replicas


@dataclass
class Workload:
    heads: int = MISSING
    kv_heads: int = MISSING
    head_dim: int = MISSING
    batch: int = MISSING


@dataclass
class Layout:
    name: LayoutName = MISSING


@dataclass
class Measure:
    warmup: int = MISSING  # calls before the first that counts
    repeats: int = MISSING  # calls that count
    reference: Reference = MISSING  # compare with float64: every result, out and dq of some rows, or nothing
    baseline: bool = MISSING  # time the one-process fused kernel in the same rounds


@dataclass
class Published:
    """The published table beside which the rows are set (analysis/published)."""

    table: Table | None = None
    length: int | None = None  # its sequence length
    factor: int = 1  # what that length is divided by here
    only: bool = False  # leave out what is not in the table


@dataclass
class Cluster:
    """Hosts of an emulated cluster (experiments.emulated_cluster)."""

    hosts: int | None = None
    ranks_per_host: int | None = None
    gbit_per_s: float | None = None  # of the one link that each host has, in each direction


@dataclass
class Job:
    """What every experiment's configuration has."""

    mesh: Mesh = field(default_factory=Mesh)
    cluster: Cluster = field(default_factory=Cluster)  # nothing of it: ranks are of this machine, or are found running
    dtype: Dtype = Dtype["float32"]
    backend: Backend = Backend["auto"]
    device: Device = Device["auto"]
    seed: int = 0
    timeout_s: float = 300.0  # a point that takes longer is ended, with the stack of every rank in its record
    force: bool = False  # measure again what has a good record
    name: str = MISSING
    results: str = "results/${name}"


@dataclass
class Point(Job):
    """What the configuration of attention alone has, in whatever form."""

    workload: Workload = field(default_factory=Workload)
    measure: Measure = field(default_factory=Measure)


@dataclass
class Attention(Point):
    """Configuration of experiments.attention."""

    layout: Layout = field(default_factory=Layout)
    published: Published = field(default_factory=Published)
    seq: int = 4096
    causal: bool = True
    window: int | None = None
    backward: bool = True
    exchange: Exchange = Exchange["ring"]
    replicate_kv: bool = False  # KV heads go to several ranks where Ulysses has more ranks than there are
    name: str = "attention"


@dataclass
class Decode(Point):
    """Configuration of experiments.decode."""

    context: int = 4096  # tokens of each sequence that the cache holds before a step
    batch: int = 1  # sequences
    seq: int = 1  # new tokens of each in a step
    algorithm: DecodeAlgorithm = DecodeAlgorithm["helix"]
    gather: bool = False  # give every rank all of out
    window: int | None = None
    block: int = 16  # tokens that go to one ring rank before the next one's turn
    owner: Owner = Owner["rotate"]  # who gets the next block
    name: str = "decode"


@dataclass
class Prefill(Point):
    """Configuration of experiments.prefill."""

    layout: Layout = field(default_factory=Layout)
    total: int = 4096  # tokens of each sequence after the call
    share: float = 0.5  # of them, how many the cache holds before it
    batch: int = 1  # sequences
    algorithm: PrefillAlgorithm = PrefillAlgorithm["auto"]
    name: str = "prefill"


@dataclass
class Model(Job):
    """Configuration of experiments.model. What only one phase has is null in the others: configs/phase sets it."""

    model: ModelName = ModelName["tiny_llama"]
    phase: Phase = Phase["train"]
    mesh: DataMesh = field(default_factory=DataMesh)
    layout: Layout = field(default_factory=Layout)
    attention: Whose = Whose["auto"]  # that of transformers in one process, else this library's
    seq: int = MISSING  # tokens of each sequence; of its prompt, if it is to go on
    batch: int = 1  # sequences of each replica
    tile_mlp: int | None = None
    tile_loss: int | None = None
    steps: int | None = None  # of training
    learning_rate: float | None = None
    engine: Engine | None = None  # who averages gradients; auto: fsdp on several ranks
    checkpoint: Checkpoint = Checkpoint["none"]
    new_tokens: int | None = None  # that follow each prompt, the likeliest at every place
    name: str = "model"


NOT_MEASURED = ("timeout_s", "force", "name", "results")  # what does not change what a point is


def register() -> None:
    """Make the schemas and the resolver `scaled` known to Hydra."""
    for schema in (Attention, Decode, Prefill, Model):
        ConfigStore.instance().store(f"{schema.__name__.lower()}_schema", schema)
    OmegaConf.register_new_resolver("scaled", scaled, replace=True)


def plain(config: DictConfig) -> dict:
    """The resolved configuration as plain values; a cluster of which nothing is given is None."""
    found: dict = OmegaConf.to_container(config, resolve=True, enum_to_str=True)  # pyright: ignore[reportAssignmentType]
    if all(value is None for value in (found["cluster"] or {}).values()):
        found["cluster"] = None
    return found


def scaled(length: int, factor: int) -> int:
    """The published length divided by the factor; a point whose factor does not divide it is refused later."""
    return length // max(1, factor)


class Journal(Callback):
    """The list of a command's points beside their records, one line each, as they are done.

    Points may run in other processes (launcher=joblib), so what a command has done is read from here; they find it by
    an environment variable. Hydra tells the beginning, in the process that was started.
    """

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        self._begin(config, lambda: 1)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        self._begin(config, lambda: points(config))

    def _begin(self, config: DictConfig, count: Callable[[], int]) -> None:
        name = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{os.getpid()}-{secrets.token_hex(2)}.jsonl"
        os.environ[JOURNAL] = str(Path(config.results) / "runs" / name)
        if FIRST:
            note({"points": count()})


JOURNAL = "USP_JOURNAL"


def journal() -> Path | None:
    """Where the command that this process is part of keeps its list; None before it has begun."""
    return Path(os.environ[JOURNAL]) if JOURNAL in os.environ else None


def note(entry: dict) -> None:
    """Add a line to the journal, whole: processes may do so at the same time."""
    path = Path(os.environ[JOURNAL])
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as file:
        file.write(json.dumps(entry).encode() + b"\n")


def entries() -> list[dict]:
    path = Path(os.environ[JOURNAL])
    return [json.loads(line) for line in path.read_text().splitlines()]


def wanted(config: dict) -> bool:
    """Whether a sweep that was asked for a published table alone has this point."""
    beside = config.get("published")
    return not (beside and beside["only"]) or published.find(config) is not None


def points(config: DictConfig) -> int:
    """How many points a sweep has. Hydra does not tell: counted from the choices, on the parts that `wanted` reads."""
    texts = [f"{key}={value}" for key, value in (config.hydra.sweeper.params or {}).items()] + list(
        config.hydra.overrides.task
    )
    choices: dict[str, list[str]] = {}
    for override in OverridesParser.create().parse_overrides(texts):
        sweep = override.is_sweep_override()
        values = override.sweep_string_iterator() if sweep else [override.get_value_element_as_str()]
        choices[override.get_key_element()] = list(values)
    if "published" not in config:
        return math.prod(len(values) for values in choices.values())
    groups = {"mesh", "workload", "layout"}
    read = (*groups, "published", "causal", "window")
    relevant = {key: values for key, values in choices.items() if key.split(".")[0] in read}
    others = math.prod(len(values) for key, values in choices.items() if key not in relevant)
    count = 0
    for combination in itertools.product(*relevant.values()):
        point = OmegaConf.create({key: config[key] for key in read})
        for key, value in zip(relevant, combination, strict=True):
            if key in groups:
                OmegaConf.update(point, key, OmegaConf.load(CONFIGS / key / f"{value}.yaml"))
            else:
                OmegaConf.update(point, key, value)
        count += wanted(OmegaConf.to_container(point, resolve=True, enum_to_str=True))  # pyright: ignore[reportArgumentType]
    return others * count
