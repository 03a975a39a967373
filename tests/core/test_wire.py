"""What shards send, put together again, against the weight quantized whole; and the parameter that reads the bytes."""

from __future__ import annotations

import pytest
import torch

from lumen_core.config import QuantConfig
from lumen_core.formats import E8M0_DTYPE
from lumen_core.gathered import BOTH, COLUMNS, ROWS, GatheredWeight, GatherInfo
from lumen_core.linear import quantized_linear
from lumen_core.tensor import QuantizedTensor, quantize
from lumen_core.wire import WireFormat

RECIPES = ("tensorwise", "hybrid", "rowwise", "blockwise", "mxfp8", "mxfp8-32x32", "mxfp4")
CPU = torch.device("cpu")


def _wire(recipe: str, **options: object) -> WireFormat:
    return WireFormat.of(QuantConfig.from_recipe(recipe, **options), CPU)


def _weight(rows: int, columns: int) -> torch.Tensor:
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows + columns))
    x[rows // 2] *= 50.0
    x[:, columns // 3] = 0.0
    return x


def _same(a: QuantizedTensor, b: QuantizedTensor) -> None:
    assert (a.shape, a.block, a.fmt) == (b.shape, b.block, b.fmt)
    assert a.data.dtype == b.data.dtype and torch.equal(a.data.view(torch.uint8), b.data.view(torch.uint8))
    assert a.scale.dtype == b.scale.dtype and a.scale.shape == b.scale.shape
    assert torch.equal(_bits(a.scale), _bits(b.scale))


def _bits(scale: torch.Tensor) -> torch.Tensor:
    return scale.view(torch.uint8 if scale.dtype == E8M0_DTYPE else torch.int32)


def _gathered(wire: WireFormat, x: torch.Tensor, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    amax = x.abs().amax() if wire.per_tensor else None
    sent = [wire.encode(shard, amax) for shard in x.chunk(ranks)]
    codes = torch.cat([codes for codes, _ in sent])
    return codes, (sent[0][1] if wire.per_tensor else torch.cat([scale for _, scale in sent]))


@pytest.mark.parametrize("flavour", ["ocp", "fnuz"])
@pytest.mark.parametrize("columns", [96, 130, 33])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("recipe", RECIPES)
def test_shards_joined_are_the_weight_quantized_whole(recipe: str, ranks: int, columns: int, flavour: str) -> None:
    wire = _wire(recipe, flavour="ocp" if recipe == "mxfp4" else flavour)
    x = _weight(ranks * wire.row_multiple * 2, columns)
    codes, scale = _gathered(wire, x, ranks)
    assert codes.dtype == torch.uint8 and codes.numel() == wire.code_bytes(*x.shape)
    assert (0 if wire.per_tensor else scale.numel()) == wire.scale_bytes(*x.shape)
    whole = quantize(x, wire.fmt, wire.block, mx=wire.mx, rounding=wire.rounding)
    _same(wire.decode(codes, scale, tuple(x.shape)), whole)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp4"])
def test_columns_joined_are_the_transpose_quantized_whole(recipe: str, ranks: int) -> None:
    wire = _wire(recipe)
    x = _weight(ranks * 64, 96)
    sent = [wire.encode_columns(shard) for shard in x.chunk(ranks)]
    joined = [torch.cat(parts) for parts in zip(*sent)]
    _same(wire.decode_columns(*joined, tuple(x.shape)), quantize(x.t(), wire.fmt, wire.block, mx=True))


def test_bytes_a_value_are_those_of_the_design() -> None:
    rows = columns = 4096
    both_passes = {
        name: 2 * (_wire(name).code_bytes(rows, columns) + _wire(name).scale_bytes(rows, columns)) for name in RECIPES
    }
    a_value = {name: size / (rows * columns) for name, size in both_passes.items()}
    assert a_value == pytest.approx(
        {
            "tensorwise": 2,
            "hybrid": 2,
            "rowwise": 2 + 8 / columns,
            "blockwise": 2 + 8 / 128**2,
            "mxfp8": 2.0625,
            "mxfp8-32x32": 2 + 2 / 1024,
            "mxfp4": 1.0625,
        },
        abs=1e-12,
    )


def _parameter(recipe: str, x: torch.Tensor, direction: str = ROWS) -> GatheredWeight:
    wire = _wire(recipe)
    parts = [*_gathered(wire, x, 1)]
    if direction == COLUMNS:
        parts = [*wire.encode_columns(x)]
    elif direction == BOTH:
        parts += wire.encode_columns(x)
    return GatheredWeight(parts, GatherInfo(wire, "layer.weight", direction), x.shape, x.dtype)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_linear_multiplies_gathered_codes_as_it_would_its_own(recipe: str) -> None:
    if recipe == "hybrid":
        recipe = "dynamic_tensor_e4m3_e4m3_e5m2"
    config = QuantConfig.from_recipe(recipe)
    if recipe in ("mxfp8", "mxfp4"):
        config = config.replace(dgrad_weight="from_rows")
    if config.stochastic_rounding:
        config = config.replace(stochastic_rounding=False)
    w, results = _weight(64, 96), []
    for weight in (w.clone(), _parameter(config.recipe, w)):
        x = torch.randn(32, 96, generator=torch.Generator().manual_seed(3)).requires_grad_()
        weight = torch.nn.Parameter(weight)
        y = quantized_linear(x, weight, None, config)
        (y * torch.linspace(-1, 1, 64)).sum().backward()
        results.append((y.detach(), x.grad, weight.grad))
        assert type(weight.grad) is torch.Tensor
    assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.parametrize("direction", [COLUMNS, BOTH])
def test_directions(direction: str) -> None:
    w, config = _weight(64, 96), QuantConfig.from_recipe("mxfp8")
    x = torch.randn(32, 96).requires_grad_()
    weight = torch.nn.Parameter(_parameter("mxfp8", w, ROWS if direction == COLUMNS else BOTH))
    y = quantized_linear(x, weight, None, config)
    if direction == COLUMNS:  # FSDP2 gathers for the backward pass into the same memory
        for part, new in zip(weight.parts(), _wire("mxfp8").encode_columns(w)):
            with torch.autograd._unsafe_preserve_version_counter(part):
                part.copy_(new)
        weight.refresh(weight.parts(), COLUMNS)
        with pytest.raises(RuntimeError, match="layer.weight.*on-demand"):
            quantized_linear(x, weight, None, config)
    y.sum().backward()
    again = x.detach().clone().requires_grad_()
    quantized_linear(again, torch.nn.Parameter(w), None, config).sum().backward()
    assert torch.equal(x.grad, again.grad)  # dgrad's own blocks, as with dgrad_weight=direct


def test_other_operations_see_values_and_cannot_write() -> None:
    w = _weight(64, 96)
    weight = torch.nn.Parameter(_parameter("mxfp8", w))
    values = _wire("mxfp8").decode(*_gathered(_wire("mxfp8"), w, 1), (64, 96)).dequantize()
    assert weight.shape == w.shape and weight.dtype == w.dtype and weight.requires_grad
    assert torch.equal(weight.detach() * 1, values) and torch.equal(weight.norm(), values.norm())
    x = torch.randn(5, 96)
    torch.nn.functional.linear(x, weight).sum().backward()
    assert torch.allclose(weight.grad, x.sum(0).expand(64, 96))
    assert type(torch.zeros_like(weight)) is torch.Tensor and torch.zeros_like(weight).shape == w.shape
    with torch.no_grad(), pytest.raises(RuntimeError, match="layer.weight.*read-only"):
        weight.add_(1)
    bank = GatheredWeight(
        _wire("mxfp8").encode(torch.cat([w, w * 2])), GatherInfo(_wire("mxfp8"), "bank"), (2, 64, 96), w.dtype
    )
    first, second = torch.nn.Parameter(bank).unbind(0)
    assert isinstance(first, GatheredWeight) and torch.equal(second.detach() * 1, (first.detach() * 1) * 2)
