"""Cross-entropy of rows of logits on a GPU. Importing this file does not import `triton`."""

from __future__ import annotations

import torch

from lumen_core.kernels.triton.launching import on_device_of, power_of_two, rows_unsupported, warps

unsupported = rows_unsupported

_BLOCK = 8192


def constants(vocabulary: int, smoothing: float, softcap: float | None, gradient: bool) -> dict[str, object]:
    """Compile-time arguments of the kernel."""
    return {
        "SMOOTHING": smoothing > 0,
        "SOFTCAP": softcap is not None,
        "GRADIENT": gradient,
        "BLOCK": max(64, min(_BLOCK, power_of_two(vocabulary))),
    }


def block_warps(block: int, hip: bool | None = None) -> int:
    """16 values a thread, as far as eight warps go."""
    return warps(2 * block, hip)


def cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    factor: torch.Tensor,
    gradient: torch.Tensor | None,
    ignore_index: int,
    smoothing: float,
    softcap: float | None,
) -> torch.Tensor:
    """See `kernels.cross_entropy.cross_entropy_rows`."""
    from lumen_core.kernels.triton import cross_entropy_kernels as kernels

    rows, vocabulary = logits.shape
    loss = torch.empty(rows, dtype=torch.float32, device=logits.device)
    fixed = constants(vocabulary, smoothing, softcap, gradient is not None)
    with on_device_of(logits):
        kernels.cross_entropy[(rows,)](
            logits, targets.contiguous(), factor.contiguous(), loss, logits if gradient is None else gradient,
            vocabulary, ignore_index, smoothing, 1.0 if softcap is None else softcap,
            **fixed, num_warps=block_warps(fixed["BLOCK"]),
        )  # fmt: skip
    return loss
