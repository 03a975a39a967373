"""The largest magnitude of a tensor."""

from __future__ import annotations

import torch

from lumen_core.kernels.quantize import casts_by_triton
from lumen_core.kernels.triton.amax import absmax


def largest_magnitude(x: torch.Tensor) -> torch.Tensor:
    """`max |x|`, 0-dim fp32, NaN where x holds one; `x` has at least one element.

    torch reads and writes the tensor once more for `abs`; a compiler fuses that.
    """
    if x.is_cuda and not torch.compiler.is_compiling() and type(x) is torch.Tensor and casts_by_triton(x, x.dtype):
        return absmax([x])[0]
    return x.abs().amax().to(torch.float32)
