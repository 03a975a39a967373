"""Cases B23, B54, B55, B56: frozen weights and LoRA adapters (peft)."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from variants import TinyLM, assert_same, config_of, enable, every_recipe, every_variant, linear, run, tokens, twin

import lumen_core.quantize as quant
from lumen_core.linear import QuantLinear


def lora(model: nn.Module, rank: int = 8) -> nn.Module:
    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=16, target_modules=["up", "down"], lora_dropout=0.0))


def set_adapters(model: nn.Module) -> None:
    """Adapters of both orders get equal values, B not zero."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


def quantized_names(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, QuantLinear)]


def trainable(model: nn.Module) -> list[str]:
    return [name for name, p in model.named_parameters() if p.requires_grad]


# --- B23: frozen weights ----------------------------------------------------------------------------------------


class OutputShapes(TorchDispatchMode):
    """Shapes of floating-point results of every operation run below."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.shapes.append((func.overloadpacket.__name__, tuple(out.shape)))
        return out

    def gemms(self, shape: tuple[int, ...]) -> int:
        names = {"mm", "addmm", "_scaled_mm", "matmul", "bmm"}
        return sum(name in names and found == shape for name, found in self.shapes)


@every_recipe
@pytest.mark.parametrize("frozen", ["nothing", "weight", "bias", "all"])
def test_b23_no_wgrad_for_a_frozen_weight(variant, frozen, device):
    layer = linear(variant, 32, 48, device=device)
    layer.weight.requires_grad_(frozen not in ("weight", "all"))
    layer.bias.requires_grad_(frozen not in ("bias", "all"))
    x = torch.randn(64, 32, device=device).requires_grad_()
    y = layer(x)
    with OutputShapes() as seen:
        y.backward(torch.randn(64, 48, device=device))
    assert seen.gemms((64, 32)) == 1  # dgrad
    assert seen.gemms((48, 32)) + seen.gemms((32, 48)) == (1 if layer.weight.requires_grad else 0)
    assert (layer.weight.grad is None) == (frozen in ("weight", "all"))
    assert (layer.bias.grad is None) == (frozen in ("bias", "all"))
    assert x.grad is not None


@every_recipe
def test_b23_no_dgrad_where_nothing_before_needs_it(variant, device):
    layer = linear(variant, 32, 48, device=device)
    y = layer(torch.randn(64, 32, device=device))
    with OutputShapes() as seen:
        y.backward(torch.randn(64, 48, device=device))
    assert seen.gemms((64, 32)) == 0 and layer.weight.grad is not None


@every_recipe
def test_b23_flags_and_counts_are_unchanged(variant, device):
    model = TinyLM().to(device)
    model.layers[0].requires_grad_(False)
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    enable(model, variant)
    assert {name: p.requires_grad for name, p in model.named_parameters()} == before
    model.loss(tokens(2, 9, device=device)).backward()
    for name, p in model.named_parameters():
        assert (p.grad is None) == name.startswith("layers.0."), name
    frozen = {row.name for row in quant.summary(model).rows if not row.trainable}
    assert frozen == {"layers.0.up", "layers.0.down"}


@every_recipe
def test_a_frozen_weight_keeps_no_activation(variant, device):
    """Nothing of x needs saving for a wgrad that does not run."""
    layer = linear(variant, 32, 48, bias=False, device=device)
    layer.weight.requires_grad_(False)
    saved = []
    x = torch.randn(64, 32, device=device).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(x)
    assert all(t.numel() < x.numel() or t.shape == layer.weight.shape for t in saved)


# --- B54: gradient through a frozen layer -----------------------------------------------------------------------


class WithAdapter(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.lora_A = nn.Linear(32, 8, bias=False)
        self.lora_B = nn.Linear(8, 48, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.lora_B(self.lora_A(x))


@every_variant
@pytest.mark.parametrize("adapter", [False, True])
def test_b54_gradient_flows_through_a_frozen_layer(variant, adapter, device):
    torch.manual_seed(0)
    base = linear(None, 32, 48)
    model = nn.Sequential(nn.Linear(64, 32), WithAdapter(base) if adapter else base).to(device)
    base.requires_grad_(False)
    plain = twin(model)
    enable(model, variant, apply_modules=("1*",))
    assert quantized_names(model) == (["1.base"] if adapter else ["1"])
    x, g = torch.randn(256, 64, device=device), torch.randn(256, 48, device=device)
    got, want = (run(m, x, g)["0.weight"] for m in (model, plain))
    cosine = torch.nn.functional.cosine_similarity(got.flatten(), want.flatten(), dim=0)
    assert cosine >= (0.98 if config_of(variant).format == "mxfp4" else 0.995)
    assert (got.norm() / want.norm()).item() == pytest.approx(1, abs=0.05)


# --- B55: mixed dtypes ------------------------------------------------------------------------------------------


@every_recipe
def test_b55_bf16_base_with_fp32_adapters(variant, device):
    torch.manual_seed(0)
    model = lora(TinyLM().to(device, torch.bfloat16))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    set_adapters(model)
    enable(model, variant)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    base = {name: p.detach().clone() for name, p in model.named_parameters() if "lora_" not in name}
    for seed in range(3):
        logits = model(tokens(4, 17, device=device, seed=seed))
        assert logits.dtype == torch.bfloat16
        optimizer.zero_grad()
        logits.float().square().mean().backward()
        optimizer.step()
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            assert parameter.dtype == parameter.grad.dtype == torch.float32
            assert parameter.grad.isfinite().all() and parameter.grad.abs().sum() > 0
        else:
            assert parameter.dtype == torch.bfloat16 and parameter.grad is None
            assert torch.equal(parameter, base[name])


# --- B56: LoRA in both orders -----------------------------------------------------------------------------------


def both_orders(variant: str, device: torch.device) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = TinyLM().to(device)
    first = enable(lora(twin(plain)), variant)
    second = lora(enable(twin(plain), variant))
    set_adapters(first), set_adapters(second)
    return first, second


@every_recipe
def test_b56_both_orders_are_the_same_model(variant, device):
    first, second = both_orders(variant, device)
    for model in (first, second):
        assert trainable(model) and all("lora_" in name for name in trainable(model))
        assert [name for name in quantized_names(model) if "lora_" in name] == []
        assert len(quantized_names(model)) == 4
    assert quantized_names(first) == quantized_names(second)
    data = tokens(4, 17, device=device)
    assert torch.equal(first(data), second(data))


@every_recipe
def test_b56_merged_weight_is_high_precision_and_merged_once(variant, device):
    first, second = both_orders(variant, device)
    for model in (first, second):
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        for seed in range(2):
            optimizer.zero_grad()
            model(tokens(4, 17, device=device, seed=seed)).square().mean().backward()
            optimizer.step()
        layer = model.base_model.model.layers[0].up
        weight = layer.base_layer.weight.detach().clone()
        delta = 16 / 8 * (layer.lora_B["default"].weight @ layer.lora_A["default"].weight).detach()
        assert delta.abs().max() > 0
        merged = model.merge_and_unload()
        got = merged.layers[0].up.weight.detach()
        assert got.dtype == torch.float32 and torch.allclose(got, weight + delta, atol=1e-6)
        assert isinstance(merged.layers[0].up, QuantLinear)
        assert [name for name, _ in merged.named_parameters()] == [name for name, _ in TinyLM().named_parameters()]


@pytest.mark.parametrize("rank", [1, 5, 8, 16])
def test_b56_any_rank_trains(rank, device):
    torch.manual_seed(0)
    model = enable(lora(TinyLM().to(device), rank), "mxfp8")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        model(tokens(4, 17, device=device)).square().mean().backward()
        optimizer.step()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) == ("lora_" not in name), name


@pytest.mark.parametrize("variant", ["delayed", "mxfp4"])
def test_b56_state_and_steps_under_lora(variant, device):
    """The step ends with an optimizer that holds adapters only, and scaling state round-trips."""
    first, _ = both_orders(variant, device)
    optimizer = torch.optim.AdamW([p for p in first.parameters() if p.requires_grad], lr=1e-3)
    for seed in range(3):
        optimizer.zero_grad()
        first(tokens(4, 17, device=device, seed=seed)).square().mean().backward()
        optimizer.step()
    state = quant.state_dict(first)
    if variant == "delayed":
        histories = [v for name, v in state.items() if name.endswith("history")]
        assert len(histories) == 4 and all(((v != 0).sum(0)[:2] == 3).all() for v in histories)
        # no gradient flows out of the first layer of a model whose embedding is frozen, so it has no gradient history
        assert sorted(int((v != 0).sum(0)[2]) for v in histories) == [0, 3, 3, 3]
    other = both_orders(variant, device)[0]
    other.load_state_dict(first.state_dict())
    quant.load_state_dict(other, state)
    data = tokens(4, 17, device=device)
    assert torch.equal(first(data), other(data))
    assert_same(quant.state_dict(other), quant.state_dict(first))


def test_disable_under_lora(device):
    first, _ = both_orders("mxfp8", device)
    quant.disable(first)
    assert quantized_names(first) == []
    assert type(first.base_model.model.layers[0].up.base_layer) is nn.Linear
