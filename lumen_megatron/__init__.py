"""Megatron-Core adapter: `--transformer-impl lumen`, or the same from Python.

    from lumen_megatron import block_spec, configure
    model = GPTModel(config, block_spec(configure(config, "mxfp8")), ...)

Importing this package imports nothing of Megatron and changes nothing; `lumen_megatron.auto` is the module that acts.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lumen_megatron.layer import step_end
    from lumen_megatron.options import LumenOptions, configure, options_of
    from lumen_megatron.spec import block_spec
    from lumen_megatron.summary import summary

__all__ = ["LumenOptions", "block_spec", "configure", "options_of", "step_end", "summary"]

_WHERE = {
    "LumenOptions": "options",
    "block_spec": "spec",
    "configure": "options",
    "options_of": "options",
    "step_end": "layer",
    "summary": "summary",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_WHERE[name]}")
    if name == _WHERE[name]:
        # A submodule of the same name would hide the function from now on.
        globals()[name] = getattr(module, name)
    return getattr(module, name)
