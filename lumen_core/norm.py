"""RMSNorm and LayerNorm with fp32 arithmetic whatever the input's dtype.

    RMSNorm    y = x / sqrt(mean(x^2) + eps) * w               (Zhang and Sennrich 2019, equation 4)
    LayerNorm  y = (x - mean) / sqrt(var + eps) * w + b        (Ba et al. 2016; biased variance, as torch)

Both keep the input and one or two fp32 numbers a row for the backward pass. With z the normalised row and a = g w:

    dx = (a - z mean(a z) [- mean(a) in LayerNorm]) rstd,   dw = sum over rows of g z,   db = sum over rows of g

The sums over rows are accumulated in fp32 and in a fixed order.
"""

from __future__ import annotations

import torch

from lumen_core.kernels.norm import norm

__all__ = ["layer_norm", "rms_norm"]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """RMSNorm over the last dimension.

    The output is rounded once, from fp32; Hugging Face's modules round before they multiply by the weight, too.

    Args:
        x: `[..., C]`, fp32, bf16 or fp16 (fp64 by the reference), any number of rows.
        weight: `[C]`, any float dtype.
        eps: added to the mean square.

    Returns:
        x's shape and dtype.

    Raises:
        ValueError: `weight` is not `[C]`.
    """
    _check(x, weight, "weight")
    return norm(x, weight, None, eps, False)[0]


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, eps: float = 1e-5
) -> torch.Tensor:
    """LayerNorm over the last dimension.

    Args:
        x: `[..., C]`, fp32, bf16 or fp16 (fp64 by the reference), any number of rows.
        weight: `[C]`, any float dtype.
        bias: `[C]` or None.
        eps: added to the variance.

    Returns:
        x's shape and dtype.

    Raises:
        ValueError: `weight` or `bias` is not `[C]`.
    """
    _check(x, weight, "weight")
    if bias is not None:
        _check(x, bias, "bias")
    return norm(x, weight, bias, eps, True)[0]


def _check(x: torch.Tensor, parameter: torch.Tensor, name: str) -> None:
    if x.dim() == 0 or parameter.shape != x.shape[-1:]:
        raise ValueError(f"{name} of shape {tuple(parameter.shape)} does not fit an input of shape {tuple(x.shape)}")
