"""Attention in BF16, FP8 and MXFP8, forward and backward, dense or over packed documents.

`fp8`, after FlashAttention-3 (arXiv 2407.08608, section 3.3) and SageAttention (arXiv 2410.02367): q, k and v are cast
to E4M3 with one scale for each head of each sequence (packed: of the whole pack). The scale is a power of two: rounding
to E4M3 then does not depend on it, so that a neighbour in the pack changes a document by underflow at most.
exp(S - max) lies in [0, 1] and is cast with a fixed power of two; row sums are taken before the cast. The gradient of
the output is cast like q, to E4M3: with a scale for each head its range suffices, and E5M2 would cost 6 dB. In the
backward pass P and dS are cast with one power-of-two scale for each row of a block: dS spans too many orders for a
fixed one, and so does P, divided by its sum, in long sequences.

`mxfp8`: every operand in blocks of 32 along the axis that a product contracts, E8M0 scales rounded up (OCP MX v1.0;
rounding as in arXiv 2506.08027); those contracted along D in one product and along tokens in another are quantized from
the high-precision values for each. All products accumulate in fp32 (fp64 inputs without quantization: in fp64).
"""

from __future__ import annotations

import torch

from lumen_core.attention_bounds import Window, dense_bounds, document_bounds
from lumen_core.formats import resolve_flavour
from lumen_core.kernels.attention import ATTENTION, AttentionQuery

RECIPES = ("bf16", "fp8", "mxfp8")


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: Window | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    recipe: str = "bf16",
    flavour: str = "auto",
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`softmax(q k^T * scale + mask) v`, differentiable in q, k and v, never waiting for the device.

    Args:
        q: `[B, Sq, H, D]`, or packed documents `[Tq, H, D]`; fp32, bf16, fp16 or fp64.
        k, v: `[B, Sk, Hk, D]` or `[Tk, Hk, D]`, q's dtype; H is a multiple of Hk (grouped queries).
        causal: query i sees keys up to its own position. Positions are aligned at the end: the last query is at the
            last key's, in each document, so with more queries than keys the first ones see nothing.
        scale: default `D ** -0.5`.
        window: how many keys are seen left and right of a query's position, -1 for all; `(0, 0)` is itself only.
        cu_seqlens_q: int32 `[documents + 1]`, where each packed document begins, and the end of the last. Documents
            never see each other. Empty ones are allowed.
        cu_seqlens_k: the same for keys; default: `cu_seqlens_q`.
        max_seqlen: taken so that FlashAttention's callers need not change; bounds make it needless.
        recipe: `bf16` computes in the dtype of the inputs, `fp8` and `mxfp8` as above.
        flavour: of the FP8 elements; `auto` is the device's.
        return_lse: give the softmax statistics, too; their gradient counts.

    Returns:
        Output of q's shape and dtype; with `return_lse` also `log(sum(exp(scores)))`, fp32 `[B, H, Sq]` or `[H, Tq]`.
        A query that sees no key gives zeros, -inf there, and zero gradients.

    Raises:
        ValueError: shapes, dtypes or options that do not fit, named.
    """
    packed = cu_seqlens_q is not None
    _check(q, k, v, packed, cu_seqlens_q, cu_seqlens_k, window, recipe)
    if packed:
        cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
        bounds = document_bounds(cu_seqlens_q, cu_seqlens_k, q.shape[0], causal, window)
        q, k, v = q[None], k[None], v[None]
    else:
        bounds = dense_bounds(q.shape[1], k.shape[1], causal, window, q.device)
    out, lse = attend(
        q, k, v, bounds, scale=scale, recipe=recipe, flavour=flavour, causal=causal,
        only_causal=not packed and window is None, lse=return_lse,
    )  # fmt: skip
    if packed:
        out, lse = out[0], None if lse is None else lse[0]
    return (out, lse) if return_lse else out


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bounds: tuple[torch.Tensor, torch.Tensor],
    *,
    scale: float | None,
    recipe: str,
    flavour: str = "auto",
    causal: bool,
    only_causal: bool,
    lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention `[B, S, H, D]` with the keys of each query given as bounds; output and, where asked for, statistics.

    Args:
        bounds: as `lumen_core.attention_bounds` makes them, `[B, Sq]` or `[1, Sq]`; both ends must never decrease.
        only_causal: the bounds say nothing beyond `causal`.
    """
    batch, queries, heads, width = q.shape
    flavour = resolve_flavour(flavour, q.device)
    query = AttentionQuery(
        q.device.type, q.dtype, recipe, flavour, batch, queries, k.shape[1], heads, k.shape[2], width, causal,
        only_causal, lse,
    )  # fmt: skip
    return ATTENTION(query, q, k, v, *bounds, width**-0.5 if scale is None else scale, query)


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    packed: bool,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    window: Window | None,
    recipe: str,
) -> None:
    if recipe not in RECIPES:
        raise ValueError(f"recipe={recipe!r}: must be one of {', '.join(RECIPES)}")
    if cu_seqlens_k is not None and not packed:
        raise ValueError("cu_seqlens_k without cu_seqlens_q")
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    layout = "[T, H, D] with cu_seqlens" if packed else "[B, S, H, D] without cu_seqlens"
    if not q.dim() == k.dim() == v.dim() == (3 if packed else 4):
        raise ValueError(f"{shapes}: expected {layout}")
    if k.shape != v.shape or q.shape[-1] != k.shape[-1] or (not packed and q.shape[0] != k.shape[0]):
        raise ValueError(f"{shapes}: batch and head size must agree, and k and v in everything")
    if k.shape[-2] == 0 or q.shape[-2] % k.shape[-2]:
        raise ValueError(f"{shapes}: query heads must be a multiple of key heads")
    if not q.dtype == k.dtype == v.dtype or not q.dtype.is_floating_point:
        raise ValueError(f"q {q.dtype}, k {k.dtype}, v {v.dtype}: must be one floating-point dtype")
    for name, cu in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if cu is not None and (cu.dtype != torch.int32 or cu.dim() != 1 or cu.shape[0] == 0):
            raise ValueError(f"{name}: expected int32 [documents + 1], not {cu.dtype} {tuple(cu.shape)}")
    if packed and cu_seqlens_k is not None and cu_seqlens_k.shape != cu_seqlens_q.shape:
        raise ValueError(f"{cu_seqlens_q.shape[0] - 1} documents of queries, {cu_seqlens_k.shape[0] - 1} of keys")
    if packed and cu_seqlens_k is None and q.shape[0] != k.shape[0]:
        raise ValueError(f"{shapes}: as many queries as keys, or cu_seqlens_k")
    if window is not None and not (len(window) == 2 and all(isinstance(side, int) for side in window)):
        raise ValueError(f"window={window!r}: expected two ints (left, right)")
