"""How each operand of the three GEMMs is quantized, for every recipe."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch

from lumen_core import casts
from lumen_core.amax import GRADIENT, INPUT, WEIGHT, ScalingState
from lumen_core.casts import ROW_BLOCK, TENSOR_BLOCK
from lumen_core.config import QuantConfig
from lumen_core.formats import element_format, resolve_flavour
from lumen_core.gathered import WeightView
from lumen_core.hadamard import HADAMARD_BLOCK, hadamard
from lumen_core.kernels.gemm import gemm
from lumen_core.kernels.largest import largest_magnitude
from lumen_core.kernels.reference import matmul_bf16
from lumen_core.kernels.transpose import tensor_codes, transposed_codes, transposed_tensor_codes
from lumen_core.rounding import stochastic_noise
from lumen_core.spread import IN, OUT, TOKENS, Dims, Spread
from lumen_core.tensor import QuantizedTensor, quantize, quantize_both, transpose_scale
from lumen_core.wire import WireFormat

# What the GEMMs take as a weight: its values, or the codes that a low-precision gather brought.
Weight = torch.Tensor | WeightView

# Streams of one rounding key: the copies for dgrad and wgrad must not share random bits.
_DGRAD_STREAM, _WGRAD_STREAM = 0, 1


@dataclass(frozen=True)
class Gradients:
    """An output's gradient `[M, N]` and its casts.

    Attributes:
        grad: high-precision values.
        key: of stochastic rounding.
        rows: as dgrad multiplies it, `[M, N]`; None where that takes the values.
        turned: as wgrad multiplies it, `[N, M]`; None likewise.
    """

    grad: torch.Tensor
    key: torch.Tensor | int
    rows: QuantizedTensor | None
    turned: QuantizedTensor | None


class LinearOperands:
    """Quantizes the operands of one forward and its backward, and multiplies them.

    Holds no tensor and changes nothing of its own, so that `torch.compile` can trace through it.

    Args:
        config: the recipe.
        device: where the tensors are; decides the FP8 flavour where the recipe leaves it open.
        state: amax history and rounding counter, None for recipes that need neither.
        record: whether amax values enter the history.
        spread: over which ranks the matrices are cut; None where they are whole.
    """

    def __init__(
        self,
        config: QuantConfig,
        device: torch.device,
        state: ScalingState | None,
        record: bool,
        spread: Spread | None = None,
    ) -> None:
        if config.scaling == "delayed" and state is None:
            raise ValueError("scaling='delayed' needs a ScalingState to keep its amax history in")
        self.config = config
        self.flavour = resolve_flavour(config.flavour, device)
        self.state = state
        self.record = record
        self.spread = spread if spread is not None and spread.anything else None
        self.low_wgrad = config.wgrad == "low" and config.quantize_activation

    def forward(
        self, x: torch.Tensor, weight: Weight, out_dtype: torch.dtype, needs_wgrad: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """fprop, and what wgrad needs of the activation.

        Args:
            x: `[M, K]`.
            weight: `[N, K]`.
            needs_wgrad: whether the weight will get a gradient; without one nothing of x is kept.

        Returns:
            `x @ weight.T` `[M, N]`; then codes and scale of the activation where the recipe allows, x itself and None
            where it does not, or None twice.
        """
        config = self.config
        low_fprop = config.fprop == "low"
        keep_codes = needs_wgrad and self.low_wgrad and config.low_precision_activations
        quantized = kept = None
        if keep_codes and not config.hadamard:
            quantized, kept = self._both(
                x, config.activation_format, config.activation_block, INPUT, (TOKENS, IN), rows=low_fprop
            )
        elif config.quantize_activation and low_fprop:
            quantized = self._activation(x)

        if not low_fprop:
            out = matmul_bf16(x, _values(weight), out_dtype)
        elif quantized is None:
            out = matmul_bf16(x, self._weight(weight).dequantize(x.dtype), out_dtype)
        else:
            out = gemm(quantized, self._weight(weight), out_dtype, fast_accum=config.fast_accum)

        if not keep_codes:
            return out, (x if needs_wgrad else None), None
        if kept is None:
            kept = self._activation_for_wgrad(x)
        return out, kept.data, kept.scale

    def backward(
        self,
        grad: torch.Tensor,
        weight: Weight,
        saved: torch.Tensor | None,
        saved_scale: torch.Tensor | None,
        x_shape: tuple[int, int],
        x_dtype: torch.dtype,
        needs_dgrad: bool,
        needs_wgrad: bool,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """dgrad `[M, K]` in `x_dtype` and wgrad `[N, K]` in the weight's dtype, each where it is needed.

        Args:
            grad: `[M, N]`.
            weight: `[N, K]`.
            saved, saved_scale: as `forward` gave them.
            x_shape: `(M, K)`.
        """
        gradients = self.gradients(grad, needs_dgrad, needs_wgrad)
        grad_x = self.dgrad(gradients, weight, x_dtype) if needs_dgrad else None
        grad_weight = self.wgrad(gradients, saved, saved_scale, x_shape, weight.dtype) if needs_wgrad else None
        return grad_x, grad_weight

    def gradients(self, grad: torch.Tensor, needs_dgrad: bool, needs_wgrad: bool) -> Gradients:
        """The output's gradient `[M, N]`, cast for the GEMMs that are needed; they follow in any order."""
        config = self.config
        key = self.state.next_key() if config.stochastic_rounding and self.state is not None else config.seed
        low_dgrad = config.dgrad == "low" and config.quantize_activation
        rows, turned = self._gradients(grad, key, needs_dgrad and low_dgrad, needs_wgrad and self.low_wgrad)
        return Gradients(grad, key, rows, turned)

    def dgrad(self, gradients: Gradients, weight: Weight, x_dtype: torch.dtype) -> torch.Tensor:
        """The input's gradient `[M, K]` in `x_dtype`."""
        config, grad = self.config, gradients.grad
        if config.dgrad == "low" and config.quantize_activation:
            return self._low_dgrad(gradients, weight, x_dtype)
        if config.dgrad == "low":
            # Weight only: any axis will do, so the gradient belongs to the very weight that fprop multiplied.
            return matmul_bf16(grad, self._weight(weight).dequantize(grad.dtype).t(), x_dtype)
        return matmul_bf16(grad, _values(weight).t(), x_dtype)

    def wgrad(
        self,
        gradients: Gradients,
        saved: torch.Tensor,
        saved_scale: torch.Tensor | None,
        x_shape: tuple[int, int],
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """The weight's gradient `[N, K]` in `dtype`; other arguments as in `backward`."""
        if self.low_wgrad:
            return gemm(gradients.turned, self._saved_activation(saved, saved_scale, x_shape), dtype)
        return matmul_bf16(gradients.grad.t(), saved.t(), dtype)

    # --- the backward GEMMs -------------------------------------------------------------------------------------------

    def _low_dgrad(self, gradients: Gradients, weight: Weight, out_dtype: torch.dtype) -> torch.Tensor:
        grad = gradients.grad
        if self.config.weight_block == ROW_BLOCK:
            # dx = Q(g diag(s)) W_q: the row scales s lie along N, which dgrad contracts, where no row-wise GEMM can
            # apply them. They move into the gradient before it is quantized per token: one copy of the weight serves.
            w = self._weight(weight)
            folded = self._gradient(grad.to(torch.float32) * w.scale.t(), gradients.key, _DGRAD_STREAM)
            codes = replace(w, scale=torch.ones((), device=weight.device), block=TENSOR_BLOCK)
            return gemm(folded, self._turned(codes, grad), out_dtype)
        return gemm(gradients.rows, self._weight_for_dgrad(weight, grad), out_dtype)

    def _gradients(
        self, grad: torch.Tensor, key: torch.Tensor | int, dgrad: bool, wgrad: bool
    ) -> tuple[QuantizedTensor | None, QuantizedTensor | None]:
        """The gradient as dgrad multiplies it, `[M, N]`, and as wgrad does, `[N, M]`; None where not asked for."""
        config = self.config
        rows = turned = None
        separate = dgrad and config.weight_block == ROW_BLOCK  # dgrad has a gradient of its own, see `_low_dgrad`
        if config.stochastic_rounding or config.hadamard:
            if (dgrad and not separate) or (wgrad and config.gradient_block == TENSOR_BLOCK):
                rows = self._gradient(grad, key, _DGRAD_STREAM)
            if wgrad and config.gradient_block == TENSOR_BLOCK:
                turned = rows.transpose()  # one cast serves both, and is rounded once
            elif wgrad:
                turned = self._gradient(self._rotate(grad.t()), key, _WGRAD_STREAM, (OUT, TOKENS))
        elif wgrad:
            direct = dgrad and not separate
            rows, turned = self._both(
                grad, config.gradient_format, config.gradient_block, GRADIENT, (TOKENS, OUT), rows=direct
            )
        elif dgrad and not separate:
            rows = self._gradient(grad, key, _DGRAD_STREAM)
        return rows, turned

    # --- operands -----------------------------------------------------------------------------------------------------

    def _activation(self, x: torch.Tensor, dims: Dims = (TOKENS, IN)) -> QuantizedTensor:
        config = self.config
        return self._quantize(x, config.activation_format, config.activation_block, INPUT, dims)

    def _activation_for_wgrad(self, x: torch.Tensor) -> QuantizedTensor:
        """The activation as wgrad multiplies it, `[K, M]`."""
        config = self.config
        if config.hadamard:
            return self._activation(self._rotate(x.t()), (IN, TOKENS))
        return self._both(x, config.activation_format, config.activation_block, INPUT, (TOKENS, IN), rows=False)[1]

    def _saved_activation(
        self, saved: torch.Tensor, scale: torch.Tensor | None, x_shape: tuple[int, int]
    ) -> QuantizedTensor:
        config = self.config
        if scale is None:
            return self._activation_for_wgrad(saved)
        fmt = element_format(config.activation_format, self.flavour)
        m, k = x_shape
        if config.hadamard:
            m += -m % HADAMARD_BLOCK
        return QuantizedTensor(saved, scale, fmt, config.activation_block, (k, m))

    def _weight(self, weight: Weight, dims: Dims = (OUT, IN)) -> QuantizedTensor:
        """The weight as fprop multiplies it, `[N, K]`; turned, with `dims` in that order, as dgrad does."""
        if isinstance(weight, WeightView):
            return self._gathered(weight)
        return self._quantize(weight, self.config.weight_format, self.config.weight_block, WEIGHT, dims)

    def _weight_for_dgrad(self, weight: Weight, grad: torch.Tensor) -> QuantizedTensor:
        """The weight as dgrad multiplies it, `[K, N]`, blocked along N."""
        if isinstance(weight, WeightView):
            return self._gathered_for_dgrad(weight, grad)
        config = self.config
        if config.weight_block[0] == config.weight_block[1] != 0:
            return self._turned(self._weight(weight), grad)
        if config.dgrad_weight == "from_rows":
            weight = self._weight(weight).dequantize()
        return self._both(weight, config.weight_format, config.weight_block, WEIGHT, (OUT, IN), rows=False)[1]

    def _gathered_for_dgrad(self, weight: WeightView, grad: torch.Tensor) -> QuantizedTensor:
        """The same from gathered codes; what is made of them waits for `grad`, see `kernels.transpose`."""
        rows, columns = self.config.weight_block
        as_sent = self._as_sent(weight)
        if as_sent and rows != columns and weight.has_columns:
            return weight.columns()
        if self._moves_exponents(weight):
            return transposed_tensor_codes(weight.rows(), grad)
        if rows == columns:
            return self._turned(self._gathered(weight), grad) if as_sent else self._gathered(weight).transpose()
        if not as_sent and self.config.dgrad_weight != "from_rows":
            return self._weight(weight.dense().t(), (IN, OUT))
        q = self._gathered(weight)
        if not as_sent or q.fmt.packed:
            return self._weight(q.dequantize().t(), (IN, OUT))
        turned = transposed_codes(q.data, grad)
        shape = (q.shape[1], q.shape[0])
        values = casts.dequantize(turned, transpose_scale(q.scale), q.fmt, (q.block[1], q.block[0]), shape)
        return self._weight(values, (IN, OUT))

    @staticmethod
    def _turned(q: QuantizedTensor, grad: torch.Tensor) -> QuantizedTensor:
        """`q.transpose()`, once `grad` is there."""
        if q.fmt.packed:
            return q.transpose()
        scale = q.scale if q.block == TENSOR_BLOCK else transpose_scale(q.scale)
        return replace(q, data=transposed_codes(q.data, grad), scale=scale, shape=(q.shape[1], q.shape[0]))

    def _as_sent(self, weight: WeightView) -> bool:
        """True where the gathered codes are the operand."""
        return weight.info.wire.same_numbers(WireFormat.of(self.config, weight.device))

    def _gathered(self, weight: WeightView) -> QuantizedTensor:
        """The operand of a weight that came over a wire: its codes, or what the recipe makes of their values."""
        if self._as_sent(weight):
            if self.record and weight.amax is not None:
                self.state.note(WEIGHT, weight.amax)
            return weight.rows()
        if self._moves_exponents(weight):
            return tensor_codes(weight.rows())
        return self._weight(weight.dense())

    def _moves_exponents(self, weight: WeightView) -> bool:
        """True where MX codes become per-tensor ones as they are.

        Powers of two only move exponents: as exact as one scale allows, and no pass over the values for an amax.
        """
        wire, config = weight.info.wire, self.config
        if not wire.mx or wire.fmt.packed or config.weight_block != TENSOR_BLOCK or config.scaling != "dynamic":
            return False
        return wire.fmt == element_format(config.weight_format, self.flavour)

    def _gradient(
        self, grad: torch.Tensor, key: torch.Tensor | int, stream: int, dims: Dims = (TOKENS, OUT)
    ) -> QuantizedTensor:
        config = self.config
        noise = None
        if config.stochastic_rounding:
            shape = (grad.shape[0], grad.shape[1])
            places = (
                [] if self.spread is None else [self.spread.positions(d, n, grad.device) for d, n in zip(dims, shape)]
            )
            noise = stochastic_noise(shape, key, grad.device, stream, *places)
        return self._quantize(grad, config.gradient_format, config.gradient_block, GRADIENT, dims, noise)

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        return hadamard(x, self.config.seed) if self.config.hadamard else x

    def _quantize(
        self,
        x: torch.Tensor,
        name: str,
        block: tuple[int, int],
        role: int,
        dims: Dims,
        noise: torch.Tensor | None = None,
    ) -> QuantizedTensor:
        amax = self._amax(x, block, role, dims)
        return quantize(x, element_format(name, self.flavour), block, noise=noise, amax=amax, **self._options())

    def _both(
        self, x: torch.Tensor, name: str, block: tuple[int, int], role: int, dims: Dims, *, rows: bool
    ) -> tuple[QuantizedTensor | None, QuantizedTensor]:
        """`x` (with `rows`) and its transpose, each quantized along its last dimension."""
        fmt, turned = element_format(name, self.flavour), (dims[1], dims[0])
        # No kernel turns half bytes, and none takes rows' amax values from elsewhere.
        if fmt.packed or (block == ROW_BLOCK and self._cut(*dims)):
            first = self._quantize(x, name, block, role, dims) if rows else None
            return first, self._quantize(x.t(), name, block, role, turned)
        return quantize_both(x, fmt, block, rows=rows, amax=self._amax(x, block, role, dims), **self._options())

    def _amax(self, x: torch.Tensor, block: tuple[int, int], role: int, dims: Dims) -> torch.Tensor | None:
        """What to scale `x` by, None for its own values: a history's, or the largest over the ranks that hold parts."""
        if self.config.scaling == "delayed":
            over_ranks = None if self.spread is None else functools.partial(self.spread.maximum, dims=dims)
            return self.state.amax(role, x, self.record, over_ranks)
        if block == TENSOR_BLOCK and self._cut(*dims):
            return self.spread.maximum(largest_magnitude(x), dims)
        if block == ROW_BLOCK and self._cut(dims[1]):
            return self.spread.maximum(x.abs().amax(dim=-1, keepdim=True), dims[1:])
        return None

    def _cut(self, *dims: str) -> bool:
        return self.spread is not None and any(self.spread.group(dim) is not None for dim in dims)

    def _options(self) -> dict[str, Any]:
        config = self.config
        return {
            "mx": config.is_mx,
            "rounding": config.scale_rounding,
            "margin": config.margin,
            "pow2": config.pow2_scale,
        }


def _values(weight: Weight) -> torch.Tensor:
    return weight.dense() if isinstance(weight, WeightView) else weight
