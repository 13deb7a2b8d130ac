"""The cost model: counts equal what ranks count, numbers of models and hardware, time played through, plans."""

from __future__ import annotations

import csv
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
import torch

import usp
from tests import hybrid, pool
from tests.hybrid import Case
from usp import Mask, Region
from usp.blocks import ring_order, schedule
from usp.cost import (
    Cluster,
    Constant,
    Hardware,
    Model,
    Plan,
    Workload,
    cluster,
    flops,
    hardware,
    known_hardware,
    memory,
    model,
    models,
    plan,
    plan_attention,
    predict,
    predict_model,
    predict_turn,
    read_hardware,
    simulate,
    step_flops,
    traffic,
)
from usp.cost.counts import most_sent
from usp.cost.placement import groups
from usp.cost.timing import CALIBRATED, EXTRAPOLATED, LOWER_BOUND, Constants, ring_pass
from usp.cost.workload import plain_yaml
from usp.inference.volumes import DECODE, exposed
from usp.mesh import axes

ROOT = Path(__file__).parent.parent
CAUSAL = Mask(causal=True)

# ---------------------------------------------------------------------------------------------------
# Counts.


def cases_on(ring: int, ulysses: int) -> list[Case]:
    """Layouts, masks, heads and options in turns; rows that see other things; KV heads that are on two ranks."""
    sizes = [(2 * ulysses, ulysses), (3 * ulysses + 3, ulysses + 1)]
    options = [(), (("exchange", "all_gather"),)]
    masks = [
        CAUSAL,
        Mask(False, 9),
        Mask.packed([20, 4, 24], causal=True),
        Mask(True, documents=[[(0, 30)], [(4, 20), (20, 48)]]),
    ]
    found = []
    for a, layout in enumerate(("contiguous", "zigzag", "striped")):
        for b, mask in enumerate(masks):
            heads, dtype = sizes[(a + b) % 2], (torch.float32, torch.bfloat16, torch.float64)[(a + b) % 3]
            found.append(Case(ring, ulysses, layout, 48, mask, *heads, 8, 4, 2, dtype, options=options[b // 3]))
    if ulysses > 1:
        replicated = (("replicate_kv", True),)
        found.append(Case(ring, ulysses, "zigzag", 48, CAUSAL, 2 * ulysses, ulysses // 2, 8, 4, options=replicated))
    return found


@pytest.mark.parametrize(("ring", "ulysses"), [(4, 1), (1, 4), (2, 2), (2, 3), (3, 2)])
def test_predicted_traffic_is_counted_traffic(ranks, ring, ulysses):
    """Bytes and messages of every rank and kind, forward and backward."""
    for case in cases_on(ring, ulysses):
        options = dict(case.options)
        sizes = {key: getattr(case, key) for key in ("batch", "seq", "heads", "kv_heads", "head_dim", "head_dim_v")}
        call = Workload(mask=case.mask, element_bytes=case.dtype.itemsize, **sizes)
        how = Plan(ring, ulysses, layout=case.layout, **options)
        predicted = traffic(call, how, backward=True, lse=True)
        for backward in (False, True):
            sums = [sum(size for size, _ in x.values()) for x in traffic(call, how, backward=backward)]
            assert most_sent(call, how, backward=backward) == max(sums)
        for (rank, u), counted in ranks(ring * ulysses)(_counted, case):
            assert counted == predicted[rank * ulysses + u], case


def _counted(case: Case) -> tuple[tuple[int, int], dict[str, tuple[int, int]]]:
    with usp.measure_traffic() as sent, pool.one_rank_checks_types():
        hybrid.run(case)
    ring, ulysses = axes(case.mesh())
    kinds = [kind for kind in sent.bytes if kind != "control"]
    return (ring.rank, ulysses.rank), {kind: (sent.bytes[kind], sent.messages[kind]) for kind in kinds}


def test_forward_alone_sends_less():
    call = Workload(1, 64, 4, 2, 8, CAUSAL)
    forward, both = (traffic(call, Plan(4), backward=backward)[0] for backward in (False, True))
    assert forward == {"ring": ((8 + 2 * 16) * 2 * 16 * 2, 3)}  # rank 0's first half, and two shards that pass through
    assert both["ring"] == tuple(2 * x for x in forward["ring"])
    assert both["ring_grad"] == (3 * 16 * 2 * 16 * 4, 3)  # of three whole shards that it computed with


def test_flops_are_of_visible_pairs():
    """Causal: S (S + 1) / 2 pairs a head, wherever they are; backward 2.5 times as much."""
    pairs = 1024 * 1025 // 2
    for how in (Plan(), Plan(4), Plan(2, 2, layout="striped"), Plan(1, 4), Plan(4, 2, layout="contiguous")):
        for kv_heads in (8, 1):
            call = Workload(2, 1024, 8, kv_heads, 64, CAUSAL)
            found = flops(call, replace(how, replicate_kv=True))
            assert len(found) == how.ring * how.ulysses
            assert sum(found) == 4 * pairs * 2 * 8 * 64
            both = flops(call, replace(how, replicate_kv=True), backward=True)
            assert [2 * x for x in both] == [7 * x for x in found]
    narrow = Workload(1, 8, 1, 1, 6, Mask(causal=False), head_dim_v=2)
    assert flops(narrow, Plan()) == (2 * 64 * 8,)
    assert flops(narrow, Plan(), backward=True) == (2 * 64 * 8 + 2 * 64 * (18 + 4),)


def test_steps_of_a_ring():
    """Contiguous: a causal square, then whole shards, or nothing. Zigzag: half of that in every step but the first."""
    call, square, whole = Workload(1, 64, 2, 2, 4, CAUSAL), 4 * 2 * 4 * 136, 4 * 2 * 4 * 256
    assert step_flops(call, Plan(4, layout="contiguous")) == tuple(
        (square, *(whole if step <= rank else 0 for step in range(1, 4))) for rank in range(4)
    )
    assert step_flops(call, Plan(4)) == ((square, *[whole // 2] * 3),) * 4
    halves = step_flops(call, Plan(2, 2, layout="striped"), backward=True)
    assert tuple(map(sum, halves)) == flops(call, Plan(2, 2, layout="striped"), backward=True)


def test_zigzag_balances_and_contiguous_does_not():
    """In blocks of S/N x S/N, a token's own key counted half: N - 1/2 of the fullest rank against N/2 of each."""
    for ring in (2, 8, 16):
        call = Workload(1, 64 * ring, 1, 1, 1, CAUSAL)
        own = Fraction(call.seq // ring, 2)
        worst = {
            layout: max(Fraction(x, 4) - own for x in flops(call, Plan(ring, layout=layout)))
            for layout in ("contiguous", "zigzag")
        }
        assert worst["contiguous"] / worst["zigzag"] == Fraction(2 * ring - 1, ring)


# ---------------------------------------------------------------------------------------------------
# Models and hardware.


def test_sizes_of_models():
    big = model("llama3_70b")
    assert big.layer_params == 855_638_016
    assert big.params == 70_553_706_496
    assert big.kv_bytes(10**6) == 327_680_000_000
    assert big.linear_flops(10**6) == 136_902_082_560_000_000
    assert model("llama3_8b").params == 8_030_261_248
    assert model("smollm2_135m").params == 134_515_008
    assert model("llama2_7b").params == 6_738_415_616
    assert abs(model("llama3_405b").params / 405.85e9 - 1) < 1e-4
    mixture = model("qwen3_235b_a22b")
    assert abs(mixture.params / 235.09e9 - 1) < 1e-3
    assert mixture.active_params < mixture.layer_params / 10
    assert all(model(name).name == name for name in models())


def test_models_of_configurations():
    """What transformers writes in a config.json."""
    config = {
        "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
    }  # fmt: skip
    assert Model.from_config(config, "smollm2_135m") == model("smollm2_135m")
    windowed = config | {"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 15}
    found = Model.from_config(windowed)
    assert found.windows[:2] == (128, None)
    assert found.masks(CAUSAL) == {Mask(True, 128): 15, CAUSAL: 15}
    narrow = Mask(True, 64, documents=[[(0, 500)]], regions=[[Region((0, 9), (0, 9))]])
    assert found.masks(narrow) == {narrow: 30}  # the narrower of two windows, and nothing else of a mask is lost
    assert found.masks(replace(narrow, window=999)) == {replace(narrow, window=w): 15 for w in (128, 999)}
    mixture = Model.from_config(config | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 100})
    assert (mixture.experts, mixture.experts_per_token, mixture.intermediate) == (8, 2, 100)
    assert Model.from_config({"text_config": config}).layers == 30

    class Config:  # as transformers' classes are: the type is not among what an object holds
        model_type = "gpt_neox"

        def to_dict(self) -> dict:
            return config | {"model_type": self.model_type}

    assert not Model.from_config(Config()).gated
    assert Model.from_config(Config()) == Model.from_config(Config().to_dict())
    gemma = config | {"model_type": "gemma2", "sliding_window": 64}
    del gemma["tie_word_embeddings"]  # as its files are written
    assert Model.from_config(gemma).windows == (64, None) * 15
    assert Model.from_config(gemma).tied
    assert not Model.from_config(config | {"sliding_window": 64, "use_sliding_window": False}).windows
    for more in (
        {"n_routed_experts": 8},
        {"mamba_d_state": 16},
        {"layer_types": ["linear_attention"] * 30},
        {"is_encoder_decoder": True},
    ):
        with pytest.raises(ValueError, match=f"{next(iter(more))}|linear_attention"):
            Model.from_config(config | more)
    with pytest.raises(ValueError, match=r"without vocab_size: .*usp.cost.Model"):
        Model.from_config({key: value for key, value in config.items() if key != "vocab_size"})
    with pytest.raises(ValueError, match=r"kv_lora_rank=512: the cost model knows decoders"):
        Model.from_config(config | {"kv_lora_rank": 512})


TYPES = (
    *(
        "apertus",
        "arcee",
        "cohere2",
        "exaone4",
        "gemma",
        "gemma2",
        "gemma3_text",
        "glm4",
        "gpt2",
        "gpt_neox",
        "gpt_oss",
    ),
    *("granite", "llama", "mistral", "mixtral", "olmo2", "olmo3", "opt", "phi", "phi3", "qwen2", "qwen3", "qwen3_moe"),
    *("smollm3", "stablelm", "starcoder2"),
)


@pytest.mark.hf
@pytest.mark.parametrize("kind", TYPES)
def test_configurations_of_transformers(kind):
    """As many parameters as the model of the type's own configuration has, but for biases and more norms."""
    transformers = pytest.importorskip("transformers", reason="make hf installs it")
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {kind}")
    config = transformers.CONFIG_MAPPING[kind]()
    with torch.device("meta"):
        made = transformers.AutoModelForCausalLM.from_config(config)
    count = sum(x.numel() for x in {id(x): x for x in made.parameters()}.values())
    assert Model.from_config(config).params == pytest.approx(count, rel=0.02)
    assert Model.from_config(config) == Model.from_config(config.to_dict())


@pytest.mark.hf
@pytest.mark.parametrize(
    "kind", ["bert", "deepseek_v3", "gemma3n_text", "glm4_moe", "jamba", "llama4_text", "mamba", "t5"]
)
def test_other_configurations_of_transformers(kind):
    transformers = pytest.importorskip("transformers", reason="make hf installs it")
    with pytest.raises(ValueError, match=r"the cost model knows decoders of like layers|whole number"):
        Model.from_config(transformers.CONFIG_MAPPING[kind]())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: model("llama9"), r"model='llama9' is not one of .*llama3_70b.*from_config"),
        (lambda: cluster("a100_80gb"), r"cluster='a100_80gb' is not <hardware>_<nodes>x<ranks a node>"),
        (lambda: cluster("tpu_1x8"), r"hardware 'tpu' is not one of .*a100_80gb.*read_hardware"),
        (lambda: cluster("a100_80gb_0x8"), r"nodes=0 is not a whole number"),
        (lambda: Workload(1, 0, 4, 4, 8, CAUSAL), r"seq=0 is not a whole number of at least 1"),
        (lambda: Plan(0), r"ring=0 is not a whole number"),
        (lambda: Plan(layout="zagzig"), r"layout='zagzig' is not one of .*zigzag"),
        (lambda: Plan(weights="some"), r"weights='some' is not one of .*fsdp"),
        (lambda: Plan(exchange="post"), r"exchange='post' is not one of"),
        (lambda: Plan(inner="data"), r"inner='data' is not one of \['ulysses', 'ring'\]"),
        (lambda: replace(model("llama3_8b"), kv_heads=5), r"5 KV heads do not divide 32"),
        (lambda: replace(model("llama3_8b"), windows=(4,)), r"1 windows for 32 layers"),
        (lambda: replace(model("llama3_8b"), experts=4), r"0 experts a token of 4"),
        (lambda: replace(model("llama3_8b"), layers=0), r"layers=0 is not a whole number"),
        (lambda: hardware("a100_80gb")["call_h"], r"has no call_h"),
        (lambda: Plan(True), r"ring=True is not a whole number"),
        (lambda: Plan("2"), r"ring='2' is not a whole number"),
        (lambda: Plan(tile_mlp=0), r"tile_mlp=0 is not a whole number"),
        (lambda: Plan(algorithm="foo"), r"algorithm='foo' is not one of .*helix"),
        (lambda: Plan(checkpoint="no"), r"checkpoint='no' is not one of"),
        (lambda: Workload(2, 64, 4, 4, 8, Mask(True, documents=[[(0, 8)]] * 3)), r"tells 3 batch rows .*batch=2"),
        (lambda: replace(model("llama3_8b"), windows=(0, *[None] * 31)), r"windows\[0\]=0 is not"),
        (lambda: Cluster(hardware("a100_80gb"), 1.5, 8), r"nodes=1.5 is not a whole number"),
        (lambda: plan(model("llama3_8b"), cluster("a100_80gb_1x8"), 2.5, 1, "train"), r"seq=2.5 is not"),
        (lambda: attention_choices(layouts=()), r"layouts=\(\): give at least one of .*zigzag"),
        (lambda: attention_choices(layouts=("zagzig",)), r"layout='zagzig' is not one of .*zigzag"),
        (lambda: attention_choices(kv_heads=3), r"8 query heads and 3 KV heads"),
        (lambda: turn(Plan(1000)), r"1000 ranks on"),
        (lambda: turn(new=0), r"new=0 is not a whole number"),
        (lambda: turn(cached=-99), r"cached=-99 is not a whole number of at least 0"),
        (lambda: turn(Plan(weights="fsdp")), r"weights='fsdp', .*turns are predicted for"),
        (lambda: plan(model("llama3_8b"), cluster("a100_80gb_1x8"), 8, 1, "rest"), r"phase='rest' is not one of"),
        (lambda: plan(model("llama3_8b"), cluster("a100_80gb_1x8"), 0, 1, "train"), r"seq=0 is not a whole number"),
        (lambda: predict(Workload(1, 64, 4, 4, 8, CAUSAL), Plan(9), cluster("a100_80gb_1x8")), r"9 ranks on .*has 8"),
        (lambda: predict(Workload(1, 64, 4, 2, 8, CAUSAL), Plan(1, 4), cluster("a100_80gb_1x8")), r"largest Ulysses"),
        (
            lambda: predict_model(
                model("llama3_8b"), Plan(tensor=3), cluster("a100_80gb_1x8"), seq=64, batch=1, phase="prefill"
            ),
            r"tensor=3 ranks do not divide 32",
        ),
        (
            lambda: predict_turn(model("llama3_8b"), Plan(2), cluster("a100_80gb_1x8"), new=8, cached=8, algorithm="x"),
            r"algorithm='x' is not 'auto' or one of .*pass_kv",
        ),
    ],
)  # fmt: skip
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def attention_choices(layouts=("contiguous",), **changes):
    return plan_attention(replace(Workload(1, 64, 8, 4, 8, CAUSAL), **changes), Cluster(made(), 2, 2), layouts=layouts)


def turn(how: Plan = Plan(2), **changes):  # noqa: B008
    sizes = {"new": 8, "cached": 8} | changes
    return predict_turn(model("llama3_8b"), how, cluster("a100_80gb_1x8"), **sizes)


def test_hardware_says_where_its_numbers_come_from():
    for name in known_hardware():
        one = hardware(name)
        assert {"peak_flops_per_s", "memory_bytes", "memory_bytes_per_s", "link_bytes_per_s"} <= one.constants.keys()
        for constant in one.constants.values():
            assert len(constant.source) > 3
            assert "://" not in constant.source
    good = {"value": 1.0, "unit": "s", "kind": "measured", "source": "a test"}
    for change, message in (
        ({"unit": "ms"}, "call_s in ms"),
        ({"kind": "guessed"}, "needs a source and a kind"),
        ({"source": ""}, "needs a source and a kind"),
        ({"value": -1.0}, "call_s=-1.0 is not above 0"),
        ({"value": "1"}, "call_s=1 is not above 0"),
        ({"value": {"8": 1.0}}, "call_s=.*tables by size"),
    ):
        with pytest.raises(ValueError, match=message):
            Hardware("x", "X", {"call_s": Constant(**good | change)})
    with pytest.raises(ValueError, match=r"overlap=1.8 is not from 0 to 1"):
        made(overlap=1.8)
    with pytest.raises(ValueError, match=r"network_adapters=0.5 is not from 1 "):
        made(network_adapters=0.5)
    with pytest.raises(ValueError, match=r"covers seq=\[1\]"):
        made(covers={"seq": [1]})
    with pytest.raises(ValueError, match="calls_s"):
        Hardware("x", "X", {"calls_s": Constant(**good)})


def test_tables_are_interpolated_and_say_so():
    one = made(attention_flops_per_s={"32": 1e12, "128": 4e12})
    assert one.at("attention_flops_per_s", 32) == (1e12, True)
    assert one.at("attention_flops_per_s", 64) == (pytest.approx(2e12), False)
    assert one.at("attention_flops_per_s", 256) == (4e12, False)
    assert one.at("attention_flops_per_s", 16) == (1e12, False)


def test_a_file_of_ones_own(tmp_path):
    path = tmp_path / "mine.yaml"
    lines = [f"{key}: {json.dumps(vars(x))}" for key, x in made().constants.items()]
    path.write_text("\n".join(['title: "Mine"', 'covers: {"seq": [1, 9]}', "# a comment", *lines]))
    assert read_hardware(path) == replace(made(covers={"seq": [1, 9]}), name="mine", title="Mine")
    path.write_text('call_s: {"value": 1.0, "unit": "s"}')
    with pytest.raises(ValueError, match=r"mine.yaml: call_s is .* not a mapping with kind, source, unit, value"):
        read_hardware(path)
    for line in ("call_s 3", "call_s: three", " call_s: 3"):
        with pytest.raises(ValueError, match=r"line 1, .*is not `key: value`"):
            plain_yaml(line)


UNITS = {
    "_bytes_per_s": "B/s",
    "_flops_per_s": "FLOP/s",
    "_bytes": "B",
    "_s": "s",
    "overlap": "1",
    "node_ranks": "ranks",
    "network_adapters": "adapters",
}


def made(covers=None, **constants) -> Hardware:
    """Round numbers: 1 TFLOP/s, 1 GB/s inside, 0.1 GB/s across, memory that is never in the way."""
    usual = {
        "peak_flops_per_s": 1e12,
        "memory_bytes": 1e12,
        "memory_bytes_per_s": 1e15,
        "link_bytes_per_s": 1e9,
        "network_bytes_per_s": 1e8,
    }
    found = {
        name: Constant(value, next(unit for end, unit in UNITS.items() if name.endswith(end)), "measured", "a test")
        for name, value in (usual | constants).items()
    }
    return Hardware("made", "Made", found, covers or {})


# ---------------------------------------------------------------------------------------------------
# Time.


def dense(ring: int):
    return schedule([[True] * ring] * ring, ring_order(ring))


def test_a_hop_begins_when_both_ends_have_begun():
    """Rank 1 is late with its first step; what goes to it and from it is late too."""
    work = [dict.fromkeys(range(3), 1.0) for _ in range(3)]
    work[1][1] = 5.0
    assert simulate(dense(3), work, lambda *_: 2.0).end_s == (8.0, 8.0, 8.0)


def test_a_ring_takes_the_longer_of_computing_and_sending():
    even = [dict.fromkeys(range(4), 2.0)] * 4
    assert simulate(dense(4), even, lambda *_: 1.0).total_s == 8.0
    slow = simulate(dense(4), even, lambda *_: 3.0)
    assert (slow.total_s, slow.exposed_s) == (3 * 3.0 + 2.0, 3.0)
    assert simulate(dense(4), even, lambda *_: 1.0, overlap=0.0).total_s == 3 * 3.0 + 2.0
    assert simulate(dense(4), even, lambda *_: 1.0, overlap=0.5).total_s == 3 * 2.5 + 2.0


def test_a_busy_rank_holds_up_its_neighbours():
    """The causal ring of contiguous shards: the last rank computes in all steps, and is done last."""
    found = simulate(
        dense(4), [dict.fromkeys(range(rank + 1), 1.0) for rank in range(4)], lambda *_: 0.25, moments=True
    )
    assert found.compute_s == (1.0, 2.0, 3.0, 4.0)
    assert found.total_s == 4.0
    assert found.end_s[0] < 4.0
    idle = [x for x in found.moments if x.rank == 0 and x.source not in (0, None)]
    assert all(x.computed_s == x.begin_s for x in idle)
    lumpy = simulate(dense(2), [{0: 1.0, 1: 5.0}, {0: 1.0, 1: 5.0}], lambda *_: 0.0)
    assert lumpy.total_s == 6.0
    assert lumpy.exposed_s == 0.0
    crossed = simulate(dense(2), [{0: 5.0, 1: 1.0}, {0: 5.0, 1: 1.0}], lambda *_: 0.0)  # rank 1 begins with 1
    assert crossed.total_s == 6.0 + 4.0 - 4.0


def test_gradients_go_home_after_the_last_step():
    """Each hop of a key's gradient is a step behind its key; the last one hides behind nothing."""
    even = [dict.fromkeys(range(3), 2.0)] * 3

    def seconds(source: int, gradient: bool, crossing: int) -> float:
        return 1.0 if gradient else 0.0

    assert simulate(dense(3), even, seconds, backward=True).total_s == 7.0
    assert simulate(dense(3), even, seconds).total_s == 6.0


def test_ranks_of_a_node_share_what_leaves_it():
    """Four ring ranks on two nodes: in each step one hop of each node crosses."""
    seen = []

    def seconds(source: int, gradient: bool, crossing: int) -> float:
        seen.append(crossing)
        return 0.0

    simulate(dense(4), [{}] * 4, seconds, node_of=lambda rank: rank // 2)
    assert sorted(seen) == [0] * 6 + [1] * 6
    seen.clear()
    simulate(dense(4), [{}] * 4, seconds, node_of=lambda rank: rank % 2)
    assert seen == [2] * 12
    seen.clear()  # a rank that sends a key and a gradient has one adapter for both, and sends them one after another
    simulate(dense(4), [{}] * 4, seconds, node_of=lambda rank: rank % 2, backward=True)
    assert set(seen) == {2}
    seen.clear()  # two rings lie so, and a third sends from the second node to a third one
    rings = {(0, 0, 1, 1): 2, (1, 1, 2, 2): 1}
    simulate(dense(4), [{}] * 4, seconds, node_of=lambda rank: rank // 2, rings=rings)
    assert sorted(seen) == [0] * 6 + [2] * 3 + [3] * 3
    with pytest.raises(ValueError, match=r"on nodes \(0, 1, 0, 1\), among them"):
        simulate(dense(4), [{}] * 4, seconds, node_of=lambda rank: rank % 2, rings=rings)


def test_a_call_of_round_numbers():
    """4 x 250 tokens, full: hops are longer than kernels, and ten times as long from node to node."""
    call = Workload(1, 1000, 10, 10, 64, Mask(causal=False), element_bytes=2)
    inside = predict(call, Plan(4, layout="contiguous"), Cluster(made(), 1, 4), bound=True)
    step_s, hop_s = 4 * 250 * 250 * 10 * 64 / 1e12, 250 * 2 * 10 * 64 * 2 / 1e9
    assert hop_s > step_s
    assert inside.seconds == pytest.approx(3 * hop_s + step_s)
    assert inside.parts["ring"] == pytest.approx(3 * (hop_s - step_s))
    assert (inside.regime, inside.basis) == ("link", LOWER_BOUND)
    across = predict(call, Plan(4, layout="contiguous"), Cluster(made(), 4, 1), bound=True)
    assert across.seconds == pytest.approx(3 * 10 * hop_s + step_s)
    ulysses = predict(replace(call, heads=8, kv_heads=8), Plan(1, 4), Cluster(made(), 1, 4), bound=True)
    assert ulysses.parts["all_to_all"] == pytest.approx(3 / 4 * 250 * 8 * 64 * 4 * 2 / 1e9)
    both = predict(call, Plan(4, layout="contiguous"), Cluster(made(), 1, 4), bound=True, backward=True)
    backward_s = 3 * hop_s + 3 * 2 * hop_s + 2.5 * step_s  # keys; gradients in float32, a step behind, the last alone
    assert both.seconds == pytest.approx(inside.seconds + backward_s, rel=0.05)
    apart = predict(call, Plan(4, layout="contiguous"), Cluster(made(), 2, 2), bound=True, backward=True)
    alone = predict(call, Plan(4, layout="contiguous"), Cluster(made(), 4, 1), bound=True, backward=True)
    assert both.seconds < apart.seconds <= alone.seconds


def test_a_hybrid_ring_shares_the_adapters_of_a_node():
    """Ulysses 4 inside each of two nodes: all four ranks of a node send at once, each by its own adapter. The same ring
    with the ranks of one node side by side crosses once a step, and is as fast as its slowest hop."""
    call = Workload(1, 4096, 8, 8, 64, Mask(causal=False))
    how = Plan(2, 4, layout="contiguous")
    constants = Constants(Cluster(made(), 2, 4), bound=True)
    timeline, _ = ring_pass(call, how, constants, backward=False)
    hop_s = 2048 * 2 * 2 * 64 * 2 / 1e8
    assert timeline.total_s == pytest.approx(hop_s + timeline.compute_s[0] / 2)


@pytest.mark.parametrize("per_node", [1, 3, 4, 8])
@pytest.mark.parametrize("inner", ["ulysses", "ring"])
def test_every_rank_is_on_its_node(inner, per_node):
    """As `usp.init_mesh` numbers ranks; tensor ranks are innermost of all."""
    how = Plan(3, 4, 2, 2, inner=inner)

    def node(data: int, rank: int, u: int, tensor: int) -> int:
        within = u * 3 + rank if inner == "ring" else rank * 4 + u
        return ((data * 12 + within) * 2 + tensor) // per_node

    rings = [tuple(node(d, r, u, t) for r in range(3)) for d in range(2) for u in range(4) for t in range(2)]
    assert sorted(groups(3, how.ring_stride, how.world, per_node)) == sorted(rings)
    exchanges = [tuple(node(d, r, u, t) for u in range(4)) for d in range(2) for r in range(3) for t in range(2)]
    assert sorted(groups(4, how.ulysses_stride, how.world, per_node)) == sorted(exchanges)


def test_the_inner_axis_stays_in_a_node():
    """Two nodes of two ranks: hops of rings inside and exchanges across, ten times as slow, or the other way round."""
    call, place = Workload(1, 1000, 8, 8, 64, Mask(causal=False)), Cluster(made(), 2, 2)
    hop_s, exchange_s = 500 * 4 * 2 * 64 * 2 / 1e9, 250 * 4 * 4 * 64 * 2 / 1e9
    for exchange in ("ring", "all_gather"):
        for inner, times in (("ulysses", (10, 1)), ("ring", (1, 10))):
            how = Plan(2, 2, inner=inner, layout="contiguous", exchange=exchange)
            found = predict(call, how, place, bound=True)
            kernels_s = found.parts["attention"]
            sent_s = found.seconds - kernels_s - found.parts["all_to_all"] + kernels_s / 2 * (exchange == "ring")
            assert sent_s == pytest.approx(times[0] * hop_s)
            assert found.parts["all_to_all"] == pytest.approx(times[1] * exchange_s)


def test_the_inner_axis_of_a_step_and_of_a_turn():
    """Partials and out of a step go over the ring axis, then out over the Ulysses axis."""
    shape = replace(model("llama3_8b"), layers=1)
    sizes = {"seq": 1000, "batch": 16, "phase": "decode", "bound": True}
    near, ring, ulysses = (
        predict_model(shape, Plan(2, 2, algorithm="helix", inner=inner), Cluster(made(), *nodes), **sizes).parts[
            "partials"
        ]
        for inner, nodes in (("ring", (1, 4)), ("ring", (2, 2)), ("ulysses", (2, 2)))
    )
    over_ring_s = 16 * 8 * (128 * 2 + 4 + 128 * 2) / 1e9  # of half of a Ulysses rank's heads
    assert near == pytest.approx(over_ring_s + 16 * 16 * 128 * 2 / 1e9)
    assert ring == pytest.approx(near + 9 * (near - over_ring_s))
    assert ulysses == pytest.approx(near + 9 * over_ring_s)
    turns = {
        (inner, nodes): predict_turn(
            shape,
            Plan(2, 2, inner=inner),
            Cluster(made(), *nodes),
            new=100,
            cached=1000,
            algorithm="all_gather",
            bound=True,
        )[0].parts
        for inner in ("ring", "ulysses")
        for nodes in ((1, 4), (2, 2))
    }
    assert turns["ring", (1, 4)] == turns["ulysses", (1, 4)]
    for inner, slow, same in (("ring", "all_to_all", "ring"), ("ulysses", "ring", "all_to_all")):
        assert turns[inner, (2, 2)][slow] == pytest.approx(10 * turns[inner, (1, 4)][slow])
        assert turns[inner, (2, 2)][same] == turns[inner, (1, 4)][same]


def test_the_inner_axis_is_nothing_to_a_single_node_or_axis():
    shape = model("llama3_8b")
    for degrees, nodes in (((2, 4), (1, 8)), ((8, 1), (2, 4)), ((1, 8), (4, 2)), ((2, 4), (8, 1))):
        for phase in ("prefill", "train", "decode"):
            one, other = (
                predict_model(
                    shape, Plan(*degrees, inner=inner, weights="fsdp"), Cluster(hardware("a100_80gb"), *nodes),
                    seq=65536, batch=1, phase=phase,
                )
                for inner in ("ulysses", "ring")
            )  # fmt: skip
            assert one == other, (degrees, nodes, phase)
    call = Workload(1, 64, 8, 4, 16, CAUSAL)
    assert traffic(call, Plan(2, 4, inner="ring")) == traffic(call, Plan(2, 4))  # by the same order of ranks


def shared(adapters: int | None, nodes: int, per_node: int, **constants) -> Cluster:
    """Nodes with so many adapters; None: the hardware does not say."""
    return Cluster(made(**constants, **{} if adapters is None else {"network_adapters": adapters}), nodes, per_node)


@pytest.mark.parametrize(("adapters", "times"), [(None, 1), (4, 1), (2, 1), (1, 2)])
def test_hops_share_the_adapters_of_a_node(adapters, times):
    """Two nodes of two ranks. Both rings cross at once, or one ring does, which has an adapter to itself."""
    call, place = Workload(1, 1000, 8, 8, 64, Mask(causal=False)), shared(adapters, 2, 2)
    hop_s = 500 * 4 * 2 * 64 * 2 / 1e8
    timeline, _ = ring_pass(call, Plan(2, 2, layout="contiguous"), Constants(place, bound=True), backward=False)
    assert timeline.total_s == pytest.approx(times * hop_s + timeline.compute_s[0] / 2)
    timeline, _ = ring_pass(call, Plan(4, layout="contiguous"), Constants(place, bound=True), backward=False)
    assert timeline.total_s == pytest.approx(3 * hop_s + timeline.compute_s[0] / 4)


@pytest.mark.parametrize("how", [Plan(3, 2, inner="ring"), Plan(3, data=2), Plan(3, tensor=2)])
@pytest.mark.parametrize(("adapters", "times"), [(None, 1), (1, 2)])
def test_rings_beside_share_the_adapters_of_a_node(how, adapters, times):
    """Three nodes of two ranks: one has the end of a ring and the start of another, or all have ranks of two rings."""
    call = Workload(1, 1200, 8, 8, 64, Mask(causal=False))
    constants = Constants(shared(adapters, 3, 2), bound=True)
    timeline, _ = ring_pass(call, replace(how, layout="contiguous"), constants, backward=False)
    hop_s = 400 * 8 / how.ulysses * 2 * 64 * 2 / 1e8
    assert timeline.total_s == pytest.approx(2 * times * hop_s + timeline.compute_s[0] / 3)


def test_exchanges_share_the_adapters_of_a_node():
    """Bytes that all ranks of a node send out, over its adapters; a fitted rate is that of a rank as it is."""
    call = Workload(1, 1000, 8, 8, 64, Mask(causal=False))
    rank_bytes = 250 * 8 * 4 * 64 * 2  # q, k, v and out of a rank's tokens
    for adapters, messages in ((None, 2), (2, 2), (1, 4)):  # of a rank 2 of 3 leave, of its node 4
        found = predict(call, Plan(1, 4), shared(adapters, 2, 2), bound=True).parts["all_to_all"]
        assert found == pytest.approx(rank_bytes / 4 * (1 / 1e9 + messages / 1e8))
    for adapters, messages in ((None, 1), (2, 1), (1, 2)):
        found = predict(call, Plan(2, 2, inner="ring"), shared(adapters, 2, 2), bound=True).parts["all_to_all"]
        assert found == pytest.approx(rank_bytes / 2 * messages / 1e8)
    one, two = (
        predict(call, Plan(1, 4), shared(adapters, 2, 2, network_all_to_all_bytes_per_s=5e7)) for adapters in (1, 2)
    )
    assert one.parts["all_to_all"] == two.parts["all_to_all"] > rank_bytes / 2 / 5e7


def test_collectives_share_the_adapters_of_a_node():
    """8e8 bytes of eight ranks on two nodes: one group, whose bytes come in once, or four groups of two."""
    for adapters, one_s, four_s in ((None, 1.75, 4), (4, 1.75, 4), (2, 3.5, 8), (1, 7, 16)):
        constants = Constants(shared(adapters, 2, 4), bound=True)
        assert constants.collective_s(8e8, 8, 1, 8) == pytest.approx(one_s)
        assert constants.collective_s(8e8, 2, 4, 8) == pytest.approx(four_s)


def test_steps_and_turns_share_the_adapters_of_a_node():
    """Of a ring over both nodes, one hop leaves each and four of its six other messages do; of two rings, two hops."""
    shape = replace(model("llama3_8b"), layers=1)
    queries, partials, out = 3 * 32 * 128 * 2, 3 * 32 * (128 * 2 + 4), 3 * 32 * 128 * 2  # of one row of four
    for adapters, times in ((None, 1), (1, 4 / 3)):
        sizes = {"seq": 1000, "batch": 4, "phase": "decode", "bound": True}
        found = predict_model(shape, Plan(4, algorithm="pass_q"), shared(adapters, 2, 2), **sizes)
        assert found.parts["partials"] == pytest.approx((queries + times * (partials + out)) / 1e8)
    for algorithm in ("pass_kv", "pass_q", "all_gather"):
        whole, half, inside, same = (
            predict_turn(
                shape, Plan(2, 2, inner=inner), shared(adapters, 2, 2, peak_flops_per_s=1e20),
                new=100, cached=1000, algorithm=algorithm, bound=True,
            )[0].parts["ring"]
            for inner in ("ulysses", "ring")
            for adapters in (None, 1)
        )  # fmt: skip
        assert half == pytest.approx(2 * whole)
        assert inside == same
    sizes = {"new": 100, "cached": 1000, "algorithm": "all_gather"}
    one, two = (
        predict_turn(shape, Plan(2, 2), shared(adapters, 2, 2, network_all_to_all_bytes_per_s=5e7), **sizes)[0]
        for adapters in (1, 2)
    )
    assert one.parts["ring"] == two.parts["ring"]


@pytest.mark.parametrize("how", [Plan(4, 4), Plan(4, 4, inner="ring"), Plan(2, 2, 2, 2, weights="fsdp"), Plan(3, 2)])
def test_fewer_adapters_are_not_faster(how):
    """An adapter a rank is what hardware has that does not say, and more of them help no message."""
    shape, usual = model("llama3_8b"), hardware("a100_80gb")
    for phase in ("prefill", "train", "decode"):
        seconds = []
        for count in (None, 16, 8, 4, 2, 1):
            known = {} if count is None else {"network_adapters": Constant(count, "adapters", "measured", "a test")}
            place = Cluster(replace(usual, constants={**usual.constants, **known}), 2, 8)
            seconds.append(predict_model(shape, how, place, seq=65536, batch=1, phase=phase).seconds)
        assert seconds == sorted(seconds)
        assert seconds[0] == seconds[2]


def test_what_a_prediction_is_worth():
    call = Workload(1, 1024, 8, 8, 32, CAUSAL)
    fitted = {
        "attention_flops_per_s": {"32": 5e11},
        "merge_bytes_per_s": 1e12,
        "call_s": 1e-3,
        "step_s": 1e-5,
        "hop_s": 1e-6,
        "hop_bytes_per_s": 5e8,
        "overlap": 1.0,
    }
    covers = {"seq": [512, 2048], "head_dim": [32, 32], "nodes": [1, 1]}
    one = Cluster(made(covers, **fitted), 2, 4)
    good = predict(call, Plan(4), one, strict=True)
    assert (good.basis, good.notes) == (CALIBRATED, ())
    assert good.seconds > predict(call, Plan(4), one, bound=True).seconds
    far = predict(replace(call, seq=4096, head_dim=64), Plan(4), one)
    assert far.basis == EXTRAPOLATED
    assert any("seq=4,096 (fitted on 512 to 2,048)" in note for note in far.notes)
    assert any("attention_flops_per_s at 64" in note for note in far.notes)
    missing = predict(call, Plan(2, 2), one)
    assert (missing.basis, missing.notes) == (LOWER_BOUND, ("no all_to_all_bytes_per_s: datasheet instead",))
    for sizes, how in ((replace(call, seq=4096), Plan(4)), (call, Plan(2, 2))):
        with pytest.raises(ValueError, match=r"'made' is not calibrated for this .*analysis.calibrate"):
            predict(sizes, how, one, strict=True)


def test_borrowed_constants_are_no_calibration():
    call = Workload(1, 1024, 8, 8, 32, CAUSAL)
    rate = Constant(5e11, "FLOP/s", "borrowed", "x100, a cousin: a table")
    own = made(merge_bytes_per_s=1e12, call_s=1e-3, step_s=1e-5, attention_flops_per_s=1e11)
    one = Cluster(replace(own, constants={**own.constants, "attention_flops_per_s": rate}), 1, 1)
    found = predict(call, Plan(), one)
    assert (found.basis, found.notes) == (EXTRAPOLATED, ("borrowed from x100, a cousin: attention_flops_per_s",))
    assert predict(call, Plan(), Cluster(own, 1, 1)).basis == CALIBRATED
    sharded = predict_model(
        model("llama3_8b"), Plan(8, weights="fsdp"), cluster("a100_80gb_1x8"), seq=131072, batch=1, phase="train"
    )
    assert sharded.basis == EXTRAPOLATED
    assert any(note.startswith("borrowed from a800_80gb") for note in sharded.notes)


def test_groups_that_do_not_fill_nodes():
    """The worst group counts, and only ranks that there are."""
    call = Workload(1, 120, 3, 3, 64, Mask(causal=False))
    inside, across = (
        predict(call, Plan(1, 3, data=data), Cluster(made(), 2, 8), bound=True).parts["all_to_all"] for data in (1, 3)
    )
    assert across > 5 * inside  # ranks 6, 7 and 8
    ring = Workload(1, 4096, 1, 1, 64, Mask(causal=False))
    one, three = (
        predict(ring, Plan(4, data=data, layout="contiguous"), Cluster(made(), 2, 6), bound=True) for data in (1, 3)
    )
    assert one.seconds < three.seconds  # ranks 4 to 7
    constants = Constants(Cluster(made(), 2, 8), bound=True)  # ranks 0 and 6 share a node, ranks 2 and 8 do not
    six = replace(call, heads=6, kv_heads=6)
    timeline, _ = ring_pass(six, Plan(2, 6, layout="contiguous"), constants, backward=False)
    assert timeline.total_s == pytest.approx(60 * 2 * 64 * 2 / 1e8 + timeline.compute_s[0] / 2)
    found = plan(model("llama3_8b"), Cluster(hardware("a100_80gb"), 2, 6), 1200, 12, "prefill")
    assert {x.plan.tensor for x in found.feasible} <= {1, 2, 3, 6}


def test_idle_ranks_change_nothing():
    """Three ranks of eight in one node are in one node, in all phases."""
    shape = model("llama3_8b")
    for how in (Plan(data=3, weights="fsdp"), Plan(ring=3), Plan(ulysses=3), Plan(ring=3, exchange="all_gather")):
        for phase in ("prefill", "train", "decode"):
            few, many = (
                predict_model(shape, how, Cluster(hardware("h200_141gb"), 1, ranks), seq=4096, batch=1, phase=phase)
                for ranks in (3, 8)
            )
            assert few.parts == many.parts, (how, phase)


@pytest.mark.parametrize("name", known_hardware())
@pytest.mark.parametrize("how", [Plan(8, layout="contiguous"), Plan(1, 8), Plan(8, exchange="all_gather"), Plan(2, 4)])
def test_the_same_ranks_on_more_nodes_are_not_faster(name, how):
    exchanges = hardware(name).constants.get("all_to_all_bytes_per_s")
    if exchanges and isinstance(exchanges.value, dict) and how.ulysses > 1:
        pytest.skip("where ranks of a host share its PCIe, fewer of them in each are faster")
    shape = model("llama3_8b")
    for phase in ("prefill", "train", "decode"):
        seconds = [
            predict_model(
                shape, how, Cluster(hardware(name), nodes, 8 // nodes), seq=65536, batch=1, phase=phase
            ).seconds
            for nodes in (1, 2, 4, 8)
        ]
        assert seconds == sorted(seconds), phase


def test_queries_pass_all_ranks():
    """One sequence on eight ranks: its query is on its way seven times, one after another."""
    one = made(hop_s=1e-3, decode_layer_s=1e-9, collective_bytes_per_s=1e9, hop_bytes_per_s=1e9)
    shape = replace(model("llama3_8b"), layers=1)
    sizes = {"seq": 8192, "batch": 1, "phase": "decode"}
    found = predict_model(shape, Plan(8, algorithm="pass_q"), Cluster(one, 1, 8), **sizes).parts["partials"]
    assert found == pytest.approx((7 + 1 + 1) * 1e-3, rel=0.02)


@pytest.mark.parametrize("name", known_hardware())
def test_more_nodes_do_not_make_links_faster(name):
    """Of collectives: what one more node adds to a group never shortens its time."""
    one = hardware(name)
    seconds = [Constants(Cluster(one, nodes, 8)).collective_s(1e9, 8 * nodes, 1, 8 * nodes) for nodes in (1, 2, 4, 16)]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize("phase", ["prefill", "train", "decode"])
def test_bounds_are_below(phase):
    """Datasheets alone promise less time than any constants that are fitted, assumed or borrowed."""
    shape = model("smollm2_135m")
    for place in ("a100_80gb_2x8", "a100_80gb_pcie_1x4", "l20_48gb_2x8", "h100_96gb_4x8", "a800_80gb_2x8"):
        for how in (
            Plan(),
            Plan(4),
            Plan(2, 2),
            Plan(1, 3),
            Plan(2, weights="fsdp", data=2),
            Plan(4, layout="contiguous"),
        ):
            for seq, batch in ((512, 1), (65536, 2)):
                sizes = {"seq": seq, "batch": batch, "phase": phase}
                low = predict_model(shape, how, cluster(place), **sizes, bound=True).seconds
                assert low <= predict_model(shape, how, cluster(place), **sizes).seconds, (place, how, sizes)


def test_matrices_are_read_or_computed_with():
    """Few tokens wait for memory, many for the chip; a mixture reads the experts that are met."""
    big, place = model("llama3_70b"), cluster("h200_141gb_1x8")
    few = predict_model(big, Plan(tensor=8), place, seq=1, batch=1, phase="prefill")
    step = predict_model(big, Plan(tensor=8), place, seq=1, batch=1, phase="decode")
    assert few.parts["weights"] == pytest.approx(step.parts["weights"], rel=0.05)
    assert few.regime == "memory"
    many = predict_model(big, Plan(tensor=8), place, seq=128, batch=4096, phase="decode")
    assert many.parts["matrices"] == pytest.approx(big.linear_flops(4096) / 8 / 989e12, rel=0.05)
    mixture = model("qwen3_235b_a22b")
    read = [mixture.met_params(tokens) for tokens in (1, 8, 64)]
    assert read[0] == mixture.active_params
    assert read[1] < read[2] == mixture.layer_params
    found = predict_model(mixture, Plan(tensor=4), place, seq=64, batch=1, phase="prefill").parts["weights"]
    assert found == pytest.approx(94 * read[2] * 2 / 4 / 4.8e12, rel=0.05)


def test_decode_reads_what_a_window_shows():
    big, place = model("llama3_8b"), cluster("h100_80gb_1x8")
    whole, window = (
        plan(big, place, 131_072, 8, "decode", window=window).best.prediction.parts["cache"] for window in (None, 1024)
    )
    assert whole == pytest.approx(128 * window)


def test_out_of_a_step_goes_everywhere():
    """A step of Ulysses 4 gathers out; over nodes it takes longer."""
    shape = replace(model("llama3_8b"), layers=1)
    near, far = (
        predict_model(shape, Plan(1, 4), Cluster(made(), *nodes), seq=1000, batch=16, phase="decode", bound=True)
        for nodes in ((1, 4), (4, 1))
    )
    assert near.parts["partials"] == pytest.approx(3 * 16 * 8 * 128 * 2 / 1e9)
    assert far.parts["partials"] == pytest.approx(10 * near.parts["partials"])


def test_training_shares_embedding_and_head():
    """Gradients of all parameters are averaged, and gathers hide behind computing alone."""
    shape = Model("wide", 2, 64, 1, 1, 64, 64, 1_000_000)
    place = Cluster(made(peak_flops_per_s=1e18), 1, 2)
    found = predict_model(shape, Plan(data=2), place, seq=8, batch=1, phase="train", bound=True)
    assert found.parts["gradients"] == pytest.approx(2 / 2 * (shape.params - 5 * 64) * 2 / 1e9, rel=1e-3)


def test_a_turn_sends_what_costs_less():
    """As the library chooses: `predict_turn` asks the same function."""
    place, big = cluster("a100_80gb_4x8"), model("llama3_70b")
    few, algorithm = predict_turn(big, Plan(4, tensor=8), place, new=400, cached=127_600, bound=True)
    assert algorithm == "pass_q"
    named, _ = predict_turn(big, Plan(4, tensor=8), place, new=400, cached=127_600, algorithm="pass_kv", bound=True)
    assert named.seconds > few.seconds
    assert predict_turn(big, Plan(4, tensor=8), place, new=64_000, cached=64_000, bound=True)[1] == "pass_kv"


def test_decode_reads_weights_and_cache():
    """L (layer / 8 + B S / 4 x 2 d e) / bandwidth, and the head: 13.68 and 39.28 ms at 2e12 B/s, as corrected."""
    big = model("llama3_70b")
    place = Cluster(made(memory_bytes_per_s=2e12, peak_flops_per_s=1e15), 4, 8)
    for batch, ms in ((1, 13.67638016), (6, 39.27638016)):
        found = predict_model(big, Plan(4, tensor=8), place, seq=10**6, batch=batch, phase="decode", bound=True)
        head_s = big.vocab * big.hidden * 2 / 8 / 2e12
        assert (found.parts["weights"] + found.parts["cache"] - head_s) * 1e3 == pytest.approx(ms)
    sharded = predict_model(big, Plan(1, 8, weights="fsdp"), place, seq=10**6, batch=1, phase="decode", bound=True)
    assert sharded.parts["gather"] > 0


def test_exposed_waits_for_what_is_not_saved():
    sizes = {"ring": 3, "kv_bytes": 4e9, "gathered_bytes": 4e9, "q_bytes": 1e9, "partial_bytes": 2e9, "step_flops": 3e9}
    rates = usp.inference.Rates(1e9, 1e9)
    assert exposed(**sizes, rates=rates) == {"pass_kv": 2.0, "pass_q": 4.0, "all_gather": 8.0}
    half = exposed(**sizes, rates=rates._replace(overlap=0.5))
    assert half == {"pass_kv": 2 * 2.5, "pass_q": 2 * 0.5 + 4.0, "all_gather": 8.0}
    other = exposed(**sizes, rates=rates._replace(collective_bytes_per_s=2e9, collective_latency_s=1.0))
    assert other == {"pass_kv": 2.0, "pass_q": 3.0, "all_gather": 5.0}


def test_many_ranks_are_no_million_of_blocks():
    """256 ranks, contiguous and causal: the last computes (2N - 1) / N times its share."""
    call = Workload(1, 1 << 18, 1, 1, 64, CAUSAL)
    for layout, expected in (("contiguous", 511 / 256), ("zigzag", 1.0)):
        found, _ = ring_pass(call, Plan(256, layout=layout), Constants(Cluster(made(), 32, 8), True), backward=False)
        share = sum(found.compute_s) / 256
        assert max(found.compute_s) / share == pytest.approx(expected, rel=1e-2)


# ---------------------------------------------------------------------------------------------------
# Plans.


def test_plans_are_ranked_and_what_cannot_be_has_a_reason():
    found = plan(model("llama3_8b"), cluster("a100_80gb_2x8"), 131_072, 2, "train")
    assert found.best
    seconds = [x.prediction.seconds for x in found.feasible]
    assert seconds == sorted(seconds)
    assert {x.plan.world for x in found.candidates} == {16}
    for one in found.feasible:
        assert one.memory.total_bytes <= 80e9
        assert one.largest_batch >= 2
        assert one.prediction.regime in ("compute", "memory", "link", "latency")
    reasons = {x.reason for x in found.candidates if x.reason}
    assert all(x.prediction is None for x in found.candidates if x.reason)
    for words in (
        "do not divide over data",
        "leaves the node",
        "of 80.0 GB (optimizer",
    ):
        assert any(words in reason for reason in reasons), words
    assert {x.plan.replicate_kv for x in found.candidates if x.plan.ulysses > 8} == {True}


def test_strict_plans_are_calibrated():
    place, sizes = cluster("a800_80gb_1x8"), (131_072, 1, "train")
    found = plan(model("llama3_8b"), place, *sizes, strict=True)
    assert not found.feasible  # attention there is borrowed
    assert any("not calibrated for this (borrowed from a100_80gb" in x.reason for x in found.candidates)
    own = Cluster(
        made(**dict.fromkeys(("linear_flops_per_s", "merge_bytes_per_s", "attention_flops_per_s"), 1e11), step_s=1e-6),
        1,
        1,
    )
    small = model("smollm2_135m")
    assert plan(small, own, 1024, 1, "prefill", strict=True).best.prediction.basis == CALIBRATED


def test_tokens_and_heads_limit_the_ranks():
    small = model("smollm2_135m")
    found = plan(small, cluster("a100_80gb_2x8"), 4, 1, "prefill")
    reasons = [x.reason for x in found.candidates if x.reason]
    assert any("ranks for 4 tokens" in reason for reason in reasons)
    assert any("largest Ulysses degree" in reason or "do not divide 9 query heads" in reason for reason in reasons)


def test_the_guides_model_on_eight_to_128():
    """Weights sharded over all: it fits on 8 in tiles and in no other way; the counts are the guide's, corrected."""
    big, prefill = model("llama3_70b"), {}
    for nodes in (1, 2, 4, 16):
        place = cluster(f"a100_80gb_{nodes}x8")
        found = plan(big, place, 10**6, 1, "prefill")
        best = found.best
        assert best, place.name
        prefill[place.ranks] = best.prediction
        one = Plan(place.ranks, weights="fsdp", tile_mlp=8192)
        parts = memory(big, one, 10**6, 1, "prefill").parts
        assert parts["KV cache"] == -(-(10**6) // place.ranks) * 327_680
        (sharded,) = [
            x for x in found.candidates if (x.plan.ring, x.weights, x.plan.layout) == (place.ranks, "fsdp", "zigzag")
        ]
        share = -(-(10**6) // 2 // place.ranks) * 2  # zigzag pads to two chunks a rank
        assert sharded.layer_bytes == (place.ranks - 1) * share * 2 * 8 * 128 * 2
    for ranks in (16, 32, 128):
        assert prefill[8].parts["attention"] / prefill[ranks].parts["attention"] == pytest.approx(ranks / 8, rel=0.05)


@pytest.mark.parametrize(
    ("ranks", "attention_min", "matrices_min"), [(8, 15.60, 1.63), (32, 3.90, 0.41), (64, 1.95, 0.20)]
)
def test_prefill_at_the_guides_rate(ranks, attention_min, matrices_min):
    """At 175 TFLOP/s for everything: the guide's minutes with causal attention counted, and matrices beside it."""
    rate = Constant(175e12, "FLOP/s", "measured", "a test")
    known = dict.fromkeys(("attention_flops_per_s", "linear_flops_per_s"), rate)
    place = Cluster(made(peak_flops_per_s=1e15, link_bytes_per_s=3e11, network_bytes_per_s=2.5e10), ranks // 8, 8)
    place = replace(place, hardware=replace(place.hardware, constants={**place.hardware.constants, **known}))
    found = predict_model(model("llama3_70b"), Plan(ranks), place, seq=10**6, batch=1, phase="prefill")
    assert found.parts["attention"] / 60 == pytest.approx(attention_min, rel=1e-3)
    assert found.parts["matrices"] / 60 == pytest.approx(matrices_min, abs=0.005)
    assert found.parts["ring"] == 0  # hops of 20.5 ms hide behind half a step of 2.9 s


def test_decode_names_its_algorithm():
    found = plan(model("llama3_70b"), cluster("a100_80gb_4x8"), 10**6, 1, "decode")
    assert found.best
    assert {x.plan.algorithm for x in found.feasible if x.plan.ring > 1} <= set(DECODE)
    best = found.best.plan
    others = [
        predict_model(found.model, replace(best, algorithm=name), found.cluster, seq=10**6, batch=1, phase="decode")
        for name in DECODE
    ]
    assert found.best.prediction.seconds == min(x.seconds for x in others)
    assert found.best.plan.tensor > 1  # whole weights do not fit, and sharded ones are gathered for each token
    assert found.best.prediction.seconds > 0.01
    sharded = [x for x in found.feasible if x.plan.weights == "fsdp"]
    assert all(x.prediction.regime == "link" for x in sharded)


def test_a_slow_network_wants_ulysses_inside_the_nodes():
    """Two nodes of two ranks with one adapter each: keys and values cross once, and nothing else does."""
    call, place = Workload(1, 4096, 8, 4, 64, Mask(causal=False)), shared(1, 2, 2)
    found = plan_attention(call, place)
    assert [x.prediction.seconds for x in found] == sorted(x.prediction.seconds for x in found)
    meshes = {(x.plan.ring, x.plan.ulysses, x.plan.inner) for x in found}
    assert meshes == {(4, 1, "ulysses"), (2, 2, "ulysses"), (2, 2, "ring"), (1, 4, "ulysses")}
    assert len(found) == 3 * 3 + 1  # a ring of one has one layout
    best = found[0].plan
    assert (best.ring, best.ulysses, best.inner, best.layout) == (2, 2, "ulysses", "zigzag")
    swapped = next(x for x in found if x.plan == replace(best, inner="ring"))
    assert swapped.prediction.seconds > found[0].prediction.seconds
    for backward in (False, True):
        for one in plan_attention(call, place, backward=backward):
            assert one.prediction == predict(call, one.plan, place, backward=backward)


def test_the_inner_axis_is_chosen_where_it_matters():
    """Not where all ranks share a node, nor where none do."""
    call = Workload(1, 4096, 8, 4, 64, CAUSAL)
    for nodes, per_node in ((1, 4), (4, 1)):
        found = plan_attention(call, Cluster(made(), nodes, per_node), layouts=("striped",))
        assert sorted((x.plan.ring, x.plan.ulysses, x.plan.inner) for x in found) == [
            (1, 4, "ulysses"),
            (2, 2, "ulysses"),
            (4, 1, "ulysses"),
        ]
        assert {x.plan.layout for x in found} == {"striped"}


def test_attention_is_planned_for_the_heads_there_are():
    found = plan_attention(Workload(1, 4096, 4, 2, 64, CAUSAL), Cluster(made(), 1, 8), layouts=("zigzag",))
    assert sorted((x.plan.ulysses, x.plan.replicate_kv) for x in found) == [(1, False), (2, False), (4, True)]


def test_the_readme_can_be_copied(capsys):
    code = (ROOT / "README.md").read_text().split("from usp import Mask, cost\n")[1].split("```")[0]
    exec("from usp import Mask, cost\n" + code, {})
    assert len(capsys.readouterr().out.splitlines()) == 3


def run(*arguments: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-X", "importtime", "-m", "experiments.plan", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)


def test_the_command_answers_without_torch(tmp_path):
    path = tmp_path / "plans.csv"
    result = run("model=llama3_70b", "cluster=a100_80gb_4x8", "seq=1000000", "phase=prefill", f"csv={path}", "top=3")
    assert result.returncode == 0, result.stderr[-2000:]
    assert " torch" not in result.stderr
    assert "llama3_70b, prefill of 1 x 1,000,000 tokens on 4 x 8" in result.stdout
    assert "plans are not possible" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 120
    rows = list(csv.DictReader(path.open()))
    good = [row for row in rows if not row["reason"]]
    assert good
    assert all(float(row["seconds"]) > 0 for row in good)
    assert math.isclose(float(good[0]["seconds"]), min(float(row["seconds"]) for row in good))
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 9}))
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "broken.json").write_text("{")
    for mistake, message in (
        (f"model={tmp_path}/list.json", "holds a list, not a configuration"),
        (f"model={tmp_path}/broken.json", "broken.json is not JSON"),
        ("reserved_gb=inf", "reserved_gb=inf is not a size"),
        ("top=0", "top=0 is not a whole number"),
        ("sequence=3", "sequence"),
        (f"csv={tmp_path}/no/x.csv", "No such file"),
    ):
        wrong = run(mistake)
        assert wrong.returncode == 1
        assert message in wrong.stderr
    bad = run(f"model={tmp_path}/config.json")
    assert bad.returncode == 1
    assert "without num_hidden_layers or n_layer" in bad.stderr
