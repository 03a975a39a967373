"""What `enable` leaves on a model: its layers' scaling states, and the rule that says when a training step ends."""

from __future__ import annotations

import copy
import itertools
import os
import weakref
import zlib
from collections.abc import Iterator

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from lumen_core.amax import ScalingState, end_step
from lumen_core.config import QuantConfig
from lumen_core.experts import QuantExperts
from lumen_core.linear import QuantLinear
from lumen_core.names import plain_name

_ATTRIBUTE = "_lumen"
_live: weakref.WeakSet[Controller] = weakref.WeakSet()
_serials = itertools.count()
_hook_handle: object | None = None


class Controller:
    """Owns the scaling of one enabled model.

    It lives in the model's `__dict__` and refers to the model, so that a deep copy or an unpickled model gets one of
    its own, with histories of its own.

    Attributes:
        model: the module given to `enable`.
        config: the recipe in force.
        skipped: `(name, weight shape, reason)` of linear weights that were left as they are.
        amax_group: process group of the amax maximum where `reduce_amax` is set; None means all ranks.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        config: QuantConfig,
        skipped: list[tuple[str, tuple[int, ...], str]],
        amax_group: torch.distributed.ProcessGroup | None = None,
    ) -> None:
        self.model = model
        self.config = config
        self.skipped = skipped
        self.amax_group = amax_group
        self._stepped: set[int] = set()
        self._register()

    def attach(self) -> None:
        """Put the controller on its model."""
        self.model.__dict__[_ATTRIBUTE] = self

    def detach(self) -> None:
        """Take it off again."""
        _live.discard(self)
        del self.model.__dict__[_ATTRIBUTE]

    def __deepcopy__(self, memo: dict) -> Controller:
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(self.__dict__, model=copy.deepcopy(self.model, memo), _stepped=set())
        twin._register()
        return twin

    def __getstate__(self) -> dict:
        if self.amax_group is not None:
            raise TypeError("a model with an amax_group cannot be pickled: process groups end with their process")
        return {**self.__dict__, "_stepped": set()}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._register()

    def _register(self) -> None:
        # Ranks must go through their models in the same order, and a set's order depends on memory addresses.
        self.serial = next(_serials)
        _live.add(self)
        if self.config.scaling == "delayed":
            _install_hook()

    def states(self) -> Iterator[tuple[str, ScalingState]]:
        """`(name, state)` of every quantized module, in module order; names are those of the original model."""
        return named_states(self.model)

    def after_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """End the training step once every trainable parameter of the model has been stepped.

        One optimizer does that at once. Several (or one a parameter, run inside backward) end one step between them. If
        some parameters are never stepped, the step ends when one is stepped for the second time.
        """
        own = {id(p): p.requires_grad for p in self.model.parameters()}
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]} & own.keys()
        if not stepped:
            return
        if stepped & self._stepped:
            self.end_step()
        self._stepped |= stepped
        if all(key in self._stepped for key, trainable in own.items() if trainable):
            self.end_step()

    def end_step(self) -> None:
        """Close the training step: see `amax.end_step`."""
        self._stepped = set()
        if self.config.scaling == "delayed":
            states = [state for _, state in self.states()]
            end_step(states, self.config.amax_algo, reduce=self.config.reduce_amax, group=self.amax_group)


def named_states(model: torch.nn.Module) -> Iterator[tuple[str, ScalingState]]:
    """`(name, state)` of every quantized module below `model`, without the prefixes that wrappers add."""
    for name, module in model.named_modules():
        name = plain_name(name)
        if isinstance(module, QuantLinear):
            yield name, module.quant_state
        elif isinstance(module, QuantExperts):
            for projection, state in module.quant_states.items():
                yield f"{name}.{projection}" if name else projection, state


def controllers(model: torch.nn.Module) -> list[Controller]:
    """Controllers at or below `model`."""
    return [m.__dict__[_ATTRIBUTE] for m in model.modules() if _ATTRIBUTE in m.__dict__]


def live_controllers() -> list[Controller]:
    """Controllers of all enabled models, in the order in which they were made: the same on every rank."""
    return sorted(_live, key=lambda controller: controller.serial)


def controller_over(module: torch.nn.Module) -> Controller | None:
    """The controller of the enabled model that `module` is, or is in."""
    return next((c for c in live_controllers() if any(m is module for m in c.model.modules())), None)


def base_key(name: str, seed: int, rank: int | None = None) -> int:
    """Key of a module's stochastic rounding: differs by module, seed and `rank`; 32 low bits are free.

    Args:
        rank: among the replicas of the module; default: this process's among all.
    """
    if rank is None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            rank = torch.distributed.get_rank()
        else:
            rank = int(os.environ.get("RANK", "0"))
    return (zlib.crc32(f"{seed}/{rank}/{name}".encode()) & 0xFFFFFF) << 32


def _install_hook() -> None:
    global _hook_handle
    if _hook_handle is None:
        _hook_handle = register_optimizer_step_post_hook(_after_optimizer_step)


def _after_optimizer_step(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
    for controller in live_controllers():
        if controller.config.scaling == "delayed":
            controller.after_optimizer_step(optimizer)
