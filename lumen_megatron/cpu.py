"""Megatron-Core on a machine without a GPU, over gloo: for tests, demonstrations and a look at a plan.

Megatron-Core asks for CUDA in its buffers, random states, streams and dtype names. `install` answers with the CPU, for
this process. It changes torch, not Megatron, and is never installed where a GPU is present. Checked on megatron-core
0.16.1 with torch 2.13.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from lumen_megatron import cpu_training
from lumen_megatron.replacements import Replacements

_CPU = torch.device("cpu")
_changed = Replacements()


def installed() -> bool:
    """True between `install` and `uninstall`."""
    return bool(_changed)


def install() -> None:
    """Let Megatron-Core run on the CPU from now on. Call it before anything is built; twice is once.

    Raises:
        RuntimeError: this machine has a GPU.
    """
    if _changed:
        return
    if torch.cuda.is_available():
        raise RuntimeError("lumen_megatron.cpu is for machines without a GPU; this one has one")
    _one_collective_at_a_time()
    _random_states()
    mode = _OnCpu()
    mode.__enter__()
    _changed.undo_by(lambda: mode.__exit__(None, None, None))
    _changed.set(torch.nn.Module, "cuda", lambda self, device=None: self)
    for name, value in _CUDA.items():
        _changed.set(torch.cuda, name, value)
    for name in ("range_push", "range_pop", "mark"):
        _changed.set(torch.cuda.nvtx, name, _nothing)
    cpu_training.install(_changed)
    # Megatron compiles small functions; a compiler does not see through the mode above.
    torch.compiler.set_stance("force_eager")
    _changed.undo_by(lambda: torch.compiler.set_stance("default"))


def uninstall() -> None:
    """Give torch back its own functions."""
    _changed.take_back()


class _OnCpu(TorchFunctionMode):
    """Sends what is asked of the device `cuda` to the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Megatron tells parameters' precision by names such as torch.cuda.BFloat16Tensor.
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs = {**kwargs, "device": _CPU}
        if func is torch.Tensor.to:
            args = tuple(_CPU if _is_cuda(value) else value for value in args)
        return func(*args, **kwargs)


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.split(":")[0] == "cuda"


def _nothing(*args: object, **kwargs: object) -> None:
    return None


class _Stream:
    """Stands for streams and events: a CPU does one thing after another."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def wait_stream(self, other: object = None) -> None: ...

    wait_event = record = synchronize = wait_stream

    def record_event(self, event: object = None) -> _Stream:
        return self

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: object) -> float:
        return 0.0

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *args: object) -> None: ...


_ONLY_STREAM = _Stream()


def _only_stream(*args: object) -> _Stream:
    return _ONLY_STREAM


@contextlib.contextmanager
def _same_stream(stream: object) -> Iterator[None]:
    yield


def _get_rng_state(device: object = "cuda") -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, device: object = "cuda") -> None:
    torch.set_rng_state(state)


# Of no GPU: Megatron asks for features of newer ones.
_PROPERTIES = types.SimpleNamespace(name="cpu", major=0, minor=0, total_memory=0, multi_processor_count=1)
_CUDA: dict[str, Any] = {
    "current_device": lambda: _CPU,
    "set_device": _nothing,
    "device_count": lambda: 1,
    "synchronize": _nothing,
    "empty_cache": _nothing,
    "Stream": _Stream,
    "Event": _Stream,
    "current_stream": _only_stream,
    "default_stream": _only_stream,
    "stream": _same_stream,
    "memory_allocated": lambda device=None: 0,
    "memory_reserved": lambda device=None: 0,
    "max_memory_allocated": lambda device=None: 0,
    "max_memory_reserved": lambda device=None: 0,
    "reset_peak_memory_stats": _nothing,
    "memory_stats": lambda device=None: {},
    "get_device_properties": lambda device=None: _PROPERTIES,
    "get_device_capability": lambda device=None: (0, 0),
    "get_rng_state": _get_rng_state,
    "set_rng_state": _set_rng_state,
    "manual_seed": torch.manual_seed,
}


def _one_collective_at_a_time() -> None:
    """gloo's coalesced all-gather mixes up buffers of several dtypes in one group: here each is waited for at once."""
    from megatron.core.distributed import param_and_grad_buffer

    def waited_for(collective: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, async_op: bool = False, **kwargs: Any) -> _Done | None:
            collective(*args, async_op=False, **kwargs)
            return _Done() if async_op else None

        return run

    @contextlib.contextmanager
    def apart(group: object = None, device: object = None, async_ops: bool = False) -> Iterator[_Done]:
        all_reduce = torch.distributed.all_reduce
        torch.distributed.all_reduce = waited_for(all_reduce)
        try:
            yield _Done()
        finally:
            torch.distributed.all_reduce = all_reduce

    _changed.set(param_and_grad_buffer, "_coalescing_manager", apart)
    for name in ("dist_all_gather_func", "dist_reduce_scatter_func"):
        _changed.set(param_and_grad_buffer, name, waited_for(getattr(param_and_grad_buffer, name)))


class _Done:
    """A handle of what was waited for where it was begun."""

    def wait(self) -> None: ...


def _random_states() -> None:
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    def state(device: object = "cuda", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, device: object = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    _changed.set(random, "_get_cuda_rng_state", state)
    _changed.set(random, "_set_cuda_rng_state", set_state)

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    _changed.set(token_dispatcher, "maybe_move_tensor_to_cpu", to_host)
