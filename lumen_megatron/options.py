"""What Lumen does to a Megatron model: the recipe, and the options that only Megatron has.

Options travel on the `TransformerConfig` that every module receives. Where a user set none, Megatron's own FP8 flags
say the recipe.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from lumen_core.config import QuantConfig

ATTENTIONS = ("bf16", "fp8", "mxfp8")
BACKENDS = ("auto", "lumen", "megatron", "te")
_ATTRIBUTE = "lumen"
_default: LumenOptions | None = None

# Megatron's --fp8-recipe in our words; `custom` is TransformerEngine's.
_FP8_RECIPES = {"tensorwise": "tensorwise", "delayed": "delayed", "mxfp8": "mxfp8", "blockwise": "blockwise"}


@dataclass(frozen=True)
class LumenOptions:
    """Options of one model.

    Attributes:
        quant: recipe of the linear layers and experts.
        attention: precision of core attention: `bf16` (the inputs' own), `fp8`, `mxfp8`.
        attention_backend: who computes it. `te` is TransformerEngine's module, `megatron` the unfused one; `auto` takes
            `te` where installed, then `lumen` on a GPU, and `megatron` on a CPU where that can.
        param_gather: gather parameters in low precision under the distributed optimizer.
        fuse_main_grad: add weight gradients into `main_grad` inside backward, without a gradient of their own.
        announce: rank 0 prints what its layers compute in when the first one runs; for scripts that print nothing.
    """

    quant: QuantConfig = field(default_factory=lambda: QuantConfig.from_recipe("bf16"))
    attention: str = "bf16"
    attention_backend: str = "auto"
    param_gather: bool = False
    fuse_main_grad: bool = False
    announce: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (("attention", ATTENTIONS), ("attention_backend", BACKENDS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r}: must be one of {', '.join(allowed)}")
        if self.attention != "bf16" and self.attention_backend in ("megatron", "te"):
            raise ValueError(
                f"attention={self.attention} with attention_backend={self.attention_backend}: only lumen computes it"
            )
        if self.param_gather and self.quant.format == "bf16":
            raise ValueError("param_gather=True with recipe bf16: there is no low precision to gather in")

    def with_recipe(self, recipe: str | QuantConfig) -> LumenOptions:
        """The same options with another recipe."""
        quant = recipe if isinstance(recipe, QuantConfig) else QuantConfig.from_recipe(recipe)
        return replace(self, quant=with_shared_amax(quant))

    @property
    def quantizes(self) -> bool:
        """False for the recipe `bf16`: Megatron's own arithmetic, bit for bit."""
        return self.quant.format != "bf16"


def configure(
    config: Any, recipe: str | QuantConfig | None = None, *, options: LumenOptions | None = None, **overrides: object
) -> Any:
    """Set what Lumen does to the models built from a `TransformerConfig`.

    Args:
        config: a `TransformerConfig`.
        recipe: of the linear layers; None leaves it to Megatron's FP8 flags.
        options: to start from; default: none set.
        **overrides: options of `LumenOptions`, or of `QuantConfig`.

    Returns:
        `config` itself.

    Raises:
        TypeError: an unknown option.
        ValueError: a value that is not allowed.
    """
    own = {k: overrides.pop(k) for k in list(overrides) if k in LumenOptions.__dataclass_fields__ and k != "quant"}
    if options is not None:
        own = {**{k: getattr(options, k) for k in LumenOptions.__dataclass_fields__}, **own}
    if recipe is not None or overrides:
        quant = recipe if isinstance(recipe, QuantConfig) else QuantConfig.from_recipe(recipe or "bf16")
        own["quant"] = with_shared_amax(quant.replace(**overrides) if overrides else quant)
    elif options is None:
        own["quant"] = from_megatron(config)
        own.setdefault("param_gather", bool(getattr(config, "fp8_param", False)))
        config.fp8, config.fp8_param = None, False  # taken over: Megatron's own FP8 code drives TransformerEngine
    setattr(config, _ATTRIBUTE, LumenOptions(**own))
    return config


def options_of(config: Any) -> LumenOptions:
    """Options of models built from `config`: set on it, for the process, on the command line, by Megatron's flags."""
    own = getattr(config, _ATTRIBUTE, None)
    if isinstance(own, LumenOptions):
        return own
    if _default is not None:
        return _default
    # Megatron's parsed arguments, where a script has any; see lumen_megatron.arguments.
    arguments = getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
    parsed = getattr(arguments, "lumen_options", None)
    if isinstance(parsed, LumenOptions):
        return parsed
    return LumenOptions(quant=from_megatron(config), param_gather=bool(getattr(config, "fp8_param", False)))


def set_default(options: LumenOptions | None) -> None:
    """Options of configurations that have none of their own; the command line's."""
    global _default
    _default = options


@contextlib.contextmanager
def default(options: LumenOptions) -> Iterator[None]:
    """`set_default` for a while."""
    before = _default
    set_default(options)
    try:
        yield
    finally:
        set_default(before)


def with_shared_amax(quant: QuantConfig) -> QuantConfig:
    """The recipe with `reduce_amax`: ranks that hold parts of one layer must agree on its scales."""
    return quant.replace(reduce_amax=True) if quant.scaling == "delayed" else quant


def from_megatron(config: Any) -> QuantConfig:
    """The recipe that Megatron's own flags ask for: `--fp8-format`, `--fp8-recipe` and what goes with them.

    Raises:
        ValueError: a flag that only TransformerEngine understands.
    """
    if getattr(config, "fp4", None):
        raise ValueError(
            f"--fp4-format {config.fp4} with --fp4-recipe {config.fp4_recipe}: that is TransformerEngine's NVFP4; "
            "Lumen's 4-bit recipe is --lumen-recipe mxfp4"
        )
    if not getattr(config, "fp8", None):
        return QuantConfig.from_recipe("bf16")
    name = str(getattr(config.fp8_recipe, "value", config.fp8_recipe) or "delayed")
    if name not in _FP8_RECIPES:
        raise ValueError(f"--fp8-recipe {name}: Lumen knows {', '.join(_FP8_RECIPES)}")
    settings: dict[str, object] = {}
    if config.fp8 == "hybrid" and name != "mxfp8":  # MX gradients stay E4M3, as in TransformerEngine's hybrid
        settings["gradient_format"] = "e5m2"
    if name == "delayed":
        settings |= {
            "history_len": config.fp8_amax_history_len,
            "amax_algo": config.fp8_amax_compute_algo,
            "margin": config.fp8_margin,
        }
    if not config.fp8_wgrad:
        settings["wgrad"] = "bf16"
    if config.first_last_layers_bf16:
        settings["first_layers_bf16"] = config.num_layers_at_start_in_bf16
        settings["last_layers_bf16"] = config.num_layers_at_end_in_bf16
    return with_shared_amax(QuantConfig.from_recipe(_FP8_RECIPES[name], **settings))
