"""The `--lumen-*` flags: what they mean beside Megatron's own, and what is refused."""

from __future__ import annotations

import argparse

import pytest

from lumen_core.config import QuantConfig


def _parse(*words: str) -> argparse.Namespace:
    """Arguments of a parser with the flags of Megatron that matter here, under Megatron's own names."""
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    from lumen_megatron.arguments import add_arguments, check

    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--transformer-impl", default="transformer_engine")
    parser.add_argument("--fp8-format", dest="fp8", default=None)
    parser.add_argument("--fp8-recipe", default="delayed")
    parser.add_argument("--fp8-margin", type=int, default=0)
    parser.add_argument("--fp8-amax-history-len", type=int, default=1)
    parser.add_argument("--fp8-amax-compute-algo", default="most_recent")
    parser.add_argument("--no-fp8-wgrad", dest="fp8_wgrad", action="store_false")
    parser.add_argument("--fp8-param-gather", action="store_true")
    parser.add_argument("--first-last-layers-bf16", action="store_true")
    parser.add_argument("--num-layers-at-start-in-bf16", type=int, default=1)
    parser.add_argument("--num-layers-at-end-in-bf16", type=int, default=1)
    parser.add_argument("--fp4-format", dest="fp4", default=None)
    parser.add_argument("--attention-dropout", type=float, default=0.1)
    parser.add_argument("--use-distributed-optimizer", action="store_true")
    parser.add_argument("--tp-comm-overlap", action="store_true")
    parser.add_argument("--spec", nargs="*", default=None)
    parser.add_argument("--experimental-attention-variant", default=None)
    args = add_arguments(parser).parse_args([w for word in words for w in word.split()])
    check(args)
    return args


LUMEN = "--transformer-impl lumen"


@pytest.mark.parametrize(
    "flags,recipe",
    [
        ("", "bf16"),
        ("--lumen-recipe mxfp8", "mxfp8"),
        ("--lumen-recipe mxfp8 --lumen-scale-rounding even", "mxfp8,scale_rounding=even"),
        ("--lumen-recipe dynamic_mx-1-32-32_e4m3_e4m3_e4m3", "mxfp8-32x32"),
        ("--lumen-recipe delayed", "delayed,reduce_amax=true"),
        ("--fp8-format e4m3 --fp8-recipe tensorwise", "tensorwise"),
        ("--fp8-format hybrid --fp8-recipe tensorwise", "tensorwise,format=hybrid"),
        ("--fp8-format e4m3 --fp8-recipe mxfp8", "mxfp8"),
        ("--fp8-format hybrid --fp8-recipe mxfp8", "mxfp8"),
        ("--fp8-format e4m3 --fp8-recipe blockwise --no-fp8-wgrad", "blockwise,wgrad=bf16"),
        (
            "--fp8-format hybrid --fp8-amax-history-len 8 --fp8-amax-compute-algo max --fp8-margin 1",
            "hybrid,history_len=8,amax_algo=max,margin=1,reduce_amax=true",
        ),
        (
            "--fp8-format e4m3 --fp8-recipe mxfp8 --first-last-layers-bf16 --num-layers-at-end-in-bf16 3",
            "mxfp8,first_layers_bf16=1,last_layers_bf16=3",
        ),
        ("--fp8-format e4m3 --fp8-recipe mxfp8 --lumen-scale-rounding floor", "mxfp8,scale_rounding=floor"),
        ("--fp8-format e4m3 --fp8-recipe mxfp8 --lumen-recipe mxfp8", "mxfp8"),
    ],
)
def test_recipes(flags: str, recipe: str) -> None:
    args = _parse(LUMEN, flags)
    assert args.lumen_options.quant == QuantConfig.parse(recipe)
    assert args.fp8 is None, "Megatron's own FP8 code must stay out"


def test_the_spec_takes_the_flags_too() -> None:
    args = _parse("--spec lumen_megatron.spec lumen_block_spec --lumen-recipe mxfp8")
    assert args.lumen_options.quant == QuantConfig.parse("mxfp8")


def test_other_options() -> None:
    args = _parse(
        LUMEN, "--lumen-recipe mxfp8 --lumen-attention fp8 --attention-dropout 0 --lumen-attention-backend lumen",
        "--lumen-fuse-main-grad --fp8-param-gather --use-distributed-optimizer",
    )  # fmt: skip
    options = args.lumen_options
    assert (options.attention, options.attention_backend) == ("fp8", "lumen")
    assert options.fuse_main_grad and options.param_gather and not args.fp8_param_gather


@pytest.mark.parametrize(
    "flags,words",
    [
        ("--lumen-recipe mxfp8", ["--lumen-recipe mxfp8", "--transformer-impl lumen"]),
        (f"{LUMEN} --lumen-recipe mxfp8 --fp8-format e4m3", ["--lumen-recipe mxfp8", "--fp8-recipe delayed"]),
        (f"{LUMEN} --lumen-recipe mxfp9", ["mxfp9", "nearest: 'mxfp8'"]),
        (f"{LUMEN} --fp4-format e2m1", ["--fp4-format", "mxfp4"]),
        (f"{LUMEN} --fp8-format e4m3 --fp8-recipe custom", ["--fp8-recipe custom", "blockwise"]),
        (f"{LUMEN} --tp-comm-overlap", ["--tp-comm-overlap", "TransformerEngine"]),
        (f"{LUMEN} --lumen-recipe mxfp8 --lumen-attention fp8", ["--lumen-attention fp8", "--attention-dropout 0.1"]),
        (f"{LUMEN} --lumen-recipe mxfp8 --lumen-param-gather", ["--use-distributed-optimizer"]),
        (f"{LUMEN} --lumen-param-gather --use-distributed-optimizer", ["param_gather", "bf16"]),
        (f"{LUMEN} --lumen-recipe mxfp8 --lumen-margin 3", ["margin", "delayed"]),
        (f"{LUMEN} --experimental-attention-variant dsa", ["--experimental-attention-variant dsa", "no layer"]),
    ],
)
def test_contradictions_are_named(flags: str, words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        _parse(flags)
    assert all(word in str(error.value) for word in words), error.value


def test_importing_the_package_imports_nothing_of_megatron() -> None:
    import subprocess
    import sys

    code = "import sys, lumen_megatron; assert not [m for m in sys.modules if m.split('.')[0] == 'megatron']"
    subprocess.run([sys.executable, "-c", code], check=True)
