"""RMSNorm and LayerNorm for Megatron layers, with sequence parallelism's mark on their parameters."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from lumen_core.norm import layer_norm, rms_norm
from lumen_megatron.options import options_of


class LumenNorm(torch.nn.Module):
    """The norm that `config.normalization` names, over the last dimension.

    With the recipe bf16 it is torch's own function, as in Megatron's local layers; otherwise `lumen_core.norm`.

    Args:
        config: a `TransformerConfig`.
        hidden_size: length of the last dimension.
        eps: added to the mean square or variance.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__()
        if config.normalization not in ("RMSNorm", "LayerNorm"):
            raise ValueError(f"normalization={config.normalization!r}: Lumen has RMSNorm and LayerNorm")
        self.eps, self.normalization = eps, config.normalization
        self.zero_centered = config.layernorm_zero_centered_gamma
        self._plain = not options_of(config).quantizes
        # The residual stream may be fp32 while layers compute in the parameters' precision.
        self._out_dtype = config.params_dtype if config.fp32_residual_connection else None
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        start = torch.zeros if self.zero_centered else torch.ones
        self.weight = torch.nn.Parameter(start(hidden_size, dtype=config.params_dtype, device=device))
        if self.normalization == "LayerNorm":
            self.bias = torch.nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype, device=device))
        else:
            self.register_parameter("bias", None)
        for parameter in self.parameters():
            # Its gradient covers this rank's tokens only: Megatron sums it over the tensor-parallel group.
            parameter.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., hidden]` in x's dtype, or the parameters' where the residual stream is fp32."""
        weight = self.weight + 1 if self.zero_centered else self.weight
        out = self._normalize(x, weight)
        return out if self._out_dtype is None else out.to(self._out_dtype)

    def _normalize(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if self.normalization == "LayerNorm":
            if self._plain:
                return F.layer_norm(x, weight.shape, weight, self.bias, self.eps)
            return layer_norm(x, weight, self.bias, self.eps)
        return F.rms_norm(x, weight.shape, weight, self.eps) if self._plain else rms_norm(x, weight, self.eps)

    def extra_repr(self) -> str:
        """Kind, size and eps."""
        return f"{self.normalization}, {self.weight.shape[0]}, eps={self.eps}"
