"""The quantized linear layer: `y = x W^T + b` with its three GEMMs in low precision.

    fprop   y  = x  W^T    contracts K = in_features
    dgrad   dx = g  W      contracts N = out_features
    wgrad   dW = g^T x     contracts M = tokens

Each operand is quantized along the axis its GEMM contracts, from the high-precision value; the exceptions (one copy
that serves two GEMMs) are those in which nothing is quantized twice, plus `dgrad_weight="from_rows"`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from lumen_core.amax import ScalingState
from lumen_core.config import QuantConfig
from lumen_core.gathered import GatheredWeight, WeightView
from lumen_core.operands import LinearOperands
from lumen_core.sharding import ObservedParameters, parameters_moved

__all__ = ["QuantLinear", "quantized_linear"]


class _QuantizedLinear(torch.autograd.Function):
    """Autograd rule on matrices: x `[M, K]`, weight `[N, K]` -> `[M, N]`; none of M, N, K is 0."""

    @staticmethod
    def forward(ctx, x, weight, config, state, record, out_dtype, backward_follows, info, *parts):
        operands = LinearOperands(config, x.device, state, record)
        ctx.gathered = None
        if info is not None:
            # The wrapper stands for the gradient only; its bytes come as inputs of their own, which are saved instead.
            ctx.gathered = (info, (weight.shape[0], weight.shape[1]), weight.dtype)
            weight = WeightView(parts, *ctx.gathered)
        # needs_input_grad alone is true under no_grad as well, where an activation kept for wgrad is work for nothing.
        out, saved, scale = operands.forward(x, weight, out_dtype, backward_follows and ctx.needs_input_grad[1])
        ctx.save_for_backward(saved, scale, *(parts if info is not None else (weight,)))
        ctx.operands = operands
        ctx.x_dtype = x.dtype
        ctx.x_shape = (x.shape[0], x.shape[1])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        saved, scale, *parts = ctx.saved_tensors
        weight = parts[0] if ctx.gathered is None else WeightView(tuple(parts), *ctx.gathered)
        with torch.autocast(grad_output.device.type, enabled=False):
            grad_x, grad_weight = ctx.operands.backward(
                grad_output,
                weight,
                saved,
                scale,
                ctx.x_shape,
                ctx.x_dtype,
                needs_dgrad=ctx.needs_input_grad[0],
                needs_wgrad=ctx.needs_input_grad[1],
            )
        return (grad_x, grad_weight, *[None] * (6 + (0 if ctx.gathered is None else len(parts))))


def quantized_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    config: QuantConfig,
    state: ScalingState | None = None,
    *,
    record: bool = False,
) -> torch.Tensor:
    """`F.linear` with quantized GEMMs.

    Args:
        x: `[..., K]`, any float dtype, zero or more tokens.
        weight: `[N, K]` in x's dtype, or any float dtype under autocast, which sets the output's dtype only: the weight
            is quantized from its own value. A `GatheredWeight` brings its codes.
        bias: `[N]` or None, added in high precision.
        config: the recipe.
        state: amax history and rounding counter; needed for delayed scaling.
        record: let this pass enter the amax history (training, and not a pass without gradients).

    Returns:
        `[..., N]` in x's dtype, or the autocast dtype.

    Raises:
        TypeError: x and weight differ in dtype outside autocast.
        ValueError: last dimension of x is not K.
    """
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(f"input of shape {tuple(x.shape)} does not match in_features={weight.shape[1]}")
    device_type = x.device.type
    if torch.is_autocast_enabled(device_type) and x.dtype != torch.float64:  # which autocast leaves alone
        x = x.to(torch.get_autocast_dtype(device_type))
    elif x.dtype != weight.dtype:
        raise TypeError(
            f"input is {x.dtype} but weight is {weight.dtype}: convert one of them, or run under torch.autocast"
        )
    if x.numel() == 0 or weight.numel() == 0:
        # No token (or no feature): nothing to quantize, and torch's own rule keeps zero gradients in the graph.
        return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
    with torch.autocast(device_type, enabled=False):
        tokens = x.reshape(-1, x.shape[-1])
        info, parts = (weight._info, weight.parts()) if isinstance(weight, GatheredWeight) else (None, ())
        grad = torch.is_grad_enabled()
        out = _QuantizedLinear.apply(tokens, weight, config, state, record, x.dtype, grad, info, *parts)
        if bias is not None:
            out = out + bias.to(out.dtype)
        # Not marked as a view of a buffer that nobody else holds: hosts warn of writes to views.
        return out if x.dim() == 2 else torch.ops.aten._unsafe_view(out, (*x.shape[:-1], weight.shape[0]))


class QuantLinear(ObservedParameters, torch.nn.Linear):
    """`nn.Linear` whose GEMMs follow a `QuantConfig`.

    `quantize.enable` turns an existing `nn.Linear` into this class in place, so that parameters, names, hooks and other
    references to the module stay as they were.

    Attributes:
        quant_config: the recipe in force.
        quant_state: `ScalingState`.
    """

    quant_config: QuantConfig
    quant_state: ScalingState

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise TypeError("QuantLinear is made from an nn.Linear: build the model with those, then call quant.enable")

    @classmethod
    def convert_(cls, linear: torch.nn.Linear, config: QuantConfig, base_key: int = 0) -> QuantLinear:
        """Turn `linear` into a `QuantLinear` in place."""
        linear.__class__ = cls
        linear.quant_config = config
        linear.quant_state = ScalingState(config.history_len, linear.weight.device, base_key)
        return linear

    def restore_(self) -> torch.nn.Linear:
        """Turn back into the `nn.Linear` it was."""
        self.__class__ = torch.nn.Linear
        del self.quant_config, self.quant_state
        return self

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """`[..., in_features] -> [..., out_features]`; see `quantized_linear`."""
        if self.quant_state.device != input.device:
            self.quant_state.to(input.device)
        record = self.training and torch.is_grad_enabled()
        if record and self.quant_config.scaling == "delayed" and not torch.compiler.is_compiling():
            self.quant_state.notice_update(self.weight._version, self.quant_config.amax_algo)
        weight = self.weight
        if isinstance(weight, GatheredWeight) and not torch.compiler.is_compiling():
            weight._info.notice_pass(self.training)

        def run(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
            return quantized_linear(x, w, b, self.quant_config, self.quant_state, record=record)

        if hasattr(weight, "placements"):  # a DTensor; its module is heavy to import for those who have none
            from lumen_core import tensor_parallel

            return tensor_parallel.linear(input, weight, self.bias, run)
        return run(input, weight, self.bias)

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        parameters_moved(self)
        self.quant_state.to(self.weight.device)
        return self

    def extra_repr(self) -> str:
        """`nn.Linear`'s, with the recipe."""
        return f"{super().extra_repr()}, recipe={self.quant_config.recipe}"
