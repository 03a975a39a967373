"""Cases B24, B27, B31, B39: the amax history from its first step on, through evaluation, spikes, loading and meta-init.

Scales are read off the outputs: with an identity weight of amax 1, y is x quantized.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from reference import ELEMENTS, decode_codes, encode_saturating, relative
from torch import nn
from torch.utils.checkpoint import checkpoint
from variants import DELAYED, TinyLM, assert_same, bound, enable, every_recipe, every_variant, linear, run, tokens, twin

import lumen_core.quantize as quant

delayed_variants = pytest.mark.parametrize("variant", [name for name in DELAYED if "fnuz" not in name])


def identity(device: torch.device, size: int = 32, **options) -> nn.Linear:
    layer = nn.Linear(size, size, bias=False, device=device)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(size))
    return quant.enable(layer, **(dict(recipe="delayed") | options))


def with_amax(amax: float, device: torch.device, size: int = 32) -> torch.Tensor:
    """[4, size] with largest magnitude `amax` exactly."""
    x = torch.rand(4, size, device=device) * 0.99 * amax
    x[1, 2] = -amax
    return x


def quantized_by(x: torch.Tensor, amax: float) -> np.ndarray:
    """x through E4M3 at the scale amax / 448, by ml_dtypes."""
    element = ELEMENTS[("e4m3", "ocp")]
    scale = np.float32(amax) / np.float32(448)
    codes = encode_saturating(x.cpu().numpy() * (np.float32(1) / scale), element)
    return decode_codes(codes, element).astype(np.float32) * scale


def amax_in_use(layer: nn.Linear, x: torch.Tensor, candidates: list[float]) -> float:
    """Which amax the layer scales x by, from its output."""
    y = layer(x).detach().cpu().numpy()
    fits = [c for c in candidates if np.allclose(y, quantized_by(x, c), rtol=2e-6, atol=0)]
    assert len(fits) == 1, f"{fits} of {candidates}"
    return fits[0]


# --- B24: the first step ----------------------------------------------------------------------------------------


@delayed_variants
def test_b24_first_step_uses_the_current_amax(variant, device):
    layer, plain = linear(variant, device=device), linear(None, device=device)
    x, g = torch.randn(64, 32, device=device), torch.randn(64, 48, device=device) * 1e-4
    x = x / x.abs().max() * 1000
    got, want = run(layer, x, g), run(plain, x, g)
    for name, gemm in (("y", "fprop"), ("dx", "dgrad"), ("weight", "wgrad")):
        assert relative(want[name], got[name]) <= bound(variant, gemm), name


@delayed_variants
def test_b24_a_first_batch_of_zeros(variant, device):
    layer, plain = linear(variant, device=device), linear(None, device=device)
    zero = run(layer, torch.zeros(64, 32, device=device), torch.zeros(64, 48, device=device))
    assert all(value.isfinite().all() for value in zero.values())
    quant.step_end(layer)
    x, g = torch.randn(64, 32, device=device) * 50, torch.randn(64, 48, device=device)
    got, want = run(layer, x, g), run(plain, x, g)
    for name, gemm in (("y", "fprop"), ("dx", "dgrad"), ("weight", "wgrad")):
        assert relative(want[name], got[name]) <= bound(variant, gemm), name


@delayed_variants
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("assign", [False, True])
def test_b24_weight_scale_follows_loaded_weights(variant, trained, assign, device):
    layer, plain = linear(variant, device=device), linear(None, device=device)
    x, g = torch.randn(64, 32, device=device), torch.randn(64, 48, device=device)
    for _ in range(3 if trained else 0):
        run(layer, x, g)
        quant.step_end(layer)
    loaded = {name: value * 100 for name, value in twin(plain).state_dict().items()}
    layer.load_state_dict(loaded, assign=assign)
    plain.load_state_dict(loaded)
    assert relative(plain(x).detach(), layer(x).detach()) <= bound(variant)


# --- B27: evaluation --------------------------------------------------------------------------------------------


def train_step(model: TinyLM, optimizer: torch.optim.Optimizer, data: torch.Tensor) -> dict[str, torch.Tensor]:
    loss = model.loss(data)
    optimizer.zero_grad()
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    optimizer.step()
    return grads | {"loss": loss.detach()}


class Loud(nn.Module):
    """Multiplies its input by a factor that evaluation turns up."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


@every_recipe
@pytest.mark.parametrize("how", ["eval+no_grad", "eval", "no_grad"])
def test_b27_evaluation_leaves_no_trace(variant, how, device):
    torch.manual_seed(1)
    model = TinyLM()
    model.layers[0].up = nn.Sequential(Loud(), model.layers[0].up)
    model = enable(model.to(device), variant)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for seed in range(3):
        train_step(model, optimizer, tokens(2, 17, device=device, seed=seed))
    other = twin(model)
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=1e-3)
    other_optimizer.load_state_dict(optimizer.state_dict())
    before = quant.state_dict(other)
    other.layers[0].up[0].factor = 1e4
    other.train("eval" not in how)
    for seed in range(5):
        with torch.set_grad_enabled("no_grad" not in how):
            other.loss(tokens(2, 17, device=device, seed=100 + seed))
    other.train()
    other.layers[0].up[0].factor = 1.0
    assert_same(quant.state_dict(other), before)
    data = tokens(2, 17, device=device, seed=3)
    assert_same(train_step(model, optimizer, data), train_step(other, other_optimizer, data))


@delayed_variants
def test_b27_a_frozen_teacher_in_eval_records_nothing(variant, device):
    teacher = linear(variant, device=device).eval().requires_grad_(False)
    student = linear(None, 32, 32, device=device)
    before = quant.state_dict(teacher)
    run(nn.Sequential(student, teacher), torch.randn(8, 32, device=device))
    quant.step_end(teacher)
    assert_same(quant.state_dict(teacher), before)


# --- B39: the window --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ended_by", ["step_end", "optimizer"])
def test_b39_a_spike_saturates_then_counts_for_the_window(ended_by, device):
    layer = identity(device, history_len=4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    used = []
    for amax in (1.0, 100.0, 1.0, 1.0, 1.0, 1.0, 1.0):
        x = with_amax(amax, device)
        used.append(amax_in_use(layer, x, [1.0, 100.0]))
        y = layer(x)
        if amax == 100:
            assert y.isfinite().all() and y.abs().max().item() == pytest.approx(1.0)
        y.sum().backward()
        optimizer.step() if ended_by == "optimizer" else quant.step_end(layer)
    assert used == [1, 1, 100, 100, 100, 100, 1]


def test_b39_most_recent(device):
    layer = identity(device, history_len=4, amax_algo="most_recent")
    used = []
    for amax in (1.0, 100.0, 1.0, 7.0, 1.0):
        x = with_amax(amax, device)
        used.append(amax_in_use(layer, x, [1.0, 7.0, 100.0]))
        layer(x).sum().backward()
        quant.step_end(layer)
    assert used == [1, 1, 100, 1, 7]


def test_b39_history_of_another_length_after_enabling_again(device):
    layer = identity(device, history_len=4)
    for amax in (1.0, 100.0, 2.0, 3.0):
        layer(with_amax(amax, device)).sum().backward()
        quant.step_end(layer)
    state = quant.state_dict(layer)
    quant.disable(layer)
    quant.enable(layer, recipe="delayed", history_len=2)
    histories = [v for name, v in quant.state_dict(layer).items() if name.endswith("history")]
    assert histories and all(v.shape[0] == 2 for v in histories)
    quant.load_state_dict(layer, state)
    used = []
    for amax in (5.0, 1.0, 1.0):
        x = with_amax(amax, device)
        used.append(amax_in_use(layer, x, [1.0, 2.0, 3.0, 5.0, 100.0]))
        layer(x).sum().backward()
        quant.step_end(layer)
    assert used == [3, 5, 5]


# --- the rest of the contract -----------------------------------------------------------------------------------


def test_micro_batches_of_a_step_take_their_maximum(device):
    layer = identity(device)
    for amax in (3.0, 7.0, 5.0):
        layer(with_amax(amax, device)).sum().backward()
    quant.step_end(layer)
    assert amax_in_use(layer, with_amax(1.0, device), [1.0, 3.0, 5.0, 7.0]) == 7
    histories = [v for name, v in quant.state_dict(layer).items() if name.endswith("history")]
    assert ((histories[0] != 0).sum(0) == 1).all()  # one entry a role, not three


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_adds_no_entry(reentrant, device):
    layer = identity(device)
    for _ in range(2):
        x = with_amax(3.0, device).requires_grad_()
        checkpoint(layer, x, use_reentrant=reentrant).sum().backward()
        quant.step_end(layer)
    history = next(v for name, v in quant.state_dict(layer).items() if name.endswith("history"))
    assert ((history != 0).sum(0) == 2).all() and set(history[-2:, 0].tolist()) == {3.0}


def test_each_role_has_a_history_of_its_own(device):
    layer = identity(device)
    (layer(with_amax(3.0, device)) * 0.25).sum().backward()
    quant.step_end(layer)
    history = next(v for name, v in quant.state_dict(layer).items() if name.endswith("history"))
    assert history[-1].tolist() == [3.0, 1.0, 0.25]


def test_a_layer_that_did_not_run_keeps_its_scale(device):
    layer = identity(device)
    layer(with_amax(3.0, device)).sum().backward()
    quant.step_end(layer)
    for _ in range(20):
        quant.step_end(layer)
    assert amax_in_use(layer, with_amax(1.0, device), [1.0, 3.0]) == 3


def test_reset_scales_by_current_values_again(device):
    layer = identity(device)
    layer(with_amax(3.0, device)).sum().backward()
    quant.step_end(layer)
    quant.reset(layer)
    assert amax_in_use(layer, with_amax(1.0, device), [1.0, 3.0]) == 1


def test_margin(device):
    """One binary order of head room: after amax 1, values up to 2 do not saturate."""
    for margin, largest in ((0, 1.0), (1, 2.0), (2, 4.0)):
        layer = identity(device, margin=margin)
        layer(with_amax(1.0, device)).sum().backward()
        quant.step_end(layer)
        assert layer(with_amax(100.0, device)).abs().max().item() == pytest.approx(largest)


def test_a_non_finite_batch_does_not_poison_the_history(device):
    layer = identity(device)
    layer(with_amax(3.0, device)).sum().backward()
    quant.step_end(layer)
    for bad in (float("nan"), float("inf")):
        x = with_amax(1.0, device)
        x[0, 0] = bad
        y = layer(x)
        assert not y.isfinite().all()  # a check for bad steps must see it: infinity does not saturate to a code
        y.sum().backward()
        quant.step_end(layer)
    assert amax_in_use(layer, with_amax(1.0, device), [1.0, 3.0]) == 3


@pytest.mark.parametrize("scheduled", [torch.optim.SGD, torch.optim.AdamW])
def test_any_torch_optimizer_ends_the_step_once(scheduled, device):
    model = enable(TinyLM().to(device), "delayed")
    other = enable(TinyLM().to(device), "delayed")
    optimizer = scheduled(model.parameters(), lr=1e-3)
    for seed in range(3):
        model.loss(tokens(2, 9, device=device, seed=seed)).backward()
        other.loss(tokens(2, 9, device=device, seed=seed)).backward()
        optimizer.step()
    entries = {name: (v != 0).sum(0) for name, v in quant.state_dict(model).items() if name.endswith("history")}
    assert len(entries) == 4 and all((count == 3).all() for count in entries.values())
    others = [v for name, v in quant.state_dict(other).items() if name.endswith("history")]
    assert all((v == 0).all() for v in others)  # an optimizer of another model ends no step here


# --- B31: meta-device init --------------------------------------------------------------------------------------


@every_variant
@pytest.mark.parametrize("order", ["enable first", "materialise first"])
def test_b31_meta_init(variant, order, device):
    plain = linear(None, device=device)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # what nobody wrote reads as NaN
    try:
        with torch.device("meta"):
            layer = nn.Linear(32, 48)
        if order == "enable first":
            enable(layer, variant)
        layer.to_empty(device=device)
        assert layer.weight.isnan().all()
        if order == "materialise first":
            enable(layer, variant)
        for value in quant.state_dict(layer).values():
            assert value.device.type == device.type and value.isfinite().all()
        layer.load_state_dict(plain.state_dict())
    finally:
        torch.use_deterministic_algorithms(False)
    x, g = torch.randn(8, 32, device=device), torch.randn(8, 48, device=device)
    usual = linear(variant, device=device)
    for _ in range(2):
        assert_same(run(layer, x, g), run(usual, x, g))
        quant.step_end(layer), quant.step_end(usual)
    assert_same(quant.state_dict(layer), quant.state_dict(usual))


def test_state_stays_fp32_and_follows_the_model(device):
    layer = linear("delayed")
    run(layer, torch.randn(8, 32))
    quant.step_end(layer)
    before = quant.state_dict(layer)
    layer.to(device).bfloat16()
    after = quant.state_dict(layer)
    assert_same({k: v.cpu() for k, v in after.items()}, before)
    assert all(v.device.type == device.type for v in after.values())
    assert {v.dtype for name, v in after.items() if "counter" not in name} == {torch.float32}
    assert layer(torch.randn(8, 32, device=device).bfloat16()).dtype == torch.bfloat16
