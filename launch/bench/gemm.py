"""TFLOP/s of a recipe's three GEMMs beside torch's in bf16 and torchao's.

The operands are those of a real training step: one quantized linear layer runs forward and backward while its
products are recorded, and each recorded product is then repeated. Casts are not in these numbers
(`lumen-bench quantize`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from launch.bench import rivals
from launch.bench.timing import Stopwatch
from lumen_core import operands
from lumen_core import quantize as quant
from lumen_core.config import QuantConfig
from lumen_core.kernels.gemm import GEMM, query_of
from lumen_core.tensor import QuantizedTensor

GEMMS = ("fprop", "dgrad", "wgrad")


def measure(
    configs: Sequence[QuantConfig], m: int, n: int, k: int, dtype: torch.dtype, watch: Stopwatch
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Measure a linear layer of K inputs and N outputs on M tokens.

    Returns:
        TFLOP/s of torch's bf16 products ("ceiling" is the best of them), and rows: recipe, gemm, kernel, ms,
        tflops, of_ceiling (fraction), vs_bf16 and vs_torchao (speed-up on the same product; None where
        absent), torchao_tflops, torchao_reason (why absent).
    """
    generator = torch.Generator().manual_seed(0)
    sizes = {"x": (m, k), "w": (n, k), "g": (m, n)}
    x, w, g = (torch.randn(s, generator=generator).to(watch.device, dtype) for s in sizes.values())
    flops = 2.0 * m * n * k
    products = {"fprop": (x, w), "dgrad": (g, w.t()), "wgrad": (g.t(), x.t())}

    bf16 = {}
    for name, (a, b) in products.items():
        left, right = a.to(torch.bfloat16), b.to(torch.bfloat16).t()
        bf16[name] = flops / watch.seconds(lambda left=left, right=right: torch.mm(left, right)) / 1e12
    bf16["ceiling"] = max(bf16.values())

    rows = []
    for config in configs:
        recorded = record(config, x, w, g)
        for name, (a, b) in products.items():
            row: dict[str, Any] = {"recipe": str(config), "gemm": name}
            kernel, run = recorded.get(name, ("torch bf16", None))
            tflops = bf16[name] if run is None else flops / watch.seconds(run) / 1e12
            row |= {"kernel": kernel, "ms": flops / tflops / 1e9, "tflops": tflops}
            row |= {"of_ceiling": tflops / bf16["ceiling"], "vs_bf16": tflops / bf16[name]}
            work, reason = None, "bf16"
            if run is not None:
                operands = a.contiguous(), b.contiguous()
                work, reason = rivals.attempt(lambda c=config, o=operands: rivals.gemm(c, *o))
            rival = None if work is None else flops / watch.seconds(work) / 1e12
            row |= {"torchao_tflops": rival, "torchao_reason": reason}
            row["vs_torchao"] = None if rival is None else tflops / rival
            rows.append(row)
    return bf16, rows


def record(
    config: QuantConfig, x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor
) -> dict[str, tuple[str, Callable[[], torch.Tensor]]]:
    """Name of the kernel and a repetition of each low-precision product of one training step of one linear
    layer.
    """
    model = torch.nn.Sequential(torch.nn.Linear(*weight.shape[::-1], bias=False, device=x.device, dtype=x.dtype))
    with torch.no_grad():
        model[0].weight.copy_(weight)
    quant.enable(model, config)
    leaf = x.clone().requires_grad_()
    with _recording() as products:
        out = model(leaf)
        fprop, products[:] = list(products), []
        out.backward(grad)
    # A GEMM that the recipe leaves in bf16 does not pass through there.
    low = [name for name in ("dgrad", "wgrad") if getattr(config, name) == "low" and config.quantize_activation]
    return dict(zip(["fprop"] * len(fprop) + low, fprop + products))


@contextmanager
def _recording() -> Iterator[list[tuple[str, Callable[[], torch.Tensor]]]]:
    """Collects the products of quantized layers."""
    products: list[tuple[str, Callable[[], torch.Tensor]]] = []
    gemm = operands.gemm

    def recording(a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, **options: Any) -> torch.Tensor:
        name = GEMM.choose(query_of(a, b, out_dtype)).name
        products.append((name, lambda: gemm(a, b, out_dtype, **options)))
        return gemm(a, b, out_dtype, **options)

    operands.gemm = recording
    try:
        yield products
    finally:
        operands.gemm = gemm
