"""Every number of the guide that this project started from: claimed, exact, verdict, formula; and its missing tables.

    python -m experiments.guide
    python -m experiments.guide --only wrong --csv guide.csv

The claims are those of analysis/published/guide.csv. A formula's text is what is computed, in fractions. The first of
these that holds is the verdict:

    no source     credited to a publication in whose tables the rates behind it are not
    exact         the exact value
    rounded       the exact value to the digits that are printed
    inconsistent  neither the exact value nor what another number of the guide makes of it
    convention    what a way of counting of the guide's own gives
    rounded       within 5 % of the exact value, or the end of a range that holds it
    wrong         nothing of this
"""

from __future__ import annotations

import argparse
import csv
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

from analysis import published
from experiments import guide_quantities as holds
from experiments.guide_tables import Table, errors, tables

MODEL = holds.MODEL
VERDICTS = ("exact", "rounded", "convention", "inconsistent", "wrong", "no source")
# ---------------------------------------------------------------------------------------------------
# Claims and formulas.

NAMES = {  # of formulas
    "S": Fraction(holds.SEQ),
    "T": Fraction(holds.SHORT),
    "N": Fraction(holds.GPUS),
    "P": Fraction(holds.PARAMS),
    "L": Fraction(holds.MODEL.layers),
    "H": Fraction(holds.MODEL.heads),
    "K": Fraction(holds.MODEL.kv_heads),
    "d": Fraction(holds.MODEL.head_dim),
    "e": Fraction(holds.ELEMENT_BYTES),
    "R": holds.FLOPS_PER_S,
    "hbm": holds.MEMORY_BYTES_PER_S,
    "link": holds.LINK_BYTES_PER_S,
    "network": holds.NETWORK_BYTES_PER_S,
    "node": holds.NODE_BYTES_PER_S,
    "layer": Fraction(holds.MODEL.layer_params),
    "kv": holds.kv_bytes,
    "qkv": holds.qkv_bytes,
    "hop": holds.hop_bytes(holds.GPUS),
    "attention": holds.attention_flops,
    "linear": holds.linear_flops,
    "memory": lambda gpus, batch=1: holds.memory(gpus, batch).total_bytes,
    "largest_batch": holds.largest_batch,
    "gather": holds.gather_s,
    "token": holds.decode_s,
    "batch": holds.batch_s,
    "blocks": lambda layout, ring: sum(holds.rank_blocks(layout, ring)),
    "blocks_of": lambda layout, ring, rank: holds.rank_blocks(layout, ring)[int(rank)],
    "most": holds.most,
    "speed_up": holds.speed_up,
    "contiguous": holds.CONTIGUOUS,
    "zigzag": holds.ZIGZAG,
    "KiB": Fraction(1024),
    "M": Fraction(10**6),
    "MB": Fraction(10**6),
    "GB": Fraction(10**9),
    "TB": Fraction(10**12),
    "ms": holds.MS,
    "minute": Fraction(holds.MINUTE_S),
}
LEGEND = f"""\
S = {holds.SEQ:,} tokens, T = {holds.SHORT:,}, on N = {holds.GPUS} GPUs. R = 175e12 FLOP/s, \
e = {holds.ELEMENT_BYTES} bytes.
Llama 3 70B: L = {MODEL.layers} layers, H = {MODEL.heads} heads, K = {MODEL.kv_heads} KV heads \
of d = {MODEL.head_dim}, layer = {MODEL.layer_params:,} parameters in the matrices of one. \
P = 70e9 parameters in all is the guide's; the model \
has {MODEL.params:,}: {MODEL.params * holds.ELEMENT_BYTES / holds.GB:.1f} GB instead of 140.
Bytes/s: hbm = 2e12, link = 300e9 inside a node, network = 25e9 of a GPU between nodes, node = 8 network.
kv(tokens): of all layers; qkv(tokens), attention(queries, keys), hop: of one layer; linear(tokens): FLOPs of all \
matrices; memory(GPUs, batch): P e and the tokens of the batch sharded, and 2.0 GB; gather(GPUs, bytes/s): all \
weights, a token; token(tokens, n): memory read in decode of n sequences by tensor 8 x ring 4; \
batch(tokens, n): causal prefill of n, balanced, on 32 GPUs, and 500 tokens of decode.
blocks(layout, GPUs): pairs of a causal mask, counted, in blocks of S/N x S/N; most(): of the GPU that has most; \
speed_up(GPUs) = most(contiguous) / most(zigzag)."""


def value(formula: str) -> Fraction:
    """Of a formula's text; its numbers become fractions, so that nothing is rounded."""
    code = re.sub(r"(?<![\w.])\d+(\.\d+)?(e\d+)?", r"Fraction('\g<0>')", formula)
    return Fraction(eval(code, {"__builtins__": {}, "Fraction": Fraction}, NAMES))


@dataclass(frozen=True)
class Formula:
    """What holds for one claim.

    Args:
        convention: a formula of the guide's own way of counting, and that way in words.
        against: what the guide makes of the same thing elsewhere, and where.
        span: the range whose end the claim is.
        rates: what it was made of, credited to a published table.
        note: for the reader.
    """

    line: int
    what: str
    exact: str
    convention: tuple[str, str] | None = None
    against: tuple[str, str] | None = None
    span: tuple[str, str] | None = None
    rates: tuple[str, ...] = ()
    note: str = ""


HALVES = "diagonal blocks counted whole"
OTHER = "activations of 2.6 GB (line 13)"


def formulas() -> list[Formula]:
    """Of all claims."""
    f = Formula
    found = [
        f(9, "weights, two bytes a parameter", "P*e/GB"),
        f(9, "KV cache, 1M tokens", "kv(S)/GB"),
        f(9, "scores of one layer, all heads", "S*S*H*e/TB"),
        f(11, "weights sharded over 8", "P*e/N/GB"),
        f(13, "Q, K and V of one layer", "qkv(S)/GB"),
        f(13, "Q, K and V of one layer, 1 of 8", "qkv(S/N)/GB"),
        f(15, "KV cache, 1 of 8", "kv(S)/N/GB"),
        f(15, "largest Ulysses degree", "H", convention=("K", "KV heads are not replicated")),
        f(27, "weight shard", "P*e/N/GB"),
        f(28, "KV cache, 1 of 8", "kv(S/N)/GB"),
        f(29, "activations (Q, K, V)", "qkv(S/N)/GB", against=("2.6", "line 13"), note="2.05 GB are Q alone"),
        f(32, "total", "memory(N)/GB", against=("17.5 + 41.0 + 2.6 + 2.0", OTHER)),
        f(34, "headroom of 80 GB", "80 - memory(N)/GB", against=("80 - (17.5 + 41.0 + 2.6 + 2.0)", OTHER)),
        f(41, "KV cache, batch 2", "2*kv(S/N)/GB"),
        f(
            41,
            "total, batch 2",
            "memory(N, 2)/GB",
            against=("17.5 + 2*(41.0 + 2.0) + 2.0", "activations grow with the batch too (line 450)"),
        ),
        f(65, "sends of KV a layer", "N - 1", convention=("N", "a send after every step")),
        f(67, "most KV tokens held", "2*S/N", note="one block is computed with while the next arrives"),
        f(178, "keys of one block", "S/N*K*d*e/GB"),
        f(180, "keys and values of one block", "hop/GB"),
        f(184, "hop inside a node", "hop/link/ms"),
        f(187, "hop between nodes", "hop/network/ms"),
        f(194, "attention of a head and step", "4*(S/N)*(S/N)*d"),
        f(196, "attention of a step", "attention(S/N, S/N)"),
        f(199, "a step", "attention(S/N, S/N)/R"),
        f(205, "step over hop, inside a node", "attention(S/N, S/N)/R/(hop/link)"),
        f(206, "step over hop, between nodes", "attention(S/N, S/N)/R/(hop/network)", note="half of it if causal"),
        f(217, "attention of a layer", "attention(S, S)/N/R"),
        f(220, "attention of the model", "L*attention(S, S)/N/R/minute"),
        f(221, "matrices beside attention", "100*linear(S)/(L*attention(S, S))", note="twice as much beside causal"),
        f(222, "forward", "(L*attention(S, S) + linear(S))/N/R/minute"),
        f(225, "pairs, 128K over 1M", "T*T/(S*S)"),
        f(225, "128K: a step", "attention(T/N, T/N)/R/ms"),
        f(226, "128K: attention of a layer", "attention(T, T)/N/R/ms"),
        f(227, "128K: attention of the model", "L*attention(T, T)/N/R"),
        f(242, "32K: Ulysses over ring", "7.36/5.14", rates=("7.36", "5.14")),
        f(242, "128K: Ulysses over ring", "1.01/0.56", rates=("1.01", "0.56")),
        f(
            257,
            "work of a call, Ulysses over ring",
            "attention(S, S)/N/attention(S/N, S/N)",
            note="64 a head, of N heads",
        ),
        f(278, "KV cache, Ulysses 8", "S*(K/N)*d*2*L*e/GB"),
        f(284, "KV cache, ring 8", "(S/N)*K*d*2*L*e/GB"),
        f(299, "attention of the model", "L*attention(S, S)"),
        f(309, "efficiency of ring, lower end", "100/1.8", against=("100/1.8", "1.8 times slower (line 309)")),
        f(309, "efficiency of ring, upper end", "100/1.4", against=("100/1.4", "1.4 times slower (line 309)")),
        f(331, "causal blocks of all GPUs", "blocks(contiguous, N)", convention=("N*(N + 1)/2", HALVES)),
        f(332, "share of all blocks", "100*blocks(contiguous, N)/(N*N)", convention=("100*36/64", HALVES)),
        f(332, "share saved", "100 - 100*blocks(contiguous, N)/(N*N)", convention=("100 - 100*36/64", HALVES)),
        f(336, "mean blocks of a GPU", "blocks(contiguous, N)/N", convention=("36/8", HALVES), note="the busiest: 7.5"),
        f(387, "zigzag, any GPU", "most(zigzag, N)", convention=("17/4", HALVES)),
        f(398, "zigzag, all GPUs, small blocks", "4*blocks(zigzag, N)", convention=("8*17", HALVES)),
        f(398, "zigzag, all GPUs", "blocks(zigzag, N)", convention=("136/4", HALVES)),
        f(401, "zigzag speed-up", "speed_up(8)", convention=("8/4.25", HALVES)),
        f(454, "weights, 1 of 32", "P*e/32/GB"),
        f(454, "fixed memory", "P*e/32/GB + 2.0"),
        f(455, "KV cache of a request", "kv(S/32)/GB"),
        f(455, "activations of a request", "qkv(S/32)/GB", against=("2.6*8/32", OTHER)),
        f(455, "memory of a request", "(kv(S/32) + qkv(S/32))/GB", against=("10.2 + 2.6*8/32", OTHER)),
        f(465, "largest batch", "largest_batch(32)", note='of a group of 32, not "per GPU"; 5 with weights on 8 (TP)'),
        f(517, "parameters of a layer", "layer/M"),
        f(517, "weights of a layer", "layer*e/GB"),
        f(518, "reading them", "layer*e/hbm/ms"),
        f(521, "KV of a layer, 1 of 32", "kv(S/32)/L/MB"),
        f(522, "reading it", "kv(S/32)/L/hbm/ms"),
        f(525, "attention of one query", "attention(1, S/32)"),
        f(
            526,
            "attention of one query",
            "attention(1, S/32)/R/ms",
            note="one query cannot reach R; reading KV hides it",
        ),
        f(532, "a layer of decode", "((layer*e + kv(S/32)/L)/hbm + attention(1, S/32)/R)/ms"),
        f(533, "a token", "L*((layer*e + kv(S/32)/L)/hbm + attention(1, S/32)/R)/ms"),
        f(542, "FSDP: reading weights", "L*layer*e/hbm/ms"),
        f(543, "FSDP: a token, lower end", "gather(8, link)/ms", span=("74", "89"), note="communication alone, 8 GPUs"),
        f(
            543,
            "FSDP: a token, upper end",
            "gather(32, node)/ms",
            span=("74", "89"),
            note="communication alone, 4 nodes",
        ),
        f(546, "TP 8: weights of a layer", "layer*e/8/MB"),
        f(546, "TP 8: reading them", "layer*e/8/hbm/ms"),
        f(547, "TP 8: reading all layers", "L*layer*e/8/hbm/ms"),
        f(548, "TP 8: a token, upper end", "token(S, 1)/ms", span=("9", "15"), note="batch 1, without communication"),
        f(552, "query of one token", "H*d*e/KiB"),
        f(561, "8 minutes over 1.97", "8/1.97", note="line 484 has what it stands for"),
        f(562, "500 tokens, batch 6", "500*token(S, 6)", note="every sequence's KV is read"),
        f(564, "batch of 6, 1M tokens", "batch(S, 6)/minute", note="six prefills take six times as long"),
        f(565, "rate, 1M tokens", "6/(batch(S, 6)/minute)"),
        f(571, "batch of 6, 128K tokens", "batch(T, 6)"),
        f(572, "rate, 128K tokens", "6/(batch(T, 6)/minute)"),
    ]
    for line, gpus in zip((302, 303, 304, 305), holds.SCALES, strict=True):
        found.append(f(line, f"attention of a GPU of {gpus}", f"L*attention(S, S)/{gpus}"))
        found.append(f(line, f"attention time on {gpus} GPUs", f"L*attention(S, S)/{gpus}/R/minute"))
    for gpu, line in enumerate((367, 371, *range(373, 379))):
        found.append(f(line, f"zigzag, GPU {gpu}", f"4*blocks_of(zigzag, N, {gpu})", convention=("2*N + 1", HALVES)))
    for line, gpus in zip((438, 439, 440, 441), holds.SCALES, strict=True):
        found.append(
            f(line, f"zigzag speed-up, {gpus} GPUs", f"speed_up({gpus})", (f"4*{gpus}/(2*{gpus} + 1)", HALVES))
        )
    for batch in range(1, 8):
        against = f"6.4 + {batch}*(10.2 + 2.6*8/32)", OTHER
        found.append(f(456 + batch, f"total, batch {batch}", f"memory(32, {batch})/GB", against=against))
    for line, gpus in zip((477, 478, 479, 480), (8, 32, 64, 128), strict=True):
        found.append(f(line, f"prefill on {gpus} GPUs", f"L*attention(S, S)/{gpus}/R/minute"))
        found.append(f(line, f"a layer on {gpus} GPUs", f"attention(S, S)/{gpus}/R"))
    for line, gpus, own in ((483, 8, "31/1.88"), (484, 32, "8/1.97"), (485, 64, "4/1.98")):
        exact = f"L*attention(S, S)/2/{gpus}/R/minute"
        found.append(f(line, f"zigzag prefill on {gpus} GPUs", exact, (own, "from rounded figures, " + HALVES)))
    for line, gpus, span, balanced in ((490, 8, ("30", "50"), ("16", "26")), (491, 32, ("8", "12"), ("4", "6"))):
        matrices = f"(L*attention(T, T){{}} + linear(T))/{gpus}/R"
        found.append(f(line, f"128K on {gpus} GPUs, lower end", f"L*attention(T, T)/{gpus}/R", span=span))
        found.append(f(line, f"128K on {gpus} GPUs, upper end", matrices.format(""), span=span, note="with matrices"))
        note = "zigzag does nothing for matrices"
        found.append(f(line, f"128K on {gpus}, zigzag, upper end", matrices.format("/2"), span=balanced, note=note))
    return sorted(found, key=lambda x: x.line)


@dataclass(frozen=True)
class Number:
    """One claim beside what holds."""

    claim: published.Claim
    formula: Formula

    @property
    def exact(self) -> Fraction:
        return value(self.formula.exact)

    @property
    def verdict(self) -> str:
        """One of VERDICTS, as the module has it."""
        claimed, exact, formula = Fraction(self.claim.claimed), self.exact, self.formula
        if formula.rates and not all(map(is_published, formula.rates)):
            return "no source"
        if claimed == exact:
            return "exact"
        if self._prints(exact):
            return "rounded"
        if formula.against and not self._prints(value(formula.against[0])):
            return "inconsistent"
        if formula.convention and self._prints(value(formula.convention[0])):
            return "convention"
        low, high = map(Fraction, formula.span or ("1", "0"))
        return "rounded" if abs(claimed - exact) <= exact / 20 or low <= exact <= high else "wrong"

    @property
    def remark(self) -> str:
        """What the guide's own figure is made of, and the note."""
        found = []
        if self.formula.convention:
            own, words = self.formula.convention
            found.append(f"{own} = {shown(value(own))}: {words}")
        if self.formula.against:
            own, words = self.formula.against
            found.append(f"against {own if own == shown(value(own)) else f'{own} = {shown(value(own))}'}: {words}")
        if self.formula.span:
            found.append("of {}-{}".format(*self.formula.span))
        return "; ".join([*found, *filter(None, [self.formula.note])])

    def _prints(self, number: Fraction) -> bool:
        """Whether the claim is this number, to the digits that it has."""
        exponent = Decimal(self.claim.claimed).as_tuple().exponent
        assert isinstance(exponent, int)
        return abs(number - Fraction(self.claim.claimed)) <= Fraction(10) ** exponent / 2


def is_published(rate: str) -> bool:
    """Whether a table of the authors' attention benchmarks has a rate of these digits."""
    digits = len(rate.partition(".")[2])
    rates = [row.calls_per_s for table in published.TITLES for row in published.rows(table)]
    return any(found is not None and f"{found:.{digits}f}" == rate for found in rates)


def numbers() -> list[Number]:
    """Every claim, in the guide's order."""
    by_claim = {(formula.line, formula.what): formula for formula in formulas()}
    return [Number(claim, by_claim[claim.line, claim.what]) for claim in published.claims()]


def shown(number: Fraction) -> str:
    """Six digits."""
    return f"{float(number):.6g}"


# ---------------------------------------------------------------------------------------------------
# Printing.

WIDTH = 120


def printed_numbers(some: Iterable[Number]) -> list[str]:
    """A line for each, and below it what more there is to say, unless it was just said."""
    lines, before = [f"{'line':>4}  {'what':33}  {'claimed':>8}  {'exact':>11} {'unit':8} {'verdict':12} formula"], ""
    for x in some:
        claim = x.claim
        head = (
            f"{claim.line:4}  {claim.what:33}  {claim.claimed:>8}  {shown(x.exact):>11} {claim.unit:8} {x.verdict:12} "
        )
        formula, *rest = textwrap.wrap(x.formula.exact, WIDTH - len(head))
        lines += [head + formula, *(" " * len(head) + part for part in rest)]
        if x.remark != before:
            lines += textwrap.wrap(x.remark, WIDTH, initial_indent=" " * 8, subsequent_indent=" " * 8)
        before = x.remark
    return lines


def counted(some: Iterable[Number]) -> str:
    """How many of each verdict."""
    found = Counter(x.verdict for x in some)
    return ", ".join(f"{found[verdict]} {verdict}" for verdict in VERDICTS if found[verdict])


def printed_table(table: Table) -> list[str]:
    """Columns as wide as their cells."""
    rows = [row for row in (table.header, *table.rows) if any(row)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(table.header))]
    lines = [table.title]
    for row in rows:
        cells = [
            f"{cell:<{width}}" if table.words or not column else f"{cell:>{width}}"
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    return lines + [part for note in table.notes for part in textwrap.wrap(note, WIDTH)]


def printed_errors() -> list[str]:
    """One after the other."""
    lines = ["What the guide gets wrong, and what holds"]
    for x in errors():
        plural = "line" if x.lines.isdigit() else "lines"
        lines += textwrap.wrap(
            f"  {x.name:4} {plural} {x.lines}: {x.says}", WIDTH, subsequent_indent=" " * 7, break_on_hyphens=False
        )
        lines += textwrap.wrap(
            x.holds, WIDTH, initial_indent=" " * 7 + "-> ", subsequent_indent=" " * 10, break_on_hyphens=False
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.guide", description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=VERDICTS, help="numbers of this verdict, and no tables")
    parser.add_argument("--csv", type=Path, help="write the numbers there too")
    options = parser.parse_args(arguments)
    found = [x for x in numbers() if options.only in (None, x.verdict)]
    for part in LEGEND.splitlines():
        print(textwrap.fill(part, WIDTH))
    print()
    print("\n".join(printed_numbers(found)))
    print(f"\n{len(found)} numbers: {counted(found)}")
    if options.only is None:
        for table in tables():
            print("\n" + "\n".join(printed_table(table)))
        print("\n" + "\n".join(printed_errors()))
    if options.csv:
        with options.csv.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("line", "what", "claimed", "exact", "unit", "verdict", "formula", "remark"))
            for x in found:
                row = (x.claim.line, x.claim.what, x.claim.claimed, float(x.exact), x.claim.unit, x.verdict)
                writer.writerow((*row, x.formula.exact, x.remark))


if __name__ == "__main__":
    main()
