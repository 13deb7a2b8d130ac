"""Accelerators and the links between them, as constants that say where they come from.

`hardware/<name>.yaml` holds the constants of one accelerator with the links inside a node and across nodes; a cluster
is so many nodes of so many of them. Every constant has a unit, a kind and a source:

    datasheet   what the maker says: times by these are lower bounds
    measured    taken from a measurement as it is
    fitted      by `python -m analysis.calibrate`, from the rows that its source names
    assumed     in a fit, for the reason that its source gives, where its rows do not tell
    borrowed    from other hardware: times by these are called extrapolated

A constant that depends on a size (the rate of attention on the head dim) is a table of it.

Rates of hops from node to node are those of one network adapter. `network_adapters` are those of a node, which all that
leaves it at once shares; without it every rank has one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path

from usp.cost.workload import check_sizes, plain_yaml

HARDWARE = Path(__file__).parent / "hardware"
KINDS = ("datasheet", "measured", "fitted", "assumed", "borrowed")
UNITS = {  # of every constant that there is
    "peak_flops_per_s": "FLOP/s",
    "memory_bytes": "B",
    "memory_bytes_per_s": "B/s",
    "node_ranks": "ranks",
    "link_bytes_per_s": "B/s",
    "network_bytes_per_s": "B/s",
    "network_adapters": "adapters",
    "attention_flops_per_s": "FLOP/s",
    "attention_backward_flops_per_s": "FLOP/s",
    "linear_flops_per_s": "FLOP/s",
    "merge_bytes_per_s": "B/s",
    "call_s": "s",
    "step_s": "s",
    "hop_s": "s",
    "hop_bytes_per_s": "B/s",
    "all_to_all_bytes_per_s": "B/s",
    "collective_bytes_per_s": "B/s",
    "network_hop_s": "s",
    "network_hop_bytes_per_s": "B/s",
    "network_all_to_all_s": "s",
    "network_all_to_all_bytes_per_s": "B/s",
    "overlap": "1",
    "decode_layer_s": "s",
    "turn_s": "s",
}


LIMITS = {"overlap": (0, 1), "network_adapters": (1, 1e300)}  # of all others, above 0
TABLES = ("attention_flops_per_s", "attention_backward_flops_per_s", "all_to_all_bytes_per_s")
COVERED = ("seq", "batch", "head_dim", "ranks", "nodes", "element_bytes")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclass(frozen=True)
class Constant:
    """One number about hardware, or a table of it by size."""

    value: float | Mapping[str, float]
    unit: str
    kind: str
    source: str


@dataclass(frozen=True)
class Hardware:
    """One accelerator and its links.

    `covers` is what its fitted constants were fitted on: by name of a size, the smallest and the largest.

    Raises:
        ValueError: for a constant that is unknown, has another unit or kind, no source, or is not positive.
    """

    name: str
    title: str
    constants: Mapping[str, Constant]
    covers: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, constant in self.constants.items():
            if name not in UNITS or constant.unit != UNITS[name]:
                raise ValueError(f"hardware {self.name!r}: {name} in {constant.unit}; known: {UNITS}")
            if constant.kind not in KINDS or not constant.source or not isinstance(constant.source, str):
                raise ValueError(f"hardware {self.name!r}: {name} needs a source and a kind of {KINDS}: {constant}")
            sizes = constant.value if isinstance(constant.value, Mapping) else ()
            if isinstance(constant.value, Mapping) and not (name in TABLES and all(size.isdigit() for size in sizes)):
                raise ValueError(f"hardware {self.name!r}: {name}={constant.value}; tables by size: {TABLES}")
            values = list(constant.value.values()) if isinstance(constant.value, Mapping) else [constant.value]
            least, most = LIMITS.get(name, (1e-300, 1e300))
            if not values or not all(_is_number(value) and least <= value <= most for value in values):
                wanted = "above 0" if name not in LIMITS else f"from {least} to {most}"
                raise ValueError(f"hardware {self.name!r}: {name}={constant.value} is not {wanted}")
        for name, between in self.covers.items():
            good = isinstance(between, (list, tuple)) and len(between) == 2 and all(map(_is_number, between))
            if name not in COVERED or not good:
                raise ValueError(f"hardware {self.name!r}: covers {name}={between}; known: {COVERED}, from and to")

    def __contains__(self, name: str) -> bool:
        return name in self.constants

    def __getitem__(self, name: str) -> float:
        """The value of a constant that is no table.

        Raises:
            ValueError: if there is none; names the file that could hold it.
        """
        if name not in self.constants:
            raise ValueError(f"hardware {self.name!r} has no {name}: give it in usp/cost/hardware/{self.name}.yaml")
        value = self.constants[name].value
        assert not isinstance(value, Mapping), f"{name} is a table"  # none of TABLES
        return value

    def at(self, name: str, size: int) -> tuple[float, bool]:
        """The value of a table at a size, and whether it is in the table.

        Between two sizes it is interpolated on logarithmic scales, beyond them it is that of the nearest.
        """
        value = self.constants[name].value
        if not isinstance(value, Mapping):
            return value, True
        table = sorted((int(key), one) for key, one in value.items())
        if str(size) in value:
            return value[str(size)], True
        below = [pair for pair in table if pair[0] < size]
        above = [pair for pair in table if pair[0] > size]
        if not below or not above:
            return (above or below[::-1])[0][1], False
        (a, x), (b, y) = below[-1], above[0]
        share = math.log(size / a) / math.log(b / a)
        return math.exp(math.log(x) * (1 - share) + math.log(y) * share), False


@dataclass(frozen=True)
class Cluster:
    """So many nodes of so many accelerators; consecutive ranks share a node."""

    hardware: Hardware
    nodes: int
    per_node: int

    def __post_init__(self) -> None:
        check_sizes(nodes=self.nodes, per_node=self.per_node)

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node

    @property
    def adapters(self) -> float:
        """Network adapters of a node."""
        if "network_adapters" not in self.hardware:
            return self.per_node
        return self.hardware["network_adapters"]

    @property
    def name(self) -> str:
        return f"{self.hardware.name}_{self.nodes}x{self.per_node}"


@lru_cache
def hardware(name: str) -> Hardware:
    """Hardware that comes with the library.

    Raises:
        ValueError: if there is none of that name; names those there are.
    """
    if name not in known_hardware():
        raise ValueError(f"hardware {name!r} is not one of {known_hardware()}; others: usp.cost.read_hardware(path)")
    return read_hardware(HARDWARE / f"{name}.yaml")


def read_hardware(path: Path) -> Hardware:
    """Hardware of a file of one's own.

    Raises:
        ValueError: for a file of another form, or what `Hardware` raises.
    """
    read = plain_yaml(path.read_text())
    title, covers = read.pop("title", path.stem), read.pop("covers", {})
    wanted = {item.name for item in fields(Constant)}
    for key, value in read.items():
        if not isinstance(value, dict) or value.keys() != wanted:
            raise ValueError(f"{path.name}: {key} is {value!r} and not a mapping with {', '.join(sorted(wanted))}")
    if not isinstance(covers, dict):
        raise ValueError(f"{path.name}: covers is {covers!r} and not a mapping of names of sizes to [from, to]")
    return Hardware(path.stem, title, {key: Constant(**value) for key, value in read.items()}, covers)


def known_hardware() -> list[str]:
    """Names of the hardware that comes with the library."""
    return sorted(path.stem for path in HARDWARE.glob("*.yaml"))


def cluster(name: str) -> Cluster:
    """`<hardware>_<nodes>x<accelerators a node>`, as in a100_80gb_4x8.

    Raises:
        ValueError: for another form, or hardware that is not known.
    """
    if not (match := re.fullmatch(r"(\w+)_(\d+)x(\d+)", name)):
        raise ValueError(
            f"cluster={name!r} is not <hardware>_<nodes>x<ranks a node>, as a100_80gb_4x8; hardware: {known_hardware()}"
        )
    return Cluster(hardware(match[1]), int(match[2]), int(match[3]))
