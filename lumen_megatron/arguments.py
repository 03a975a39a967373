"""The `--lumen-*` flags of Megatron scripts, and what they mean together with Megatron's own FP8 flags."""

from __future__ import annotations

import argparse

from lumen_core.config import QuantConfig
from lumen_core.options import add_arguments as add_quant_arguments
from lumen_core.options import config_from_args
from lumen_core.values import to_text
from lumen_megatron.options import ATTENTIONS, BACKENDS, LumenOptions, from_megatron, with_shared_amax

IMPLEMENTATION = "lumen"
# Features that Megatron has through TransformerEngine's modules only: argument, and the values that ask for nothing.
_ONLY_TRANSFORMER_ENGINE = {
    "fp4": (None,),
    "fp8_dot_product_attention": (None, False),
    "fp8_multi_head_attention": (None, False),
    "use_te_activation_func": (None, False),
    "use_transformer_engine_op_fuser": (None, False),
    "tp_comm_overlap": (None, False),
    "cpu_offloading": (None, False),
    "use_kitchen": (None, False),
}
# Models whose specs Megatron builds elsewhere: not one layer of theirs would be Lumen's.
_OTHER_MODELS = ("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json",
                 "experimental_attention_variant", "hybrid_override_pattern")  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the `--lumen-*` group to a Megatron parser; returns the parser."""
    add_quant_arguments(parser)
    parser.set_defaults(lumen_recipe=None)
    group = parser.add_argument_group("Lumen on Megatron")
    group.add_argument(
        "--lumen-attention", choices=ATTENTIONS, default=None,
        help="Precision of core attention. Default: bf16, the inputs' own.",
    )  # fmt: skip
    group.add_argument(
        "--lumen-attention-backend", choices=BACKENDS, default=None,
        help="Who computes core attention. Default: auto: TransformerEngine where installed, then Lumen on a GPU.",
    )  # fmt: skip
    group.add_argument(
        "--lumen-param-gather", action="store_true", default=None,
        help="Gather parameters in low precision under the distributed optimizer; --fp8-param-gather means the same.",
    )  # fmt: skip
    group.add_argument(
        "--lumen-fuse-main-grad", action="store_true", default=None,
        help="Add weight gradients into main_grad inside backward.",
    )  # fmt: skip
    return parser


def is_chosen(args: argparse.Namespace) -> bool:
    """Whether the arguments ask for `--transformer-impl lumen`, or for its spec by `--spec`."""
    spec = getattr(args, "spec", None) or [""]
    return getattr(args, "transformer_impl", None) == IMPLEMENTATION or spec[0].startswith("lumen_megatron")


def options_from_args(args: argparse.Namespace) -> LumenOptions:
    """What parsed arguments ask for.

    Raises:
        ValueError: flags that contradict each other, or ask for what only TransformerEngine has, by name.
    """
    _check_features(args)
    quant = _quant(args)
    own = {
        "attention": args.lumen_attention,
        "attention_backend": args.lumen_attention_backend,
        "param_gather": args.lumen_param_gather or _asks_for_param_gather(args) or None,
        "fuse_main_grad": args.lumen_fuse_main_grad,
        "announce": True,
    }
    options = LumenOptions(quant=quant, **{name: value for name, value in own.items() if value is not None})
    dropout = getattr(args, "attention_dropout", 0.0)
    if options.attention != "bf16" and dropout:
        raise ValueError(
            f"--lumen-attention {options.attention} with --attention-dropout {dropout}: only 0.0 is possible"
        )
    if options.param_gather and not getattr(args, "use_distributed_optimizer", True):
        raise ValueError("--lumen-param-gather needs --use-distributed-optimizer: nothing else gathers parameters")
    return options


def _asks_for_param_gather(args: argparse.Namespace) -> bool:
    return bool(getattr(args, "fp8_param_gather", False) or getattr(args, "fp8_param", False))


def _quant(args: argparse.Namespace) -> QuantConfig:
    if not getattr(args, "fp8", None):
        return _with_recipe(args, "bf16")
    megatron = from_megatron(args)
    lumen = _with_recipe(args, str(megatron))  # flags beside the recipe refine what Megatron's name
    if args.lumen_recipe is not None and lumen != megatron:
        raise ValueError(
            f"--lumen-recipe {args.lumen_recipe} contradicts --fp8-format {args.fp8} --fp8-recipe {args.fp8_recipe}, "
            f"which is {megatron}: give one of them"
        )
    return lumen


def _with_recipe(args: argparse.Namespace, default: str) -> QuantConfig:
    named = argparse.Namespace(**{**vars(args), "lumen_recipe": args.lumen_recipe or default})
    return with_shared_amax(config_from_args(named))


def _check_features(args: argparse.Namespace) -> None:
    for name, idle in _ONLY_TRANSFORMER_ENGINE.items():
        value = getattr(args, name, None)
        if value in idle:
            continue
        flag = {"fp4": "--fp4-format"}.get(name, "--" + name.replace("_", "-"))
        hint = "; Lumen's 4-bit recipe is --lumen-recipe mxfp4" if name == "fp4" else ""
        raise ValueError(f"{flag} {value} with --transformer-impl lumen: only TransformerEngine does that{hint}")
    for name in _OTHER_MODELS:
        if getattr(args, name, None):
            flag = "--" + name.replace("_", "-")
            raise ValueError(
                f"{flag} {getattr(args, name)} with --transformer-impl lumen: no layer of it would be Lumen's"
            )


def check(args: argparse.Namespace) -> None:
    """Settle parsed arguments: `args.lumen_options` holds the result.

    Megatron's FP8 flags are taken over and cleared: its own FP8 code, which drives TransformerEngine, stays out.

    Raises:
        ValueError: as `options_from_args`; `--lumen-*` flags without `--transformer-impl lumen`.
    """
    if not is_chosen(args):
        given = [name for name, value in vars(args).items() if name.startswith("lumen_") and value is not None]
        if given:
            flag = "--" + given[0].replace("_", "-")
            value = to_text(getattr(args, given[0]), {"kind": "choice"})
            raise ValueError(
                f"{flag} {value} without --transformer-impl lumen: it has --transformer-impl {args.transformer_impl}"
            )
        return
    args.lumen_options = options_from_args(args)
    args.fp8 = None
    for name in ("fp8_param", "fp8_param_gather", "first_last_layers_bf16"):
        if hasattr(args, name):
            setattr(args, name, False)
