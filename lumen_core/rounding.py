"""Rounding to a format's grid, with the counter-based noise that stochastic rounding draws from."""

from __future__ import annotations

import torch

from lumen_core.formats import ElementFormat

_MASK32 = 0xFFFFFFFF
_GOLDEN = 0x9E3779B1  # 2**32 / golden ratio: spreads consecutive counters


def round_to_format(x: torch.Tensor, fmt: ElementFormat, noise: torch.Tensor | None = None) -> torch.Tensor:
    """Round fp32 values within `fmt`'s range to values it can represent.

    Args:
        x: fp32 values, `|x| <= fmt.max`.
        noise: None rounds to nearest, ties to even. Otherwise uniform values in [0, 1): a value goes up with a
            probability equal to its distance from the lower neighbour, so the expectation is exact.
    """
    # Distance between neighbours at |x|: 2**(max(exponent, emin) - mantissa bits), the exponent read from the bits.
    exponent = ((x.view(torch.int32) >> 23) & 0xFF).clamp(min=127 + 1 - fmt.bias)
    step = ((exponent - fmt.mantissa_bits) << 23).view(torch.float32)
    inverse_step = ((254 - exponent + fmt.mantissa_bits) << 23).view(torch.float32)
    units = x * inverse_step
    if noise is None:
        return units.round() * step
    # Round the magnitude, so that -x and x use mirrored grids; copysign keeps -0. Adding the noise and flooring moves
    # values that lie on the grid: 15 + (1 - 2**-24) is 16 in fp32.
    magnitude = units.abs()
    lower = magnitude.floor()
    return torch.copysign((lower + (noise < magnitude - lower).to(x.dtype)) * step, x)


def mix32(x: torch.Tensor | int) -> torch.Tensor | int:
    """Scramble 32-bit integers held in int64 (two multiply-xorshift rounds); no product leaves int64's range."""
    x = x & _MASK32
    x = ((x ^ (x >> 16)) * 0x45D9F3B) & _MASK32
    x = ((x ^ (x >> 16)) * 0x45D9F3B) & _MASK32
    return x ^ (x >> 16)


def stochastic_noise(
    shape: tuple[int, int],
    key: torch.Tensor | int,
    device: torch.device,
    stream: int = 0,
    rows: torch.Tensor | None = None,
    columns: torch.Tensor | None = None,
) -> torch.Tensor:
    """Uniform fp32 values in [0, 1), 24 bits each, a pure function of position, `key` and `stream`.

    Counter-based, so that a kernel computes the same values without storing them, a recomputed pass repeats them, and
    two copies of one tensor (for dgrad and wgrad) draw from separate streams.

    Args:
        shape: `(R, C)`.
        key: integer, or 0-dim int64 tensor on `device`.
        stream: separates uses that share a key.
        rows, columns: positions of a part of a matrix in the whole, int64 `[R]` and `[C]`; default: it is the whole.
    """
    if not isinstance(key, torch.Tensor):
        key = torch.full((), key & 0x7FFFFFFFFFFFFFFF, dtype=torch.int64, device=device)
    seed = mix32(mix32(key) ^ mix32((key >> 32) + stream * _GOLDEN))
    # Every product starts from a masked value: compilers may hold a bare index in 32 bits.
    rows = torch.arange(shape[0], dtype=torch.int64, device=device) if rows is None else rows
    columns = torch.arange(shape[1], dtype=torch.int64, device=device) if columns is None else columns
    bits = mix32(mix32(mix32(rows) ^ seed)[:, None] + (mix32(columns) * _GOLDEN)[None, :])
    return (bits >> 8).to(torch.float32) * 2.0**-24
