"""Published measurements as cases: seconds that were measured, and how the cost model predicts them.

Note [Published FLOPs]
~~~~~~~~~~~~~~~~~~~~~~
End-to-end rates are FLOPs by a formula over seconds that are not published, so the formula gives the seconds back. Both
versions of arXiv 2405.07719 count a training step of B sequences of S tokens as

    12 B S L h^2 (c (1 + kv + S / h) + 1.5 f / h + V / (2 L h))

for L layers, hidden h, kv = KV heads / heads, MLP width f, V = 32,000. It is what Megatron-LM prints with c = 1, in the
first version; the later one has c = 1/2, which halves the projections as well as attention. In tables 5 to 7 all
40 ratios of the two columns are those of the formula to four digits, in figure 5 all eight are those of LLAMA3-8B's
shape, not of LLAMA2-7B's that its title names. A test holds this.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from analysis import published
from usp.cost.hardware import Cluster, Hardware
from usp.cost.timing import Prediction, predict, predict_model, predict_turn
from usp.cost.workload import Model, Plan, Workload, model
from usp.masks import Mask

LONG = 65536  # tokens from which kernels and bytes take most of the time, not launches and copies
VOCAB = 32000  # of both models in arXiv 2405.07719, by its FLOPs
MACHINES = {  # of the attention tables
    "a100_nvlink": "a100_80gb",
    "a100_nvlink_gqa": "a100_80gb",
    "a100_nvlink_backward": "a100_80gb",
    "a100_pcie": "a100_80gb_pcie",
    "l20_pcie": "l20_48gb",
}


@dataclass(frozen=True)
class Case:
    """Something that was measured."""

    machine: str
    source: str
    what: tuple[str, ...]  # its columns in a table
    measured_s: float
    predict: Callable[[Hardware, bool], Prediction]  # with these constants; True for a lower bound
    outside: str = ""  # why nothing is fitted on it
    doubt: str = ""  # what speaks against the number
    about: object = None  # the published row

    def seconds(self, trial: Hardware) -> float:
        return self.predict(trial, False).seconds

    def error(self, trial: Hardware) -> float:
        """predicted / measured - 1"""
        return self.seconds(trial) / self.measured_s - 1


ELEMENT_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def call_of(config: dict) -> tuple[Workload, Plan]:
    """The call that a point of experiments.attention measures, and how it is spread."""
    mask = Mask(causal=config["causal"], window=config["window"])
    width = ELEMENT_BYTES[config["dtype"]]
    workload = Workload(seq=config["seq"], mask=mask, element_bytes=width, **config["workload"])
    options = {key: config[key] for key in ("exchange", "replicate_kv")}
    return workload, Plan(**config["mesh"], layout=config["layout"]["name"], **options)


# ---------------------------------------------------------------------------------------------------
# Attention.


@cache
def attention(table: str) -> tuple[Case, ...]:
    """All rows of a table of attention that ran."""
    return tuple(attention_case(row) for row in published.rows(table) if row.calls_per_s)


def attention_case(row: published.Row, causal: bool | None = None) -> Case:
    """A row as a case; `causal` overrides what the row most probably had."""
    assert row.calls_per_s
    causal = row.causal if causal is None else causal
    workload = Workload(row.batch, row.length, row.heads, row.kv_heads, row.head_dim, Mask(causal=causal))
    plan = Plan(ring=row.ring, ulysses=row.ulysses, layout=row.layout)

    def predicted(trial: Hardware, bound: bool) -> Prediction:
        return predict(workload, plan, Cluster(trial, 1, row.gpus), backward=row.backward, bound=bound)

    outside = ""
    if row.qkv == "packed":
        outside = "packed: another implementation"
    elif row.length < LONG and not row.backward:
        outside = "short: launches and copies"
    what = (
        f"{row.length:,}",
        f"{row.heads}/{row.kv_heads} x {row.head_dim}",
        f"u{row.ulysses} r{row.ring}",
        row.layout,
        row.qkv,
    )
    return Case(MACHINES[row.table], row.table, what, 1 / row.calls_per_s, predicted, outside, row.doubt, row)


# ---------------------------------------------------------------------------------------------------
# Training steps.


def published_flops(shape: Model, batch: int, seq: int, attention_share: float) -> float:
    """Of a training step: Note [Published FLOPs]; 1 for attention in the first version, 1/2 later."""
    h = shape.hidden
    own = attention_share * (1 + shape.kv_heads / shape.heads + seq / h)
    return (
        12 * batch * seq * shape.layers * h**2 * (own + 1.5 * shape.intermediate / h + VOCAB / (2 * shape.layers * h))
    )


@dataclass(frozen=True)
class Step:
    """A published training step."""

    source: str
    shape: Model
    gpus: int
    seq: int
    batch: int  # of all replicas
    plan: Plan
    full: float  # TFLOP/s a GPU, first version
    causal: float  # later version

    @property
    def seconds(self) -> float:
        """From the later column, which has more digits."""
        return self.flops(0.5) / (self.causal * 1e12 * self.gpus)

    def flops(self, attention_share: float) -> float:
        return published_flops(self.shape, self.batch, self.seq, attention_share)


def _lines(name: str) -> list[dict[str, str]]:
    with (Path(published.__file__).parent / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def shape(name: str) -> Model:
    """A model of arXiv 2405.07719."""
    return replace(model(name), vocab=VOCAB)


@cache
def end_to_end() -> tuple[Case, ...]:
    """Tables 5 to 7: nothing is fitted on them."""
    found = []
    for line in _lines("end_to_end"):
        n = {key: int(line[key]) for key in ("gpus", "seq", "global_batch", "tp", "ulysses", "ring")}
        data = n["gpus"] // (n["tp"] * n["ulysses"] * n["ring"])
        plan = Plan(data=data, tensor=n["tp"], ulysses=n["ulysses"], ring=n["ring"])
        rates = float(line["tflops_per_gpu_full"]), float(line["tflops_per_gpu_causal"])
        step = Step(
            f"table {line['table']}", shape(line["model"]), n["gpus"], n["seq"], n["global_batch"], plan, *rates
        )
        found.append(_step_case(step))
    return tuple(found)


@cache
def data_parallel() -> tuple[Case, ...]:
    """Figure 5: whole sequences on each GPU, or each sequence on all."""
    found = []
    for line in _lines("data_parallel"):
        gpus = int(line["gpus"])
        plan = Plan(data=gpus) if line["strategy"] == "data" else Plan(ulysses=gpus)
        rates = float(line["tflops_per_gpu_full"]), float(line["tflops_per_gpu_causal"])
        step = Step("figure 5", shape("llama3_8b"), gpus, int(line["seq"]), int(line["global_batch"]), plan, *rates)
        found.append(_step_case(step))
    return tuple(found)


def _step_case(step: Step) -> Case:
    plan = step.plan

    def predicted(trial: Hardware, bound: bool) -> Prediction:
        nodes = -(-step.gpus // 8)
        sizes = {"seq": step.seq, "batch": step.batch // plan.data, "phase": "train"}
        return predict_model(step.shape, plan, Cluster(trial, nodes, step.gpus // nodes), **sizes, bound=bound)

    what = (
        step.shape.name, str(step.gpus), f"{step.seq:,}", str(step.batch), str(plan.tensor), str(plan.ulysses),
        str(plan.ring), str(plan.data),
    )  # fmt: skip
    return Case("a800_80gb", step.source, what, step.seconds, predicted, about=step)


# ---------------------------------------------------------------------------------------------------
# Prefill and decode of Llama 3 405B: tensor parallel 8 inside a node, a ring over nodes.

RING, TENSOR, WINDOW = 4, 8, 128_000  # of arXiv 2411.01783, tables 4 and 5: new and cached tokens together
PASS = ("pass_kv", "pass_q")
_STRANGE = "4,160 and 6,400 new tokens take nearly the same time"


@cache
def turns() -> tuple[Case, ...]:
    """Table 4: keys or queries travel."""
    found = []
    for line in _lines("context_parallel_ttft_pass_kv_pass_q"):
        new, cached = int(line["new_tokens"]), int(line["cached_tokens"])
        doubt = _STRANGE if new in (4160, 6400) else ""
        for algorithm in PASS:
            seconds = float(line[f"{algorithm}_ttft_ms"]) / 1e3
            found.append(_turn_case("table 4", Plan(ring=RING, tensor=TENSOR), new, cached, algorithm, seconds, doubt))
    return tuple(found)


def _turn_case(source: str, plan: Plan, new: int, cached: int, algorithm: str, seconds: float, doubt: str = "") -> Case:
    def predicted(trial: Hardware, bound: bool) -> Prediction:
        cluster = Cluster(trial, plan.world // TENSOR, TENSOR)
        sizes = {"new": new, "cached": cached, "algorithm": algorithm}
        return predict_turn(model("llama3_405b"), plan, cluster, **sizes, bound=bound)[0]

    what = f"CP{plan.ring} TP{plan.tensor}", f"{new:,}", f"{cached:,}", algorithm
    return Case("h100_96gb", source, what, seconds, predicted, doubt=doubt, about=(new, cached, algorithm))


@cache
def turn_differences() -> tuple[Case, ...]:
    """By how much queries travel faster than keys, where hops are not hidden: all that tells how far they hide."""
    found = []
    for keys, queries in zip(turns()[::2], turns()[1::2], strict=True):
        if queries.measured_s < keys.measured_s and not keys.doubt:

            def predicted(trial: Hardware, bound: bool, keys=keys, queries=queries) -> Prediction:
                both = [case.predict(trial, bound) for case in (keys, queries)]
                return replace(both[0], seconds=max(both[0].seconds - both[1].seconds, 1e-9), parts={})

            what = (*keys.what[:3], "pass_kv - pass_q")
            saved_s = keys.measured_s - queries.measured_s
            found.append(Case("h100_96gb", "table 4", what, saved_s, predicted, about=(*keys.about[:2], "")))
    return tuple(found)


@cache
def whole_prompts() -> tuple[Case, ...]:
    """Tables 6 and 7: prefill of a prompt."""
    return tuple(
        _turn_case(*of, int(line["context"]), 0, "pass_kv", float(line["ttft_ms"]) / 1e3) for of, line in _prompts()
    )


@cache
def decode_steps() -> tuple[Case, ...]:
    """Tables 6 and 7: a token of one sequence, with the MLPs' matrices in FP8 as there."""
    found = []
    for (source, plan), line in _prompts():
        context = int(line["context"])

        def predicted(trial: Hardware, bound: bool, plan=plan, context=context) -> Prediction:
            cluster = Cluster(trial, plan.world // TENSOR, TENSOR)
            shape = model("llama3_405b")
            sizes = {"seq": context, "batch": 1, "phase": "decode"}
            whole = predict_model(shape, replace(plan, algorithm="pass_q"), cluster, **sizes, bound=bound)
            narrow_bytes = shape.layers * shape.expert_params / plan.tensor  # one less for each
            weights_s = whole.parts["weights"] - narrow_bytes / trial["memory_bytes_per_s"]
            parts = {**whole.parts, "weights": weights_s}
            return replace(whole, parts=parts, seconds=sum(parts.values()))

        what = f"CP{plan.ring} TP{plan.tensor}", f"{context:,}"
        doubt = "two tables disagree: 66.63 and 60.23 ms" if plan.ring == 2 and context == 131072 else ""
        seconds = float(line["ttit_ms"]) / 1e3
        found.append(Case("h100_96gb", source, what, seconds, predicted, doubt=doubt, about=(plan, context)))
    return tuple(found)


def _prompts() -> list[tuple[tuple[str, Plan], dict[str, str]]]:
    """Of tables 6 and 7, each once."""
    found = {}
    for line in _lines("context_parallel_ttft_ttit"):
        degrees = dict.fromkeys(("CP", "TP"), 1) | {part[:2]: int(part[2:]) for part in line["config"].split("+")}
        plan = Plan(ring=degrees["CP"], tensor=degrees["TP"])
        found.setdefault((plan, line["context"], line["ttit_ms"]), ((f"table {line['source_table']}", plan), line))
    return list(found.values())


@cache
def ring_steps() -> dict[str, float]:
    """Table 5: microseconds of one ring step, as rates and latencies; lines through the smallest and largest size."""
    hops, exchanges, rates = [], [], []
    shape = model("llama3_405b")
    queries, keys, dim = shape.heads // TENSOR, shape.kv_heads // TENSOR, shape.head_dim
    for line in _lines("context_parallel_ring_step_us"):
        new = round(float(line["miss_rate"]) * WINDOW)
        pairs = new * (WINDOW - new) + new * (new + 1) / 2
        rates.append(4 * pairs * queries * dim / RING**2 / (float(line["attention_us"]) * 1e-6))
        sent = {"pass_kv": WINDOW / RING * keys * 2 * dim * 2, "pass_q": new / RING * queries * dim * 2}
        hops.append((sent[line["algorithm"]], float(line["send_recv_us"]) * 1e-6))
        if line["all_to_all_us"]:
            partials = (RING - 1) * new / RING * queries * (2 * dim + 4)
            exchanges.append((partials, float(line["all_to_all_us"]) * 1e-6))
    found = {"attention_flops_per_s": sum(rates) / len(rates)}
    for name, points in (("network_hop", hops), ("network_all_to_all", exchanges)):
        small, large = min(points), max(points)
        found[f"{name}_bytes_per_s"] = (large[0] - small[0]) / (large[1] - small[1])
        found[f"{name}_s"] = small[1] - small[0] / found[f"{name}_bytes_per_s"]
    return found
