"""RMSNorm and LayerNorm against fp64 torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from lumen_core.kernels.norm import NORM
from lumen_core.kernels.query import RowsQuery
from lumen_core.kernels.triton import launching
from lumen_core.norm import layer_norm, rms_norm

LIMIT = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}


def run(kind: str, x, weight, bias, grad) -> list[torch.Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in (x, weight, bias)]
    y = rms_norm(leaves[0], leaves[1], 1e-5) if kind == "rms" else layer_norm(*leaves, 1e-5)
    y.backward(grad)
    return [y.detach(), *[t.grad for t in leaves if t.grad is not None]]


def exact(kind: str, x, weight, bias, grad) -> list[torch.Tensor]:
    leaves = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    shape = weight.shape
    y = F.rms_norm(leaves[0], shape, leaves[1], 1e-5) if kind == "rms" else F.layer_norm(leaves[0], shape, *leaves[1:])
    y.backward(grad.double())
    return [y.detach(), *[t.grad for t in leaves if t.grad is not None]]


def inputs(shape, dtype, device):
    x = torch.randn(shape, device=device) * 3 + 1
    weight, bias = torch.randn(2, shape[-1], device=device)
    return x.to(dtype), weight, bias, torch.randn(shape, device=device).to(dtype)


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize("shape", [(5, 64), (2, 3, 7, 129), (1,), (3, 1000), (700, 128), (9, 4096), (2, 20000)])
def test_values_and_gradients(kind: str, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    args = inputs(shape, dtype, device)
    got, want = run(kind, *args), exact(kind, *args)
    assert len(got) == len(want) == (3 if kind == "rms" else 4)
    assert got[0].dtype == got[1].dtype == dtype
    for name, g, w in zip(("y", "dx", "dweight", "dbias"), got, want):
        assert g.shape == w.shape
        # One element a row: its gradient is a difference of equal numbers, zero but for rounding.
        assert (g.double() - w).norm() <= LIMIT[dtype] * (w.norm() + args[3].double().norm()), name


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_gradcheck(kind: str) -> None:
    x, weight, bias = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 3, 5), (5,), (5,)))
    fn = (lambda x, w, b: rms_norm(x, w)) if kind == "rms" else layer_norm
    assert torch.autograd.gradcheck(fn, (x, weight, bias))


def test_no_rows(device: torch.device) -> None:
    y, dx, dweight = run("rms", *inputs((0, 4, 32), torch.bfloat16, device))
    assert y.shape == dx.shape == (0, 4, 32)
    assert torch.equal(dweight, torch.zeros(32, device=device))


def test_a_row_of_zeros_and_strided_input(device: torch.device) -> None:
    x, weight, bias, grad = inputs((6, 40, 33), torch.float32, device)
    x[0] = 0
    x, grad = x.transpose(0, 1), grad.transpose(0, 1)
    for kind in ("rms", "layer"):
        for g, w in zip(run(kind, x, weight, bias, grad), exact(kind, x, weight, bias, grad)):
            assert torch.isfinite(g).all()
            assert (g.double() - w).norm() <= 2e-6 * w.norm()


def test_equal_bits_every_time(device: torch.device) -> None:
    args = inputs((3000, 257), torch.bfloat16, device)
    for a, b in zip(run("layer", *args), run("layer", *args)):
        assert torch.equal(a, b)


def test_parameter_dtype_and_wrong_shapes(device: torch.device) -> None:
    x, weight, bias, grad = inputs((4, 16), torch.bfloat16, device)
    assert run("layer", x, weight.bfloat16(), bias, grad)[2].dtype == torch.bfloat16
    with pytest.raises(ValueError, match="weight of shape"):
        rms_norm(x, weight[:8])
    with pytest.raises(ValueError, match="bias of shape"):
        layer_norm(x, weight, bias[:8])


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_compiled_whole(kind: str, device: torch.device) -> None:
    torch._dynamo.reset()
    args = inputs((8, 48), torch.float32, device)
    want = run(kind, *args)
    leaves = [t.clone().requires_grad_() for t in args[:3]]
    fn = torch.compile(rms_norm if kind == "rms" else layer_norm, fullgraph=True, backend="aot_eager")
    y = fn(*leaves[:2], 1e-5) if kind == "rms" else fn(*leaves, 1e-5)
    y.backward(args[3])
    for g, w in zip([y, *[t.grad for t in leaves if t.grad is not None]], want):
        torch.testing.assert_close(g, w)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"device_type": "cpu"}, "needs a GPU"),
        ({"dtype": torch.float64}, "input dtype torch.float64"),
        ({"rows": 0}, "an empty tensor"),
        ({"columns": 20000}, "rows longer than 16384"),
        ({"rows": 2**31}, "a side of 2**31 or more"),
    ],
)
def test_what_the_kernel_takes(change: dict, reason: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "has_triton", lambda: True)
    query = RowsQuery("cuda", torch.bfloat16, 64, 4096)
    (name, why), (last, none) = NORM.explain(replace(query, **change))
    assert (name, why, last, none) == ("triton", reason, "reference", None)
    monkeypatch.setattr(launching, "has_triton", lambda: False)
    assert NORM.explain(query)[0][1] == "triton is not installed"
