"""torchao's way of doing what is measured here, for a comparison in the same run.

Each function returns a callable that does the work once, or None where torchao has no counterpart. What it
needs and is absent (torchao itself, Triton, a kernel for this device) shows as an exception of the callable
or of the function; `attempt` turns both into a reason.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from lumen_core.config import QuantConfig
from lumen_core.formats import element_format, resolve_flavour

Work = Callable[[], object]


def attempt(make: Callable[[], Work | None]) -> tuple[Work | None, str | None]:
    """(the callable, None), or (None, why there is none): a rival that fails must not end our measurement."""
    try:
        work = make()
        if work is None:
            return None, "no counterpart"
        work()
    except Exception as error:
        return None, f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return work, None


def _float8(x: torch.Tensor, dtype: torch.dtype, row: bool, weight: bool) -> torch.Tensor:
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import GemmInputRole, LinearMMConfig

    return hp_tensor_to_float8_dynamic(
        x,
        dtype,
        LinearMMConfig(),
        gemm_input_role=GemmInputRole.WEIGHT if weight else GemmInputRole.INPUT,
        scaling_granularity=ScalingGranularity.AXISWISE if row else ScalingGranularity.TENSORWISE,
        axiswise_dim=-1 if row else None,
    )


def _mx(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    return MXTensor.to_mx(x, dtype, 32, ScaleCalculationMode.RCEIL)


def gemm(config: QuantConfig, a: torch.Tensor, b: torch.Tensor) -> Work | None:
    """`a @ b.T` of `[M, C]` and `[N, C]` in torchao's counterpart of a recipe, operands quantized beforehand."""
    fmt = element_format("e4m3", resolve_flavour("auto", a.device)).dtype
    if (config.activation_format, config.weight_format, config.gradient_format) != ("e4m3",) * 3:
        return None
    if config.scaling in ("dynamic", "delayed", "rowwise"):
        row = config.scaling == "rowwise"
        left, right = _float8(a, fmt, row, False), _float8(b, fmt, row, True).t()
    elif config.recipe == "mxfp8":
        left, right = _mx(a, fmt), _mx(b, fmt).t()
    else:
        return None
    return lambda: torch.mm(left, right)


def cast(name: str, x: torch.Tensor, compiled: bool) -> Work | None:
    """torchao's counterpart of one of `launch.bench.quantize.CASTS`."""
    fmt = element_format("e4m3", resolve_flavour("auto", x.device)).dtype
    wrap = torch.compile if compiled else (lambda function: function)
    if name in ("tensor", "row"):
        function = wrap(lambda t: _float8(t, fmt, name == "row", False))
    elif name in ("mxfp8 1x32", "mxfp4 1x32"):
        function = wrap(lambda t: _mx(t, fmt if name == "mxfp8 1x32" else torch.float4_e2m1fn_x2))
    elif name in ("1x128", "128x128"):
        from torchao.prototype.blockwise_fp8_training import kernels

        if name == "1x128":
            function = kernels.triton_fp8_blockwise_act_quant_lhs
        else:
            function = kernels.triton_fp8_blockwise_weight_quant_rhs
    else:
        return None
    return lambda: function(x)


def convert(model: torch.nn.Module, name: str) -> None:
    """Put torchao's float8 training on all linears of `model`: `tensorwise`, `rowwise` or `rowwise_with_gw_hp`."""
    from torchao import float8

    float8.convert_to_float8_training(model, config=float8.Float8LinearConfig.from_recipe_name(name))
