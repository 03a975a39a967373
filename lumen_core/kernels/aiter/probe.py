"""Is AITER usable here, and which of its functions are there, with which parameters?

Importing AITER builds code, writes files and, where something is amiss, may end the process. So nothing here touches
it before cheap evidence says that it could work; then it is imported once, and the answer is remembered. What its
functions take is looked up, never concluded from a version: the package on PyPI and the repository differ.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from lumen_core.formats import arch_of

ARCHS = ("gfx942", "gfx950")


@dataclass(frozen=True)
class Symbol:
    """A function of AITER: its module, the same in all generations, and the parameters that we name in calls."""

    module: str
    parameters: tuple[str, ...]


_FP8_GEMM = ("XQ", "WQ", "x_scale", "w_scale", "dtype")
FUNCTIONS = {
    "hipb_create_extension": Symbol("aiter.ops.gradlib", ()),
    "hipb_mm": Symbol("aiter.ops.gradlib", ("mat1", "mat2", "solution_index", "out_dtype", "scaleA", "scaleB")),
    "gemm_a8w8": Symbol("aiter.ops.gemm_op_a8w8", _FP8_GEMM),
    "gemm_a8w8_blockscale": Symbol("aiter.ops.gemm_op_a8w8", _FP8_GEMM),
    "gemm_a8w8_blockscale_bpreshuffle": Symbol("aiter.ops.gemm_op_a8w8", _FP8_GEMM),
    # `out` or `dtype`, whichever it has, too.
    "gemm_a4w4": Symbol("aiter.ops.gemm_op_a4w4", ("A", "B", "A_scale", "B_scale", "bpreshuffle")),
    "shuffle_weight": Symbol("aiter.ops.shuffle", ("x", "layout")),
    "e8m0_shuffle": Symbol("aiter.utility.fp4_utils", ("scale",)),
    "static_per_tensor_quant": Symbol("aiter.ops.quant", ("out", "input", "scale")),
    "dynamic_mxfp4_quant": Symbol("aiter.ops.triton.quant", ("x", "scaling_mode")),
}


@dataclass
class State:
    """What is known of AITER in this process.

    Attributes:
        reason: why it is not usable, or None.
        arch: architecture of the GPUs.
        device_type: where its kernels run.
        found: functions looked up so far, or why one is missing.
        parameters: names of the parameters of those that were found, None where nothing tells.
        done: what must happen once a process, and the results of trials.
    """

    reason: str | None
    arch: str = ""
    device_type: str = "cuda"
    found: dict[str, Callable[..., Any] | str] = field(default_factory=dict)
    parameters: dict[str, tuple[str, ...] | None] = field(default_factory=dict)
    done: dict[Any, Any] = field(default_factory=dict)


_state: State | None = None


def state() -> State:
    """What is known; the first call finds it out."""
    global _state
    if _state is None:
        arch, reason = _machine()
        _state = State(reason if reason is not None else _import_reason("aiter"), arch)
    return _state


def reset() -> None:
    """Forget everything: the next question is answered anew."""
    global _state
    _state = None


@contextlib.contextmanager
def pretend(arch: str, device_type: str = "cpu") -> Iterator[State]:
    """In tests: as on a machine with `arch` GPUs whose tensors are of `device_type`; AITER is imported all the same."""
    global _state
    before = _state
    _state = State(_import_reason("aiter"), arch, device_type)
    try:
        yield _state
    finally:
        _state = before


def unusable(device_type: str) -> str | None:
    """Why AITER cannot work on tensors of `device_type`, or None."""
    known = state()
    if known.reason is not None:
        return known.reason
    return None if device_type == known.device_type else f"needs a tensor on {known.device_type}"


def lacking(*names: str) -> str | None:
    """Why one of `FUNCTIONS` cannot be called, or None where all can."""
    for name in names:
        found = _look_up(name)
        if isinstance(found, str):
            return found
    return None


def function(name: str) -> Callable[..., Any]:
    """One of `FUNCTIONS`.

    Raises:
        RuntimeError: it is missing; and, when called, that AITER could not build it.
    """
    found = _look_up(name)
    if isinstance(found, str):
        raise RuntimeError(f"AITER: {found}")
    return found


def takes(name: str, parameter: str) -> bool:
    """True where one of `FUNCTIONS` is there and has a parameter of that name."""
    _look_up(name)
    return parameter in (state().parameters.get(name) or ())


def describe() -> str:
    """One line for `lumen-doctor`."""
    known = state()
    if known.reason is not None:
        return f"not used: {known.reason}"
    missing = [name for name in FUNCTIONS if lacking(name) is not None]
    return f"usable on {known.arch}" + (f", without {', '.join(missing)}" if missing else "")


# --- finding out ------------------------------------------------------------------------------------------------------


def _machine() -> tuple[str, str | None]:
    """Architecture, and why AITER cannot work on this machine, from what costs nothing to ask."""
    if torch.version.hip is None:
        return "", "this torch is not built for ROCm"
    if not torch.cuda.is_available():
        return "", "no GPU"
    arch = arch_of("cuda")
    return arch, None if arch in ARCHS else f"{arch} is none of {', '.join(ARCHS)}"


def _import_reason(module: str) -> str | None:
    """Import a module; why that did not work, or None."""
    package = module.partition(".")[0]
    try:
        if importlib.util.find_spec(package) is None:
            return "the package amd-aiter is not installed"
        importlib.import_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # one generation ends the process when a build fails: SystemExit
        return f"importing {module} failed: {type(error).__name__}: {error}"
    return None


def _look_up(name: str) -> Callable[..., Any] | str:
    known = state()
    if known.reason is not None:
        return known.reason
    if name not in known.found:
        known.found[name] = _find(name, known)
    return known.found[name]


def _find(name: str, known: State) -> Callable[..., Any] | str:
    symbol = FUNCTIONS[name]
    reason = _import_reason(symbol.module)
    if reason is not None:
        return reason
    found = getattr(importlib.import_module(symbol.module), name, None)
    if found is None:
        return f"no {symbol.module}.{name}"
    known.parameters[name] = parameters = parameters_of(found, name)
    if symbol.parameters and parameters is None:
        return f"nothing tells the parameters of {name}"
    absent = [p for p in symbol.parameters if p not in parameters]
    if absent:
        return f"{name} has no parameter {', '.join(absent)}"

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return found(*args, **kwargs)
        except (SystemExit, OSError) as error:  # a failed build is an error of this kernel, not the end of the run
            raise RuntimeError(f"AITER could not build {name}: {type(error).__name__}: {error}") from error

    return call


def parameters_of(found: Callable[..., Any], name: str) -> tuple[str, ...] | None:
    """Names of a function's parameters; None where nothing tells.

    AITER hides those of most functions behind `(*args, **kwargs)` when it registers them with torch; the operator's
    schema has them then.
    """
    parameters = inspect.signature(found).parameters.values()
    if not any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        return tuple(p.name for p in parameters)
    operator = getattr(torch.ops.aiter, name, None)
    if operator is None:
        return None
    return tuple(argument.name for argument in operator.default._schema.arguments)
