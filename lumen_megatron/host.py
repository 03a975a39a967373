"""Everything that Lumen changes in Megatron, for scripts that know nothing of it. `uninstall` takes it back.

| what | why |
|---|---|
| choices of `TransformerConfig.transformer_impl` | the flag is generated from them, wherever arguments are parsed |
| `arguments.add_megatron_arguments` | adds the `--lumen-*` group and checks the result |
| four spec builders of `gpt_layer_specs` | with `--transformer-impl lumen` they build from Lumen's modules |
| `transformer_block.LayerNormImpl` | the final norm of a model whose spec is one layer's |
| missing names of `moe_utils` | 0.16.1 runs into a NameError in every MoE model without TransformerEngine |

Checked on megatron-core 0.16.1 with its Megatron-LM tree.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import sys
import types
from collections.abc import Callable
from typing import Any, Literal, get_args

from lumen_megatron.arguments import IMPLEMENTATION, add_arguments, check, is_chosen
from lumen_megatron.norm import LumenNorm
from lumen_megatron.replacements import Replacements
from lumen_megatron.spec import lumen_modules

_SPECS = "megatron.core.models.gpt.gpt_layer_specs"
_BUILDERS = (
    "get_gpt_layer_local_spec",
    "get_gpt_decoder_layer_specs",
    "get_gpt_decoder_block_spec",
    "get_gpt_mtp_block_spec",
)
_changed = Replacements()


def install() -> None:
    """Make `--transformer-impl lumen` known to Megatron in this process; twice is once."""
    if _changed:
        return
    _widen_choice()
    _add_flags()
    _build_from_lumen()
    _final_norm()
    _missing_names()


def uninstall() -> None:
    """Give Megatron back what `install` changed."""
    _changed.take_back()


def _replace_everywhere(module: types.ModuleType, name: str, value: Any) -> None:
    """Also in modules that imported the name before."""
    before = getattr(module, name)
    for other in list(sys.modules.values()):
        if isinstance(other, types.ModuleType) and other.__dict__.get(name) is before:
            _changed.set(other, name, value)


def _widen_choice() -> None:
    from megatron.core.transformer.transformer_config import TransformerConfig

    field = TransformerConfig.__dataclass_fields__["transformer_impl"]
    _changed.set(field, "type", Literal[(*get_args(field.type), IMPLEMENTATION)])


def _add_flags() -> None:
    try:
        arguments = importlib.import_module("megatron.training.arguments")
    except ImportError:  # megatron.core alone: options come from Python
        return
    add_megatron_arguments = arguments.add_megatron_arguments

    @functools.wraps(add_megatron_arguments)
    def with_lumen(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = add_arguments(add_megatron_arguments(parser))
        parse = parser.parse_known_args

        def parse_and_check(*args: Any, **kwargs: Any) -> Any:
            parsed, rest = parse(*args, **kwargs)
            try:
                check(parsed)
            except (TypeError, ValueError) as error:
                parser.error(str(error))
            return parsed, rest

        parser.parse_known_args = parse_and_check  # parse_args calls it, too
        return parser

    _replace_everywhere(arguments, "add_megatron_arguments", with_lumen)


def _chosen(config: Any) -> bool:
    """Whether a builder called with `config` first is to build from Lumen; some are called without one."""
    if hasattr(config, "transformer_impl"):
        return config.transformer_impl == IMPLEMENTATION
    global_vars = sys.modules.get("megatron.training.global_vars")
    args = getattr(global_vars, "_GLOBAL_ARGS", None)
    return args is not None and is_chosen(args)


def _build_from_lumen() -> None:
    specs = importlib.import_module(_SPECS)
    for name in _BUILDERS:
        build = getattr(specs, name)

        def wrapped(*args: Any, _build: Callable[..., Any] = build, **kwargs: Any) -> Any:
            if not _chosen(args[0] if args else kwargs.get("config")):
                return _build(*args, **kwargs)
            with lumen_modules():
                return _build(*args, **kwargs)

        _replace_everywhere(specs, name, functools.wraps(build)(wrapped))


def _final_norm() -> None:
    block = importlib.import_module("megatron.core.transformer.transformer_block")
    stock = block.LayerNormImpl

    class FinalNorm:
        """Lumen's norm for its models, Megatron's own for others."""

        def __new__(cls, config: Any, *args: Any, **kwargs: Any) -> Any:
            return (LumenNorm if config.transformer_impl == IMPLEMENTATION else stock)(config, *args, **kwargs)

    _changed.set(block, "LayerNormImpl", FinalNorm)


def _missing_names() -> None:
    moe_utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    for name in ("te_general_gemm",):
        if not hasattr(moe_utils, name):
            _changed.set(moe_utils, name, None)
