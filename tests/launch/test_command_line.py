"""The command line as a whole: contradictions between keys, MindSpeed's names, help, exit codes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch import schema
from launch.config import ConfigError, QuantSection, TrainConfig, resolve
from launch.overrides import group_options, load, tree
from launch.train import COMMON, main
from launch.validate import validate
from lumen_core.config import QuantConfig


def job(*words: str, **options) -> TrainConfig:
    return load(words, **options)[0]


def problems(*words: str, **options) -> str:
    with pytest.raises(ConfigError) as caught:
        load(words, **options)
    return str(caught.value)


def write(directory: Path, name: str, text: str) -> None:
    file = directory / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


# ---- checks across keys -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("train.global_batch_size=12", "nearest: 8 or 16"),
        ("train.global_batch_size=4", "nearest: 8"),
        ("train.seq_length=4096", "expected at most 2048 (model.max_position_embeddings)"),
        ("optim.warmup_steps=2000", "expected at most train.max_steps=1000"),
        ("model.num_attention_heads=5", "a multiple of model.num_attention_heads=5"),
        ("model.num_key_value_heads=4", "a divisor of model.num_attention_heads=6"),
        ("model.head_dim=33", "an even number"),
        ("model.num_experts=8", "expected 0 for model.architecture=llama"),
        ("model.architecture=qwen3_moe", "model.num_experts=0: expected an integer >= 1"),
        ("model=tiny_moe model.num_experts_per_tok=9", "expected at most model.num_experts=8"),
        ("model.rope_scaling={rope_type: llama3, high_freq_factor: 1}", "expected more than low_freq_factor=1"),
        ("quant.first_layers_bf16=4 quant.last_layers_bf16=4", "expected at most model.num_hidden_layers=6"),
        ("compare=bf61", "nearest: bf16"),
        ("backend.wire=mxfp9", "nearest: mxfp8"),
        ("backend.low_precision_all_gather=false backend.wire=mxfp8", "expected true with backend.wire=mxfp8"),
        (
            "backend.low_precision_all_gather=false backend.all_gather_mode=all",
            "backend.low_precision_all_gather=false: expected true with backend.all_gather_mode=all",
        ),
        ("quant.enabled=false backend.wire=mxfp8", "backend.wire=mxfp8: expected quant.enabled=true"),
        ("quant=mxfp8 quant.dgrad_weight=direct", "expected backend.all_gather_mode=on-demand or all"),
        ("backend.all_gather_mode=on_demand", "did you mean on-demand?"),
        ("backend.collectives=nccl", "expected one of auto, c10d, mori"),
        ("backend.shard_placement=shard_by_dim_1", "expected shard_by_dim_0, or null"),
        ("backend.low_precision_reduce_scatter=ture", "did you mean true?"),
        ("compare=false", "a non-empty string"),
        ("data.train=/no/such/*.txt", "nothing matches /no/such/*.txt"),
        ("data.train=stdlib,/no/such.txt", "nothing matches /no/such.txt"),
        ("data.validation=/no/such/dir", "nothing matches"),
        ("data.tokenizer=bite", 'expected "byte" or a local tokenizer directory'),
        ("model.path=/no/such", "there is no such directory"),
        ("checkpoint.resume=/no/such", "expected auto, never or a checkpoint directory"),
        ("checkpoint.resume=nevr", "expected auto, never or a checkpoint directory"),
    ],
)
def test_contradictions_are_refused(words: str, expected: str) -> None:
    split = words.split(" ") if "{" not in words else [words]
    assert expected in problems(*split)


def test_batch_sizes_follow_the_world_size() -> None:
    assert job(world_size=4).train.global_batch_size == 32
    assert job("train.global_batch_size=16", world_size=2).train.global_batch_size == 16
    assert "8 x 4 = 32" in problems("train.global_batch_size=16", world_size=4)


def test_directories_are_checked(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 100}')
    assert "no *.safetensors" in problems(f"model.path={tmp_path}", "train.seq_length=64")
    (tmp_path / "model.safetensors").write_text("")
    assert job(f"model.path={tmp_path}", "train.seq_length=64").model.path == str(tmp_path)
    assert "expected at most 100" in problems(f"model.path={tmp_path}", "train.seq_length=101")
    assert "this one holds other files" in problems(f"export={tmp_path}")
    assert "expected another directory" in problems(
        f"model.path={tmp_path}", "train.seq_length=64", f"export={tmp_path}"
    )
    assert "this is a file" in problems(f"export={tmp_path}/config.json")
    assert "this is a file" in problems(f"run_dir={tmp_path}/config.json")
    (tmp_path / "config.json").write_text("[")
    assert "not a JSON object" in problems(f"model.path={tmp_path}")


def test_defaults_are_valid_and_resolved() -> None:
    assert validate(TrainConfig()) == []
    cfg = resolve(TrainConfig(), world_size=2)
    assert (cfg.train.global_batch_size, cfg.optim.warmup_steps, cfg.data.shuffle_seed) == (16, 100, 0)
    assert job("train.max_steps=30").optim.warmup_steps == 3
    assert job("train.seed=5").data.shuffle_seed == 5


def test_different_jobs_have_different_default_directories() -> None:
    assert job().run_dir == "runs/tiny-mxfp8"
    assert job("quant=delayed").run_dir == "runs/tiny-delayed"
    assert job("quant=mxfp8", "quant.scale_rounding=even").run_dir == "runs/tiny-mxfp8-scale_rounding-even"
    assert job("model=tiny_moe", "quant=bf16").run_dir == "runs/tiny_moe-bf16"


def test_resolve_leaves_its_argument_alone() -> None:
    cfg = TrainConfig(quant=QuantSection(options={"scale_rounding": "even"}))
    resolved = resolve(cfg)
    resolved.quant.options["margin"] = 1
    resolved.model.rope_scaling.factor = 9.0
    assert cfg.train.global_batch_size is None and cfg.quant.options == {"scale_rounding": "even"}
    assert cfg.model.rope_scaling.factor == 1.0


# ---- MindSpeed's names ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "model.", "++model."])
def test_old_names_are_translated_and_the_new_name_is_told(prefix: str) -> None:
    words = [
        f"{prefix}quant_recipe_name=delayed",
        f"{prefix}quant_converters=quantize.linear",
        f"{prefix}quant_apply_modules=model.layers.{{*}}",
        f"{prefix}quant_ignored_modules=[*lm_head,*gate]",
    ]
    cfg, notes = load(words)
    assert cfg.quant.to_config() == QuantConfig.from_recipe(
        "delayed",
        reduce_amax=True,
        converters=("quantize.linear",),
        apply_modules=("model.layers.*",),
        ignored_modules=("*lm_head", "*gate"),
    )
    assert notes == [
        "quant_recipe_name is quant here: quant=delayed",
        "quant_converters is quant.converters here: quant.converters=[quantize.linear]",
        "quant_apply_modules is quant.apply_modules here: quant.apply_modules=[model.layers.*]",
        "quant_ignored_modules is quant.ignored_modules here: quant.ignored_modules=[*lm_head,*gate]",
    ]


def test_old_names_in_files(tmp_path: Path) -> None:
    write(
        tmp_path,
        "mine.yaml",
        "defaults: [train, _self_]\nmodel:\n  quant_recipe_name: mxfp8\n  quant_format: E5M2\n  quant_block_size: 32\n"
        "  quant_apply_modules: ['model.layers.{*}']\n",
    )
    cfg, notes = load([], config_dir=str(tmp_path), config_name="mine")
    config = cfg.quant.to_config()
    assert (config.weight_format, config.gradient_format, config.apply_modules) == ("e5m2", "e5m2", ("model.layers.*",))
    assert len(notes) == 4 and any("blocks of 32" in n for n in notes)


def test_old_format_and_block_size() -> None:
    config = job("quant=blockwise", "quant_block_size=64").quant.to_config()
    assert (config.activation_block, config.weight_block) == ((1, 64), (64, 64))
    assert job("quant_format=mxfp4").quant.to_config().format == "mxfp4"
    assert job("quant_recipe_name=dynamic_row_e4m3_e4m3_e4m3").quant.to_config().recipe == "rowwise"
    assert "expected 32" in problems("quant_block_size=64")
    assert "has no blocks" in problems("quant=rowwise", "quant_block_size=32")
    assert "Ascend only" in problems("quant_format=HIF8")
    assert "did you mean e4m3?" in problems("quant_format=e4m4")
    assert "differ; give quant" in problems("quant=mxfp8", "quant_recipe_name=rowwise")
    assert "both given and differ" in problems("quant.apply_modules=[a]", "quant_apply_modules=[b]")
    assert "nearest: 'mxfp" in problems("quant_recipe_name=mxfp9")
    assert "braces" in problems("quant_apply_modules=model.layers.{0-3}")


@pytest.mark.parametrize(
    ("word", "key", "value"),
    [
        ("enable_fsdp_low_precision_all_gather=false", "low_precision_all_gather", False),
        ("enable_fsdp_low_precision_all_gather=true", "low_precision_all_gather", True),
        ("model.fsdp_low_precision_all_gather_mode=all", "all_gather_mode", "all"),
        ("+parallel.efsdp_shard_placement_fn=shard_by_dim_0", "shard_placement", "shard_by_dim_0"),
    ],
)
def test_old_names_of_the_all_gather(word: str, key: str, value: object) -> None:
    cfg, notes = load([word])
    assert getattr(cfg.backend, key) == value
    old = word.split("=")[0].rpartition(".")[2]
    assert notes == [f"{old} is backend.{key} here: backend.{key}={str(value).lower()}"]


def test_old_all_gather_names_beside_other_options() -> None:
    old = "fsdp_low_precision_all_gather_mode=on-demand"
    cfg, notes = load([old, "train.activation_checkpointing=true"])
    assert cfg.backend.all_gather_mode == "all" and "not right where activations are recomputed" in notes[0]
    assert job(old).backend.all_gather_mode == "on-demand"
    cfg, notes = load(["enable_fsdp_low_precision_all_gather=false", old])
    assert cfg.backend.all_gather_mode == "auto" and "left out" in notes[1]
    assert cfg.backend.low_precision_all_gather is False
    assert "both given and differ; give backend.all_gather_mode" in problems(old, "backend.all_gather_mode=row")
    message = problems("fsdp_low_precision_all_gather_mode=on_demand")
    assert message.startswith("fsdp_low_precision_all_gather_mode: ") and "did you mean on-demand?" in message
    message = problems("enable_fsdp_low_precision_all_gather=maybe")
    assert "backend.low_precision_all_gather" in message and "true or false" in message
    assert "one of" not in (text := problems("efsdp_shard_placement_fn=shard_by_dim_1")) and "shard_by_dim_0" in text


# ---- the program ------------------------------------------------------------------------------------------------


def program(*words: str, cwd: Path, **env: str) -> subprocess.CompletedProcess:
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, **env}
    command = [sys.executable, "-m", "launch.train", *words]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60)


def test_a_mistake_costs_no_import_and_leaves_nothing_behind(tmp_path: Path) -> None:
    done = program("train.max_steps=10.5", "+foo=1", cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert "foo=1" in done.stderr and "Traceback" not in done.stderr and "ydra" not in done.stderr
    assert list(tmp_path.iterdir()) == []
    check = (
        "import sys; from launch.train import main; code = main(['quant.enabled=flase', 'optim.lr=abc']);"
        "print(code, sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", check], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "2 []"
    assert done.stderr.splitlines()[0] == "lumen-train: 2 problems, nothing was started"


def test_only_the_first_rank_speaks(tmp_path: Path) -> None:
    assert program("foo=1", cwd=tmp_path, RANK="1", WORLD_SIZE="2").stderr == ""
    done = program("train.global_batch_size=8", cwd=tmp_path, RANK="0", WORLD_SIZE="2")
    assert done.returncode == 2 and "8 x 2 = 16" in done.stderr


def test_help_lists_groups_and_keys(capsys: pytest.CaptureFixture) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for group, options in group_options([tree()]).items():
        line = next(line for line in text.splitlines() if line.split()[:1] == [group])
        assert line.split()[1:] == options
    assert all(key in text for key, _ in COMMON)
    assert main(["--keys"]) == 0
    text = capsys.readouterr().out
    assert all(f"{name}: " in text for name in schema.keys())


def test_the_examples_in_the_help_are_valid() -> None:
    for key, example in COMMON:
        if not example.startswith("/"):
            job(f"{key}={example}")


def test_the_printed_job_can_be_read_back(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    words = ["model=llama31_8b", "quant=blockwise", "quant.weight_block=1x64", "optim.lr=1e-5", "run_dir=it's"]
    assert main([*words, "--cfg", "job"]) == 0
    (tmp_path / "mine.yaml").write_text(capsys.readouterr().out)
    assert job(config_dir=str(tmp_path), config_name="mine") == job(*words)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--keyz"], "nearest: --keys"),
        (["--multirun"], "one call runs one job"),
        (["--cfg", "hydra"], "--cfg"),
        (["~train.seed"], "cannot be deleted"),
        (["train.max_steps"], "expected key=value; nearest: train.max_steps=…"),
        (["hydra.run.dir=x"], "run_dir=…"),
        (["hydra/launcher=x"], "run_dir=…"),
        (["quant@foo=mxfp8"], "nearest: quant"),
    ],
)
def test_wrong_words(words: list, expected: str, capsys: pytest.CaptureFixture) -> None:
    assert main(words) == 2
    said = capsys.readouterr()
    assert expected in said.err and said.out == ""
