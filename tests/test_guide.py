"""The guide's numbers: golden values without tolerance, verdicts, the counted causal work and the missing tables."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest

from analysis import published
from experiments import guide, guide_tables
from experiments import guide_quantities as holds

S, N, R = 10**6, 8, 175 * 10**12
L, D, H, K, HEAD_DIM, F, E = 80, 8192, 64, 8, 128, 28672, 2  # Llama 3 70B


def expected() -> dict[tuple[int, str], tuple[str, str]]:
    """By claim: the right value, found apart from this code, and the verdict."""
    with (Path(__file__).parent / "guide.csv").open(newline="") as file:
        return {(int(row["line"]), row["what"]): (row["right"], row["verdict"]) for row in csv.DictReader(file)}


def test_the_model():
    assert (holds.MODEL.layers, holds.MODEL.hidden, holds.MODEL.heads, holds.MODEL.kv_heads) == (L, D, H, K)
    assert (holds.MODEL.head_dim, holds.MODEL.intermediate) == (HEAD_DIM, F)
    assert holds.MODEL.params == 70_553_706_496
    assert holds.MODEL.layer_params == 2 * D * D + 2 * D * K * HEAD_DIM + 3 * D * F == 855_638_016
    assert holds.layer_bytes() == 1_711_276_032


def test_bytes_are_exact():
    assert holds.kv_bytes(S) == S * K * HEAD_DIM * 2 * L * E == 327_680_000_000
    assert holds.kv_bytes(S) / 8 == 40_960_000_000
    assert holds.kv_bytes(S) / 32 == 10_240_000_000
    assert holds.qkv_bytes(S // 8) == 2_560_000_000
    assert holds.hop_bytes(8) == 512_000_000
    assert holds.ring_sent_bytes(8) == 3_584_000_000
    assert holds.ring_sent_bytes(32) == 3_968_000_000
    assert holds.hop_bytes(1) == 4_096_000_000  # the limit of what a ring sends
    assert holds.ulysses_sent_bytes(8) == 4_032_000_000


def test_flops_are_exact():
    assert holds.attention_flops(S // N, S // N) == 512 * 10**12
    assert holds.attention_flops(S // N, S // N) / H == 8 * 10**12
    assert holds.model_attention_flops(S) == 2_621_440 * 10**12
    assert holds.linear_flops(S) == 2 * 855_638_016 * L * S == 136_902_082_560_000_000


def test_times_are_exact():
    hop, step = holds.hop_bytes(N), holds.attention_flops(S // N, S // N) / R
    assert hop / holds.LINK_BYTES_PER_S * 1000 == Fraction(128, 75)  # 1.70667 ms
    assert hop / holds.NETWORK_BYTES_PER_S * 1000 == Fraction(512, 25)  # 20.48 ms
    assert step / (hop / holds.LINK_BYTES_PER_S) == Fraction(12000, 7)
    assert step / (hop / holds.NETWORK_BYTES_PER_S) == Fraction(1000, 7)
    assert holds.tokens_to_hide(holds.LINK_BYTES_PER_S) == Fraction(E * R * K, 2 * H * 300 * 10**9) == Fraction(875, 12)
    assert holds.tokens_to_hide(holds.NETWORK_BYTES_PER_S) == 875


@pytest.mark.parametrize("gpus", [8, 16, 32, 64, 128])
def test_prefill_is_exact(gpus):
    full = holds.prefill_s(S, gpus, 1, linear=False) / 60
    assert full == Fraction(2_621_440 * 10**12, gpus * R * 60)
    assert holds.prefill_s(S, gpus, Fraction(1, 2), linear=False) / 60 == full / 2
    assert float(full) == pytest.approx(31.2076 * 8 / gpus, rel=1e-5)


def test_decode_is_exact():
    layer_bytes = 1_711_276_032
    for batch, ms in ((1, 13.68), (6, 39.28)):
        found = holds.decode_s(S, batch)
        assert found == L * (Fraction(layer_bytes, 8) + batch * Fraction(S, 4) * 2 * HEAD_DIM * E) / (2 * 10**12)
        assert round(1000 * float(found), 2) == ms
    assert holds.gather_s(8, 300 * 10**9) == Fraction(L * 7 * layer_bytes, 8 * 300 * 10**9)
    assert round(1000 * float(holds.gather_s(8, holds.LINK_BYTES_PER_S))) == 399
    assert round(1000 * float(holds.gather_s(32, holds.NODE_BYTES_PER_S))) == 663


def test_causal_pairs_are_half_of_all_and_one_more_a_token():
    for layout in (holds.CONTIGUOUS, holds.ZIGZAG, holds.STRIPED):
        assert Fraction(sum(holds.rank_pairs(layout, N, S)), S * S) == Fraction(S + 1, 2 * S)


@pytest.mark.parametrize("ring", [2, 3, 8, 16, 32, 64])
def test_zigzag_is_two_less_one_in_n_times_as_fast(ring):
    """A failure means that the speed-up is the guide's 4N/(2N+1), with diagonal blocks whole, or no formula's."""
    assert holds.speed_up(ring) == Fraction(2 * ring - 1, ring)
    assert holds.most(holds.CONTIGUOUS, ring) == ring - Fraction(1, 2)
    assert set(holds.rank_blocks(holds.ZIGZAG, ring)) == {Fraction(ring, 2)}
    assert sum(holds.rank_blocks(holds.CONTIGUOUS, ring)) == Fraction(ring * ring, 2)


@pytest.mark.parametrize("ring", [2, 3, 8, 16])
@pytest.mark.parametrize("half", [1, 7, 64])
def test_the_speed_up_of_a_finite_sequence(ring, half):
    seq = 2 * ring * half
    assert max(holds.rank_pairs(holds.CONTIGUOUS, ring, seq)) == (4 * ring - 2) * half**2 + half
    assert set(holds.rank_pairs(holds.ZIGZAG, ring, seq)) == {2 * ring * half**2 + half}
    assert holds.speed_up_at(ring, seq) == Fraction((4 * ring - 2) * half + 1, 2 * ring * half + 1)
    assert holds.speed_up_at(ring, seq, own_key=Fraction(1, 2)) == Fraction(2 * ring - 1, ring)


def test_ranks_that_wait_for_each_other_in_every_step():
    """128 tokens a rank, in blocks of 128 x 128."""
    found = {
        layout: Fraction(sum(map(max, holds.step_pairs(layout, N, 1024))), 128**2)
        for layout in (holds.CONTIGUOUS, holds.ZIGZAG, holds.STRIPED)
    }
    assert found[holds.CONTIGUOUS] == Fraction(15, 2) + Fraction(1, 256)
    assert found[holds.ZIGZAG] == 4 + Fraction(1, 256)
    assert found[holds.STRIPED] == 4 + Fraction(1, 32)
    assert guide_tables.spread(holds.ZIGZAG, N, 1024) == 0
    assert guide_tables.spread(holds.STRIPED, N, 1024) == 128


def test_every_claim_has_a_formula_and_a_value():
    claims = [(x.line, x.what) for x in published.claims()]
    assert len(claims) == len(set(claims)) == 123
    assert claims == [(x.line, x.what) for x in guide.formulas()] == list(expected())
    for number in guide.numbers():
        right, verdict = expected()[number.claim.line, number.claim.what]
        assert float(number.exact) == pytest.approx(float(right), rel=1e-9), number.claim
        assert number.verdict == verdict, number.claim


def test_verdicts_in_all():
    found = Counter(x.verdict for x in guide.numbers())
    assert found == {
        "exact": 12, "rounded": 63, "convention": 19, "inconsistent": 15, "wrong": 12, "no source": 2,
    }  # fmt: skip


def test_wrong_numbers_are_listed_as_wrong():
    found = {(x.claim.line, x.claim.claimed): guide.shown(x.exact) for x in guide.numbers() if x.verdict == "wrong"}
    assert found == {
        (67, "125000"): "250000",
        (221, "4"): "5.2224",
        (257, "64"): "8",
        (490, "26"): "27.8559",
        (491, "6"): "6.96398",
        (543, "74"): "399.298",
        (543, "89"): "663.119",
        (562, "7.5"): "19.6382",
        (564, "4.2"): "26.1777",
        (565, "1.4"): "0.229203",
        (571, "13"): "48.0282",
        (572, "28"): "7.4956",
    }


@pytest.mark.parametrize(
    ("claimed", "exact", "more", "verdict"),
    [
        ("2.0", "2", {}, "exact"),
        ("2.6", "2.56", {}, "rounded"),
        ("2.6", "2.551", {}, "rounded"),
        ("1700", "1714", {}, "rounded"),
        ("2.0", "2.56", {}, "wrong"),
        ("2.0", "2.56", {"against": ("2.6", "")}, "inconsistent"),
        ("2.0", "2.56", {"against": ("2.04", "")}, "wrong"),
        ("62.5", "63.02", {"against": ("63.1", "")}, "inconsistent"),
        ("62.5", "63.02", {}, "rounded"),
        ("17", "16", {"convention": ("2*N + 1", "")}, "convention"),
        ("18", "16", {"convention": ("2*N + 1", "")}, "wrong"),
        ("1.88", "1.875", {"convention": ("32/17", "")}, "rounded"),
        ("50", "43", {"span": ("30", "50")}, "rounded"),
        ("26", "28", {"span": ("16", "26")}, "wrong"),
        ("1.43", "7.36/5.14", {"rates": ("7.36", "5.14")}, "no source"),
        ("1.85", "20.983/11.332", {"rates": ("20.983", "11.332")}, "rounded"),
    ],
)
def test_the_verdict_follows_from_the_numbers(claimed, exact, more, verdict):
    number = guide.Number(published.Claim(1, "", claimed, ""), guide.Formula(1, "", exact, **more))
    assert number.verdict == verdict


def test_formulas_are_not_rounded():
    assert guide.value("0.1 + 0.2") == Fraction(3, 10)
    assert guide.value("7.36/5.14") == Fraction(736, 514)
    assert guide.value("70e9*2/GB") == 140
    with pytest.raises(NameError):
        guide.value("open")


def test_memory_at_every_scale():
    totals = {8: "63.02", 16: "32.51", 32: "17.255", 64: "9.6275"}
    for gpus, total in totals.items():
        assert holds.memory(gpus).total_bytes / 10**9 == Fraction(total)
    assert [holds.largest_batch(gpus) for gpus in totals] == [1, 3, 6, 13]
    assert holds.largest_batch(32, 8) == 5
    rows = {row[0]: row for row in guide_tables.scales().rows}
    assert rows["8"][1:6] == ("17.50", "40.96", "2.56", "2.00", "63.02")
    assert rows["32"][5:7] == ("17.26", "17.1")
    assert rows["8"][-1] == "21.50"


def test_side_by_side():
    rows = {name: (ulysses, ring) for name, ulysses, ring in guide_tables.side_by_side().rows}
    assert rows["GB sent"] == ("4.03, falling as 1/N", "3.58, rising to 4.10")
    assert rows["exposed, NVLink"][0].startswith("13.4 ms, 0.057 %")
    assert rows["KV cache, GB"] == ("40.96", "40.96")
    assert rows["communication"][1] == "7 hops of 0.512 GB"


def test_the_complete_memory_picture():
    totals = [(row[0], row[-2], row[-1]) for row in guide_tables.complete_memory().rows]
    assert totals == [
        ("naive", "128,488.16", "no"),
        ("FlashAttention", "488.16", "no"),
        ("+ FSDP 8", "365.66", "no"),
        ("+ Ulysses 8 or ring 8", "63.02", "yes"),
        ("ring 32, or Ulysses 8 x ring 4", "17.26", "yes"),
    ]


def test_prefill_and_decode():
    rows = {row[0]: row[1:] for row in guide_tables.prefill().rows}
    assert rows["8"] == ("23.41", "31.21", "15.60", "17.23", "30.68", "15.34", "27.86", "142.9 / 71.4")
    assert rows["32"][-1] == "35.7 / 17.9"
    assert rows["64"][-1] == "17.9 / 8.9"
    assert [row[1].split()[-1] for row in guide_tables.decode().rows] == ["399.3", "663.1", "13.7", "39.3"]


def test_block_0_is_divided_once_and_rescaled_to_the_larger_maximum():
    right = guide_tables.softmax()
    assert guide_tables.blockwise() == pytest.approx(right, rel=1e-15)
    assert guide_tables.blockwise(normalise_first=True) < 0.9 * right
    assert guide_tables.blockwise(block_maximum=True) < 0.9 * right


def test_errors_say_what_holds():
    found = {error.name: error.holds for error in guide_tables.errors()}
    assert list(found) == [f"E{n}" for n in range(1, 16)]
    for name, figures in {
        "E3": ("250,000", "1.024"), "E4": ("8 times",), "E5": ("62,500", "1.85", "1.18", "1.23", "1.875"),
        "E6": ("5.2 %", "10.4 %", "40.8 %", "81.6 %"), "E7": ("27.9", "7.0", "15.3", "3.8"), "E8": ("399", "663"),
        "E9": ("26.2 min", "0.23", "39.3"), "E10": ("48 s", "7.5"), "E11": ("leaves 5",), "E12": ("106.54", "105.5"),
        "E14": ("0 pairs", "125,000"), "E15": ("16.98", "21.50", "2.05", "1.71", "2.56", "0.51"),
    }.items():  # fmt: skip
        for figure in figures:
            assert figure in found[name], (name, figure)


def test_the_command_prints_every_claim_without_torch(tmp_path):
    code = "import sys; from experiments import guide; guide.main(sys.argv[1:]); assert 'torch' not in sys.modules"
    run = [sys.executable, "-c", code, "--csv", str(tmp_path / "guide.csv")]
    output = subprocess.run(run, check=True, capture_output=True, text=True, cwd=Path(__file__).parent.parent).stdout
    assert max(map(len, output.splitlines())) <= 120
    for claim in published.claims():
        pattern = rf"^ *{claim.line}  {re.escape(claim.what)} +{re.escape(claim.claimed)} "
        assert re.search(pattern, output, re.MULTILINE), claim
    for section in ("4.6.2", "4.7.2", "4.8", "4.9", "4.9.3", "4.10"):
        assert re.search(rf"^{re.escape(section)} ", output, re.MULTILINE), section
    with (tmp_path / "guide.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(int(row["line"]), row["what"]) for row in rows] == list(expected())
    assert all(row["formula"] for row in rows)


def test_only_one_verdict(capsys):
    guide.main(["--only", "wrong"])
    output = capsys.readouterr().out
    assert "\n12 numbers: 12 wrong\n" in output
    assert "4.6.2" not in output
