"""SwiGLU and the gated MLP against fp64 torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lumen_core.mlp import gated_mlp, swiglu

LIMIT = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}


def run(fn, *tensors: torch.Tensor) -> list[torch.Tensor]:
    *inputs, grad = tensors
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    y = fn(*leaves)
    y.backward(grad)
    return [y.detach(), *[t.grad for t in leaves]]


def exact(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return run(lambda g, u: F.silu(g) * u, *[t.double() for t in tensors])


def inputs(shape, dtype, device) -> list[torch.Tensor]:
    return [(torch.randn(shape, device=device) * 3).to(dtype) for _ in range(3)]


@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize("shape", [(1,), (3, 5, 33), (7, 256), (2, 5000), (0, 16)])
def test_values_and_gradients(dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    tensors = inputs(shape, dtype, device)
    for got, want in zip(run(swiglu, *tensors), exact(*tensors)):
        assert got.dtype == dtype and got.shape == want.shape
        assert (got.double() - want).norm() <= LIMIT[dtype] * want.norm()


def test_gradcheck() -> None:
    gate, up = (torch.randn(3, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(swiglu, (gate, up))


def test_halves_of_one_projection_and_large_values(device: torch.device) -> None:
    both = torch.randn(6, 66, device=device)
    both[0, :4] = torch.tensor([200.0, -200.0, 1e4, -1e4])
    gate, up = both.chunk(2, dim=-1)
    y = swiglu(gate, up)
    torch.testing.assert_close(y, (F.silu(gate.double()) * up.double()).float(), rtol=2e-6, atol=1e-6)
    assert torch.isfinite(run(swiglu, gate, up, torch.ones_like(y))[1]).all()


@pytest.mark.parametrize("storage", ["fp8_row", "fp8_tensor"])
def test_stored_in_fp8(storage: str, device: torch.device) -> None:
    tensors = inputs((4, 8, 64), torch.float32, device)
    got, want = run(lambda g, u: swiglu(g, u, storage=storage), *tensors), exact(*tensors)
    assert torch.equal(got[0], swiglu(*tensors[:2]))
    for g, w in zip(got[1:], want[1:]):
        error = (g.double() - w).norm() / w.norm()
        assert 5e-3 < error < 6e-2  # E4M3 rounds by 2.6 % rms; a smaller error means that it was not used


def test_fp8_storage_keeps_two_bytes_a_pair(device: torch.device) -> None:
    gate, up = (torch.randn(32, 64, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    sizes = {}
    for storage in (None, "fp8_row"):
        kept: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t) or t, lambda t: t):
            swiglu(gate, up, storage=storage)
        sizes[storage] = sum(t.numel() * t.element_size() for t in kept)
    assert sizes == {None: 2 * 2 * 32 * 64, "fp8_row": 2 * (32 * 64 + 4 * 32)}


def test_mlp_with_and_without_recompute(device: torch.device) -> None:
    gate, up, down = (nn.Linear(*s, device=device) for s in ((16, 48), (16, 48), (48, 16)))
    x, g = torch.randn(2, 5, 16, device=device)
    results, kept = [], []
    for recompute in (False, True):
        saved: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, s=saved: s.append(t.shape[-1]) or t, lambda t: t):
            leaf = x.clone().requires_grad_()
            y = gated_mlp(leaf, gate, up, down, recompute=recompute)
        y.backward(g)
        results.append([y, leaf.grad, *[p.grad.clone() for m in (gate, up, down) for p in m.parameters()]])
        kept.append(saved)
        for m in (gate, up, down):
            m.zero_grad()
    for a, b in zip(*results):
        assert torch.equal(a, b)
    assert kept[0].count(48) > kept[1].count(48)
    want = down(F.silu(gate(x)) * up(x))
    torch.testing.assert_close(results[0][0], want)


@pytest.mark.parametrize("storage", [None, "fp8_row"])
def test_compiled_whole(storage: str | None, device: torch.device) -> None:
    torch._dynamo.reset()
    tensors = inputs((8, 32), torch.float32, device)
    fn = torch.compile(lambda g, u: swiglu(g, u, storage=storage), fullgraph=True, backend="aot_eager")
    for got, want in zip(run(fn, *tensors), run(lambda g, u: swiglu(g, u, storage=storage), *tensors)):
        torch.testing.assert_close(got, want)


def test_errors() -> None:
    x = torch.zeros(2, 4)
    with pytest.raises(ValueError, match="gate is"):
        swiglu(x, x[:, :2])
    with pytest.raises(ValueError, match="fp8_row"):
        swiglu(x, x, storage="fp4")
    with pytest.raises(ValueError, match="exclude each other"):
        gated_mlp(x, nn.Identity(), nn.Identity(), nn.Identity(), recompute=True, storage="fp8_row")
