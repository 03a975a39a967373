"""Largest magnitudes of tensors."""

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


def largest_magnitude(x: torch.Tensor) -> torch.Tensor:
    """`max |x|`, 0-dim fp32, NaN where x holds one; `x` has at least one element.

    torch reads and writes the tensor once more for `abs`; a compiler fuses that.
    """
    if x.is_cuda and not torch.compiler.is_compiling() and type(x) is torch.Tensor and casts_by_triton(x, x.dtype):
        return triton_absmax([x])[0]
    return x.abs().amax().to(torch.float32)
