"""Notices writes to a model's weights that leave no trace in their write counters.

A DTensor's `state_dict` entry shares the weight's memory but not its counter, and a parameter that was
replaced has a counter of its own; an optimizer that keeps fp32 masters has to know about both.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Protocol

from torch import Tensor, nn


class _Optimizer(Protocol):
    def expect_foreign_writes(self) -> None: ...


class WeightWatch:
    """Watches `model` for the optimizer that holds its parameters; keeps neither alive."""

    def __init__(self, model: nn.Module, optimizer: _Optimizer) -> None:
        self._model = weakref.ref(model)
        self._names = {p: n for n, p in model.named_parameters()}
        model.register_state_dict_post_hook(StateDictTaken(optimizer))

    def check_replaced(self, params: Iterable[Tensor]) -> None:
        """Raises RuntimeError when one of `params` is no longer the model's."""
        model = self._model()
        if model is None:
            return
        for param in params:
            name = self._names.get(param)
            if name is not None and _parameter_at(model, name) is not param:
                raise RuntimeError(
                    f"parameter {name!r} was replaced after the optimizer was built (by "
                    "load_state_dict(assign=True), fully_shard or to()); build the optimizer afterwards"
                )


class StateDictTaken:
    """Tells an optimizer that `model.state_dict()` was taken: whoever holds it may write the weights through
    it.
    """

    def __init__(self, optimizer: _Optimizer | None) -> None:
        self._optimizer = (lambda: None) if optimizer is None else weakref.ref(optimizer)

    def __call__(self, *unused: Any) -> None:
        optimizer = self._optimizer()
        if optimizer is not None:
            optimizer.expect_foreign_writes()

    def __deepcopy__(self, memo: dict[int, Any]) -> StateDictTaken:
        return StateDictTaken(None)

    def __reduce__(self) -> tuple[Any, ...]:
        return StateDictTaken, (None,)


def _parameter_at(model: nn.Module, name: str) -> Tensor | None:
    path, _, leaf = name.rpartition(".")
    try:
        return model.get_submodule(path)._parameters.get(leaf)
    except AttributeError:
        return None
