"""Which packages are here, without importing any but torch: some take seconds, and some end the process when
hardware is absent.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform

import torch

# Name shown: (module, names of the distributions that provide it; ROCm builds of a package have names of
# their own).
PACKAGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "lumen-train": ("lumen_core", ("lumen-train",)),
    "torch": ("torch", ("torch",)),
    "numpy": ("numpy", ("numpy",)),
    "hydra-core": ("hydra", ("hydra-core",)),
    "triton": ("triton", ("triton", "pytorch-triton-rocm", "triton-rocm", "pytorch-triton")),
    "aiter": ("aiter", ("amd-aiter", "aiter")),
    "mori": ("mori", ("amd-mori", "mori")),
    "transformer-engine": ("transformer_engine", ("transformer-engine", "transformer-engine-torch")),
    "megatron-core": ("megatron.core", ("megatron-core",)),
    "transformers": ("transformers", ("transformers",)),
    "peft": ("peft", ("peft",)),
    "datasets": ("datasets", ("datasets",)),
    "tokenizers": ("tokenizers", ("tokenizers",)),
    "safetensors": ("safetensors", ("safetensors",)),
    "torchao": ("torchao", ("torchao",)),
    "tensorboard": ("tensorboard", ("tensorboard",)),
    "rich": ("rich", ("rich",)),
    "matplotlib": ("matplotlib", ("matplotlib",)),
}


def version_of(name: str) -> str | None:
    """Version of one of `PACKAGES`; "unknown" when it is importable but no distribution claims it; None when
    absent.
    """
    if name == "torch":
        return torch.__version__  # metadata may leave out the build: 2.11.0 for 2.11.0+cu130
    module, distributions = PACKAGES[name]
    for distribution in distributions:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # a parent package is absent, or a module is there without a spec
        found = None
    return None if found is None else "unknown"


def versions() -> dict[str, str | None]:
    """Python's version and that of every one of `PACKAGES`."""
    return {"python": platform.python_version(), **{name: version_of(name) for name in PACKAGES}}
