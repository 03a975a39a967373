"""How each operand of the three GEMMs is quantized, for every recipe."""

from __future__ import annotations

from dataclasses import replace

import torch

from lumen_core.amax import GRADIENT, INPUT, WEIGHT, ScalingState
from lumen_core.casts import ROW_BLOCK, TENSOR_BLOCK
from lumen_core.config import QuantConfig
from lumen_core.formats import ElementFormat, element_format, resolve_flavour
from lumen_core.hadamard import hadamard
from lumen_core.kernels import registry
from lumen_core.kernels.reference import matmul_bf16
from lumen_core.rounding import stochastic_noise
from lumen_core.tensor import QuantizedTensor, quantize

# Streams of one rounding key: the copies for dgrad and wgrad must not share random bits.
_DGRAD_STREAM, _WGRAD_STREAM = 0, 1


class LinearOperands:
    """Quantizes the operands of one forward and its backward, and multiplies them.

    Args:
        config: the recipe.
        device: where the tensors are; decides the FP8 flavour where the recipe leaves it open.
        state: amax history and rounding counter, None for recipes that need neither.
        record: whether amax values enter the history.
    """

    def __init__(self, config: QuantConfig, device: torch.device, state: ScalingState | None, record: bool) -> None:
        if config.scaling == "delayed" and state is None:
            raise ValueError("scaling='delayed' needs a ScalingState to keep its amax history in")
        self.config = config
        self.flavour = resolve_flavour(config.flavour, device)
        self.state = state
        self.record = record

    # --- forward ------------------------------------------------------------------------------------------------------

    def fprop(self, x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        """`x @ weight.T`: `[M, K] x [N, K] -> [M, N]`."""
        if self.config.fprop == "bf16":
            return matmul_bf16(x, weight, out_dtype)
        quantized = self._weight(weight)
        if not self.config.quantize_activation:
            return matmul_bf16(x, quantized.dequantize(x.dtype), out_dtype)
        return registry.gemm(self._activation(x), quantized, out_dtype, fast_accum=self.config.fast_accum)

    def save_activation(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What wgrad needs of the activation: codes and scale where the recipe allows, else `x` and None."""
        if self._wgrad_is_low and self.config.low_precision_activations:
            saved = self._activation_for_wgrad(x)
            return saved.data, saved.scale
        return x, None

    # --- backward -----------------------------------------------------------------------------------------------------

    def gradient(self, grad: torch.Tensor) -> GradientOperands:
        """Operands of the backward GEMMs for one output gradient `[M, N]`."""
        return GradientOperands(self, grad)

    # --- operands -----------------------------------------------------------------------------------------------------

    @property
    def _wgrad_is_low(self) -> bool:
        return self.config.wgrad == "low" and self.config.quantize_activation

    @property
    def _dgrad_is_low(self) -> bool:
        return self.config.dgrad == "low"

    def _quantize(
        self,
        x: torch.Tensor,
        fmt: ElementFormat,
        block: tuple[int, int],
        amax: torch.Tensor | None = None,
        noise: torch.Tensor | None = None,
    ) -> QuantizedTensor:
        config = self.config
        return quantize(
            x,
            fmt,
            block,
            mx=config.is_mx,
            rounding=config.scale_rounding,
            margin=config.margin,
            pow2=config.pow2_scale,
            amax=amax,
            noise=noise,
        )

    def _format(self, name: str) -> ElementFormat:
        return element_format(name, self.flavour)

    def _amax(self, role: int, x: torch.Tensor) -> torch.Tensor | None:
        if self.config.scaling != "delayed":
            return None
        return self.state.amax(role, x, self.record)

    def _activation(self, x: torch.Tensor) -> QuantizedTensor:
        config = self.config
        return self._quantize(x, self._format(config.activation_format), config.activation_block, self._amax(INPUT, x))

    def _activation_for_wgrad(self, x: torch.Tensor) -> QuantizedTensor:
        """The activation as wgrad multiplies it, `[K, M]`; for one scale a tensor the codes as fprop has them."""
        if self.config.activation_block == TENSOR_BLOCK:
            return self._activation(x)
        return self._activation(self._rotate(x.t()))

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        return hadamard(x, self.config.seed) if self.config.hadamard else x

    def _weight(self, weight: torch.Tensor) -> QuantizedTensor:
        """The weight as fprop multiplies it, `[N, K]`."""
        config = self.config
        return self._quantize(
            weight, self._format(config.weight_format), config.weight_block, self._amax(WEIGHT, weight)
        )

    def weight_for_dgrad(self, weight: torch.Tensor) -> QuantizedTensor:
        """The weight as dgrad multiplies it, `[K, N]`, blocked along N."""
        quantized_rows = None
        if self.config.weight_block[0] == self.config.weight_block[1]:
            return self._weight(weight).transpose()
        if self.config.dgrad_weight == "from_rows":
            quantized_rows = self._weight(weight)
            weight = quantized_rows.dequantize()
        return self._weight(weight.t())


class GradientOperands:
    """One output gradient `[M, N]`, quantized as dgrad and wgrad need it."""

    def __init__(self, operands: LinearOperands, grad: torch.Tensor) -> None:
        config = operands.config
        self.operands = operands
        self.grad = grad
        self.key = operands.state.next_key() if config.stochastic_rounding and operands.state else config.seed
        self.per_tensor = config.gradient_block == TENSOR_BLOCK
        self._shared: QuantizedTensor | None = None

    @property
    def _fmt(self) -> ElementFormat:
        return self.operands._format(self.operands.config.gradient_format)

    def dgrad(self, weight: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        """`grad @ weight`: `[M, N] x [N, K] -> [M, K]`."""
        operands = self.operands
        if not operands._dgrad_is_low:
            return matmul_bf16(self.grad, weight.t(), out_dtype)
        if not operands.config.quantize_activation:
            return matmul_bf16(self.grad, operands.weight_for_dgrad(weight).dequantize(self.grad.dtype), out_dtype)
        if operands.config.weight_block == ROW_BLOCK:
            grad, weight_codes = self._fold_row_scales(weight)
            return registry.gemm(grad, weight_codes, out_dtype)
        grad = self._per_tensor() if self.per_tensor else self._quantize(self.grad, _DGRAD_STREAM)
        return registry.gemm(grad, operands.weight_for_dgrad(weight), out_dtype)

    def wgrad(
        self,
        saved: torch.Tensor,
        scale: torch.Tensor | None,
        x_shape: tuple[int, int],
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        """`grad.T @ x`: `[N, M] x [M, K] -> [N, K]`.

        Args:
            saved, scale: as `LinearOperands.save_activation` gave them.
            x_shape: `(M, K)`.
        """
        operands = self.operands
        if not operands._wgrad_is_low:
            return matmul_bf16(self.grad.t(), saved.t(), out_dtype)
        x = self._saved_activation(saved, scale, x_shape)
        if self.per_tensor:
            return registry.gemm(self._per_tensor().transpose(), x.transpose(), out_dtype)
        grad = self._quantize(operands._rotate(self.grad.t()), _WGRAD_STREAM)
        return registry.gemm(grad, x, out_dtype)

    def _saved_activation(
        self, saved: torch.Tensor, scale: torch.Tensor | None, x_shape: tuple[int, int]
    ) -> QuantizedTensor:
        operands = self.operands
        config = operands.config
        if scale is None:
            return operands._activation_for_wgrad(saved)
        m, k = x_shape
        if config.hadamard:
            m += -m % 32
        shape = x_shape if config.activation_block == TENSOR_BLOCK else (k, m)
        fmt = operands._format(config.activation_format)
        return QuantizedTensor(saved, scale, fmt, config.activation_block, shape)

    def _noise(self, shape: torch.Size, stream: int) -> torch.Tensor | None:
        if not self.operands.config.stochastic_rounding:
            return None
        return stochastic_noise((shape[0], shape[1]), self.key, self.grad.device, stream)

    def _quantize(self, grad: torch.Tensor, stream: int) -> QuantizedTensor:
        block = self.operands.config.gradient_block
        return self.operands._quantize(grad, self._fmt, block, noise=self._noise(grad.shape, stream))

    def _per_tensor(self) -> QuantizedTensor:
        """One cast serves both GEMMs where the whole tensor has one scale."""
        if self._shared is None:
            amax = self.operands._amax(GRADIENT, self.grad)
            noise = self._noise(self.grad.shape, _DGRAD_STREAM)
            self._shared = self.operands._quantize(self.grad, self._fmt, TENSOR_BLOCK, amax, noise)
        return self._shared

    def _fold_row_scales(self, weight: torch.Tensor) -> tuple[QuantizedTensor, QuantizedTensor]:
        """Row-wise weights: `dx = Q(g diag(s)) W_q`, so that the one copy of the weight serves dgrad too.

        The row scale s lies along N, which dgrad contracts, where no row-wise GEMM can apply it: it moves into the
        gradient before that is quantized per token.
        """
        rows = self.operands._weight(weight)
        grad = self._quantize(self.grad.to(torch.float32) * rows.scale.t(), _DGRAD_STREAM)
        ones = torch.ones((), device=weight.device)
        unscaled = replace(rows, scale=ones, block=TENSOR_BLOCK)
        return grad, unscaled.transpose()
