"""A gathered weight as a tensor: what reads it sees its values, and what writes to it is refused."""

from __future__ import annotations

import pytest
import torch

from lumen_core.config import QuantConfig
from lumen_core.gathered import COLUMNS, ROWS, GatheredWeight, GatherInfo
from lumen_core.wire import WireFormat


def _weight(*shape: int, recipe: str = "mxfp8-32x32") -> torch.nn.Parameter:
    wire = WireFormat.of(QuantConfig.from_recipe(recipe), torch.device("cpu"))
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    parts = wire.encode(values.reshape(-1, shape[-1]))
    return torch.nn.Parameter(GatheredWeight(parts, GatherInfo(wire, "up.weight"), shape, torch.float32))


ONES = torch.ones(64, 64)
SGD = {
    "weight_decay": 0.0,
    "momentum": 0.0,
    "lr": 0.1,
    "dampening": 0.0,
    "nesterov": False,
    "maximize": False,
    "is_first_step": True,
}


@pytest.mark.parametrize(
    "write",
    [
        lambda w: w.mul_(2),
        lambda w: w.copy_(ONES),
        lambda w: w.detach().mul_(2),
        lambda w: w.data.mul_(2),
        lambda w: setattr(w, "data", ONES),
        lambda w: w.__setitem__(0, 0.0),
        lambda w: torch.add(ONES, ONES, out=w),
        lambda w: torch._foreach_mul_([w], 2.0),
        lambda w: torch._foreach_copy_([ONES.clone(), w], [ONES, ONES]),
        lambda w: torch._fused_sgd_([w], [ONES], [], **SGD),
    ],
    ids=["mul_", "copy_", "detach", "data", "data=", "setitem", "out=", "foreach", "foreach second", "fused"],
)
def test_writes_are_refused(write) -> None:
    weight = _weight(64, 64)
    before = weight.dequantize_all()
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"up\.weight: a gathered weight is a read-only copy"):
        write(weight)
    assert torch.equal(weight.dequantize_all(), before)


def test_writes_of_it_elsewhere_are_not() -> None:
    weight, out = _weight(64, 64), torch.zeros(64, 64)
    with torch.no_grad():
        torch.add(weight, weight, out=out)
        assert torch.equal(out, 2 * weight.dequantize_all())
        torch._foreach_copy_([out], [weight])
    assert torch.equal(out, weight.dequantize_all())


READS = {
    "view_as": lambda w: w.view_as(torch.ones(4096)),
    "view_as itself": lambda w: w.view_as(ONES),
    "view": lambda w: w.view(32, 128),
    "detach": lambda w: w.detach(),
    "t": lambda w: w.t(),
    "row": lambda w: w[3],
    "split": lambda w: w.split(32)[1],
    "as_strided": lambda w: w.as_strided((64, 64), (64, 1)),
    "double": lambda w: w.double(),
    "linear": lambda w: torch.nn.functional.linear(ONES, w),
    "empty_like": lambda w: torch.empty_like(w).zero_(),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_reads_are_those_of_its_values(read, mode) -> None:
    weight = _weight(64, 64)
    values = weight.dequantize_all().detach()
    with mode():
        got, expected = read(weight), read(values)
    assert got.shape == expected.shape and got.dtype == expected.dtype
    assert torch.equal(got.dequantize_all() if isinstance(got, GatheredWeight) else got, expected)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_bank_comes_apart(mode) -> None:
    bank = _weight(3, 64, 64)
    values = bank.dequantize_all().detach()
    with mode():
        experts = bank.unbind(0)
        assert all(isinstance(e, GatheredWeight) for e in experts)
        assert torch.equal(torch.stack([e.dequantize_all() for e in experts]), values)
        assert torch.equal(bank[1], values[1])


@pytest.mark.parametrize("there, asked", [(ROWS, "columns"), (COLUMNS, "rows")])
def test_the_wrong_direction_raises(there: str, asked: str) -> None:
    weight = _weight(64, 64, recipe="mxfp8")
    weight.refresh(weight.parts(), there)
    with pytest.raises(RuntimeError, match=r"up\.weight: a .* pass met a weight that was gathered for the"):
        getattr(weight.view_of(), asked)()
