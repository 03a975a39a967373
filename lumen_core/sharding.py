"""Lets an adapter see when a host puts another parameter on a quantized module.

FSDP2 swaps the sharded and the gathered parameter of a module by `setattr` where the module defines one. That is the
place at which a sharded weight gets its gather hooks, on torch's own `fully_shard` as well: until a model is sharded
its parameters stay plain, and without an adapter nothing happens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

# In the `__dict__` of a quantized module whose weights are gathered in low precision: what the adapter keeps there.
GATHER_ATTRIBUTE = "_lumen_gather"

Observer = Callable[[torch.nn.Module, str, torch.nn.Parameter], None]
_observers: list[Observer] = []


def observe(observer: Observer) -> None:
    """Call `observer(module, name, parameter)` after a parameter of a quantized module was replaced."""
    if observer not in _observers:
        _observers.append(observer)


class ObservedParameters:
    """Mixin of the quantized modules: tells observers about replaced parameters."""

    def __setattr__(self, name: str, value: object) -> None:
        parameters = self.__dict__.get("_parameters")
        if parameters is None or name not in parameters or not isinstance(value, torch.nn.Parameter):
            super().__setattr__(name, value)
            return
        parameters[name] = value  # what nn.Module does with a parameter under its own name, without its checks
        for observer in _observers:
            observer(self, name, value)


def parameters_moved(module: torch.nn.Module) -> None:
    """Tell observers about parameters that `Module._apply` (`.to`, `to_empty`) changed without putting them back."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            for observer in _observers:
                observer(module, name, parameter)
