"""One-pass quantization on a GPU, equal bit for bit to `lumen_core.casts` (NaN in fp32 scales up to its payload).

Launchers for contiguous fp32, bf16 or fp16 matrices on an NVIDIA or AMD device and the 8-bit formats that the device
casts to in hardware: `unsupported` says what is outside. They wait for nothing on the host. Importing this file does
not import `triton`; calling a launcher does.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from lumen_core import casts
from lumen_core.casts import ROW_BLOCK, TENSOR_BLOCK
from lumen_core.formats import E8M0_DTYPE, ElementFormat, arch_of, flavour_of
from lumen_core.kernels.query import QuantizeQuery
from lumen_core.kernels.triton.amax import absmax
from lumen_core.kernels.triton.launching import (
    DTYPES,
    INT32_END,
    TILE,
    check_contiguous,
    has_triton,
    on_device_of,
    power_of_two,
    scale_constants,
    warps,
)

MX_BLOCKS = ((1, 32), (32, 32))
FP32_BLOCKS = ((1, 32), (1, 64), (1, 128), (1, 256), (32, 32), (64, 64), (128, 128))

_ROW_ONE_PASS = 16384  # longest row kept in registers between its amax and its cast


# --- what can run -----------------------------------------------------------------------------------------------------


@functools.cache
def _arch() -> str:
    return arch_of("cuda")


def format_unsupported(fmt: ElementFormat, arch: str) -> str | None:
    """Why a device of `arch` does not cast to `fmt` in hardware, or None where it does."""
    if fmt.packed:
        return "4-bit elements"
    if arch.startswith("sm_"):
        if int(arch.removeprefix("sm_")) < 89:
            return f"{arch} has no FP8 casts"
    elif not arch.startswith(("gfx94", "gfx95")):
        return f"{arch} has no FP8 casts"
    if fmt.flavour != flavour_of(arch):
        return f"{fmt.flavour.upper()} elements on {arch}"
    return None


def unsupported(q: QuantizeQuery) -> str | None:
    """Why this quantization cannot run here, or None where it can."""
    if q.device_type != "cuda":
        return "needs a GPU"
    if torch.compiler.is_compiling():
        return "torch.compile fuses the reference"
    if not has_triton():
        return "triton is not installed"
    reason = format_unsupported(q.fmt, _arch())
    if reason is not None:
        return reason
    if q.noise:
        return "stochastic rounding"
    if q.dtype not in DTYPES:
        return f"input dtype {q.dtype}"
    if not q.plain:
        return "a tensor subclass, or one that autograd follows"
    if q.elements == 0:
        return "an empty tensor"
    if q.given_amax and q.block != TENSOR_BLOCK:
        return "scales of rows from an amax that the caller brings"
    if q.block not in (MX_BLOCKS if q.mx else (TENSOR_BLOCK, ROW_BLOCK, *FP32_BLOCKS)):
        return f"blocks of {q.block[0]}x{q.block[1]}"
    return None


def quantize(
    x: torch.Tensor,
    fmt: ElementFormat,
    block: tuple[int, int],
    *,
    mx: bool = False,
    rounding: str = "ceil",
    margin: int = 0,
    pow2: bool = False,
    amax: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scale as `lumen_core.tensor.quantize` gives them, with its arguments."""
    if mx:
        return cast_mx(x, fmt, block, rounding)
    if block == TENSOR_BLOCK:
        return cast_tensor_by_amax(x, fmt, absmax([x])[0] if amax is None else amax, margin=margin, pow2=pow2)
    if block == ROW_BLOCK:
        return cast_row(x, fmt, pow2=pow2)
    return cast_block(x, fmt, block, pow2=pow2)


# --- casts ------------------------------------------------------------------------------------------------------------


def cast_tensor(x: torch.Tensor, fmt: ElementFormat, scale: torch.Tensor) -> torch.Tensor:
    """Codes of `x` (any shape) at a known scale, 0-dim fp32 on x's device; larger values saturate."""
    codes = torch.empty(x.shape, dtype=fmt.dtype, device=x.device)
    _cast_flat(x, codes, fmt, scale, scale, from_amax=False)
    return codes


def cast_tensor_by_amax(
    x: torch.Tensor, fmt: ElementFormat, amax: torch.Tensor, *, margin: int = 0, pow2: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of `x` (any shape) and the 0-dim fp32 scale that belongs to a known amax, computed in the same launch."""
    if x.numel() == 0:
        return torch.empty(x.shape, dtype=fmt.dtype, device=x.device), casts.scale_from_amax(amax, fmt, margin, pow2)
    codes = torch.empty(x.shape, dtype=fmt.dtype, device=x.device)
    scale = torch.empty((), dtype=torch.float32, device=x.device)
    _cast_flat(x, codes, fmt, amax.to(x.device, non_blocking=True), scale, from_amax=True, margin=margin, pow2=pow2)
    return codes, scale


def cast_row(x: torch.Tensor, fmt: ElementFormat, *, pow2: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """One fp32 scale a row: codes `[R, C]`, scale `[R, 1]`."""
    check_contiguous(x)
    rows, columns = x.shape
    if x.numel() == 0:
        return casts.quantize_row(x, fmt, pow2=pow2)
    from lumen_core.kernels.triton import cast_kernels as kernels

    codes = torch.empty((rows, columns), dtype=fmt.dtype, device=x.device)
    scale = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    one_pass = columns <= _ROW_ONE_PASS
    block = max(power_of_two(columns), 64) if one_pass else TILE
    with on_device_of(x):
        kernels.cast_rows[(rows,)](
            x, codes, scale, columns, **scale_constants(fmt, pow2), ONE_PASS=one_pass, BLOCK=block,
            num_warps=warps(block),
        )  # fmt: skip
    return codes, scale


def cast_block(
    x: torch.Tensor, fmt: ElementFormat, block: tuple[int, int], *, pow2: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """One fp32 scale for each block (`FP32_BLOCKS`): codes `[R, C]`, scale `[ceil(R / rows), ceil(C / columns)]`."""
    return _cast_blocks(x, fmt, block, mx=False, rounding="ceil", pow2=pow2)


def cast_mx(
    x: torch.Tensor, fmt: ElementFormat, block: tuple[int, int] = (1, 32), rounding: str = "ceil"
) -> tuple[torch.Tensor, torch.Tensor]:
    """One E8M0 scale for each block (`MX_BLOCKS`): codes `[R, C]`, scale `[ceil(R / rows), ceil(C / columns)]`.

    Raises:
        ValueError: unknown rounding.
    """
    if rounding not in ("ceil", "floor", "even"):
        raise ValueError(f"scale_rounding={rounding!r}: must be one of ceil, floor, even")
    codes, scale = _cast_blocks(x, fmt, block, mx=True, rounding=rounding, pow2=False)
    return codes, scale.view(E8M0_DTYPE)


def _cast_flat(
    x: torch.Tensor,
    codes: torch.Tensor,
    fmt: ElementFormat,
    factor: torch.Tensor,
    scale: torch.Tensor,
    *,
    from_amax: bool,
    margin: int = 0,
    pow2: bool = False,
) -> None:
    check_contiguous(x)
    n = x.numel()
    if n == 0:
        return
    from lumen_core.kernels.triton import cast_kernels as kernels

    with on_device_of(x):
        kernels.cast_flat[(-(-n // TILE),)](
            x, codes, factor, scale, n, 2.0**margin, FROM_AMAX=from_amax, **scale_constants(fmt, pow2), BLOCK=TILE,
            num_warps=warps(TILE),
        )  # fmt: skip


def _cast_blocks(
    x: torch.Tensor, fmt: ElementFormat, block: tuple[int, int], *, mx: bool, rounding: str, pow2: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    check_contiguous(x)
    rows, columns = x.shape
    br, bc = block
    scale_columns = -(-columns // bc)
    codes = torch.empty((rows, columns), dtype=fmt.dtype, device=x.device)
    scale = torch.empty((-(-rows // br), scale_columns), dtype=torch.uint8 if mx else torch.float32, device=x.device)
    if x.numel() == 0:
        return codes, scale
    from lumen_core.kernels.triton import cast_kernels as kernels

    constants = block_constants(fmt, block, rows, columns, mx=mx, rounding=rounding, pow2=pow2)
    column_tiles = -(-columns // constants["TC"])
    programs = -(-rows // constants["TR"]) * column_tiles
    with on_device_of(x):
        kernels.cast_blocks[(programs,)](
            x, codes, scale, rows, columns, column_tiles, scale_columns, **constants,
            num_warps=warps(constants["TR"] * constants["TC"]),
        )  # fmt: skip
    return codes, scale


def block_constants(
    fmt: ElementFormat,
    block: tuple[int, int],
    rows: int,
    columns: int,
    *,
    mx: bool,
    rounding: str,
    pow2: bool,
    hip: bool | None = None,
) -> dict[str, Any]:
    """Compile-time arguments of `cast_blocks`: a tile about four times as wide as high, no larger than the matrix."""
    br, bc = block
    tile_columns = max(bc, min(256, power_of_two(columns)))
    tile_rows = max(br, min(TILE // tile_columns, power_of_two(rows)))
    if br > 32:  # 64x64, 128x128: one block high and wide, or the tile outgrows the registers
        tile_columns = max(bc, min(tile_columns, TILE // br))
    largest_mantissa = int((fmt.max / 2.0**fmt.emax - 1.0) * 2**23)
    return {
        "MX": mx,
        "ROUNDING": rounding,
        "EMAX": fmt.emax,
        "MANTISSA": fmt.mantissa_bits,
        "LARGEST_MANTISSA": largest_mantissa,
        **scale_constants(fmt, pow2, hip),
        "BR": br,
        "BC": bc,
        "TR": tile_rows,
        "TC": tile_columns,
        "WIDE": tile_rows * columns >= INT32_END,
    }
