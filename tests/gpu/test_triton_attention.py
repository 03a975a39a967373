"""The Triton attention on a GPU against the reference on the same device, and what only a GPU shows."""

from __future__ import annotations

import pytest
import torch

from lumen_core.attention import RECIPES, attention
from lumen_core.attention_bounds import dense_bounds, document_bounds, position_bounds
from lumen_core.formats import resolve_flavour
from lumen_core.kernels import attention_reference as reference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="Triton kernels run on a GPU only")
if torch.cuda.is_available():
    pytest.importorskip("triton", reason="needs the triton package")

from lumen_core.kernels.triton import attention as kernels  # noqa: E402

every_recipe = pytest.mark.parametrize("recipe", RECIPES)
DEVICE = torch.device("cuda")
# Decibels between kernel and reference. bf16: rounding of P, dS and results to bf16; the others: blocks of other sizes.
LEAST = {"bf16": 40.0, "fp8": 22.0, "mxfp8": 22.0}


def masks():
    """Name, queries, keys, batch, bounds."""
    yield "causal", 300, 300, 2, dense_bounds(300, 300, True, None, DEVICE)
    yield "whole blocks", 512, 512, 1, dense_bounds(512, 512, True, None, DEVICE)
    yield "no mask", 130, 700, 1, dense_bounds(130, 700, False, None, DEVICE)
    yield "more queries", 700, 130, 1, dense_bounds(700, 130, True, None, DEVICE)
    yield "more keys", 33, 700, 2, dense_bounds(33, 700, True, None, DEVICE)
    yield "window", 900, 900, 1, dense_bounds(900, 900, True, (200, 0), DEVICE)
    yield "two sides", 500, 500, 1, dense_bounds(500, 500, False, (70, 30), DEVICE)
    cu_q = torch.tensor([0, 3, 300, 300, 555, 700], device=DEVICE, dtype=torch.int32)
    cu_k = torch.tensor([0, 8, 400, 460, 460, 600], device=DEVICE, dtype=torch.int32)
    yield "documents", 710, 600, 1, document_bounds(cu_q, cu_k, 710, True, None)
    rows = [torch.cat([torch.arange(n) for n in lengths]) for lengths in ((300, 5, 95), (60, 1, 339))]
    yield "positions", 400, 400, 2, position_bounds(torch.stack(rows).to(DEVICE), True, None)


MASKS = {name: rest for name, *rest in masks()} if torch.cuda.is_available() else {}


def snr(got: torch.Tensor, want: torch.Tensor) -> float:
    got, want = got.double(), want.double()
    return float(10 * torch.log10(want.square().sum() / (got - want).square().sum().clamp(min=1e-30)))


def compare(recipe, queries, keys, batch, bounds, heads=4, kv_heads=2, width=128, dtype=torch.bfloat16, strided=False):
    p = reference.precision(recipe, resolve_flavour("auto", DEVICE))
    shapes = ((queries, heads), (keys, kv_heads), (keys, kv_heads), (queries, heads))
    if strided:
        q, k, v, g = (torch.randn(batch, h, n, width, device=DEVICE).to(dtype).transpose(1, 2) for n, h in shapes)
    else:
        q, k, v, g = (torch.randn(batch, n, h, width, device=DEVICE).to(dtype) for n, h in shapes)
    scale = width**-0.5
    out, lse = reference.forward(q, k, v, *bounds, scale, p)
    got, got_lse = kernels.forward(q, k, v, *bounds, scale, p)
    none = lse == -torch.inf
    assert torch.equal(got_lse == -torch.inf, none) and got.dtype == dtype and got_lse.dtype == torch.float32
    assert snr(got, out) > LEAST[recipe]
    assert snr(got_lse[~none], lse[~none]) > LEAST[recipe] + 10
    grad_lse = torch.randn_like(lse)
    wanted = reference.backward(g, grad_lse, q, k, v, out, lse, *bounds, scale, p)
    grads = kernels.backward(g, grad_lse, q, k, v, out, lse, *bounds, scale, p)
    for name, a, b in zip(("dq", "dk", "dv"), grads, wanted):
        assert a.shape == b.shape and a.dtype == b.dtype and a.isfinite().all(), name
        assert snr(a, b) > LEAST[recipe], name
    return grads


@every_recipe
@pytest.mark.parametrize("mask", MASKS)
def test_every_mask(recipe, mask) -> None:
    compare(recipe, *MASKS[mask])


@every_recipe
@pytest.mark.parametrize("width", [16, 40, 64, 80, 96, 128, 256])
def test_every_head_size(recipe, width) -> None:
    compare(recipe, *MASKS["causal"], width=width)


@every_recipe
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (8, 1), (6, 2)])
def test_grouped_queries_and_strided_inputs(recipe, heads, kv_heads) -> None:
    compare(recipe, *MASKS["positions"], heads=heads, kv_heads=kv_heads, width=64, strided=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@every_recipe
def test_other_input_dtypes(recipe, dtype) -> None:
    if recipe != "bf16" or dtype == torch.float16:
        compare(recipe, *MASKS["documents"], dtype=dtype)
    else:
        q = torch.randn(1, 20, 2, 64, device=DEVICE)
        assert attention(q, q, q, return_lse=True)[0].dtype == torch.float32


def random_inputs(tokens=1024, heads=8, kv_heads=2, width=128):
    shapes = ((1, tokens, heads, width), (1, tokens, kv_heads, width), (1, tokens, kv_heads, width))
    q, k, v = (torch.randn(s, device=DEVICE, dtype=torch.bfloat16).requires_grad_() for s in shapes)
    return q, k, v, torch.randn(shapes[0], device=DEVICE, dtype=torch.bfloat16)


@every_recipe
def test_noise_against_fp64(recipe) -> None:
    """The gates: FP8 20 dB forward and 15 dB gradients; bf16 40."""
    q, k, v, g = random_inputs(tokens=2048)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    grouped = (exact[0].transpose(1, 2), *(x.transpose(1, 2).repeat_interleave(4, 1) for x in exact[1:]))
    want = torch.nn.functional.scaled_dot_product_attention(*grouped, is_causal=True).transpose(1, 2)
    wanted = torch.autograd.grad(want, exact, g.double())
    out, _ = attention(q, k, v, recipe=recipe, return_lse=True)
    assert snr(out.detach(), want.detach()) >= (40 if recipe == "bf16" else 20)
    for got, expected in zip(torch.autograd.grad(out, (q, k, v), g), wanted):
        assert snr(got, expected) >= (38 if recipe == "bf16" else 15)
        assert recipe == "bf16" or snr(got, expected) <= 32  # or it was not quantized


@every_recipe
def test_equal_inputs_give_equal_bits(recipe) -> None:
    q, k, v, g = random_inputs()
    runs = []
    for _ in range(3):
        out, lse = attention(q, k, v, recipe=recipe, return_lse=True)
        runs.append((out, lse, *torch.autograd.grad(out, (q, k, v), g)))
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run))


@every_recipe
@pytest.mark.parametrize("packed", [False, True])
def test_nothing_waits_for_the_gpu(recipe, packed) -> None:
    q, k, v, g = random_inputs()
    options = {"return_lse": True}
    if packed:
        q, k, v, g = (x.detach()[0].requires_grad_() for x in (q, k, v, g))
        options["cu_seqlens_q"] = torch.tensor([0, 100, 1000, 1024], device=DEVICE, dtype=torch.int32)

    def step() -> None:
        out, _ = attention(q, k, v, recipe=recipe, window=(300, 0), **options)
        torch.autograd.grad(out, (q, k, v), g)

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@every_recipe
def test_memory_is_linear_in_tokens(recipe) -> None:
    peaks = []
    for tokens in (8192, 16384):
        q, k, v, g = random_inputs(tokens, heads=4, width=64)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out, _ = attention(q, k, v, recipe=recipe, return_lse=True)
        torch.autograd.grad(out, (q, k, v), g)
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del out, q, k, v, g
    assert peaks[1] <= 2.2 * peaks[0]


@every_recipe
def test_zero_and_masked_rows(recipe) -> None:
    q, k, v, g = random_inputs(300)
    with torch.no_grad():
        for x in (q, k, v, g):
            x[:, 40:200] = 0
    for keys in (300, 90):
        out, lse = attention(q, k[:, :keys], v[:, :keys], recipe=recipe, return_lse=True)
        grads = torch.autograd.grad(out, (q, k, v), g)
        assert all(x.isfinite().all() for x in (out, *grads))
        none = 300 - keys
        assert not out[:, :none].any() and not grads[0][:, :none].any() and (lse[..., :none] == -torch.inf).all()


@every_recipe
def test_offsets_beyond_2_31(recipe) -> None:
    """The last document of a pack whose q has more than 2**31 values equals that document alone."""
    tokens, last = 2**31 // (64 * 128) + 1024, 512
    q = torch.zeros(tokens, 64, 128, device=DEVICE, dtype=torch.bfloat16)
    k = torch.zeros(tokens, 8, 128, device=DEVICE, dtype=torch.bfloat16)
    q[-last:], k[-last:] = torch.randn_like(q[-last:]), torch.randn_like(k[-last:])
    cu = torch.arange(0, tokens, last, device=DEVICE, dtype=torch.int32)
    cu = torch.cat([cu[cu <= tokens - last], torch.full((1,), tokens, device=DEVICE, dtype=torch.int32)])
    out, lse = attention(q, k, k, cu_seqlens_q=cu, recipe=recipe, return_lse=True)
    alone, statistics = attention(q[None, -last:], k[None, -last:], k[None, -last:], recipe=recipe, return_lse=True)
    assert snr(out[-last:], alone[0]) > LEAST[recipe]
    torch.testing.assert_close(lse[:, -last:], statistics[0], rtol=1e-2, atol=1e-2)
