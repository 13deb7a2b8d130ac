"""Pictures of records; the only importer of matplotlib."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from analysis import compare, placement, published
from usp import Partition

LAYOUTS = {"contiguous": (":", "s"), "zigzag": ("-", "o"), "striped": ("--", "^"), "balanced": ("-.", "D")}
MESHES = plt.get_cmap("viridis")
UNITS = {"cpu": "calls / s of the slowest rank's computing", "wall": "calls / s, wall time"}


def speed(records: list[dict], path: Path) -> Path:
    """Speed against length: a panel a workload, a line a mesh and layout; below it the published rates.

    Workloads with a single length are left out if there are others: the heat map has them.
    """
    families: dict[tuple[str, str], list[compare.Group]] = {}
    for group in compare.groups(records):
        families.setdefault(group.family, []).append(group)
    several = {name: groups for name, groups in families.items() if len(groups) > 1}
    families = several or families
    beside = any(group.table for groups in families.values() for group in groups)
    columns = len(families)
    figure, grid = plt.subplots(
        1 + beside, columns, figsize=(max(7.0, 0.8 + 3.6 * columns), 1.4 + 3.1 * (1 + beside)), squeeze=False
    )
    meshes = sorted({_mesh(record) for record in records}, reverse=True)
    layouts = [layout for layout in LAYOUTS if any(_layout(record) == layout for record in records)]
    colour = {mesh: MESHES(0.9 * n / max(1, len(meshes) - 1)) for n, mesh in enumerate(meshes)}
    for column, groups in enumerate(families.values()):
        config = groups[0].config
        lines = [line for group in groups for line in group.lines]
        here = [(line.record, line.record["config"]["seq"], line.speed) for line in lines]
        _lines(grid[0][column], here, colour)
        grid[0][column].set_title(_wrapped(groups[0]), fontsize=8)
        if beside:
            there = [
                (line.record, line.published.length, line.published.calls_per_s) for line in lines if line.published
            ]
            _lines(grid[1][column], there, colour)
            if config["published"]["table"]:
                grid[1][column].set_title(published.TITLES[config["published"]["table"]], fontsize=8)
    grid[0][0].set_ylabel(f"here: {UNITS[_clock(records)]}", fontsize=8)
    if beside:
        grid[1][0].set_ylabel("published: calls / s", fontsize=8)
    handles = [plt.Line2D([], [], color=colour[mesh], label=_label(mesh)) for mesh in meshes]
    handles += [
        plt.Line2D([], [], color="black", linestyle=LAYOUTS[x][0], marker=LAYOUTS[x][1], markersize=4, label=x)
        for x in layouts
    ]
    figure.legend(handles=handles, loc="lower center", ncols=4, frameon=False, fontsize=8)
    return _save(figure, records, "Hybrid attention, speed against length", path)


def _lines(panel: Axes, points: list[tuple[dict, int, float | None]], colour: dict) -> None:
    series: dict[tuple, dict[int, float]] = {}
    for record, length, rate in points:
        if rate is not None:
            series.setdefault((_mesh(record), _layout(record)), {})[length] = rate
    for (mesh, layout), rates in series.items():
        style, marker = LAYOUTS[layout]
        lengths = sorted(rates)
        panel.plot(
            lengths,
            [rates[length] for length in lengths],
            color=colour[mesh],
            linestyle=style,
            marker=marker,
            markersize=4,
            linewidth=1.2,
            alpha=0.85,
        )
    lengths = sorted({length for rates in series.values() for length in rates})
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(lengths, [_tokens(length) for length in lengths], fontsize=8)
    panel.xaxis.set_minor_locator(plt.NullLocator())
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    panel.yaxis.set_minor_formatter(lambda value, _: f"{value:.2g}" if len(lengths) < 2 else "")
    panel.tick_params(axis="y", which="both", labelsize=7)
    panel.set_xlabel("tokens", fontsize=8)
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(True, axis="y", which="major", linewidth=0.4, alpha=0.5)


def heatmap(records: list[dict], path: Path, columns: int = 5) -> Path:
    """Ulysses x ring x layout: speed relative to the best cell, which is outlined; the published table below."""
    groups = compare.groups(records)
    columns = min(columns, len(groups))
    bands = -(-len(groups) // columns)
    beside = any(group.table for group in groups)
    meshes = max(len({_mesh(line.record) for line in group.lines}) for group in groups)
    layouts = max(len({_layout(line.record) for line in group.lines}) for group in groups)
    panel_height, panel_width = 0.9 + 0.32 * meshes, 0.9 + 0.72 * layouts
    rows = bands * (1 + beside)
    figure, grid = plt.subplots(
        rows, columns, figsize=(0.4 + panel_width * columns, 0.7 + panel_height * rows), squeeze=False
    )
    for n, group in enumerate(groups):
        band, column = divmod(n, columns)
        upper = grid[band * (1 + beside)][column]
        _cells(upper, [(line.record, line.relative, _missing(line.record["status"])) for line in group.lines])
        upper.set_title(f"{_wrapped(group)}\n{_tokens(group.config['seq'])} tokens, here", fontsize=7)
        if beside:
            lower = grid[band * (1 + beside) + 1][column]
            rows_there = [(line.record, line.published_relative, line.published) for line in group.lines]
            _cells(lower, [(record, x, _missing(row.status if row else "-")) for record, x, row in rows_there])
            found = group.rank_correlation
            title = f"{_tokens(group.config['published']['length'])} tokens, published"
            lower.set_title(title + ("" if found is None else f"\nrank correlation {found:.2f}"), fontsize=7)
    for n in range(len(groups), bands * columns):
        for part in range(1 + beside):
            grid[n // columns * (1 + beside) + part][n % columns].remove()
    return _save(figure, records, "Hybrid attention, speed relative to the best mesh and layout (outlined)", path, 0)


SERIES = (  # colours that everybody tells apart (Okabe and Ito), with lines of their own
    ("#000000", "-", "o"),
    ("#E69F00", "--", "s"),
    ("#0072B2", ":", "^"),
    ("#009E73", "-.", "D"),
    ("#CC79A7", (0, (5, 1, 1, 1, 1, 1)), "v"),
    ("#D55E00", (0, (1, 1)), "x"),
)


KINDS = {"Ulysses": "#0072b2", "ring": "#d55e00", "hybrid": "#009e73", "swapped": "#cc79a7"}
MEANS = {"hybrid": "hybrid: Ulysses inside hosts, ring across", "swapped": "hybrid with the axes swapped"}


def two_level(records: list[dict], path: Path) -> Path:
    """Time of a call against the rate of links between hosts: a column a workload, a row a part of a call.

    The fastest mesh and layout of each kind, with the quartiles of its calls; dashed, what the cost model predicts.
    """
    found = placement.studies(records)
    titles = list(dict.fromkeys(study.title for study in found))
    parts = list(dict.fromkeys(study.part for study in found))
    size = 1.0 + 3.9 * len(titles), 1.5 + 2.9 * len(parts)
    figure, grid = plt.subplots(len(parts), len(titles), figsize=size, squeeze=False)
    for panel in grid.flat:
        panel.set_visible(False)
    for study in found:
        panel = grid[parts.index(study.part)][titles.index(study.title)]
        panel.set_visible(True)
        _placements(panel, study)
        if study.part == parts[0]:
            panel.set_title("\n".join(textwrap.wrap(study.title, 44)), fontsize=8)
        if study.title == titles[0]:
            panel.set_ylabel(f"{study.part}\nms of wall time on cores of usual speed", fontsize=8)
        if study.part == parts[-1]:
            panel.set_xlabel("Gbit/s between hosts, each way", fontsize=8)
    marks = {"marker": "o", "markersize": 4}
    handles = [
        plt.Line2D([], [], color=colour, label=MEANS.get(kind, f"pure {kind}"), **marks)
        for kind, colour in KINDS.items()
    ]
    dashed = {"linestyle": "--", "linewidth": 0.9}
    handles.append(plt.Line2D([], [], color="black", label="predicted from the other rates", **dashed))
    figure.legend(handles=handles, loc="lower center", ncols=3, frameon=False, fontsize=8)
    return _save(figure, records, "Where the axes lie, on hosts with slow links (emulated)", path, legend=0.4 / size[1])


def _placements(panel: Axes, study: placement.Study) -> None:
    for kind, colour in KINDS.items():
        known = [(rate, choice) for rate in study.rates if (choice := rate.fastest(kind))]
        rates = [rate.gbit_per_s for rate, _ in known]
        values = [1e3 * choice.seconds for _, choice in known]
        ends = [choice.quartiles for _, choice in known]
        bars = [[max(0.0, y - 1e3 * low) for y, (low, _) in zip(values, ends, strict=True)]]
        bars.append([max(0.0, 1e3 * high - y) for y, (_, high) in zip(values, ends, strict=True)])
        panel.errorbar(rates, values, yerr=bars, color=colour, marker="o", markersize=4, linewidth=1.4, capsize=2)
        predicted = [1e3 * rate.predicted_s[choice.name] for rate, choice in known if rate.predicted_s]
        if len(predicted) == len(rates):
            panel.plot(rates, predicted, color=colour, linestyle="--", linewidth=0.9)
    rates = [rate.gbit_per_s for rate in study.rates]
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xticks(rates, [f"{rate:g}" for rate in rates], fontsize=8)
    panel.xaxis.set_minor_locator(plt.NullLocator())
    for formatter in (panel.yaxis.set_major_formatter, panel.yaxis.set_minor_formatter):
        formatter(lambda value, _: f"{value:g}")
    panel.tick_params(axis="y", which="both", labelsize=7)
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(True, axis="y", which="major", linewidth=0.4, alpha=0.5)


def training(records: list[dict], path: Path) -> Path:
    """Loss by step, a panel for all that train the same; below it how far each is from one process."""
    families: dict[str, list[tuple[dict, dict | None]]] = {}
    for record, alone in compare.beside_one_process(records):
        families.setdefault(compare.model_family(record), []).append((record, alone))
    size = max(7.0, 5.5 * len(families)), 6.2
    figure, grid = plt.subplots(2, len(families), figsize=size, squeeze=False, height_ratios=(3, 2), sharex="col")
    for (upper, lower), (title, members) in zip(grid.T, families.items(), strict=True):
        for n, (record, alone) in enumerate(sorted(members, key=lambda pair: len(pair[0]["ranks"]))):
            colour, style, marker = SERIES[n % len(SERIES)]
            losses = record["summary"]["losses"]
            look = {"color": colour, "linestyle": style, "label": compare.model_job(record)}
            wide = 4.0 if n == 0 else 1.8  # the first is seen behind the others
            upper.plot(range(len(losses)), losses, linewidth=wide, alpha=0.35 if n == 0 else 1.0, **look)
            if alone is not None and alone is not record:
                differences = compare.loss_differences(record, alone)
                shown = [(step, x) for step, x in enumerate(differences) if x]  # 0 has no place on a log axis
                markers = {"marker": marker, "markersize": 3, "linewidth": 1.0}
                lower.plot(*zip(*shown, strict=True) if shown else ((), ()), **look | markers)
        upper.set_title("\n".join(textwrap.wrap(title, 110)), fontsize=8)
        upper.legend(frameon=False, fontsize=8)
        lower.set_yscale("log")
        lower.set_xlabel("step", fontsize=8)
        for panel in (upper, lower):
            panel.tick_params(labelsize=7)
            panel.spines[["top", "right"]].set_visible(False)
            panel.grid(True, axis="y", which="major", linewidth=0.4, alpha=0.5)
    grid[0][0].set_ylabel("loss before the step, nats a token", fontsize=8)
    grid[1][0].set_ylabel("difference to one process,\nnats a token (0 not shown)", fontsize=8)
    dtypes = ", ".join(sorted({record["config"]["dtype"] for record in records}))
    return _save(figure, records, f"Training on a mesh and in one process, {dtypes}", path, 0, timed=False)


def owners(owned: dict[str, dict[str, Partition]], work: dict[str, list[int]], path: Path, columns: int = 2) -> Path:
    """Who owns what: for each mask the keys that each query sees, and below a bar a layout, coloured by ring rank."""
    rows = -(-len(owned) // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(5.2 * columns, 1.9 * rows), squeeze=False)
    for panel in grid.flat[len(owned) :]:
        panel.remove()
    for panel, (name, layouts) in zip(grid.flat, owned.items(), strict=False):
        seq, ring = next((x.seq, x.ring) for x in layouts.values())
        colours = plt.get_cmap("turbo", ring)
        step = max(1, seq // 1000)
        panel.fill_between(range(0, seq, step), 0, [x / max(work[name]) for x in work[name][::step]], color="0.6", lw=0)
        for n, (layout, tokens) in enumerate(layouts.items()):
            row = [0] * tokens.padded
            for rank in range(ring):
                for start, stride, count in tokens.runs(rank):
                    row[start : start + stride * count : stride] = [rank] * count
            bottom = -0.4 - 0.5 * n
            place = (0, tokens.padded, bottom, bottom + 0.4)
            panel.imshow([row], cmap=colours, aspect="auto", extent=place, vmin=0, vmax=ring - 1)
            panel.text(-0.01 * seq, bottom + 0.2, layout, ha="right", va="center", fontsize=6)
        panel.set_xlim(0, seq)
        panel.set_ylim(-0.45 - 0.5 * (len(layouts) - 1), 1.05)
        panel.set_yticks([])
        panel.set_xticks([0, seq], ["0", f"{seq:,}"], fontsize=6)
        panel.set_title(name, fontsize=7)
        panel.spines[:].set_visible(False)
    figure.suptitle(f"Who owns what: {ring} ring ranks by colour; grey: how many keys a query sees", fontsize=8)
    figure.tight_layout()
    return _written(figure, path)


def _missing(status: str) -> str:
    return "" if status == "ok" else status


def _cells(panel: Axes, points: list[tuple[dict, float | None, str]]) -> None:
    meshes = sorted({_mesh(record) for record, _, _ in points}, reverse=True)
    layouts = [layout for layout in LAYOUTS if any(_layout(record) == layout for record, _, _ in points)]
    values = [[float("nan")] * len(layouts) for _ in meshes]
    for record, relative, missing in points:
        y, x = meshes.index(_mesh(record)), layouts.index(_layout(record))
        if relative is not None:
            values[y][x] = relative
            panel.text(
                x,
                y,
                f"{relative:.2f}",
                ha="center",
                va="center",
                fontsize=7,
                color="white" if relative < 0.6 else "black",
            )
        else:
            panel.text(x, y, missing, ha="center", va="center", fontsize=6, color="#555555")
        if relative == 1.0:
            panel.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, edgecolor="#d62728", linewidth=1.8))
    panel.imshow(values, cmap="viridis", vmin=0, vmax=1, aspect="auto")
    panel.set_xticks(range(len(layouts)), layouts, fontsize=6)
    names = [f"u{u} r{r}" + ("\nring inside" if inner == "ring" else "") for u, r, inner in meshes]
    panel.set_yticks(range(len(meshes)), names, fontsize=6)
    panel.tick_params(length=0)
    panel.spines[:].set_visible(False)


def _save(
    figure: Figure, records: list[dict], title: str, path: Path, legend: float = 0.09, timed: bool = True
) -> Path:
    machine, versions = records[0]["machine"], records[0]["versions"]
    good = [record for record in records if record["status"] == "ok"]
    device = good[0]["summary"]["device"] if good else "cpu"
    where = f"{machine['cores']} cores of {machine['cpu']}" if device == "cpu" else device
    time = f", {_clock(records)} time" if timed else ""
    figure.suptitle(f"{title}\n{where}, torch {versions['torch']}{time}", fontsize=8)
    figure.tight_layout(rect=(0, legend, 1, 1))
    return _written(figure, path)


def _written(figure: Figure, path: Path) -> Path:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.stem}.{os.getpid()}.part")
    figure.savefig(part, dpi=130, format="png")
    plt.close(figure)
    return part.replace(path)


def _clock(records: list[dict]) -> str:
    clocks = {record["summary"]["clock"] for record in records if record["status"] == "ok"}
    return clocks.pop() if len(clocks) == 1 else "cpu"


def _mesh(record: dict) -> tuple[int, int, str]:
    mesh = record["config"]["mesh"]
    return mesh["ulysses"], mesh["ring"], mesh["inner"]


def _layout(record: dict) -> str:
    return record["config"]["layout"]["name"]


def _label(mesh: tuple[int, int, str]) -> str:
    return f"ulysses {mesh[0]} x ring {mesh[1]}{', ring inside' if mesh[2] == 'ring' else ''}"


def _tokens(count: int | None) -> str:
    if count is None:
        return "?"
    return f"{count // 1024}K" if count >= 1024 and count % 1024 == 0 else f"{count}"


def _wrapped(group: compare.Group) -> str:
    """What is compared, without what the picture says elsewhere, in lines that fit a panel."""
    parts = [part for part in group.family[0].split(", ") if not part.startswith(("beside", "cpu time"))]
    if compare.forward_alone(group.config):
        parts[parts.index("forward + backward")] = "forward part"
    return "\n".join(textwrap.wrap(", ".join(parts), 40))
