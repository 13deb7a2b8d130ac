"""Do the tests notice? Put one fault after another into a copy of the library; each must make a test fail.

python -m tests.test_mutations             all of them
python -m tests.test_mutations 3 17        some of them, by number
"""

from __future__ import annotations

import ast
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
TESTS = (
    "blocks",
    "merging",
    "kernels",
    "sharding",
    "cases",
    "comm",
    "heads",
    "scores",
    "balance",
    "ledger",
    "inference",
    "training",
    "nn",
    "cost",
    "cost_memory",
    "calibration",
    "fuzz",
    "hybrid",
    "project",
)
LIMIT_S = 600.0


class Mutation(NamedTuple):
    what: str
    file: str
    old: str
    new: str
    tests: str  # the tests that are tried first


MUTATIONS = (
    Mutation(
        "the sign of the offset between queries and keys",
        "blocks.py",
        "high = (high - (k.start - q.start)) // q.step",
        "high = (high + (k.start - q.start)) // q.step",
        "blocks",
    ),
    Mutation(
        "a window's near edge rounded outwards on striped shards",
        "blocks.py",
        "low = -((k.start - q.start - low) // q.step)",
        "low = (low - (k.start - q.start)) // q.step",
        "blocks",
    ),
    Mutation(
        "padding is real",
        "blocks.py",
        "first, end = _both(region, real)",
        "first, end = region",
        "blocks",
    ),
    Mutation(
        "other tokens taken for the same ones",
        "blocks.py",
        "high == 0 and q_pieces == k_pieces",
        "high == 0",
        "blocks",
    ),
    Mutation(
        "the last hop of every source dropped",
        "blocks.py",
        "if step == 0 or need[rank][source]",
        "if step == 0 or (need[rank][source] and step < len(need) - 1)",
        "cases",
    ),
    Mutation(
        "keys looked for at the wrong place of a message",
        "blocks.py",
        "first = before + block.k.start - here.start",
        "first = before",
        "cases",
    ),
    Mutation("a window one too long", "masks.py", "shift + 1 - window", "shift - window", "blocks"),
    Mutation("overlapping regions counted twice", "masks.py", "other.low - 1, min", "other.low, min", "blocks"),
    Mutation(
        "documents of one token lost", "masks.py", "if position == 0:", "if position == 0 and last != 0:", "blocks"
    ),
    Mutation(
        "zigzag dealt without turning round",
        "partitions.py",
        "(*range(self.ring), *reversed(range(self.ring)))",
        "(*range(self.ring), *range(self.ring))",
        "cases",
    ),
    Mutation(
        "lse of two parts is the larger one",
        "merging.py",
        "torch.logaddexp(lse, block_lse, out=lse)",
        "torch.maximum(lse, block_lse, out=lse)",
        "merging",
    ),
    Mutation(
        "NaN of a part without keys gets through",
        "merging.py",
        "torch.where(per_row(lse) == -torch.inf, 0.0, out) * per_row(weight)",
        "out * per_row(weight)",
        "merging",
    ),
    Mutation(
        "gradients travel and are summed in bfloat16",
        "ring.py",
        "wide = accumulator_dtype(k.dtype)\n        self.numels",
        "wide = k.dtype\n        self.numels",
        "comm",
    ),
    Mutation(
        "a visitor forgets what the ones before it added",
        "ring.py",
        "self.held[source] = self.arriving.pop(source)",
        "self.held[source] = self.arriving.pop(source).zero_()",
        "cases",
    ),
    Mutation(
        "home keeps only what came from others",
        "ring.py",
        "mine[:, at_home] += others[:, sent]",
        "mine[:, at_home] = others[:, sent]",
        "cases",
    ),
    Mutation(
        "the gradient through lse dropped",
        "ring.py",
        "None if dlse is None else dlse[rows, heads]",
        "None",
        "cases",
    ),
    Mutation(
        "the caller's scale ignored",
        "kernels/scores.py",
        "if scale is None else float(scale)",
        "",
        "cases",
    ),
    Mutation(
        "an edge block's lse in the wrong order",
        "kernels/sdpa.py",
        "grads = _cpu_backward(dout, q, k, v, out, _in_order(lse, 2, low)",
        "grads = _cpu_backward(dout, q, k, v, out, lse",
        "kernels",
    ),
    Mutation(
        "the sign of dlse",
        "kernels/sdpa.py",
        "out = torch.cat([out, *(-x for x",
        "out = torch.cat([out, *(x for x",
        "kernels",
    ),
    Mutation("dq without the scale", "kernels/tiled.py", ", p).mul_(terms.scale)", ", p)", "kernels"),
    Mutation(
        "softcap's slope left out of the gradient",
        "kernels/tiled.py",
        "ds.mul_(capped.div_(terms.softcap).square_().neg_().add_(1))",
        "pass",
        "scores",
    ),
    Mutation(
        "dropout forgotten in the gradient of v",
        "kernels/tiled.py",
        "dropped = p * kept",
        "dropped = p",
        "scores",
    ),
    Mutation("batch rows drop alike", "ring.py", "heads, work.row, i, j", "heads, 0, i, j", "scores"),
    Mutation(
        "dropout counts heads from each rank's own",
        "kernels/scores.py",
        "head=self.first_head + heads.start",
        "head=heads.start",
        "scores",
    ),
    Mutation(
        "the row constant of ALiBi left out of lse",
        "kernels/sdpa.py",
        "lse if shift is None else lse + shift",
        "lse",
        "scores",
    ),
    Mutation(
        "ALiBi blocks across the diagonal",
        "blocks.py",
        "elif b - a <= reach:",
        "elif True:",
        "scores",
    ),
    Mutation(
        "a bias for the wrong side of a bucket's start",
        "kernels/scores.py",
        "starts, right=True)",
        "starts, right=False)",
        "scores",
    ),
    Mutation("what rounding took is forgotten", "kernels/__init__.py", " + _part(rest, block.q)", "", "scores"),
    Mutation(
        "of a KV head on several ranks only one gradient kept",
        "ulysses.py",
        "out[:, :, where.start : where.stop] += part",
        "out[:, :, where.start : where.stop] = part",
        "heads",
    ),
    Mutation(
        "uneven heads served by the wrong KV heads",
        "heads.py",
        "first_q, first_k = q, k\n",
        "first_q, first_k = q, 0\n",
        "heads",
    ),
    Mutation(
        "no exchange of blocks",
        "balance.py",
        "busiest] > assignment.limit",
        "busiest] > 9 * assignment.limit",
        "balance",
    ),
    Mutation(
        "a key too few in what a block sees",
        "balance.py",
        "min(d - 1, y - 1 + high)",
        "min(d - 1, y - 2 + high)",
        "balance",
    ),
    Mutation("the sign of a sink", "merging.py", "torch.sigmoid(lse - sinks", "torch.sigmoid(lse + sinks", "heads"),
    Mutation(
        "joint queries see the keys of one rank alone",
        "attention.py",
        'gather(x, ring, "joint").split(batch)',
        "x.split(batch)",
        "heads",
    ),
    Mutation(
        "positions do not restart",
        "sharding.py",
        "torch.where(inside, rows[row] - first, restarted[row])",
        "torch.where(inside, rows[row], restarted[row])",
        "sharding",
    ),
    Mutation(
        "only one rank's share of a sum",
        "comm.py",
        "return all_to_all(x, ones, ones, group, kind).sum(0)",
        "return all_to_all(x, ones, ones, group, kind)[0]",
        "comm",
    ),
    Mutation(
        "of runs of two steps only the halves that are all seen",
        "blocks.py",
        "for half in _halves(k):",
        "for half in _halves(k)[:1]:",
        "ledger",
    ),
    Mutation(
        "an unfinished block is forgotten",
        "ledger.py",
        "(more if more and self.owner(blocks) == rank else 0)",
        "0",
        "ledger",
    ),
    Mutation(
        "the lowest level gets the block after the next",
        "ledger.py",
        "if left and _has_block_at(block, level, limit):",
        "if left:",
        "ledger",
    ),
    Mutation(
        "a step sees one token too few",
        "inference/decode.py",
        "min(stop, position + high + 1)",
        "min(stop, position + high)",
        "inference",
    ),
    Mutation(
        "what some tokens see is seen by all",
        "inference/decode.py",
        "(slots < edges[..., 1, :])).any(2)",
        "(slots < edges[..., 1, :])).any(2) | True",
        "inference",
    ),
    Mutation(
        "lse travels in half precision",
        "inference/partials.py",
        'bits = _fresh(rearrange(lse, "b h s -> b s h 1")).view(out.dtype)',
        'bits = _fresh(rearrange(lse.to(out.dtype).to(lse.dtype), "b h s -> b s h 1")).view(out.dtype)',
        "inference",
    ),
    Mutation(
        "numerators and denominators of the tree are not of one scale",
        "inference/decode.py",
        "weight = per_row(torch.exp(lse - peak))",
        "weight = per_row(torch.exp(lse))",
        "inference",
    ),
    Mutation(
        "a turn may start anywhere",
        "inference/prefill.py",
        "if kept and tokens.span(row)[0] != length:",
        "if False:",
        "inference",
    ),
    Mutation(
        "padding is kept",
        "inference/prefill.py",
        "return joined(shown)",
        "return joined([(start, stop)])",
        "inference",
    ),
    Mutation(
        "what nobody sees gets into a product",
        "inference/decode.py",
        "v = torch.where(shown.any(1)[..., None, None], v.to(wide), 0.0)",
        "v = v.to(wide)",
        "inference",
    ),
    Mutation(
        "a full cache takes more",
        "inference/cache.py",
        "if sum(counts) > self.capacity:",
        "if False:",
        "inference",
    ),
    Mutation(
        "labels shifted after they are cut",
        "training.py",
        'return shards | {"usp"',
        'return shards | ({"shift_labels": shifted(shards["labels"])} if "labels" in shards else {}) | {"usp"',
        "training",
    ),
    Mutation(
        "each rank's mean over its own count",
        "training.py",
        "whole, found = _summed(sums, everyone)",
        "whole, found = _summed(sums, everyone)[0], sums.new_tensor(float(count))",
        "cases",
    ),
    Mutation(
        "gradients that will be averaged are not scaled up",
        "training.py",
        'factor = math.prod([axis.size for axis in everyone]) if gradients == "mean" else 1',
        "factor = 1",
        "training",
    ),
    Mutation(
        "ignored tokens go into the head as they are",
        "nn.py",
        "part = part.masked_fill((labels == ignore_index)[..., None], 0.0)",
        "part = part",
        "nn",
    ),
    Mutation(
        "a tile keeps its activations",
        "nn.py",
        "checkpoint(function, *part, use_reentrant=False)",
        "function(*part)",
        "nn",
    ),
    Mutation(
        "a recomputed layer goes round the ring again",
        "nn.py",
        "[torch.ops.usp.ring_forward.default, torch.ops.usp.to_sequence.default]",
        "[torch.ops.usp.to_sequence.default]",
        "nn",
    ),
    Mutation(
        "the window of a layer is dropped",
        "integrations/transformers.py",
        "window = _window(module, sliding_window)",
        "window = None",
        "transformers",
    ),
    Mutation(
        "the softcap of a layer is dropped",
        "integrations/transformers.py",
        '"softcap": softcap}',
        '"softcap": None}',
        "transformers",
    ),
    Mutation(
        "padding that reaches the mask hook is dropped",
        "integrations/transformers.py",
        '    if attention_mask is not None:\n        raise ValueError(\n            "an attention mask',
        '    if False:\n        raise ValueError(\n            "an attention mask',
        "transformers",
    ),
    Mutation(
        "each rank's own last token instead of the sequence's",
        "integrations/transformers.py",
        "chosen = ((here < tokens.seq) & (here >= tokens.seq - count)).nonzero()[:, 0]",
        "chosen = torch.arange(len(here) - count, len(here))",
        "transformers",
    ),
    Mutation("ranks always agree", "comm.py", "if highest == -negated:", "if True:", "comm"),
    Mutation(
        "striped sources begin to hold a token less one rank later",
        "blocks.py",
        "edges = [holders, (d - c) % ring]",
        "edges = [holders, (d - c) % ring + 1]",
        "blocks",
    ),
    Mutation(
        "pairs that look alike are known by their distance alone",
        "blocks.py",
        "towards = q_shape, k_shape, q_ends == k_ends, *_relations",
        "towards = 0, 0, q_ends == k_ends, *_relations",
        "blocks",
    ),
    Mutation(
        "gradients of keys that are sent are forgotten",
        "cost/counts.py",
        'send(there, "ring_grad", sizes[source], wide_bytes)',
        'send(there, "ring_grad", sizes[source], workload.element_bytes)',
        "cost",
    ),
    Mutation(
        "a hop need not wait for its receiver",
        "cost/simulation.py",
        "arrival = max(begin[sender], begin[receiver]) + seconds",
        "arrival = begin[sender] + seconds",
        "cost",
    ),
    Mutation(
        "ranks of a node have one adapter each, however many share it",
        "cost/simulation.py",
        "shared = crossing[node] if",
        "shared = 1 if",
        "cost",
    ),
    Mutation(
        "other rings have adapters of their own",
        "cost/simulation.py",
        "crossing.get(places[rank], 0) + count",
        "crossing.get(places[rank], 0) + 1",
        "cost",
    ),
    Mutation(
        "what a node sends to all others goes through one adapter a rank",
        "cost/placement.py",
        "count * (ranks - count) for",
        "count for",
        "cost",
    ),
    Mutation(
        "rings are never of consecutive ranks",
        "cost/workload.py",
        'self.tensor * (1 if self.inner == "ring" else self.ulysses)',
        "self.tensor * self.ulysses",
        "cost",
    ),
    Mutation(
        "what does not fit is planned",
        "cost/planner.py",
        "if needs.total_bytes <= self.room_bytes:",
        "if needs.total_bytes <= 2 * self.room_bytes:",
        "cost",
    ),
    Mutation(
        "a buffer of keys is not counted where one arrives",
        "cost/memory.py",
        "messages = max(messages, len(held | arriving))",
        "messages = max(messages, len(held))",
        "cost_memory",
    ),
    Mutation(
        "what datasheets promise is called calibrated",
        "cost/timing.py",
        "basis = LOWER_BOUND if self.missing or self.bound else",
        "basis = LOWER_BOUND if self.bound else",
        "cost",
    ),
)


def mutated(mutation: Mutation) -> str:
    """The file with the fault in it.

    Raises:
        ValueError: if the place is not there exactly once.
    """
    text = (ROOT / "usp" / mutation.file).read_text()
    if text.count(mutation.old) != 1:
        raise ValueError(f"{mutation.what}: {mutation.old!r} is {text.count(mutation.old)} times in {mutation.file}")
    return text.replace(mutation.old, mutation.new)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=[x.what for x in MUTATIONS])
def test_it_can_still_be_put_in(mutation):
    ast.parse(mutated(mutation))


def caught(mutation: Mutation, folder: Path) -> str:
    """The test that failed with the fault and passes without it; empty if none does."""
    copy = folder / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "results", "outputs", "multirun", "__pycache__"))
    broken = copy / "usp" / mutation.file
    right, wrong = broken.read_text(), mutated(mutation)
    for name in (mutation.tests, *(x for x in TESTS if x != mutation.tests)):
        broken.write_text(wrong)
        output = pytest_on(copy, f"tests/test_{name}.py")
        if failed := re.search(r"^(?:FAILED|ERROR) (tests/\S+\.py(?:::.*?)?)(?: - .*)?$", output, re.MULTILINE):
            broken.write_text(right)
            again = pytest_on(copy, failed[1])
            if " passed" not in again or " failed" in again or "error" in again:
                raise RuntimeError(f"{failed[1]} fails without the fault too:\n{again[-2000:]}")
            return failed[1]
    return ""


def pytest_on(copy: Path, test: str) -> str:
    """What pytest prints for a test of a copy of the project."""
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-m", "hf or not hf", test]
    try:
        return subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=LIMIT_S).stdout
    except subprocess.TimeoutExpired:
        return f"FAILED {test} - still running after {LIMIT_S} s"


def main() -> None:
    wanted = [int(x) for x in sys.argv[1:]] or range(1, len(MUTATIONS) + 1)
    missed = tried = 0
    for number in wanted:
        mutation, start_s = MUTATIONS[number - 1], time.monotonic()
        if mutation.tests == "transformers" and not importlib.util.find_spec("transformers"):
            print(f"{number:2}  {mutation.file}: {mutation.what}\n    not run: needs transformers, see make hf")
            continue
        tried += 1
        with tempfile.TemporaryDirectory() as folder:
            test = caught(mutation, Path(folder))
        missed += not test
        seconds = time.monotonic() - start_s
        print(f"{number:2}  {mutation.file}: {mutation.what}\n    {test or 'NOT CAUGHT'} ({seconds:.0f} s)", flush=True)
    print(f"\n{tried - missed} of {tried} caught")
    sys.exit(missed > 0)


if __name__ == "__main__":
    main()
