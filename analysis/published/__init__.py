"""The published attention tables (README.md here: sources and doubts), and the row that a point is set beside.

Also the numbers that the guide claims, which are nobody's measurements.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_FOLDER = Path(__file__).parent

TITLES = {
    "a100_nvlink": "8 x A100 NVLink, USP authors' picture",
    "a100_pcie": "4 x A100 PCIe, USP authors' picture",
    "l20_pcie": "8 x L20 PCIe, USP authors' picture",
    "a100_nvlink_gqa": "8 x A100 NVLink, USP paper (GQA)",
    "a100_nvlink_backward": "8 x A100 NVLink, USP authors' README (forward + backward)",
}


@dataclass(frozen=True)
class Row:
    """One published rate."""

    table: str
    gpus: int
    batch: int
    length: int  # tokens of the whole sequence
    heads: int
    kv_heads: int
    head_dim: int
    backward: bool  # forward + backward, else forward alone
    ulysses: int
    ring: int
    layout: str
    qkv: str  # "separate" or "packed"
    calls_per_s: float | None  # None where it did not run
    status: str  # "ok" or "oom"

    @property
    def causal(self) -> bool:
        """Whether it was measured with the causal mask, as far as the numbers tell (README, Doubts)."""
        return not (self.table == "a100_nvlink_backward" and self.length == 65536)

    @property
    def doubt(self) -> str:
        """What speaks against the number, or nothing."""
        if not self.causal:
            return "layouts differ by less than 4 %, so most probably without the causal mask"
        if self.table == "a100_nvlink_gqa" and self.length == 131072:
            return "printed as forward only, but the rate fits forward + backward"
        if self.table == "a100_nvlink_gqa" and self.calls_per_s == 132.979:
            return "the same value stands in two rows"
        return ""


@cache
def rows(table: str) -> tuple[Row, ...]:
    """All rows of a table.

    Raises:
        ValueError: if there is no table of that name.
    """
    if table not in TITLES:
        raise ValueError(f"published.table={table!r} is not one of {list(TITLES)}")
    with (_FOLDER / "attention.csv").open(newline="") as file:
        return tuple(_row(line) for line in csv.DictReader(file) if line["table"] == table)


def _row(line: dict[str, str]) -> Row:
    rate = line.pop("iters_per_s")
    numbers = ("gpus", "batch", "length", "heads", "kv_heads", "head_dim", "ulysses", "ring")
    return Row(
        **{name: int(line.pop(name)) for name in numbers},
        backward=line.pop("backward") == "true",
        calls_per_s=float(rate) if rate else None,
        **line,  # pyright: ignore[reportArgumentType]
    )


def find(config: dict) -> Row | None:
    """The published row of this point's workload, length, mesh and layout; None if there is none or the mask differs.

    A table of forward rates also has the row of a point with backward: the point's forward part is set beside it.
    """
    published = config["published"]
    if published["table"] not in TITLES or not config["causal"] or config["window"] is not None:
        return None
    workload, mesh = config["workload"], config["mesh"]
    wanted = {
        **workload,
        "ring": mesh["ring"],
        "ulysses": mesh["ulysses"],
        "length": published["length"],
        "layout": config["layout"]["name"],
        "qkv": "separate",
    }
    for row in rows(published["table"]):
        if all(getattr(row, name) == value for name, value in wanted.items()):
            return row
    return None


@dataclass(frozen=True)
class Claim:
    """One number of the guide."""

    line: int  # of its text
    what: str  # with the line, unique
    claimed: str  # as printed there: its digits count
    unit: str


@cache
def claims() -> tuple[Claim, ...]:
    """All numbers of the guide, in its order."""
    with (_FOLDER / "guide.csv").open(newline="") as file:
        return tuple(Claim(int(line.pop("line")), **line) for line in csv.DictReader(file))
