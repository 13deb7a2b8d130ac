"""Promises about the code as a whole: who imports whom, public names, and a wheel that works alone."""

from __future__ import annotations

import ast
import inspect
import os
import subprocess
import sys
import zipfile
from email.parser import Parser
from functools import cache
from pathlib import Path

import pytest

import usp

ROOT = Path(__file__).parent.parent
PURE = {"masks", "partitions", "ledger", "blocks", "heads", "balance"}
LAYERS = [
    PURE,
    {"mesh", "merging"},
    {"comm"},
    {"kernels"},
    {"sharding", "ulysses", "ring"},
    {"attention"},
    {"inference"},
    {"cost"},
    {"nn", "training"},
    {"integrations"},
]
HOMES = {
    "flash_attn": ("usp/kernels",),
    "hydra": ("experiments", "hydra_plugins"),
    "omegaconf": ("experiments", "hydra_plugins"),
    "submitit": ("experiments/slurm.py",),
    "transformers": ("usp/integrations", "experiments/model.py", "examples"),
    "matplotlib": ("analysis",),
    "rich": ("analysis",),
    "pyarrow": ("analysis",),
}
PUBLIC = {
    "HeadPlan": "(heads, kv_heads, ulysses, replicate_kv)",
    "HybridAttention": "(mesh, *, replicate_kv, scale, softcap, alibi, exchange, backend, float32_delta, check_ranks, "
    "return_lse)",
    "Joint": "(k, v, q, start)",
    "Layout": None,
    "Mask": "(causal, window, documents, key_documents, regions)",
    "Partition": "(seq, layout, ring, ulysses, start, owners)",
    "Region": "(queries, keys, low, high)",
    "Traffic": None,
    "backends": "()",
    "cost": None,
    "heads_to_sequence": "(x, mesh, *, plan)",
    "hybrid_attention": "(q, k, v, mesh, tokens, *, mask, key_tokens, joint, replicate_kv, sinks, scale, softcap, "
    "alibi, bias, dropout, exchange, backend, float32_delta, check_ranks, return_lse)",
    "inference": None,
    "init_mesh": "(*, ring, ulysses, data, order, device_type)",
    "measure_traffic": "()",
    "merge": "(out_a, lse_a, out_b, lse_b)",
    "nn": None,
    "partition": "(seq, mesh, layout, *, mask, start)",
    "positions": "(mesh, tokens, *, mask, device)",
    "RelativeBias": "(table, starts, buckets)",
    "ShardedLoader": "(loader, mesh, layout, *, check_ranks)",
    "Spread": "(tokens, show, last)",
    "batch_mask": "(batch, *, causal, window)",
    "count_targets": "(targets, *, mesh)",
    "mean_over_ranks": "(total, count, mesh, *, num_items, gradients)",
    "sampler": "(dataset, mesh, *, shuffle, seed, drop_last)",
    "sequence_parallel_loss": "(logits, targets, mesh, *, num_items, gradients, check_ranks)",
    "shard_batch": "(batch, mesh, tokens, *, check_ranks)",
    "ring_attention": "(q, k, v, mesh, tokens, *, mask, key_tokens, plan, scale, softcap, alibi, bias, dropout, "
    "exchange, backend, float32_delta)",
    "sequence_to_heads": "(x, mesh, *, plan)",
    "shard": "(x, mesh, tokens, *, dim, fill)",
    "unshard": "(x, mesh, tokens, *, dim)",
}


OF_INFERENCE = {
    "KVCache": "(mesh, *, batch, capacity, kv_heads, head_dim, head_dim_v, dtype, block, owner, replicate_kv, heads, "
    "device)",
    "Rates": "(flops_per_s, bytes_per_s, latency_s, overlap, collective_bytes_per_s, collective_latency_s)",
    "Report": None,
    "decode_attention": "(q, k, v, mesh, cache, *, mask, algorithm, gather, new, sinks, scale, softcap, alibi, bias, "
    "backend, check_ranks, return_lse)",
    "prefill_attention": "(q, k, v, mesh, tokens, cache, *, mask, algorithm, rates, sinks, scale, softcap, alibi, "
    "bias, backend, check_ranks, return_lse)",
}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{name.name}" for name in node.names}
    return found


def sources() -> list[Path]:
    folders = ("usp", "experiments", "analysis", "examples", "hydra_plugins")
    return [path for folder in folders for path in (ROOT / folder).rglob("*.py")]


def part(path: Path) -> str:
    return path.relative_to(ROOT / "usp").parts[0].removesuffix(".py")


def test_imports_go_one_way():
    """pure <- mesh merging <- comm <- kernels <- sharding ulysses ring <- attention <- nn"""
    level = {name: n for n, layer in enumerate(LAYERS) for name in layer}
    files = [path for path in (ROOT / "usp").rglob("*.py") if path != ROOT / "usp/__init__.py"]
    assert {part(path) for path in files} == set(level)
    for path in files:
        for module in imports(path):
            head, _, rest = module.partition(".")
            if head == "usp" and (target := rest.split(".")[0]) in level:
                assert level[target] <= level[part(path)], f"{path} imports {module}"
            known = part(path) in PURE | {"cost"}
            assert not known or head in ("usp", *sys.stdlib_module_names), f"{path} imports {module}"
            if part(path) == "cost" and module.startswith("usp.") and "." in rest:
                assert f"{rest}.".startswith(("cost.", "inference.volumes.")) or rest.split(".")[0] in PURE, module


def test_optional_packages_have_few_importers():
    for path in sources():
        for module in imports(path):
            homes = HOMES.get(module.split(".")[0])
            assert homes is None or any(path.is_relative_to(ROOT / x) for x in homes), f"{path} imports {module}"


def test_only_comm_and_mesh_speak_to_torch_distributed():
    for path in (ROOT / "usp").rglob("*.py"):
        calls = {x for x in imports(path) if x.startswith("torch.distributed") and "device_mesh" not in x}
        assert not calls or part(path) in ("comm", "mesh"), f"{path} imports {calls}"


def test_no_file_without_a_subject():
    assert not {path.stem for path in sources()} & {"utils", "common", "helpers", "misc"}


@pytest.mark.parametrize(("module", "names"), [(usp, PUBLIC), (usp.inference, OF_INFERENCE)], ids=["usp", "inference"])
def test_public_names(module, names):
    assert set(module.__all__) == set(names) == set(dir(module))
    for name, expected in names.items():
        value = getattr(module, name)
        assert inspect.getdoc(value)
        if expected:
            text, starred = [], False
            for parameter in inspect.signature(value).parameters.values():
                if parameter.kind == parameter.KEYWORD_ONLY and not starred:
                    text, starred = [*text, "*"], True
                text.append(parameter.name)
            assert f"({', '.join(text)})" == expected, name
    with pytest.raises(AttributeError, match=rf"{module.__name__}.*no attribute 'ring_attn'"):
        module.ring_attn  # noqa: B018


def python(code: str, path: Path) -> str:
    """Run code where only `path` is added to what is installed."""
    environment = {**os.environ, "PYTHONPATH": str(path)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=path)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_pure_part_does_not_load_torch():
    code = (
        "import sys, usp, usp.blocks, usp.inference.volumes, usp.cost\n"
        "tokens, mask = usp.Partition(8, 'zigzag', 2), usp.Mask(causal=True)\n"
        "assert usp.blocks.blocks(mask, tokens, 0, tokens, 1)\n"
        "model, cluster = usp.cost.model('llama3_8b'), usp.cost.cluster('a100_80gb_1x8')\n"
        "assert usp.cost.plan(model, cluster, 131072, 1, 'prefill').best\n"
        "print('torch' in sys.modules)"
    )
    assert python(code, ROOT).strip() == "False"


def test_importing_is_quick_work():
    """Nothing of the compiler, which takes seconds to load, by import or by the first call."""
    code = (
        "import sys, torch, usp\n"
        "q = torch.randn(1, 8, 2, 4, requires_grad=True)\n"
        "usp.hybrid_attention(q, q, q, None, usp.Partition(8, 'zigzag'), mask=usp.Mask(causal=True)).sum().backward()\n"
        "print([x for x in ('torch._dynamo', 'sympy', 'hydra', 'matplotlib') if x in sys.modules])"
    )
    assert python(code, ROOT).strip() == "[]"


def test_the_built_wheel_works_alone(tmp_path):
    """pip install usp gives the module with torch, einops and jaxtyping; nothing else is asked for or imported."""
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = Parser().parsestr(archive.read(next(x for x in names if x.endswith("METADATA"))).decode())
        archive.extractall(tmp_path / "site")
    required = [x for x in metadata.get_all("Requires-Dist", []) if "extra ==" not in x]
    assert sorted(x.split(">")[0].strip() for x in required) == ["einops", "jaxtyping", "torch"]
    assert {x.split("/")[0] for x in names if "dist-info" not in x} == {"usp"}
    assert "usp/py.typed" in names
    code = (
        "import sys, torch, usp\n"
        "q, k, v = torch.randn(3, 1, 16, 4, 8).unbind()\n"
        "out = usp.hybrid_attention(q, k, v, None, usp.partition(16, None, 'zigzag'), mask=usp.Mask(causal=True))\n"
        "expected = torch.nn.functional.scaled_dot_product_attention(\n"
        "    *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)\n"
        "assert torch.allclose(out, expected, atol=1e-6)\n"
        "usp.cost.predict_model(usp.cost.model('llama3_8b'), usp.cost.Plan(8), usp.cost.cluster('a100_80gb_1x8'),\n"
        "    seq=131072, batch=1, phase='prefill')\n"
        "print(usp.__file__)"
    )
    assert python(code, tmp_path / "site").strip() == str(tmp_path / "site" / "usp" / "__init__.py")


def test_the_readme_shows_the_example():
    """What a newcomer copies is what is run."""
    code = (ROOT / "examples/minimal.py").read_text()
    assert code.split('"""')[2].strip() in (ROOT / "README.md").read_text()
    assert len(code.splitlines()) < 30


EXAMPLES = {
    "decode": "pass_kv, lengths (1023, 1021), out (2, 4, 8, 64), on ring ranks (516, 507)",
    "minimal": "out (1, 250, 8, 64), whole (1, 1000, 8, 64)",
    "diffusion_block": "image (1, 250, 96), text (1, 77, 96)",
}


OF_MODELS = {  # run by tests/test_transformers.py: ranks, arguments, and what each rank says
    "sharded_prefill": (4, (), "weights 0.25 of 6413568, tokens (1007, 1000), 8 more"),
    "smollm2": (2, (2, 1), "loss 2.87895; The capital of France is Paris"),
    "train_llama": (8, (), "loss below 4: True"),
}


def test_every_example_is_run():
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == EXAMPLES.keys() | OF_MODELS.keys()
    assert all(len(path.read_text().splitlines()) < 60 for path in (ROOT / "examples").glob("*.py"))


@cache
def started() -> dict[str, subprocess.Popen]:
    """All examples at once: much of the start of one is on a single core."""
    return {name: start(name, 4) for name in EXAMPLES}


def start(name: str, count: int, *arguments: object) -> subprocess.Popen:
    """An example on so many ranks, as its first lines say."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    command += [f"examples/{name}.py", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT, "env": environment}
    return subprocess.Popen(command, **how)


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(name):
    text, errors = started()[name].communicate(timeout=120)
    assert started()[name].returncode == 0, errors[-3000:]
    assert text.count(EXAMPLES[name]) == 4
