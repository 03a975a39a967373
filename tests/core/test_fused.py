"""The converters `fused.norm` and `fused.mlp`: the same model, run by our operations, and back again."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import lumen_core.quantize as quant
from lumen_core import fused

CONVERTERS = ["quantize.linear", "fused.norm", "fused.mlp"]
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(vocab_size=96, num_hidden_layers=2, **SIZES))


def qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(vocab_size=96, num_hidden_layers=2, head_dim=16, **SIZES))


def qwen3_moe() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "mlp_only_layers": [0]}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=96, num_hidden_layers=2, head_dim=16, **SIZES, **experts))


MODELS = {"llama": (llama, 5, 2), "qwen3": (qwen3, 9, 2), "qwen3_moe": (qwen3_moe, 9, 1)}  # how many norms and MLPs


def _step(model: nn.Module, device: torch.device) -> tuple[torch.Tensor, list[torch.Tensor]]:
    ids = torch.randint(0, 96, (2, 32), generator=torch.Generator().manual_seed(0)).to(device)
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("name", MODELS)
def test_hugging_face_models(name: str, device: torch.device) -> None:
    make, norms, mlps = MODELS[name]
    torch.manual_seed(0)
    model = make().to(device)
    classes, keys = [type(m) for m in model.modules()], list(model.state_dict())
    plain, ours = copy.deepcopy(model), quant.enable(model, recipe="bf16", converters=CONVERTERS)
    quant.enable(plain, recipe="bf16", converters=["quantize.linear"])
    kinds = [m for m in ours.modules() if isinstance(m, fused.Fused)]
    assert sum(isinstance(m, fused.FusedRMSNorm) for m in kinds) == norms
    assert sum(isinstance(m, fused.FusedMLP) for m in kinds) == mlps
    assert list(ours.state_dict()) == keys
    assert f"{norms + mlps} norms and MLPs run by fused operations" in str(quant.summary(ours))
    (loss, grads), (expected, wanted) = _step(ours, device), _step(plain, device)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-3)
    for got, want in zip(grads, wanted):
        assert (got - want).norm() <= 0.02 * want.norm() + 1e-6
    quant.disable(ours)
    assert [type(m) for m in ours.modules()] == classes


def test_with_checkpointing_and_a_recipe(device: torch.device) -> None:
    torch.manual_seed(0)
    model = quant.enable(llama().to(device), recipe="mxfp8", converters=CONVERTERS)
    loss, grads = _step(model, device)
    model.gradient_checkpointing_enable()
    model.train()
    again, wanted = _step(model, device)
    assert torch.equal(loss, again) and all(torch.equal(a, b) for a, b in zip(grads, wanted))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.RMSNorm(48),
        lambda: nn.RMSNorm(48, eps=0.1),
        lambda: nn.LayerNorm(48),
        lambda: nn.LayerNorm(48, bias=False),
    ],
)
def test_norms_of_torch(make, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 48), make()).to(device, dtype)
    with torch.no_grad():
        model[1].weight.normal_()
    x = torch.randn(3, 5, 48, device=device, dtype=dtype)
    expected = model(x)
    quant.enable(model, recipe="bf16", converters=CONVERTERS)
    assert isinstance(model[1], fused.Fused)
    linear = copy.deepcopy(model[0])
    got, want = model[1](linear(x)), type(model[1])._plain_class.forward(model[1], linear(x))
    assert torch.allclose(got.float(), want.float(), rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
    assert got.dtype == expected.dtype


def test_what_is_left_alone(device: torch.device) -> None:
    class Plus(nn.RMSNorm):  # not what its base does
        def forward(self, x):
            return super().forward(x) * 2

    class GeluMLP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(32, 32) for _ in range(3))
            self.act_fn = nn.GELU()

    model = nn.ModuleDict({"plus": Plus(32), "mlp": GeluMLP(), "bare": nn.LayerNorm(32, elementwise_affine=False)})
    model["kept"], model["norm"] = nn.RMSNorm(32), nn.RMSNorm(32)
    quant.enable(model.to(device), recipe="mxfp8", converters=CONVERTERS, ignored_modules=["kept"])
    assert [name for name, m in model.named_modules() if isinstance(m, fused.Fused)] == ["norm"]
    x = torch.randn(4, 32, device=device, dtype=torch.float64)
    assert torch.equal(model["norm"](x), nn.RMSNorm.forward(model["norm"], x)), "a weight of another dtype"


def test_copies_and_pickles() -> None:
    model = quant.enable(llama(), recipe="tensorwise", converters=CONVERTERS)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert sum(isinstance(m, fused.Fused) for m in twin.modules()) == 7
        assert torch.equal(_step(twin, torch.device("cpu"))[0], _step(model, torch.device("cpu"))[0])
        quant.disable(twin)
        assert not any(isinstance(m, fused.Fused) for m in twin.modules())


def test_a_layer_in_one_graph(device: torch.device) -> None:
    torch._dynamo.reset()
    model = quant.enable(
        nn.Sequential(nn.RMSNorm(64), nn.Linear(64, 64)).to(device), recipe="mxfp8", converters=CONVERTERS
    )
    x = torch.randn(8, 64, device=device, requires_grad=True)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(x), model(x), atol=1e-6)
    compiled(x).sum().backward()


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match=r"fused\.norms.*fused\.norm"):
        quant.enable(llama(), recipe="mxfp8", converters=["quantize.linear", "fused.norms"])
