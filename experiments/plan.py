"""Which mesh to take, before anything is run: every plan of a model on a cluster, by predicted time.

    python -m experiments.plan model=llama3_70b cluster=a100_80gb_4x8 seq=1000000 phase=prefill
    python -m experiments.plan -m cluster=a100_80gb_1x8,a100_80gb_4x8 seq=131072 batch=8 phase=train

Without torch and without ranks. A model is one that comes with the library (usp/cost/models) or a config.json of
transformers; a cluster is <hardware>_<nodes>x<ranks a node>, where hardware is one of usp/cost/hardware or a file.
"""

from __future__ import annotations

import csv
import json
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from usp.cost import Candidate, Cluster, Model, Ranking, cluster, model, plan, read_hardware
from usp.cost.workload import check_sizes

CONFIGS = Path(__file__).parent.parent / "configs" / "plan"  # its phases are not those of experiments.model
Phase = Enum("Phase", ["prefill", "decode", "train"])


@dataclass
class PlanConfig:
    model: str = "llama3_70b"  # of usp/cost/models, or a config.json
    cluster: str = "a100_80gb_4x8"  # <hardware>_<nodes>x<ranks a node>
    seq: int = 1_000_000  # tokens of a sequence; for decode, in the cache
    batch: int = 1  # sequences of all replicas
    phase: Phase = Phase.prefill
    window: int | None = None  # how far back a query looks
    element_bytes: int = 2  # of weights, activations and the cache
    reserved_gb: float = 2.0  # of a device, for what is not the model's (1e9 bytes)
    top: int = 12  # feasible plans to show
    strict: bool = False  # refuse what the cluster's constants were not fitted on
    csv: str | None = None  # write all plans there too


def main() -> None:
    ConfigStore.instance().store(name="plan_schema", node=PlanConfig)
    hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="plan")(task)()


def task(config: PlanConfig) -> None:
    path = config.csv and numbered(Path(config.csv))
    try:
        check_sizes(top=config.top)
        if not 0 <= config.reserved_gb < 1e9:
            raise ValueError(f"reserved_gb={config.reserved_gb} is not a size in GB")
        found = plan(
            named_model(config.model),
            named_cluster(config.cluster),
            config.seq,
            config.batch,
            config.phase.name,
            window=config.window,
            element_bytes=config.element_bytes,
            reserved_bytes=round(config.reserved_gb * 1e9),
            strict=config.strict,
        )
    except (ValueError, OSError) as error:
        sys.exit(str(error))
    if path:
        try:
            write(found, path)
        except OSError as error:
            sys.exit(f"csv={path}: {error.strerror}")
    print("\n".join(shown(found, config.top)))
    if path:
        print(f"all plans: {path}")


def numbered(path: Path) -> Path:
    """A file for each point of a sweep."""
    settings = HydraConfig.get()
    if settings.mode != RunMode.MULTIRUN:
        return path
    return path.with_stem(f"{path.stem}-{settings.job.num}")


def named_model(name: str) -> Model:
    """Of the library, or of a config.json."""
    if name.endswith(".json"):
        path = Path(name)
        try:
            read = json.loads(path.read_text())
        except ValueError as error:
            raise ValueError(f"model={name} is not JSON: {error}") from None
        if not isinstance(read, dict):
            raise ValueError(f"model={name} holds a {type(read).__name__}, not a configuration")
        return Model.from_config(read, path.parent.name or path.stem)
    return model(name)


def named_cluster(name: str) -> Cluster:
    """Of the library, or of a hardware file."""
    file, dot, size = name.rpartition(".yaml_")
    if not dot:
        return cluster(name)
    nodes, x, ranks = size.partition("x")
    if not (x and nodes.isdigit() and ranks.isdigit()):
        raise ValueError(f"cluster={name!r} is not <file>.yaml_<nodes>x<ranks a node>")
    return Cluster(read_hardware(Path(f"{file}.yaml")), int(nodes), int(ranks))


def shown(found: Ranking, top: int) -> Iterator[str]:
    """Lines for a terminal of 120 columns."""
    model, place = found.model, found.cluster
    tokens = "in the cache" if found.phase == "decode" else "tokens"
    yield (
        f"{model.name}, {found.phase} of {found.batch} x {found.seq:,} {tokens} on {place.nodes} x {place.per_node} "
        f"{place.hardware.title}"
    )
    feasible = found.feasible
    if not feasible:
        yield "no plan is possible"
    else:
        yield from _table(found, feasible[:top])
        if len(feasible) > top:
            yield f"and {len(feasible) - top} slower ones (top={len(feasible)} shows them)"
        for note in _notes(feasible[:top]):
            yield from textwrap.wrap(f"- {note}", 120, subsequent_indent="  ")
    reasons = Counter(_kind(x.reason) for x in found.candidates if x.reason)
    if reasons:
        yield f"{sum(reasons.values())} plans are not possible:"
        for reason, count in reasons.most_common():
            examples = [x for x in found.candidates if x.reason and _kind(x.reason) == reason]
            examples.sort(key=lambda x: x.memory.total_bytes if x.memory else 0)
            line = f"{count:5}  {examples[0].reason}: {_mesh(examples[0])}{', ...' if count > 1 else ''}"
            yield from textwrap.wrap(line, 120, subsequent_indent=" " * 7, drop_whitespace=False)


def _notes(shown: Sequence[Candidate]) -> list[str]:
    """Of all predictions, each once; what is borrowed from the same hardware together."""
    found: dict[str, set[str]] = {}
    for note in (x for one in shown if one.prediction for x in one.prediction.notes):
        what, _, names = note.partition(": ") if note.startswith("borrowed") else (note, "", "")
        found.setdefault(what, set()).update(names.split(", ") if names else ())
    return [f"{what}: {', '.join(sorted(names))}" if names else what for what, names in found.items()]


def _kind(reason: str) -> str:
    """A reason without its numbers."""
    return "".join(x for x in reason.split("(")[0] if not x.isdigit() and x not in ",.")


def _table(found: Ranking, feasible: tuple[Candidate, ...]) -> Iterator[str]:
    worth = sorted({x.prediction.basis for x in feasible if x.prediction})
    yield f"times are: {', '.join(worth)}"
    yield (
        f"{'data':>4} {'ring':>4} {'ulys':>4} {'tens':>4}  {'layout':10} {'weights':12} {'time':>9} {'exposed':>9} "
        f"{'GB':>6} {'batch':>5} {'sent':>9}  {'bound by':8} besides"
    )
    for one in feasible:
        at, price, needs = one.plan, one.prediction, one.memory
        assert price
        assert needs
        besides = []
        if at.replicate_kv:
            besides.append("replicate_kv")
        if at.tile_mlp:
            besides.append(f"tile_mlp {at.tile_mlp:,}")
        if at.checkpoint:
            besides.append("checkpoint")
        if found.phase == "decode" and at.ring > 1:
            besides.append(at.algorithm)
        layout = str(at.layout) if at.ring > 1 and found.phase != "decode" else "-"
        yield (
            f"{at.data:4} {at.ring:4} {at.ulysses:4} {at.tensor:4}  {layout:10} {one.weights:12} "
            f"{seconds(price.seconds):>9} {seconds(price.exposed_s):>9} {needs.gb:6.1f} {one.largest_batch:5} "
            f"{size(one.layer_bytes):>9}  {price.regime:8} {', '.join(besides)}".rstrip()
        )
    yield ("time: of the whole batch; exposed: communication that nothing hides; GB (1e9 bytes): of the fullest rank;")
    yield "batch: the largest that fits; sent: by a rank in the attention of one layer"


def seconds(value: float) -> str:
    """In the unit that a person would use."""
    if value >= 120:
        return f"{value / 60:.2f} min"
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.2f} ms" if value > 0 else "0"


def size(value: int) -> str:
    """Bytes, in the unit that a person would use."""
    for unit, bytes_ in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= bytes_:
            return f"{value / bytes_:.2f} {unit}"
    return f"{value} B" if value else "0"


def _mesh(one: Candidate) -> str:
    at = one.plan
    return f"data {at.data} x ring {at.ring} x ulysses {at.ulysses} x tensor {at.tensor}, {one.weights}"


def write(found: Ranking, path: Path) -> None:
    """All plans as CSV: bytes and seconds as they are, reasons of those that cannot be."""
    rows = []
    for one in found.candidates:
        at, price, needs = one.plan, one.prediction, one.memory
        row = {
            "data": at.data,
            "ring": at.ring,
            "ulysses": at.ulysses,
            "tensor": at.tensor,
            "layout": str(at.layout),
            "replicate_kv": at.replicate_kv,
            "weights": one.weights,
            "tile_mlp": at.tile_mlp,
            "checkpoint": at.checkpoint,
            "algorithm": at.algorithm if found.phase == "decode" else None,
            "seconds": price and price.seconds,
            "exposed_s": price and price.exposed_s,
            "regime": price and price.regime,
            "basis": price and price.basis,
            "notes": price and "; ".join(price.notes),
            "memory_bytes": needs and needs.total_bytes,
            "largest_batch": one.largest_batch,
            "layer_sent_bytes": one.layer_bytes,
            "reason": one.reason,
        }
        rows.append(row | {f"{part}_s": value for part, value in (price.parts if price else {}).items()})
    columns = {column: None for row in rows for column in row}
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(columns), restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
