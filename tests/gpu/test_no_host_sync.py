"""A training step must never wait for the host: amax, scales and rounding keys stay on the device."""

import pytest
import torch

import lumen_core.quantize as quant
from launch.config import ModelConfig
from launch.models import build_model
from lumen_core.config import RECIPES
from lumen_core.optim import build_optimizer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="synchronisation is a property of a GPU stream")


def _model(dtype: torch.dtype) -> torch.nn.Module:
    sizes = ModelConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    return build_model(sizes, 256, 64, dtype=dtype, device="cuda", seed=0)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("optimizer", ["torch-foreach", "torch-fused", "ours"])
def test_forward_backward_and_optimizer_step_do_not_synchronise(recipe: str, optimizer: str) -> None:
    model = quant.enable(_model(torch.bfloat16), recipe=recipe)
    if optimizer == "ours":
        stepper = build_optimizer(model, lr=1e-3)
    else:
        stepper = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=optimizer == "torch-fused")
    tokens = torch.randint(0, 256, (2, 64), device="cuda")

    def step() -> torch.Tensor:
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        stepper.step()
        stepper.zero_grad()
        return loss

    first = step()  # lazy allocations and library handles may synchronise once
    torch.cuda.set_sync_debug_mode("error")
    try:
        losses = [step() for _ in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert losses[-1].item() < first.item()
