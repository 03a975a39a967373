"""Run the Triton kernels of the operations with autograd in Triton's interpreter and print what differs.

A program of its own (`test_ops_compile.py` starts it): `TRITON_INTERPRET` must be set before a kernel is defined. fp32
only: this checks indices, masks and formulas against each operation's reference.
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from lumen_core.kernels.cross_entropy import CROSS_ENTROPY
from lumen_core.kernels.norm import NORM
from lumen_core.kernels.rope import ROPE
from lumen_core.kernels.swiglu import SWIGLU
from lumen_core.kernels.triton import cross_entropy, norm, rope, swiglu

compared = 0


def compare(label: object, operation: Any, *args: Any) -> None:
    """The first candidate (Triton) against the last (the reference)."""
    global compared
    compared += 1
    got, want = (operation.candidates[i].run(*args) for i in (0, -1))
    got, want = (x if isinstance(x, tuple) else (x,) for x in (got, want))
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        if g.shape != w.shape or not torch.allclose(g, w, rtol=2e-5, atol=2e-5, equal_nan=True):
            print(operation.name, label, i)


def check_norm() -> None:
    for rows, columns in ((1, 1), (5, 33), (300, 16), (9, 257), (2, 3000)):
        x, grad = torch.randn(2, rows, columns)
        weight, bias = torch.randn(2, columns)
        for center in (False, True):
            label = rows, columns, center
            compare(label, NORM, "forward", x, weight, bias if center else None, 1e-5, center)
            _, mean, rstd = NORM.candidates[-1].run("forward", x, weight, None, 1e-5, center)
            compare(label, NORM, "backward", grad, x, weight, mean, rstd, center, center)


def check_swiglu() -> None:
    for rows, columns in ((1, 1), (5, 33), (200, 16), (3, 5000)):
        grad, wide = torch.randn(rows, columns), torch.randn(rows, 2 * columns) * 3
        gate, up = wide.chunk(2, dim=-1)
        compare((rows, columns), SWIGLU, "forward", gate, up)
        compare((rows, columns), SWIGLU, "backward", grad, gate, up)


def check_rope() -> None:
    for q_heads, k_heads, dim, half in ((4, 2, 16, 8), (33, 1, 30, 5), (40, 8, 128, 64)):
        q, k = torch.randn(6, q_heads + k_heads, dim).split((q_heads, k_heads), dim=1)
        cos, sin = torch.randn(2, 3, half)
        for inverse in (False, True):
            compare((q_heads, dim, inverse), ROPE, q, k, cos, sin, inverse)


def check_cross_entropy() -> None:
    for vocabulary in (1, 37, 100, 9001):
        logits = torch.randn(6, vocabulary) * 3
        logits[5] = 0
        targets = torch.randint(0, vocabulary, (6,))
        targets[1], targets[2], targets[3] = -100, vocabulary, -1
        for smoothing, softcap in ((0.0, None), (0.1, None), (0.2, 5.0)):
            label, factor = (vocabulary, smoothing, softcap), torch.rand(6)
            compare(label, CROSS_ENTROPY, logits, targets, factor, None, -100, smoothing, softcap)
            written = []
            for i in (0, -1):
                written.append(logits.clone())
                CROSS_ENTROPY.candidates[i].run(written[-1], targets, factor, written[-1], -100, smoothing, softcap)
            if not torch.allclose(*written, rtol=2e-5, atol=2e-6, equal_nan=True):
                print("gradient", *label)


if __name__ == "__main__":
    torch.manual_seed(0)
    for module in (cross_entropy, norm, rope, swiglu):
        module.on_device_of = lambda x: nullcontext()
    norm._processors = lambda device: 2
    check_norm()
    check_swiglu()
    check_rope()
    check_cross_entropy()
    print(f"{compared} compared")
