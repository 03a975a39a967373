"""The autograd rule of a tensor-parallel linear layer with quantized GEMMs.

Communication runs beside the GEMM that does not need it: the gather of the input beside dgrad, the reduction of the
input's gradient beside wgrad.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from lumen_core.gathered import GatheredWeight, WeightView
from lumen_core.operands import LinearOperands


@dataclass(frozen=True)
class Call:
    """What one pass through a layer does beside its GEMMs.

    Attributes:
        operands: casts and GEMMs.
        group: the tensor-parallel group; None where nothing is sent.
        gather_input: sequence parallelism: the input is this rank's part of the tokens (dimension 0).
        reduce_dgrad: the input's gradient is a sum over `group`.
        fuse_main_grad: the weight's gradient is added into `main_grad`.
        defer: takes a function that computes and stores the weight's gradient later; None computes it at once.
    """

    operands: LinearOperands
    group: dist.ProcessGroup | None
    gather_input: bool
    reduce_dgrad: bool
    fuse_main_grad: bool
    defer: Callable[[Callable[[], None]], None] | None


class ParallelLinear(torch.autograd.Function):
    """`y = x W^T + b` on `[tokens..., K]`; none of the sizes is 0."""

    @staticmethod
    def forward(ctx, x, weight, bias, call, backward_follows):
        keep = backward_follows and ctx.needs_input_grad[1]
        whole = _gathered(x, call.group)[0] if call.gather_input else x
        tokens = whole.reshape(-1, whole.shape[-1])
        view, parts = _as_operand(weight)
        out, saved, scale = call.operands.forward(tokens, view, x.dtype, keep)
        if call.gather_input and keep:
            saved, scale = x, None  # a rank keeps its own tokens; backward gathers them again
        ctx.save_for_backward(saved, scale, *(parts or (weight,)))
        ctx.view = (weight._info, (weight.shape[0], weight.shape[1]), weight.dtype) if parts else None
        ctx.parameter = weight  # not among the saved: the optimizer's own attributes hang on this object
        ctx.call = call
        ctx.x_shape, ctx.x_dtype = x.shape, x.dtype
        ctx.has_bias = bias is not None
        out = out if bias is None else out + bias.to(out.dtype)
        return out.view(*whole.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        call, parameter = ctx.call, ctx.parameter
        saved, scale, *parts = ctx.saved_tensors
        weight = parts[0] if ctx.view is None else WeightView(tuple(parts), *ctx.view)
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        grad = grad_output.reshape(-1, grad_output.shape[-1])
        whole, arrival = (saved, None)
        if call.gather_input and needs_weight:
            whole, arrival = _gathered(saved, call.group, wait=False)
        gradients = call.operands.gradients(grad, needs_x, needs_weight)
        grad_x, sending = None, None
        if needs_x:
            grad_x = call.operands.dgrad(gradients, weight, ctx.x_dtype)
            grad_x = grad_x.view(*grad_output.shape[:-1], grad_x.shape[-1])
            if call.gather_input:
                summed = grad_x.new_empty(ctx.x_shape)
                sending = dist.reduce_scatter_tensor(summed, grad_x.contiguous(), group=call.group, async_op=True)
                grad_x, source = summed, grad_x  # noqa: F841 - alive until it is sent
            elif call.reduce_dgrad:
                sending = dist.all_reduce(grad_x, group=call.group, async_op=True)
        grad_weight = None
        if needs_weight:
            shape = (grad.shape[0], parameter.shape[1])

            def wgrad() -> torch.Tensor:
                x = whole.reshape(-1, shape[1]) if scale is None and call.gather_input else whole
                return call.operands.wgrad(gradients, x, scale, shape, parameter.dtype)

            if arrival is not None:
                arrival.wait()
            if call.defer is None:
                grad_weight = _delivered(parameter, wgrad(), call.fuse_main_grad)
            else:
                call.defer(lambda: _store(parameter, wgrad(), call.fuse_main_grad))
        grad_bias = grad.sum(dim=0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        if sending is not None:
            sending.wait()
        return grad_x, grad_weight, grad_bias, None, None


def _as_operand(weight: torch.Tensor) -> tuple[torch.Tensor | WeightView, tuple[torch.Tensor, ...]]:
    return (weight.view_of(), weight.parts()) if isinstance(weight, GatheredWeight) else (weight, ())


def _gathered(x: torch.Tensor, group: dist.ProcessGroup, wait: bool = True) -> tuple[torch.Tensor, dist.Work | None]:
    out = x.new_empty((x.shape[0] * dist.get_world_size(group), *x.shape[1:]))
    return out, dist.all_gather_into_tensor(out, x.contiguous(), group=group, async_op=not wait)


def _delivered(parameter: torch.Tensor, grad: torch.Tensor, fuse: bool) -> torch.Tensor | None:
    """The gradient for autograd; where it went into `main_grad`, what Megatron's hooks want to see in its place."""
    if not fuse or getattr(parameter, "main_grad", None) is None:
        return grad
    parameter.main_grad.add_(grad)
    if not hasattr(parameter, "grad_added_to_main_grad"):
        return None
    parameter.grad_added_to_main_grad = True
    # Hooks of overlapped reduction run only where there is a gradient; they read its values in one case only.
    return torch.zeros_like(grad) if getattr(parameter, "zero_out_wgrad", False) else grad


def _store(parameter: torch.Tensor, grad: torch.Tensor, fuse: bool) -> None:
    """Put a deferred gradient where autograd would have."""
    if fuse and getattr(parameter, "main_grad", None) is not None:
        parameter.main_grad.add_(grad)
        if hasattr(parameter, "grad_added_to_main_grad"):
            parameter.grad_added_to_main_grad = True
    else:
        parameter.grad = grad if parameter.grad is None else parameter.grad + grad
