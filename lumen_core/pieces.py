"""Quantizing a flat piece of a matrix under the scales of the whole one.

Distributed optimizers cut parameters as flat memory, across rows and blocks. What the scales come from is taken over
each piece, its maximum over all pieces gives the scales of the whole matrix, and each piece is encoded under these: the
bits are those of quantizing the matrix at once.
"""

from __future__ import annotations

import torch

from lumen_core import casts
from lumen_core.casts import ROW_BLOCK, TENSOR_BLOCK
from lumen_core.formats import E8M0_DTYPE
from lumen_core.wire import WireFormat


def empty_bounds(wire: WireFormat, shape: tuple[int, int], device: torch.device) -> torch.Tensor:
    """What the scales of a matrix `[N, K]` come from before any piece was seen, flat, one entry a scale.

    fp32 amaxes, or for MX the E8M0 bytes (uint8) themselves: the larger amax never has the smaller byte.
    """
    rows, columns = _grid(wire, shape)
    return torch.zeros(rows * columns, dtype=torch.uint8 if wire.mx else torch.float32, device=device)


def note_piece(bounds: torch.Tensor, piece: torch.Tensor, start: int, wire: WireFormat, shape: tuple[int, int]) -> None:
    """Let `bounds` take in a piece.

    Args:
        bounds: as `empty_bounds` gives it.
        piece: flat, any float dtype: entries `start` and following of the row-major matrix.
        shape: `(N, K)` of the matrix.
    """
    if piece.numel() == 0:
        return
    first, lines = _lines(piece, start, wire, shape)
    amax = casts.block_amax(lines, wire.block)
    found = casts.e8m0_from_amax(amax, wire.fmt, wire.rounding) if wire.mx else amax
    begin = _first_block(first, wire, shape)
    part = bounds[begin : begin + found.numel()]
    part.copy_(torch.maximum(part, found.reshape(-1)))


def scale_of(bounds: torch.Tensor, wire: WireFormat, shape: tuple[int, int]) -> torch.Tensor:
    """The scales, shaped as `QuantizedTensor.scale` has them."""
    if wire.mx:
        return bounds.view(E8M0_DTYPE).view(_grid(wire, shape))
    scale = casts.scale_from_amax(bounds, wire.fmt, wire.margin if wire.per_tensor else 0, wire.pow2)
    return scale.reshape(()) if wire.per_tensor else scale.view(_grid(wire, shape))


def encode_piece(
    piece: torch.Tensor, start: int, scale: torch.Tensor, wire: WireFormat, shape: tuple[int, int]
) -> torch.Tensor:
    """Codes of a piece, flat uint8; arguments as in `note_piece` and `scale_of`. Not for packed formats."""
    if piece.numel() == 0:
        return piece.new_empty(0, dtype=torch.uint8)
    first, lines = _lines(piece, start, wire, shape)
    if not wire.per_tensor:
        height = max(wire.block[0], 1)
        scale = scale[first // height : -(-(first + lines.shape[0]) // height)]
    codes = casts.encode_by(lines, scale, wire.fmt, wire.block).view(torch.uint8).reshape(-1)
    begin = 0 if wire.per_tensor else start - first * shape[1]
    return codes[begin : begin + piece.numel()]


def _grid(wire: WireFormat, shape: tuple[int, int]) -> tuple[int, int]:
    if wire.block == TENSOR_BLOCK:
        return 1, 1
    if wire.block == ROW_BLOCK:
        return shape[0], 1
    return -(-shape[0] // wire.block[0]), -(-shape[1] // wire.block[1])


def _first_block(first: int, wire: WireFormat, shape: tuple[int, int]) -> int:
    """Where the scales of line `first` begin."""
    return 0 if wire.per_tensor else first // max(wire.block[0], 1) * _grid(wire, shape)[1]


def _lines(piece: torch.Tensor, start: int, wire: WireFormat, shape: tuple[int, int]) -> tuple[int, torch.Tensor]:
    """The first line of whole blocks that a piece touches, and these lines, zero where the piece is not."""
    if wire.per_tensor:
        return 0, piece.view(1, -1)
    rows, columns = shape
    height, end = max(wire.block[0], 1), start + piece.numel()
    first = start // columns // height * height
    last = min(-(-end // (columns * height)) * height, rows)
    if (start, end) == (first * columns, last * columns):
        return first, piece.view(last - first, columns)
    lines = piece.new_zeros((last - first) * columns)
    lines[start - first * columns : end - first * columns] = piece
    return first, lines.view(last - first, columns)
