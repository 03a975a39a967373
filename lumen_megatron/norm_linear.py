"""Norm and column-parallel linear layer in one module, with the parameter names that TransformerEngine's has."""

from __future__ import annotations

from typing import Any

import torch

from lumen_megatron.linear import LumenColumnParallelLinear
from lumen_megatron.norm import LumenNorm


class LumenLayerNormColumnParallelLinear(LumenColumnParallelLinear):
    """`linear(norm(x))`: `layer_norm_weight`, `layer_norm_bias`, `weight`, `bias`.

    The norm's output is not kept for the backward pass where the recipe keeps codes of it.
    """

    def __init__(self, input_size: int, output_size: int, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, **kwargs)
        norm = LumenNorm(self.config, input_size, self.config.layernorm_epsilon)
        self.layer_norm_weight = norm.weight
        self.register_parameter("layer_norm_bias", norm.bias)
        # Its parameters are this module's: it stays outside of the tree.
        self.__dict__["_norm"] = norm

    def forward(self, input_: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As the column-parallel layer's, of the normalized input."""
        # What replaced the parameters since (a wrapper, a conversion) counts.
        norm = self._norm
        norm._parameters.update(weight=self.layer_norm_weight, bias=self.layer_norm_bias)
        return super().forward(norm(input_), *args, **kwargs)
