"""What an option left open becomes, and which options contradict each other.

Works on plain mappings ``option name -> checked value`` so that it depends on nothing. `resolve` also brings
a configuration into one canonical form: whatever means the same ends up equal.

Sources: MX blocks of 32 with E8M0 scales, OCP Microscaling Formats (MX) specification v1.0; stochastic
rounding and the random Hadamard transform for MXFP4, arXiv 2502.20586; scales rounded up, arXiv 2506.08027.
"""

from __future__ import annotations

from typing import Any, NoReturn

Options = dict[str, Any]

OPERANDS = ("activation", "weight", "gradient")
ELEMENTS: dict[str, tuple[str, str, str]] = {  # format -> element format of activation, weight, gradient
    "fp8_e4m3": ("e4m3", "e4m3", "e4m3"),
    "hybrid": ("e4m3", "e4m3", "e5m2"),
    "fp8_e5m2": ("e5m2", "e5m2", "e5m2"),
    "mxfp8": ("e4m3", "e4m3", "e4m3"),
    "mxfp4": ("e2m1", "e2m1", "e2m1"),
    "bf16": ("bf16", "bf16", "bf16"),
}
AUTO_SCALING = {
    "fp8_e4m3": "dynamic",
    "hybrid": "delayed",
    "fp8_e5m2": "dynamic",
    "mxfp8": "mx",
    "mxfp4": "mx",
    "bf16": "none",
}
BLOCK_SIZES = (32, 64, 128, 256)  # of fp32-scaled blocks; MX blocks are 32
MX_BLOCK = 32
GEMMS = ("fprop", "dgrad", "wgrad")
DELAYED_ONLY = {"amax_algo": "max", "history_len": 16, "margin": 0, "reduce_amax": False}
_CONVERTERS = ("quantize.linear", "quantize.moe", "fused.norm", "fused.mlp")


def refuse(options: Options, names: tuple[str, ...], why: str) -> NoReturn:
    """Raise the ValueError of a contradiction: every option in `names` with its value, and why."""
    pairs = [f"{name}={options[name]!r}" for name in names]
    together = ", ".join(pairs[:-1]) + f" and {pairs[-1]}"
    raise ValueError(f"{together} contradict each other: {why}")


def canonical_format(scaling: str, elements: tuple[str, str, str]) -> str:
    """The format whose element formats are nearest to `elements` among those that `scaling` can have."""
    formats = {"mx": ("mxfp8", "mxfp4"), "none": ("bf16",)}.get(scaling, ("fp8_e4m3", "hybrid", "fp8_e5m2"))
    return min(formats, key=lambda name: sum(a != b for a, b in zip(ELEMENTS[name], elements, strict=True)))


def _resolve_format(o: Options) -> None:
    fmt = o["format"]
    if o["scaling"] == "auto":
        o["scaling"] = AUTO_SCALING[fmt]
    scaling = o["scaling"]
    if fmt == "bf16" and scaling != "none":
        refuse(
            o,
            ("format", "scaling"),
            "bf16 operands have no scale; choose a low-precision format or scaling='none'",
        )
    if fmt != "bf16" and scaling == "none":
        refuse(
            o,
            ("format", "scaling"),
            "low-precision operands need a scale; use recipe='bf16' to quantize nothing",
        )
    if fmt.startswith("mx") and scaling != "mx":
        why = f"MX formats scale every 32 values by E8M0; use scaling='mx', or format='fp8_e4m3' for {scaling!r}"
        refuse(o, ("format", "scaling"), why)
    for operand, default in zip(OPERANDS, ELEMENTS[fmt], strict=True):
        name = f"{operand}_format"
        if o[name] == "auto":
            o[name] = default
        if fmt == "bf16" and o[name] != "bf16":
            refuse(o, ("format", name), "bf16 quantizes nothing; choose a low-precision format")
        if fmt != "bf16" and o[name] == "bf16":
            why = "an operand has one format in all GEMMs; keep a GEMM in bf16 with fprop, dgrad or wgrad"
            refuse(o, ("format", name), f"{why}, or activations and gradients with quantize_activation=False")
        if o[name] == "e2m1" and scaling != "mx":
            refuse(o, (name, "scaling"), "E2M1 has 4 bits and needs a scale per 32 values; use scaling='mx'")
    o["format"] = canonical_format(scaling, tuple(o[f"{operand}_format"] for operand in OPERANDS))


def default_blocks(scaling: str, size: int = 128) -> dict[str, tuple[int, int]]:
    """Blocks (rows, columns along the contracted axis) of each operand; 0 is "all of it"."""
    square = (size, size)
    activation, weight, gradient = {
        "blockwise": ((1, size), square, (1, size)),
        "mx": ((1, MX_BLOCK),) * 3,
        "rowwise": ((1, 0),) * 3,
    }.get(scaling, ((0, 0),) * 3)
    return {"activation_block": activation, "weight_block": weight, "gradient_block": gradient}


def _resolve_blocks(o: Options) -> None:
    scaling = o["scaling"]
    names = [f"{operand}_block" for operand in OPERANDS]
    given = [name for name in names if o[name] is not None]
    size = 128
    if scaling == "blockwise" and given:
        size = o[given[0]][1]
        if size not in BLOCK_SIZES:
            near = min(BLOCK_SIZES, key=lambda b: abs(b - size))
            sizes = ", ".join(map(str, BLOCK_SIZES))
            refuse(o, (given[0], "scaling"), f"the block size must be one of {sizes} (nearest: {near})")
    defaults = default_blocks(scaling, size)
    for name in names:
        choices = [defaults[name]]
        if name == "weight_block" and scaling in ("blockwise", "mx"):
            choices = [(1, size), (size, size)] if scaling == "blockwise" else [(1, MX_BLOCK), (MX_BLOCK, MX_BLOCK)]
        if o[name] is None:
            o[name] = defaults[name]
        elif o[name] not in choices and scaling == "blockwise" and o[name][1] != size:
            refuse(
                o,
                (given[0], name),
                "one block size serves all three operands, as their products share scales",
            )
        elif o[name] not in choices:
            near = min(choices, key=lambda b: abs(b[0] - o[name][0]) + abs(b[1] - o[name][1]))
            allowed = " or ".join(map(str, choices))
            refuse(o, (name, "scaling"), f"this block must be {allowed} there (nearest: {near})")


def structure(o: Options) -> Options:
    """The fewest settings that give `o` its format, scaling, element formats and blocks."""
    short = {"format": o["format"]}
    if o["scaling"] != AUTO_SCALING[o["format"]]:
        short["scaling"] = o["scaling"]
    for operand, default in zip(OPERANDS, ELEMENTS[o["format"]], strict=True):
        if o[f"{operand}_format"] != default:
            short[f"{operand}_format"] = o[f"{operand}_format"]
    if o["weight_block"] != default_blocks(o["scaling"])["weight_block"]:
        short["weight_block"] = o["weight_block"]  # fixes the block size of the other two as well
    return short


STRUCTURE = ("format", "scaling", *(f"{x}_format" for x in OPERANDS), *(f"{x}_block" for x in OPERANDS))
"""The options that a recipe name or grammar string stands for."""


def derived_defaults(o: Options) -> Options:
    """Values that options outside `STRUCTURE` take when left open, where these depend on others.

    `o` has its structure resolved. A GEMM without a low-precision operand counts as bf16, so that reading one
    field tells how it runs.
    """
    nothing_low = o["format"] == "bf16"
    gemms = dict.fromkeys(GEMMS, "bf16" if nothing_low else "low")
    if not o["quantize_activation"]:
        gemms["wgrad"] = "bf16"  # neither of its operands is a weight
    low = {gemm: gemms[gemm] == "low" and o[gemm] == "low" for gemm in GEMMS}
    low_gradient = o["quantize_activation"] and (low["dgrad"] or low["wgrad"])
    e2m1_in_wgrad = "e2m1" in (o["activation_format"], o["gradient_format"])
    return {
        **gemms,
        "stochastic_rounding": low_gradient and o["gradient_format"] == "e2m1",
        "hadamard": low["wgrad"] and e2m1_in_wgrad,
        "dgrad_weight": "from_rows" if o["scaling"] == "rowwise" else "direct",
    }


def _resolve_rest(o: Options) -> None:
    defaults = derived_defaults(o)
    for gemm in GEMMS:
        if defaults[gemm] == "bf16":
            o[gemm] = "bf16"
    for name in ("stochastic_rounding", "hadamard"):
        if o[name] is None:
            o[name] = defaults[name]
    if o["dgrad_weight"] == "auto":
        o["dgrad_weight"] = defaults["dgrad_weight"]


def _resolve_converters(o: Options) -> None:
    names = o["converters"]
    if not any(name.startswith("quantize.") for name in names):
        given = ", ".join(names)
        raise ValueError(f"converters=({given}) quantizes nothing: name quantize.linear, quantize.moe or both, too")
    for name in names:
        if name.endswith(".mx") and o["scaling"] != "mx":
            refuse(o, ("converters", "scaling"), f"{name} is for MX recipes; use {name[:-3]!r} or an MX recipe")
    plain = {name.removesuffix(".mx") for name in names}
    o["converters"] = tuple(name for name in _CONVERTERS if name in plain)


def _refuse_contradictions(o: Options) -> None:
    scaling = o["scaling"]
    for name, default in DELAYED_ONLY.items():
        if o[name] != default and scaling != "delayed":
            refuse(o, (name, "scaling"), f"{name} shapes an amax history, which only scaling='delayed' keeps")
    if o["scale_rounding"] != "ceil" and scaling != "mx":
        why = "only E8M0 scales, those of scaling='mx', are rounded that way; pow2_scale does it to fp32 scales"
        refuse(o, ("scale_rounding", "scaling"), why)
    if o["pow2_scale"] and scaling == "mx":
        refuse(o, ("pow2_scale", "scaling"), "E8M0 scales are powers of two already; choose their scale_rounding")
    if o["pow2_scale"] and scaling == "none":
        refuse(o, ("pow2_scale", "scaling"), "bf16 operands have no scale")
    if not o["quantize_activation"]:
        _check_weight_only(o)
    if o["format"] != "bf16" and {o[gemm] for gemm in GEMMS} == {"bf16"}:
        gemms = GEMMS if o["quantize_activation"] else (*GEMMS, "quantize_activation")
        refuse(o, ("format", *gemms), "no GEMM is left in low precision; use recipe='bf16' for that")
    if o["stochastic_rounding"]:
        _check_stochastic_rounding(o)
    if o["hadamard"]:
        _check_hadamard(o)
    _check_dgrad_weight(o)
    if not o["apply_modules"]:
        raise ValueError("apply_modules=() selects nothing: give at least one pattern, or use recipe='bf16'")


def _check_weight_only(o: Options) -> None:
    if o["format"] == "bf16":
        refuse(
            o,
            ("quantize_activation", "format"),
            "bf16 quantizes nothing, so there is no weight-only form of it",
        )
    defaults = dict(zip(OPERANDS, ELEMENTS[o["format"]], strict=True))
    for operand in ("activation", "gradient"):
        if o[f"{operand}_format"] != defaults[operand]:
            refuse(
                o,
                ("quantize_activation", f"{operand}_format"),
                f"weight-only training keeps every {operand} as is",
            )


def _check_stochastic_rounding(o: Options) -> None:
    why = "it rounds low-precision gradients, and there are none"
    if o["format"] == "bf16":
        refuse(o, ("stochastic_rounding", "format"), why)
    if not o["quantize_activation"]:
        refuse(o, ("stochastic_rounding", "quantize_activation"), why)
    if o["dgrad"] == o["wgrad"] == "bf16":
        refuse(o, ("stochastic_rounding", "dgrad", "wgrad"), why)


def _check_hadamard(o: Options) -> None:
    if o["scaling"] not in ("mx", "blockwise"):
        why = "it spreads outliers within a block, so it needs scaling='mx' or 'blockwise'"
        refuse(o, ("hadamard", "scaling"), why)
    why = "it transforms the low-precision operands of wgrad, and there are none"
    if not o["quantize_activation"]:
        refuse(o, ("hadamard", "quantize_activation"), why)
    if o["wgrad"] == "bf16":
        refuse(o, ("hadamard", "wgrad"), why)


def _check_dgrad_weight(o: Options) -> None:
    choice, scaling = o["dgrad_weight"], o["scaling"]
    if scaling == "rowwise" and choice == "direct":
        why = "the weight is kept once, as rows; dgrad folds their scales into the gradient; use 'from_rows'"
        refuse(o, ("dgrad_weight", "scaling"), why)
    if choice == "from_rows" and scaling in ("none", "dynamic", "delayed"):
        why = "codes with one scale a tensor serve both GEMMs, so nothing is made from rows; use 'direct'"
        refuse(o, ("dgrad_weight", "scaling"), why if scaling != "none" else "bf16 quantizes no weight")
    if choice == "from_rows" and o["weight_block"][0] > 1:
        why = "a square block is exact under transposition, so nothing is made from rows; use 'direct'"
        refuse(o, ("dgrad_weight", "weight_block"), why)


def resolve(options: Options) -> Options:
    """All options, concrete and in canonical form, or a ValueError that names those in contradiction."""
    o = dict(options)
    _resolve_format(o)
    _resolve_blocks(o)
    _resolve_rest(o)
    _resolve_converters(o)
    _refuse_contradictions(o)
    return o
