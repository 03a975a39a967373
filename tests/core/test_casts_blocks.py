"""fp32-scaled granularities: tensor, row, block. Scales exactly, codes bit for bit, for every shape and input dtype."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from reference import ELEMENTS, FP8, block_amax, fp32_scale, numpy_of, raw_codes, round_exact, spread

from lumen_core import casts
from lumen_core.formats import element_format

BLOCKS = [(1, 32), (1, 64), (1, 128), (1, 256), (32, 32), (64, 64), (128, 128), (256, 256)]
SHAPES = [(1, 1), (3, 33), (31, 127), (129, 129), (128, 256), (2, 128)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def granularities(shape: tuple[int, int]) -> dict[str, tuple[int, int]]:
    return {"tensor": shape, "row": (1, shape[1])}


def quantize(x: torch.Tensor, fmt, how: str | tuple[int, int], **options):
    if how == "tensor":
        return casts.quantize_tensor(x, fmt, **options)
    if how == "row":
        return casts.quantize_row(x, fmt, **options)
    return casts.quantize_block(x, fmt, how, **options)


def sample(shape: tuple[int, int], dtype: torch.dtype, kind: str = "random") -> torch.Tensor:
    x = torch.randn(shape)
    if kind == "outlier":
        x[:, :: max(1, shape[1] // 4)] *= 100
    elif kind == "zeros":
        x[: (shape[0] + 1) // 2] = 0
    return x.to(dtype)


def check(x: torch.Tensor, key: tuple[str, str], how: str | tuple[int, int], device: torch.device, **options) -> None:
    """Scale equals fp32(amax)/max; each code is the nearest to x/scale, up to the last bit of that fp32 quotient.

    A product with 1/scale may differ from the quotient by an ulp or two, so a code may differ only where the exact
    quotient lies within 2**-22 of a midpoint: `low == high` everywhere else, where the code is then determined.
    """
    fmt, element = element_format(*key), ELEMENTS[key]
    codes, scale = quantize(x.to(device), fmt, how, **options)
    block = granularities(tuple(x.shape)).get(how, how) if isinstance(how, str) else how
    exact = x.double().numpy()
    amax = block_amax(exact, block)
    want = fp32_scale(amax, element, **options)
    got = numpy_of(scale).reshape(want.shape)
    assert scale.dtype == torch.float32
    np.testing.assert_array_equal(got[amax > 0], want[amax > 0])
    assert np.isfinite(got).all() and np.isfinite(1 / got).all()
    ratio = exact / spread(got.astype(np.float64), block, exact.shape)
    low, high = (round_exact(ratio * (1 + d), element) for d in (-(2.0**-22), 2.0**-22))
    raw = raw_codes(codes, element, x.shape[1]).astype(np.uint8)
    value = raw.view(element.ml).astype(np.float64)
    assert (np.minimum(low, high) <= value).all() and (value <= np.maximum(low, high)).all()
    if x.dtype == torch.float32:  # 16-bit inputs often are true ties
        assert (low != high).mean() <= 2e-3 + 1 / low.size
    decoded = casts.dequantize(codes, scale, fmt, quant_block(how), tuple(x.shape))
    np.testing.assert_array_equal(numpy_of(decoded), (value.astype(np.float32) * spread(got, block, exact.shape)))


def quant_block(how: str | tuple[int, int]) -> tuple[int, int]:
    return {"tensor": (0, 0), "row": (1, 0)}.get(how, how) if isinstance(how, str) else how


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("how", ["tensor", "row", *BLOCKS], ids=str)
def test_scales_and_codes_of_every_granularity_and_shape(how, shape, device):
    for dtype in DTYPES:
        for kind in ("random", "outlier", "zeros"):
            check(sample(shape, dtype, kind), ("e4m3", "ocp"), how, device)


@pytest.mark.parametrize("key", [*FP8, ("e2m1", "ocp")], ids="-".join)
@pytest.mark.parametrize("how", ["tensor", "row", (1, 128), (128, 128)], ids=str)
def test_every_element_format(key, how, device):
    check(sample((130, 257), torch.float32), key, how, device)
    check(sample((130, 257), torch.bfloat16), key, how, device)


@pytest.mark.parametrize("how", ["tensor", "row", (1, 128), (128, 128)], ids=str)
@pytest.mark.parametrize("key", FP8, ids="-".join)
def test_power_of_two_scales(how, key, device):
    x = sample((129, 200), torch.float32)
    check(x, key, how, device, pow2=True)
    scale = quantize(x.to(device), element_format(*key), how, pow2=True)[1]
    assert (np.frexp(numpy_of(scale))[0] == 0.5).all()


def test_power_of_two_amax_keeps_its_scale(device):
    """Rounding up must not step past an amax that already gives a power of two."""
    fmt = element_format("e4m3")
    for exponent in (-20, 0, 9):
        amax = torch.tensor(448.0 * 2.0**exponent, device=device)
        assert casts.scale_from_amax(amax, fmt, pow2=True).item() == 2.0**exponent
        above = torch.nextafter(amax, torch.tensor(float("inf"), device=device))
        assert casts.scale_from_amax(above, fmt, pow2=True).item() == 2.0 ** (exponent + 1)


@pytest.mark.parametrize("margin", [0, 1, 3])
def test_margin_leaves_head_room(margin, device):
    x = sample((16, 40), torch.float32)
    check(x, ("e4m3", "ocp"), "tensor", device, margin=margin)
    codes, _ = casts.quantize_tensor(x.to(device), element_format("e4m3"), margin=margin)
    assert codes.float().abs().max().item() == 448 / 2**margin


def test_given_amax_is_used_and_larger_values_saturate(device):
    x = torch.tensor([[1.0, -100.0, 0.5]], device=device)
    fmt = element_format("e4m3")
    codes, scale = casts.quantize_tensor(x, fmt, amax=torch.tensor(1.0, device=device))
    assert scale.item() == np.float32(1) / np.float32(448)
    out = casts.dequantize(codes, scale, fmt, (0, 0), (1, 3))
    np.testing.assert_allclose(numpy_of(out), [[1.0, -1.0, 0.5]], rtol=1e-6)


@pytest.mark.parametrize("how", ["row", (1, 128), (128, 128)], ids=str)
def test_columnwise_is_rowwise_of_the_transpose(how, device):
    """A strided view and its contiguous copy quantize to the same bytes."""
    x = sample((130, 96), torch.float32).to(device)
    fmt = element_format("e4m3")
    view, copy = quantize(x.t(), fmt, how), quantize(x.t().contiguous(), fmt, how)
    assert torch.equal(view[0].contiguous().view(torch.uint8), copy[0].view(torch.uint8))
    assert torch.equal(view[1], copy[1])


def test_square_blocks_transpose_exactly(device):
    x = sample((130, 200), torch.float32).to(device)
    fmt = element_format("e4m3")
    codes, scale = casts.quantize_block(x, fmt, (128, 128))
    transposed, transposed_scale = casts.quantize_block(x.t().contiguous(), fmt, (128, 128))
    assert torch.equal(codes.t().contiguous().view(torch.uint8), transposed.contiguous().view(torch.uint8))
    assert torch.equal(scale.t(), transposed_scale)


@pytest.mark.parametrize("how", ["tensor", "row", (1, 128), (128, 128)], ids=str)
def test_cuda_and_cpu_agree_bitwise(how, device):
    for key in FP8:
        fmt = element_format(*key)
        x = sample((130, 257), torch.bfloat16, "outlier")
        here, there = quantize(x, fmt, how), quantize(x.to(device), fmt, how)
        assert torch.equal(here[0].view(torch.uint8), there[0].cpu().view(torch.uint8))
        assert torch.equal(here[1], there[1].cpu())


@pytest.mark.parametrize("how", ["tensor", "row", (1, 32), (32, 32)], ids=str)
def test_nan_and_inf_do_not_vanish(how, device):
    fmt = element_format("e4m3")
    for bad in (float("nan"), float("inf"), float("-inf")):
        x = torch.randn(4, 64, device=device)
        x[2, 40] = bad
        codes, scale = quantize(x, fmt, how)
        out = casts.dequantize(codes, scale, fmt, quant_block(how), (4, 64))
        assert not out[2, 40].isfinite()
        if how == "row":
            assert out[[0, 1, 3]].isfinite().all()


def test_unknown_format_and_flavour_are_refused():
    with pytest.raises(ValueError, match=r"e4m4.*e4m3.*e5m2"):
        element_format("e4m4")
    with pytest.raises(ValueError, match=r"nfuz.*ocp.*fnuz"):
        element_format("e4m3", "nfuz")
