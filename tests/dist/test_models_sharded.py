"""Sharded models: the same first weights at every world size, weights read by one rank, exports that gather."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import lumen_core.quantize as quant
from launch import models
from launch.config import ConfigError, ModelConfig
from launch.hf_export import export_model, full_state
from launch.models import build_model, initialize, materialize

# 3 key/value rows of 10 and 7 experts: nothing divides by 2 or 4.
SIZES = {"hidden_size": 30, "intermediate_size": 44, "num_attention_heads": 3, "num_key_value_heads": 3}
SIZES |= {"num_hidden_layers": 2, "head_dim": 10}
CONFIGS = {
    "dense": ModelConfig(**SIZES),
    "tied": ModelConfig(**SIZES, tie_word_embeddings=True),
    "moe": ModelConfig(
        **SIZES, architecture="qwen3_moe", num_experts=7, num_experts_per_tok=2, moe_intermediate_size=6
    ),
}


def small_blocks() -> None:
    models._BLOCK = 256  # so that shards begin and end inside blocks


def sharded(config: ModelConfig, size: int, recipe: str | None = None) -> torch.nn.Module:
    """As `launch.loop` does it: build, quantize, shard, and only then give meta parameters their values."""
    model = build_model(config, 77, 16, seed=6)
    if recipe is not None:
        quant.enable(model, recipe=recipe)
    mesh = init_device_mesh("cpu", (size,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if config.init_on_meta:
        materialize(model, config, seed=6)
    return model


def first_weights(rank: int, size: int, name: str) -> dict[str, torch.Tensor]:
    small_blocks()
    config = ModelConfig(**{**vars(CONFIGS[name]), "init_on_meta": True})
    model = sharded(config, size, "delayed")
    assert all(isinstance(p, DTensor) for p in model.parameters())
    if name == "tied":
        assert model.lm_head.weight is model.model.embed_tokens.weight
    state = full_state(model)
    assert bool(state) == (rank == 0)
    loss = model(torch.arange(16)[None], use_cache=False).logits.float().logsumexp(-1).mean()
    loss.backward()
    return state | {"loss": loss.detach()}


@pytest.mark.parametrize("name", CONFIGS)
def test_first_weights_do_not_depend_on_the_world_size(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_BLOCK", 256)
    whole = build_model(CONFIGS[name], 77, 16, seed=6).state_dict()
    for size in (1, 3) if name != "moe" else (4,):
        state = run_ranks(first_weights, size, name, timeout=60)[0]
        assert state.pop("loss").isfinite()
        assert state.keys() == whole.keys()
        assert all(torch.equal(state[k], whole[k]) for k in whole)


def other_placements(rank: int, size: int) -> None:
    small_blocks()
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.nn.Linear(20, 30, bias=False)
    initialize(whole, std=0.5, seed=1)
    for placements in (
        (Shard(1), Replicate()),
        (Replicate(), Shard(0)),
        (Shard(0), Shard(1)),
        (Shard(0), Shard(0)),
        (Replicate(), Replicate()),
    ):
        module = torch.nn.Linear(20, 30, bias=False)
        module.weight = torch.nn.Parameter(distribute_tensor(torch.zeros(30, 20), mesh, placements))
        initialize(module, std=0.5, seed=1)
        assert torch.equal(module.weight.full_tensor(), whole.weight), placements


def test_every_way_of_cutting_gives_the_same_weights() -> None:
    run_ranks(other_placements, 4, timeout=60)


def exported(rank: int, size: int, folder: str, name: str) -> None:
    model = sharded(CONFIGS[name], size, "mxfp8")
    export_model(model, f"{folder}/out")
    read = ModelConfig(path=f"{folder}/out", init_on_meta=True)
    again = sharded(read, size)
    for (key, a), (_, b) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert isinstance(b, DTensor) and torch.equal(a.to_local(), b.to_local()), key


@pytest.mark.parametrize("name", CONFIGS)
def test_an_export_gathers_and_is_read_back_into_shards(name: str, tmp_path: Path) -> None:
    run_ranks(exported, 2, str(tmp_path), name, timeout=60)
    export_model(build_model(CONFIGS[name], 77, 16, seed=6), tmp_path / "one")
    stored, one = (load_file(tmp_path / d / "model.safetensors") for d in ("out", "one"))
    assert stored.keys() == one.keys() and all(torch.equal(stored[k], one[k]) for k in one)


class Full:
    eos_id = pad_id = 0

    def save_pretrained(self, directory: str) -> None:
        raise OSError(28, "No space left on device")


def failures(rank: int, size: int, folder: str) -> list[str]:
    model = sharded(CONFIGS["dense"], size)
    said = []
    Path(folder, "used").mkdir(exist_ok=True)
    Path(folder, "used", "file").touch()
    with pytest.raises(ConfigError) as refused:
        export_model(model, f"{folder}/used")
    said.append(str(refused.value))
    with pytest.raises((OSError, RuntimeError)) as failed:
        export_model(model, f"{folder}/new", tokenizer=Full())
    said.append(str(failed.value))
    read = ModelConfig(path=f"{folder}/model", init_on_meta=True)
    if rank == 0:
        export_model_alone(f"{folder}/model")
    torch.distributed.barrier()
    with pytest.raises(ConfigError) as missing:
        sharded(read, size)
    said.append(str(missing.value))
    return said


def export_model_alone(target: str) -> None:
    """A directory whose weights lack one tensor, written by one rank."""
    from safetensors.torch import save_file

    config = models.hf_config(CONFIGS["dense"], 77)
    config.save_pretrained(target)
    whole = models.empty_model(config, torch.float32).state_dict()
    tensors = {k: torch.zeros(v.shape) for k, v in whole.items() if k != "model.norm.weight"}
    save_file(tensors, f"{target}/model.safetensors", {"format": "pt"})


def test_a_failure_of_one_rank_is_everybody_s(tmp_path: Path) -> None:
    answers = run_ranks(failures, 2, str(tmp_path), timeout=60)
    for refused, failed, missing in answers:
        assert "holds other files" in refused
        assert "No space left on device" in failed
        assert "1 missing keys in its weights (model.norm.weight)" in missing
    assert not (tmp_path / "new").exists()
