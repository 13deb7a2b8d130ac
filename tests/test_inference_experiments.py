"""experiments.decode and experiments.prefill: what they refuse, what a record of real ranks has, where tables cross."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException

from analysis import compare, tables
from analysis import records as kept
from experiments import attention, decode, growth, points, prefill, ranks
from experiments.config import CONFIGS, plain, register
from usp.inference.volumes import PREFILL, decode_volume

ROOT = Path(__file__).parent.parent
SMALL = ("workload.heads=4", "workload.kv_heads=2", "workload.head_dim=16", "measure=smoke")


def composed(command: str, *overrides: str, hydra: bool = False):
    register()
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        config = compose(command, list(overrides), return_hydra_config=hydra)
    return config if hydra else plain(config)


def swept(command: str, folder: Path, *overrides: str) -> tuple[list[dict], str]:
    """The records of a sweep through the command's own entry point, and what it printed."""
    options = [sys.executable, "-m", f"experiments.{command}", "-m", *SMALL, *overrides, f"results={folder}"]
    result = subprocess.run(options, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stderr == ""
    return kept.load(folder), result.stdout


@pytest.fixture(scope="module")
def decoded(tmp_path_factory) -> tuple[list[dict], str]:
    """A batch that the ring does not divide, several tokens, a window; blocks that a context does not fill."""
    options = "mesh=u1r2", "algorithm=helix,pass_q", "context=300", "batch=3", "seq=2", "window=200", "block=32"
    return swept("decode", tmp_path_factory.mktemp("decode"), *options)


@pytest.fixture(scope="module")
def prefilled(tmp_path_factory) -> tuple[list[dict], str]:
    """Two batch rows, no token in the cache and most of them."""
    options = "mesh=u1r2", "algorithm=pass_kv,pass_q", "total=203", "batch=2", "share=0,0.9"
    return swept("prefill", tmp_path_factory.mktemp("prefill"), *options)


# ---------------------------------------------------------------------------------------------------
# What is configured.


def test_an_attention_point_keeps_its_hash():
    """Or its record would be measured again."""
    digest = points.digest(composed("attention"))
    assert digest == "e92a4a1b9d48e42f92cb5bea7b23f50ac552f116094bda158ea09906b93135e0"


@pytest.mark.parametrize(
    ("command", "option", "named"),
    [
        ("decode", "algorithm=pass_kv", "pass_kv"),
        ("decode", "algorithm=ring", "ring"),
        ("decode", "owner=longest", "longest"),
        ("decode", "layout=zigzag", "layout"),
        ("decode", "experiment=sweep", "not in 'Decode'"),
        ("prefill", "algorithm=helix", "helix"),
        ("prefill", "window=4", "window"),
        ("prefill", "experiment=decode", "not in 'Prefill'"),
        ("attention", "experiment=decode", "not in 'Attention'"),
        ("attention", "share=0.5", "share"),
        ("attention", "mesh.data=2", "data"),
        ("model", "phase=test", "test"),
        ("model", "workload.heads=4", "workload"),
        ("model", "experiment=decode", "not in 'Model'"),
    ],
)
def test_what_a_command_has_not_fails_when_its_configuration_is_composed(command, option, named):
    with pytest.raises(HydraException) as caught:
        composed(command, option)
    assert named in str(caught.value) + str(caught.value.__cause__)


@pytest.mark.parametrize(
    ("experiment", "options", "message"),
    [
        (decode, ["algorithm=auto"], "algorithm=auto with gather=false"),
        (decode, ["context=0"], "context=0: at least 1"),
        (decode, ["seq=0"], "seq=0: at least 1"),
        (decode, ["block=0"], "block=0: at least 1"),
        (decode, ["window=0"], "window=0"),
        (decode, ["batch=0"], "batch=0: at least one sequence"),
        (decode, ["batch=8", "workload.batch=3"], "workload.batch=3 is not batch=8: give batch= alone"),
        (decode, ["measure.baseline=true"], "only experiments.attention"),
        (decode, ["mesh=u4r1"], "the largest Ulysses degree is 2"),
        (decode, ["measure.repeats=0"], "at least 1"),
        (prefill, ["share=-0.1"], "share=-0.1: a share of the tokens is from 0 to 1"),
        (prefill, ["share=1.5"], "share=1.5: a share of the tokens is from 0 to 1"),
        (prefill, ["share=1"], "leaves no new token"),
        (prefill, ["total=0"], "total=0: at least one token"),
        (prefill, ["mesh=u2r1"], "mesh.ring=1: neither keys nor queries travel"),
        (prefill, ["measure.baseline=true"], "only experiments.attention"),
    ],
)
def test_bad_values_are_refused_before_ranks_start(experiment, options, message):
    with pytest.raises(ValueError) as caught:
        experiment.check(composed(experiment.EXPERIMENT.name, *options))
    assert message in str(caught.value)


@pytest.mark.parametrize("experiment", [decode, prefill])
def test_a_refused_point_is_a_record(experiment, tmp_path, monkeypatch):
    """Without any process."""
    monkeypatch.setattr(points.ranks, "launch", None)
    config = composed(experiment.EXPERIMENT.name, "measure.repeats=0")
    record = points.run(experiment.EXPERIMENT, config, tmp_path / "record.json", ["a test"])
    assert record["status"] == "unsupported"
    assert record["experiment"] == experiment.EXPERIMENT.name
    assert "measure.repeats" in record["reason"]
    tables.SHOWN[record["experiment"]]([record])
    tables.listing([record])


@pytest.mark.parametrize("experiment", [decode, prefill])
def test_experiments_and_points(experiment):
    """What a file sweeps composes, at both ends of every list; every point has a name of its own."""
    name = experiment.EXPERIMENT.name
    params = composed(name, f"experiment={name}", hydra=True).hydra.sweeper.params
    ends = [
        composed(name, f"experiment={name}", *(f"{key}={some.split(',')[end]}" for key, some in params.items()))
        for end in (0, -1)
    ]
    for config in ends:
        experiment.check(config)
        assert config["name"] == name
        assert config["workload"]["batch"] == config["batch"]
    names = {points.name(experiment.EXPERIMENT, config) for config in (*ends, ends[0] | {"results": "elsewhere"})}
    assert len(names) == 2


# ---------------------------------------------------------------------------------------------------
# What real ranks leave.


def test_records_of_decoding(decoded):
    records, text = decoded
    assert [record["config"]["algorithm"] for record in records] == ["helix", "pass_q"]
    for record in records:
        config, found = record["config"], record["summary"]
        assert (record["status"], record["schema"], record["experiment"]) == ("ok", points.SCHEMA, "decode")
        assert record["point"].startswith(f"u1r2-{config['algorithm']}-c300-h4kv2d16b3-float32-")
        assert set(found["errors"]) == {"out", "lse"}
        assert 0 < max(found["errors"].values()) < 5e-6
        assert found["token_s"] == pytest.approx(1 / found["speed_per_s"] / 2)
        assert found["tokens_per_s"] == pytest.approx(found["speed_per_s"] * 6)
        assert found["sent_bytes"] == found["formula_bytes"] > 0
        assert found["messages"] == found["formula_messages"]
        assert f"{found['sent_bytes']:,}" in text
        for rank in record["ranks"]:
            volume = decode_volume(
                *(config["algorithm"],),
                **{"ring": 2, "rank": rank["ring_rank"], "batch": 3, "heads": 4, "head_dim": 16, "head_dim_v": 16},
                **{"element_bytes": 4, "seq": 2},
            )
            counted = {kind: (n, rank["messages"][kind]) for kind, n in rank["bytes"].items() if kind != "control"}
            assert counted == volume
            assert rank["cache_bytes"] >= 3 * 151 * 2 * (16 + 16) * 4
            assert len(rank["wall_s"]) == len(rank["cpu_s"]) == 1
            assert not [key for key in rank if key.startswith("forward_")]


def test_a_step_that_sends_other_than_the_formula_is_no_result(decoded):
    record = decoded[0][0]
    samples = [rank | {"formula": {"partials": (5, 1)}} for rank in record["ranks"]]
    with pytest.raises(ArithmeticError, match=r"rank 0 sent bytes .* predicted"):
        decode.summary(record["config"], samples)


def test_a_prefill_that_sends_other_than_predicted_is_no_result(prefilled):
    record = prefilled[0][0]
    samples = [rank | {"messages": {"ring": 7}} for rank in record["ranks"]]
    with pytest.raises(ArithmeticError, match=r"rank 0 sent messages .*7.* predicted"):
        prefill.summary(record["config"], samples)


def test_records_of_prefills(prefilled):
    records, text = prefilled
    assert len(records) == 4
    for record in records:
        config, found = record["config"], record["summary"]
        assert (record["status"], record["experiment"]) == ("ok", "prefill")
        assert (found["cached"], found["new"]) == ((0, 203) if config["share"] == 0 else (183, 20))
        assert found["chosen"] == config["algorithm"]
        assert 0 < max(found["errors"].values()) < 5e-6
        assert set(found["errors"]) == {"out", "lse"}
        assert found["by_sizes_s"].keys() == found["by_rates_s"].keys() == set(PREFILL)
        assert min(found["rates"][key] for key in ("flops_per_s", "bytes_per_s", "latency_s")) > 0
        report = record["ranks"][0]["report"]
        assert report == record["ranks"][1]["report"]
        assert report["step_flops"] > 0
        sizes = {"pass_kv": report["kv_bytes"], "pass_q": report["q_bytes"] + report["partial_bytes"]}
        assert 0.8 * sizes[config["algorithm"]] < found["sent_bytes"] <= sizes[config["algorithm"]]
    assert "by sizes: between 0 and 0.9" in " ".join(text.split())
    assert "Measured bytes: between 0 and 0.9" in " ".join(text.split())


def test_tables_and_lists_of_all_experiments(decoded, prefilled, tmp_path, capsys):
    records = decoded[0] + prefilled[0]
    tables.listing([*records, records[0] | {"summary": {}}])
    assert "7 records: 7 ok" in capsys.readouterr().out
    rows = kept.flat(records)
    assert {row["summary.chosen"] for row in rows} == {None, "pass_kv", "pass_q"}
    assert len(kept.to_csv(records, tmp_path / "all.csv").read_text().splitlines()) == 7
    failed = [record | {"status": "oom", "reason": "a test"} for record in (decoded[0][0], prefilled[0][0])]
    for record in failed:
        del record["summary"]
        tables.SHOWN[record["experiment"]]([record, *(x for x in records if x["experiment"] == record["experiment"])])
    assert capsys.readouterr().out.count("oom") == 2


# ---------------------------------------------------------------------------------------------------
# Where keys and queries cost the same.


def test_a_crossover_in_words():
    def costs(**queries: float) -> dict[float, dict[str, float]]:
        return {float(at[1:]) / 10: {"pass_kv": 1.0, "pass_q": cost} for at, cost in queries.items()}

    assert compare.crossover(costs(s9=0.1, s0=2.0, s5=1.5)) == "between 0.5 and 0.9"  # in any order
    assert compare.crossover(costs(s0=0.5, s9=0.1)) == "pass_q at every share"
    assert compare.crossover(costs(s0=2.0, s9=1.1)) == "pass_kv at every share"
    assert compare.crossover(costs(s0=1.0, s9=1.0)) == "equal at every share"
    assert compare.crossover(costs(s0=0.5, s5=2.0, s9=0.1)) == "none: pass_q at 0, 0.9"
    assert compare.crossover({0.5: {"pass_q": 1.0}}) == "no share with both"


def made(cached: int, algorithm: str, sent_bytes: int, wall_s: float) -> dict:
    """A prefill of 1,000 tokens on two ring ranks whose hops hide under the attention, but not their latency."""
    sizes = {
        "ring": 2,
        "kv_bytes": 10**6,
        "gathered_bytes": 10**6,
        "q_bytes": 2000 * (1000 - cached),
        "partial_bytes": 2000 * (1000 - cached),
    }
    by_sizes = {"pass_kv": 1e-3, "pass_q": 4e-6 * (1000 - cached), "all_gather": 1e-3}
    found = {"cached": cached, "new": 1000 - cached, "sent_bytes": sent_bytes, "wall_s": wall_s}
    found |= {"by_sizes_s": by_sizes, "rates": {"flops_per_s": 1e9, "bytes_per_s": 1e9, "latency_s": 0.0}}
    samples = [{"report": sizes | {"step_flops": 0.9e6}}]
    return {"config": {"algorithm": algorithm, "share": cached / 1000}, "summary": found, "ranks": samples}


def test_the_line_of_crossovers():
    """By sizes 4 (1000 - cached) kB against 1 MB; by rates keys hide but for 0.1 ms, which few queries undercut."""
    records = [
        made(cached, algorithm, sent, wall)
        for cached in (0, 700, 800, 990)
        for algorithm, sent, wall in (("pass_kv", 10**6, 1.0), ("pass_q", 4000 * (1000 - cached), 1.1))
    ]
    line = tables.crossover_line([*records, made(500, "auto", 1, 0.1)])
    assert "by sizes: between 0.7 and 0.8;" in line
    assert "by measured rates: between 0.8 and 0.99." in line
    assert "bytes: between 0.7 and 0.8;" in line
    assert "wall seconds: pass_kv at every share." in line


def test_labels_name_what_differs():
    assert attention.label(composed("attention")) == "u2r2-zigzag-s4096-h8kv8d64b1-float32"
    assert attention.label(composed("attention", "mesh=u2r2_ring_inside")).startswith("u2r2-ring_inside-zigzag-")
    assert decode.label(composed("decode", "algorithm=tree")) == "u1r4-tree-c4096-h8kv2d64b1-float32"
    assert prefill.label(composed("prefill", "share=0.25")) == "u1r2-auto-zigzag-t4096-p1024-h8kv2d64b1-float32"


def test_growth():
    """What `experiments.growth` prints of real ranks: even to a block at any time, and a step that reads its share."""
    config = {"tokens": 70, "ring": 2, "block": 4, "contexts": [64, 128], "device": "cpu"}
    for rank in ranks.launch(growth.measure, config, 2, 60.0):
        assert len(rank["append_s"]) == 1
        assert rank["append_s"][0] > 0
        assert rank["apart"] == 4
        for context in (64, 128):
            assert rank["steps"][context]["read_bytes"] >= context // 2 * 2 * growth.KV_HEADS * growth.HEAD_DIM * 2
            assert rank["steps"][context]["step_s"] > 0
