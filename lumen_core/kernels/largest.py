"""Largest magnitudes of many tensors at once."""

from __future__ import annotations

import torch

from lumen_core.formats import element_format, resolve_flavour
from lumen_core.kernels import registry
from lumen_core.kernels.query import QuantizeQuery
from lumen_core.kernels.triton.amax import absmax as triton_absmax


def absmax(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Largest magnitude of each tensor, fp32 `[len(tensors)]`: 0 for an empty one, NaN where it holds one.

    One fused launch where the Triton casts run, else one reduction a tensor; nothing waits on the host.
    """
    x = tensors[0]
    fmt = element_format("e4m3", resolve_flavour("auto", x.device))
    query = QuantizeQuery(x.device.type, x.dtype, fmt, (0, 0), False, False, x.numel(), True)
    if registry.choose("quantize", query) == "triton":
        return triton_absmax(tensors)
    return torch.stack(
        [t.abs().amax().to(torch.float32) if t.numel() else t.new_zeros((), dtype=torch.float32) for t in tensors]
    )
