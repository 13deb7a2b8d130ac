"""Records of experiments as data: list, filter, export, merge.

    python -m analysis.records results/
    python -m analysis.records results/sweep --where mesh.ring=4 layout.name=zigzag status=ok
    python -m analysis.records results/ --csv all.csv --parquet all.parquet
    python -m analysis.records from_one_machine/ from_another/ --merge results/
    python -m analysis.records results/usp_a100 --report

A record is a folder's record.json. Filters name fields of the record or of its configuration by their dotted path.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from analysis import compare

SCHEMA = 3  # of the records that this version writes and reads


def load(*folders: Path) -> list[dict]:
    """All records below the folders, by start time. "path" is a record's file.

    Those of another schema are left out. Of one machine's records of a point the good one stays, then the latest.

    Raises:
        ValueError: if a folder does not exist, or a record.json is none.
    """
    found = []
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder")
        for path in folder.rglob("record.json"):
            try:
                record = json.loads(path.read_text())
                if record["schema"] == SCHEMA:
                    record["started"], record["machine"]["id"], record["config"], record["status"], record["point"]
                    found.append(record | {"path": str(path)})
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path} is not a record: {error!r}") from None
    best: dict[tuple, dict] = {}
    for record in found:  # merging may have copied some
        key = record["config"]["name"], record["machine"]["id"], record["point"]
        if key not in best or _better(record, best[key]):
            best[key] = record
    return sorted(best.values(), key=lambda record: record["started"])


def field(record: dict, name: str):
    """The value at a dotted path of the record, else of its configuration.

    Raises:
        KeyError: if neither has it.
    """
    for start in (record, record["config"]):
        value = start
        try:
            for key in name.split("."):
                value = value[key]
            return value
        except (KeyError, TypeError):
            continue
    raise KeyError(name)


def where(records: Iterable[dict], conditions: Iterable[str]) -> list[dict]:
    """The records that meet every `field=value`; `field=a,b` is one or the other.

    Raises:
        ValueError: if a condition has no value, or no record has the field.
    """
    records = list(records)
    for condition in conditions:
        name, equals, wanted = condition.partition("=")
        if not equals:
            raise ValueError(f"{condition!r} is not field=value")
        values = [(record, _field_text(record, name)) for record in records]
        if records and all(text is None for _, text in values):
            raise ValueError(f"no record has the field {name!r}")
        records = [record for record, text in values if text in wanted.split(",")]
    return records


def _field_text(record: dict, name: str) -> str | None:
    """As written in a command."""
    try:
        value = field(record, name)
    except KeyError:
        return None
    return value if isinstance(value, str) else json.dumps(value)


SAMPLES = ("ranks", "stacks", "command", "seed", "conformance", "rates")


def flat(records: list[dict]) -> list[dict[str, object]]:
    """One flat row a record, with the published rate and both relative speeds, for tables and data frames.

    Samples and what is not a figure stay in the record.
    """
    rows = []
    lines = {id(line.record): line for group in compare.groups(records) for line in group.lines}
    for record in records:
        row = dict(_flatten({key: value for key, value in record.items() if key not in SAMPLES}))
        line = lines.get(id(record))
        if line is None:
            rows.append(row)
            continue
        row["adjusted"], row["compared_speed_per_s"], row["relative"] = line.adjusted, line.speed, line.relative
        row["published_per_s"] = line.published.calls_per_s if line.published else None
        row["published_relative"] = line.published_relative
        row["published_doubt"] = line.published.doubt if line.published else None
        rows.append(row)
    columns = {column: None for row in rows for column in row}
    return [{column: row.get(column) for column in columns} for row in rows]


def _flatten(value: dict, prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, inner in value.items():
        if isinstance(inner, dict):
            yield from _flatten(inner, f"{prefix}{key}.")
        else:
            yield prefix + key, " ".join(map(str, inner)) if isinstance(inner, list) else inner


def to_csv(records: list[dict], path: Path) -> Path:
    """Write `flat` to a file, whole or not at all."""
    rows = flat(records)
    part = _part(path)
    with part.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return part.replace(path)


def to_parquet(records: list[dict], path: Path) -> Path:
    """Write `flat` to a file, whole or not at all."""
    import pyarrow
    import pyarrow.parquet

    part = _part(path)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(flat(records)), part)
    return part.replace(path)


def pictures(experiment: str, records: list[dict], folder: Path) -> list[Path]:
    """Draw what there is to draw of an experiment's records."""
    from analysis import figures

    if experiment == "model":
        records = [record for record in records if record["config"]["phase"] == "train" and record["status"] == "ok"]
    if experiment == "attention" and any(record["config"]["cluster"] for record in records):
        shapes: dict[str, list[dict]] = {}
        for record in records:
            if record["status"] == "ok" and (cluster := record["config"]["cluster"]):
                shapes.setdefault(f"{cluster['hosts']}x{cluster['ranks_per_host']}", []).append(record)
        return [figures.two_level(some, folder / f"two_level_{shape}.png") for shape, some in shapes.items()]
    wanted = {"attention": (figures.speed, figures.heatmap), "model": (figures.training,) if records else ()}
    return [draw(records, folder / f"{draw.__name__}.png") for draw in wanted.get(experiment, ())]


def _part(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.with_name(f"{path.name}.{os.getpid()}.part")


def merge(records: list[dict], into: Path) -> int:
    """Copy records of several machines below one folder, as <name>/<machine>/<point>/record.json; how many.

    Of one machine's records of the same point one stays: a good one before one without a result, then the latest.
    What the folder already has takes part.
    """
    known = load(into) if into.is_dir() else []
    best: dict[Path, dict] = {}
    for record in known + records:
        target = into / record["config"]["name"] / record["machine"]["id"] / record["point"] / "record.json"
        if target not in best or _better(record, best[target]):
            best[target] = record
    for target, record in best.items():
        if target != Path(record["path"]):
            target.parent.mkdir(parents=True, exist_ok=True)
            part = _part(target)
            part.write_bytes(Path(record["path"]).read_bytes())
            part.replace(target)
    return len(best)


def _better(one: dict, other: dict) -> bool:
    return (one["status"] == "ok", one["started"]) > (other["status"] == "ok", other["started"])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m analysis.records", description="List, filter, export and merge records of experiments."
    )
    parser.add_argument("folders", nargs="+", type=Path, help="where to look for record.json files")
    parser.add_argument("--where", nargs="+", default=[], metavar="FIELD=VALUE", help="keep what meets all of these")
    parser.add_argument("--csv", type=Path, help="write one row a record")
    parser.add_argument("--parquet", type=Path, help="the same as Parquet (needs pyarrow)")
    parser.add_argument("--merge", type=Path, metavar="FOLDER", help="copy the records into one folder")
    parser.add_argument("--report", action="store_true", help="tables beside the published ones, and pictures")
    arguments = parser.parse_args()
    try:
        records = where(load(*arguments.folders), arguments.where)
    except ValueError as error:
        parser.error(str(error))
    if not records:
        sys.exit(f"no records of schema {SCHEMA}")
    if arguments.csv:
        print(f"{len(records)} records: {to_csv(records, arguments.csv)}")
    if arguments.parquet:
        print(f"{len(records)} records: {to_parquet(records, arguments.parquet)}")
    if arguments.merge:
        print(f"{merge(records, arguments.merge)} records: {arguments.merge}")
    if arguments.report:
        from analysis import tables

        some = False
        for experiment, show in tables.SHOWN.items():
            if members := [record for record in records if record["experiment"] == experiment]:
                some = True
                show(members)
                for path in pictures(experiment, members, arguments.folders[0]):
                    print(path)
        if not some:
            sys.exit(f"no records of {', '.join(f'experiments.{name}' for name in tables.SHOWN)}")
    if not (arguments.csv or arguments.parquet or arguments.merge or arguments.report):
        from analysis import tables

        tables.listing(records)


if __name__ == "__main__":
    main()
