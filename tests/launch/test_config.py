"""The command line and the YAML tree: every mistake is one line and exit code 2, every value has its type."""

import re
from pathlib import Path

import pytest
import yaml

from launch import schema
from launch.config import ConfigError, TrainConfig
from launch.overrides import GROUPS, group_options, load, tree
from lumen_core.config import RECIPES, QuantConfig, option_table


def job(*words: str, **options) -> TrainConfig:
    return load(words, **options)[0]


def problems(*words: str, **options) -> str:
    with pytest.raises(ConfigError) as caught:
        load(words, **options)
    return str(caught.value)


# ---- values (case B19) ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("quant.enabled=flase", "did you mean false?"),
        ("quant.enabled=2", "true or false"),
        ("data.pack=flase", "did you mean false?"),
        ("quant.pow2_scale=flase", "did you mean false?"),
        ("train.compile=ture", "did you mean true?"),
        ("train.max_steps=10.5", "an integer >= 1"),
        ("train.max_steps=-5", "an integer >= 1"),
        ("train.max_steps=0", "an integer >= 1"),
        ("train.max_steps=true", "an integer >= 1"),
        ("train.max_steps=null", "an integer >= 1"),
        ("train.max_steps=many", "an integer >= 1"),
        ("train.max_steps=1,2", "one run takes one value"),
        ("train.max_steps=[1]", "an integer >= 1"),
        ("train.max_steps=", "an integer >= 1"),
        ("train.max_steps=inf", "an integer >= 1"),
        ("train.micro_batch_size=0", "an integer >= 1"),
        ("model.hidden_size=-64", "an integer >= 1"),
        ("optim.lr=abc", "a number > 0"),
        ("optim.lr=nan", "a number > 0"),
        ("optim.lr=0", "a number > 0"),
        ("optim.lr=true", "a number > 0"),
        ("optim.betas=0.9", "a list of 2 numbers >= 0 and < 1"),
        ("optim.betas=0.9,0.95", "write [0.9,0.95]"),
        ("optim.betas=[0.9,1.0]", "a list of 2 numbers >= 0 and < 1"),
        ("optim.schedule=cosin", "did you mean cosine?"),
        ("data.validation_fraction=1.0", "a number >= 0 and < 1"),
        ("data.format=txt", "did you mean text?"),
        ("train.dtype=fp16", "one of bf16, fp32"),
        ("quant.history_len=0", "an integer >= 1"),
        ("quant.weight_block=32", "a list of 2 integers"),
        ("quant.scale_rounding=evem", "did you mean even?"),
        ("quant.converters=[quantize.lineer]", "quantize.linear"),
        ("export=true", "a non-empty string"),
        ("run_dir=", "a non-empty string"),
    ],
)
def test_a_wrong_value_names_key_value_and_what_is_expected(word: str, expected: str) -> None:
    message = problems(word)
    assert word in message and expected in message
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize("plus", ["", "+", "++"])
@pytest.mark.parametrize(
    ("word", "best"),
    [
        ("train.max_stepz=5", "train.max_steps (an integer >= 1)"),
        ("max_steps=5", "train.max_steps"),
        ("train.lr=abc", "optim.lr (a number > 0)"),
        ("lr=1e-3", "optim.lr"),
        ("quant.scale_roundin=even", "quant.scale_rounding"),
        ("model.hiden_size=64", "model.hidden_size"),
        ("rundir=x", "run_dir"),
        ("ranks=[0]", "nearest: "),
        ("foo=1", "nearest: "),
        ("train.max_steps.x=1", "nearest: "),
    ],
)
def test_an_unknown_key_is_refused_even_when_added(plus: str, word: str, best: str) -> None:
    message = problems(plus + word)
    assert word in message and best in message


@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_a_known_key_may_be_added_and_is_still_checked(plus: str) -> None:
    assert job(f"{plus}train.log_interval=3").train.log_interval == 3
    assert "an integer >= 1" in problems(f"{plus}train.log_interval=0")


@pytest.mark.parametrize(
    ("word", "get", "value"),
    [
        ("train.max_steps=1e3", lambda c: c.train.max_steps, 1000),
        ("train.max_steps=1_000", lambda c: c.train.max_steps, 1000),
        ("train.max_steps='100'", lambda c: c.train.max_steps, 100),
        ("optim.lr=1", lambda c: c.optim.lr, 1.0),
        ("optim.lr='1e-4'", lambda c: c.optim.lr, 1e-4),
        ("optim.betas=[0.8,0.99]", lambda c: c.optim.betas, (0.8, 0.99)),
        ("data.pack=no", lambda c: c.data.pack, False),
        ("data.pack=0", lambda c: c.data.pack, False),
        ("data.pack='false'", lambda c: c.data.pack, False),
        ("quant.enabled=off", lambda c: c.quant.enabled, False),
        ("optim.master_weights=true", lambda c: c.optim.master_weights, "true"),
        ("run_dir=1e3", lambda c: c.run_dir, "1e3"),
        ("run_dir=2024", lambda c: c.run_dir, "2024"),
        ("run_dir=a b,c=[d]", lambda c: c.run_dir, "a b,c=[d]"),
        ("run_dir=it's", lambda c: c.run_dir, "it's"),
        ("run_dir='quoted'", lambda c: c.run_dir, "quoted"),
        ("export=null", lambda c: c.export, None),
        ("model.rope_scaling={rope_type: linear, factor: 2}", lambda c: c.model.rope_scaling.factor, 2.0),
        ("quant.weight_block=32x32", lambda c: c.quant.options["weight_block"], (32, 32)),
        ("quant.weight_block=[32,32]", lambda c: c.quant.options["weight_block"], (32, 32)),
        ("quant.scale_rounding=EVEN", lambda c: c.quant.options["scale_rounding"], "even"),
        ("quant.stochastic_rounding=auto", lambda c: c.quant.options, {}),
        (
            "quant.ignored_modules=*.q_proj,*.k_proj",
            lambda c: c.quant.options["ignored_modules"],
            ("*.q_proj", "*.k_proj"),
        ),
        ("quant.ignored_modules=[*.q_proj]", lambda c: c.quant.options["ignored_modules"], ("*.q_proj",)),
    ],
)
def test_values_arrive_in_the_type_of_their_key(word: str, get, value) -> None:
    got = get(job(word))
    assert got == value and type(got) is type(value)


def test_no_value_reaches_the_trainer_in_another_type() -> None:
    plain = schema.to_plain(TrainConfig())
    quoted = re.sub(r": (\S+)$", r": '\1'", yaml.safe_dump(plain), flags=re.M)
    assert schema.from_plain(yaml.safe_load(quoted.replace("'null'", "null"))) == TrainConfig()


def test_env_and_interpolated_values_are_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.yaml").write_text(
        "defaults: [train, _self_]\n"
        "train:\n  max_steps: ${oc.env:STEPS}\n  compile: ${oc.env:COMPILE,false}\n"
        "  eval_interval: ${train.max_steps}\n"
    )
    monkeypatch.setenv("STEPS", "12")
    cfg = job(config_dir=str(tmp_path), config_name="mine")
    assert (cfg.train.max_steps, cfg.train.compile, cfg.train.eval_interval) == (12, False, 12)
    assert job("train.max_steps=7", config_dir=str(tmp_path), config_name="mine").train.eval_interval == 7
    monkeypatch.setenv("COMPILE", "flase")
    assert "train.compile='flase'" in problems(config_dir=str(tmp_path), config_name="mine")
    monkeypatch.delenv("STEPS")
    assert "STEPS" in problems(config_dir=str(tmp_path), config_name="mine")


def test_every_problem_is_reported_at_once() -> None:
    message = problems("train.max_steps=10.5", "optim.lr=abc", "quant.enabled=flase")
    assert len(message.splitlines()) == 3
    message = problems("foo=1", "quant=mxfp9", "train.max_stepz=1")
    assert len(message.splitlines()) == 3


# ---- YAML files -------------------------------------------------------------------------------------------------


def write(directory: Path, name: str, text: str) -> None:
    file = directory / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_numbers_that_yaml_reads_as_text(tmp_path: Path) -> None:
    write(tmp_path, "optim/mine.yaml", "lr: 1e-4\neps: '1e-6'\n")
    assert type(yaml.safe_load("lr: 1e-4")["lr"]) is str  # the trap: PyYAML alone
    cfg = job("optim=mine", config_dir=str(tmp_path))
    assert (cfg.optim.lr, cfg.optim.eps) == (1e-4, 1e-6)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train: {max_stepz: 5}", "train.max_stepz=5: there is no key"),
        ("trian: {max_steps: 5}", "trian={'max_steps': 5}: there is no key"),
        ("train: 5", "train=5: expected a section of keys"),
        ("quant: {recipe: mxfp8, roundin: even}", "quant.roundin='even': there is no key"),
        ("quant: 5", "quant=5: expected a recipe name"),
        ("quant: {recipe: mxfp9}", "recipe 'mxfp9' is unknown (nearest: 'mxfp"),
        ("optim: {lr: abc}", "optim.lr='abc': expected a number > 0"),
        ("train: {max_steps: [}", "not valid YAML"),
        ("defaults: [quant: mxfp9]", "quant/mxfp9: there is no such file in the tree; nearest: mxfp8"),
        ("defaults: [trian]", "trian: there is no such file in the tree; nearest: train"),
        ("run_dir: ${nowhere}", "run_dir: "),
    ],
)
def test_mistakes_in_files_are_found_too(tmp_path: Path, text: str, expected: str) -> None:
    write(tmp_path, "mine.yaml", text + "\n")
    message = problems(config_dir=str(tmp_path), config_name="mine")
    assert expected in message
    assert "hydra" not in message.lower() and "omegaconf" not in message.lower()


def test_own_directory_comes_first(tmp_path: Path) -> None:
    write(tmp_path, "model/mine.yaml", "name: mine\nhidden_size: 64\nnum_attention_heads: 2\nnum_key_value_heads: 1\n")
    write(tmp_path, "quant/mxfp8.yaml", "recipe: mxfp8\nscale_rounding: floor\n")
    cfg = job("model=mine", config_dir=str(tmp_path))
    assert (cfg.model.hidden_size, cfg.model.head_dim, cfg.model.name) == (64, 32, "mine")
    assert cfg.quant.to_config().scale_rounding == "floor"
    assert "--config-dir" in problems(config_dir=str(tmp_path / "none"))
    assert "nearest: train" in problems(config_name="trian")


def test_groups_work_with_a_start_file_that_lists_none(tmp_path: Path) -> None:
    write(tmp_path, "mine.yaml", "model: {hidden_size: 96}\nquant: rowwise\n")
    cfg = job(config_dir=str(tmp_path), config_name="mine")
    assert (cfg.model.hidden_size, cfg.quant.recipe) == (96, "rowwise")
    words = ["optim=adamw_fp8", "data=stdlib", "experiment=null"]
    cfg = job(*words, config_dir=str(tmp_path), config_name="mine.yaml")
    assert (cfg.optim.state, cfg.quant.recipe) == ("fp8", "rowwise")
    assert "nearest: quant=mxfp8" in problems("quant=mxfp9", config_dir=str(tmp_path), config_name="mine")


def test_own_groups_can_be_added(tmp_path: Path) -> None:
    write(tmp_path, "size/short.yaml", "# @package _global_\ntrain: {max_steps: 3}\n")
    assert job("+size=short", config_dir=str(tmp_path)).train.max_steps == 3
    assert "nearest: size=short" in problems("+size=shot", config_dir=str(tmp_path))


# ---- groups -----------------------------------------------------------------------------------------------------


def test_every_option_of_every_group_composes(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("text")
    options = group_options([tree()])
    assert tuple(options) == GROUPS and all(options.values())
    for group, names in options.items():
        for name in names:
            words = [f"{group}={name}"]
            if (group, name) in {("data", "text"), ("data", "jsonl"), ("data", "parquet")}:
                assert "data.train has to be given" in problems(*words)
                words.append(f"data.train={tmp_path}/t.txt")
            assert isinstance(job(*words), TrainConfig)


def test_there_is_a_file_for_every_recipe_and_it_means_that_recipe() -> None:
    assert sorted(group_options([tree()])["quant"]) == sorted(RECIPES)
    for name in RECIPES:
        config = job(f"quant={name}").quant.to_config()
        assert config.recipe == name
        assert config.reduce_amax == (name in ("delayed", "hybrid"))


@pytest.mark.parametrize(
    ("word", "best"),
    [
        ("quant=mxfp9", "quant=mxfp8"),
        ("quant=tensorwize", "quant=tensorwise"),
        ("model=tinny", "model=tiny"),
        ("model=llama2_8b", "model=llama2_7b"),
        ("data=stdlb", "data=stdlib"),
        ("optim=adam", "optim=adamw"),
        ("backend=fsdp", "backend=fsdp2"),
        ("experiment=dem", "experiment=demo"),
        ("+experiment=dem", "experiment=demo"),
        ("model=null", "nearest: model="),
        ("model=", "nearest: model="),
        ("model=[tiny]", "model=tiny"),
    ],
)
def test_an_unknown_option_of_a_group_names_the_nearest(word: str, best: str) -> None:
    assert best in problems(word)


def test_quant_takes_grammar_strings_and_any_case() -> None:
    assert job("quant=dynamic_row_e4m3_e4m3_e4m3").quant.to_config() == QuantConfig.from_recipe("rowwise")
    assert job("quant=Dynamic_MX-1-1-32_E4M3_E4M3_E5M2").quant.to_config().gradient_format == "e5m2"
    assert job("quant=MXFP8").quant.recipe == "mxfp8"
    assert job("quant=mxfp8,scale_rounding=even").quant.to_config().scale_rounding == "even"
    cfg = job("quant=mxfp8", "quant.scale_rounding=even", "quant.first_layers_bf16=1")
    assert cfg.quant.to_config() == QuantConfig.from_recipe("mxfp8", scale_rounding="even", first_layers_bf16=1)
    assert "(nearest: 'row')" in problems("quant=dynamic_rwo_e4m3_e4m3_e4m3")


def test_quant_errors_come_from_the_core_and_name_both_options() -> None:
    message = problems("quant=mxfp8", "quant.scaling=delayed")
    assert "format" in message and "scaling" in message and message.startswith("quant: ")


def test_quant_keys_are_those_of_the_core() -> None:
    assert {k.name for k in schema.quant_keys()} == {f"quant.{o.name}" for o in option_table()} | {
        "quant.enabled",
        "quant.recipe",
    }


def test_disabled_quantization_is_the_bf16_recipe() -> None:
    assert job("quant=mxfp4", "quant.enabled=false").quant.to_config() == QuantConfig.from_recipe("bf16")
    assert job("quant=mxfp4", "quant.enabled=false").run_dir == "runs/tiny-bf16"


def test_an_experiment_sets_groups_and_the_command_line_wins() -> None:
    assert job("experiment=demo").compare == "bf16"
    cfg = job("experiment=demo", "quant=rowwise", "compare=null", "train.max_steps=3")
    assert (cfg.quant.recipe, cfg.compare, cfg.train.max_steps) == ("rowwise", None, 3)
    assert job("+experiment=demo") == job("experiment=demo")
    assert job("experiment=null") == job()


def test_model_sizes_are_those_published() -> None:
    names = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
    for name, sizes in {
        "llama2_7b": (32000, 4096, 11008, 32, 32, 32),
        "llama2_13b": (32000, 5120, 13824, 40, 40, 40),
        "llama2_70b": (32000, 8192, 28672, 80, 64, 8),
        "llama31_8b": (128256, 4096, 14336, 32, 32, 8),
        "qwen3_30b_a3b": (151936, 2048, 6144, 48, 32, 4),
    }.items():
        model = job(f"model={name}").model
        assert tuple(getattr(model, n) for n in names.split()) == sizes and model.head_dim == 128
    llama3, qwen = job("model=llama31_8b").model, job("model=qwen3_30b_a3b").model
    assert (llama3.rope_theta, llama3.rope_scaling.rope_type, llama3.rope_scaling.factor) == (5e5, "llama3", 8.0)
    assert (qwen.num_experts, qwen.num_experts_per_tok, qwen.moe_intermediate_size) == (128, 8, 768)
