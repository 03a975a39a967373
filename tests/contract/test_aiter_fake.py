"""The fake of AITER refuses wrong calls, gives wrong numbers for a forgotten shuffle, and has the real one's quirks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fakes import aiter as fake

from lumen_core import casts
from lumen_core.formats import element_format

ARCH_FP8 = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}


class Calls:
    """The functions of the installed fake, and right arguments for each."""

    def __init__(self, generation: str, arch: str) -> None:
        self.generation, self.fp8 = generation, ARCH_FP8[arch]
        self.x, self.w = torch.randn(48, 512).to(self.fp8), torch.randn(256, 512).to(self.fp8)

    def __getattr__(self, name: str) -> Any:
        module = next(module for module, names in fake.MODULES.items() if name in names)
        return getattr(__import__(module, fromlist=[name]), name)

    def row(self, **change: Any) -> torch.Tensor:
        scales = {"x_scale": torch.rand(48, 1), "w_scale": torch.rand(1, 256)}
        return self.gemm_a8w8(**{"XQ": self.x, "WQ": self.w, **scales, **change})

    def block(self, **change: Any) -> torch.Tensor:
        scales = {"x_scale": torch.rand(48, 4), "w_scale": torch.rand(2, 4)}
        return self.gemm_a8w8_blockscale(**{"XQ": self.x, "WQ": self.w, **scales, **change})

    def tensor(self, *mats: torch.Tensor, **change: Any) -> torch.Tensor:
        options = {"out_dtype": torch.bfloat16, "scaleA": torch.ones(1), "scaleB": torch.ones(1), **change}
        return self.hipb_mm(*(mats or (self.x, self.w.t())), 0, **options)

    def fp4(self, **change: Any) -> torch.Tensor:
        a, b = (torch.randint(0, 256, (48, 256), dtype=torch.uint8).view(fake.FP4X2) for _ in range(2))
        scale = torch.full((48, 16), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)
        scales = {"A_scale": self.e8m0_shuffle(scale), "B_scale": self.e8m0_shuffle(scale)}
        out = {"out": torch.empty(64, 48, dtype=torch.bfloat16)} if self.generation == "wheel" else {}
        return self.gemm_a4w4(**{"A": a, "B": self.shuffle_weight(b), **scales, **out, **change})

    def static(self, **change: Any) -> None:
        x = torch.randn(4, 32).bfloat16()
        arguments = {"out": torch.empty(4, 32, dtype=self.fp8), "input": x, "scale": torch.ones(1), **change}
        return self.static_per_tensor_quant(**arguments)


@pytest.fixture(params=[(g, a) for g in fake.GENERATIONS for a in ARCH_FP8], ids="-".join)
def real(request: pytest.FixtureRequest) -> Iterator[Calls]:
    with fake.installed(*request.param):
        yield Calls(*request.param)


OTHER = {torch.float8_e4m3fn: torch.float8_e4m3fnuz, torch.float8_e4m3fnuz: torch.float8_e4m3fn}
COLUMNS = torch.rand(4, 48).t()  # scales that lie column by column


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda r: r.row(XQ=r.x.float().to(OTHER[r.fp8])), "this device's fp8"),
        (lambda r: r.row(XQ=r.x.float().to(torch.float8_e5m2)), "this device's fp8"),
        (lambda r: r.row(XQ=r.x[0]), "2-D operands"),
        (lambda r: r.row(WQ=r.w[:, :256]), "2-D operands"),
        (lambda r: r.row(WQ=torch.cat((r.w, r.w), 1)[:, :512]), "both must be contiguous"),
        (lambda r: r.row(x_scale=torch.ones(1)), "one scale a row"),
        (lambda r: r.row(w_scale=torch.ones(256, 1)), "one scale a row"),
        (lambda r: r.row(x_scale=torch.ones(1, 1).expand(48, 1)), "contiguous fp32 scales"),
        (lambda r: r.row(x_scale=torch.ones(48, 1).bfloat16()), "contiguous fp32 scales"),
        (lambda r: r.row(dtype=torch.float32), "output dtype"),
        (lambda r: r.row(XQ=r.x[:, :192].contiguous(), WQ=r.w[:, :192].contiguous()), "not supported"),
        (lambda r: r.block(XQ=r.x.float().to(OTHER[r.fp8])), "this device's fp8"),
        (lambda r: r.block(x_scale=torch.ones(48, 1)), "1x128 by 128x128 scales"),
        (lambda r: r.block(w_scale=torch.ones(256, 4)), "1x128 by 128x128 scales"),
        (lambda r: r.block(x_scale=COLUMNS), "contiguous fp32 scales"),
        (lambda r: r.block(dtype=torch.float32), "not supported"),
        (lambda r: r.block(isBpreshuffled=True), "is broken"),
        (lambda r: r.tensor(), "hipb_create_extension was not called"),
    ],
    ids=range(18),
)
def test_wrong_calls_are_refused(wrong, message, real):
    with pytest.raises(RuntimeError, match=message):
        wrong(real)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda r: r.tensor(r.x, r.w), "dim 1 must match"),
        (lambda r: r.tensor(r.x, r.w.float().to(torch.float8_e5m2).t()), "same dtype"),
        (lambda r: r.tensor(r.x[:, ::2], r.w[:, :256].t()), "unusual strides"),
        (lambda r: r.tensor(out_dtype=None), "would be fp8"),
        (lambda r: r.tensor(r.x, r.w[:24].t()), "no algorithm"),
        (lambda r: r.tensor(scaleA=torch.ones(1).bfloat16()), "must be float"),
        (lambda r: r.tensor(scaleA=torch.ones(48, 1)), "Invalid scaling configuration"),
        (lambda r: r.tensor(scaleA=torch.ones(48, 1), scaleB=torch.ones(1, 256), out_dtype=torch.half), "bf16 only"),
        (lambda r: r.static(input=torch.randn(4, 32)), "half-precision"),
        (lambda r: r.static(out=torch.empty(4, 32).to(torch.float8_e5m2)), "not support output type"),
        (lambda r: r.static(scale=torch.ones(4)), "one fp32 scale"),
        (lambda r: r.static(out=torch.empty(4, 32, dtype=r.fp8).t()), "contiguous, of one shape"),
        (lambda r: r.static(input=torch.ones(4, 8).half(), out=torch.empty(4, 8, dtype=r.fp8)), "over the next row"),
        (lambda r: r.shuffle_weight(r.w[:8]), "does not divide into tiles"),
        (lambda r: r.shuffle_weight(r.w, layout=(32, 16)), "the layout"),
        (lambda r: r.dynamic_mxfp4_quant(torch.ones(4, 32)), "half-precision"),
    ],
    ids=range(16),
)
def test_more_wrong_calls_are_refused(wrong, message, real):
    real.hipb_create_extension()
    real.tensor(), real.row(), real.block(), real.static()
    with pytest.raises(RuntimeError, match=message):
        wrong(real)


@pytest.mark.parametrize("generation", fake.GENERATIONS)
def test_wrong_fp4_calls_are_refused(generation):
    with fake.installed(generation, "gfx942"), pytest.raises(RuntimeError, match="not supported on gfx942"):
        Calls(generation, "gfx942").fp4()
    with fake.installed(generation, "gfx950"):
        real = Calls(generation, "gfx950")
        real.fp4()
        for change, message in (
            ({"A": torch.zeros(48, 256)}, "packed pairs"),
            ({"A_scale": torch.zeros(48, 16, dtype=torch.uint8)}, "scales padded"),
            ({"A_scale": torch.zeros(256, 16, dtype=torch.uint8)}, "e8m0 scales"),
            ({"bpreshuffle": False}, "shuffled weights"),
            ({"A": torch.zeros(40, 256, dtype=torch.uint8).view(fake.FP4X2)}, "do not fill up|bf16 output"),
        ):
            with pytest.raises(RuntimeError, match=message):
                real.fp4(**change)
        if generation == "wheel":
            with pytest.raises(RuntimeError, match="multiples of 32"):
                real.fp4(out=torch.empty(48, 48, dtype=torch.bfloat16))
        else:
            with pytest.raises(RuntimeError, match="BFloat16"):
                real.fp4(dtype=torch.float16)


def test_the_generations_refuse_each_others_calls():
    for generation, wrong in (("wheel", "dtype"), ("head", "out")):
        with fake.installed(generation, "gfx950"), pytest.raises(TypeError, match=f"'{wrong}'"):
            Calls(generation, "gfx950").fp4(**{wrong: torch.bfloat16})


def test_a_forgotten_shuffle_gives_wrong_numbers(real):
    x_scale, w_scale = torch.rand(48, 4), torch.rand(2, 4)
    right = real.block(x_scale=x_scale, w_scale=w_scale)
    shuffled, turned = real.shuffle_weight(real.w), x_scale.t().contiguous().view(48, 4)
    run = real.gemm_a8w8_blockscale_bpreshuffle
    assert torch.equal(run(real.x, shuffled, turned, w_scale), right)
    assert not torch.allclose(run(real.x, real.w, turned, w_scale), right)
    assert not torch.allclose(run(real.x, shuffled, x_scale, w_scale), right)


def test_a_forgotten_shuffle_of_fp4_scales_gives_wrong_numbers():
    with fake.installed("head", "gfx950"):
        real = Calls("head", "gfx950")
        codes = torch.full((48, 256), 0x22, dtype=torch.uint8).view(fake.FP4X2)  # ones
        scale = torch.randint(120, 130, (48, 16), dtype=torch.uint8).view(torch.float8_e8m0fnu)
        flat = real.e8m0_shuffle(scale)
        sums = casts.e8m0_decode(scale).sum(1)
        ones = torch.full((256, 16), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)
        got = real.fp4(A=codes, B=codes, A_scale=flat, B_scale=ones)[:, 0].float()
        torch.testing.assert_close(got, 32 * sums, rtol=2**-8, atol=0)
        plain = torch.nn.functional.pad(scale.view(torch.uint8), (0, 0, 0, 208)).view(torch.float8_e8m0fnu)
        assert not torch.allclose(real.fp4(A=codes, B=codes, A_scale=plain, B_scale=ones)[:, 0].float(), 32 * sums)


def test_results_have_no_gradient(real):
    real.hipb_create_extension()
    x = torch.randn(4, 64, dtype=torch.bfloat16, requires_grad=True)
    results = [real.row(x_scale=torch.ones(48, 1, requires_grad=True)), *real.dynamic_mxfp4_quant(x)]
    results += [real.tensor(scaleA=torch.ones(1, requires_grad=True))]
    assert not any(result.requires_grad for result in results)


# --- why most casts are not ours: the reasons that lumen_core/kernels/aiter/quantize.py gives -------------------------


def by_row(real: Calls, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scale = torch.empty(x.shape, dtype=real.fp8), torch.empty(x.shape[0], 1)
    real.dynamic_per_token_scaled_quant(codes, x, scale)
    return codes, scale


def test_rows_and_blocks_are_one_unit_off(real):
    fmt = element_format("e4m3", "fnuz" if real.fp8 == torch.float8_e4m3fnuz else "ocp")
    for columns in (128, 256):
        x = torch.randn(64, columns).bfloat16()
        got, want = by_row(real, x)[1], casts.quantize_row(x, fmt)[1]
        difference = (got.view(torch.int32) - want.view(torch.int32)).abs()
        assert 0 < difference.max() <= 1


def test_zeros_and_nan_are_lost(real):
    codes, scale = by_row(real, torch.zeros(2, 256).bfloat16())
    assert (scale == 0).all()
    codes, scale = by_row(real, torch.full((2, 128), 2.0**-60).bfloat16())
    assert (codes.float() == 0).all() and (scale > 1e-13).all()
    x = torch.ones(4, 32).bfloat16()
    x[0, 0] = float("nan")
    codes = torch.empty(4, 32, dtype=real.fp8)
    real.static(input=x, out=codes)
    assert codes.float().isfinite().all()
    assert not casts.e8m0_decode(real.dynamic_mxfp4_quant(x)[1]).isnan().any()


def test_mxfp8_of_the_head_doubles_the_scale_of_an_exact_maximum():
    with fake.installed("head", "gfx950"):
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
        x[5, 40] = 7.0  # 448 * 2**-6, and above all the others of its block
        byte = Calls("head", "gfx950").dynamic_mxfp8_quant(x)[1].int()
    want = casts.quantize_mx(x, element_format("e4m3"))[1].view(torch.uint8).int()
    exact = torch.frexp(x.float().view(64, 2, 32).abs().amax(-1)).mantissa == 1.75 / 2
    assert exact[5, 1] and torch.equal(byte - want, exact.int())
