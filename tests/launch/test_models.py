"""Models from numbers and from directories: right shapes, the same first weights everywhere, right rotary tables."""

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from launch.config import ConfigError, ModelConfig, RopeScaling
from launch.hf_export import export_model
from launch.models import (
    allocate,
    build_model,
    count_parameters,
    empty_model,
    hf_config,
    initialize,
    materialize,
)
from launch.overrides import load

DENSE = ModelConfig(hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
DENSE.num_key_value_heads = 2
MOE = ModelConfig(
    architecture="qwen3_moe",
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
)
QWEN3 = ModelConfig(architecture="qwen3", hidden_size=48, num_attention_heads=4, num_key_value_heads=2)


def model_of(name: str) -> ModelConfig:
    return load([f"model={name}"])[0].model


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("llama2_7b", 6_738_415_616),
        ("llama2_13b", 13_015_864_320),
        ("llama2_70b", 68_976_648_192),
        ("llama31_8b", 8_030_261_248),
        ("qwen3_30b_a3b", 30_532_122_624),
        ("tiny", 2_558_400),
    ],
)
def test_parameter_counts_are_those_published(name: str, count: int) -> None:
    model = empty_model(hf_config(model_of(name), 320), torch.bfloat16)
    assert count_parameters(model) == count
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in model.parameters())


@pytest.mark.parametrize("config", [DENSE, MOE, QWEN3], ids=lambda c: c.architecture)
def test_trains_on_every_device(config: ModelConfig, device: torch.device) -> None:
    model = build_model(config, 64, 32, device=device, seed=3)
    assert model.training and not model.config.use_cache and model.config._attn_implementation == "lumen_sdpa"
    ids = torch.randint(0, 64, (2, 32), device=device)
    output = model(ids, use_cache=False)
    loss = torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(64), rel=0.05)
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_load_balancing_loss_is_there_and_can_be_switched_off() -> None:
    ids = torch.randint(0, 64, (1, 16))
    # Load-balancing loss of Fedus et al. (2021) in Hugging Face's scaling: the number of choices for an even router.
    assert build_model(MOE, 64)(ids).aux_loss.item() == pytest.approx(2.0, rel=0.05)
    off = ModelConfig(**{**vars(MOE), "router_aux_loss_coef": 0.0})
    assert build_model(off, 64)(ids).aux_loss is None


@pytest.mark.parametrize("config", [DENSE, MOE], ids=lambda c: c.architecture)
def test_first_weights_follow_hugging_face_s_rule(config: ModelConfig) -> None:
    wide = ModelConfig(**{**vars(config), "hidden_size": 256, "initializer_range": 0.03})
    ours = build_model(wide, 512, seed=0)
    theirs = AutoModelForCausalLM.from_config(hf_config(wide, 512))
    reference = dict(theirs.named_parameters())
    for name, param in ours.named_parameters():
        other = reference[name]
        assert param.shape == other.shape
        if other.dim() == 1:
            assert torch.equal(param, other), name
        else:
            bound = 0.03 * 5 / math.sqrt(2 * param.numel())  # five standard errors
            assert param.std().item() == pytest.approx(0.03, abs=bound), name
            assert abs(param.mean().item()) < 0.03 * 5 / math.sqrt(param.numel()), name


def test_first_weights_depend_on_seed_and_name_only() -> None:
    one, same, other = (build_model(DENSE, 64, seed=s).state_dict() for s in (1, 1, 2))
    torch.manual_seed(123)
    assert all(torch.equal(one[k], same[k]) for k in one)
    matrices = [k for k in one if one[k].dim() > 1]
    assert not any(torch.equal(one[k], other[k]) for k in matrices)
    flat = [one[k].flatten()[:64] for k in matrices]
    assert not any(torch.equal(a, b) for i, a in enumerate(flat) for b in flat[:i])
    deeper = build_model(ModelConfig(**{**vars(DENSE), "num_hidden_layers": 3}), 64, seed=1).state_dict()
    assert all(torch.equal(one[k], deeper[k]) for k in one)
    low = build_model(DENSE, 64, seed=1, dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(one[k].bfloat16(), low[k]) for k in one)


def test_rows_are_drawn_in_blocks_that_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    import launch.models as models

    monkeypatch.setattr(models, "_BLOCK", 64)
    whole = models._draw("w", (33, 16), 1.0, 7, 0, 33)
    for start, stop in ((0, 5), (3, 4), (4, 33), (13, 27), (33, 33)):
        assert torch.equal(models._draw("w", (33, 16), 1.0, 7, start, stop), whole[start:stop])
    assert whole.unique().numel() > 33 * 16 * 0.99
    bank = models._draw("experts", (6, 8, 16), 1.0, 7, 0, 6)
    assert torch.equal(models._draw("experts", (6, 8, 16), 1.0, 7, 2, 5), bank[2:5])


ROPE = [
    RopeScaling(),
    RopeScaling(rope_type="linear", factor=2.0),
    RopeScaling(rope_type="llama3", factor=8.0, original_max_position_embeddings=512),
]


@pytest.mark.parametrize("scaling", ROPE, ids=lambda s: s.rope_type)
def test_rotary_tables_are_right_after_the_meta_device(scaling: RopeScaling, device: torch.device) -> None:
    config = ModelConfig(**{**vars(DENSE), "rope_theta": 5e5, "rope_scaling": scaling})
    reference = AutoModelForCausalLM.from_config(hf_config(config, 64)).model.rotary_emb
    direct = build_model(config, 64, device=device, dtype=torch.bfloat16)
    late = build_model(ModelConfig(**{**vars(config), "init_on_meta": True}), 64, dtype=torch.bfloat16)
    assert all(p.is_meta for p in late.parameters())
    materialize(late, config, device=device)
    exponents = torch.arange(0, 12, 2, dtype=torch.float) / 12
    plain = 1.0 / 5e5**exponents
    for model in (direct, late):
        for name in ("inv_freq", "original_inv_freq"):
            table = getattr(model.model.rotary_emb, name)
            assert table.dtype == torch.float32 and table.device.type == device.type
            assert torch.equal(table.cpu(), getattr(reference, name))
        if scaling.rope_type == "default":
            torch.testing.assert_close(model.model.rotary_emb.inv_freq.cpu(), plain)
    assert torch.equal(direct.lm_head.weight, late.lm_head.weight)
    if scaling.rope_type != "default":
        assert not torch.allclose(reference.inv_freq, plain)


def test_buffers_that_cannot_be_recomputed_are_an_error() -> None:
    with torch.device("meta"):
        module = torch.nn.BatchNorm1d(4)
    with pytest.raises(NotImplementedError, match="running_mean"):
        allocate(module, "cpu")


def test_tied_weights_stay_tied_through_the_meta_device() -> None:
    config = ModelConfig(**{**vars(DENSE), "tie_word_embeddings": True, "init_on_meta": True})
    model = build_model(config, 64)
    materialize(model, config)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    ids = torch.randint(0, 64, (1, 8))
    model(ids).logits.sum().backward()
    assert count_parameters(model) == count_parameters(build_model(DENSE, 64)) - 64 * 48


def test_names_do_not_depend_on_wrappers() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    plain, wrapped = (build_model(DENSE, 64, seed=9) for _ in range(2))
    wrapped.model.layers[0] = checkpoint_wrapper(torch.compile(wrapped.model.layers[0]))
    assert any("_checkpoint_wrapped_module._orig_mod" in n for n, _ in wrapped.named_parameters())
    for p in wrapped.parameters():
        p.data.zero_()
    initialize(wrapped, std=0.02, seed=9)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), wrapped.parameters()))


def test_vocabulary_and_length_are_checked() -> None:
    assert build_model(DENSE, 100).get_input_embeddings().weight.shape[0] == 100
    sized = ModelConfig(**{**vars(DENSE), "vocab_size": 128})
    assert build_model(sized, 100).get_input_embeddings().weight.shape[0] == 128
    with pytest.raises(ConfigError, match="model.vocab_size=128: expected at least the tokenizer's 129"):
        build_model(sized, 129)
    with pytest.raises(ConfigError, match="train.seq_length=2049: expected at most the model's 2048"):
        build_model(DENSE, 64, 2049)


@pytest.mark.parametrize("config", [DENSE, MOE], ids=lambda c: c.architecture)
@pytest.mark.parametrize("meta", [False, True])
def test_a_directory_is_loaded_bit_by_bit(config: ModelConfig, meta: bool, tmp_path: Path) -> None:
    source = build_model(config, 64, seed=5)
    export_model(source, tmp_path / "m")
    again = ModelConfig(path=str(tmp_path / "m"), init_on_meta=meta)
    loaded = build_model(again, 64, 32)
    assert loaded.training and next(loaded.parameters()).is_meta == meta
    if meta:
        materialize(loaded, again)
    a, b = source.state_dict(), loaded.state_dict()
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    with pytest.raises(ConfigError, match="vocab_size of model.path"):
        build_model(again, 65)


def test_a_directory_without_all_weights_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    export_model(build_model(DENSE, 64), tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    tensors = load_file(file)
    removed = tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, file, metadata={"format": "pt"})
    config = ModelConfig(path=str(tmp_path / "m"))
    with pytest.raises(ConfigError, match=r"1 missing keys .*layers\.1\.mlp\.up_proj"):
        build_model(config, 64)
    save_file(
        {**tensors, "model.layers.1.mlp.up_proj.weight": removed, "extra": removed.clone()}, file, {"format": "pt"}
    )
    with pytest.raises(ConfigError, match="1 unexpected keys"):
        build_model(config, 64)
    save_file({**tensors, "model.layers.1.mlp.up_proj.weight": removed[:3].clone()}, file, {"format": "pt"})
    with pytest.raises(ConfigError, match="1 mismatched keys"):
        build_model(config, 64)
    (tmp_path / "m" / "config.json").unlink()
    with pytest.raises(ConfigError, match="no config.json"):
        build_model(config, 64)


def test_a_quantized_directory_is_refused(tmp_path: Path) -> None:
    export_model(build_model(DENSE, 64), tmp_path / "m")
    file = tmp_path / "m" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ConfigError, match="stored quantized"):
        build_model(ModelConfig(path=str(tmp_path / "m")), 64)


def test_the_configuration_says_what_the_numbers_say() -> None:
    made = hf_config(model_of("llama31_8b"), 320)
    published = AutoConfig.for_model(
        "llama",
        vocab_size=128256,
        rope_theta=500000.0,
        rope_scaling={
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        max_position_embeddings=131072,
    )
    assert made.rope_parameters == published.rope_parameters
    assert made.vocab_size == 128256 and made.num_key_value_heads == 8 and made.head_dim == 128
    qwen = hf_config(model_of("qwen3_30b_a3b"), 320)
    assert (qwen.num_experts, qwen.num_experts_per_tok, qwen.moe_intermediate_size) == (128, 8, 768)
    assert qwen.norm_topk_prob and qwen.rope_parameters["rope_theta"] == 1e6
