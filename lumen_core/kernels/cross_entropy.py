"""Cross-entropy of rows of logits, and their gradient in the same pass."""

from __future__ import annotations

import torch

from lumen_core.kernels.norm import at_least_fp32
from lumen_core.kernels.query import RowsQuery
from lumen_core.kernels.registry import Candidate, Operation, always
from lumen_core.kernels.triton import cross_entropy as triton_cross_entropy


def _reference(
    logits: torch.Tensor,
    targets: torch.Tensor,
    factor: torch.Tensor,
    gradient: torch.Tensor | None,
    ignore_index: int,
    smoothing: float,
    softcap: float | None,
) -> torch.Tensor:
    z = logits.to(at_least_fp32(logits.dtype))
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    vocabulary = z.shape[1]
    kept = targets != ignore_index
    valid = (targets >= 0) & (targets < vocabulary)
    at = torch.where(valid, targets, 0)[:, None]
    # Relative to the largest: beside large logits of one sign the difference of lse and target would cancel.
    log_p = torch.log_softmax(z, -1)
    loss = -(1 - smoothing) * log_p.gather(1, at)[:, 0]
    if smoothing:
        loss = loss - smoothing * log_p.mean(-1)
    nan = torch.full_like(loss, float("nan"))
    if gradient is not None:
        d = torch.exp(log_p) - smoothing / vocabulary
        d.scatter_add_(1, at, torch.full_like(at, 1, dtype=d.dtype) * (smoothing - 1))
        if softcap is not None:
            d = d * (1 - (z / softcap).square())
        d = d * torch.where(valid, factor.to(d.dtype), nan)[:, None]
        gradient.copy_(torch.where(kept[:, None], d, 0.0))
    return torch.where(kept, torch.where(valid, loss, nan), 0.0)


CROSS_ENTROPY = Operation(
    "cross_entropy",
    (
        Candidate("triton", triton_cross_entropy.unsupported, triton_cross_entropy.cross_entropy),
        Candidate("reference", always, _reference),
    ),
)


def cross_entropy_rows(
    logits: torch.Tensor,
    targets: torch.Tensor,
    factor: torch.Tensor,
    gradient: torch.Tensor | None,
    ignore_index: int,
    smoothing: float,
    softcap: float | None,
) -> torch.Tensor:
    """Loss of each row, and `factor` times its gradient.

    Args:
        logits: contiguous `[T, V]`.
        targets: int64 `[T]`; one outside the vocabulary gives NaN, one equal to `ignore_index` zeros.
        factor: `[T]` in fp32 (fp64 for fp64 logits).
        gradient: `[T, V]` to write to, which may be `logits` itself, or None.
        ignore_index, smoothing, softcap: see `lumen_core.cross_entropy`.

    Returns:
        `[T]` in factor's dtype.
    """
    query = RowsQuery(logits.device.type, logits.dtype, logits.shape[0], logits.shape[1])
    return CROSS_ENTROPY(query, logits, targets, factor, gradient, ignore_index, smoothing, softcap)
