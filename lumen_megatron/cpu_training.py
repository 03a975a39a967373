"""The part of running Megatron on a CPU that `megatron.training` needs; see `lumen_megatron.cpu`.

Checked on the Megatron-LM tree of 0.16.1.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from lumen_megatron.replacements import Replacements


def install(changed: Replacements) -> None:
    """Change what stands in the way; nothing where `megatron.training` is missing."""
    try:
        initialize = importlib.import_module("megatron.training.initialize")
        training = importlib.import_module("megatron.training.training")
    except ImportError:
        return
    start = functools.partial(initialize.initialize_megatron, allow_no_cuda=True)
    for module in (initialize, training):
        if hasattr(module, "initialize_megatron"):
            changed.set(module, "initialize_megatron", start)
    if hasattr(initialize, "fused_kernels"):
        # Would run nvcc; the flags that ask for what it builds are off on a CPU.
        changed.set(initialize.fused_kernels, "load", lambda args: None)
    _barriers(changed)
    _dataset_helpers(changed)


def _barriers(changed: Replacements) -> None:
    barrier = torch.distributed.barrier

    def without_devices(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        return barrier(group=group, async_op=async_op)

    changed.set(torch.distributed, "barrier", without_devices)


def _dataset_helpers(changed: Replacements) -> None:
    """Megatron builds its C++ helpers by `make` at each start; where they are there, that is left out."""
    utils = importlib.import_module("megatron.core.datasets.utils")
    build = utils.compile_helpers

    def unless_built() -> None:
        try:
            importlib.import_module("megatron.core.datasets.helpers_cpp")
        except ImportError:
            build()

    changed.set(utils, "compile_helpers", unless_built)
