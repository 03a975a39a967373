"""QuantConfig: one meaning per configuration, no option lost on any route, every mistake named."""

import argparse
import copy
import dataclasses
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from lumen_core import options
from lumen_core.config import (
    RECIPES,
    QuantConfig,
    add_arguments,
    config_from_args,
    config_from_schema,
    hydra_schema,
    option_table,
)

FIELDS = [field.name for field in dataclasses.fields(QuantConfig)]
KINDS = {option.name: option.kind for option in option_table()}
quick = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


# --- the space of valid configurations ---------------------------------------------------------------------------

pattern = st.one_of(
    st.sampled_from(["*", "*.q_proj", "a,b|c=d", "50%|%2C", "[!x]?", " lead", "tab\t", "é層\u2028"]),
    st.text("%,|=[]*? %2C", min_size=1),
)


@st.composite
def structures(draw):
    """Keywords of a valid format, scaling, element formats and blocks."""
    scaling = draw(st.sampled_from(["none", "dynamic", "delayed", "rowwise", "blockwise", "mx"]))
    if scaling == "none":
        return {"format": "bf16"}
    elements = ("e4m3", "e5m2", "e2m1") if scaling == "mx" else ("e4m3", "e5m2")
    fmt = draw(st.sampled_from(["mxfp8", "mxfp4"] if scaling == "mx" else ["fp8_e4m3", "fp8_e5m2", "hybrid"]))
    kwargs = {"format": fmt, "scaling": scaling}
    for operand in ("activation", "weight", "gradient"):
        if draw(st.booleans()):
            kwargs[f"{operand}_format"] = draw(st.sampled_from(elements))
    if scaling == "blockwise" and draw(st.booleans()):
        size = draw(st.sampled_from([32, 64, 128, 256]))
        kwargs["weight_block"] = [draw(st.sampled_from([1, size])), size]
        if draw(st.booleans()):
            kwargs["gradient_block"] = (1, size)
    if scaling == "mx" and draw(st.booleans()):
        kwargs["weight_block"] = draw(st.sampled_from([(1, 32), (32, 32)]))
    return kwargs


@st.composite
def valid_configs(draw):
    """Any valid configuration, by construction: each option is drawn wherever the others allow it."""
    kwargs = draw(structures())
    base = QuantConfig(**kwargs)
    small = st.integers(0, 5)
    kwargs |= draw(
        st.fixed_dictionaries(
            {},
            optional={
                "low_precision_activations": st.booleans(),
                "fast_accum": st.booleans(),
                "flavour": st.sampled_from(["auto", "ocp", "fnuz"]),
                "seed": st.integers(0, 2**63 - 1),
                "first_layers_bf16": small,
                "last_layers_bf16": small,
                "apply_modules": st.lists(pattern, min_size=1, max_size=3),
                "ignored_modules": st.lists(pattern, max_size=3),
                "converters": st.lists(
                    st.sampled_from(["quantize.linear", "quantize.moe"] + ["quantize.moe.mx"] * base.is_mx),
                    min_size=1,
                    max_size=3,
                ),
            },
        )
    )
    if base.scaling == "delayed":
        kwargs |= {"history_len": draw(st.integers(1, 99)), "margin": draw(small), "reduce_amax": draw(st.booleans())}
        kwargs["amax_algo"] = draw(st.sampled_from(["max", "most_recent"]))
    if base.scaling == "none":
        return QuantConfig(**kwargs)
    if base.is_mx:
        kwargs["scale_rounding"] = draw(st.sampled_from(["ceil", "floor", "even"]))
    else:
        kwargs["pow2_scale"] = draw(st.booleans())
    if base.scaling in ("blockwise", "mx") and base.weight_block[0] == 1:
        kwargs["dgrad_weight"] = draw(st.sampled_from(["auto", "direct", "from_rows"]))
    plain = QuantConfig(format=base.format)
    standard = all(getattr(base, f"{x}_format") == getattr(plain, f"{x}_format") for x in ("activation", "gradient"))
    if standard and draw(st.booleans()):
        gemms = draw(st.sampled_from([("low", "low"), ("low", "bf16"), ("bf16", "low")]))
        return QuantConfig(**kwargs, quantize_activation=False, fprop=gemms[0], dgrad=gemms[1])
    bits = draw(st.integers(0, 6))  # 7 would leave no GEMM in low precision
    kwargs |= {gemm: "bf16" if bits >> i & 1 else "low" for i, gemm in enumerate(("fprop", "dgrad", "wgrad"))}
    if bits & 6 != 6:
        kwargs["stochastic_rounding"] = draw(st.sampled_from([None, True, False]))
    if base.scaling in ("blockwise", "mx") and kwargs["wgrad"] == "low":
        kwargs["hadamard"] = draw(st.sampled_from([None, True, False]))
    return QuantConfig(**kwargs)


def through_argparse(config: QuantConfig) -> QuantConfig:
    command = ["--lumen-recipe", config.recipe]
    for option in option_table():
        value, flag = getattr(config, option.name), "--lumen-" + option.name.replace("_", "-")
        if value is True or value is False:
            command.append(flag if value else flag.replace("--", "--no-", 1))
        elif option.kind == "names":
            command += [flag, *value]
        elif option.kind == "block":
            command += [flag, f"{value[0]}x{value[1]}"]
        else:
            command += [flag, str(value)]
    parser = argparse.ArgumentParser()
    assert add_arguments(parser) is config_from_args
    return config_from_args(parser.parse_args(command))


def through_schema(config: QuantConfig) -> QuantConfig:
    node = OmegaConf.structured(hydra_schema())
    for name, value in {"recipe": config.recipe, **config.as_dict()}.items():
        node[name] = value
    return config_from_schema(node)


@quick
@given(valid_configs())
def test_text_and_dict_round_trip(config):
    assert QuantConfig.parse(str(config)) == config
    assert QuantConfig.parse(str(config).upper().partition(",")[0]).recipe == config.recipe
    assert QuantConfig(**json.loads(json.dumps(config.as_dict()))) == config
    assert through_schema(config) == config
    assert config.replace() == config and hash(config.replace()) == hash(config)
    assert QuantConfig().replace(**config.as_dict()) == config
    assert QuantConfig.from_recipe("mxfp4", **config.as_dict()) == config
    assert not {"auto", None} & {v for k, v in config._options().items() if k != "flavour"}


@quick
@given(st.data())
def test_any_mix_of_options_round_trips_or_names_what_is_wrong(data):
    """The raw product space: what the constructor lets through is consistent, what it refuses it explains."""
    values = {
        "choice": lambda o: st.sampled_from(o.choices),
        "bool": lambda o: st.booleans(),
        "int": lambda o: st.integers(o.minimum, 20),
        "block": lambda o: st.tuples(st.sampled_from([0, 1, 32, 128]), st.sampled_from([0, 32, 64, 128])),
        "names": lambda o: st.lists(st.sampled_from(o.choices) if o.choices else pattern, max_size=3),
    }
    kwargs = data.draw(st.fixed_dictionaries({}, optional={o.name: values[o.kind](o) for o in option_table()}))
    try:
        config = QuantConfig(**kwargs)
    except ValueError as error:
        assert any(f"{name}=" in str(error) for name in kwargs)
    else:
        assert QuantConfig.parse(str(config)) == config
        assert QuantConfig().replace(**kwargs) == config


# --- no option is lost -------------------------------------------------------------------------------------------

CHANGED = {
    "format": ("tensorwise", "hybrid"),
    "scaling": ("tensorwise", "rowwise"),
    "activation_format": ("mxfp8", "e5m2"),
    "weight_format": ("mxfp8", "e2m1"),
    "gradient_format": ("mxfp8", "e5m2"),
    "activation_block": ("blockwise", (1, 64)),
    "weight_block": ("mxfp8", (32, 32)),
    "gradient_block": ("blockwise", (1, 256)),
    "amax_algo": ("delayed", "most_recent"),
    "history_len": ("delayed", 4),
    "margin": ("hybrid", 2),
    "reduce_amax": ("delayed", True),
    "scale_rounding": ("mxfp8", "even"),
    "pow2_scale": ("blockwise", True),
    "fprop": ("mxfp8", "bf16"),
    "dgrad": ("rowwise", "bf16"),
    "wgrad": ("mxfp4", "bf16"),
    "quantize_activation": ("mxfp8", False),
    "stochastic_rounding": ("mxfp4", False),
    "hadamard": ("mxfp8", True),
    "dgrad_weight": ("mxfp8", "from_rows"),
    "low_precision_activations": ("tensorwise", False),
    "fast_accum": ("tensorwise", False),
    "flavour": ("tensorwise", "fnuz"),
    "seed": ("mxfp4", 7),
    "first_layers_bf16": ("mxfp8", 1),
    "last_layers_bf16": ("mxfp8", 2),
    "apply_modules": ("mxfp8", ("*.mlp.*", "lm_head")),
    "ignored_modules": ("mxfp8", ("a,b|c%",)),
    "converters": ("mxfp8", ("quantize.moe",)),
}


@pytest.mark.parametrize("name", FIELDS)
def test_every_option_changes_the_text_and_survives_every_route(name):
    recipe, value = CHANGED[name]
    base, config = QuantConfig.from_recipe(recipe), QuantConfig.from_recipe(recipe, **{name: value})
    assert getattr(config, name) == value != getattr(base, name)
    assert str(config) != str(base) and config != base
    assert base.replace(**{name: value}) == config or name == "format"  # `scaling` follows a replaced format
    assert QuantConfig.parse(str(config)) == config
    assert QuantConfig(**config.as_dict()) == config
    assert through_argparse(config) == config
    assert through_schema(config) == config
    alone = config_from_schema({"recipe": recipe, name: value})
    parser = argparse.ArgumentParser()
    add_arguments(parser, "--q-")
    flag, kind = "--q-" + name.replace("_", "-"), KINDS[name]
    words = {"bool": [], "names": value, "block": ["x".join(map(str, value))] if kind == "block" else []}
    flag = flag if value is not False else flag.replace("--", "--no-", 1)
    args = parser.parse_args(["--q-recipe", recipe, flag, *words.get(kind, [str(value)])])
    assert alone == config == config_from_args(args, "--q-")


@pytest.mark.parametrize("recipe", RECIPES)
def test_named_recipe(recipe):
    config = QuantConfig.from_recipe(recipe.upper())
    assert str(config) == config.recipe == recipe
    assert QuantConfig(**RECIPES[recipe]) == config
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config
    assert config.is_mx == recipe.startswith("mx")
    assert config.stochastic_rounding is config.hadamard is (recipe == "mxfp4")
    assert {config.fprop, config.dgrad, config.wgrad} == {"bf16" if recipe == "bf16" else "low"}
    assert config.dgrad_weight == ("from_rows" if recipe == "rowwise" else "direct")


def test_defaults_of_schema_and_flags_are_bf16():
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert config_from_args(parser.parse_args([])) == config_from_schema(hydra_schema()()) == QuantConfig(format="bf16")
    assert config_from_schema({"format": "hybrid"}) == QuantConfig(format="hybrid")
    assert pickle.loads(pickle.dumps(hydra_schema()(recipe="mxfp8"))).recipe == "mxfp8"
    assert "--no-lumen-fast-accum" in parser.format_help()


# --- one meaning, one configuration ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grammar", "same"),
    [
        ("dynamic_tensor_E4M3_E4M3_E4M3", {}),
        ("Dynamic_PerTensor_e4m3_e4m3_e4m3", {"format": "FP8_E4M3", "scaling": "Dynamic"}),
        ("delayed_tensor_e4m3_e4m3_e5m2", {"format": "hybrid"}),
        ("delayed_tensor_e4m3_e4m3_e5m2", {"gradient_format": "e5m2", "scaling": "delayed"}),
        ("dynamic_tensor_e5m2_e5m2_e5m2", {"format": "fp8_e5m2"}),
        ("dynamic_perchannel_e4m3_e4m3_e4m3", {"scaling": "rowwise"}),
        ("dynamic_block-1-128-128_e4m3_e4m3_e4m3", {"scaling": "blockwise"}),
        ("dynamic_block-1-1-64_e4m3_e4m3_e5m2", {"format": "hybrid", "scaling": "blockwise", "weight_block": [1, 64]}),
        ("dynamic_MX-1-1-32_E4M3_E4M3_E4M3", {"format": "mxfp8"}),
        ("dynamic_MX-1-1-32_E4M3_E4M3_E4M3", {"format": "fp8_e4m3", "scaling": "mx"}),
        ("dynamic_mx-1-1-32_e4m3_e4m3_e5m2", {"format": "hybrid", "scaling": "mx"}),
        ("dynamic_MX-1-32-32_E4M3_E4M3_E4M3", {"format": "mxfp8", "weight_block": (32, 32)}),
        ("dynamic_MX-1-1-32_E2M1_E2M1_E2M1", {"format": "mxfp4"}),
        (
            "dynamic_mx_e2m1_e2m1_e2m1",
            {"format": "mxfp8", **{f"{x}_format": "e2m1" for x in ("activation", "weight", "gradient")}},
        ),
    ],
)
def test_grammar_and_keywords_agree(grammar, same):
    assert QuantConfig.parse(grammar) == QuantConfig(**same) == QuantConfig.parse(str(QuantConfig(**same)))


def test_equal_meanings_of_other_options():
    assert QuantConfig(
        format="mxfp8", converters=["quantize.moe.mx", "Quantize.Linear", "quantize.moe"]
    ) == QuantConfig(format="mxfp8")
    assert QuantConfig(quantize_activation=False, wgrad="bf16") == QuantConfig(quantize_activation=False)
    assert QuantConfig(format="bf16", fprop="bf16") == QuantConfig(format="bf16")
    assert QuantConfig(format="mxfp4", stochastic_rounding=True) == QuantConfig(format="mxfp4")
    assert str(QuantConfig(format="mxfp4", dgrad="bf16", wgrad="bf16")) == "mxfp4,dgrad=bf16,wgrad=bf16"
    listed = OmegaConf.create({"apply_modules": ["*.mlp.*"], "weight_block": [64, 64]})
    config = QuantConfig(scaling="blockwise", apply_modules=listed.apply_modules, weight_block=listed.weight_block)
    assert config.apply_modules == ("*.mlp.*",) and config.activation_block == (1, 64)


def test_blocks_by_scaling():
    blocks = {
        "tensorwise": [(0, 0)] * 3,
        "bf16": [(0, 0)] * 3,
        "rowwise": [(1, 0)] * 3,
        "blockwise": [(1, 128), (128, 128), (1, 128)],
        "mxfp8": [(1, 32)] * 3,
        "mxfp8-32x32": [(1, 32), (32, 32), (1, 32)],
    }
    for recipe, expected in blocks.items():
        config = QuantConfig.from_recipe(recipe)
        assert [config.activation_block, config.weight_block, config.gradient_block] == expected


def test_replace_derives_what_stood_at_its_default():
    config = QuantConfig(ignored_modules=("a",))
    assert config.replace(format="mxfp4") == QuantConfig(format="mxfp4", ignored_modules=("a",))
    assert QuantConfig(format="mxfp4").replace(format="mxfp8").hadamard is False
    assert QuantConfig(format="bf16").replace(format="fp8_e4m3") == QuantConfig()
    assert QuantConfig.from_recipe("rowwise").replace(scaling="blockwise").dgrad_weight == "direct"
    assert QuantConfig.from_recipe("mxfp8-32x32", format="mxfp4").weight_block == (32, 32)
    assert QuantConfig.from_recipe("tensorwise", format="hybrid").scaling == "dynamic"
    with pytest.raises(ValueError, match="format='mxfp8' and scaling='rowwise'"):
        QuantConfig(scaling="rowwise").replace(format="mxfp8")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.format = "mxfp8"


# --- the source of documentation ---------------------------------------------------------------------------------


def test_manual_is_current():
    manual = Path(__file__).parents[2] / "docs" / "options.md"
    assert manual.read_text(encoding="utf-8") == options.manual(), "run: python -m lumen_core.options docs/options.md"


def test_every_option_is_documented():
    assert [option.name for option in option_table()] == FIELDS
    assert all(len(option.help) > 30 and option.allowed for option in option_table())


def test_imports_only_the_standard_library():
    code = """
import sys, lumen_core
before = set(sys.modules)
import lumen_core.config, lumen_core.options
new = {name.partition(".")[0] for name in set(sys.modules) - before}
assert new <= {*sys.stdlib_module_names, "lumen_core"}, new
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2], timeout=60)
