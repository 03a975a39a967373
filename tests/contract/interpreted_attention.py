"""Run the Triton attention in Triton's interpreter, on a CPU, and print what differs from the reference.

A program of its own (`test_attention_compile.py` starts it), with the conversions of `interpreted.py`. Products are
fp32 here, and bf16 and fp8 are what torch makes of them: this checks indices, masks, phases, strides and scales.
"""

from __future__ import annotations

import itertools
import math
from contextlib import nullcontext
from typing import Any

import interpreted  # first: it sets TRITON_INTERPRET
import torch
from triton import language as tl
from triton.runtime import interpreter

from lumen_core.attention_bounds import dense_bounds, document_bounds, position_bounds
from lumen_core.kernels import attention_reference as reference
from lumen_core.kernels.triton import attention

# Decibels between kernel and reference: rounding of fp32; rounding that differs where the block sizes do.
LEAST = {"bf16": 80.0, "fp8": 24.0, "mxfp8": 24.0}


def masks():
    """Queries, keys, batch and bounds: more queries or keys, a window, documents by length and by position."""
    cpu = torch.device("cpu")
    yield 33, 70, 1, dense_bounds(33, 70, True, None, cpu)
    yield 100, 33, 2, dense_bounds(100, 33, False, (20, 7), cpu)
    cu_q, cu_k = torch.tensor([0, 3, 40, 40, 66, 72]).int(), torch.tensor([0, 8, 50, 55, 55, 60]).int()
    yield 75, 60, 1, document_bounds(cu_q, cu_k, 75, True, None)
    rows = [torch.cat([torch.arange(n) for n in lengths]) for lengths in ((3, 5, 62), (40, 1, 29))]
    yield 70, 70, 2, position_bounds(torch.stack(rows), True, (25, 0))


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """Signal to noise in decibels; the least possible where something is not finite."""
    if not got.isfinite().all():
        return -math.inf
    error, signal = (got.double() - want.double()).square().sum().item(), want.double().square().sum().item()
    return math.inf if error == 0 else 10 * math.log10(max(signal, 1e-30) / error)


def check(recipe: str, flavour: str, width: int, heads: int, kv_heads: int, strided: bool) -> int:
    count = 0
    p = reference.precision(recipe, flavour)
    for queries, keys, batch, bounds in masks():
        shapes = ((queries, heads), (keys, kv_heads), (keys, kv_heads), (queries, heads))
        if strided:
            q, k, v, g = (torch.randn(batch, h, n, width).transpose(1, 2) for n, h in shapes)
        else:
            q, k, v, g = (torch.randn(batch, n, h, width) for n, h in shapes)
        grad_lse = torch.randn(batch, heads, queries)
        out, lse = reference.forward(q, k, v, *bounds, width**-0.5, p)
        got, got_lse = attention.forward(q, k, v, *bounds, width**-0.5, p)
        none = lse == -math.inf
        assert torch.equal(none, got_lse == -math.inf), "queries that see nothing"
        pairs = [(got, out), (got_lse[~none], lse[~none])]
        grads = reference.backward(g, grad_lse, q, k, v, out, lse, *bounds, width**-0.5, p)
        pairs += zip(attention.backward(g, grad_lse, q, k, v, out, lse, *bounds, width**-0.5, p), grads)
        for name, (a, b) in zip(("out", "lse", "dq", "dk", "dv"), pairs):
            count += 1
            if distance(a, b) < LEAST[recipe]:
                print(name, recipe, flavour, width, queries, keys, distance(a, b))
    return count


def patch() -> None:
    """The interpreter multiplies the bit patterns of bf16 as integers: give it their values, in fp32."""
    theirs = interpreter.InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        if a.dtype.scalar == tl.bfloat16:
            a, b = (self.create_fp_to_fp(x, tl.float32, None) for x in (a, b))
        return theirs(self, a, b, *rest)

    interpreter.InterpreterBuilder.create_dot = create_dot
    interpreted.patch()


if __name__ == "__main__":
    torch.manual_seed(0)
    patch()
    attention.on_device_of = lambda x: nullcontext()
    # Several blocks and phases of a short sequence.
    attention.blocks = lambda kernel, recipe, width: ({"BM": 32, "BN": 32}, {})
    total = check("bf16", "ocp", 32, 2, 1, strided=True)
    for recipe, flavour in itertools.product(("fp8", "mxfp8"), ("ocp", "fnuz")):
        total += check(recipe, flavour, 48, 2, 1, strided=flavour == "ocp")
    print(f"{total} compared")
