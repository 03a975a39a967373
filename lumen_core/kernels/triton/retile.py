"""Codes to codes: MXFP8 tiles to one scale a tensor, and transposition, both through tiles that read and write whole
cache lines. Importing this file does not import `triton`."""

from __future__ import annotations

from typing import Any

import torch

from lumen_core.formats import ElementFormat
from lumen_core.kernels.triton.launching import INT32_END, check_contiguous, element_constants, on_device_of, warps

_TILE = 128
MX_BLOCK = 32


def mx_to_tensor(
    codes: torch.Tensor, scale: torch.Tensor, fmt: ElementFormat, *, transposed: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of 32x32 MXFP8 blocks with one scale for all of them, as `lumen_core.requantize.mx_to_tensor`.

    Args:
        codes: `[N, K]` in `fmt.dtype`.
        scale: `float8_e8m0fnu [ceil(N / 32), ceil(K / 32)]`.
        transposed: write codes as contiguous `[K, N]`.

    Returns:
        codes `[N, K]` or `[K, N]`, scale 0-dim fp32.
    """
    out = _retiled(codes, transposed)
    if codes.numel() == 0:
        return out, torch.full((), 2.0**-126, dtype=torch.float32, device=codes.device)
    scale = scale.contiguous().view(torch.uint8)
    tensor_scale = torch.empty((), dtype=torch.float32, device=codes.device)
    _retile(codes, out, transposed, scale, scale.amax(), tensor_scale, fmt)
    return out, tensor_scale


def transpose_bytes(codes: torch.Tensor) -> torch.Tensor:
    """Contiguous transpose of a matrix of one-byte elements (uint8, FP8)."""
    out = _retiled(codes, True)
    if codes.numel():
        as_bytes = codes.view(torch.uint8)
        _retile(as_bytes, out.view(torch.uint8), True, as_bytes, as_bytes, as_bytes, None)
    return out


def _retiled(codes: torch.Tensor, transposed: bool) -> torch.Tensor:
    check_contiguous(codes)
    rows, columns = codes.shape
    return torch.empty((columns, rows) if transposed else (rows, columns), dtype=codes.dtype, device=codes.device)


def _retile(
    codes: torch.Tensor,
    out: torch.Tensor,
    transposed: bool,
    scale: torch.Tensor,
    largest: torch.Tensor,
    out_scale: torch.Tensor,
    fmt: ElementFormat | None,
) -> None:
    from lumen_core.kernels.triton import cast_kernels as kernels

    rows, columns = codes.shape
    column_tiles = -(-columns // _TILE)
    with on_device_of(codes):
        kernels.retile[(-(-rows // _TILE) * column_tiles,)](
            codes, scale, largest, out, out_scale, rows, columns, column_tiles, -(-columns // MX_BLOCK),
            **retile_constants(rows, columns, transposed, fmt), num_warps=warps(_TILE * _TILE),
        )  # fmt: skip


def retile_constants(
    rows: int, columns: int, transposed: bool, fmt: ElementFormat | None, hip: bool | None = None
) -> dict[str, Any]:
    """Compile-time arguments of the kernel; without `fmt` it only moves bytes."""
    return {
        "RESCALE": fmt is not None,
        "TRANSPOSE": transposed,
        **({"LIMIT": 0.0, "CAST": ""} if fmt is None else element_constants(fmt, hip)),
        "BLOCK": MX_BLOCK,
        "TR": _TILE,
        "TC": _TILE,
        "WIDE": _TILE * max(rows, columns) >= INT32_END,
    }
