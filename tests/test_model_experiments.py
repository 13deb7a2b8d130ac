"""experiments.model: what it refuses, what records of real ranks have, its table and its picture. `make hf`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException

transformers = pytest.importorskip("transformers", reason="make hf installs it")

from analysis import compare, figures, tables  # noqa: E402
from analysis import records as kept  # noqa: E402
from experiments import model, points  # noqa: E402
from experiments.config import CONFIGS, plain, register  # noqa: E402

pytestmark = pytest.mark.hf
ROOT = Path(__file__).parent.parent


def composed(*overrides: str, hydra: bool = False):
    register()
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        config = compose("model", list(overrides), return_hydra_config=hydra)
    return config if hydra else plain(config)


def swept(folder: Path, *overrides: str) -> tuple[list[dict], str]:
    """The records of a sweep through the command's own entry point, and what it printed."""
    options = [sys.executable, "-m", "experiments.model", "-m", *overrides, f"results={folder}"]
    result = subprocess.run(options, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stderr == ""
    return kept.load(folder), result.stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[list[dict], str, Path]:
    """One process, and two replicas of two ranks by each engine, with everything that saves memory."""
    folder = tmp_path_factory.mktemp("trained")
    options = "phase=train", "seq=32", "steps=2", "learning_rate=0.01"
    alone, _ = swept(folder, *options, "setup=alone")
    split = "mesh=u1r2", "mesh.data=2", "tile_mlp=8", "tile_loss=8", "checkpoint=attention_kept", "engine=fsdp,ddp"
    found, text = swept(folder, *options, *split)
    assert {record["point"] for record in alone} < {record["point"] for record in found}
    return found, text, folder


@pytest.fixture(scope="module")
def used(tmp_path_factory) -> tuple[list[dict], str]:
    """A loss and two continued texts, in one process and on two ranks."""
    folder = tmp_path_factory.mktemp("used")
    return swept(folder, "phase=evaluate,generate", "mesh=u1r1,u2r1", "seq=50", "batch=2", "attention=auto")


# ---------------------------------------------------------------------------------------------------
# What is configured.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["seq=0"], "seq=0: at least 2"),
        (["seq=1"], "seq=1: at least 2: the first token is no target"),
        (["phase=generate", "seq=0"], "seq=0: at least 1"),
        (["batch=0"], "batch=0: at least 1"),
        (["steps=1"], "steps=1: at least 2: the first is not timed"),
        (["phase=generate", "new_tokens=0"], "new_tokens=0: at least 1"),
        (["tile_mlp=0"], "tile_mlp=0: at least 1"),
        (["tile_loss=0"], "tile_loss=0: at least 1"),
        (["learning_rate=-1"], "learning_rate=-1.0: above 0"),
        (["learning_rate=null"], "phase=train needs learning_rate"),
        (["phase=evaluate", "steps=3"], "steps=3 with phase=evaluate: only phase=train has it"),
        (["phase=generate", "learning_rate=1"], "learning_rate=1.0 with phase=generate: only phase=train"),
        (["phase=evaluate", "engine=ddp"], "engine=ddp with phase=evaluate: only phase=train"),
        (["phase=evaluate", "checkpoint=all"], "checkpoint=all with phase=evaluate: only phase=train"),
        (["phase=evaluate", "new_tokens=3"], "new_tokens=3 with phase=evaluate: only phase=generate"),
        (["phase=generate", "tile_loss=8"], "tile_loss=8 with phase=generate, which has no loss"),
        (["phase=evaluate", "mesh.data=2"], "mesh.data=2 with phase=evaluate: replicas train"),
        (["mesh=u1r1", "engine=fsdp"], "engine=fsdp in one process"),
        (["mesh=u1r1", "tile_mlp=8"], "tile_mlp=8 in one process, which runs transformers alone: attention=usp"),
        (["mesh=u1r1", "attention=transformers", "backend=tiled"], "backend=tiled in one process"),
        (["mesh=u1r1", "checkpoint=attention_kept"], "checkpoint=attention_kept keeps the attention of this library"),
        (["attention=transformers"], "attention=transformers on 4 ranks"),
        (["mesh=u8r1"], "the largest Ulysses degree is 4"),
        (["model=smollm2", "mesh=u4r1"], "the largest Ulysses degree is 3"),
        (["mesh.ring=0"], "every degree of the mesh is at least 1"),
        (["mesh.data=0"], "every degree of the mesh is at least 1"),
        (["timeout_s=0"], "timeout_s=0"),
        (["model=smollm2", "phase=evaluate", "mesh=u1r2", "seed=1"], "seed=1 with phase=evaluate of smollm2"),
        (["phase=evaluate", "seq=40000"], "has 35,149 as tiny_llama reads it"),
        (["phase=generate", "seq=20000", "batch=2"], "2 x seq=20000 tokens: gpl-3.0.txt has 35,149"),
    ],
)
def test_bad_values_are_refused_before_ranks_start(options, message, tmp_path, monkeypatch):
    monkeypatch.setattr(points.ranks, "launch", None)
    config = composed(*options)
    with pytest.raises(ValueError) as caught:
        model.check(config)
    assert message in str(caught.value)
    record = points.run(model.EXPERIMENT, config, tmp_path / "record.json", ["a test"])
    assert (record["status"], record["experiment"]) == ("unsupported", "model")
    tables.SHOWN["model"]([record])


@pytest.mark.parametrize(
    "option", ["phase=test", "model=gpt5", "engine=deepspeed", "checkpoint=some", "workload=h8_d64"]
)
def test_typos_fail_when_the_configuration_is_composed(option):
    with pytest.raises(HydraException):
        composed(option)


@pytest.mark.parametrize("options", [["mesh=u1r1", "attention=usp", "tile_mlp=8"], ["mesh=u1r1", "checkpoint=all"], []])
def test_good_values(options):
    model.check(composed(*options))


@pytest.mark.parametrize("experiment", ["model", "training"])
def test_experiments_compose(experiment):
    """Every point of both sweeps has a name of its own."""
    (one, ones), *others = composed(f"experiment={experiment}", hydra=True).hydra.sweeper.params.items()
    two, twos = others[0] if others else ("batch", "1")
    given = [[f"{one}={x}", *([f"{two}={y}"] if others else [])] for x in ones.split(",") for y in twos.split(",")]
    configs = [composed(f"experiment={experiment}", *some) for some in given]
    for config in configs:
        model.check(config)
    assert len({points.name(model.EXPERIMENT, config) for config in configs}) == len(given)


def test_missing_packages_are_named(monkeypatch, tmp_path):
    monkeypatch.setattr(model, "KEPT", tmp_path)
    monkeypatch.setattr(model.importlib.util, "find_spec", lambda name: None if name == "gguf" else name)
    with pytest.raises(ValueError, match="model=smollm2 needs gguf, which is not installed"):
        model.prepare(composed("model=smollm2"))


def test_a_step_has_the_same_samples_on_every_mesh():
    text = torch.arange(5000)
    whole = model.samples(composed("seq=16", "mesh=u1r1", "batch=4"), text, 3)
    assert whole.shape == (3, 4, 16)
    assert torch.equal(whole, model.samples(composed("seq=16", "mesh=u2r2", "mesh.data=2", "batch=2"), text, 3))
    assert torch.equal(whole[:2], model.samples(composed("seq=16", "mesh=u1r1", "batch=4"), text, 2))
    assert not torch.equal(whole, model.samples(composed("seq=16", "mesh=u1r1", "batch=4", "seed=1"), text, 3))
    assert torch.equal(whole[..., 1:], whole[..., :-1] + 1)
    assert len(set(whole[..., 0].flatten().tolist())) == 12


# ---------------------------------------------------------------------------------------------------
# What real ranks leave.


def test_records_of_training(trained):
    records, text, _ = trained
    alone, *others = records
    assert [len(record["ranks"]) for record in records] == [1, 4, 4]
    assert [record["summary"]["attention"] for record in records] == ["transformers", "usp", "usp"]
    for record in records:
        found = record["summary"]
        assert (record["status"], record["experiment"]) == ("ok", "model")
        assert record["versions"]["transformers"] == transformers.__version__
        assert len(found["losses"]) == 2
        assert found["losses"][1] < found["losses"][0] < 6
        assert 1e6 < found["parameters"] < 2e6
        assert found["tokens_per_s"] > 0
        assert all(len(rank["wall_s"]) == 1 for rank in record["ranks"])
    for record in others:
        assert {rank["data_rank"] for rank in record["ranks"]} == {0, 1}
        assert max(compare.loss_differences(record, alone)) < 1e-5
        assert {"ring", "ring_grad", "loss"} <= record["summary"]["bytes_by_kind"].keys()
        assert record["point"].startswith("tiny_llama-train-d2u1r2-zigzag-s32b1-float32-")
    assert "data 2 x ring 2, zigzag, ddp, checkpoint" in " ".join(text.split())
    fsdp, ddp = others
    whole = ddp["summary"]["parameters"]
    assert [rank["own_parameters"] for rank in ddp["ranks"]] == [whole] * 4
    assert [rank["own_parameters"] for rank in fsdp["ranks"]] == [whole // 4] * 4


def test_records_of_use(used):
    records, text = used
    for record, alone in compare.beside_one_process(records):
        found, phase = record["summary"], record["config"]["phase"]
        assert len(alone["ranks"]) == 1
        if phase == "evaluate":
            assert found["loss"] == pytest.approx(alone["summary"]["loss"], abs=1e-5)
            assert found["tokens"] == []
        else:
            assert [len(row) for row in found["tokens"]] == [100, 100]
            assert [len(row.encode()) for row in found["text"]] >= [100, 100]
            assert compare.same_tokens(record, alone) == 100
            assert found["cache_bytes"] >= 149 * 2 * 4 * 2 * 4 // len(record["ranks"]) * 32 * 4
    assert "all 100" in text


def test_the_picture_and_the_table(trained, used, tmp_path, capsys):
    """Also of a sweep without one process, of runs that are equal to the bit, and of what failed."""
    records, text, folder = trained
    assert f"picture: {folder}/training.png" in text
    assert kept.pictures("model", used[0], tmp_path) == []
    failed = records[0] | {"status": "oom", "reason": "a test"}
    del failed["summary"]
    assert kept.pictures("model", [failed], tmp_path) == []
    (path,) = kept.pictures("model", [failed, *records[1:], records[1]], tmp_path)
    assert path.stat().st_size > 10_000
    assert figures.training(records, path).stat().st_size > 10_000
    tables.SHOWN["model"]([failed, *records, *used[0]])
    shown = capsys.readouterr().out
    assert "oom" in shown
    assert f"{records[1]['summary']['loss']:.6f}" in shown
    assert len(kept.to_csv(records, tmp_path / "all.csv").read_text().splitlines()) == 4
    tables.listing(records)


def test_ranks_that_differ_are_no_result(trained, used):
    record = trained[0][1]
    wrong = json.loads(json.dumps(record["ranks"]))
    wrong[1]["losses"][1] += 0.1
    with pytest.raises(ArithmeticError, match="ranks have other losses"):
        model.summary(record["config"], wrong)
    for rank in wrong:
        rank["losses"] = [float("nan")] * 2
    with pytest.raises(ArithmeticError, match="the loss is no number"):
        model.summary(record["config"], wrong)
    record = next(x for x in used[0] if x["config"]["phase"] == "generate" and len(x["ranks"]) == 2)
    wrong = json.loads(json.dumps(record["ranks"]))
    wrong[1]["tokens"][0][7] += 1
    with pytest.raises(ArithmeticError, match="ranks wrote other tokens"):
        model.summary(record["config"], wrong)
    other = json.loads(json.dumps(record))
    other["summary"]["tokens"][1][7] += 1
    assert compare.same_tokens(record, other) == 7
