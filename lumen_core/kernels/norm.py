"""RMSNorm and LayerNorm over the last dimension, forward and backward."""

from __future__ import annotations

import torch

from lumen_core.kernels.query import RowsQuery
from lumen_core.kernels.registry import Candidate, Operation, Passes, always
from lumen_core.kernels.triton import norm as triton_norm


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """What arithmetic on `dtype` is done in: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def _forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, center: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    wide = at_least_fp32(x.dtype)
    z = x.to(wide)
    mean = z.mean(-1) if center else z.new_empty(0)
    if center:
        z = z - mean[:, None]
    rstd = torch.rsqrt(z.square().mean(-1) + eps)
    y = z * rstd[:, None] * weight.to(wide)
    if bias is not None:
        y = y + bias.to(wide)
    return y.to(x.dtype), mean, rstd


def _backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    center: bool,
    has_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    wide = at_least_fp32(x.dtype)
    z, g = x.to(wide), grad.to(wide)
    if center:
        z = z - mean[:, None]
    z = z * rstd[:, None]
    wg = g * weight.to(wide)
    dx = wg - z * (wg * z).mean(-1, keepdim=True)
    if center:
        dx = dx - wg.mean(-1, keepdim=True)
    dbias = g.sum(0) if has_bias else g.new_empty(0)
    return (dx * rstd[:, None]).to(x.dtype), (g * z).sum(0), dbias


NORM = Operation(
    "norm",
    (
        Candidate(
            "triton", triton_norm.unsupported, Passes(forward=triton_norm.forward, backward=triton_norm.backward)
        ),
        Candidate("reference", always, Passes(forward=_forward, backward=_backward)),
    ),
)


@torch.library.custom_op("lumen::norm", mutates_args=())
def norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, center: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output in x's shape and dtype, and fp32 (fp64 for fp64) mean (empty unless `center`) and rstd of each row."""
    rows = _rows(x)
    y, mean, rstd = NORM(_query(rows), "forward", rows, weight.contiguous(), bias, eps, center)
    return y.view(x.shape), mean, rstd


@norm.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, center: bool):
    rows = x.shape[:-1].numel()
    statistic = x.new_empty(rows, dtype=at_least_fp32(x.dtype))
    return x.new_empty(x.shape), statistic if center else statistic.new_empty(0), statistic.new_empty(rows)


@torch.library.custom_op("lumen::norm_backward", mutates_args=())
def norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    center: bool,
    has_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of x (its dtype), weight and bias (fp32, fp64 for fp64; empty without bias)."""
    rows = _rows(x)
    out = NORM(_query(rows), "backward", _rows(grad), rows, weight.contiguous(), mean, rstd, center, has_bias)
    return out[0].view(x.shape), out[1], out[2]


@norm_backward.register_fake
def _(grad, x, weight, mean, rstd, center, has_bias):
    dweight = weight.new_empty(weight.shape, dtype=at_least_fp32(x.dtype))
    return x.new_empty(x.shape), dweight, dweight.new_empty(weight.shape if has_bias else (0,))


def _setup(ctx, inputs, output) -> None:
    x, weight, bias, _, ctx.center = inputs
    _, mean, rstd = output
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(x, weight, mean, rstd)
    ctx.set_materialize_grads(False)  # mean and rstd have none


def _gradients(ctx, grad, grad_mean, grad_rstd):
    if grad is None:
        return None, None, None, None, None
    x, weight, mean, rstd = ctx.saved_tensors
    has_bias = ctx.bias_dtype is not None
    dx, dweight, dbias = norm_backward(grad, x, weight, mean, rstd, ctx.center, has_bias)
    return dx, dweight.to(weight.dtype), dbias.to(ctx.bias_dtype) if has_bias else None, None, None


norm.register_autograd(_gradients, setup_context=_setup)


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(x.shape[:-1].numel(), x.shape[-1]).contiguous()


def _query(rows: torch.Tensor) -> RowsQuery:
    return RowsQuery(rows.device.type, rows.dtype, rows.shape[0], rows.shape[1])
