"""Rotary embedding of queries and keys."""

from __future__ import annotations

import torch

from lumen_core.kernels.norm import at_least_fp32
from lumen_core.kernels.query import RowsQuery
from lumen_core.kernels.registry import Candidate, Operation, always
from lumen_core.kernels.triton import rope as triton_rope


def _reference(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    return _rotate(q, cos, sin, inverse), _rotate(k, cos, sin, inverse)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool) -> torch.Tensor:
    half = cos.shape[-1]
    # Tokens beyond the table's rows are further sequences at the same positions.
    z = x[..., : 2 * half].unflatten(0, (-1, cos.shape[0])).to(at_least_fp32(x.dtype))
    cos, sin = cos[:, None], -sin[:, None] if inverse else sin[:, None]
    first, second = z[..., :half], z[..., half:]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1).flatten(0, 1)
    return torch.cat((turned.to(x.dtype), x[..., 2 * half :]), -1)


ROPE = Operation(
    "rope",
    (
        Candidate("triton", triton_rope.unsupported, triton_rope.rope),
        Candidate("reference", always, _reference),
    ),
)


@torch.library.custom_op("lumen::rope", mutates_args=())
def rope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotated copies of `q [T, Hq, D]` and `k [T, Hk, D]`, by the negative angles if `inverse`.

    `cos` and `sin` are `[P, R/2]` in fp32 (fp64); T is a multiple of P, and token t is at row t modulo P.
    """
    if q.shape[0] == 0:
        return q.new_empty(q.shape), k.new_empty(k.shape)
    query = RowsQuery(q.device.type, q.dtype, q.shape[0], q.shape[1] * q.shape[2])
    q_out, k_out = ROPE(query, q, k, cos.contiguous(), sin.contiguous(), inverse)
    return q_out.contiguous(), k_out.contiguous()


@rope.register_fake
def _(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool):
    return q.new_empty(q.shape), k.new_empty(k.shape)


def _setup(ctx, inputs, output) -> None:
    _, _, cos, sin, ctx.inverse = inputs
    ctx.save_for_backward(cos, sin)


def _gradients(ctx, grad_q, grad_k):
    cos, sin = ctx.saved_tensors
    return *rope(grad_q, grad_k, cos, sin, not ctx.inverse), None, None, None


rope.register_autograd(_gradients, setup_context=_setup)
