"""Norms and gated MLPs that run by our operations: the converters `fused.norm` and `fused.mlp`.

A module's class is changed in place, as for the quantized layers: parameters, names, hooks and other references stay.
Which modules these are is told by class name or shape, never by importing the library that they come from.
"""

from __future__ import annotations

import functools

import torch

from lumen_core.mlp import swiglu
from lumen_core.norm import layer_norm, rms_norm

NORM, MLP = "fused.norm", "fused.mlp"
CONVERTERS = (NORM, MLP)

# Classes of Hugging Face whose forward is `weight * normalized(x)`; Gemma's, for one, adds 1 to the weight.
_RMS_NORMS = frozenset(
    f"{model}RMSNorm"
    for model in (
        "Llama", "Mistral", "Mixtral", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe", "DeepseekV2", "DeepseekV3", "GptOss",
        "Phi3", "Olmoe",
    )
)  # fmt: skip
_PROJECTIONS = {"gate_proj", "up_proj", "down_proj"}
_SILU = ("SiLU", "SiLUActivation")


def fused_kind(module: torch.nn.Module) -> str | None:
    """The converter that takes `module`, or None."""
    if isinstance(module, Fused):
        return None
    if _mixin(module) is None:
        return None
    return MLP if _mixin(module) is FusedMLP else NORM


def _mixin(module: torch.nn.Module) -> type[Fused] | None:
    kind, weight = type(module), getattr(module, "weight", None)
    one_row = isinstance(weight, torch.nn.Parameter) and weight.dim() == 1
    if kind is torch.nn.LayerNorm:
        return FusedLayerNorm if one_row else None
    if kind is torch.nn.RMSNorm or (kind.__name__ in _RMS_NORMS and hasattr(module, "variance_epsilon")):
        return FusedRMSNorm if one_row else None
    children = dict(module.named_children())
    if set(children) == {*_PROJECTIONS, "act_fn"} and type(children["act_fn"]).__name__ in _SILU:
        return FusedMLP if kind.__name__.endswith("MLP") else None
    return None


class Fused:
    """Mixin of the converted modules; combined with the module's own class."""

    _plain_class: type[torch.nn.Module]

    def restore_(self) -> torch.nn.Module:
        """Turn back into the module it was."""
        self.__class__ = self._plain_class
        return self

    def __reduce_ex__(self, protocol: int):
        # The combined class exists in this process only: a pickle names the plain one and combines again.
        return _rebuild, (self._plain_class,), self.__dict__


class FusedRMSNorm(Fused):
    """RMSNorm with a weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., C]` in its own dtype, rounded once; with a weight of another dtype, or a DTensor, as before."""
        if not _same_kind(x, self.weight):
            return super().forward(x)
        eps = self.variance_epsilon if hasattr(self, "variance_epsilon") else self.eps
        if eps is None:  # torch's own choice, that of the dtype it computes in
            eps = torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32).eps
        return rms_norm(x, self.weight, eps)


class FusedLayerNorm(Fused):
    """LayerNorm with a weight and maybe a bias."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., C]`; see `FusedRMSNorm`."""
        return layer_norm(x, self.weight, self.bias, self.eps) if _same_kind(x, self.weight) else super().forward(x)


class FusedMLP(Fused):
    """Gated MLP with SiLU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., K] -> [..., K]`."""
        gate, up = self.gate_proj(x), self.up_proj(x)
        if hasattr(gate, "placements"):  # a DTensor
            return self.down_proj(self.act_fn(gate) * up)
        return self.down_proj(swiglu(gate, up))


def _same_kind(x: torch.Tensor, weight: torch.Tensor) -> bool:
    return x.dtype == weight.dtype and not hasattr(weight, "placements")


@functools.cache
def _combined(plain: type[torch.nn.Module], mixin: type[Fused]) -> type[torch.nn.Module]:
    return type(f"Fused{plain.__name__}", (mixin, plain), {"__module__": plain.__module__, "_plain_class": plain})


def _rebuild(plain: type[torch.nn.Module]) -> torch.nn.Module:
    module = plain.__new__(plain)
    mixin = FusedLayerNorm if plain is torch.nn.LayerNorm else FusedRMSNorm if "RMSNorm" in plain.__name__ else FusedMLP
    module.__class__ = _combined(plain, mixin)
    return module


def convert_(module: torch.nn.Module) -> torch.nn.Module:
    """Convert a module that `fused_kind` takes, in place."""
    module.__class__ = _combined(type(module), _mixin(module))
    return module
