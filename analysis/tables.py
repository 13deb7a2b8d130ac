"""Tables of records on the terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from analysis import compare, placement, published

CLOCKS = {
    "cpu": "Speed: calls per second of the CPU time that the slowest rank computes, outside communication: what one "
    "device a rank would reach if links were free. Ranks share cores here, so wall time would hide imbalance. "
    "Adjusted to equally fast cores by a fixed piece of work beside each call (records have the times as they were).",
    "wall": "Speed: calls per second of wall time: every rank has a device or a core of its own, or links between "
    "hosts are part of it.",
}
BESIDE = ("Ulysses", "ring", "swapped")  # what hybrid is held against
PLACEMENT = (
    "*: fastest. Hybrid: Ulysses inside hosts, ring across; swapped: ring inside, Ulysses across. Picked: what the "
    "cost model predicts to be fastest, with constants fitted on the other rates; loses: how much longer it takes than "
    "the fastest. Time in which cores compute is adjusted to equally fast cores by a fixed piece of work beside each "
    "call (records have the times as they were). Ranks share cores, so times say how links and placement compare, not "
    "how fast a cluster is."
)
CAPTION = (
    "Relative: to the fastest of the same length. Balance: mean over largest time of the ranks. "
    "MB sent: by the rank that sends most. Peak: growth of memory of the rank that grows most. "
    "Error: the largest, against float64, relative to the largest value."
)


def show(records: list[dict]) -> None:
    """A table for each workload, a section for each length, each row beside its published row."""
    console = _console()
    emulated = [record for record in records if record["config"]["cluster"]]
    if emulated:
        _print_studies(console, emulated)
    groups = compare.groups([record for record in records if not record["config"]["cluster"]])
    if not groups:
        return
    families: dict[tuple[str, str], list[compare.Group]] = {}
    for group in groups:
        families.setdefault(group.family, []).append(group)
    several = len({machine for _, machine in families}) > 1
    for (family, machine), members in families.items():
        console.print(_table(members, f"machine {machine}, {family}" if several else family))
        _print_comparison(console, members)
        console.print()
    for clock in sorted({record["summary"]["clock"] for record in records if record["status"] == "ok"}):
        console.print(CLOCKS[clock], style="dim")
    console.print(CAPTION, style="dim")


def _console() -> Console:
    return Console(
        width=max(120, Console().width), highlight=False
    )  # a narrow terminal wraps lines rather than lose figures


def _titled(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))


def _table(groups: list[compare.Group], title: str) -> Table:
    config = groups[0].config
    efficiency = any("efficiency" in line.record.get("summary", {}) for group in groups for line in group.lines)
    forward = compare.forward_alone(config)
    good = [line.record for group in groups for line in group.lines if line.record["status"] == "ok"]
    about = sorted({f"{r['summary']['device']}, {' + '.join(r['summary']['kernels'])}" for r in good})
    table = _titled(f"{title}\n({'; '.join(about) or 'no result'})")
    table.add_column("tokens", justify="right")
    table.add_column("mesh")
    table.add_column("layout")
    for column in ("speed\n1/s", *(["forward\n1/s"] if forward else []), "relative"):
        table.add_column(column, justify="right")
    if groups[0].table:
        table.add_column("published\n1/s", justify="right")
        table.add_column("relative", justify="right")
    for column in ("balance", "MB\nsent", "peak\nMiB", "error"):
        table.add_column(column, justify="right")
    if efficiency:
        table.add_column("efficiency", justify="right")
    for group in groups:
        for line in group.lines:
            table.add_row(*_cells(line, forward, group.table is not None, efficiency))
        table.add_section()
    return table


def _cells(line: compare.Line, forward: bool, beside: bool, efficiency: bool) -> list[str]:
    config = line.record["config"]
    cells = [f"{config['seq']:,}", compare.mesh_label(config), config["layout"]["name"]]
    if found := line.record.get("summary"):
        speed = found["speed_per_s"] * line.adjusted
        cells += [f"{speed:.2f}", *([f"{line.speed:.2f}"] if forward else []), f"{line.relative:.2f}"]
    else:
        cells += [line.record["status"], *([""] if forward else []), ""]
    if beside:
        row = line.published
        if row is None:
            cells += ["", ""]
        elif row.calls_per_s is None:
            cells += [row.status.upper(), ""]
        else:
            cells += [f"{row.calls_per_s:.2f}{'*' if row.doubt else ''}", f"{line.published_relative:.2f}"]
    if not found:
        return cells
    cells += [
        f"{found['balance']:.2f}",
        f"{found['sent_bytes'] / 1e6:.2f}",
        f"{found['peak_growth_bytes'] / 2**20:.0f}",
        f"{max(found['errors'].values()):.1e}" if found["errors"] else "-",
    ]
    return [*cells, f"{found['efficiency']:.3f}"] if efficiency else cells


def _print_comparison(console: Console, groups: list[compare.Group]) -> None:
    if groups[0].table is None:
        return
    factor = groups[0].config["published"]["factor"]
    text = f"Published: {published.TITLES[groups[0].table]}, bfloat16, {factor} times as many tokens."
    found = [
        f"{group.config['seq']:,} tokens {group.rank_correlation:.2f} ({len(group.pairs)} rows)"
        for group in groups
        if group.rank_correlation is not None
    ]
    console.print(text + (f" Rank correlation: {', '.join(found)}." if found else ""))
    for doubt in sorted({line.published.doubt for group in groups for line in group.lines if line.published} - {""}):
        console.print(f"* {doubt}")


def _print_studies(console: Console, records: list[dict]) -> None:
    """Points of emulated clusters: a table for each workload and part of a call, a line for each rate."""
    found = placement.studies(records)
    for study in found:
        names = list(dict.fromkeys(choice.name for rate in study.rates for choice in rate.choices))
        table = _titled(f"{study.title}\n{study.part}, ms of wall time on cores of usual speed")
        table.add_column("Gbit/s", justify="right")
        for column in (*(name.replace(" ", "\n") for name in names), *(f"{kind}\n/ hybrid" for kind in BESIDE)):
            table.add_column(column, justify="right")
        table.add_column("picked")
        table.add_column("loses", justify="right")
        for rate in study.rates:
            seconds = {choice.name: choice.seconds for choice in rate.choices}
            best = rate.best.name
            cells = [f"{1e3 * seconds[x]:.0f}{'*' if x == best else ''}" if x in seconds else "" for x in names]
            over = [rate.over(kind, "hybrid") for kind in BESIDE]
            pick = [rate.pick.name, f"{rate.loss:.1%}"] if rate.pick else ["-", ""]
            table.add_row(f"{rate.gbit_per_s:g}", *cells, *(f"{x:.2f}" if x else "" for x in over), *pick)
        console.print(table)
        for kind in BESIDE:
            if rates := study.crossovers(kind, "hybrid"):
                text = " and ".join(f"{rate:.2g}" for rate in rates)
                console.print(f"{kind} and hybrid are equally fast at {text} Gbit/s.")
        console.print()
    if excess := [x["interface_bytes"] / x["counted_bytes"] - 1 for x in _links(records)]:
        console.print(
            f"Between hosts, interfaces counted {min(excess):+.2%} to {max(excess):+.2%} of what ranks counted as sent."
        )
    failed = [record for record in records if record["status"] != "ok"]
    if found:
        console.print(PLACEMENT, style="dim")
    for record in failed:
        console.print(f"{record['point']}: {record['status']}")


def _links(records: list[dict]) -> list[dict]:
    """Hosts of points that sent something to others."""
    good = [record["summary"]["links"] or [] for record in records if record["status"] == "ok"]
    return [host for hosts in good for host in hosts if host["counted_bytes"]]


def listing(records: list[dict]) -> None:
    """One line a record."""
    table = Table(box=box.SIMPLE_HEAD)
    for column, justify in (
        ("name", "left"),
        ("point", "left"),
        ("status", "left"),
        ("speed 1/s", "right"),
        ("error", "right"),
        ("commit", "left"),
        ("machine", "left"),
        ("started", "left"),
    ):
        table.add_column(column, justify=justify, overflow="fold")  # pyright: ignore[reportArgumentType]
    for record in records:
        found = record.get("summary")
        table.add_row(
            record["config"]["name"],
            record["point"],
            record["status"],
            f"{found['speed_per_s']:.2f}" if found and "speed_per_s" in found else "",
            f"{max(found['errors'].values()):.1e}" if found and found.get("errors") else "",
            (record["commit"] or "none")[:7] + ("+" if record["dirty"] else ""),
            record["machine"]["id"],
            record["started"][:19].replace("T", " "),
        )
    console = _console()
    console.print(table)
    statuses = [record["status"] for record in records]
    counted = ", ".join(
        f"{statuses.count(status)} {status}" for status in sorted(set(statuses), key=lambda x: (x != "ok", x))
    )
    console.print(f"{len(records)} records: {counted}. A + marks a commit with changes that were not committed.")


ERROR = "Error: the largest of out and lse, against float64, relative to the largest value."
STEP_CLOCKS = {
    "cpu": "Clock cpu: CPU time that the slowest rank computes, outside communication, adjusted to equally fast cores: "
    "ranks share cores. Wall time then is of all ranks of a core one after the other.",
    "wall": "Clock wall: every rank has a device or a core of its own, or links between hosts are part of it.",
}


def show_decode(records: list[dict]) -> None:
    """A table for each context and workload, a section for each mesh and batch."""
    console, usual = _console(), compare.usual_probes(records)
    for title, members in _families(records).items():
        table = _inference_table(title, members, ("mesh", "batch", "algorithm", "error"))
        for column in ("bytes\ncounted", "bytes\nformula", "messages", "ms a token", "clock", "wall ms\na token"):
            table.add_column(column, justify="right")
        members.sort(key=lambda x: (*compare.mesh_order(x["config"]), x["config"]["batch"]))
        before = None
        for record in members:
            config, found = record["config"], record.get("summary")
            mesh = f"u{config['mesh']['ulysses']}r{config['mesh']['ring']}"
            if before not in (None, (mesh, config["batch"])):
                table.add_section()
            before = mesh, config["batch"]
            cells = [mesh, str(config["batch"]), config["algorithm"], _error_cell(record)]
            if found:
                out = f" + {found['out_bytes']:,}" if found["out_bytes"] else ""
                cells += [f"{found['sent_bytes']:,}", f"{found['formula_bytes']:,}{out}", str(found["messages"])]
                cells += [f"{1e3 * found['token_s'] / compare.adjusted(record, usual):.3f}", found["clock"]]
                cells += [f"{1e3 * found['wall_token_s']:.3f}"]
            table.add_row(*cells)
        console.print(table)
    _print_clocks(console, records)
    console.print(
        "Bytes and messages: of one step, sent by the rank that sends most, without the agreement of ranks. A token: "
        f"of every sequence of the batch. {ERROR}",
        style="dim",
    )


def show_prefill(records: list[dict]) -> None:
    """A table for each mesh, layout and length, a section for each share, and where the crossover is."""
    console = _console()
    for title, members in _families(records).items():
        table = _inference_table(title, members, ("cached", "algorithm", "error"))
        columns = "MB\nsent", "messages", "exposed ms\nby sizes", "exposed ms\nby rates", "wall ms", "computed\nms"
        for column in columns:
            table.add_column(column, justify="right")
        members.sort(key=lambda record: record["config"]["share"])
        before = None
        for record in members:
            config, found = record["config"], record.get("summary")
            if before not in (None, config["share"]):
                table.add_section()
            before, algorithm = config["share"], config["algorithm"]
            if found and algorithm == "auto":
                algorithm = f"auto: {found['chosen']}"
            cells = [f"{config['share']:g}", algorithm, _error_cell(record)]
            if found:
                cells += [f"{found['sent_bytes'] / 1e6:.3f}", str(found["messages"])]
                cells += [f"{1e3 * found[cost][found['chosen']]:.3f}" for cost in ("by_sizes_s", "by_rates_s")]
                computed = "-" if found["compute_s"] is None else f"{1e3 * found['compute_s']:.1f}"
                cells += [f"{1e3 * found['wall_s']:.1f}", computed]
            table.add_row(*cells)
        console.print(table)
        good = [record for record in members if record["status"] == "ok"]
        if good:
            if len({(record["config"]["share"], record["summary"]["chosen"]) for record in good}) > 1:
                console.print(crossover_line(good))
            rates = [record["summary"]["rates"] for record in good]
            spread = (
                ("flops_per_s", 1e-9, "GFLOP/s"),
                ("bytes_per_s", 1e-9, "GB/s a hop"),
                ("latency_s", 1e6, "us a message"),
            )
            texts = [
                f"{min(some):.3g} to {max(some):.3g} {unit}"
                for some, unit in (([x[key] * factor for x in rates], unit) for key, factor, unit in spread)
            ]
            console.print(f"Rates measured beside the points: {', '.join(texts)}.\n")
    console.print(
        "Exposed: communication that no computation hides, as predicted; by sizes: 1 GB/s and nothing hidden. Wall: of "
        f"a whole call of the slowest rank. Computed: CPU time of the slowest rank outside communication. {ERROR}",
        style="dim",
    )


def show_model(records: list[dict]) -> None:
    """A table for all that computes the same; each mesh beside one process."""
    console, usual = _console(), compare.usual_probes(records)
    families: dict[str, list[tuple[dict, dict | None]]] = {}
    several = len({record["machine"]["id"] for record in records}) > 1
    for record, alone in compare.beside_one_process(records):
        machine = f"machine {record['machine']['id']}, " if several else ""
        families.setdefault(machine + compare.model_family(record), []).append((record, alone))
    own = {
        "train": ("last\nloss", "largest\ndifference"),
        "evaluate": ("loss", "difference"),
        "generate": ("tokens as in\none process",),
    }
    for title, members in families.items():
        phase = members[0][0]["config"]["phase"]
        table = _inference_table(title, [record for record, _ in members], ("ranks",))
        columns = *own[phase], "tokens/s\ncomputed", "clock", "tokens/s\nwall", "MB\nsent", "messages"
        for column in (*columns, "peak MiB\na rank", *(["cache MiB\na rank"] if phase == "generate" else [])):
            table.add_column(column, justify="right")
        for record, alone in sorted(members, key=lambda pair: compare.world(pair[0]["config"])):
            cells = [compare.model_job(record)]
            if found := record.get("summary"):
                speed = found["tokens_per_s"]
                cells += [*_model_cells(record, alone)]
                cells += ["-" if speed is None else f"{speed * compare.adjusted(record, usual):.1f}", found["clock"]]
                cells += [f"{found['wall_tokens_per_s']:.1f}", f"{found['sent_bytes'] / 1e6:.2f}"]
                cells += [f"{found['messages']:,}", _span(found["least_growth_bytes"], found["peak_growth_bytes"])]
                cells += [f"{found['cache_bytes'] / 2**20:.2f}"] if phase == "generate" else []
            else:
                cells += [record["status"]]
            table.add_row(*cells)
        console.print(table)
    console.print(
        "Computed: tokens of the whole batch over CPU seconds that the slowest rank computes, outside this library's "
        "communication; clock cpu: adjusted to equally fast cores, which ranks share. One process: transformers alone, "
        "unless attention usp. MB and messages: of a step, of the loss or of all that is written, by the rank that "
        "sends most, without what averages gradients or gathers weights. Peak: growth of memory in the first call.",
        style="dim",
    )


def _model_cells(record: dict, alone: dict | None) -> list[str]:
    found, phase = record["summary"], record["config"]["phase"]
    apart = alone is not None and alone is not record
    if phase == "generate":
        count = len(found["tokens"][0])
        same = compare.same_tokens(record, alone) if apart else count
        return ["" if not apart else f"all {count}" if same == count else f"first {same} of {count}"]
    difference = f"{max(compare.loss_differences(record, alone)):.1e}" if apart else ""
    return [f"{found['loss']:.6f}", difference]


def _span(least_bytes: int, most_bytes: int) -> str:
    least, most = (f"{count / 2**20:.0f}" for count in (least_bytes, most_bytes))
    return most if least == most else f"{least} to {most}"


def crossover_line(records: list[dict]) -> str:
    """Where queries begin to travel at less cost than keys, predicted and measured, of prefills with a result."""
    found = compare.crossovers(records)
    return (
        f"pass_q costs less than pass_kv from which share on? Predicted by sizes: {found['sizes']}; by measured rates: "
        f"{found['rates']}. Measured bytes: {found['bytes']}; wall seconds: {found['seconds']}."
    )


def _families(records: list[dict]) -> dict[str, list[dict]]:
    """By title."""
    several = len({record["machine"]["id"] for record in records}) > 1
    found: dict[str, list[dict]] = {}
    for record in records:
        machine = f"machine {record['machine']['id']}, " if several else ""
        found.setdefault(machine + compare.inference_family(record), []).append(record)
    return found


def _inference_table(title: str, records: list[dict], columns: tuple[str, ...]) -> Table:
    good = [record["summary"] for record in records if record["status"] == "ok"]
    about = sorted({f"{found['device']}, {' + '.join(found['kernels'] or ['transformers'])}" for found in good})
    table = _titled(f"{title}\n({'; '.join(about) or 'no result'})")
    for column in columns:
        table.add_column(column, justify="right" if column == "batch" else "left")
    return table


def _error_cell(record: dict) -> str:
    """The largest error, or why there is none."""
    if record["status"] != "ok":
        return record["status"]
    errors = record["summary"]["errors"]
    return f"{max(errors.values()):.1e}" if errors else "-"


def _print_clocks(console: Console, records: list[dict]) -> None:
    for clock in sorted({record["summary"]["clock"] for record in records if record["status"] == "ok"}):
        console.print(STEP_CLOCKS[clock], style="dim")


SHOWN = {"attention": show, "decode": show_decode, "prefill": show_prefill, "model": show_model}  # by experiment
