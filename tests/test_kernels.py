"""Every backend does every kind of block: one conformance test for all, forward and backward."""

from __future__ import annotations

from typing import NamedTuple

import jaxtyping
import pytest
import torch

import usp
from tests import oracle
from tests.test_blocks import band, check_form
from usp import kernels
from usp.blocks import Block, Kind
from usp.kernels import sdpa
from usp.kernels.scores import Scores, Terms

BLOCKS = {
    "full": Block(range(3, 40), range(5, 70)),
    "one by one": Block(range(3, 4), range(5, 6)),
    "causal": Block(range(2, 60), range(7, 65), None, 0),
    "causal, tall": Block(range(0, 70), range(4, 30), None, 0),
    "edge": Block(range(10, 50), range(0, 40), 0, None),
    "edge, tall": Block(range(0, 60), range(20, 45), -35, None),
    "band": Block(range(0, 64), range(0, 64), -8, 0),
    "band, two-sided": Block(range(0, 64), range(6, 70), -5, 5),
    "band, one wide": Block(range(0, 32), range(0, 32), 0, 0),
    "band, tall": Block(range(0, 70), range(10, 40), -50, 3),
    "band, over several tiles": Block(range(0, 300), range(0, 300), -199, 0),
    "edge, over several tiles": Block(range(0, 300), range(0, 300), 0, None),
    "causal, over several tiles": Block(range(0, 300), range(0, 300), None, 0),
}
HEADS = {"MHA": (4, 4), "GQA": (6, 2), "MQA": (3, 1)}


def test_the_blocks_are_ones_that_occur():
    for block in BLOCKS.values():
        check_form(block)
    assert {block.kind for block in BLOCKS.values()} == set(Kind)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize("backend", usp.backends())
def test_conformance(backend, block, dtype):
    """A block's (out, lse), and its shares of the gradients when other keys were seen too, with and without dlse."""
    if len(block.q) > 100:
        check_block(backend, block, dtype, 4, 2, 32, 24, with_lse=True)
        return
    for heads, kv_heads in HEADS.values():
        for head_dim, head_dim_v in ((32, 32), (24, 40), (40, 8)):
            check_block(backend, block, dtype, heads, kv_heads, head_dim, head_dim_v, with_lse=head_dim_v != 8)


def check_block(backend, block, dtype, heads, kv_heads, head_dim, head_dim_v, with_lse) -> None:
    torch.manual_seed(0)
    rows, columns = block.q.stop + 3, block.k.stop + 2

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(2, *shape, dtype=torch.float64).to(dtype)

    q, k, v = normal(rows, heads, head_dim), normal(columns, kv_heads, head_dim), normal(columns, kv_heads, head_dim_v)
    dout, other_out = normal(rows, heads, head_dim_v), normal(rows, heads, head_dim_v)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    other_lse, dlse = torch.randn(2, heads, rows, dtype=wide), torch.randn(2, heads, rows, dtype=wide)
    options = oracle.Options(scale=0.9 * head_dim**-0.5)
    terms = Terms(options.scale)

    def reference(
        dtype: torch.dtype, out_dtype: torch.dtype
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
        a, b = slice(block.q.start, block.q.stop), slice(block.k.start, block.k.stop)
        q_, k_, v_ = (x.to(dtype).detach().requires_grad_() for x in (q[:, a], k[:, b], v[:, b]))
        out, lse = oracle.attention(q_, k_, v_, band(block).expand(2, -1, -1), options)
        whole_out, whole_lse = usp.merge(out, lse, other_out[:, a].to(dtype), other_lse[:, :, a].to(lse.dtype))
        loss = (whole_out * dout[:, a].to(dtype)).sum()
        if with_lse:
            loss = loss + (whole_lse * dlse[:, :, a]).sum()
        dq, dk, dv = torch.autograd.grad(loss, (q_, k_, v_))
        values = {"out": out.detach(), "lse": lse.detach(), "dq": dq, "dk": dk, "dv": dv}
        return values, whole_out.detach().to(out_dtype), whole_lse.detach()

    exact, part_out, part_lse = reference(torch.float64, dtype)
    plain = None if dtype in oracle.EXACT else reference(dtype, dtype)[0]
    expected = oracle.Answer(exact, plain)
    whole_out, whole_lse = torch.zeros(2, rows, heads, head_dim_v, dtype=dtype), torch.zeros(2, heads, rows, dtype=wide)
    whole_out[:, block.q.start : block.q.stop] = part_out
    whole_lse[:, :, block.q.start : block.q.stop] = part_lse.to(wide)

    out, lse = kernels.forward(backend, q, k, v, block, terms)
    assert lse.dtype == wide
    dq, dk, dv, dtable = kernels.backward(
        backend, dout, q, k, v, whole_out, whole_lse, dlse if with_lse else None, block, terms
    )
    assert dtable is None
    for name, x in {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}.items():
        error, allowed = oracle.relative_error(x, exact[name]), oracle.tolerance(name, dtype, expected)
        assert error <= allowed, (name, error, allowed, heads, kv_heads, head_dim, head_dim_v, with_lse)


def test_strided_inputs():
    """Views of packed projections, transposed and expanded tensors are as good as any.

    PyTorch's op takes unit stride in the last dim for granted: every other element gives wrong numbers, silently.
    """
    torch.manual_seed(0)
    packed = torch.randn(2, 20, 4, 3, 32, dtype=torch.float64)
    q, k, v = packed[..., 0, ::2], packed[..., 1, :16], packed[:, :1, :, 2, 1::2].expand(-1, 20, -1, -1)
    for backend in usp.backends():
        out, lse = kernels.forward(backend, q, k, v, Block(range(20), range(20), None, 0), Terms(0.25))
        seen = torch.ones(2, 20, 20, dtype=torch.bool).tril()
        expected = oracle.attention(q, k, v, seen, oracle.Options(scale=0.25))
        assert oracle.relative_error(out, expected[0]) < 1e-12
        assert oracle.relative_error(lse, expected[1]) < 1e-12


class Like(NamedTuple):
    """What select looks at, also of devices that are not here."""

    device: torch.device
    dtype: torch.dtype
    shape: tuple[int, ...]


def select(name: str, device: str, dtype: torch.dtype, head_dim: int, lse_gradient: bool = False) -> str:
    x = Like(torch.device(device), dtype, (1, 8, 2, head_dim))
    return kernels.select(name, x, x, Scores(scale=0.1), lse_gradient=lse_gradient, span=8)


def test_auto_takes_the_first_that_can(monkeypatch):
    monkeypatch.setitem(jaxtyping.config.__dict__, "jaxtyping_disable", True)
    assert select("auto", "cpu", torch.float64, 64) == "sdpa"
    assert select("auto", "cuda", torch.bfloat16, 256) == "sdpa"
    assert select("auto", "cuda", torch.bfloat16, 256, lse_gradient=True) == "tiled"
    assert select("auto", "cuda", torch.float32, 64) == "tiled"
    assert select("auto", "cuda", torch.bfloat16, 512) == "tiled"


def test_what_a_backend_cannot_do_is_refused_by_name(monkeypatch):
    monkeypatch.setitem(jaxtyping.config.__dict__, "jaxtyping_disable", True)
    with pytest.raises(ValueError, match=r"backend='sdpa' cannot do dtype=torch.float32.*cuda.*\['tiled'\]"):
        select("sdpa", "cuda", torch.float32, 64)
    with pytest.raises(ValueError, match=r"backend='flush' is not one of \['auto', 'sdpa', 'tiled'\]"):
        select("flush", "cpu", torch.float32, 64)
    with pytest.raises(ValueError, match=r"dtype=torch\.int32"):
        select("auto", "cpu", torch.int32, 64)


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_the_cuda_path_fits_its_ops(block):
    """No device here: shapes and argument lists are checked on the meta device, windows against their definition."""
    window = sdpa._cuda_window(
        torch.empty(1, len(block.q), 1, 1), torch.empty(1, len(block.k), 1, 1), block.low, block.high
    )
    shift = len(block.k) - len(block.q)  # FlashAttention's windows start from the bottom right corner
    offset = torch.arange(len(block.k))[None] - torch.arange(len(block.q))[:, None] - shift
    seen = torch.ones_like(offset, dtype=torch.bool)
    if (left := window["window_size_left"]) >= 0:
        seen &= offset >= -left
    if (right := window["window_size_right"]) >= 0:
        seen &= offset <= right
    assert torch.equal(seen, band(block))
    rows, columns = len(block.q), len(block.k)
    q = torch.empty(2, rows, 4, 64, device="meta", dtype=torch.bfloat16)
    k = torch.empty(2, columns, 2, 64, device="meta", dtype=torch.bfloat16)
    out, lse = sdpa._cuda_forward(q, k, k, block.low, block.high, 0.1)
    assert out.shape == q.shape
    assert lse.shape == (2, 4, rows)
    grads = sdpa._cuda_backward(out, q, k, k, out, lse, block.low, block.high, 0.1)
    assert [x.shape for x in grads] == [q.shape, k.shape, k.shape]
