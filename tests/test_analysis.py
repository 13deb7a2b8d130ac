"""Published tables, comparison with them, tables, pictures and the records' own program."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from analysis import compare, figures, published, tables
from analysis import records as kept

ROOT = Path(__file__).parent.parent


def record(
    ulysses: int,
    ring: int,
    layout: str = "zigzag",
    speed: float = 1.0,
    *,
    status: str = "ok",
    machine: str = "here",
    started: str = "2026-01-01T00:00:00+00:00",
    heads: int = 32,
    length: int | None = 131072,
    table: str | None = "a100_nvlink",
    backward: bool = False,
) -> dict:
    point = f"u{ulysses}r{ring}-{layout}-{length}-{heads}"
    made = {
        "schema": kept.SCHEMA,
        "experiment": "attention",
        "point": point,
        "hash": "0",
        "config": {
            "mesh": {"ulysses": ulysses, "ring": ring, "inner": "ulysses"},
            "cluster": None,
            "workload": {"heads": heads, "kv_heads": heads, "head_dim": 32, "batch": 2},
            "layout": {"name": layout},
            "published": {"table": table, "length": length, "factor": 16, "only": False},
            "seq": (length or 4096) // 16,
            "causal": True,
            "window": None,
            "dtype": "float32",
            "backward": backward,
            "exchange": "ring",
            "backend": "auto",
            "device": "auto",
            "seed": 0,
            "name": "test",
        },
        "hosts": [{"host": machine, "cores": 2, "interface": None, "gbit_per_s": None, "ranks": [0, 1]}],
        "started": started,
        "commit": "0123456789",
        "dirty": False,
        "versions": {"torch": "2"},
        "machine": {"id": machine, "cpu": "a processor", "cores": 2, "system": "an operating system"},
        "status": status,
        "seconds": 1.0,
    }
    if status != "ok":
        return made | {"reason": "a test"}
    return made | {
        "ranks": [],
        "summary": {
            "clock": "cpu",
            "device": "cpu",
            "kernels": ["sdpa"],
            "speed_per_s": speed,
            "forward_speed_per_s": 3 * speed,
            "compute_s": 1 / speed,
            "cpu_s": 2 / speed,
            "balance": 0.9,
            "wall_s": 1.0,
            "sent_bytes": 10,
            "messages": 1,
            "peak_growth_bytes": 1 << 20,
            "errors": {"out": 1e-7},
        },
    }


def write(folder: Path, *records: dict) -> Path:
    for made in records:
        path = folder / made["point"] / "record.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(made))
    return folder


# ---------------------------------------------------------------------------------------------------
# Published tables.


def test_the_published_tables_are_whole():
    count = {table: len(published.rows(table)) for table in published.TITLES}
    assert count == {
        "a100_nvlink": 168,
        "a100_pcie": 54,
        "l20_pcie": 60,
        "a100_nvlink_gqa": 16,
        "a100_nvlink_backward": 16,
    }
    every = [row for table in published.TITLES for row in published.rows(table)]
    assert len(set(every)) == len(every)
    for row in every:
        assert row.ulysses * row.ring == row.gpus
        assert (row.calls_per_s is None) == (row.status == "oom")
        assert row.layout in ("contiguous", "zigzag", "striped")
        assert row.heads % row.ulysses == row.kv_heads % row.ulysses == 0
    assert len(list((ROOT / "analysis/published").glob("*.csv"))) == 7
    readme = (ROOT / "analysis/published/README.md").read_text()
    assert all(f"`{table}`" in readme for table in published.TITLES)


def test_the_guides_rates_are_not_used():
    """7.36 and 5.14, 1.01 and 0.56 calls a second are in no version of the paper."""
    with (ROOT / "analysis/published/attention.csv").open() as file:
        rates = {float(row["iters_per_s"]) for row in csv.DictReader(file) if row["iters_per_s"]}
    assert not rates & {7.36, 5.14, 1.01, 0.56}
    assert {135.569, 81.985, 2.782, 1.628} <= rates  # what the paper has


def test_a_point_finds_its_published_row():
    row = published.find(record(2, 4, "contiguous", heads=2)["config"])
    assert row is not None
    assert row.calls_per_s == 111.209  # not the packed call's 117.55
    assert published.find(record(8, 1, heads=2)["config"]) is None  # 2 heads do not go on 8 ranks
    assert published.find(record(8, 1, table=None)["config"]) is None
    assert published.find(record(8, 1, table="b100")["config"]) is None
    with pytest.raises(ValueError, match="'b100' is not one of"):
        published.rows("b100")
    for other in ({"causal": False}, {"window": 100}):  # the published calls are causal
        assert published.find(record(8, 1)["config"] | other) is None


def test_doubtful_rows_are_marked():
    doubts = {row.length: row.doubt for row in published.rows("a100_nvlink_gqa") if row.layout == "contiguous"}
    assert "forward + backward" in doubts[131072]
    assert not doubts[32768]
    twice = [row for row in published.rows("a100_nvlink_gqa") if row.calls_per_s == 132.979]
    assert len(twice) == 2
    assert all("two rows" in row.doubt for row in twice)


# ---------------------------------------------------------------------------------------------------
# Comparison.


def test_rows_are_relative_to_the_best_of_their_group():
    """Of one workload, length and machine; a point without a result and one that is not published take no part."""
    here = [
        record(8, 1, "zigzag", 4.0),
        record(4, 2, "zigzag", 2.0),
        record(2, 4, "zigzag", status="oom"),
        record(1, 8, "zigzag", 1.0),
        record(1, 8, "contiguous", 0.5),
    ]
    longer = record(8, 1, "zigzag", 9.0, length=32768)
    elsewhere = record(8, 1, "zigzag", 8.0, machine="there")
    first, second, third = compare.groups([*here, longer, elsewhere])
    assert [line.relative for line in first.lines] == [1.0, 0.5, None, 0.25, 0.125]
    assert [line.published.calls_per_s for line in first.lines] == [15.829, 15.699, 15.244, 12.445, 7.922]
    assert first.lines[4].published_relative == 7.922 / 15.829
    assert len(first.pairs) == 4
    assert first.rank_correlation == pytest.approx(1.0)
    assert [len(second.lines), len(third.lines)] == [1, 1]
    assert second.rank_correlation is None


def test_speeds_are_adjusted_to_equally_fast_cores():
    """By the probes beside the calls: a point that was measured on a slow core is not a slow point."""
    quiet, disturbed, other = record(8, 1, speed=4.0), record(4, 2, speed=2.0), record(2, 4, speed=4.0)
    for made, probe_s in ((quiet, 0.01), (disturbed, 0.02), (other, 0.01)):
        made["summary"]["probe_s"] = probe_s
    (group,) = compare.groups([quiet, disturbed, other])
    assert [line.speed for line in group.lines] == [4.0, 4.0, 4.0]
    assert [line.adjusted for line in group.lines] == [1.0, 2.0, 1.0]


def test_what_is_not_alike_is_not_compared():
    """Clocks, numbers of ranks, masks, seeds, tables and factors make groups of their own; published.only does not."""
    base, wall, only = record(8, 1), record(8, 1), record(4, 2)
    wall["summary"]["clock"] = "wall"
    only["config"]["published"]["only"] = True
    others = [record(8, 1) for _ in range(4)]
    changes = {"causal": False}, {"seed": 1}, {"window": 9}, {"exchange": "all_gather"}
    for other, change in zip(others, changes, strict=True):
        other["config"] |= change
    bigger = record(8, 1)
    bigger["config"]["published"] |= {"factor": 32}
    groups = compare.groups([base, wall, only, *others, bigger, record(4, 1), record(8, 1, table="l20_pcie")])
    assert [len(group.lines) for group in groups] == [2, *[1] * 8]
    assert len({group.family for group in groups}) == 9


def test_rank_correlation_is_spearmans():
    assert compare.ranks([10.0, 30.0, 20.0, 30.0]) == [1.0, 3.5, 2.0, 3.5]
    speeds = {(8, 1): 1.0, (4, 2): 4.0, (2, 4): 3.0, (1, 8): 2.0}  # published, in this order: 4, 3, 2, 1
    (group,) = compare.groups([record(u, r, "zigzag", speed) for (u, r), speed in speeds.items()])
    assert group.rank_correlation == pytest.approx(1 - 6 * (9 + 1 + 1 + 1) / (4 * 15))


def test_a_point_with_backward_is_compared_by_its_forward_part():
    """Where the published rates are of forward alone."""
    with_backward = record(8, 1, backward=True)
    assert compare.speed(with_backward) == 3.0
    assert compare.speed(record(8, 1)) == 1.0
    assert compare.speed(record(8, 1, backward=True, table="a100_nvlink_backward")) == 1.0


# ---------------------------------------------------------------------------------------------------
# Tables and pictures.


def test_the_table_shows_both_sides(capsys):
    made = [record(8, 1, speed=4.0), record(1, 8, "contiguous", 1.0), record(2, 4, status="crash")]
    made.append(record(2, 4, heads=8))
    tables.show(made)
    text = capsys.readouterr().out
    first = next(line for line in text.splitlines() if "u8r1" in line)
    cells = "8,192 u8r1 zigzag 4.00 1.00 15.83 1.00 0.90 0.00 1 1.0e-07"
    assert first.split() == cells.split()
    assert "7.92" in text
    assert "0.50" in text
    assert "crash" in text
    assert "8 x A100 NVLink" in text
    assert "32/32 heads x 32" in text
    assert "8/8 heads x 32" in text
    assert "what one device a rank would reach if links were free" in " ".join(text.split())


def test_the_pictures_have_a_place_for_every_point(tmp_path):
    """Failed points, published OOMs, several workloads and lengths, no published table, a single point."""
    many = [
        record(8 // ring, ring, layout, 1.0 / ring, heads=heads, length=length)
        for ring in (1, 2, 4, 8)
        for layout in ("contiguous", "zigzag")
        for heads in (8, 32)
        for length in (8192, 131072)
    ]
    many += [record(1, 8, "striped", status="oom"), record(1, 8, "striped", table=None, length=None)]
    for name, chosen in {"many": many, "one": many[:1], "plain": many[-1:]}.items():
        for draw in (figures.speed, figures.heatmap):
            assert draw(chosen, tmp_path / f"{name}.png").stat().st_size > 5_000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["many.png", "one.png", "plain.png"]


# ---------------------------------------------------------------------------------------------------
# Records.


def program(*arguments: str, code: int = 0) -> str:
    command = [sys.executable, "-m", "analysis.records", *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == code, result.stdout + result.stderr
    return result.stdout + result.stderr


def test_list_filter_and_export(tmp_path):
    write(tmp_path / "a", record(8, 1, speed=4.0), record(1, 8), record(2, 4, status="timeout"))
    text = program(str(tmp_path))
    assert "3 records: 2 ok, 1 timeout" in text
    assert "u2r4-zigzag-131072-32" in text
    assert "2 records: 1 ok, 1 timeout" in program(str(tmp_path), "--where", "mesh.ring=1,4")
    assert "1 records: 1 ok" in program(str(tmp_path), "--where", "mesh.ring=1,4", "status=ok")
    files = tmp_path / "out" / "all.csv", tmp_path / "out" / "all.parquet"
    program(str(tmp_path), "--csv", str(files[0]), "--parquet", str(files[1]))
    with files[0].open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3
    by_ring = {row["config.mesh.ring"]: row for row in rows}
    assert by_ring["1"]["relative"] == "1.0"
    assert by_ring["8"]["published_per_s"] == "12.445"
    assert by_ring["4"]["status"] == "timeout"
    assert by_ring["4"]["summary.speed_per_s"] == ""
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(files[1]).to_pylist()
    assert {row["config.mesh.ring"]: row["summary.speed_per_s"] for row in table} == {1: 4.0, 4: None, 8: 1.0}


def test_report_again(tmp_path):
    write(tmp_path, record(8, 1, speed=4.0), record(1, 8))
    assert "15.83" in program(str(tmp_path), "--report")
    assert (tmp_path / "speed.png").exists()
    assert (tmp_path / "heatmap.png").exists()


def test_merge_keeps_machines_apart_and_the_better_of_two_records(tmp_path):
    early, late = "2026-01-01T00:00:00+00:00", "2026-01-02T00:00:00+00:00"
    write(tmp_path / "a", record(8, 1, speed=1.0, started=early), record(4, 2, speed=1.0, started=early))
    write(tmp_path / "b", record(8, 1, speed=2.0, started=late), record(4, 2, status="crash", started=late))
    write(tmp_path / "c", record(8, 1, speed=3.0, machine="there"))
    folders = [str(tmp_path / name) for name in "abc"]
    for _ in range(2):  # the second time nothing changes
        assert "3 records" in program(*folders, "--merge", str(tmp_path / "all"))
        merged = kept.load(tmp_path / "all")
        found = {(x["machine"]["id"], x["point"].split("-")[0]): x["summary"]["speed_per_s"] for x in merged}
        assert found == {("here", "u8r1"): 2.0, ("here", "u4r2"): 1.0, ("there", "u8r1"): 3.0}
    program(folders[0], "--merge", folders[0])  # copies beside the originals are not more records
    assert len(kept.load(Path(folders[0]))) == 2
    for folder in folders:  # and nothing is taken from where it was
        assert kept.load(Path(folder))


def test_mistakes_are_named(tmp_path):
    write(tmp_path, record(8, 1))
    assert "no record has the field 'mesh.rings'" in program(str(tmp_path), "--where", "mesh.rings=1", code=2)
    assert "'status' is not field=value" in program(str(tmp_path), "--where", "status", code=2)
    assert "nowhere is not a folder" in program("nowhere", code=2)
    assert "no records" in program(str(tmp_path), "--where", "status=oom", code=1)
    path = tmp_path / "u8r1-zigzag-131072-32" / "record.json"
    path.write_text("{}")
    assert "is not a record" in program(str(tmp_path), code=2)
    path.write_text(json.dumps(record(8, 1) | {"schema": 1}))  # of an older version
    assert f"no records of schema {kept.SCHEMA}" in program(str(tmp_path), code=1)
