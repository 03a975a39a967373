"""A training step must never wait for the host: amax, scales and rounding keys stay on the device."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import lumen_core.quantize as quant
from lumen_core.config import RECIPES

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="synchronisation is a property of a GPU stream")


def _model() -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        max_position_embeddings=128,
        attn_implementation="sdpa",
        use_cache=False,
    )
    return LlamaForCausalLM(config).to("cuda", torch.bfloat16)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
def test_forward_backward_and_optimizer_step_do_not_synchronise(recipe: str, fused: bool) -> None:
    model = quant.enable(_model(), recipe=recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    hidden = torch.randn(2, 64, 128, device="cuda", dtype=torch.bfloat16)
    positions = torch.arange(64, device="cuda")[None]

    def step() -> torch.Tensor:
        out = model.model(inputs_embeds=hidden, position_ids=positions).last_hidden_state
        loss = model.lm_head(out).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    first = step()  # lazy allocations and library handles may synchronise once
    torch.cuda.set_sync_debug_mode("error")
    try:
        losses = [step() for _ in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert losses[-1].item() < first.item()
