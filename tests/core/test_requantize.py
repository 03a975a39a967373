"""MXFP8 codes with one scale for the matrix: nothing is lost but what underflows."""

from __future__ import annotations

import pytest
import torch

from lumen_core import casts
from lumen_core.formats import E8M0_DTYPE, element_format
from lumen_core.requantize import mx_to_tensor

FP8 = [("e4m3", "ocp"), ("e5m2", "ocp"), ("e4m3", "fnuz"), ("e5m2", "fnuz")]
every_format = pytest.mark.parametrize("key", FP8, ids="-".join)
every_block = pytest.mark.parametrize("block", [(32, 32), (1, 32)], ids=str)


def blocks_at(shape: tuple[int, int], exponents: torch.Tensor) -> torch.Tensor:
    """Normal values, each 32x32 block moved by its own binary order."""
    spread = exponents.repeat_interleave(32, 0).repeat_interleave(32, 1)[: shape[0], : shape[1]]
    return torch.randn(shape) * torch.exp2(spread.float())


def both(x: torch.Tensor, key: tuple[str, str], block: tuple[int, int], device: torch.device):
    """Values before and after, the single scale, and the codes before."""
    fmt, shape = element_format(*key), (x.shape[0], x.shape[1])
    codes, scale = casts.quantize_mx(x.to(device), fmt, block)
    new, tensor_scale = mx_to_tensor(codes, scale, fmt, block, shape)
    assert new.dtype == codes.dtype and new.shape == codes.shape
    assert tensor_scale.dtype == torch.float32 and tensor_scale.dim() == 0
    before = casts.dequantize(codes, scale, fmt, block, shape)
    return before.cpu(), casts.dequantize(new, tensor_scale, fmt, (0, 0), shape).cpu(), tensor_scale.cpu(), codes


@every_format
@every_block
@pytest.mark.parametrize("shape", [(64, 96), (70, 130), (1, 1)], ids=str)
def test_only_what_underflows_changes(shape, block, key, device):
    fmt = element_format(*key)
    grid = (-(-shape[0] // 32), -(-shape[1] // 32))
    x = blocks_at(shape, torch.randint(-9, 1, grid))
    before, after, scale, _ = both(x, key, block, device)
    byte = casts.quantize_mx(x, fmt, block)[1].view(torch.uint8)
    assert scale.item() == 2.0 ** (int(byte.max()) - 127)
    smallest_normal = 2.0 ** (1 - fmt.bias) * scale.item()
    step = smallest_normal * 2.0**-fmt.mantissa_bits
    normal = before.abs() >= smallest_normal
    assert torch.equal(before[normal], after[normal])
    assert (before - after).abs().max() <= step / 2
    # Ties to even at the step between subnormals, in exact arithmetic.
    assert torch.equal(after[~normal], (before[~normal].double() / step).round().mul(step).float())


@every_format
@every_block
def test_exact_where_exponents_are_close(block, key, device):
    """Codes of normal numbers survive as many binary orders as lie between their smallest and the subnormals."""
    fmt = element_format(*key)
    x = blocks_at((64, 64), torch.tensor([[0, -3], [-2, -1]])).sign() * torch.rand(64, 64).add(1)
    x *= torch.exp2(torch.tensor([[0.0, -3], [-2, -1]])).repeat_interleave(32, 0).repeat_interleave(32, 1)
    before, after, _, _ = both(x, key, block, device)
    assert fmt.emax > 3 and torch.equal(before, after)


@every_format
def test_far_blocks_vanish_and_zero_stays(key, device):
    x = torch.ones(64, 64)
    x[:32, 32:] = 1e-30
    x[32:, :32] = -1e-30
    x[32:, 32:] = 0
    _, after, scale, _ = both(x, key, (32, 32), device)
    assert torch.equal(after[:32, :32], torch.ones(32, 32)) and (after[32:] == 0).all() and (after[:, 32:] == 0).all()
    assert after.isfinite().all() and 0.5**20 < scale < 1
    _, after, scale, _ = both(torch.zeros(33, 40), key, (32, 32), device)
    assert (after == 0).all() and scale.item() == 2.0**-126  # and its reciprocal: both normal numbers


@every_format
def test_nan_does_not_vanish(key, device):
    x = torch.randn(64, 64)
    x[40, 3] = float("nan")
    _, after, scale, _ = both(x, key, (32, 32), device)
    assert scale.isnan() and after.isnan().all()


def test_equal_exponents_leave_the_codes_alone(device):
    fmt = element_format("e4m3")
    x = torch.rand(64, 64, device=device) + 1
    codes, scale = casts.quantize_mx(x, fmt, (32, 32))
    new, tensor_scale = mx_to_tensor(codes, scale, fmt, (32, 32), (64, 64))
    assert torch.equal(new.view(torch.uint8), codes.view(torch.uint8))
    assert tensor_scale == casts.e8m0_decode(scale)[0, 0]


def test_an_empty_matrix(device):
    fmt = element_format("e4m3")
    codes = torch.empty(0, 64, dtype=fmt.dtype, device=device)
    new, scale = mx_to_tensor(codes, torch.empty(0, 2, dtype=E8M0_DTYPE, device=device), fmt, (32, 32), (0, 64))
    assert new.shape == (0, 64) and scale.item() > 0


@pytest.mark.slow
def test_compiled(device):
    fmt = element_format("e4m3")
    codes, scale = casts.quantize_mx(torch.randn(70, 130, device=device) * 8, fmt, (32, 32))
    want = mx_to_tensor(codes, scale, fmt, (32, 32), (70, 130))
    got = torch.compile(mx_to_tensor, fullgraph=True)(codes, scale.view(torch.uint8), fmt, (32, 32), (70, 130))
    assert torch.equal(got[0].view(torch.uint8), want[0].view(torch.uint8)) and torch.equal(got[1], want[1])
