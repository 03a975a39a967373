"""Mistakes in a configuration: the option, its value, what is allowed and the nearest valid word are named."""

import argparse

import pytest
import torch

from lumen_core.config import QuantConfig, add_arguments, config_from_schema


@pytest.mark.parametrize(
    ("kwargs", "error", "parts"),
    [
        ({"format": "fp9"}, ValueError, ["format='fp9'", "'fp8_e4m3'", "nearest"]),
        ({"format": ""}, ValueError, ["format=''", "'mxfp8'"]),
        ({"format": None}, TypeError, ["format=None", "'mxfp8'"]),
        ({"format": torch.float8_e4m3fn}, TypeError, ["format=torch.float8_e4m3fn", "nearest: 'fp8_e4m3'"]),
        ({"scaling": "delayd"}, ValueError, ["scaling='delayd'", "nearest: 'delayed'"]),
        ({"history_len": 0}, ValueError, ["history_len=0", ">= 1"]),
        ({"history_len": 1.0}, TypeError, ["history_len=1.0", "integer"]),
        ({"margin": True}, TypeError, ["margin=True", "integer"]),
        ({"margin": -1}, ValueError, ["margin=-1", ">= 0"]),
        ({"seed": 2**63}, ValueError, ["seed=", "<= 9223372036854775807"]),
        ({"fast_accum": 1}, TypeError, ["fast_accum=1", "True or False"]),
        ({"hadamard": "true"}, TypeError, ["hadamard='true'", "True or False"]),
        ({"apply_modules": "*.mlp"}, TypeError, ["apply_modules='*.mlp'", "['*.mlp']"]),
        ({"apply_modules": [3]}, TypeError, ["apply_modules=[3]", "3 is not a string"]),
        ({"apply_modules": [""]}, ValueError, ["apply_modules", "empty"]),
        ({"apply_modules": []}, ValueError, ["apply_modules=()"]),
        ({"converters": ["quantize.lineer"]}, ValueError, ["converters", "nearest: 'quantize.linear'"]),
        ({"converters": []}, ValueError, ["converters=()"]),
        ({"converters": ["fused.norm"]}, ValueError, ["converters=(fused.norm)", "quantize.linear"]),
        ({"weight_block": 33}, TypeError, ["weight_block=33", "pair"]),
        ({"weight_block": (32,)}, ValueError, ["weight_block=(32,)", "pair"]),
        ({"weight_block": (32, True)}, TypeError, ["weight_block=(32, True)"]),
        ({"scaling": "blockwise", "weight_block": (33, 33)}, ValueError, ["weight_block=(33, 33)", "nearest: 32"]),
        ({"block_size": 33}, TypeError, ["'block_size'", "nearest"]),
        ({"scale_round": "even"}, TypeError, ["'scale_round'", "nearest: 'scale_rounding'"]),
    ],
)
def test_wrong_values_are_named(kwargs, error, parts):
    routes = [QuantConfig, QuantConfig().replace, lambda **k: QuantConfig.from_recipe("tensorwise", **k)]
    for build in routes:
        with pytest.raises(error) as caught:
            build(**kwargs)
        assert all(part in str(caught.value) for part in parts), str(caught.value)


E5M2_ACTIVATION = {"format": "mxfp8", "activation_format": "e5m2"}


@pytest.mark.parametrize(
    ("kwargs", "pairs"),
    [
        ({"format": "mxfp8", "scaling": "delayed"}, ["format='mxfp8'", "scaling='delayed'"]),
        ({"format": "mxfp4", "scaling": "rowwise"}, ["format='mxfp4'", "scaling='rowwise'"]),
        ({"format": "bf16", "scaling": "dynamic"}, ["format='bf16'", "scaling='dynamic'"]),
        ({"scaling": "none"}, ["format='fp8_e4m3'", "scaling='none'"]),
        ({"weight_format": "bf16"}, ["format='fp8_e4m3'", "weight_format='bf16'"]),
        ({"format": "bf16", "weight_format": "e4m3"}, ["format='bf16'", "weight_format='e4m3'"]),
        ({"weight_format": "e2m1"}, ["weight_format='e2m1'", "scaling='dynamic'"]),
        ({"scale_rounding": "even"}, ["scale_rounding='even'", "scaling='dynamic'"]),
        ({"format": "mxfp8", "pow2_scale": True}, ["pow2_scale=True", "scaling='mx'"]),
        ({"format": "bf16", "pow2_scale": True}, ["pow2_scale=True", "scaling='none'"]),
        ({"amax_algo": "most_recent"}, ["amax_algo='most_recent'", "scaling='dynamic'"]),
        ({"format": "mxfp8", "history_len": 4}, ["history_len=4", "scaling='mx'"]),
        ({"margin": 1}, ["margin=1", "scaling='dynamic'"]),
        ({"scaling": "rowwise", "reduce_amax": True}, ["reduce_amax=True", "scaling='rowwise'"]),
        ({"stochastic_rounding": True, "dgrad": "bf16", "wgrad": "bf16"}, ["stochastic_rounding=True", "wgrad='bf16'"]),
        (
            {"stochastic_rounding": True, "quantize_activation": False},
            ["stochastic_rounding=True", "quantize_activation=False"],
        ),
        ({"stochastic_rounding": True, "format": "bf16"}, ["stochastic_rounding=True", "format='bf16'"]),
        ({"hadamard": True}, ["hadamard=True", "scaling='dynamic'"]),
        ({"hadamard": True, "format": "mxfp8", "wgrad": "bf16"}, ["hadamard=True", "wgrad='bf16'"]),
        (
            {"hadamard": True, "format": "mxfp8", "quantize_activation": False},
            ["hadamard=True", "quantize_activation=False"],
        ),
        ({"weight_block": (32, 32)}, ["weight_block=(32, 32)", "scaling='dynamic'"]),
        ({"format": "mxfp8", "weight_block": (128, 128)}, ["weight_block=(128, 128)", "scaling='mx'"]),
        (
            {"scaling": "blockwise", "activation_block": (128, 128)},
            ["activation_block=(128, 128)", "scaling='blockwise'"],
        ),
        (
            {"scaling": "blockwise", "activation_block": (1, 64), "weight_block": (128, 128)},
            ["activation_block=(1, 64)", "weight_block=(128, 128)"],
        ),
        ({"scaling": "rowwise", "dgrad_weight": "direct"}, ["dgrad_weight='direct'", "scaling='rowwise'"]),
        ({"dgrad_weight": "from_rows"}, ["dgrad_weight='from_rows'", "scaling='dynamic'"]),
        (
            {"scaling": "blockwise", "dgrad_weight": "from_rows"},
            ["dgrad_weight='from_rows'", "weight_block=(128, 128)"],
        ),
        ({"quantize_activation": False, **E5M2_ACTIVATION}, ["quantize_activation=False", "activation_format='e5m2'"]),
        ({"quantize_activation": False, "format": "bf16"}, ["quantize_activation=False", "format='bf16'"]),
        ({"converters": ["quantize.linear.mx"]}, ["converters=('quantize.linear.mx',)", "scaling='dynamic'"]),
        (dict.fromkeys(("fprop", "dgrad", "wgrad"), "bf16"), ["fprop='bf16'", "format='fp8_e4m3'", "recipe='bf16'"]),
        (
            {"quantize_activation": False, "fprop": "bf16", "dgrad": "bf16"},
            ["quantize_activation=False", "dgrad='bf16'", "recipe='bf16'"],
        ),
    ],
)
def test_contradictions_name_both_options(kwargs, pairs):
    with pytest.raises(ValueError) as caught:
        QuantConfig(**kwargs)
    assert all(pair in str(caught.value) for pair in pairs), str(caught.value)


def test_a_change_that_could_not_take_effect_is_refused():
    with pytest.raises(ValueError, match="fprop='low' and format='bf16'"):
        QuantConfig.from_recipe("bf16", fprop="low")
    with pytest.raises(ValueError, match="wgrad='low' and quantize_activation=False"):
        QuantConfig.parse("mxfp8,quantize_activation=false,wgrad=low")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["recipe ''", "'mxfp8'"]),
        ("mxfp9", ["'mxfp9'", "nearest: 'mxfp8'"]),
        ("fp8_e4m3", ["'fp8_e4m3'", "format='fp8_e4m3'"]),
        ("dynamc_tensor_e4m3_e4m3_e4m3", ["strategy 'dynamc'", "nearest: 'dynamic'"]),
        ("dynamic_MX-1-2-32_e4m3_e4m3_e4m3", ["granularity 'mx-1-2-32'", "nearest: 'mx-1-32-32'"]),
        ("dynamic_block-1-33-33_e4m3_e4m3_e4m3", ["granularity 'block-1-33-33'", "nearest: 'block-1-32-32'"]),
        ("dynamic_tensor_e4m3_e4m4_e4m3", ["weight 'e4m4'", "nearest: 'e4m3'"]),
        ("dynamic_tensor_e4m3_e4m3", ["4 parts", "<grad>"]),
        ("delayed_row_e4m3_e4m3_e4m3", ["'delayed'", "'row'"]),
        ("mxfp8,scale_roundin=even", ["'scale_roundin'", "nearest: 'scale_rounding'"]),
        ("mxfp8,even", ["'even'", "option=value"]),
        ("mxfp8,seed=1,seed=2", ["seed is given twice"]),
        ("mxfp8,seed=1.0", ["seed='1.0'", "integer"]),
        ("mxfp8,hadamard=yes", ["hadamard='yes'", "true or false"]),
        ("mxfp8,weight_block=32", ["weight_block='32'", "1x128"]),
    ],
)
def test_text_errors_name_the_part(text, parts):
    with pytest.raises(ValueError) as caught:
        QuantConfig.parse(text)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_other_routes_refuse_mistakes(capsys):
    with pytest.raises(TypeError, match="recipe=None"):
        QuantConfig.from_recipe(None)
    with pytest.raises(TypeError, match="'scalling'.*nearest: 'scaling'"):
        config_from_schema({"scalling": "mx"})
    with pytest.raises(TypeError, match="mapping"):
        config_from_schema("mxfp8")
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["--lumen-scaling", "delayd"])
    assert "nearest: 'delayed'" in capsys.readouterr().err
