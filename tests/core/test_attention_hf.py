"""Our attention in Hugging Face's Llama and Qwen3, against their own eager one."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from lumen_core.attention import RECIPES
from lumen_core.huggingface import register_attention

SIZES = dict(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=128,
)
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "qwen3": Qwen3Config(**SIZES),
    "qwen3 with a window": Qwen3Config(**SIZES, use_sliding_window=True, sliding_window=5, max_window_layers=1),
}
every_model = pytest.mark.parametrize("kind", CONFIGS)
LENGTHS = (3, 5, 32)


def build(kind: str, attention: str, device: torch.device) -> torch.nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[kind], attn_implementation=attention).to(device)


def packed(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Two rows of documents, the second in another order, and their positions."""
    positions = [torch.cat([torch.arange(n) for n in lengths]) for lengths in (LENGTHS, LENGTHS[::-1])]
    return torch.randint(0, 64, (2, sum(LENGTHS)), device=device), torch.stack(positions).to(device)


@every_model
@pytest.mark.parametrize("pack", [True, False])
def test_b47_equals_eager_and_documents_are_alone(device, kind, pack) -> None:
    tokens, positions = packed(device)
    ours = build(kind, register_attention("lumen_test", packed=pack), device)
    eager = build(kind, "eager", device)
    plain = [m(input_ids=tokens, use_cache=False).logits for m in (ours, eager)]
    torch.testing.assert_close(*plain, rtol=1e-4, atol=1e-5)
    if not pack:
        return
    logits = ours(input_ids=tokens, position_ids=positions, use_cache=False).logits
    assert (logits - plain[0]).abs().max() > 1e-3
    begin = 0
    for length in LENGTHS:
        own = slice(begin, begin + length)
        alone = eager(input_ids=tokens[:1, own], use_cache=False).logits
        torch.testing.assert_close(logits[:1, own], alone, rtol=1e-4, atol=1e-5)
        begin += length


@every_model
@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_reach_every_parameter(device, kind, recipe) -> None:
    tokens, positions = packed(device)
    grads = []
    for name in (register_attention("lumen_test", recipe), "eager"):
        model = build(kind, name, device)
        model(input_ids=tokens, position_ids=positions, use_cache=False).logits.square().mean().backward()
        grads.append({n: p.grad for n, p in model.named_parameters()})
    ours, eager = grads
    for name, grad in eager.items():
        distance = (ours[name] - grad).norm() / grad.norm()
        assert distance < (1e-4 if recipe == "bf16" else 0.2), name
    if recipe != "bf16":
        assert (ours["model.layers.0.self_attn.q_proj.weight"] != eager["model.layers.0.self_attn.q_proj.weight"]).any()


def test_generation_sees_the_whole_cache(device) -> None:
    tokens = torch.randint(0, 64, (1, 9), device=device)
    ours, eager = (build("llama", name, device).eval() for name in (register_attention("lumen_test"), "eager"))
    with torch.no_grad():
        cache = ours(input_ids=tokens[:, :6], use_cache=True).past_key_values
        last = ours(input_ids=tokens[:, 6:], past_key_values=cache, use_cache=True).logits
        torch.testing.assert_close(last, eager(input_ids=tokens).logits[:, 6:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("packed_rows", [True, False])
def test_compiles_as_one_graph(device, packed_rows) -> None:
    torch._dynamo.reset()
    tokens, positions = packed(device)
    model = build("llama", register_attention("lumen_test", packed=packed_rows), device)

    def run():
        return model(input_ids=tokens, position_ids=positions, use_cache=False).logits

    want = run()
    torch.testing.assert_close(torch.compile(run, fullgraph=True)(), want, rtol=1e-4, atol=1e-5)


def test_what_it_does_not_have_is_refused(device) -> None:
    model = build("llama", register_attention("lumen_test"), device)
    tokens = torch.randint(0, 64, (1, 4), device=device)
    mask = torch.zeros(1, 1, 4, 4, device=device)
    with pytest.raises(ValueError, match="attention mask"):
        model(input_ids=tokens, attention_mask=mask, use_cache=False)
    with pytest.raises(ValueError, match="recipe='int8'"):
        register_attention("lumen_test", "int8")
    model.train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with pytest.raises(ValueError, match="dropout"):
        model(input_ids=tokens, use_cache=False)
