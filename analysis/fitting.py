"""Constants that meet measurements best, and the file that holds them.

A fit minimises the mean of |log(predicted / measured)| and a tenth of the largest, by Nelder and Mead on logarithmic
scales. No constant promises more than the datasheet, so that what the datasheet promises stays a bound.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from analysis.measurements import Case
from usp.cost.hardware import UNITS, Constant, Hardware

CEILINGS = {  # what the datasheet has for a fitted constant
    "attention_flops_per_s": "peak_flops_per_s",
    "attention_backward_flops_per_s": "peak_flops_per_s",
    "linear_flops_per_s": "peak_flops_per_s",
    "hop_bytes_per_s": "link_bytes_per_s",
    "all_to_all_bytes_per_s": "link_bytes_per_s",
    "collective_bytes_per_s": "link_bytes_per_s",
}
DIGITS = 4


def nelder_mead(
    loss: Callable[[list[float]], float], start: Sequence[float], width: float, most: int = 400
) -> tuple[list[float], float]:
    """Where a function is smallest near a start, and its value there."""
    points = [list(start)] + [[x + width * (n == k) for n, x in enumerate(start)] for k in range(len(start))]
    found = sorted((loss(point), point) for point in points)

    def between(share: float) -> tuple[float, list[float]]:
        """From the worst point through the middle of the others."""
        middle = [sum(column) / len(start) for column in zip(*(point for _, point in found[:-1]), strict=True)]
        point = [c + share * (c - x) for c, x in zip(middle, found[-1][1], strict=True)]
        return loss(point), point

    for _ in range(most):
        if found[-1][0] - found[0][0] < 1e-6:
            break
        tried = between(1.0)
        if tried[0] < found[0][0]:
            tried = min(tried, between(2.0))
        elif tried[0] >= found[-2][0]:
            tried = between(-0.5)
            if tried[0] >= found[-1][0]:  # all go half of the way to the best
                best = found[0][1]
                shrunk = [[(a + b) / 2 for a, b in zip(best, point, strict=True)] for _, point in found[1:]]
                found = sorted([found[0], *((loss(point), point) for point in shrunk)])
                continue
        found = sorted([*found[:-1], tried])
    return found[0][1], found[0][0]


def fit(base: Hardware, cases: Sequence[Case], start: Mapping[str, float], source: str, starts: int = 2) -> Hardware:
    """Hardware with the constants of `start` such that cases are met best. `name/size` is an entry of a table."""
    names = list(start)
    drawn = random.Random(0)

    def trial(point: Sequence[float]) -> Hardware:
        return with_values(base, dict(zip(names, map(math.exp, point), strict=True)), source)

    def loss(point: Sequence[float]) -> float:
        if max(map(abs, point)) > 50:
            return math.inf
        tried = trial(point)
        errors = [abs(math.log(case.seconds(tried) / case.measured_s)) for case in cases]
        return sum(errors) / len(errors) + max(errors) / 10

    best: tuple[list[float], float] | None = None
    for n in range(starts):
        point = [math.log(value) + (drawn.gauss(0, 0.4) if n else 0) for value in start.values()]
        for width in (0.3, 0.1):
            point, value = nelder_mead(loss, point, width)
        best = (point, value) if best is None or value < best[1] else best
    assert best is not None
    return trial(best[0])


def with_values(base: Hardware, values: Mapping[str, float], source: str, kind: str = "fitted") -> Hardware:
    """Hardware with other constants, none above what the datasheet promises."""
    constants = dict(base.constants)
    tables: dict[str, dict[str, float]] = {}
    for key, value in values.items():
        name, _, size = key.partition("/")
        ceiling = 1.0 if name == "overlap" else base[CEILINGS[name]] if CEILINGS.get(name) in base else math.inf
        value = min(float(f"{value:.{DIGITS - 1}e}"), ceiling)
        if size:
            tables.setdefault(name, {})[size] = value
        else:
            constants[name] = Constant(value, UNITS[name], kind, source)
    for name, table in tables.items():
        known = base.constants[name].value if name in base else {}
        constants[name] = Constant(
            {**(known if isinstance(known, Mapping) else {}), **table}, UNITS[name], kind, source
        )
    return replace(base, constants=constants)


def values(of: Hardware, names: Iterable[str]) -> dict[str, float]:
    """Constants by `name` or `name/size`."""
    found = {}
    for key in names:
        name, _, size = key.partition("/")
        value = of.constants[name].value
        found[key] = value[size] if isinstance(value, Mapping) else value
    return found


def yaml_text(of: Hardware, head: str = "") -> str:
    """As `read_hardware` reads it; `head` holds comments."""
    lines = [head] if head else []
    lines.append(f"title: {json.dumps(of.title)}")
    if of.covers:
        lines.append(f"covers: {json.dumps({name: list(sizes) for name, sizes in of.covers.items()})}")
    order = [name for name in UNITS if name in of.constants]
    for name in sorted(order, key=lambda name: of.constants[name].kind != "datasheet"):
        one = of.constants[name]
        if isinstance(one.value, Mapping):
            inner = sorted(one.value.items(), key=lambda pair: int(pair[0]))
            value = "{" + ", ".join(f'"{size}": {number(x)}' for size, x in inner) + "}"
        else:
            value = str(one.value) if isinstance(one.value, int) else number(one.value)
        rest = ", ".join(f'"{key}": {json.dumps(getattr(one, key))}' for key in ("unit", "kind", "source"))
        lines.append(f'{name}: {{"value": {value}, {rest}}}')
    return "\n".join(lines) + "\n"


def number(value: float) -> str:
    """In a form that is a number in JSON and in YAML."""
    if 0.01 <= value < 1000:
        return repr(float(value))
    digits, _, power = f"{value:.{DIGITS - 1}e}".partition("e")
    return f"{digits.rstrip('0').ljust(3, '0')}e{power}"
