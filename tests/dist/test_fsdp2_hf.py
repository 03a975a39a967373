"""Hugging Face models as a user writes it: `quant.enable`, then torch's own `fully_shard` with a `LumenPolicy`."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks


def _llama() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=96, num_hidden_layers=2, **sizes))


def _qwen_moe() -> torch.nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 16}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=96, num_hidden_layers=2, **sizes, **experts))


MODELS = {"llama": _llama, "qwen3_moe": _qwen_moe}


def _train(rank: int, size: int, name: str, recipe: str, low_precision: bool) -> dict:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import lumen_core.quantize as quant
    from lumen_core.comm.meter import METER
    from lumen_fsdp2 import LumenPolicy, plan

    torch.manual_seed(0)
    model = MODELS[name]()
    options = {"dgrad_weight": "from_rows"} if recipe == "mxfp8" else {}
    quant.enable(model, recipe=recipe, **options)
    mesh = init_device_mesh("cpu", (size,))
    policy = LumenPolicy(low_precision_all_gather=low_precision, print_plan=False)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    start, losses = METER.snapshot(), []
    for _ in range(3):
        ids = torch.randint(0, 96, (2, 32), generator=torch.Generator().manual_seed(rank))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    rows = plan(model).rows
    return {
        "losses": losses,
        "weights": [p.full_tensor().detach() for p in model.parameters()],
        "gathered": METER.since(start).total("all_gather"),
        "planned": 3 * sum(row.bytes_per_step for row in rows),
        "quantized": {row.name: row.wire for row in rows if row.mode != "-"},
        "plain": {row.name for row in rows if row.mode == "-"},
    }


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("recipe", ["mxfp8-32x32", "mxfp8", "tensorwise", "delayed"])
def test_the_gather_changes_bytes_and_no_number(name: str, recipe: str) -> None:
    on = run_ranks(_train, 2, name, recipe, True, timeout=60)[0]
    off = run_ranks(_train, 2, name, recipe, False, timeout=60)[0]
    assert on["losses"] == off["losses"] and on["losses"][-1] < on["losses"][0]
    assert all(torch.equal(a, b) for a, b in zip(on["weights"], off["weights"]))
    assert on["gathered"] == on["planned"] and off["gathered"] == off["planned"]
    assert not off["quantized"] and set(on["quantized"].values()) == {recipe}
    assert on["gathered"] < off["gathered"]
    kinds = {key.split(".")[-2] if key.endswith("weight") else key.split(".")[-1] for key in on["quantized"]}
    attention = {"q_proj", "k_proj", "v_proj", "o_proj"}
    mlp = {"gate_proj", "up_proj", "down_proj"} if name == "llama" else {"gate_up_proj", "down_proj"}
    assert kinds == attention | mlp
    assert "lm_head.weight" in on["plain"]
    assert name == "llama" or any("mlp.gate" in key for key in on["plain"])  # the router


def _adapt(rank: int, size: int, recipe: str) -> dict:
    from peft import LoraConfig, get_peft_model
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import lumen_core.quantize as quant
    from lumen_fsdp2 import LumenPolicy, plan

    torch.manual_seed(0)
    model = get_peft_model(_llama().to(torch.bfloat16), LoraConfig(r=8, target_modules=["q_proj", "down_proj"]))
    quant.enable(model, recipe=recipe)
    mesh, policy = init_device_mesh("cpu", (size,)), LumenPolicy(param_dtype=torch.bfloat16, print_plan=False)
    base = model.base_model.model
    for layer in base.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    before = {name: p.full_tensor().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
    losses = []
    for _ in range(3):
        ids = torch.randint(0, 96, (2, 32), generator=torch.Generator().manual_seed(rank))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    after = {name: p.full_tensor() for name, p in model.named_parameters()}
    return {
        "losses": losses,
        "dtypes": {(p.requires_grad, p.dtype) for name, p in model.named_parameters() if "lm_head" not in name},
        "moved": {name for name in after if not torch.equal(before[name], after[name])},
        "trained": set(trained),
        "wires": {row.name: row.wire for row in plan(model).rows},
    }


@pytest.mark.parametrize("recipe", ["mxfp8-32x32", "tensorwise"])
def test_b55_fp32_adapters_on_a_frozen_quantized_base(recipe: str) -> None:
    """Adapters train in fp32 and travel as they are; the base stays bit for bit, and travels in low precision."""
    found = run_ranks(_adapt, 2, recipe, timeout=60)[0]
    assert found["losses"][-1] < found["losses"][0]
    assert found["dtypes"] == {(True, torch.float32), (False, torch.bfloat16)}
    assert found["trained"] and found["moved"] == found["trained"]
    assert all("lora_" in name for name in found["trained"])
    low = {name for name, wire in found["wires"].items() if wire == recipe}
    assert low and not any("lora_" in name for name in low)
    assert {name.split(".")[-3 if "base_layer" in name else -2] for name in low} >= {"q_proj", "v_proj", "down_proj"}
