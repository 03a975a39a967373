"""Stochastic rounding: unbiased, repeatable, separate streams, never off the grid (B77)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from reference import ELEMENTS, all_values, numpy_of
from variants import linear, run

import lumen_core.quantize as quant
from lumen_core import casts
from lumen_core.formats import element_format

KEYS = list(ELEMENTS)
COUNT = 100_000
LARGEST_NOISE = 1 - 2.0**-24


def rounded(x: torch.Tensor, key: tuple[str, str], noise: torch.Tensor) -> np.ndarray:
    fmt = element_format(*key)
    return casts.decode(casts.encode(x, fmt, noise), fmt, x.shape[1]).double().cpu().numpy()


def uniform(shape: tuple[int, int], key: int, device: torch.device, stream: int = 0) -> torch.Tensor:
    return casts.stochastic_noise(shape, key, device, stream)


@pytest.mark.parametrize("key", KEYS, ids="-".join)
def test_b77_mean_error_is_within_three_sigma(key, device):
    element = ELEMENTS[key]
    noise = uniform((100, COUNT // 100), 1234, device)
    smallest = 2.0 ** (element.emin - element.mantissa_bits)
    for base, step in (
        (0.0, smallest),
        (1.0, 2.0**-element.mantissa_bits),
        (4.0, 4 * 2.0**-element.mantissa_bits),
    ):
        for fraction in (0.3, 0.5, 0.9):
            for sign in (1, -1):
                value = np.float32(sign * (base + fraction * step))
                got = rounded(torch.full(noise.shape, float(value), device=device), key, noise)
                assert set(np.unique(np.abs(got))) <= {base, base + step}
                p = (abs(float(value)) - base) / step
                sigma = step * np.sqrt(p * (1 - p) / COUNT)
                assert abs(got.mean() - float(value)) < 3 * sigma


@pytest.mark.parametrize("key", KEYS, ids="-".join)
def test_values_on_the_grid_never_move(key, device):
    """Whatever the noise, the largest below 1 included: a sum that rounds up to the next step would move them, and send
    the largest value of all to NaN, to infinity or, in E2M1, to the code of -0."""
    values = all_values(ELEMENTS[key])
    grid = torch.tensor(values[np.isfinite(values)], dtype=torch.float32, device=device).reshape(1, -1)
    for noise in (0.0, 0.5, LARGEST_NOISE):
        got = rounded(grid, key, torch.full_like(grid, noise))
        np.testing.assert_array_equal(got, numpy_of(grid))


@pytest.mark.parametrize("key", KEYS, ids="-".join)
def test_saturates_with_any_noise(key, device):
    top = ELEMENTS[key].max
    x = torch.tensor([[top, top * 1.0001, top * 2, 1e30, -top, -1e30]], device=device)
    for noise in (0.0, LARGEST_NOISE):
        np.testing.assert_array_equal(rounded(x, key, torch.full_like(x, noise)), [[top] * 4 + [-top] * 2])


@pytest.mark.parametrize("key", KEYS, ids="-".join)
def test_only_the_two_neighbours_occur(key, device):
    element = ELEMENTS[key]
    grid = np.unique(all_values(element)[np.isfinite(all_values(element))])
    x = (torch.rand(50, 1000) * 2 - 1) * element.max
    got = rounded(x.to(device), key, uniform((50, 1000), 5, device))
    below = grid[np.searchsorted(grid, x.double().numpy(), side="right") - 1]
    above = grid[np.minimum(np.searchsorted(grid, x.double().numpy(), side="left"), grid.size - 1)]
    assert ((got == below) | (got == above)).all()


def test_noise_is_uniform_and_in_range(device):
    noise = numpy_of(uniform((512, 513), 7, device)).reshape(-1)
    assert noise.dtype == np.float32 and noise.min() >= 0 and noise.max() < 1
    bins = np.histogram(noise, bins=64, range=(0, 1))[0]
    expected = noise.size / 64
    chi2 = float(((bins - expected) ** 2 / expected).sum())
    assert chi2 < 63 + 5 * np.sqrt(2 * 63)
    assert abs(noise.mean() - 0.5) < 4 * np.sqrt(1 / 12 / noise.size)


@pytest.mark.parametrize("shape", [(1, 4096), (4096, 1), (64, 64)], ids=str)
def test_noise_of_neighbours_is_uncorrelated(shape, device):
    noise = numpy_of(uniform(shape, 3, device)).astype(np.float64) - 0.5
    for axis in (0, 1):
        if shape[axis] > 1:
            for lag in (1, 2, 16, 32):
                a, b = np.split(noise, [lag], axis)[1], np.split(noise, [-lag], axis)[0]
                assert abs((a * b).mean() * 12) < 5 / np.sqrt(a.size)


def test_b77_keys_and_streams_are_repeatable_and_independent(device):
    shape = (128, 256)
    base = uniform(shape, 42, device)
    assert torch.equal(base, uniform(shape, 42, device))
    assert torch.equal(base, uniform(shape, torch.tensor(42, device=device), device))
    assert torch.equal(base.cpu(), uniform(shape, 42, torch.device("cpu")))
    centred = numpy_of(base).astype(np.float64) - 0.5
    others = [uniform(shape, 43, device), uniform(shape, 42 + 2**32, device), uniform(shape, 42, device, 1)]
    for other in others:
        value = numpy_of(other).astype(np.float64) - 0.5
        assert abs((centred * value).mean() * 12) < 5 / np.sqrt(centred.size)
    transposed = numpy_of(uniform((256, 128), 42, device, 1)).astype(np.float64).T - 0.5
    assert abs((centred * transposed).mean() * 12) < 5 / np.sqrt(centred.size)


def test_noise_does_not_touch_the_global_generator(device):
    state = torch.random.get_rng_state()
    uniform((64, 64), 1, device)
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize("key", [("e2m1", "ocp"), ("e4m3", "ocp")], ids="-".join)
def test_mx_blocks_round_stochastically(key, device):
    """Unbiased through the block scale: the mean of many draws approaches x itself."""
    fmt = element_format(*key)
    x = torch.randn(4, 64, device=device)
    total = torch.zeros_like(x)
    draws = 400
    for draw in range(draws):
        codes, scale = casts.quantize_mx(x, fmt, (1, 32), "ceil", noise=uniform((4, 64), draw, device))
        total += casts.dequantize(codes, scale, fmt, (1, 32), (4, 64))
    largest_step = 2 * 2.0 ** -ELEMENTS[key].mantissa_bits * x.abs().max().item()
    assert (total / draws - x).abs().max().item() < 5 * largest_step * 0.5 / np.sqrt(draws)


def test_noise_reaches_every_granularity(device):
    fmt = element_format("e4m3")
    x = torch.randn(64, 128, device=device)
    noise = uniform((64, 128), 9, device)
    pairs = [
        (casts.quantize_tensor(x, fmt), casts.quantize_tensor(x, fmt, noise=noise)),
        (casts.quantize_row(x, fmt), casts.quantize_row(x, fmt, noise=noise)),
        (casts.quantize_block(x, fmt, (1, 128)), casts.quantize_block(x, fmt, (1, 128), noise=noise)),
    ]
    for plain, noisy in pairs:
        assert torch.equal(plain[1], noisy[1])
        changed = (plain[0].view(torch.uint8) != noisy[0].view(torch.uint8)).float().mean().item()
        assert 0.1 < changed < 0.5  # uniform remainders move a quarter of the values


# --- through a layer --------------------------------------------------------------------------------------------


def gradient_casts(layer: torch.nn.Linear, g: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The layer's two copies of g, for dgrad and wgrad: with identity weight and input they are dx and dW.T."""
    result = run(layer, torch.eye(64, device=g.device), g)
    return result["dx"].double().cpu().numpy(), result["weight"].t().double().cpu().numpy()


def identity_layer(device: torch.device, **options) -> torch.nn.Linear:
    layer = linear("mxfp4", 64, 64, bias=False, device=device, hadamard=False, **options)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(64))
    return layer


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """In standard deviations of two independent samples' correlation."""
    return float(np.corrcoef(a.ravel(), b.ravel())[0, 1] * np.sqrt(a.size))


def test_b77_both_copies_of_a_gradient_are_unbiased(device):
    layer = identity_layer(device)
    g = torch.randn(64, 64, device=device)
    draws = [gradient_casts(layer, g) for _ in range(200)]
    exact = g.double().cpu().numpy()
    for copy in zip(*draws):
        error = np.mean(copy, axis=0) - exact
        sigma = np.std(copy, axis=0) / np.sqrt(len(draws))
        assert np.abs(error).mean() < 3 * sigma.mean()
        assert abs(error.sum()) < 4 * np.sqrt((sigma**2).sum())


def test_b77_copies_steps_and_layers_draw_separate_bits(device):
    g = torch.rand(64, 64, device=device) + 1  # [1, 2): one scale for all blocks, so shared bits would show fully
    layer = identity_layer(device)
    first, second = gradient_casts(layer, g), gradient_casts(layer, g)
    exact = g.double().cpu().numpy()
    assert abs(correlation(first[0] - exact, first[1] - exact)) < 5  # dgrad and wgrad copies
    assert abs(correlation(first[0] - exact, first[1].T - exact.T)) < 5
    assert abs(correlation(first[0] - exact, second[0] - exact)) < 5  # steps
    assert abs(correlation(first[1] - exact, second[1] - exact)) < 5


def test_b77_layers_and_seeds_draw_separate_bits(device):
    g = torch.rand(64, 64, device=device) + 1
    exact = g.double().cpu().numpy()
    errors = []
    for seed in (0, 1):
        model = torch.nn.ModuleList(torch.nn.Linear(64, 64, bias=False, device=device) for _ in range(2))
        quant.enable(model, recipe="mxfp4", hadamard=False, seed=seed)
        for layer in model:
            with torch.no_grad():
                layer.weight.copy_(torch.eye(64))
            errors.append(gradient_casts(layer, g)[0] - exact)
    for i, one in enumerate(errors):
        for other in errors[i + 1 :]:
            assert abs(correlation(one, other)) < 5


def test_forward_is_never_rounded_stochastically(device):
    layer = identity_layer(device)
    x = torch.randn(8, 64, device=device)
    outputs = [run(layer, x)["y"] for _ in range(3)]
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])
