"""Cases B10, B20, B37, B43, B61, B74: what is converted, what is refused, and what stays as in the plain model."""

from __future__ import annotations

import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from variants import NAMED, TinyLM, assert_same, enable, every_recipe, tokens, twin

import lumen_core.quantize as quant
from lumen_core.config import QuantConfig
from lumen_core.linear import QuantLinear

LAYERS = [f"layers.{i}.{name}" for i in range(2) for name in ("up", "down")]


def converted(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, QuantLinear)]


def reported(model: nn.Module) -> list[str]:
    return [row.name for row in quant.summary(model).rows]


def fingerprint(model: nn.Module) -> dict:
    """Everything `enable` may not change when it fails."""
    return {
        "classes": {name: type(module) for name, module in model.named_modules()},
        "attributes": {name: sorted(vars(module)) for name, module in model.named_modules()},
        "parameters": {name: (id(p), p.dtype, p.requires_grad) for name, p in model.named_parameters()},
        "keys": list(model.state_dict()),
    }


# --- B37, B61: selection ----------------------------------------------------------------------------------------


@every_recipe
def test_b37_heads_embeddings_and_norms_stay(variant):
    model = enable(TinyLM(), variant)
    assert converted(model) == reported(model) == LAYERS
    assert type(model.lm_head) is nn.Linear and type(model.embed) is nn.Embedding
    text = str(quant.summary(model))
    assert all(name in text for name in [*LAYERS, "lm_head"])


@pytest.mark.parametrize("name", ["output_layer", "lm_head"])
def test_b37_output_heads_by_any_name(name):
    model = nn.ModuleDict({"body": nn.Linear(32, 32), name: nn.Linear(32, 64)})
    assert converted(quant.enable(model, recipe="mxfp8")) == ["body"]


@pytest.mark.parametrize("name", ["gate", "router"])
def test_b37_routers_stay(name):
    model = nn.ModuleDict({"mlp": nn.ModuleDict({name: nn.Linear(32, 4), "gate_proj": nn.Linear(32, 64)})})
    assert converted(quant.enable(model, recipe="mxfp8")) == ["mlp.gate_proj"]


@pytest.mark.parametrize("option", ["ignored_modules", "apply_modules"])
def test_b37_a_pattern_that_matches_nothing_is_named(option):
    model = TinyLM()
    before = fingerprint(model)
    with pytest.raises(ValueError, match=rf"{option}.*'output'"):
        quant.enable(model, recipe="mxfp8", **{option: ("output",)})
    assert fingerprint(model) == before


def test_patterns_take_full_names():
    model = enable(TinyLM(), "mxfp8", ignored_modules=("layers.0.*", "*.down"))
    assert converted(model) == ["layers.1.up"]
    model = enable(TinyLM(), "mxfp8", apply_modules=("*.up", "lm_head"))
    assert converted(model) == ["layers.0.up", "layers.1.up", "lm_head"]  # an exact name overrides the built-in ignores
    model = enable(TinyLM(), "mxfp8", apply_modules=("*",))
    assert "lm_head" not in converted(model)


class Mlp(nn.Module):
    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


@every_recipe
def test_b61_first_and_last_layers_stay(variant):
    model = enable(Mlp(), variant, first_layers_bf16=1, last_layers_bf16=1)
    assert converted(model) == reported(model) == ["layers.1", "layers.2"]
    assert all(type(model.layers[i]) is nn.Linear for i in (0, 3))


def test_b61_last_layer_of_a_sequential_that_ends_in_an_activation():
    model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.ReLU())])
    quant.enable(model, recipe="mxfp8", first_layers_bf16=1, last_layers_bf16=1)
    assert converted(model) == ["2", "4"]


def test_b61_layer_rule_on_a_single_block_says_what_to_do():
    with pytest.raises(ValueError, match=r"quant\.enable\(root\)"):
        quant.enable(TinyLM().layers[0], recipe="mxfp8", first_layers_bf16=1)


def test_b61_the_quantizer_runs_in_forward_and_only_there(monkeypatch):
    from lumen_core import casts

    seen = []
    original = casts.quantize_mx
    monkeypatch.setattr(casts, "quantize_mx", lambda x, *args, **kw: seen.append(x) or original(x, *args, **kw))
    model = enable(Mlp(), "mxfp8", first_layers_bf16=1, last_layers_bf16=1)
    with torch.no_grad():
        model(torch.randn(4, 32))
    weights = [x for x in seen if x.shape == (32, 32)]
    assert len(seen) == 4 and len(weights) == 2
    assert torch.equal(weights[0], model.layers[1].weight) and torch.equal(weights[1], model.layers[2].weight)


@pytest.mark.parametrize(
    "model", [nn.LayerNorm(8), nn.Sequential(nn.ReLU()), nn.ModuleDict({"lm_head": nn.Linear(4, 4)})]
)
def test_b61_nothing_to_convert_is_an_error(model):
    before = fingerprint(model)
    with pytest.raises(ValueError, match="nothing to quantize"):
        quant.enable(model, recipe="mxfp8")
    assert fingerprint(model) == before


# --- B43: refused settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (dict(format="fp9"), ValueError, "format.*'fp9'.*fp8_e4m3.*mxfp8"),
        (dict(format=""), ValueError, "format.*''.*fp8_e4m3"),
        (dict(format=None), (TypeError, ValueError), "format.*None.*fp8_e4m3"),
        (dict(format=torch.float8_e4m3fn), TypeError, "format.*float8_e4m3fn.*fp8_e4m3"),
        (dict(scaling="delayd"), ValueError, "scaling.*'delayd'.*delayed"),
        (dict(format="mxfp8", scaling="delayed"), ValueError, "mxfp8.*delayed|delayed.*mxfp8"),
        (dict(recipe="blockwise", weight_block=(33, 33)), ValueError, "weight_block.*33"),
        (dict(recipe="delayed", history_len=0), ValueError, "history_len.*0"),
        (dict(recipe="delayed", history_len="16"), TypeError, "history_len.*'16'"),
        (dict(recipe="mxfp8", block_size=33), TypeError, "block_size"),
        (dict(recipe="mxfp88"), ValueError, "mxfp88.*mxfp8"),
        (dict(recipe="mxfp8", scale_roundng="even"), TypeError, "scale_roundng.*scale_rounding"),
        (dict(recipe="mxfp8", stochastic_rounding="no"), TypeError, "stochastic_rounding.*'no'"),
    ],
    ids=lambda v: str(v) if isinstance(v, dict) else "",
)
def test_b43_bad_settings_are_named_and_touch_nothing(options, error, words):
    model = TinyLM()
    before = fingerprint(model)
    with pytest.raises(error) as caught:
        quant.enable(model, **options)
    assert re.search(words, str(caught.value), re.S), caught.value
    assert fingerprint(model) == before and not quant.is_enabled(model)


def test_b43_case_does_not_matter():
    assert QuantConfig(format="MXFP8") == QuantConfig(format="mxfp8")


def test_enabling_twice_is_refused():
    model = enable(TinyLM(), "mxfp8")
    before = fingerprint(model)
    with pytest.raises(ValueError, match=r"already.*disable"):
        quant.enable(model, recipe="mxfp8")
    with pytest.raises(ValueError, match=r"already.*disable"):
        quant.enable(model.layers[0], recipe="mxfp8")
    assert fingerprint(model) == before
    with pytest.raises(ValueError, match="not quantized"):
        quant.disable(TinyLM())
    with pytest.raises(TypeError, match="model"):
        quant.enable("model", recipe="mxfp8")


@every_recipe
def test_disable_restores_exactly(variant, device):
    model = TinyLM().to(device)
    before, data = fingerprint(model), tokens(2, 9, device=device)
    want = model(data)
    enable(model, variant)
    assert not torch.equal(model(data), want)
    assert quant.disable(model) is model
    assert fingerprint(model) == before and torch.equal(model(data), want)
    enable(model, variant)  # and back again
    assert converted(model) == LAYERS


def test_hooks_survive():
    model, calls = TinyLM(), []
    model.layers[0].up.register_forward_hook(lambda *_: calls.append("forward"))
    enable(model, "mxfp8")
    model(tokens(1, 5))
    quant.disable(model)
    model(tokens(1, 5))
    assert calls == ["forward", "forward"]


# --- B20: state_dict --------------------------------------------------------------------------------------------


@every_recipe
@pytest.mark.parametrize("tied", [False, True])
def test_b20_checkpoints_of_plain_and_enabled_models_are_the_same(variant, tied, tmp_path, device):
    plain = TinyLM(tied=tied).to(device)
    state = plain.state_dict()
    model = enable(TinyLM(tied=tied).to(device), variant)
    model.load_state_dict(state, strict=True)
    assert [(k, v.dtype, v.shape) for k, v in model.state_dict().items()] == [
        (k, v.dtype, v.shape) for k, v in state.items()
    ]
    assert_same(dict(model.state_dict()), dict(state))
    model.loss(tokens(2, 9, device=device)).backward()
    quant.step_end(model)
    assert list(model.state_dict()) == list(state)
    assert [name for name, _ in model.named_buffers()] == [name for name, _ in plain.named_buffers()]
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    tensors = {k: v.clone().contiguous() for k, v in model.state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    loaded = load_file(tmp_path / "model.safetensors", device=str(device))
    assert all(v.numel() for v in loaded.values())
    fresh = TinyLM(tied=tied).to(device)
    fresh.load_state_dict(loaded, strict=True)
    assert_same(dict(fresh.state_dict()), dict(state))
    assert (fresh.lm_head.weight is fresh.embed.weight) == tied


# --- B10: tied weights ------------------------------------------------------------------------------------------


@every_recipe
@pytest.mark.parametrize("head", ["plain", "quantized"])
def test_b10_tied_weights_stay_tied(variant, head, device):
    model = TinyLM(tied=True).to(device)
    reference = twin(model)
    overrides = dict(apply_modules=("*", "lm_head")) if head == "quantized" else {}
    enable(model, variant, **overrides)
    assert (type(model.lm_head) is QuantLinear) == (head == "quantized")
    assert model.embed.weight is model.lm_head.weight
    assert len(list(model.parameters())) == len(list(reference.parameters()))
    data = tokens(8, 33, device=device)
    for m in (model, reference):
        m.loss(data).backward()
    got, want = model.embed.weight.grad, reference.embed.weight.grad
    cosine = torch.nn.functional.cosine_similarity(got.flatten(), want.flatten(), dim=0)
    assert cosine > (0.95 if variant == "mxfp4" else 0.99)
    assert (got.norm() / want.norm()).item() == pytest.approx(1, abs=0.1)
    torch.optim.AdamW(model.parameters(), lr=1e-2).step()
    assert model.embed.weight is model.lm_head.weight


def test_b10_tied_through_meta_init():
    with torch.device("meta"):
        model = TinyLM(tied=True)
    enable(model, "mxfp8")
    model.to_empty(device="cpu")
    model.lm_head.weight = model.embed.weight  # to_empty unties by torch's own rule where the tie is not re-made
    plain = TinyLM(tied=True)
    model.load_state_dict(plain.state_dict())
    data = tokens(2, 9)
    assert torch.equal(model(data), enable(plain, "mxfp8")(data))


# --- B74: everything keeps training -----------------------------------------------------------------------------


@pytest.mark.parametrize("variant", NAMED)
def test_b74_every_weight_trains(variant, device):
    torch.manual_seed(0)
    model = enable(TinyLM().to(device), variant)
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trainable == [name for name, _ in TinyLM().named_parameters()]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        loss = model.loss(tokens(4, 17, device=device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    for name, p in model.named_parameters():
        assert p.dtype == torch.float32 and not torch.equal(p, before[name]), name
        assert optimizer.state[p]["exp_avg"].abs().sum() > 0, name
