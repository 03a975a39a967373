"""Largest magnitudes of many tensors at once."""

from __future__ import annotations

import torch

from lumen_core.kernels.quantize import casts_by_triton
from lumen_core.kernels.triton.amax import absmax as triton_absmax


def absmax(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Largest magnitude of each tensor, fp32 `[len(tensors)]`: 0 for an empty one, NaN where it holds one.

    One fused launch where the Triton casts run, else one reduction a tensor; nothing waits on the host.
    """
    if casts_by_triton(tensors[0], tensors[0].dtype):
        return triton_absmax(tensors)
    return torch.stack(
        [t.abs().amax().to(torch.float32) if t.numel() else t.new_zeros((), dtype=torch.float32) for t in tensors]
    )
