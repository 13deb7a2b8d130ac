"""Calls that nobody thought of, against the definition.

python -m tests.test_fuzz 2000 --seed 1    that many drawn calls; a failure is made small and printed
python -m tests.test_fuzz "Case(...)"      one call again, as a failure printed it
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from itertools import pairwise

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from tests import hybrid, pool
from tests.hybrid import Case
from usp import Mask, Region

LEAST = {torch.bfloat16: 0.04}  # ten roundings: with one or two head dims nothing averages out (2.1 % seen at most)
SIZE = 1.0  # of the terms: a gradient may be what is left when they cancel (a query with one key has dq 0)


@st.composite
def spans(draw, end: int) -> tuple[tuple[int, int], ...]:
    """Increasing spans in [0, end), often touching, sometimes with gaps."""
    cuts = sorted(draw(st.sets(st.integers(0, end), max_size=8)))
    return tuple(pair for pair in pairwise(cuts) if draw(st.integers(0, 3)))


@st.composite
def regions(draw, seq: int, key_seq: int) -> tuple[Region, ...]:
    found = []
    for _ in range(draw(st.integers(0, 3))):
        (a, b), (c, d) = (sorted(draw(st.lists(st.integers(0, end), min_size=2, max_size=2))) for end in (seq, key_seq))
        low, high = (draw(st.none() | st.integers(-key_seq, key_seq)) for _ in range(2))
        try:
            Mask(True, regions=[[region := Region((a, b), (c, d), low, high)]])
        except ValueError:
            continue  # shows nothing
        found.append(region)
    return tuple(found)


@st.composite
def cases(draw) -> Case:
    """Any mesh of up to 8 ranks, any lengths and layouts, any mask, any heads, any terms of scores, any options."""
    ring = draw(st.integers(1, 8))
    ulysses = draw(st.integers(1, min(4, 8 // ring)))
    layout = draw(st.sampled_from(["contiguous", "zigzag", "striped", "balanced"]))
    owners = draw(st.permutations(list(range(ring)) * draw(st.integers(1, 3)))) if draw(st.booleans()) else None
    layout = "contiguous" if layout == "balanced" and owners is None else layout
    seq = draw(st.integers(1, 48) | st.integers(49, 300))
    batch = draw(st.integers(1, 3))
    groups, replicate = draw(st.integers(1, 4)), draw(st.booleans())
    kv_heads = draw(st.integers(-(-ulysses // groups) if replicate else ulysses, 2 * ulysses))
    causal, window = draw(st.booleans()), draw(st.none() | st.integers(1, 24) | st.integers(25, 300))

    key_seq = key_layout = None
    start: int | tuple[int, ...] = 0
    if draw(st.integers(0, 2)) == 0:
        key_seq = draw(st.integers(1, 64))
        start = draw(st.integers(0, 64) | st.lists(st.integers(0, 64), min_size=batch, max_size=batch).map(tuple))
        if causal and seq != key_seq and start in (0, (0,) * batch):
            start = 1
    rows = draw(st.sampled_from([1, batch]))
    last = max(seq + (start if isinstance(start, int) else min(start)), key_seq or 0)
    documents = key_documents = shown = None
    if draw(st.booleans()):
        documents = [draw(spans(last if key_seq else seq)) for _ in range(rows)]
        if key_seq and draw(st.booleans()):
            pairs = [list(zip(row, draw(spans(key_seq)), strict=False)) for row in documents]
            documents, key_documents = ([tuple(x[n] for x in row) for row in pairs] for n in (0, 1))
    if draw(st.integers(0, 2)) == 0:
        shown = [draw(regions(last, key_seq or seq)) for _ in range(rows)]
    mask = Mask(causal, window, documents, key_documents, shown)
    if key_seq and draw(st.booleans()):
        key_layout = draw(st.sampled_from(["contiguous", "zigzag", "striped"]))
        if mask.ordered and ring > 1 and (layout == "striped") != (key_layout == "striped"):
            key_layout = None

    options = {"replicate_kv": True} if replicate else {}
    softcap, alibi = draw(st.sampled_from([None, None, 0.7, 20.0])), draw(st.integers(0, 2)) == 0
    bias = draw(st.sampled_from([None, None, None, "t5 encoder", "t5 decoder", "clipped"]))
    dropout = (draw(st.sampled_from([0.1, 0.8])), draw(st.integers(0, 2**63 - 1))) if draw(st.booleans()) else None
    if draw(st.booleans()):
        options["scale"] = draw(st.sampled_from([0.05, 0.5, 1.5]))
        options["exchange"] = draw(st.sampled_from(["ring", "all_gather"]))
        options["backend"] = draw(st.sampled_from(["auto", "sdpa", "tiled"]))
        options["check_ranks"] = draw(st.booleans())
        options["float32_delta"] = draw(st.booleans())
        if options["backend"] == "sdpa":
            softcap = bias = dropout = None
            alibi = alibi and (key_layout is None or (layout == "striped") == (key_layout == "striped"))
    return Case(
        *(ring, ulysses, layout, seq, mask),
        heads=kv_heads * groups,
        kv_heads=kv_heads,
        head_dim=draw(st.integers(1, 17)),
        head_dim_v=draw(st.integers(1, 17)),
        batch=batch,
        dtype=draw(st.sampled_from([torch.float64, torch.float64, torch.float32, torch.bfloat16])),
        start=start,
        key_seq=key_seq,
        key_layout=key_layout,
        lse=draw(st.booleans()),
        owners=tuple(owners) if owners and "balanced" in (layout, key_layout) else None,
        sinks=draw(st.integers(0, 3)) == 0,
        softcap=softcap,
        alibi=alibi,
        bias=bias,
        dropout=dropout,
        options=tuple(options.items()),
    )


def check(ranks, case: Case) -> None:
    try:
        ranks(case.ring * case.ulysses)(hybrid.worst, [case], LEAST.get(case.dtype, 0.0), SIZE)
    except AssertionError as error:
        again = f"python -m tests.test_fuzz {shlex.quote(repr(case))}"
        raise AssertionError(f"{error}\n\nTo see it again:\n{again}") from None


def fuzz(ranks, examples: int, seed: int) -> None:
    """Draw calls; the first that is wrong is made as small as it can be, and raised."""

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=examples,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        print_blob=False,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(cases())
    def draw(case: Case) -> None:
        check(ranks, case)

    draw()


def test_drawn_calls(ranks):
    """The same ones in every run; `make fuzz` draws more."""
    fuzz(ranks, 60, seed=0)


def test_a_failure_says_how_to_see_it_again(ranks):
    """And what it prints is that call."""
    case = Case(2, 1, seq=5, mask=Mask(True, regions=[[Region((0, 2), (0, 2))]]), dtype=torch.float32, lse=False)

    def ranks_that_fail(world):
        raise AssertionError("dq is off")

    with pytest.raises(AssertionError, match="dq is off") as caught:
        check(ranks_that_fail, case)
    command = shlex.split(str(caught.value).splitlines()[-1])
    assert command[:3] == ["python", "-m", "tests.test_fuzz"]
    assert parsed(command[3]) == case
    check(ranks, case)


def parsed(text: str) -> Case:
    return eval(text, {"Case": Case, "Mask": Mask, "Region": Region, "torch": torch})


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.test_fuzz", description=__doc__)
    parser.add_argument("what", nargs="?", default="2000", help="how many calls to draw, or one call to run again")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    pools, start_s = pool.Pools(), time.monotonic()
    try:
        if arguments.what.isdigit():
            fuzz(pools.of, int(arguments.what), arguments.seed)
        else:
            check(pools.of, parsed(arguments.what))
    except (AssertionError, hypothesis.errors.Flaky) as error:
        sys.exit(str(error))
    finally:
        pools.close()
    print(f"{arguments.what} with seed {arguments.seed}: nothing found in {time.monotonic() - start_s:.0f} s")


if __name__ == "__main__":
    main()
