"""Pictures of records; the only importer of matplotlib."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLOURS = {"contiguous": "#9aa5b1", "zigzag": "#1f77b4", "striped": "#e08a1e", "balanced": "#2a9d5c"}


def speed(records: list[dict], path: Path) -> Path:
    """Speed of every mesh and layout, a panel for each length, workload, dtype and pass; written to `path`."""
    panels: dict[tuple, list[dict]] = {}
    for record in records:
        config = record["config"]
        workload = tuple(config["workload"].values())
        panels.setdefault((workload, config["dtype"], config["backward"], config["seq"]), []).append(record)
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(1 + 4 * columns, 0.8 + 3.2 * rows), squeeze=False)
    axes = list(grid.flat)
    for panel in axes[len(panels) :]:
        panel.remove()
    for panel, ((workload, dtype, backward, seq), members) in zip(axes, panels.items(), strict=False):
        _bars(panel, members)
        heads, kv_heads, head_dim, batch = workload
        panel.set_title(
            f"seq {seq}, {heads}/{kv_heads} heads x {head_dim}, batch {batch}\n"
            f"{dtype}, {'forward + backward' if backward else 'forward'}",
            fontsize=9,
        )
    axes[0].set_ylabel("calls / s of the slowest rank's CPU time")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(labels), frameon=False, fontsize=9)
    machine, versions = records[0]["machine"], records[0]["versions"]
    figure.suptitle(
        f"Hybrid attention on {machine['cores']} cores of {machine['cpu']}, torch {versions['torch']}, gloo", fontsize=9
    )
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def _bars(panel, members: list[dict]) -> None:
    """Groups of bars: a group for each mesh, from pure Ulysses to pure ring, a bar for each layout."""

    def mesh(record: dict) -> tuple[int, int]:
        return record["config"]["mesh"]["ring"], record["config"]["mesh"]["ulysses"]

    meshes = sorted({mesh(record) for record in members})
    layouts = [x for x in COLOURS if any(record["config"]["layout"]["name"] == x for record in members)]
    width = 0.8 / len(layouts)
    for n, layout in enumerate(layouts):
        mine = {mesh(r): r["summary"]["speed_per_s"] for r in members if r["config"]["layout"]["name"] == layout}
        x = [meshes.index(key) + (n + 0.5) * width - 0.4 for key in mine]
        bars = panel.bar(x, list(mine.values()), width * 0.92, color=COLOURS[layout], label=layout)
        panel.bar_label(bars, fmt="%.2f", fontsize=7, padding=1)
    panel.set_xticks(range(len(meshes)), [f"ulysses {u}\nring {r}" for r, u in meshes], fontsize=8)
    panel.spines[["top", "right"]].set_visible(False)
    panel.margins(y=0.12)
