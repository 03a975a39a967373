"""Attention with bounds: which implementation runs it, and the operations that `torch.compile` sees.

Two custom operations, forward and backward, each for the implementation named in its arguments: it was chosen where
the query was known. SDPA brings its own autograd and is called as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from lumen_core.kernels import attention_reference as reference
from lumen_core.kernels.registry import Candidate, Operation, always
from lumen_core.kernels.triton import attention as triton_attention


@dataclass(frozen=True)
class AttentionQuery:
    """What the candidates are asked.

    Attributes:
        recipe, flavour: `bf16`, `fp8` or `mxfp8`, and the flavour of its elements.
        batch, queries, keys, heads, kv_heads, head_dim: sizes of q `[B, Sq, H, D]` and k `[B, Sk, Hk, D]`.
        causal: a query sees nothing behind its own position.
        only_causal: that is all there is to its mask: neither a window nor documents.
        lse: the softmax statistics are asked for.
    """

    device_type: str
    dtype: torch.dtype
    recipe: str
    flavour: str
    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    only_causal: bool
    lse: bool


def _sdpa_unsupported(query: AttentionQuery) -> str | None:
    if query.recipe != "bf16":
        return f"recipe {query.recipe}"
    if not query.only_causal:
        return "a window, or packed documents"
    if query.lse:
        return "softmax statistics"
    if query.causal and query.queries != query.keys:
        return "SDPA aligns a causal mask of unequal lengths at the beginning"
    if query.keys == 0:
        return "no keys"
    return None


def _sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    first: torch.Tensor,
    last: torch.Tensor,
    scale: float,
    query: AttentionQuery,
) -> tuple[torch.Tensor, None]:
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    grouped = query.heads != query.kv_heads
    out = F.scaled_dot_product_attention(*heads_first, is_causal=query.causal, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2), None


def _triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    first: torch.Tensor,
    last: torch.Tensor,
    scale: float,
    query: AttentionQuery,
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ops.lumen.attention(q, k, v, first, last, scale, query.recipe, query.flavour, "triton")


def _reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    first: torch.Tensor,
    last: torch.Tensor,
    scale: float,
    query: AttentionQuery,
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ops.lumen.attention(q, k, v, first, last, scale, query.recipe, query.flavour, "reference")


ATTENTION = Operation(
    "attention",
    (
        Candidate("sdpa", _sdpa_unsupported, _sdpa),
        Candidate("triton", triton_attention.unsupported, _triton),
        Candidate("reference", always, _reference),
    ),
)


def _statistics(q: torch.Tensor) -> torch.Tensor:
    batch, queries, heads, _ = q.shape
    return q.new_empty((batch, heads, queries), dtype=torch.promote_types(q.dtype, torch.float32))


_IMPLEMENTATIONS = {"triton": triton_attention, "reference": reference}


@torch.library.custom_op("lumen::attention", mutates_args=())
def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    first: torch.Tensor,
    last: torch.Tensor,
    scale: float,
    recipe: str,
    flavour: str,
    implementation: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    if q.numel() == 0 or k.numel() == 0:
        return torch.zeros_like(q, memory_format=torch.contiguous_format), _statistics(q).fill_(-torch.inf)
    module, precision = _IMPLEMENTATIONS[implementation], reference.precision(recipe, flavour)
    return module.forward(q, k, v, first, last, scale, precision)


@_forward.register_fake
def _(q: torch.Tensor, k, v, first, last, scale: float, recipe: str, flavour: str, implementation: str):
    return q.new_empty(q.shape), _statistics(q)


@torch.library.custom_op("lumen::attention_backward", mutates_args=())
def _backward(
    grad: torch.Tensor,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    first: torch.Tensor,
    last: torch.Tensor,
    scale: float,
    recipe: str,
    flavour: str,
    implementation: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if q.numel() == 0 or k.numel() == 0:
        return tuple(torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    module, precision = _IMPLEMENTATIONS[implementation], reference.precision(recipe, flavour)
    return module.backward(grad, grad_lse, q, k, v, out, lse, first, last, scale, precision)


@_backward.register_fake
def _(grad, grad_lse, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx, inputs, output) -> None:
    q, k, v, first, last, *ctx.settings = inputs
    ctx.save_for_backward(q, k, v, *output, first, last)
    ctx.set_materialize_grads(False)


def _autograd(ctx, grad: torch.Tensor | None, grad_lse: torch.Tensor | None):
    q, k, v, out, lse, first, last = ctx.saved_tensors
    if grad is None:
        grad = torch.zeros_like(out)
    grads = torch.ops.lumen.attention_backward(grad, grad_lse, q, k, v, out, lse, first, last, *ctx.settings)
    return *grads, None, None, None, None, None, None


_forward.register_autograd(_autograd, setup_context=_setup_context)
