"""E2M1: ties, packing, block scales (B46)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from reference import ELEMENTS, bytes_of, mx_exact, numpy_of, unpack_nibbles

from lumen_core import casts
from lumen_core.formats import element_format

E2M1 = element_format("e2m1")


def decoded(x: list[float] | torch.Tensor, device: torch.device) -> np.ndarray:
    x = torch.as_tensor(x, dtype=torch.float32, device=device).reshape(1, -1)
    return numpy_of(casts.decode(casts.encode(x, E2M1), E2M1, x.shape[1])).reshape(-1)


def test_b46_ties_go_to_even(device):
    x = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 0.2500001, 7.0, -0.25]
    got = decoded(x, device)
    np.testing.assert_array_equal(got, [0, 1, 1, 2, 2, 4, 4, 0.5, 6, -0.0])
    assert np.signbit(got[-1]) and not np.signbit(got[0])


def test_b46_first_element_in_the_low_nibble(device):
    codes = torch.tensor([[1, 2, 3, 4]], dtype=torch.uint8, device=device)
    packed = casts.pack_fp4(codes)
    assert packed.tolist() == [[0x21, 0x43]]
    assert casts.unpack_fp4(packed).tolist() == codes.tolist()


@pytest.mark.parametrize("columns", [1, 2, 3, 31, 33, 64])
def test_pack_and_unpack_any_width(columns, device):
    codes = (torch.arange(5 * columns, device=device) % 16).to(torch.uint8).reshape(5, columns)
    packed = casts.pack_fp4(codes)
    assert packed.dtype == torch.uint8 and packed.shape == (5, (columns + 1) // 2)
    assert torch.equal(casts.unpack_fp4(packed, columns), codes)
    np.testing.assert_array_equal(unpack_nibbles(bytes_of(packed), columns), codes.cpu().numpy())
    if columns % 2:
        assert (packed[:, -1] >> 4 == 0).all()  # the odd last element's partner


@pytest.mark.parametrize(("rounding", "scale", "value"), [("floor", 1.0, 6.0), ("ceil", 2.0, 8.0), ("even", 2.0, 8.0)])
def test_b46_block_with_amax_seven(rounding, scale, value, device):
    x = torch.ones(1, 32, device=device)
    x[0, 5] = 7.0
    codes, byte = casts.quantize_mx(x, E2M1, (1, 32), rounding)
    assert casts.e8m0_decode(byte).item() == scale
    out = casts.dequantize(codes, byte, E2M1, (1, 32), (1, 32))
    assert out[0, 5].item() == value and (out[0, :5] == 1).all()


@pytest.mark.parametrize("columns", [1, 31, 32, 33, 64, 127])
@pytest.mark.parametrize("rounding", ["ceil", "floor", "even"])
def test_odd_widths_against_exact_arithmetic(columns, rounding, device):
    x = torch.randn(7, columns) * torch.exp2(torch.randint(-20, 20, (7, 1)).float())
    elements, byte, want = mx_exact(x.numpy(), ELEMENTS[("e2m1", "ocp")], (1, 32), rounding)
    codes, scale = casts.quantize_mx(x.to(device), E2M1, (1, 32), rounding)
    assert codes.shape == (7, (columns + 1) // 2)
    np.testing.assert_array_equal(bytes_of(scale), byte)
    np.testing.assert_array_equal(numpy_of(casts.decode(codes, E2M1, columns)), elements)
    got = casts.dequantize(codes, scale, E2M1, (1, 32), (7, columns))
    np.testing.assert_array_equal(numpy_of(got), want)


def test_a_nan_is_not_lost_although_e2m1_has_none(device):
    x = torch.randn(2, 64, device=device)
    x[1, 40] = float("nan")
    codes, scale = casts.quantize_mx(x, E2M1)
    out = casts.dequantize(codes, scale, E2M1, (1, 32), (2, 64))
    assert out[1, 40].isnan() and out[0].isfinite().all() and out[1, :32].isfinite().all()
