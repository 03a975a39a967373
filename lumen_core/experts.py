"""Banks of expert weights `[E, N, K]` as Hugging Face holds them, one quantized linear per expert and projection.

This is the reference path: a loop over experts, right for any token count, blocks never straddling two experts. It
looks up each expert's tokens on the host, so that a GPU waits once an expert.
"""

from __future__ import annotations

import functools
import inspect

import torch

from lumen_core.amax import ScalingState
from lumen_core.config import QuantConfig
from lumen_core.gathered import GatheredWeight
from lumen_core.linear import quantized_linear
from lumen_core.sharding import ObservedParameters, parameters_moved

_PROJECTIONS = ("gate_up_proj", "down_proj")


def is_expert_bank(module: torch.nn.Module) -> bool:
    """True for a module that holds `gate_up_proj` and `down_proj` as 3-D parameters."""
    return all(
        isinstance(getattr(module, name, None), torch.nn.Parameter) and getattr(module, name).dim() == 3
        for name in _PROJECTIONS
    )


def unsupported_bank(module: torch.nn.Module) -> str | None:
    """Why a bank cannot be quantized, or None where it can."""
    if getattr(module, "has_post_expert_norm", False):
        return "expert bank with a norm inside each expert"
    if module.gate_up_proj.shape[0] != module.down_proj.shape[0] or hasattr(module, "identity_expert"):
        return "expert bank with experts that do not compute"
    if len(inspect.signature(module.forward).parameters) != 3:
        return "expert bank that is not called with (hidden states, expert index, expert weight)"
    if not (hasattr(module, "_apply_gate") or hasattr(module, "act_fn")):
        return "expert bank with an unknown activation"
    return None


class QuantExperts(ObservedParameters):
    """Mixin that gives an expert bank quantized GEMMs; combined with the bank's own class by `convert_`.

    Attributes:
        quant_config: the recipe in force.
        quant_states: `ScalingState` of each projection; with delayed scaling the experts of a bank share one amax.
    """

    quant_config: QuantConfig
    quant_states: dict[str, ScalingState]
    _bank_class: type[torch.nn.Module]

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Weighted sum of the chosen experts' outputs.

        Args:
            hidden_states: `[T, K]`.
            top_k_index: int64 `[T, top_k]` expert of each slot; an index outside the bank contributes nothing.
            top_k_weights: `[T, top_k]` routing weights.

        Returns:
            `[T, K]` in hidden_states' dtype.
        """
        out = torch.zeros_like(hidden_states)
        for expert, (gate_up, down) in enumerate(zip(self._weights("gate_up_proj"), self._weights("down_proj"))):
            token, slot = torch.where(top_k_index == expert)
            hidden = self._linear("gate_up_proj", expert, hidden_states[token], gate_up)
            hidden = self._linear("down_proj", expert, self._activate(hidden), down)
            weighted = hidden * top_k_weights[token, slot, None]
            out.index_add_(0, token, weighted.to(out.dtype))
        return out

    def _weights(self, name: str) -> list[torch.Tensor]:
        # unbind, not indexing: its backward stacks the gradients once instead of adding E mostly empty banks.
        bank = getattr(self, name)
        if isinstance(bank, GatheredWeight):
            bank._info.notice_pass(self.training)
        weights = bank.unbind(0)
        return [w.t() for w in weights] if getattr(self, "is_transposed", False) else list(weights)

    def _linear(self, name: str, expert: int, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        state = self.quant_states[name]
        if state.device != x.device:
            state.to(x.device)
        bias = getattr(self, f"{name}_bias", None)
        bias = None if bias is None else bias[expert]
        record = self.training and torch.is_grad_enabled()
        return quantized_linear(x, weight, bias, self.quant_config, state, record=record)

    def _activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "_apply_gate"):
            return self._apply_gate(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate) * up

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        parameters_moved(self)
        for name, state in self.quant_states.items():
            state.to(getattr(self, name).device)
        return self

    def extra_repr(self) -> str:
        """The bank's own, with the recipe."""
        return ", ".join(filter(None, (super().extra_repr(), f"recipe={self.quant_config.recipe}")))

    def __reduce_ex__(self, protocol: int):
        # The combined class exists in this process only: a pickle names the bank's class and combines again.
        return _rebuild, (self._bank_class,), self.__dict__

    def restore_(self) -> torch.nn.Module:
        """Turn back into the bank it was."""
        self.__class__ = self._bank_class
        del self.quant_config, self.quant_states
        return self


@functools.cache
def _combined(bank: type[torch.nn.Module]) -> type[torch.nn.Module]:
    return type(f"Quant{bank.__name__}", (QuantExperts, bank), {"__module__": bank.__module__, "_bank_class": bank})


def _rebuild(bank: type[torch.nn.Module]) -> torch.nn.Module:
    cls = _combined(bank)
    return cls.__new__(cls)


def convert_(module: torch.nn.Module, config: QuantConfig, base_key: int = 0) -> torch.nn.Module:
    """Give an expert bank quantized GEMMs in place; parameters, names and hooks stay."""
    module.__class__ = _combined(type(module))
    module.quant_config = config
    module.quant_states = {
        name: ScalingState(config.history_len, getattr(module, name).device, base_key + (index << 56))
        for index, name in enumerate(_PROJECTIONS)
    }
    return module
