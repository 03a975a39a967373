"""Cases B17, B34, B35, B41, B64, B68, B71, B77: copies, fresh weights, dtypes, bias, recomputation, scale axes."""

from __future__ import annotations

import io
import pickle

import pytest
import torch
from reference import numpy_of, relative
from torch import nn
from torch.utils.checkpoint import checkpoint
from variants import (
    DELAYED,
    TinyLM,
    assert_same,
    enable,
    every_recipe,
    every_variant,
    linear,
    run,
    tokens,
    twin,
)

import lumen_core.quantize as quant
from lumen_core.linear import QuantLinear


def batch(device: torch.device, rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, 32, device=device), torch.randn(rows, 48, device=device)


# --- B17: copies ------------------------------------------------------------------------------------------------


def pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def saved(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@every_recipe
@pytest.mark.parametrize("make", [twin, pickled, saved], ids=lambda f: f.__name__)
@pytest.mark.parametrize("steps", [0, 1])
def test_b17_a_copy_stands_on_its_own(variant, make, steps, device):
    layer = linear(variant, device=device)
    x, g = batch(device)
    for _ in range(steps):
        run(layer, x, g)
        quant.step_end(layer)
    layer.weight.grad = layer.bias.grad = None
    layer.bias.requires_grad_(False)
    layer.weight.some_attribute = "kept"
    before, untouched = twin(layer), twin(layer)
    copy = make(layer)
    assert isinstance(copy, QuantLinear) and quant.is_enabled(copy)
    assert type(copy.weight) is type(layer.weight)
    assert copy.weight.requires_grad and not copy.bias.requires_grad
    assert copy.weight.data_ptr() != layer.weight.data_ptr()
    assert_same(quant.state_dict(copy), quant.state_dict(layer))
    assert_same(run(copy, x, g), run(before, x, g))
    with torch.no_grad():
        copy.weight.zero_()
    assert torch.equal(copy(x).detach(), copy.bias.expand(8, 48))
    quant.step_end(copy)
    assert_same(run(layer, x, g), run(untouched, x, g))


@pytest.mark.parametrize("variant", DELAYED)
def test_b17_histories_of_a_copy_are_independent(variant, device):
    layer = linear(variant, device=device)
    x, g = batch(device)
    run(layer, x, g)
    quant.step_end(layer)
    copy, before = twin(layer), quant.state_dict(layer)
    run(copy, x * 1000, g * 1000)
    quant.step_end(copy)
    assert_same(quant.state_dict(layer), before)
    history = copy.quant_state.history[-1].tolist()
    assert history[0] == pytest.approx(1000 * layer.quant_state.history[-1, 0].item())
    optimizer = torch.optim.SGD(copy.parameters(), lr=0.0)
    run(copy, x, g)
    optimizer.step()  # ends the step of the copy, not of the original
    assert_same(quant.state_dict(layer), before)
    assert copy.quant_state.history[-1, 0].item() == x.abs().max().item()


# --- B34: no stale weights --------------------------------------------------------------------------------------


@every_variant
@pytest.mark.parametrize("assign", [False, True])
def test_b34_forward_after_loading_is_that_of_the_loaded_weights(variant, assign, device):
    layer = linear(variant, device=device, seed=0)
    donor = linear(variant, device=device, seed=1)
    x, g = batch(device)
    with torch.no_grad():
        layer(x)
    layer.load_state_dict(twin(donor).state_dict(), assign=assign)
    assert_same(run(layer, x, g), run(donor, x, g))


@every_variant
def test_b34_every_way_of_writing_a_weight_counts(variant, device):
    x, _ = batch(device)
    fresh = linear(variant, device=device, seed=1)
    want = fresh.eval()(x).detach()

    def copy_(layer):
        with torch.no_grad():
            layer.weight.copy_(fresh.weight)

    def data(layer):
        layer.weight.data.copy_(fresh.weight.data)

    def assignment(layer):
        layer.weight = nn.Parameter(fresh.weight.detach().clone())

    def set_data(layer):
        layer.weight.data = fresh.weight.detach().clone()

    for write in (copy_, data, assignment, set_data):
        layer = linear(variant, device=device, seed=0).eval()
        layer(x)
        layer.bias.data.copy_(fresh.bias.data)
        write(layer)
        assert torch.equal(layer(x).detach(), want), write.__name__


@every_recipe
@pytest.mark.parametrize("fused", [False, True])
def test_b34_step_moves_the_loaded_weight(variant, fused, device):
    """`fused=True` changes weights without bumping their version."""
    layer = linear(variant, device=device, seed=0)
    loaded = linear(None, device=device, seed=1).state_dict()
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2, weight_decay=0.0, fused=fused)
    x, g = batch(device)
    layer(x)
    layer.load_state_dict(loaded)
    run(layer, x, g)
    optimizer.step()
    moved = layer.weight.detach() - loaded["weight"]
    assert torch.allclose(moved, -1e-2 * layer.weight.grad.sign(), atol=2e-5)
    after = layer(x).detach()
    assert torch.equal(after, twin(layer)(x).detach())
    assert not torch.equal(after, loaded["bias"] + x @ loaded["weight"].t())


# --- B35: no double quantization --------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["mxfp8", "mxfp8-32x32"])
def test_b35_wgrad_quantizes_from_high_precision(variant, device):
    layer = linear(variant, 32, 4, bias=False, device=device)
    x = torch.full((32, 32), 2.0**-6, device=device)
    x[0, 0] = 2.0**14
    assert run(layer, x)["weight"][0, 1].item() == 0.5


# --- B41: autocast ----------------------------------------------------------------------------------------------


@every_variant
@pytest.mark.parametrize("input_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_b41_output_dtype_is_that_of_nn_linear(variant, input_dtype, device):
    layer, plain = linear(variant, device=device), linear(None, device=device)
    x = torch.randn(8, 32, device=device).to(input_dtype)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        leaf = x.clone().requires_grad_()
        y, want = layer(leaf), plain(x)
        assert y.dtype == want.dtype == torch.bfloat16
        with torch.autocast(device.type, enabled=False):
            inner = layer(x.float())
            assert inner.dtype == torch.float32
    y.float().square().sum().backward()
    assert leaf.grad.dtype == input_dtype
    assert layer.weight.grad.dtype == layer.bias.grad.dtype == torch.float32
    assert relative(want.float(), y.float()) < 0.25


@every_variant
def test_b41_backward_inside_autocast(variant, device):
    """Some trainers call backward inside the context; the gradients are the same."""
    x = torch.randn(8, 32, device=device)
    results = []
    for inside in (True, False):
        layer = linear(variant, device=device)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = layer(x).float().square().sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        results.append({"weight": layer.weight.grad, "bias": layer.bias.grad})
    assert_same(*results)


@every_variant
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dtype_follows_the_model(variant, dtype, device):
    if dtype == torch.float64:  # no low-precision training happens in it: as nn.Linear or a clear error
        return check_float64(variant, device)
    layer = linear(variant, device=device, dtype=dtype)
    result = run(layer, torch.randn(8, 32, device=device, dtype=dtype))
    assert {value.dtype for value in result.values()} == {dtype}


def check_float64(variant: str, device: torch.device) -> None:
    layer = linear(variant, device=device, dtype=torch.float64)
    try:
        result = run(layer, torch.randn(8, 32, device=device, dtype=torch.float64))
    except TypeError as error:
        assert "float64" in str(error)
        return
    assert {value.dtype for value in result.values()} == {torch.float64}


@every_recipe
def test_mixed_dtypes_outside_autocast_are_refused_as_in_nn_linear(variant, device):
    layer = linear(variant, device=device, dtype=torch.bfloat16)
    with pytest.raises((TypeError, RuntimeError), match=r"(?i)float32|float"):
        layer(torch.randn(8, 32, device=device))


# --- B64: bias --------------------------------------------------------------------------------------------------


@every_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [(32, 48), (33, 47)], ids=str)
def test_b64_bias_on_every_path(variant, dtype, size, device):
    layer = linear(variant, *size, device=device, dtype=dtype)
    with torch.no_grad():
        layer.bias.copy_(torch.arange(size[1]))
    g = torch.randn(8, size[1], device=device).to(dtype)
    result = run(layer, torch.zeros(8, size[0], device=device, dtype=dtype), g)
    assert torch.equal(result["y"], layer.bias.detach().expand(8, size[1]))
    plain = linear(None, *size, device=device, dtype=dtype)
    assert torch.equal(result["bias"], run(plain, torch.zeros(8, size[0], device=device, dtype=dtype), g)["bias"])


@every_recipe
@pytest.mark.parametrize("kernel", ["scaled_mm", "reference"])
def test_b64_bias_with_each_kernel_forced(variant, kernel, device, monkeypatch):
    from lumen_core.kernels.registry import ENVIRONMENT

    monkeypatch.setenv(ENVIRONMENT, f"gemm={kernel}")
    layer = linear(variant, 32, 48, device=device)
    x, g = batch(device, 16)
    try:
        y = layer(torch.zeros_like(x)).detach()
    except ValueError as error:  # the kernel cannot do this recipe and says so; nothing falls back in silence
        assert kernel == "scaled_mm" and "scaled_mm" in str(error)
        return
    assert torch.equal(y, layer.bias.detach().expand(16, 48))
    assert torch.allclose(run(layer, x, g)["bias"], g.sum(0), atol=1e-5)


# --- B68, B77: recomputation ------------------------------------------------------------------------------------


@every_variant
@pytest.mark.parametrize("reentrant", [False, True])
def test_b68_b77_checkpointing_changes_nothing(variant, reentrant, device):
    """Four micro-batches, memory that reads as NaN where nobody wrote: gradients are bitwise those of plain running."""
    plain = linear(variant, device=device)
    recomputed = twin(plain)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        for step in range(3):
            for _ in range(4):
                x, g = batch(device)
                leaves = [x.clone().requires_grad_() for _ in range(2)]
                y = plain(leaves[0])
                z = checkpoint(recomputed, leaves[1], use_reentrant=reentrant)
                y.backward(g)
                z.backward(g)
                assert torch.equal(y, z) and torch.equal(leaves[0].grad, leaves[1].grad), step
            assert torch.equal(plain.weight.grad, recomputed.weight.grad) and plain.weight.grad.isfinite().all()
            assert_same(quant.state_dict(plain), quant.state_dict(recomputed))
            quant.step_end(plain), quant.step_end(recomputed)
            assert_same(quant.state_dict(plain), quant.state_dict(recomputed))
    finally:
        torch.use_deterministic_algorithms(False)


# --- B71: scales on the right axis ------------------------------------------------------------------------------


def by_rows(want: torch.Tensor, got: torch.Tensor) -> float:
    """Largest relative error of a row."""
    return max(relative(a, b) for a, b in zip(numpy_of(want), numpy_of(got)))


@pytest.mark.parametrize("variant", ["rowwise", "mxfp8"])
@pytest.mark.parametrize("outputs", [96, 64])
def test_b71_large_rows_do_not_coarsen_the_others(variant, outputs, device):
    w = torch.randn(outputs, 64)
    w[3] *= 1e4
    x = torch.randn(40, 64)
    x[5] *= 1e4
    g = torch.randn(40, outputs)
    layer, plain = linear(variant, 64, outputs, bias=False, device=device), linear(None, 64, outputs, bias=False)
    with torch.no_grad():
        layer.weight.copy_(w)
        plain.weight.copy_(w)
    got, want = run(layer, x.to(device), g.to(device)), run(plain, x, g)
    small_rows, small_columns = torch.arange(40) != 5, torch.arange(outputs) != 3
    for rows in (small_rows, ~small_rows):
        for columns in (small_columns, ~small_columns):
            if not (rows is not small_rows and columns is not small_columns):  # one value: no statistics
                cut = [v["y"].cpu()[rows][:, columns] for v in (want, got)]
                assert relative(*cut) < 0.06
    cut = [v["y"].cpu()[small_rows][:, small_columns] for v in (want, got)]
    assert by_rows(*cut) < 0.06 and by_rows(*(v.t() for v in cut)) < 0.075  # 39 values a column
    # dgrad is g[:, 3] times w[3] and wgrad g[5] times x[5], to 1e-4: a row carries the error of one value, <= 6.25 %
    for name in ("dx", "weight"):
        assert relative(want[name], got[name]) < 0.06
        assert by_rows(want[name], got[name]) < 0.0625 + 0.04
    if outputs == 64:
        with torch.no_grad():
            layer.weight.copy_(w.t())
        assert relative(x[small_rows] @ w, layer(x.to(device)).detach().cpu()[small_rows]) < 0.06


@every_variant
def test_no_grad_and_inference_mode_give_the_same_output(variant, device):
    layer = linear(variant, device=device)
    x, _ = batch(device)
    want = layer(x).detach()
    with torch.no_grad():
        assert torch.equal(layer(x), want)
    with torch.inference_mode():
        assert torch.equal(layer(x).clone(), want)


def test_b77_resumed_run_is_bitwise_equal(device):
    """Stochastic rounding continues its stream from the saved state, delayed scaling its history."""
    for variant in ("mxfp4", "delayed", "hybrid"):
        torch.manual_seed(0)
        model = enable(TinyLM().to(device), variant)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        steps = [tokens(4, 17, device=device, seed=seed) for seed in range(6)]

        def train(model, optimizer, batches):
            losses = []
            for data in batches:
                loss = model.loss(data)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            return losses

        train(model, optimizer, steps[:3])
        state = {"model": twin(model).state_dict(), "quant": quant.state_dict(model)}
        optimizer_state = pickle.loads(pickle.dumps(optimizer.state_dict()))
        want = train(model, optimizer, steps[3:])
        torch.manual_seed(99)
        resumed = enable(TinyLM().to(device), variant)
        resumed.load_state_dict(state["model"])
        quant.load_state_dict(resumed, state["quant"])
        again = torch.optim.AdamW(resumed.parameters(), lr=1e-2)
        again.load_state_dict(optimizer_state)
        assert train(resumed, again, steps[3:]) == want, variant
        assert_same(resumed.state_dict(), model.state_dict())
