"""`silu(gate) * up` on a GPU. Launchers; importing this file does not import `triton`."""

from __future__ import annotations

import torch

from lumen_core.kernels.triton.launching import on_device_of, power_of_two, rows_unsupported, warps

unsupported = rows_unsupported

_TILE = 2048  # values of each matrix that a program takes


def tile(columns: int) -> dict[str, int]:
    """Compile-time size of a program's tile: a row, or as much of it as fits."""
    block = min(max(power_of_two(columns), 16), _TILE)
    return {"TR": _TILE // block, "TC": block}


def tile_warps(hip: bool | None = None) -> int:
    """Warps of every program here: three matrices are in registers at once."""
    return warps(2 * _TILE, hip)


def forward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """`[R, C]` matrices with contiguous rows -> contiguous `[R, C]`; see `kernels.swiglu`."""
    from lumen_core.kernels.triton import swiglu_kernels as kernels

    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    rows, columns = gate.shape
    size = tile(columns)
    column_tiles = -(-columns // size["TC"])
    with on_device_of(gate):
        kernels.swiglu_forward[(-(-rows // size["TR"]) * column_tiles,)](
            gate, up, out, rows, columns, column_tiles, gate.stride(0), up.stride(0), **size, num_warps=tile_warps(),
        )  # fmt: skip
    return out


def backward(grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Contiguous gradients of gate and up; see `kernels.swiglu`."""
    from lumen_core.kernels.triton import swiglu_kernels as kernels

    dgate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    dup = torch.empty_like(dgate)
    rows, columns = gate.shape
    size = tile(columns)
    column_tiles = -(-columns // size["TC"])
    with on_device_of(gate):
        kernels.swiglu_backward[(-(-rows // size["TR"]) * column_tiles,)](
            grad, gate, up, dgate, dup, rows, columns, column_tiles, grad.stride(0), gate.stride(0), up.stride(0),
            **size, num_warps=tile_warps(),
        )  # fmt: skip
    return dgate, dup
