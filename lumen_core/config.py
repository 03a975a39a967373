"""`QuantConfig`: every option of low-precision training, its meaning, and the one place that documents it.

Each field's metadata holds what the option accepts and what it does. The command-line flags, the Hydra schema
and docs/options.md are generated from it by `lumen_core.options`, whose functions are importable from here as
well. Only the standard library is imported.

>>> str(QuantConfig.from_recipe("mxfp8", scale_rounding="even"))
'mxfp8,scale_rounding=even'
>>> QuantConfig(format="hybrid") == QuantConfig.parse("delayed_tensor_E4M3_E4M3_E5M2")
True
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from lumen_core.recipes import RECIPES, recipe_settings, recipe_text
from lumen_core.rules import GEMMS, STRUCTURE, derived_defaults, refuse, resolve, structure
from lumen_core.selection import DEFAULT_IGNORED, glob_match, is_exact, module_selected
from lumen_core.values import check, check_known, from_text, suggestion, to_text

if TYPE_CHECKING:
    from lumen_core.options import (
        Option,
        QuantSchema,
        add_arguments,
        config_from_args,
        config_from_schema,
        hydra_schema,
        option_table,
    )

__all__ = [
    "DEFAULT_IGNORED",
    "RECIPES",
    "Option",
    "QuantConfig",
    "QuantSchema",
    "add_arguments",
    "config_from_args",
    "config_from_schema",
    "glob_match",
    "hydra_schema",
    "is_exact",
    "module_selected",
    "option_table",
]


def _option(default: object, kind: str, help: str, **spec: object) -> Any:
    """A documented field. `spec`: choices, minimum, maximum, optional (None allowed), auto (what that gives)."""
    return dataclasses.field(default=default, metadata={"kind": kind, "help": help, **spec})


def _choice(default: str, choices: tuple[str, ...], help: str, **spec: object) -> Any:
    return _option(default, "choice", help, choices=choices, **spec)


def _element(operand: str) -> Any:
    help = (
        f"Element format of {operand}. E4M3 has 3 bits of mantissa and reaches 448 (FNUZ: 240), E5M2 2 bits "
        "and 57344, E2M1 (mx only) 1 bit and 6. bf16 stands here when format is bf16, and only then."
    )
    return _choice("auto", ("auto", "e4m3", "e5m2", "e2m1", "bf16"), help, auto="by format")


def _block(operand: str, sizes: str) -> Any:
    help = (
        f"Values of {operand} that share one scale, as rows x columns along the axis the GEMM contracts; 0 "
        f"is all of them. {sizes}"
    )
    return _option(None, "block", help, optional=True, auto="by scaling")


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantConfig:
    """How a model is quantized. Immutable, hashable, and checked when it is made.

    Words may be written in any case, lists stand for tuples. Options left at ``auto`` or None are resolved at
    once, so every field of an instance is concrete (only ``flavour="auto"`` waits for the device), and
    configurations that mean the same are equal however they were spelled: ``format="hybrid", scaling="mx"``
    becomes format ``mxfp8`` with E5M2 gradients, GEMMs that have no low-precision operand become ``"bf16"``.

    Raises:
        TypeError: an unknown option, or a value of the wrong type.
        ValueError: a value that is not allowed, or two options that contradict each other; both are named.

    Sources: MX blocks and E8M0 scales, OCP Microscaling Formats (MX) specification v1.0; stochastic rounding
    and the random Hadamard transform for MXFP4, arXiv 2502.20586; scales rounded up, arXiv 2506.08027.
    """

    format: str = _choice(
        "fp8_e4m3",
        ("fp8_e4m3", "fp8_e5m2", "hybrid", "mxfp8", "mxfp4", "bf16"),
        "Number format of the operands: fp8_e4m3 and fp8_e5m2 use one for all; hybrid is E4M3 with E5M2 "
        "gradients; mxfp8 (E4M3) and mxfp4 (E2M1) carry an E8M0 scale per 32 values; bf16 quantizes "
        "nothing.",
    )
    scaling: str = _choice(
        "auto",
        ("auto", "none", "dynamic", "delayed", "rowwise", "blockwise", "mx"),
        "Where scales come from and what they cover. dynamic: one a tensor, from its own amax; delayed: "
        "one a tensor, from the amax of earlier steps; rowwise: one a token or weight row; blockwise: one "
        "a block, fp32; mx: one per 32 values, a power of two. none goes with bf16.",
        auto="mx for mxfp8 and mxfp4, delayed for hybrid, none for bf16, else dynamic",
    )
    activation_format: str = _element("activations")
    weight_format: str = _element("weights")
    gradient_format: str = _element("gradients of outputs")
    activation_block: tuple[int, int] | None = _block(
        "activations", "blockwise: 1xB, B 32, 64, 128 (default) or 256, the same for all operands; mx: 1x32."
    )
    weight_block: tuple[int, int] | None = _block(
        "weights",
        "blockwise: BxB (default) or 1xB; mx: 1x32 (default) or 32x32. A square block gives the same codes "
        "for fprop and dgrad, so one copy serves both; 32x32 costs nothing in mxfp8 and 1 to 5 dB in mxfp4.",
    )
    gradient_block: tuple[int, int] | None = _block("gradients", "blockwise: 1xB; mx: 1x32.")
    amax_algo: str = _choice(
        "max",
        ("max", "most_recent"),
        "delayed only. max: scale by the largest amax in the history, so a spike keeps its head-room for "
        "history_len steps; most_recent: by the last step's, which uses the range better and saturates "
        "more when values grow.",
    )
    history_len: int = _option(
        16,
        "int",
        "delayed only. Steps of amax kept for each tensor: longer saturates less, forgets more slowly.",
        minimum=1,
    )
    margin: int = _option(
        0,
        "int",
        "delayed only. Powers of two of head-room above the amax: each one lost off the smallest values.",
        minimum=0,
        maximum=32,
    )
    reduce_amax: bool = _option(
        False,
        "bool",
        "delayed only. Take the maximum over all ranks, one fused all-reduce a step: every rank then uses "
        "the same scales, as a low-precision all-gather needs.",
    )
    scale_rounding: str = _choice(
        "ceil",
        ("ceil", "floor", "even"),
        "mx only. How a scale becomes a power of two. ceil: up, nothing saturates; floor: the OCP rule, "
        "the block's largest values may saturate; even: down only where rounding to the element's mantissa "
        "still fits.",
    )
    pow2_scale: bool = _option(
        False,
        "bool",
        "fp32 scales only. Round them up to powers of two: scaling then is exact, at up to one bit of range.",
    )
    fprop: str = _choice(
        "low", ("low", "bf16"), "Precision of the forward GEMM; low is that of format.", auto="bf16 with format=bf16"
    )
    dgrad: str = _choice(
        "low", ("low", "bf16"), "Precision of the GEMM that gives the input's gradient.", auto="bf16 with format=bf16"
    )
    wgrad: str = _choice(
        "low",
        ("low", "bf16"),
        "Precision of the GEMM that gives the weight's gradient. bf16 keeps the most precise gradient and saves "
        "the casts along the token axis, at the price of a slower GEMM and a high-precision activation.",
        auto="bf16 with format=bf16 and in weight-only training",
    )
    quantize_activation: bool = _option(
        True,
        "bool",
        "False is weight-only: activations and gradients keep their precision and wgrad runs in bf16. "
        "Saves weight bytes, not GEMM time.",
    )
    stochastic_rounding: bool | None = _option(
        None,
        "bool",
        "Round gradients up or down at random so that their mean is right: removes the bias of few bits, "
        "adds noise (about 2 dB in mxfp4). arXiv 2502.20586.",
        optional=True,
        auto="True for E2M1 gradients",
    )
    hadamard: bool | None = _option(
        None,
        "bool",
        "Transform both operands of wgrad by the same random Hadamard matrix, which leaves their product "
        "as it is and spreads outliers over the block. mx and blockwise only. arXiv 2502.20586.",
        optional=True,
        auto="True where an operand of wgrad is E2M1",
    )
    dgrad_weight: str = _choice(
        "auto",
        ("auto", "direct", "from_rows"),
        "Weight codes used by dgrad. direct: quantized anew along dgrad's axis from the high-precision "
        "weight; from_rows: made from fprop's codes, so one copy is kept or gathered (nothing lost in "
        "mxfp8 with ceil, up to 3 dB in mxfp4). Says nothing for one scale a tensor and for square blocks: "
        "direct stands there.",
        auto="from_rows for rowwise, else direct",
    )
    low_precision_activations: bool = _option(
        True,
        "bool",
        "Keep activations for wgrad as low-precision codes where the recipe allows; False keeps the "
        "original: about twice the bytes.",
    )
    fast_accum: bool = _option(
        True,
        "bool",
        "NVIDIA only. Let fprop's tensor-core sums keep fewer bits: faster, slightly less exact. dgrad and "
        "wgrad never do.",
    )
    flavour: str = _choice(
        "auto",
        ("auto", "ocp", "fnuz"),
        "FP8 encoding: ocp (gfx950, NVIDIA, CPU) or fnuz (gfx942; half the range). Set fnuz to get "
        "gfx942's numbers elsewhere.",
        auto="by device",
    )
    seed: int = _option(
        0,
        "int",
        "Seed of stochastic rounding and of the Hadamard signs: the same seed and step give the same bits.",
        minimum=0,
        maximum=2**63 - 1,
    )
    first_layers_bf16: int = _option(
        0, "int", "Leave this many of the first decoder layers in high precision.", minimum=0
    )
    last_layers_bf16: int = _option(
        0, "int", "Leave this many of the last decoder layers in high precision.", minimum=0
    )
    apply_modules: tuple[str, ...] = _option(
        ("*",),
        "names",
        "Glob patterns on full dotted names of modules to quantize. A full name without wildcards also "
        "selects what is ignored by default.",
    )
    ignored_modules: tuple[str, ...] = _option(
        (),
        "names",
        "Glob patterns of modules to leave in high precision, on top of output heads, embeddings, MoE "
        "routers and LoRA adapters. Wins over apply_modules.",
    )
    converters: tuple[str, ...] = _option(
        ("quantize.linear", "quantize.moe"),
        "names",
        "Kinds of module to convert: linear layers, expert banks (the spellings ending in .mx insist on an MX recipe); "
        "beside these, norms and gated MLPs that run by our fused operations.",
        choices=(
            "quantize.linear",
            "quantize.moe",
            "quantize.linear.mx",
            "quantize.moe.mx",
            "fused.norm",
            "fused.mlp",
        ),
    )

    def __post_init__(self) -> None:
        checked = {name: check(name, getattr(self, name), spec) for name, spec in _SPECS.items()}
        for name, value in resolve(checked).items():
            object.__setattr__(self, name, value)

    @classmethod
    def from_recipe(cls, name: str, **overrides: object) -> QuantConfig:
        """The configuration of a recipe (name, grammar string, or whole `parse` text), with options changed.

        Options that the recipe does not name are derived from the result: ``from_recipe("rowwise",
        format="hybrid")`` is row-scaled with E5M2 gradients.
        """
        settings, written = _parse(name)
        return _build(settings, {**written, **overrides})

    @classmethod
    def parse(cls, text: str) -> QuantConfig:
        """Read what ``str(config)`` writes: a recipe name or grammar string, then ``,option=value`` each.

        Values are written ``true``, ``16``, ``1x128``, ``even``; lists are joined by ``|``, and ``%``, ``,``,
        ``|`` and blanks in an entry are percent-encoded (``%25 %2C %7C %20``).

        Raises:
            TypeError: `text` is not a string.
            ValueError: naming the part that is wrong, what is allowed there and the nearest valid word.
        """
        return cls.from_recipe(text)

    def __str__(self) -> str:
        changed = (f"{name}={to_text(value, _SPECS[name])}" for name, value in self._off_default().items())
        return ",".join((self.recipe, *changed))

    @property
    def recipe(self) -> str:
        """Name, else grammar string, of the recipe with this format, scaling, element formats and blocks."""
        return recipe_text(self._options())

    @property
    def is_mx(self) -> bool:
        """True when scales are E8M0 bytes, one per MX block."""
        return self.scaling == "mx"

    def replace(self, **changes: object) -> QuantConfig:
        """A copy with options changed; options that stood at their default are derived anew from the result.

        So ``QuantConfig().replace(**options) == QuantConfig(**options)``, and ``replace(format="mxfp8")``
        brings MX scaling with it, while options set off their default stay and may contradict a change.
        """
        return _build({**structure(self._options()), **self._off_default()}, changes)

    def as_dict(self) -> dict[str, Any]:
        """Every option, tuples as lists (JSON); ``QuantConfig(**config.as_dict()) == config``."""
        return {name: list(v) if isinstance(v, tuple) else v for name, v in self._options().items()}

    def _options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _SPECS}

    def _off_default(self) -> dict[str, Any]:
        """Options outside the recipe's structure whose value is not the one the recipe gives them."""
        options = self._options()
        defaults = _DEFAULTS | derived_defaults(options)
        return {n: v for n, v in options.items() if n not in STRUCTURE and v != defaults[n]}


_SPECS: dict[str, Mapping[str, Any]] = {f.name: f.metadata for f in dataclasses.fields(QuantConfig)}
_DEFAULTS: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(QuantConfig)}


def _with_known_names(init: Callable[..., None]) -> Callable[..., None]:
    """Make an unknown keyword an error that names the nearest option, which a plain dataclass does not."""

    @functools.wraps(init)
    def __init__(self: QuantConfig, *args: object, **options: object) -> None:
        check_known(options, tuple(_SPECS))
        init(self, *args, **options)

    return __init__


QuantConfig.__init__ = _with_known_names(QuantConfig.__init__)  # type: ignore[method-assign]


def _parse(text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings of the recipe that `text` starts with, and the options written after it."""
    if not isinstance(text, str):
        recipe_settings(text)
    recipe, *parts = text.split(",")
    written: dict[str, Any] = {}
    for part in parts:
        name, equals, value = (piece.strip() for piece in part.partition("="))
        name = name.lower()
        if not equals:
            raise ValueError(f"{part.strip()!r} in {text!r} is not option=value{suggestion(name, _SPECS)}")
        check_known([name], tuple(_SPECS), ValueError)
        if name in written:
            raise ValueError(f"{name} is given twice in {text!r}")
        written[name] = from_text(name, value, _SPECS[name])
    return recipe_settings(recipe), written


def _build(settings: Mapping[str, object], changes: Mapping[str, object]) -> QuantConfig:
    """`settings` overridden by `changes`; a change that could not take effect is an error, not dropped."""
    config = QuantConfig(**{**settings, **changes})
    for gemm in GEMMS:
        if gemm in changes and str(changes[gemm]).lower() == "low" and getattr(config, gemm) == "bf16":
            why = "that leaves this GEMM no low-precision operand"
            other = "format" if config.format == "bf16" else "quantize_activation"
            refuse({gemm: "low", other: getattr(config, other)}, (gemm, other), why)
    return config


def __getattr__(name: str) -> Any:
    # The generators import this module; besides, `python -m lumen_core.options` must not be imported before it runs.
    if name in __all__:
        from lumen_core import options

        return getattr(options, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
