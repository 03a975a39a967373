"""Cases B04, B14, B60: no tokens, sizes that fill no block, inputs of one to four dimensions, strides."""

from __future__ import annotations

import pytest
import torch
from reference import relative
from torch import nn
from variants import (
    NAMED,
    VARIANTS,
    assert_same,
    bound,
    enable,
    every_recipe,
    every_variant,
    linear,
    run,
    twin,
)

import lumen_core.quantize as quant

# --- B04: a batch without tokens --------------------------------------------------------------------------------


@every_variant
@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3, 4)], ids=str)
def test_b04_no_tokens(variant, shape, device):
    layer = linear(variant, device=device)
    result = run(layer, torch.empty(*shape, 32, device=device))
    assert result["y"].shape == (*shape, 48)
    assert result["dx"].shape == (*shape, 32)
    for name in ("weight", "bias"):
        assert result[name] is not None and (result[name] == 0).all(), name


@every_variant
def test_b04_the_next_batch_is_as_if_the_empty_one_had_not_been(variant, device):
    x, g = torch.randn(8, 32, device=device), torch.randn(8, 48, device=device)
    plain = linear(variant, device=device)
    with_empty = twin(plain)
    for layer in (plain, with_empty):
        run(layer, x, g)
        quant.step_end(layer)
    run(with_empty, torch.empty(0, 32, device=device))
    quant.step_end(with_empty)
    assert_same(run(plain, x * 3, g), run(with_empty, x * 3, g))
    assert_same(quant.state_dict(plain), quant.state_dict(with_empty))


# --- B14: sizes that fill no block ------------------------------------------------------------------------------


def padded(variant: str, layer: nn.Linear, multiple: int = 128) -> nn.Linear:
    """The same layer with zero rows and columns up to multiples of every block and alignment."""
    n, k = layer.weight.shape
    options = VARIANTS[variant] | (dict(stochastic_rounding=False) if variant == "mxfp4" else {})
    wide = nn.Linear(k + -k % multiple, n + -n % multiple, device=layer.weight.device)
    with torch.no_grad():
        wide.weight.zero_()
        wide.bias.zero_()
        wide.weight[:n, :k] = layer.weight
        wide.bias[:n] = layer.bias
    return quant.enable(wide, **options)


@every_variant
@pytest.mark.parametrize("size", [(17, 33), (40, 24), (130, 100)], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 33])
def test_b14_equal_to_padding_by_hand(variant, size, rows, device):
    k, n = size
    options = dict(stochastic_rounding=False) if variant == "mxfp4" else {}
    layer = linear(variant, k, n, device=device, **options)
    x, g = torch.randn(rows, k, device=device), torch.randn(rows, n, device=device)
    got = run(layer, x, g)
    wide = padded(variant, layer)
    wide_x = nn.functional.pad(x, (0, wide.in_features - k, 0, -rows % 128))
    wide_g = nn.functional.pad(g, (0, wide.out_features - n, 0, -rows % 128))
    want = run(wide, wide_x, wide_g)
    limit = 1e-6 if device.type == "cpu" else 1e-2  # on a GPU the aligned size has another kernel
    for name, cut in (("y", (rows, n)), ("dx", (rows, k)), ("weight", (n, k))):
        assert relative(want[name][: cut[0], : cut[1]], got[name]) < limit, name
        assert got[name].shape == cut


@every_variant
@pytest.mark.parametrize("size", [(17, 33), (40, 24), (130, 100)], ids=str)
def test_b14_error_against_fp32(variant, size, device):
    k, n = size
    layer = linear(variant, k, n, device=device)
    plain = linear(None, k, n, device=device)
    x, g = torch.randn(33, k, device=device), torch.randn(33, n, device=device)
    got, want = run(layer, x, g), run(plain, x, g)
    for name, gemm in (("y", "fprop"), ("dx", "dgrad"), ("weight", "wgrad")):
        assert relative(want[name], got[name]) <= bound(variant, gemm) * 1.15, name  # few values: a wider spread
    assert torch.equal(want["bias"], got["bias"])


@every_recipe
def test_b14_one_by_one(variant, device):
    """The smallest layer of all: 1 -> 1, one token."""
    layer = linear(variant, 1, 1, device=device)
    result = run(layer, torch.ones(1, 1, device=device))
    assert relative(linear(None, 1, 1, device=device)(torch.ones(1, 1, device=device)).detach(), result["y"]) < 0.3
    assert all(value.isfinite().all() for value in result.values())


# --- B60: dimensions and strides --------------------------------------------------------------------------------


@every_variant
@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_b60_any_number_of_dimensions_is_flattening_by_hand(variant, shape, bias, device):
    layer = linear(variant, bias=bias, device=device)
    flat = twin(layer)
    x, g = torch.randn(*shape, 32, device=device), torch.randn(*shape, 48, device=device)
    got, want = run(layer, x, g), run(flat, x.reshape(-1, 32), g.reshape(-1, 48))
    assert got["y"].shape == (*shape, 48) and got["dx"].shape == x.shape
    for name in ("y", "dx"):
        got[name], want[name] = got[name].flatten(), want[name].flatten()
    assert_same(got, want)
    if bias:
        assert got["bias"].shape == (48,)


def strided_forms(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Tensors equal to x with other strides."""
    spaced = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], device=x.device)[..., ::2]
    spaced.copy_(x)
    turned = x.transpose(0, 1).contiguous().transpose(0, 1)
    columns = x.transpose(-1, -2).contiguous().transpose(-1, -2)
    return dict(spaced=spaced, turned=turned, columns=columns)


@every_variant
def test_b60_strided_inputs_and_gradients(variant, device):
    x, g = torch.randn(4, 6, 32, device=device), torch.randn(4, 6, 48, device=device)
    layer = linear(variant, device=device)
    want = run(twin(layer), x, g)
    for view_x, view_g in zip(strided_forms(x).values(), strided_forms(g).values()):
        assert not view_x.is_contiguous() and not view_g.is_contiguous()
        leaf = view_x.detach().requires_grad_()
        copy = twin(layer)
        y = copy(leaf)
        y.backward(view_g)
        assert_same(
            {"y": y.detach(), "dx": leaf.grad, "weight": copy.weight.grad},
            {name: want[name] for name in ("y", "dx", "weight")},
        )
        assert torch.allclose(copy.bias.grad, want["bias"], atol=1e-5)  # torch's own sum, in the order of strides


@every_variant
def test_b60_expanded_gradient(variant, device):
    """`sum().backward()` gives a gradient of stride 0."""
    x = torch.randn(8, 32, device=device)
    layer = linear(variant, device=device)
    want = run(twin(layer), x, torch.ones(8, 48, device=device))
    leaf = x.clone().requires_grad_()
    y = layer(leaf)
    y.sum().backward()
    assert_same({"y": y.detach(), "dx": leaf.grad, "weight": layer.weight.grad, "bias": layer.bias.grad}, want)


@every_recipe
def test_b60_slice_of_a_wider_weight(variant, device):
    """A weight that is a view into a larger storage (fused parameters)."""
    layer, other = linear(variant, device=device), linear(variant, device=device)
    store = torch.zeros(48, 64, device=device)
    store[:, 32:] = layer.weight.detach()
    other.weight = nn.Parameter(store[:, 32:])
    assert not other.weight.is_contiguous()
    x, g = torch.randn(8, 32, device=device), torch.randn(8, 48, device=device)
    assert_same(run(layer, x, g), run(other, x, g))


@every_recipe
def test_wrong_input_width_names_both(variant, device):
    layer = linear(variant, device=device)
    with pytest.raises((ValueError, RuntimeError), match=r"(?s)33.*32|32.*33"):
        layer(torch.randn(4, 33, device=device))


@pytest.mark.parametrize("variant", NAMED)
def test_no_block_needs_the_token_count_twice(variant, device):
    """Changing token counts from step to step, as real batches do."""
    layer = linear(variant, device=device)
    for rows in (64, 7, 1, 129, 32):
        result = run(layer, torch.randn(rows, 32, device=device))
        quant.step_end(layer)
        assert result["y"].shape == (rows, 48)
        assert all(value.isfinite().all() for value in result.values())


def test_models_of_layers_with_odd_sizes_train(device):
    for variant in NAMED:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(17, 33), nn.ReLU(), nn.Linear(33, 5)).to(device)
        enable(model, variant)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        x, target = torch.randn(64, 17, device=device), torch.randn(64, 5, device=device)
        losses = []
        for _ in range(15):
            loss = nn.functional.mse_loss(model(x), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < 0.9 * losses[0], (variant, losses)
