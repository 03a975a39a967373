"""`silu(gate) * up`, forward and backward."""

from __future__ import annotations

import torch

from lumen_core.kernels.norm import at_least_fp32
from lumen_core.kernels.query import RowsQuery
from lumen_core.kernels.registry import Candidate, Operation, Passes, always
from lumen_core.kernels.triton import swiglu as triton_swiglu


def _forward(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    wide = at_least_fp32(gate.dtype)
    return (torch.nn.functional.silu(gate.to(wide)) * up.to(wide)).to(gate.dtype)


def _backward(grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wide = at_least_fp32(gate.dtype)
    g, z = grad.to(wide), gate.to(wide)
    sigmoid = torch.sigmoid(z)
    dgate = g * up.to(wide) * sigmoid * (1 + z * (1 - sigmoid))
    return dgate.to(gate.dtype), (g * z * sigmoid).to(gate.dtype)


SWIGLU = Operation(
    "swiglu",
    (
        Candidate(
            "triton", triton_swiglu.unsupported, Passes(forward=triton_swiglu.forward, backward=triton_swiglu.backward)
        ),
        Candidate("reference", always, Passes(forward=_forward, backward=_backward)),
    ),
)


@torch.library.custom_op("lumen::swiglu", mutates_args=())
def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Contiguous, in gate's shape and dtype; both inputs have these."""
    rows = _rows(gate)
    return SWIGLU(_query(rows), "forward", rows, _rows(up)).contiguous().view(gate.shape)


@swiglu.register_fake
def _(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return gate.new_empty(gate.shape)


@torch.library.custom_op("lumen::swiglu_backward", mutates_args=())
def swiglu_backward(grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of gate and up, contiguous, in their shape and dtype."""
    rows = _rows(gate)
    dgate, dup = SWIGLU(_query(rows), "backward", _rows(grad), rows, _rows(up))
    return dgate.contiguous().view(gate.shape), dup.contiguous().view(gate.shape)


@swiglu_backward.register_fake
def _(grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return gate.new_empty(gate.shape), gate.new_empty(gate.shape)


def _setup(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx, grad):
    return swiglu_backward(grad, *ctx.saved_tensors)


swiglu.register_autograd(_gradients, setup_context=_setup)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """A matrix whose rows are contiguous: a half of a wider projection is one without a copy."""
    x = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


def _query(rows: torch.Tensor) -> RowsQuery:
    return RowsQuery(rows.device.type, rows.dtype, rows.shape[0], rows.shape[1])
