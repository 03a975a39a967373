"""Vocabulary cross-entropy that never holds fp32 logits, and no logits at all of more than a chunk of tokens.

    loss_t = lse(z_t) - (1 - e) z_t[y_t] - e mean(z_t),   z = softcap tanh(h W^T / softcap) or h W^T,   e = smoothing
    d z_t  = softmax(z_t) - (1 - e) onehot(y_t) - e / V

The gradient of a chunk is computed in the forward pass, over its logits, and at once multiplied into the gradients of
h and W, as Liger Kernel's fused linear cross-entropy does (Hsu et al. 2024, arXiv:2410.10989, section 3.2); the
backward pass only scales them. The gradient of W is accumulated over chunks in fp32. With `reduction="none"` what
arrives in the backward pass differs by token, so that the logits are computed once more there.

Smoothing and means are those of `torch.nn.functional.cross_entropy`, except that a batch without a target gives 0.
"""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from lumen_core.kernels.cross_entropy import cross_entropy_rows
from lumen_core.kernels.norm import at_least_fp32

__all__ = ["cross_entropy", "linear_cross_entropy"]

_CHUNK_VALUES = 2**27


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    chunk: int | None = None,
    reduction: str = "mean",
    softcap: float | None = None,
) -> torch.Tensor:
    """Cross-entropy of `hidden @ weight.T`.

    Args:
        hidden: `[..., K]`, any float dtype.
        weight: `[V, K]` in hidden's dtype, or any under autocast, which then sets the dtype of the products.
        targets: int64, hidden's shape without the last dimension.
        ignore_index: targets that count for nothing.
        label_smoothing: e above, in [0, 1].
        chunk: tokens whose logits are held at once (default: 2**27 logits).
        reduction: `mean` over the targets that count (0 where there are none), `sum`, or `none`.
        softcap: bound on the logits, as in Gemma 2.

    Returns:
        0-dim, or targets' shape for `none`: fp32 (fp64 for fp64).

    Raises:
        TypeError: hidden and weight differ in dtype outside autocast.
        ValueError: shapes do not fit, an option is out of range, or, on a CPU, a target is outside the vocabulary. On
            a GPU, where looking would make the host wait, the loss of such a token is NaN.
    """
    if hidden.shape[-1] != weight.shape[1] or hidden.shape[:-1] != targets.shape:
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and targets {tuple(targets.shape)} do not fit"
        )
    _check_options(label_smoothing, reduction, softcap)
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk={chunk}: must be at least 1")
    device_type = hidden.device.type
    if torch.is_autocast_enabled(device_type) and hidden.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device_type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    elif hidden.dtype != weight.dtype:
        raise TypeError(f"hidden is {hidden.dtype} but weight is {weight.dtype}: convert one, or use torch.autocast")
    rows, flat = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    chunk = chunk or max(1, _CHUNK_VALUES // weight.shape[0])
    options = chunk, ignore_index, label_smoothing, softcap
    if reduction == "none":
        return _losses(rows, weight, flat, *options).view(targets.shape)
    factor = _factor(flat, ignore_index, reduction, at_least_fp32(hidden.dtype))
    grad = torch.is_grad_enabled()
    needs = grad and hidden.requires_grad, grad and weight.requires_grad
    return _weighted(rows, weight, flat, factor, *options, *needs)[0]


def cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    inplace: bool = False,
) -> torch.Tensor:
    """Cross-entropy of given logits, with fp32 arithmetic but no fp32 copy of them where the Triton kernel runs.

    Args:
        logits: `[..., V]`, any float dtype.
        targets: int64, logits' shape without the last dimension.
        ignore_index, label_smoothing, softcap: see `linear_cross_entropy`.
        reduction: `mean` or `sum`.
        inplace: write the gradient over the logits, which are lost, instead of beside them. Autograd notices where
            another operation still needs them. A compiler, which plans memory itself, takes no notice of this option.

    Returns:
        0-dim fp32 (fp64 for fp64).

    Raises:
        ValueError: as `linear_cross_entropy`; or `inplace` on a leaf that requires a gradient or strided logits.
    """
    if logits.shape[:-1] != targets.shape:
        raise ValueError(f"logits {tuple(logits.shape)} and targets {tuple(targets.shape)} do not fit")
    _check_options(label_smoothing, reduction, softcap)
    if reduction == "none":
        raise ValueError("reduction='none' would need the logits in the backward pass: use mean or sum")
    rows, flat = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
    factor = _factor(flat, ignore_index, reduction, at_least_fp32(logits.dtype))
    needs = torch.is_grad_enabled() and logits.requires_grad
    options = ignore_index, label_smoothing, softcap
    if not inplace or not needs or torch.compiler.is_compiling():
        return _of_logits(rows, flat, factor, *options, needs)[0]
    if logits.is_leaf or not logits.is_contiguous():
        raise ValueError("inplace=True needs contiguous logits that are no leaf")
    return _Overwriting.apply(rows, flat, factor, *options)


def _check_options(smoothing: float, reduction: str, softcap: float | None) -> None:
    if not 0 <= smoothing <= 1:
        raise ValueError(f"label_smoothing={smoothing}: must be in [0, 1]")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction={reduction!r}: must be one of mean, sum, none")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap={softcap}: must be positive")


def _factor(targets: torch.Tensor, ignore_index: int, reduction: str, dtype: torch.dtype) -> torch.Tensor:
    """What each token's loss is multiplied by before the sum."""
    kept = (targets != ignore_index).to(dtype)
    return kept / kept.sum().clamp(min=1) if reduction == "mean" else kept


def _check_targets(targets: torch.Tensor, vocabulary: int, ignore_index: int) -> None:
    if targets.device.type != "cpu":
        return
    wrong = targets[(targets != ignore_index) & ((targets < 0) | (targets >= vocabulary))]
    if wrong.numel():
        raise ValueError(
            f"target {int(wrong[0])} is outside a vocabulary of {vocabulary} (ignore_index={ignore_index})"
        )


def _scaled(gradient: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    # A factor rounded to bf16 would make every gradient wrong by the same fraction.
    return (gradient.to(factor.dtype) * factor).to(gradient.dtype)


# --- hidden states and weight -----------------------------------------------------------------------------------------


@torch.library.custom_op("lumen::linear_cross_entropy", mutates_args=())
def _weighted(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    factor: torch.Tensor,
    chunk: int,
    ignore_index: int,
    smoothing: float,
    softcap: float | None,
    hidden_grad: bool,
    weight_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sum of `factor` times loss, and its gradients (empty where not asked for)."""
    _check_targets(targets, weight.shape[0], ignore_index)
    total = factor.new_zeros(())
    dhidden = torch.empty(hidden.shape if hidden_grad else (0,), dtype=hidden.dtype, device=hidden.device)
    dweight = torch.zeros(weight.shape if weight_grad else (0,), dtype=factor.dtype, device=weight.device)
    with torch.autocast(hidden.device.type, enabled=False):
        for start in range(0, hidden.shape[0], chunk):
            part = slice(start, start + chunk)
            logits = hidden[part] @ weight.t()
            gradient = logits if hidden_grad or weight_grad else None
            loss = cross_entropy_rows(logits, targets[part], factor[part], gradient, ignore_index, smoothing, softcap)
            total += (loss * factor[part]).sum()
            if hidden_grad:
                dhidden[part] = logits @ weight
            if weight_grad:
                dweight += logits.t() @ hidden[part]
    return total, dhidden, dweight.to(weight.dtype, copy=False)


@_weighted.register_fake
def _(hidden, weight, targets, factor, chunk, ignore_index, smoothing, softcap, hidden_grad, weight_grad):
    return (
        factor.new_empty(()),
        hidden.new_empty(hidden.shape if hidden_grad else (0,)),
        weight.new_empty(weight.shape if weight_grad else (0,)),
    )


def _keep_gradients(ctx, inputs, output) -> None:
    ctx.hidden_grad, ctx.weight_grad = inputs[-2:]
    ctx.save_for_backward(*output[1:])
    ctx.set_materialize_grads(False)


def _scale_gradients(ctx, grad, *_):
    dhidden, dweight = ctx.saved_tensors
    known = grad is not None
    return (
        _scaled(dhidden, grad) if known and ctx.hidden_grad else None,
        _scaled(dweight, grad) if known and ctx.weight_grad else None,
        *[None] * 8,
    )


_weighted.register_autograd(_scale_gradients, setup_context=_keep_gradients)


@torch.library.custom_op("lumen::linear_cross_entropy_losses", mutates_args=())
def _losses(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    chunk: int,
    ignore_index: int,
    smoothing: float,
    softcap: float | None,
) -> torch.Tensor:
    """Loss of each token."""
    _check_targets(targets, weight.shape[0], ignore_index)
    factor = torch.ones(targets.shape, dtype=at_least_fp32(hidden.dtype), device=hidden.device)
    out = torch.empty_like(factor)
    with torch.autocast(hidden.device.type, enabled=False):
        for start in range(0, hidden.shape[0], chunk):
            part = slice(start, start + chunk)
            logits = hidden[part] @ weight.t()
            out[part] = cross_entropy_rows(logits, targets[part], factor[part], None, ignore_index, smoothing, softcap)
    return out


@_losses.register_fake
def _(hidden, weight, targets, chunk, ignore_index, smoothing, softcap):
    return hidden.new_empty(targets.shape, dtype=at_least_fp32(hidden.dtype))


def _keep_operands(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.options = inputs[3:]


def _gradients_of_losses(ctx, grad):
    hidden, weight, targets = ctx.saved_tensors
    needs = ctx.needs_input_grad[:2]
    _, dhidden, dweight = _weighted(hidden, weight, targets, grad.contiguous(), *ctx.options, *needs)
    return dhidden if needs[0] else None, dweight if needs[1] else None, *[None] * 5


_losses.register_autograd(_gradients_of_losses, setup_context=_keep_operands)


# --- given logits -----------------------------------------------------------------------------------------------------


@torch.library.custom_op("lumen::cross_entropy", mutates_args=())
def _of_logits(
    logits: torch.Tensor,
    targets: torch.Tensor,
    factor: torch.Tensor,
    ignore_index: int,
    smoothing: float,
    softcap: float | None,
    needs_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of `factor` times loss, and its gradient (empty where not asked for)."""
    _check_targets(targets, logits.shape[1], ignore_index)
    gradient = torch.empty(logits.shape if needs_grad else (0,), dtype=logits.dtype, device=logits.device)
    where = gradient if needs_grad else None
    loss = cross_entropy_rows(logits.contiguous(), targets, factor, where, ignore_index, smoothing, softcap)
    return (loss * factor).sum(), gradient


@_of_logits.register_fake
def _(logits, targets, factor, ignore_index, smoothing, softcap, needs_grad):
    return factor.new_empty(()), logits.new_empty(logits.shape if needs_grad else (0,))


def _keep_gradient(ctx, inputs, output) -> None:
    ctx.save_for_backward(output[1])
    ctx.set_materialize_grads(False)


def _scale_gradient(ctx, grad, _):
    return (None if grad is None else _scaled(ctx.saved_tensors[0], grad), *[None] * 6)


_of_logits.register_autograd(_scale_gradient, setup_context=_keep_gradient)


class _Overwriting(torch.autograd.Function):
    """The same, the gradient written over the logits."""

    @staticmethod
    def forward(ctx, logits, targets, factor, ignore_index, smoothing, softcap):
        _check_targets(targets, logits.shape[1], ignore_index)
        plain = logits.detach()
        loss = cross_entropy_rows(plain, targets, factor, plain, ignore_index, smoothing, softcap)
        torch.autograd.graph.increment_version(logits)
        ctx.save_for_backward(plain)
        return (loss * factor).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return (_scaled(ctx.saved_tensors[0], grad), *[None] * 5)
