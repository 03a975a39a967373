"""Randomised Hadamard transform along the contraction axis.

Both operands of a GEMM multiplied by the same orthonormal matrix leave the product unchanged, while an outlier is
spread over its block, which a 4-bit format needs. Used on the operands of wgrad with MXFP4, after "Training LLMs with
MXFP4" (arXiv 2502.20586); blocks are those of the MX scales, 32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from lumen_core.rounding import mix32
from lumen_core.tracing import is_zero

HADAMARD_BLOCK = 32


def _signs(seed: int, device: torch.device) -> torch.Tensor:
    index = torch.arange(HADAMARD_BLOCK, dtype=torch.int64, device=device)
    return (mix32(mix32(index) ^ mix32(mix32(seed + 0x5BD1E995) ^ (seed >> 32))) & 1).to(torch.float32) * 2 - 1


def _matrix(device: torch.device) -> torch.Tensor:
    """Sylvester's Hadamard matrix of order 32 over sqrt(32): entry (i, j) is (-1)**popcount(i & j)."""
    index = torch.arange(HADAMARD_BLOCK, dtype=torch.int64, device=device)
    both = index[:, None] & index[None, :]
    parity = both ^ (both >> 4)
    parity = parity ^ (parity >> 2)
    parity = (parity ^ (parity >> 1)) & 1
    return (1 - 2 * parity).to(torch.float32) * HADAMARD_BLOCK**-0.5


def _blocks(x: torch.Tensor) -> torch.Tensor:
    pad = -x.shape[-1] % HADAMARD_BLOCK
    x = x.to(torch.float32).contiguous()  # padding by nothing keeps strides, and a traced view would not fit them
    x = x if is_zero(pad) else F.pad(x, (0, pad))
    return x.reshape(x.shape[0], x.shape[1] // HADAMARD_BLOCK, HADAMARD_BLOCK)


def hadamard(x: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """`x @ diag(signs) @ H` in blocks of 32 columns.

    Args:
        x: `[R, C]`, any float dtype.
        seed: chooses the 32 random signs; both operands of a GEMM must use the same.

    Returns:
        fp32 `[R, ceil(C / 32) * 32]`: a partial last block is filled with zeros first, which adds nothing to a product.
    """
    blocks = (_blocks(x) * _signs(seed, x.device)) @ _matrix(x.device)
    return blocks.reshape(x.shape[0], blocks.shape[1] * HADAMARD_BLOCK)


def hadamard_inverse(x: torch.Tensor, seed: int = 0, columns: int | None = None) -> torch.Tensor:
    """Inverse of `hadamard`, cut to `columns` (H is symmetric and orthonormal, so it is its own inverse)."""
    blocks = (_blocks(x) @ _matrix(x.device)) * _signs(seed, x.device)
    out = blocks.reshape(x.shape[0], blocks.shape[1] * HADAMARD_BLOCK)
    return out if columns is None else out[:, :columns]
