"""Exports: what Hugging Face loads from them is the trained model, bit by bit, and they appear whole or not at all."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import lumen_core.quantize as quant
from launch import loop
from launch.checkpoint import CheckpointError
from launch.config import ConfigError, ModelConfig
from launch.data.tokenizer import ByteTokenizer
from launch.hf_export import export_model, full_state, main_export
from launch.models import build_model
from launch.nonfinite import NonFiniteError
from launch.train import main
from launch.validate import EXPORT_MARK

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
DENSE = ModelConfig(**SMALL, num_hidden_layers=2)
TIED = ModelConfig(**SMALL, num_hidden_layers=1, tie_word_embeddings=True)
MOE = ModelConfig(
    **SMALL,
    architecture="qwen3_moe",
    num_hidden_layers=11,
    num_experts=12,
    num_experts_per_tok=2,
    moe_intermediate_size=8,
)


def stored(directory: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in sorted(directory.glob("*.safetensors")) for k, v in load_file(file).items()}


def assert_same(a: torch.nn.Module, b: torch.nn.Module) -> None:
    left, right = a.state_dict(), b.state_dict()
    assert list(left) == list(right)
    for name in left:
        assert left[name].dtype == right[name].dtype and torch.equal(left[name].cpu(), right[name]), name


def logits(model: torch.nn.Module) -> torch.Tensor:
    device = next(model.parameters()).device
    with torch.no_grad():
        return model.eval()(torch.arange(16, device=device)[None], use_cache=False).logits.cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", [DENSE, TIED, MOE], ids=["dense", "tied", "moe"])
def test_hugging_face_loads_the_same_model(
    config: ModelConfig, dtype: torch.dtype, tmp_path: Path, device: torch.device
) -> None:
    model = build_model(config, 320, dtype=dtype, device=device, seed=2)
    export_model(model, tmp_path / "out", tokenizer=ByteTokenizer())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert_same(model, loaded)
    if device.type == "cpu":
        assert torch.equal(logits(model), logits(loaded))
    assert loaded.config.use_cache and loaded.config.eos_token_id == ByteTokenizer.eos_id
    assert not getattr(loaded.config, "output_router_logits", False)
    assert not model.config.use_cache  # the trained model itself is left as it was


def test_a_tied_head_is_stored_once_and_stays_tied(tmp_path: Path) -> None:
    model = build_model(TIED, 320)
    export_model(model, tmp_path / "out")
    names = stored(tmp_path / "out")
    assert "lm_head.weight" not in names and "model.embed_tokens.weight" in names
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    again = build_model(ModelConfig(path=str(tmp_path / "out")), 320)
    assert again.lm_head.weight is again.model.embed_tokens.weight


def test_the_tokenizer_goes_along(tmp_path: Path) -> None:
    export_model(build_model(DENSE, 320), tmp_path / "out", tokenizer=ByteTokenizer())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "def f(x):\n    return 'é'"
    assert tokenizer(text).input_ids == ByteTokenizer().encode(text)
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (257, 258)


def test_expert_and_layer_numbers_are_numbers(tmp_path: Path) -> None:
    """Case B75: with ten or more of them, sorting as text gives 0, 1, 10, 11, 2."""
    model = build_model(MOE, 320)
    with torch.no_grad():
        for index, layer in enumerate(model.model.layers):
            layer.input_layernorm.weight.fill_(index)
            for expert in range(12):
                layer.mlp.experts.gate_up_proj[expert, :8] = 100 * index + expert
                layer.mlp.experts.gate_up_proj[expert, 8:] = 100 * index + expert + 0.5
                layer.mlp.experts.down_proj[expert] = -(100 * index + expert)
    export_model(model, tmp_path / "out")
    tensors = stored(tmp_path / "out")
    for index in range(11):
        prefix = f"model.layers.{index}."
        assert torch.all(tensors[prefix + "input_layernorm.weight"] == index)
        for expert in range(12):
            value, one = 100 * index + expert, f"{prefix}mlp.experts.{expert}."
            assert torch.all(tensors[one + "gate_proj.weight"] == value)
            assert torch.all(tensors[one + "up_proj.weight"] == value + 0.5)
            assert torch.all(tensors[one + "down_proj.weight"] == -value)
    back = build_model(ModelConfig(path=str(tmp_path / "out")), 320)
    assert_same(model, back)
    export_model(back, tmp_path / "again")
    again = stored(tmp_path / "again")
    assert again.keys() == tensors.keys() and all(torch.equal(tensors[k], again[k]) for k in tensors)


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8-32x32", "mxfp4"])
@pytest.mark.parametrize("config", [DENSE, TIED, MOE], ids=["dense", "tied", "moe"])
def test_nothing_of_the_quantization_is_exported(config: ModelConfig, recipe: str, tmp_path: Path) -> None:
    """Case B20: the files of a model trained quantized are those of the plain model with the same weights."""
    model = build_model(config, 320, seed=4)
    plain = build_model(config, 320, seed=4)
    quant.enable(model, recipe=recipe)
    model(torch.arange(32)[None], use_cache=False).logits.float().logsumexp(-1).sum().backward()
    torch.optim.SGD(model.parameters(), lr=1e-2).step()
    export_model(model, tmp_path / "out")
    moved = stored(tmp_path / "out")
    export_model(plain, tmp_path / "plain")
    reference = stored(tmp_path / "plain")
    assert moved.keys() == reference.keys()
    assert all(moved[k].dtype == reference[k].dtype and moved[k].shape == reference[k].shape for k in moved)
    assert all(v.numel() > 0 for v in moved.values())
    assert not torch.equal(moved["model.embed_tokens.weight"], reference["model.embed_tokens.weight"])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    trained = model.state_dict()
    assert all(torch.equal(v, trained[k]) for k, v in loaded.state_dict().items())
    plain.load_state_dict(loaded.state_dict(), strict=True)
    assert torch.equal(logits(plain), logits(loaded))
    assert type(full_state(model)["lm_head.weight"]) is torch.Tensor


def test_an_earlier_export_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "out"
    one, two = (build_model(DENSE, 320, seed=s) for s in (1, 2))
    out.mkdir()
    export_model(one, out)
    export_model(two, out)
    assert_same(two, AutoModelForCausalLM.from_pretrained(out))
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    (out / EXPORT_MARK).unlink()
    with pytest.raises(ConfigError, match="holds other files"):
        export_model(one, out)
    with pytest.raises(ConfigError, match="another directory than model.path"):
        export_model(one, tmp_path / "m", source=str(tmp_path / "m"))
    assert_same(two, AutoModelForCausalLM.from_pretrained(out))


def test_a_failure_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    first = build_model(DENSE, 320, seed=1)
    export_model(first, out)

    class Full:
        eos_id = pad_id = 0

        def save_pretrained(self, directory: str) -> None:
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        export_model(build_model(DENSE, 320, seed=2), out, tokenizer=Full())
    with pytest.raises(OSError, match="No space"):
        export_model(first, tmp_path / "new", tokenizer=Full())
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self.name.endswith(".writing"):
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="Input/output"):
        export_model(build_model(DENSE, 320, seed=2), out)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert_same(first, AutoModelForCausalLM.from_pretrained(out))


def test_large_models_are_cut_into_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import PreTrainedModel

    save = PreTrainedModel.save_pretrained
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", lambda self, d: save(self, d, max_shard_size="50KB"))
    model = build_model(DENSE, 320, seed=1)
    export_model(model, tmp_path / "out")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == model.state_dict().keys()
    assert_same(model, AutoModelForCausalLM.from_pretrained(tmp_path / "out"))
    assert_same(model, build_model(ModelConfig(path=str(tmp_path / "out")), 320))


def test_the_program_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main_export([str(tmp_path), str(tmp_path / "out")]) == 2
    assert f"lumen-export: {tmp_path}: no complete checkpoint here" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        main_export(["--help"])
    assert stopped.value.code == 0 and "checkpoint" in capsys.readouterr().out


TINY = [
    "model.hidden_size=32",
    "model.intermediate_size=32",
    "model.num_attention_heads=2",
    "model.num_key_value_heads=1",
    "model.num_hidden_layers=1",
    "train.seq_length=16",
    "train.micro_batch_size=2",
    "train.eval_batches=0",
    "train.dtype=fp32",
    "backend.device=cpu",
]


def test_the_main_job_exports_and_so_does_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("all work and no play " * 200)
    words = [*TINY, "data.train=text.txt", "run_dir=run", "train.max_steps=2"]
    assert main(words) == 0
    assert not Path("out").exists()
    assert main([*words, "export=out"]) == 0  # finished already: only the export is left to do
    trained = stored(Path("out"))
    assert main_export(["run", "again"]) == 0
    again = stored(Path("again"))
    assert trained.keys() == again.keys() and all(torch.equal(trained[k], again[k]) for k in trained)
    assert "written: " in capsys.readouterr().out
    words = [*TINY, "data.train=text.txt", "run_dir=more", "train.max_steps=3", "model.path=out", "export=out3"]
    assert main(words) == 0
    assert not torch.equal(stored(Path("out3"))["lm_head.weight"], trained["lm_head.weight"])
    assert main_export(["run", "text.txt"]) == 2 and main_export(["more", "out"]) == 2
    said = capsys.readouterr().err
    assert "expected a directory, this is a file" in said and "another directory than model.path" in said
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again", "more", "out", "out3", "run", "text.txt"]


def test_the_main_job_names_failures_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").touch()
    assert main([*TINY, "data.train=text.txt", "run_dir=run"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("lumen-train: ") and "Traceback" not in said

    def fails(error: Exception) -> tuple[int, str]:
        def run(cfg: object) -> None:
            raise error

        monkeypatch.setattr(loop, "run", run)
        return main(["data.train=text.txt"]), capsys.readouterr().err

    assert fails(NonFiniteError("too many", step=3, module="head")) == (1, "lumen-train: too many\n")
    assert fails(CheckpointError("disk full")) == (1, "lumen-train: disk full\n")
    monkeypatch.setenv("RANK", "1")
    assert fails(CheckpointError("disk full")) == (1, "")
    assert fails(ConfigError("no GPU here")) == (2, "lumen-train [rank 1]: no GPU here\n")
