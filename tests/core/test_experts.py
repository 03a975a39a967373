"""Expert banks of Hugging Face models on the quantized path (B42, B50, B61, B72)."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts, Qwen3MoeSparseMoeBlock

import lumen_core.quantize as quant
from lumen_core.config import RECIPES, QuantConfig
from lumen_core.linear import quantized_linear

RECIPE_NAMES = [name for name in RECIPES if name != "bf16"]
EXPERTS, HIDDEN, INNER = 6, 64, 48
TOLERANCE = {"mxfp4": 0.5}  # two layers after one another, three operands of a product each off by 12 %


def bank(device: torch.device, experts: int = EXPERTS) -> Qwen3MoeExperts:
    config = Qwen3MoeConfig(num_experts=experts, hidden_size=HIDDEN, moe_intermediate_size=INNER, num_experts_per_tok=1)
    config._experts_implementation = "eager"
    module = Qwen3MoeExperts(config).to(device)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.1)
    return module


def routed(counts: list[int], device: torch.device) -> torch.Tensor:
    order = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    return order[torch.randperm(len(order))][:, None].to(device)


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
@pytest.mark.parametrize("counts", [[0, 5, 0, 0, 3, 0], [0] * 6, [8, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 8]], ids=str)
def test_b50_empty_experts_equal_a_loop_and_get_zero_gradients(recipe, counts, device):
    module = bank(device)
    plain = copy.deepcopy(module)
    quant.enable(module, recipe=recipe)
    index = routed(counts, device)
    x = torch.randn(len(index), HIDDEN, device=device)
    weights = torch.rand(len(index), 1, device=device)
    leaf, plain_leaf = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, want = module(leaf, index, weights), plain(plain_leaf, index, weights)
    g = torch.randn_like(y)
    y.backward(g)
    if len(index):
        want.backward(g)
    limit = TOLERANCE.get(recipe, 0.12)
    if len(index):
        assert (y - want).norm() <= limit * want.norm()
        assert (leaf.grad - plain_leaf.grad).norm() <= limit * plain_leaf.grad.norm()
    for name, parameter in module.named_parameters():
        reference = dict(plain.named_parameters())[name].grad
        assert parameter.grad.shape == parameter.shape and torch.isfinite(parameter.grad).all()
        for expert, count in enumerate(counts):
            if count == 0:
                assert not parameter.grad[expert].any(), (name, expert)
            else:
                assert (parameter.grad[expert] - reference[expert]).norm() <= limit * reference[expert].norm()


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_b72_no_expert_reads_rows_of_another(recipe, device):
    """Experts scale by their number; token counts fill no block."""
    counts = [3, 17, 1, 20]
    module = bank(device, len(counts))
    with torch.no_grad():
        module.gate_up_proj.zero_()
        module.down_proj.zero_()
        for e in range(len(counts)):
            eye = torch.eye(INNER, HIDDEN, device=device)
            module.gate_up_proj[e, :INNER] = eye * 16.0  # silu(16 x) is 16 x at x = 1, to 1e-7
            module.gate_up_proj[e, INNER:] = eye
            module.down_proj[e] = torch.eye(HIDDEN, INNER, device=device) * (e + 1) / 16.0
    quant.enable(module, recipe=recipe)
    index = routed(counts, device)
    x = torch.ones(len(index), HIDDEN, device=device)
    y = module(x, index, torch.ones(len(index), 1, device=device))
    want = (index + 1.0).expand(-1, INNER)
    error = ((y[:, :INNER] - want).abs() / want).max()
    assert error <= (0.25 if recipe == "mxfp4" else 0.0625)
    assert not y[:, INNER:].any()


def test_a_bank_computes_what_the_linear_does(device):
    module = bank(device, 2)
    quant.enable(module, recipe="mxfp8")
    x = torch.randn(40, HIDDEN, device=device)
    index = torch.zeros(40, 1, dtype=torch.int64, device=device)
    y = module(x, index, torch.ones(40, 1, device=device))
    config = QuantConfig.from_recipe("mxfp8")
    gate, up = quantized_linear(x, module.gate_up_proj[0], None, config).chunk(2, dim=-1)
    want = quantized_linear(F.silu(gate) * up, module.down_proj[0], None, config)
    assert torch.equal(y, want)


def test_b61_experts_are_converted_and_the_router_is_not(device):
    config = Qwen3MoeConfig(
        num_experts=4, hidden_size=HIDDEN, moe_intermediate_size=INNER, num_experts_per_tok=2, norm_topk_prob=True
    )
    config._experts_implementation = "eager"
    block = Qwen3MoeSparseMoeBlock(config).to(device)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(std=0.1)
    plain = copy.deepcopy(block)
    quant.enable(block, recipe="mxfp8")
    assert {row.name for row in quant.summary(block).rows} == {"experts.gate_up_proj", "experts.down_proj"}
    # B42: the choice of experts is that of the unquantized model for every token.
    hidden = torch.randn(256, HIDDEN, device=device)
    assert torch.equal(block.gate(hidden)[2], plain.gate(hidden)[2])
    assert list(block.state_dict()) == list(plain.state_dict())


def test_copies_pickles_and_disable(device):
    module = bank(device)
    names = list(module.state_dict())
    quant.enable(module, recipe="delayed")
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert quant.is_enabled(twin) and list(twin.state_dict()) == names
        assert twin.quant_states["down_proj"] is not module.quant_states["down_proj"]
    quant.disable(module)
    assert type(module) is Qwen3MoeExperts and not hasattr(module, "quant_states")


def test_converters_may_leave_experts_out(device):
    with pytest.raises(ValueError, match=r"quantize\.moe"):
        quant.enable(bank(device), recipe="mxfp8", converters=("quantize.linear",))
