"""Triton kernel of `cross_entropy.py` beside this file. Needs the `triton` package."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _capped(z, softcap, SOFTCAP: tl.constexpr):
    # tanh(a) = 2 sigmoid(2a) - 1: cancels for small a, but no more than a rounding of softcap itself.
    if SOFTCAP:
        z = softcap * (2.0 / (1.0 + tl.exp(-2.0 * z / softcap)) - 1.0)
    return z


@triton.jit
def cross_entropy(
    logits_ptr,
    targets_ptr,
    factor_ptr,
    loss_ptr,
    gradient_ptr,
    vocabulary,
    ignore_index,
    smoothing,
    softcap,
    SMOOTHING: tl.constexpr,
    SOFTCAP: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row a program: a pass for the statistics and one for the gradient, which may overwrite the logits.

    The target's logit is picked out in the first pass, so that nothing reads one which the second may have overwritten.
    """
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * vocabulary
    gradient_ptr += row * vocabulary
    target = tl.load(targets_ptr + row)
    index = tl.arange(0, BLOCK)
    kept = target != ignore_index
    if kept:
        largest = tl.full([BLOCK], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        plain_sum = tl.zeros([BLOCK], tl.float32)
        chosen = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocabulary, BLOCK):
            inside = index < vocabulary - start
            z = tl.load(logits_ptr + start + index, mask=inside, other=0.0).to(tl.float32)
            z = _capped(z, softcap, SOFTCAP)
            chosen += tl.where(inside & (start + index == target), z, 0.0)
            if SMOOTHING:
                plain_sum += tl.where(inside, z, 0.0)
            z = tl.where(inside, z, float("-inf"))
            higher = tl.maximum(largest, z)
            # Where all so far is -inf, the difference would be NaN.
            base = tl.where(higher == float("-inf"), 0.0, higher)
            total = total * tl.exp(largest - base) + tl.exp(z - base)
            largest = higher
        top = tl.max(largest, axis=0)
        # Relative to the largest: beside large logits of one sign the difference of lse and target would cancel.
        log_total = tl.log(tl.sum(total * tl.exp(largest - top), axis=0))
        valid = (target >= 0) & (target < vocabulary)
        loss = log_total + (1.0 - smoothing) * (top - tl.sum(chosen, axis=0))
        if SMOOTHING:
            loss += smoothing * (top - tl.sum(plain_sum, axis=0) / vocabulary)
        tl.store(loss_ptr + row, tl.where(valid, loss, float("nan")))
        if GRADIENT:
            factor = tl.where(valid, tl.load(factor_ptr + row), float("nan"))
            for start in range(0, vocabulary, BLOCK):
                inside = index < vocabulary - start
                z = tl.load(logits_ptr + start + index, mask=inside, other=0.0).to(tl.float32)
                z = _capped(z, softcap, SOFTCAP)
                d = tl.exp(z - top - log_total)
                if SMOOTHING:
                    d -= smoothing / vocabulary
                d = tl.where(start + index == target, d - (1.0 - smoothing), d)
                if SOFTCAP:
                    d = d * (1.0 - (z / softcap) * (z / softcap))
                tl.store(gradient_ptr + start + index, (d * factor).to(gradient_ptr.dtype.element_ty), mask=inside)
    else:
        tl.store(loss_ptr + row, 0.0)
        if GRADIENT:
            zeros = tl.zeros([BLOCK], gradient_ptr.dtype.element_ty)
            for start in range(0, vocabulary, BLOCK):
                tl.store(gradient_ptr + start + index, zeros, mask=index < vocabulary - start)
