"""The AITER bindings against a strict fake: the numbers of the reference, and a reason wherever they step aside."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from fakes import aiter as fake

from lumen_core import casts
from lumen_core import quantize as quant
from lumen_core.formats import element_format, flavour_of
from lumen_core.kernels import gemm as gemms
from lumen_core.kernels import registry
from lumen_core.kernels.aiter import gemm as aiter_gemm
from lumen_core.kernels.aiter import probe
from lumen_core.kernels.aiter import quantize as aiter_quantize
from lumen_core.kernels.gemm import GEMM, query_of
from lumen_core.kernels.quantize import QUANTIZE
from lumen_core.kernels.query import QuantizeQuery
from lumen_core.tensor import QuantizedTensor, quantize

GENERATIONS = ("wheel", "head")
ARCHS = ("gfx942", "gfx950")
TENSOR, ROW, CODES, WEIGHT, MX = (0, 0), (1, 0), (1, 128), (128, 128), (1, 32)


@contextlib.contextmanager
def machine(generation: str, arch: str, **options: Any) -> Iterator[None]:
    with fake.installed(generation, arch, **options), probe.pretend(arch):
        yield


@pytest.fixture(params=[(g, a) for g in GENERATIONS for a in ARCHS], ids="-".join)
def amd(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    with machine(*request.param):
        yield request.param


def operand(rows: int, columns: int, block: tuple[int, int], arch: str, name: str = "e4m3") -> QuantizedTensor:
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)) * torch.logspace(-1, 1, columns)
    x[0, :128] = 0
    codes, scale = casts.quantize(x, element_format(name, flavour_of(arch)), block, mx=block == MX)
    return QuantizedTensor(codes, scale, element_format(name, flavour_of(arch)), block, (rows, columns))


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape
    torch.testing.assert_close(got.float(), want.float(), rtol=2**-7, atol=2**-7 * want.float().abs().max().item())


# --- GEMMs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("blocks", "function"),
    [
        ((TENSOR, TENSOR), "hipb_mm"),
        ((ROW, ROW), "gemm_a8w8"),
        ((ROW, TENSOR), "gemm_a8w8"),
        ((TENSOR, ROW), "gemm_a8w8"),
        ((CODES, WEIGHT), "gemm_a8w8_blockscale"),
    ],
    ids=str,
)
@pytest.mark.parametrize("m", [16, 80])
def test_products_are_those_of_the_reference(blocks, function, m, amd):
    for out_dtype in (torch.bfloat16, torch.float16):
        a, b = operand(m, 2560, blocks[0], amd[1]), operand(256, 2560, blocks[1], amd[1])
        fake.calls.clear()
        assert GEMM.choose(query_of(a, b, out_dtype)).name == "aiter"
        close(gemms.gemm(a, b, out_dtype), gemms.reference.gemm(a, b, out_dtype))
        assert fake.calls[-1] == function


def test_an_odd_contraction_is_filled_up(amd):
    for block in (TENSOR, ROW):
        a, b = operand(24, 333, block, amd[1]), operand(48, 333, block, amd[1])
        assert GEMM.choose(query_of(a, b, torch.bfloat16)).name == "aiter"
        close(gemms.gemm(a, b, torch.bfloat16), gemms.reference.gemm(a, b, torch.bfloat16))


def test_one_scale_gives_fp32_and_takes_columns_without_a_copy(amd, monkeypatch):
    a, b = operand(32, 64, TENSOR, amd[1]), operand(48, 64, TENSOR, amd[1])
    turned = [replace(q, data=q.data.t().contiguous().t()) for q in (a, b)]
    want = gemms.reference.gemm(a, b, torch.float32)
    torch.testing.assert_close(gemms.gemm(a, b, torch.float32), want)
    assert fake.calls.count("hipb_create_extension") == 1
    with monkeypatch.context() as m:
        m.setattr(torch.Tensor, "contiguous", lambda *a, **k: pytest.fail("a copy"))
        got = gemms.gemm(*turned, torch.float32)
    torch.testing.assert_close(got, want)
    for gaps in ((1, 2), (2, 1)):  # between values, which is copied, and between rows
        wide = torch.zeros(32 * gaps[0], 64 * gaps[1]).to(a.data.dtype)
        wide[:: gaps[0], :: gaps[1]] = a.data
        spread = replace(a, data=wide[:: gaps[0], :: gaps[1]])
        torch.testing.assert_close(gemms.gemm(spread, b, torch.float32), want)
    assert fake.calls.count("hipb_create_extension") == 1


@pytest.mark.parametrize("generation", GENERATIONS)
def test_the_kernel_with_a_shuffled_right_side_runs_when_named_or_alone(generation, monkeypatch):
    a, b = operand(80, 512, CODES, "gfx950"), operand(256, 512, WEIGHT, "gfx950")
    want = gemms.reference.gemm(a, b, torch.bfloat16)
    with machine(generation, "gfx950", without=("gemm_a8w8_blockscale",)):
        why = dict(GEMM.explain(query_of(a, b, torch.bfloat16)))
        assert why["aiter"] == "AITER: no aiter.ops.gemm_op_a8w8.gemm_a8w8_blockscale" and why["aiter_shuffled"] is None
        close(gemms.gemm(a, b, torch.bfloat16), want)
        assert fake.calls[-2:] == ["shuffle_weight", "gemm_a8w8_blockscale_bpreshuffle"]
    monkeypatch.setenv(registry.ENVIRONMENT, "gemm=aiter_shuffled")
    with machine(generation, "gfx950"):
        close(gemms.gemm(a, b, torch.bfloat16), want)
        assert fake.calls[-2:] == ["shuffle_weight", "gemm_a8w8_blockscale_bpreshuffle"]
        rows = operand(80, 512, ROW, "gfx950")
        with pytest.raises(ValueError, match="cannot run here: AITER: no such GEMM of e4m3 1x0 by e4m3 128x128 blocks"):
            gemms.gemm(rows, b, torch.bfloat16)


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("m", [16, 48, 272])
def test_mxfp4_products(generation, m):
    with machine(generation, "gfx950"):
        a, b = operand(m, 512, MX, "gfx950", "e2m1"), operand(48, 512, MX, "gfx950", "e2m1")
        close(gemms.gemm(a, b, torch.bfloat16), gemms.reference.gemm(a, b, torch.bfloat16))
        assert fake.calls[-1] == "gemm_a4w4"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"k": 2561, "m": 77}, None),
        ({"n": 40}, "N=40 must be a multiple of 16"),
        ({"m": 0}, "an empty operand"),
        ({"device_type": "cuda"}, "needs a tensor on cpu"),
        ({"out_dtype": torch.float64}, "output dtype torch.float64"),
        ({"a_fmt": element_format("e4m3", "ocp")}, "OCP elements on gfx942"),
        ({"a_fmt": element_format("e5m2", "fnuz")}, "E5M2 elements"),
        ({"a_block": ROW, "out_dtype": torch.float32}, "output dtype torch.float32"),
        ({"a_block": CODES, "b_block": CODES}, "no such GEMM of e4m3 1x128 by e4m3 1x128 blocks"),
        ({"a_block": MX, "b_block": MX}, "no such GEMM of e4m3 1x32 by e4m3 1x32 blocks"),
        ({"a_block": CODES, "b_block": WEIGHT, "out_dtype": torch.float32}, "output dtype torch.float32"),
        ({"a_block": CODES, "b_block": WEIGHT, "k": 192}, "K=192 must be a multiple of 128"),
        ({"a_block": CODES, "b_block": WEIGHT, "n": 192}, "N=192 must be a multiple of 128"),
    ],
    ids=str,
)
def test_why_a_product_is_left_to_others(change, reason):
    with machine("head", "gfx942"):
        a, b = operand(32, 512, TENSOR, "gfx942"), operand(256, 512, TENSOR, "gfx942")
        got = aiter_gemm.unsupported(replace(query_of(a, b, torch.bfloat16), **change))
        assert got == (reason and f"AITER: {reason}")


def test_why_an_mxfp4_product_is_left_to_others(monkeypatch):
    a, b = operand(32, 512, MX, "gfx950", "e2m1"), operand(256, 512, MX, "gfx950", "e2m1")
    query = query_of(a, b, torch.bfloat16)
    with machine("head", "gfx942"):
        assert dict(GEMM.explain(query))["aiter"] == "AITER: gfx942 has no 4-bit matrix instructions"
    with machine("head", "gfx950"):
        for change, reason in (
            ({"k": 128}, "K=128 must be a multiple of 256"),
            ({"m": 40}, "M=40 must be a multiple of 16"),
            ({"n": 8}, "N=8 must be a multiple of 16"),
            ({"out_dtype": torch.float16}, "output dtype torch.float16"),
            ({"b_fmt": element_format("e4m3")}, "no such GEMM of e2m1 1x32 by e4m3 1x32 blocks"),
        ):
            assert dict(GEMM.explain(replace(query, **change)))["aiter"] == f"AITER: {reason}"
        with monkeypatch.context() as m:
            m.setattr(torch.compiler, "is_compiling", lambda: True)
            assert "torch.compile" in dict(GEMM.explain(query))["aiter"]
            assert "torch.compile" in aiter_quantize.unsupported(cast_query("gfx950"))
    monkeypatch.setattr(fake.Head, "gemm_a4w4", lambda A, B, A_scale, B_scale, bpreshuffle: None)
    with machine("head", "gfx950"):
        assert "neither of the signatures" in dict(GEMM.explain(query))["aiter"]


# --- casts ------------------------------------------------------------------------------------------------------------


def cast_query(arch: str, **change: Any) -> QuantizeQuery:
    fmt = element_format("e4m3", flavour_of(arch))
    query = QuantizeQuery("cpu", torch.bfloat16, fmt, TENSOR, mx=False, noise=False, elements=4096, columns=64)
    return replace(query, **change)


def matrices() -> list[torch.Tensor]:
    random = torch.randn(24, 48, generator=torch.Generator().manual_seed(1))
    uneven = random * torch.logspace(-30, 10, 24)[:, None]
    return [random, uneven, torch.zeros(4, 8), torch.full((2, 40), 1e-38), random[:3, :16] * 1e38, torch.eye(16)]


def same_bits(x: torch.Tensor, fmt, block, **options: Any) -> None:
    got = quantize(x, fmt, block, **options)
    want, scale = casts.quantize(x, fmt, block, **options)
    assert torch.equal(got.data.view(torch.uint8), want.view(torch.uint8)) and got.data.dtype == want.dtype
    assert got.scale.shape == scale.shape and got.scale.is_contiguous()
    assert torch.equal(got.scale.view(torch.uint8 if scale.itemsize == 1 else torch.int32), scale.view(
        torch.uint8 if scale.itemsize == 1 else torch.int32))  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_scale_a_tensor_has_our_bits(dtype, amd):
    generation, arch = amd
    fmt = element_format("e4m3", flavour_of(arch))
    for margin, pow2 in ((0, False), (0, True), (1, True), (1, False)):
        expected = "aiter" if pow2 or generation == "wheel" else "reference"
        assert QUANTIZE.choose(cast_query(arch, dtype=dtype, pow2=pow2)).name == expected
        for x in matrices():
            x = x.clamp(max=torch.finfo(dtype).max, min=torch.finfo(dtype).min)
            same_bits(x.to(dtype), fmt, TENSOR, margin=margin, pow2=pow2)
    assert "static_per_tensor_quant" in fake.calls


def test_an_approximate_reciprocal_is_noticed_once():
    with machine("head", "gfx950"):
        reason = aiter_quantize.unsupported(cast_query("gfx950"))
        assert reason is not None and "of its codes or scales differ from ours" in reason
        fake.calls.clear()
        assert aiter_quantize.unsupported(cast_query("gfx950")) == reason and fake.calls == []


def test_nan_arrives_in_the_scale(amd):
    x = torch.randn(16, 16).bfloat16()
    x[3, 4] = float("nan")
    q = quantize(x, element_format("e4m3", flavour_of(amd[1])), TENSOR, pow2=True)
    assert "static_per_tensor_quant" in fake.calls
    assert q.dequantize().isnan().all()


@pytest.mark.parametrize("generation", GENERATIONS)
def test_mxfp4_by_even_has_our_bits(generation):
    fmt = element_format("e2m1")
    with machine(generation, "gfx950"):
        for dtype in (torch.bfloat16, torch.float16):
            for x in (torch.randn(40, 96), torch.randn(3, 32) * 1e-7, torch.zeros(2, 64)):
                fake.calls.clear()
                same_bits(x.to(dtype), fmt, MX, mx=True, rounding="even")
                assert fake.calls[-1] == "dynamic_mxfp4_quant"
        x = torch.randn(4, 64).bfloat16()
        x[2, 40] = float("nan")
        got = quantize(x, fmt, MX, mx=True, rounding="even").dequantize()
        want = casts.dequantize(*casts.quantize_mx(x, fmt, MX, "even"), fmt, MX, (4, 64))
        assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.nan_to_num(0), want.nan_to_num(0))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"device_type": "cuda"}, "needs a tensor on cpu"),
        ({"dtype": torch.float32}, "input dtype torch.float32"),
        ({"noise": True}, "stochastic rounding"),
        ({"plain": False}, "a tensor subclass, or one that autograd follows"),
        ({"elements": 0}, "an empty tensor"),
        ({"elements": 2**31}, "2147483648 elements: it counts them in 32 bits"),
        ({"elements": 4088}, "4088 elements, not a multiple of 16"),
        ({"given_amax": True}, "its cast at a given scale makes NaN a number"),
        ({"fmt": element_format("e5m2")}, "E5M2 elements"),
        ({"fmt": element_format("e4m3", "fnuz")}, "FNUZ elements on gfx950"),
        ({"block": ROW}, "its scale of a row is one unit off ours, and 0 for zeros"),
        ({"block": CODES}, "its scale of a block is one unit off ours, and at least 1e-10 / max"),
        (
            {"block": MX, "mx": True},
            "its MXFP8 casts raise amax to 1e-10 (HIP) or double the scale of an exact 448 (Triton)",
        ),
    ],
    ids=str,
)
def test_why_a_cast_is_left_to_others(change, reason):
    with machine("wheel", "gfx950"):
        got = aiter_quantize.unsupported(cast_query("gfx950", **change))
        assert got == (reason and f"AITER: {reason}")


def test_why_an_mxfp4_cast_is_left_to_others():
    query = cast_query("gfx950", fmt=element_format("e2m1"), block=MX, mx=True, rounding="even")
    with machine("wheel", "gfx942"):
        assert aiter_quantize.unsupported(query) == "AITER: FP4 elements on gfx942"
    with machine("wheel", "gfx950"):
        assert aiter_quantize.unsupported(query) is None
        for change, reason in (
            ({"rounding": "ceil"}, "its FP4 scales are rounded by `even`, not `ceil`"),
            ({"columns": 48}, "rows of 48 values, not a multiple of 32"),
            ({"block": (32, 32)}, "FP4 with blocks of 32x32"),
            ({"mx": False}, "FP4 with blocks of 1x32 and fp32 scales"),
        ):
            assert aiter_quantize.unsupported(replace(query, **change)) == f"AITER: {reason}"


# --- the layer --------------------------------------------------------------------------------------------------------


def train(recipe: str, arch: str, **options: Any) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(512, 256, dtype=torch.bfloat16))
    with torch.no_grad():
        model[0].weight.copy_(torch.randn(256, 512, generator=generator))
        model[0].bias.fill_(0.5)
    quant.enable(model, recipe=recipe, flavour=flavour_of(arch), **options)
    x = torch.randn(512, 512, generator=generator).bfloat16().requires_grad_()
    out = model(x)
    out.backward(torch.randn(512, 256, generator=generator).bfloat16())
    return [out.detach(), x.grad, model[0].weight.grad, model[0].bias.grad]


@pytest.mark.parametrize(
    ("recipe", "options", "gemm", "times"),
    [
        ("tensorwise", {}, "hipb_mm", 3),
        ("delayed", {}, "hipb_mm", 3),
        ("hybrid", {}, "hipb_mm", 1),
        ("rowwise", {}, "gemm_a8w8", 3),
        ("blockwise", {}, "gemm_a8w8_blockscale", 2),
        ("mxfp8", {}, None, 0),
        ("mxfp4", {}, "gemm_a4w4", 3),
        ("mxfp4", {"scale_rounding": "even"}, "gemm_a4w4", 3),
    ],
    ids=str,
)
def test_a_layer_trains_as_with_the_reference(recipe, options, gemm, times, amd, monkeypatch):
    if recipe == "mxfp4" and amd[1] == "gfx942":
        gemm, times = None, 0
    got = train(recipe, amd[1], **options)
    ran = [name for name in fake.calls if "gemm" in name or name == "hipb_mm"]
    assert ran == [gemm] * times
    monkeypatch.setenv(registry.ENVIRONMENT, "gemm=reference,quantize=reference")
    for ours, theirs in zip(got, train(recipe, amd[1], **options)):
        close(ours, theirs)
