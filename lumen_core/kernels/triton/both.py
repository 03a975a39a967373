"""Quantize a matrix along both dimensions from one read of it; importing this file does not import `triton`.

fprop contracts the last dimension of an activation and wgrad its first, dgrad the last of a gradient and wgrad its
first: a training step needs each in two blockings, the second as the transpose, which is how matrix units take it. All
is equal bit for bit to `lumen_core.casts` on the matrix and on its transpose.
"""

from __future__ import annotations

from typing import Any

import torch

from lumen_core.casts import ROW_BLOCK, TENSOR_BLOCK
from lumen_core.formats import E8M0_DTYPE, ElementFormat
from lumen_core.kernels.query import QuantizeQuery
from lumen_core.kernels.triton import cast
from lumen_core.kernels.triton.amax import absmax
from lumen_core.kernels.triton.launching import INT32_END, check_contiguous, on_device_of, scale_constants

# Kind and block -> rows and columns of a tile, NVIDIA warps; the best of a search on an H200 (docs/benchmarks.md).
_TILES = {
    ("tensor", 1): (64, 128, 4),
    ("column", 1): (64, 128, 4),
    ("row", 32): (32, 128, 2),
    ("row", 128): (128, 128, 4),
}
_ABSMAX_ROWS, _ABSMAX_COLUMNS, _ABSMAX_STEPS = 16, 128, 16
Quantized = tuple[torch.Tensor, torch.Tensor]


def block_unsupported(dtype: torch.dtype, block: tuple[int, int], mx: bool) -> str | None:
    """Why blocks have no kernel of both directions, or None where they have; traceable."""
    if block == TENSOR_BLOCK and dtype not in (torch.bfloat16, torch.float16):
        # Triton 3.6 misplaces a part of the transposed codes of an fp32 tile (seen on an H200).
        return f"input dtype {dtype} with one scale"
    allowed = ((1, 32),) if mx else (TENSOR_BLOCK, ROW_BLOCK, (1, 128))
    return None if block in allowed else f"blocks of {block[0]}x{block[1]}"


def unsupported(q: QuantizeQuery) -> str | None:
    """Why this quantization cannot run here, or None where it can."""
    return cast.unsupported(q) or block_unsupported(q.dtype, q.block, q.mx)


def quantize_both(
    x: torch.Tensor,
    fmt: ElementFormat,
    block: tuple[int, int],
    *,
    rows: bool = True,
    mx: bool = False,
    rounding: str = "ceil",
    margin: int = 0,
    pow2: bool = False,
    amax: torch.Tensor | None = None,
) -> tuple[Quantized | None, Quantized]:
    """`(codes, scale)` of `x` and of `x.t()`, each blocked by `block` along its own last dimension.

    Args:
        x: contiguous `[R, C]`, not empty; dtypes and blocks as `unsupported` says.
        rows: False leaves the first out (None).
        mx, rounding, margin, pow2, amax: as in `lumen_core.tensor.quantize`.

    Returns:
        codes `[R, C]` with their scale, and codes `[C, R]` with theirs. One scale for both with `TENSOR_BLOCK`.
    """
    if block == ROW_BLOCK:
        turned = _cast_columns(x, fmt, pow2)
        return (cast.cast_row(x, fmt, pow2=pow2) if rows else None), turned
    (r, c), size = x.shape, max(block[1], 1)
    codes = torch.empty((r, c), dtype=fmt.dtype, device=x.device) if rows else None
    turned = torch.empty((c, r), dtype=fmt.dtype, device=x.device)
    if block == TENSOR_BLOCK:
        scale = torch.empty((), dtype=torch.float32, device=x.device)
        amax = absmax([x])[0] if amax is None else amax
        _launch(x, codes, scale, turned, scale, amax, fmt, "tensor", size, pow2=pow2, head_room=2.0**margin)
        return (None if codes is None else (codes, scale)), (turned, scale)
    dtype = torch.uint8 if mx else torch.float32
    scale = torch.empty((r, -(-c // size)), dtype=dtype, device=x.device) if rows else None
    turned_scale = torch.empty((c, -(-r // size)), dtype=dtype, device=x.device)
    _launch(
        x, codes, turned_scale if scale is None else scale, turned, turned_scale, x, fmt, "row", size, mx=mx,
        rounding=rounding, pow2=pow2,
    )  # fmt: skip
    if mx:
        scale, turned_scale = None if scale is None else scale.view(E8M0_DTYPE), turned_scale.view(E8M0_DTYPE)
    return (None if codes is None else (codes, scale)), (turned, turned_scale)


def _cast_columns(x: torch.Tensor, fmt: ElementFormat, pow2: bool) -> Quantized:
    """One scale for each column: codes `[C, R]`, scale `[C, 1]`."""
    check_contiguous(x)
    from lumen_core.kernels.triton import both_kernels as kernels

    (r, c), bits = x.shape, torch.zeros(x.shape[1], dtype=torch.int32, device=x.device)
    tiles = -(-c // _ABSMAX_COLUMNS)
    with on_device_of(x):
        kernels.column_absmax[(tiles * -(-r // (_ABSMAX_ROWS * _ABSMAX_STEPS)),)](
            x, bits, r, c, tiles, TR=_ABSMAX_ROWS, TC=_ABSMAX_COLUMNS, STEPS=_ABSMAX_STEPS, num_warps=4,
        )  # fmt: skip
    turned = torch.empty((c, r), dtype=fmt.dtype, device=x.device)
    scale = torch.empty((c, 1), dtype=torch.float32, device=x.device)
    _launch(x, None, scale, turned, scale, bits, fmt, "column", 1, pow2=pow2)
    return turned, scale


def _launch(
    x: torch.Tensor,
    codes: torch.Tensor | None,
    scale: torch.Tensor,
    turned: torch.Tensor,
    turned_scale: torch.Tensor,
    factor: torch.Tensor,
    fmt: ElementFormat,
    kind: str,
    size: int,
    *,
    mx: bool = False,
    rounding: str = "ceil",
    pow2: bool = False,
    head_room: float = 1.0,
) -> None:
    check_contiguous(x)
    from lumen_core.kernels.triton import both_kernels as kernels

    rows, columns = x.shape
    constants, warps = both_constants(
        fmt, kind, size, rows, columns, write_rows=codes is not None, mx=mx, rounding=rounding, pow2=pow2
    )
    column_tiles = -(-columns // constants["TC"])
    with on_device_of(x):
        kernels.cast_both[(-(-rows // constants["TR"]) * column_tiles,)](
            x, turned if codes is None else codes, scale, turned, turned_scale, factor, rows, columns, column_tiles,
            -(-columns // size), -(-rows // size), head_room, **constants, num_warps=warps,
        )  # fmt: skip


def both_constants(
    fmt: ElementFormat,
    kind: str,
    size: int,
    rows: int,
    columns: int,
    *,
    write_rows: bool,
    mx: bool = False,
    rounding: str = "ceil",
    pow2: bool = False,
    hip: bool | None = None,
) -> tuple[dict[str, Any], int]:
    """Compile-time arguments of `cast_both`, and its warps (half as many on AMD, where they are twice as wide)."""
    hip = torch.version.hip is not None if hip is None else hip
    tile_rows, tile_columns, warps = _TILES[kind, size]
    constants = {
        "KIND": kind,
        "ROWS": write_rows,
        "MX": mx,
        "ROUNDING": rounding,
        "EMAX": fmt.emax,
        "MANTISSA": fmt.mantissa_bits,
        "LARGEST_MANTISSA": int((fmt.max / 2.0**fmt.emax - 1.0) * 2**23),
        **scale_constants(fmt, pow2, hip),
        "B": size,
        "TR": tile_rows,
        "TC": tile_columns,
        "TURN_FIRST": size == 32,
        "WIDE": 128 * max(rows, columns) >= INT32_END,
    }
    return constants, warps // 2 if hip else warps
