"""Every Triton kernel of ours with the arguments of a large layer: what `lumen-bench isa` and its tests compile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from lumen_core.attention import RECIPES
from lumen_core.formats import ElementFormat, element_format, flavour_of
from lumen_core.kernels.triton import attention, both, cast, cross_entropy, norm, retile, rope, swiglu
from lumen_core.kernels.triton.launching import TILE, scale_constants, warps

ARCHES = ("gfx942", "gfx950", "sm_90")
HEAD_SIZES = (64, 96, 128, 256)
ATTENTION = ("forward", "backward_queries", "backward_keys")
OPERANDS = ("head_amax", "head_codes", "mx_operand", "row_delta")
_POINTER = {
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
    torch.float8_e4m3fnuz: "*fp8e4b8",
    torch.float8_e5m2fnuz: "*fp8e5b16",
}
_SIZES = dict.fromkeys(("rows", "columns", "column_tiles", "scale_columns"), "i32")
_EVEN = ("n", "rows", "columns", "scale_columns", "turned_scale_columns", "vocabulary")
_BOTH = (("tensor", 1, False), ("row", 32, True), ("row", 128, False), ("column", 1, False))  # kind, block, MX


@dataclass(frozen=True)
class Case:
    """A kernel as a launch specializes it.

    Attributes:
        kernel: the `triton.jit` function.
        types: Triton types of its run-time arguments.
        constants: its compile-time arguments.
        options: warps and stages.
        even: run-time arguments that are addresses or sizes of multiples of 16.
    """

    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, int]
    even: tuple[str, ...]


def _case(kernel: Any, types: dict[str, str], constants: dict[str, Any], warp_count: int) -> Case:
    even = tuple(n for n, kind in types.items() if kind.startswith("*") or n in _EVEN or n.endswith("stride"))
    return Case(kernel, types, constants, {"num_warps": warp_count}, even)


def cases(arch: str, element: str = "e4m3") -> Iterator[tuple[str, Case]]:
    """`(name, case)` of all kernels for an architecture; the slow part, attention, comes last."""
    hip, fmt = arch.startswith("gfx"), element_format(element, flavour_of(arch))
    yield from casts(fmt, hip).items()
    yield from both_directions(fmt, hip).items()
    yield from norms(hip).items()
    yield from others(hip).items()
    for name in OPERANDS:
        yield f"attention {name}", attention_case(name, "", 128, arch)
    for recipe in RECIPES:
        for width in HEAD_SIZES:
            for name in ATTENTION:
                yield f"attention {name} {recipe} {width}", attention_case(name, recipe, width, arch)


def casts(fmt: ElementFormat, hip: bool) -> dict[str, Case]:
    """Casts along rows, largest magnitudes, and codes to codes, of a 4096 x 4096 bf16 matrix."""
    from triton import language as tl

    from lumen_core.kernels.triton import cast_kernels as kernels

    codes, scale, flat_warps = _POINTER[fmt.dtype], scale_constants(fmt, False, hip), warps(TILE, hip)
    matrix = {"x_ptr": "*bf16", "codes_ptr": codes, "scale_ptr": "*fp32"}
    flat = {**matrix, "factor_ptr": "*fp32", "n": "i32", "head_room": "fp32"}
    row = {**matrix, "columns": "i32"}
    moved = {"codes_ptr": codes, "scale_ptr": "*u8", "largest_ptr": "*u8", "out_ptr": codes, "out_scale_ptr": "*fp32"}
    one = {"x_ptr": "*bf16", "out_ptr": "*i32", "n": "i32"}
    many = {"table_ptr": "*i64", "out_ptr": "*i32", "count": "i32"}
    table = {"DTYPE": tl.bfloat16, "ALIGNED": True, "COUNT_BLOCK": 64, "BLOCK": TILE, "STEPS": 8}
    out = {
        "flat at a scale": _case(kernels.cast_flat, flat, {**scale, "FROM_AMAX": False, "BLOCK": TILE}, flat_warps),
        "flat at an amax": _case(kernels.cast_flat, flat, {**scale, "FROM_AMAX": True, "BLOCK": TILE}, flat_warps),
        "row": _case(kernels.cast_rows, row, {**scale, "ONE_PASS": True, "BLOCK": 4096}, warps(4096, hip)),
        "long row": _case(kernels.cast_rows, row, {**scale, "ONE_PASS": False, "BLOCK": TILE}, flat_warps),
        "absmax of one": _case(kernels.absmax_of_one, one, {"BLOCK": TILE, "STEPS": 8}, flat_warps),
        "absmax of many": _case(kernels.absmax_of_many, many, table, flat_warps),
    }
    for block, mx in [(b, True) for b in cast.MX_BLOCKS] + [(b, False) for b in cast.FP32_BLOCKS]:
        constants = cast.block_constants(fmt, block, 4096, 4096, mx=mx, rounding="ceil", pow2=False, hip=hip)
        types = {**matrix, "scale_ptr": "*u8" if mx else "*fp32", **_SIZES}
        name = f"{'mx' if mx else 'fp32'} {block}"
        out[name] = _case(kernels.cast_blocks, types, constants, warps(constants["TR"] * constants["TC"], hip))
    for transposed, to in ((True, None), (False, fmt), (True, fmt)):
        constants = retile.retile_constants(4096, 4096, transposed, to, hip)
        name = "transpose bytes" if to is None else f"mx to tensor, transposed={transposed}"
        types = {**(dict.fromkeys(moved, "*u8") if to is None else moved), **_SIZES}
        out[name] = _case(kernels.retile, types, constants, warps(constants["TR"] * constants["TC"], hip))
    return out


def both_directions(fmt: ElementFormat, hip: bool) -> dict[str, Case]:
    """Casts along both dimensions of the same matrix."""
    from lumen_core.kernels.triton import both_kernels as kernels

    columns = {"x_ptr": "*bf16", "out_ptr": "*i32", **dict.fromkeys(("rows", "columns", "column_tiles"), "i32")}
    out = {"absmax of columns": _case(kernels.column_absmax, columns, {"TR": 16, "TC": 128, "STEPS": 16}, 4)}
    for kind, size, mx in _BOTH:
        codes, scale = _POINTER[fmt.dtype], "*u8" if mx else "*fp32"
        types = {"x_ptr": "*bf16", "codes_ptr": codes, "scale_ptr": scale, "turned_ptr": codes}
        types |= {"turned_scale_ptr": scale, "factor_ptr": "*i32" if kind == "column" else "*fp32", **_SIZES}
        types |= {"turned_scale_columns": "i32", "head_room": "fp32"}
        for rows in (False,) if kind == "column" else (True, False):
            constants, count = both.both_constants(fmt, kind, size, 4096, 4096, write_rows=rows, mx=mx, hip=hip)
            out[f"both {kind} {size}, rows={rows}"] = _case(kernels.cast_both, types, constants, count)
    return out


def norms(hip: bool) -> dict[str, Case]:
    """RMSNorm and LayerNorm, forward and backward, at several widths."""
    from lumen_core.kernels.triton import norm_kernels as kernels

    out: dict[str, Case] = {}
    sizes = {"rows": "i32", "columns": "i32"}
    forward = dict.fromkeys(("x_ptr", "weight_ptr", "bias_ptr", "y_ptr"), "*bf16")
    forward |= {"mean_ptr": "*fp32", "rstd_ptr": "*fp32", **sizes, "eps": "fp32"}
    backward = dict.fromkeys(("grad_ptr", "x_ptr", "weight_ptr", "dx_ptr"), "*bf16")
    backward |= dict.fromkeys(("mean_ptr", "rstd_ptr", "dweight_ptr", "dbias_ptr"), "*fp32") | sizes | {"tiles": "i32"}
    for columns in (128, 4096, 8192, norm.LONGEST_ROW):
        for layer in (False, True):
            fixed, count = {"CENTER": layer, "BIAS": layer, **norm.tile(columns)}, norm.norm_warps(columns, hip)
            out[f"norm {columns} layer={layer}"] = _case(kernels.norm_forward, forward, fixed, count)
            out[f"norm backward {columns} layer={layer}"] = _case(kernels.norm_backward, backward, fixed, count)
    return out


def others(hip: bool) -> dict[str, Case]:
    """SwiGLU, rotary embedding and cross-entropy."""
    from lumen_core.kernels.triton import cross_entropy_kernels, rope_kernels, swiglu_kernels

    out: dict[str, Case] = {}
    sizes = dict.fromkeys(("rows", "columns", "column_tiles", "gate_stride", "up_stride"), "i32")
    forward = dict.fromkeys(("gate_ptr", "up_ptr", "out_ptr"), "*bf16") | sizes
    backward = dict.fromkeys(("grad_ptr", "gate_ptr", "up_ptr", "dgate_ptr", "dup_ptr"), "*bf16") | sizes
    backward["grad_stride"] = "i32"
    for columns in (512, 14336):
        fixed, count = swiglu.tile(columns), swiglu.tile_warps(hip)
        out[f"swiglu {columns}"] = _case(swiglu_kernels.swiglu_forward, forward, fixed, count)
        out[f"swiglu backward {columns}"] = _case(swiglu_kernels.swiglu_backward, backward, fixed, count)
    heads = dict.fromkeys(("q_ptr", "k_ptr", "q_out_ptr", "k_out_ptr"), "*bf16") | {"cos_ptr": "*fp32"}
    heads |= {"sin_ptr": "*fp32"} | dict.fromkeys(("positions", "q_heads", "k_heads", "q_stride", "k_stride"), "i32")
    for half, dim in ((64, 128), (32, 64), (32, 128)):
        fixed = rope.constants(32, half, dim)
        count = rope.tile_warps(fixed, hip)
        out[f"rope {2 * half} of {dim}"] = _case(rope_kernels.rope, heads, {"INVERSE": True, **fixed}, count)
    logits = {"logits_ptr": "*bf16", "targets_ptr": "*i64", "factor_ptr": "*fp32", "loss_ptr": "*fp32"}
    logits |= {"gradient_ptr": "*bf16", "vocabulary": "i32", "ignore_index": "i32"}
    logits |= {"smoothing": "fp32", "softcap": "fp32"}
    for options in ((0.0, None, False), (0.0, None, True), (0.1, 30.0, True)):
        fixed = cross_entropy.constants(128256, *options)
        count = cross_entropy.block_warps(fixed["BLOCK"], hip)
        out[f"cross-entropy {options}"] = _case(cross_entropy_kernels.cross_entropy, logits, fixed, count)
    return out


def attention_case(name: str, recipe: str, width: int, arch: str) -> Case:
    """A kernel of attention (`ATTENTION`, `OPERANDS`) for heads of `width`, any number of tokens."""
    from lumen_core.kernels.triton import attention_kernels, attention_operand_kernels

    hip, fmt = arch.startswith("gfx"), element_format("e4m3", flavour_of(arch))
    codes = _POINTER[fmt.dtype]
    constants = {"GROUP": 4, "RECIPE": recipe, **attention.format_constants(fmt, hip), "TURNED": recipe == "fp8"}
    constants |= {"D": width, "BD": attention.padded(width), "HAS_LSE": False, "ROWS": 64}
    constants |= dict.fromkeys(("PLAIN", "BY_CHANNEL", "BY_TOKEN"), True)
    if name in ATTENTION:
        kernel = getattr(attention_kernels, name)
        sizes, options = attention.blocks(name, recipe, attention.padded(width), hip)
        constants |= sizes
        operand = codes if recipe == "fp8" else "*bf16"
    else:
        kernel = getattr(attention_operand_kernels, name)
        constants["TURNED"] = True
        options, operand = {"num_warps": 4}, "*bf16"
    known = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "g_ptr", "kt_ptr", "qt_ptr", "gt_ptr"), operand)
    known |= dict.fromkeys(("first_ptr", "last_ptr", "begin_ptr", "end_ptr", "amax_ptr"), "*i32")
    known |= dict.fromkeys(("out_ptr", "dq_ptr", "dk_ptr", "dv_ptr", "x_ptr", "grad_ptr"), "*bf16")
    known |= dict.fromkeys(("by_channel_ptr", "by_token_ptr"), "*bf16")
    known |= dict.fromkeys(("codes_ptr", "turned_ptr"), codes) | {"scale": "fp32"}
    names = kernel.arg_names
    constants = {n: value for n, value in constants.items() if n in names}
    types = {n: known.get(n, "*fp32" if n.endswith("_ptr") else "i32") for n in names if n not in constants}
    odd = ("queries", "keys", "tokens", "bounds_batch", "key_bounds_batch", "scale")
    return Case(kernel, types, constants, options, tuple(n for n in types if n not in odd))
