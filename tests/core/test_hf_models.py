"""Hugging Face Llama, Qwen3 and Qwen3-MoE, built offline from their configurations."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from variants import assert_same, enable, every_recipe, tokens, twin

import lumen_core.quantize as quant

SIZES = dict(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
MOE = dict(moe_intermediate_size=48, num_experts=4, num_experts_per_tok=2, decoder_sparse_step=1, head_dim=16)
ATTENTION = [f"self_attn.{name}_proj" for name in "qkvo"]
DENSE = [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
BANKS = [f"mlp.experts.{name}_proj" for name in ("gate_up", "down")]


def build(kind: str, *, tied: bool = False, **options):
    """A tiny model in fp32 with fixed values."""
    torch.manual_seed(0)
    sizes = SIZES | dict(tie_word_embeddings=tied) | options
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**sizes))
    if kind == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=16))
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **MOE))


def expected(kind: str) -> list[str]:
    parts = ATTENTION + (BANKS if kind == "qwen3_moe" else DENSE)
    return [f"model.layers.{i}.{part}" for i in range(2) for part in parts]


every_kind = pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_moe"])


def train(model, device: torch.device, steps: int = 3) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = tokens(4, 24, device=device)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=data, labels=data).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@every_kind
@every_recipe
def test_three_steps_and_back_to_a_checkpoint(kind, variant, device, tmp_path):
    plain = build(kind).to(device)
    keys = {name: (v.dtype, v.shape) for name, v in plain.state_dict().items()}
    model = enable(twin(plain), variant)
    assert sorted(row.name for row in quant.summary(model).rows) == sorted(expected(kind))
    assert quant.summary(model).quantized_share == 1 - plain.lm_head.weight.numel() / linear_numel(plain)
    reference = train(plain, device)
    losses = train(model, device)
    assert losses[-1] < losses[0]
    assert losses == pytest.approx(reference, rel=0.05 if variant == "mxfp4" else 0.01)
    assert losses != reference
    assert {name: (v.dtype, v.shape) for name, v in model.state_dict().items()} == keys
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).to(device)
    assert not quant.is_enabled(loaded)
    assert {name: (v.dtype, v.shape) for name, v in loaded.state_dict().items()} == keys
    assert_same(dict(loaded.state_dict()), dict(model.state_dict()))
    data = tokens(2, 16, device=device)
    if variant not in ("delayed", "hybrid"):  # whose scales are those of the run's history
        enable(loaded, variant)
        with torch.no_grad():
            assert torch.equal(loaded.eval()(input_ids=data).logits, model.eval()(input_ids=data).logits)


def linear_numel(model) -> int:
    """Elements of all linear weights, expert banks and the head included, the router not."""
    wanted = ("_proj.weight", "gate_up_proj", "down_proj", "lm_head.weight", "gate.weight")
    return sum(p.numel() for name, p in model.named_parameters() if name.endswith(wanted) and "mlp.gate.w" not in name)


@every_kind
def test_tied_head_stays_tied(kind, device, tmp_path):
    model = enable(build(kind, tied=True).to(device), "mxfp8")
    train(model, device, 1)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).to(device)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert_same(dict(loaded.state_dict()), dict(model.state_dict()))


@every_kind
def test_first_and_last_layers_stay(kind, device):
    model = build(kind, num_hidden_layers=4)
    quant.enable(model.to(device), recipe="mxfp8", first_layers_bf16=1, last_layers_bf16=1)
    layers = {row.name.split(".")[2] for row in quant.summary(model).rows}
    assert layers == {"1", "2"}


@every_kind
@every_recipe
def test_gradients_point_where_those_of_the_plain_model_do(kind, variant, device):
    plain = build(kind).to(device)
    model = enable(twin(plain), variant)
    data = tokens(8, 32, device=device)
    for m in (plain, model):
        m(input_ids=data, labels=data).loss.backward()
    for (name, p), (_, q) in zip(plain.named_parameters(), model.named_parameters()):
        if p.dim() < 2 or "mlp.gate." in name:
            continue
        cosine = torch.nn.functional.cosine_similarity(p.grad.flatten(), q.grad.flatten(), dim=0).item()
        floor = 0.8 if variant == "mxfp4" else 0.96 if kind == "qwen3_moe" else 0.98  # a router's choice may flip
        assert cosine > floor, (name, cosine)


@every_kind
def test_gradient_checkpointing_of_the_model(kind, device):
    results = []
    for recompute in (False, True):
        model = enable(build(kind).to(device), "mxfp4")
        model.train()
        if recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        data = tokens(4, 24, device=device)
        model(input_ids=data, labels=data).loss.backward()
        results.append({name: p.grad for name, p in model.named_parameters()})
    assert_same(*results)


@every_kind
def test_disable_gives_the_plain_model_back(kind, device):
    plain = build(kind).to(device).eval()
    model = enable(twin(plain), "mxfp8")
    data = tokens(2, 16, device=device)
    with torch.no_grad():
        want = plain(input_ids=data).logits
        assert not torch.equal(model(input_ids=data).logits, want)
        quant.disable(model)
        assert torch.equal(model(input_ids=data).logits, want)
    assert {n: type(m) for n, m in model.named_modules()} == {n: type(m) for n, m in plain.named_modules()}


@every_kind
def test_bf16_model_in_bf16(kind, device):
    model = enable(build(kind).to(device, torch.bfloat16), "mxfp8")
    losses = train(model, device)
    assert losses[-1] < losses[0]
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
