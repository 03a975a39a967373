"""Cases B01, B15, B38, B82: zeros, tiny values, fp16, the maximum wherever it is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from reference import numpy_of, relative
from variants import VARIANTS, assert_same, bound, config_of, every_variant, linear, run

from lumen_core import casts
from lumen_core.formats import element_format

FP32_SCALED = [name for name, options in VARIANTS.items() if config_of(name).scaling != "mx"]


# --- B01: all-zero tensors, rows, blocks ------------------------------------------------------------------------


@every_variant
def test_b01_zero_input_gives_the_bias(variant, device):
    layer = linear(variant, device=device)
    result = run(layer, torch.zeros(8, 32, device=device), torch.randn(8, 48, device=device))
    assert torch.equal(result["y"], layer.bias.detach().expand(8, 48))
    assert (result["weight"] == 0).all() and result["dx"].isfinite().all()


@every_variant
def test_b01_a_zero_row_gives_the_bias_and_moves_no_other_row(variant, device):
    layer = linear(variant, device=device)
    x = torch.randn(8, 32, device=device)
    without = layer(x).detach()
    x[3] = 0
    y = layer(x).detach()
    assert torch.equal(y[3], layer.bias.detach())
    others = [0, 1, 2, 4, 5, 6, 7]
    if config_of(variant).scaling in ("rowwise", "blockwise", "mx"):
        assert torch.equal(y[others], without[others])
    assert y.isfinite().all()


@every_variant
def test_b01_zero_weight_gives_the_bias(variant, device):
    layer = linear(variant, device=device)
    with torch.no_grad():
        layer.weight.zero_()
    result = run(layer, torch.randn(8, 32, device=device), torch.randn(8, 48, device=device))
    assert torch.equal(result["y"], layer.bias.detach().expand(8, 48))
    assert (result["dx"] == 0).all() and result["weight"].isfinite().all() and result["weight"].abs().sum() > 0


@every_variant
def test_b01_zero_gradient_gives_zero_gradients(variant, device):
    layer = linear(variant, device=device)
    result = run(layer, torch.randn(8, 32, device=device), torch.zeros(8, 48, device=device))
    for name in ("dx", "weight", "bias"):
        assert (result[name] == 0).all(), name


def test_b01_stored_scales_are_finite(device):
    zeros = torch.zeros(33, 65, device=device)
    for key in (("e4m3", "ocp"), ("e5m2", "ocp"), ("e4m3", "fnuz")):
        fmt = element_format(*key)
        for codes, scale in (
            casts.quantize_tensor(zeros, fmt),
            casts.quantize_row(zeros, fmt),
            casts.quantize_block(zeros, fmt, (1, 32)),
            casts.quantize_block(zeros, fmt, (128, 128)),
        ):
            assert (codes.float() == 0).all()
            assert scale.isfinite().all() and (scale >= torch.finfo(torch.float32).tiny).all()
            assert (1 / scale).isfinite().all()
        codes, scale = casts.quantize_mx(zeros, fmt)
        assert (codes.float() == 0).all() and (scale.view(torch.uint8) != 255).all()


# --- B15: tiny but not zero -------------------------------------------------------------------------------------


@pytest.mark.parametrize("tiny", [1e-38, 1e-40, 1.4e-45])
@pytest.mark.parametrize("key", [("e4m3", "ocp"), ("e5m2", "ocp"), ("e4m3", "fnuz"), ("e5m2", "fnuz")], ids="-".join)
def test_b15_tiny_values_decode_to_zero_or_themselves(key, tiny, device):
    fmt = element_format(*key)
    x = torch.full((3, 64), tiny, device=device)
    error = 0.125 if key[0] == "e4m3" else 0.25
    results = {
        (0, 0): casts.quantize_tensor(x, fmt),
        (1, 0): casts.quantize_row(x, fmt),
        (1, 128): casts.quantize_block(x, fmt, (1, 128)),
        (128, 128): casts.quantize_block(x, fmt, (128, 128)),
        (1, 32): casts.quantize_mx(x, fmt),
    }
    for block, (codes, scale) in results.items():
        out = numpy_of(casts.dequantize(codes, scale, fmt, block, (3, 64))).astype(np.float64)
        assert ((out == 0) | (np.abs(out - tiny) <= error * tiny)).all(), block
        if block != (1, 32):
            smallest = torch.finfo(torch.float32).tiny
            assert (scale >= smallest).all() and (1 / scale >= smallest).all() and (1 / scale).isfinite().all()


@every_variant
@pytest.mark.parametrize("tiny", [1e-38, 1e-40, 1.4e-45])
def test_b15_tiny_input_and_gradient_stay_finite(variant, tiny, device):
    layer = linear(variant, device=device)
    normal_x, normal_g = torch.randn(8, 32, device=device), torch.randn(8, 48, device=device)
    for x, g in ((normal_x * 0 + tiny, normal_g), (normal_x, normal_g * 0 + tiny)):
        for name, value in run(layer, x, g).items():
            assert value.isfinite().all(), name


# --- B38: fp16 --------------------------------------------------------------------------------------------------


@every_variant
@pytest.mark.parametrize("amax", [0.005, 0.0, 1e-6])
def test_b38_fp16_small_values(variant, amax, device):
    layer = linear(variant, 64, 48, bias=False, device=device, dtype=torch.float16)
    x = torch.randn(16, 64)
    x = (x / x.abs().max() * amax).half().to(device)
    result = run(layer, x, torch.randn(16, 48, device=device).half())
    assert result["y"].dtype == torch.float16 and result["weight"].dtype == torch.float16
    assert all(value.isfinite().all() for value in result.values())
    want = x.double() @ layer.weight.detach().double().t()
    if amax == 0.005:
        assert relative(want, result["y"]) <= bound(variant)
    elif amax == 0:
        assert (result["y"] == 0).all()


def test_b38_scale_is_fp32_whatever_the_input(device):
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        x = torch.full((1, 4), 0.005, device=device, dtype=dtype)
        _, scale = casts.quantize_tensor(x, element_format("e4m3"))
        assert scale.dtype == torch.float32
        assert scale.item() == np.float32(x[0, 0].item()) / np.float32(448)
    assert scale.item() == pytest.approx(1.116e-5, rel=1e-3)


@every_variant
def test_b38_true_overflow_is_inf_as_in_nn_linear(variant, device):
    """x = w = 200, K = 64: the sum is 2.56e6. Sums of the same products that fit fp16 (below 65504) come out finite."""
    x = torch.full((16, 64), 200.0, device=device, dtype=torch.float16)
    layer = linear(variant, 64, 16, bias=False, device=device, dtype=torch.float16)
    with torch.no_grad():
        layer.weight.fill_(200.0)
    assert (layer(x).detach() == float("inf")).all()
    layer = linear(variant, 64, 16, bias=False, device=device, dtype=torch.float16)
    x, w = torch.randn(16, 64) * 80, torch.randn(16, 64) * 20
    with torch.no_grad():
        layer.weight.copy_(w)
    y = layer(x.half().to(device)).detach()
    want = x.half().double() @ w.half().double().t()
    assert want.abs().max() > 20_000
    assert y.isfinite().all() and relative(want, y) <= 1.1 * bound(variant)  # few values


# --- B82: the maximum wherever it is ----------------------------------------------------------------------------


@pytest.mark.parametrize("position", [0, 8191, 8192, 15000, 20000])
@pytest.mark.parametrize("spike", [448.0, -448.0])
def test_b82_spike_at_any_position(position, spike, device):
    fmt = element_format("e4m3")
    for row in range(3):
        x = torch.zeros(3, 20001, device=device)
        x[row, position] = spike
        codes, scale = casts.quantize_tensor(x, fmt)
        assert scale.item() == 1 and codes[row, position].float().item() == spike
        codes, scale = casts.quantize_row(x, fmt)
        assert scale[row].item() == 1 and codes[row, position].float().item() == spike
        codes, scale = casts.quantize_block(x, fmt, (1, 128))
        assert scale.shape == (3, 157) and scale[row, position // 128].item() == 1
        assert codes[row, position].float().item() == spike


def test_b82_bf16_and_strided(device):
    fmt = element_format("e4m3")
    x = torch.zeros(20001, 3, device=device, dtype=torch.bfloat16)
    x[20000, 2] = -448
    assert casts.quantize_tensor(x.t(), fmt)[1].item() == 1
    assert casts.quantize_row(x.t(), fmt)[1][2].item() == 1


@every_variant
def test_results_repeat_bitwise(variant, device):
    x, g = torch.randn(8, 32, device=device), torch.randn(8, 48, device=device)
    assert_same(run(linear(variant, device=device), x, g), run(linear(variant, device=device), x, g))
