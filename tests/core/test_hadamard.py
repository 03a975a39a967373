"""The randomised Hadamard pair: orthonormal, its own way back, spreading, seeded."""

from __future__ import annotations

import pytest
import torch
from reference import ELEMENTS, mx_exact, numpy_of, relative

from lumen_core.hadamard import hadamard, hadamard_inverse

WIDTHS = [1, 31, 32, 33, 64, 127, 512]


def whole(columns: int) -> int:
    return -(-columns // 32) * 32


@pytest.mark.parametrize("columns", WIDTHS)
def test_there_and_back_is_the_identity(columns, device):
    x = torch.randn(5, columns, device=device)
    out = hadamard(x, 3)
    assert out.shape == (5, whole(columns)) and out.dtype == torch.float32
    assert relative(x, hadamard_inverse(out, 3, columns)) < 1e-6


@pytest.mark.parametrize("columns", WIDTHS)
def test_product_of_two_operands_is_unchanged(columns, device):
    a, b = torch.randn(7, columns, device=device), torch.randn(9, columns, device=device)
    want = a.double() @ b.double().t()
    got = hadamard(a, 11).double() @ hadamard(b, 11).double().t()
    assert relative(want, got) < 1e-6


def test_matrix_is_orthonormal_and_flat(device):
    matrix = hadamard(torch.eye(32, device=device), 5).double()
    assert torch.allclose(matrix @ matrix.t(), torch.eye(32, device=device).double(), atol=1e-6)
    assert torch.allclose(matrix.abs(), torch.full_like(matrix, 32**-0.5), atol=1e-7)


def test_blocks_do_not_mix(device):
    x = torch.zeros(1, 96, device=device)
    x[0, 40] = 1
    out = hadamard(x, 1)
    assert (out[0, :32] == 0).all() and (out[0, 64:] == 0).all() and (out[0, 32:64] != 0).all()


def test_seed_chooses_the_signs(device):
    x = torch.randn(3, 64, device=device)
    assert torch.equal(hadamard(x, 1), hadamard(x, 1))
    matrices = [hadamard(torch.eye(32, device=device), seed) for seed in range(8)]
    for i, one in enumerate(matrices):
        for other in matrices[i + 1 :]:
            assert not torch.equal(one, other)
    signs = torch.stack([m[:, 0].sign() for m in matrices])
    assert abs(signs.mean().item()) < 0.3  # 256 fair coins: sigma 0.0625
    wrong = hadamard(x, 1) @ hadamard(x, 2).t()
    assert relative(x @ x.t(), wrong) > 0.5  # two operands must share a seed


def test_bf16_input_is_transformed_in_fp32(device):
    x = torch.randn(4, 64, device=device).bfloat16()
    assert torch.equal(hadamard(x, 2), hadamard(x.float(), 2))


def test_an_outlier_costs_less_after_the_transform(device):
    """What it is for: one spike of 100 in a block of E2M1 wipes out its neighbours; spread out, it does not."""
    x = torch.randn(256, 32)
    x[:, 3] *= 100
    spike = torch.ones(32, dtype=torch.bool)
    spike[3] = False
    element = ELEMENTS[("e2m1", "ocp")]
    direct = mx_exact(x.numpy(), element)[2]
    assert relative(x[:, spike], direct[:, spike.numpy()]) > 0.9
    transformed = hadamard(x.to(device), 1)
    back = hadamard_inverse(torch.tensor(mx_exact(numpy_of(transformed), element)[2], device=device).float(), 1)
    error = (back.cpu() - x)[:, spike]
    assert torch.isfinite(error).all() and not torch.equal(back.cpu()[:, spike], torch.zeros_like(error))
    assert relative(x, back.cpu()) < 0.2
