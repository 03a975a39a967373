"""Named recipes and the recipe grammar: two spellings of format, scaling, element formats and blocks.

A grammar string is ``<strategy>_<granularity>_<input>_<weight>_<grad>``, in any case, for example
``dynamic_MX-1-1-32_E4M3_E4M3_E5M2`` or ``delayed_tensor_e4m3_e4m3_e4m3``:

- strategy: ``dynamic`` (scales from the values themselves) or ``delayed`` (from the amax history; per tensor
  only);
- granularity: ``tensor`` (``pertensor``), ``row`` (``perchannel``), ``block-1-<rows>-<B>`` with B in 32 64
  128 256 and rows of the weight block 1 or B (``block`` is ``block-1-128-128``), ``mx-1-1-32`` (``mx``) or
  ``mx-1-32-32``. The numbers are rows of the activation block, rows of the weight block and columns, along
  the contracted axis;
- input, weight, grad: ``e4m3``, ``e5m2``, and with ``mx`` also ``e2m1``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from lumen_core.rules import BLOCK_SIZES, ELEMENTS, OPERANDS, Options, canonical_format, structure
from lumen_core.values import listed, nearest, suggestion

RECIPES: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        name: MappingProxyType(settings)
        for name, settings in {
            "bf16": {"format": "bf16"},
            "tensorwise": {"format": "fp8_e4m3", "scaling": "dynamic"},
            "delayed": {"format": "fp8_e4m3", "scaling": "delayed"},
            "hybrid": {"format": "hybrid", "scaling": "delayed"},
            "rowwise": {"format": "fp8_e4m3", "scaling": "rowwise"},
            "blockwise": {"format": "fp8_e4m3", "scaling": "blockwise"},
            "mxfp8": {"format": "mxfp8", "scaling": "mx"},
            "mxfp8-32x32": {"format": "mxfp8", "scaling": "mx", "weight_block": (32, 32)},
            "mxfp4": {"format": "mxfp4", "scaling": "mx"},
        }.items()
    }
)
"""Settings behind each recipe name; every option not listed is at its default."""

RECIPE_NOTES: Mapping[str, str] = MappingProxyType(
    {
        "bf16": "Nothing is quantized: the baseline to compare with.",
        "tensorwise": "One fp32 scale a tensor, from the tensor itself. Fastest GEMMs; outliers cost precision.",
        "delayed": "One fp32 scale a tensor, from earlier steps' amax: steady; a new outlier saturates once.",
        "hybrid": "`delayed` with E5M2 gradients: 128 times the range, one bit of mantissa less (4 dB).",
        "rowwise": "One fp32 scale a token and a weight row: an outlier token does not coarsen the others.",
        "blockwise": "Blocks of 1x128 (activations, gradients) and 128x128 (weights) with fp32 scales.",
        "mxfp8": "MX: one power-of-two (E8M0) scale per 32 values. The widest range; native on gfx950.",
        "mxfp8-32x32": "`mxfp8` with 32x32 weight blocks: one copy for fprop and dgrad, fewest bytes in FSDP2.",
        "mxfp4": "MX with 4-bit values: stochastic rounding of gradients, random Hadamard in wgrad.",
    }
)

_STRATEGIES = ("dynamic", "delayed")
_PARTS = ("strategy", "granularity", "input", "weight", "grad")
_SHAPE = "_".join(f"<{part}>" for part in _PARTS)


def _granularities() -> dict[str, tuple[str, tuple[int, int]]]:
    """Granularity word -> scaling and weight block; the first word of equal entries is the canonical one."""
    words = {"tensor": ("dynamic", (0, 0)), "row": ("rowwise", (1, 0))}
    for size in BLOCK_SIZES:
        for rows in (size, 1):
            words[f"block-1-{rows}-{size}"] = ("blockwise", (rows, size))
    words["mx-1-1-32"] = ("mx", (1, 32))
    words["mx-1-32-32"] = ("mx", (32, 32))
    aliases = {"pertensor": "tensor", "perchannel": "row", "block": "block-1-128-128", "mx": "mx-1-1-32"}
    return words | {alias: words[word] for alias, word in aliases.items()}


_GRANULARITIES = MappingProxyType(_granularities())


def _unknown_recipe(text: str, word: str) -> ValueError:
    hint = suggestion(word, RECIPES)
    if word in ELEMENTS:
        hint = f" ({word} is a format: give it as format={word!r})"
    return ValueError(f"recipe {text!r} is unknown{hint}; use one of {listed(RECIPES)}, or {_SHAPE}")


def recipe_settings(text: str) -> Options:
    """The options behind a recipe name or grammar string.

    Raises:
        TypeError: `text` is not a string.
        ValueError: naming the part that is unknown, what is allowed there and the nearest valid word.
    """
    if not isinstance(text, str):
        raise TypeError(f"recipe={text!r} has type {type(text).__name__}: a recipe is one of {listed(RECIPES)}")
    word = text.strip().lower()
    if word in RECIPES:
        return dict(RECIPES[word])
    parts = word.split("_")
    if word in ELEMENTS or (nearest(parts[0], _STRATEGIES) is None and len(parts) != len(_PARTS)):
        raise _unknown_recipe(text, word)
    if len(parts) != len(_PARTS):
        raise ValueError(f"recipe {text!r} has {len(parts)} parts where {_SHAPE} has {len(_PARTS)}")
    elements = ("e4m3", "e5m2", "e2m1")
    for part, value, words in zip(_PARTS, parts, (_STRATEGIES, _GRANULARITIES, *[elements] * 3), strict=True):
        if value not in words:
            hint = suggestion(value, words)
            raise ValueError(f"recipe {text!r}: {part} {value!r} is unknown{hint}; use one of {listed(words)}")
    strategy, granularity, *formats = parts
    scaling, weight_block = _GRANULARITIES[granularity]
    if strategy == "delayed":
        if scaling != "dynamic":
            raise ValueError(
                f"recipe {text!r}: strategy 'delayed' and granularity {granularity!r} contradict each other: "
                f"an amax history is kept per tensor; use 'delayed_tensor' or 'dynamic_{granularity}'"
            )
        scaling = "delayed"
    operands = {f"{operand}_format": value for operand, value in zip(OPERANDS, formats, strict=True)}
    fmt = canonical_format(scaling, tuple(formats))
    return _settings({"format": fmt, "scaling": scaling, "weight_block": weight_block, **operands})


def _settings(options: Options) -> Options:
    """The fewest settings with these options' structure; scaling is named, as a recipe does not leave it open."""
    named = {} if options["format"] == "bf16" else {"scaling": options["scaling"]}
    return {**structure(options), **named}


def recipe_text(options: Options) -> str:
    """The recipe name, else the grammar string, of resolved options."""
    settings = _settings(options)
    for name, known in RECIPES.items():
        if known == settings:
            return name
    strategy, scaling = "dynamic", options["scaling"]
    if scaling == "delayed":
        strategy, scaling = "delayed", "dynamic"
    wanted = (scaling, options["weight_block"])
    granularity = next(word for word, meaning in _GRANULARITIES.items() if meaning == wanted)
    return "_".join((strategy, granularity, *(options[f"{operand}_format"] for operand in OPERANDS)))
