"""Layer specs: Megatron's own builders, with Lumen's modules where Megatron would put its local ones.

No spec is copied. `block_spec` calls Megatron's builder while the provider that it asks for modules is ours, so that
what a version adds to its layers is in ours, too. Checked on megatron-core 0.16.1.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Iterator
from typing import Any

from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer

from lumen_megatron.attention import LumenCoreAttention
from lumen_megatron.layer import Chunk, LumenTransformerLayer
from lumen_megatron.linear import LumenColumnParallelLinear, LumenRowParallelLinear
from lumen_megatron.norm import LumenNorm

# Where Megatron's builders look a provider or a norm up, by module.
_LOOKED_UP = {
    "megatron.core.models.backends": ("LocalSpecProvider", "LNImpl"),
    "megatron.core.models.gpt.gpt_layer_specs": ("LocalSpecProvider", "LNImpl"),
    "megatron.core.models.gpt.moe_module_specs": ("LocalSpecProvider",),
}


class LumenSpecProvider(LocalSpecProvider):
    """Lumen's modules; what a newer Megatron asks for beside them is its local default."""

    def column_parallel_linear(self) -> type:
        """Column-parallel linear layer."""
        return LumenColumnParallelLinear

    def row_parallel_linear(self) -> type:
        """Row-parallel linear layer."""
        return LumenRowParallelLinear

    def layer_norm(self, *args: Any, **kwargs: Any) -> type:
        """Norm of layers, queries and keys."""
        return LumenNorm

    def core_attention(self) -> type:
        """Core attention."""
        return LumenCoreAttention

    def grouped_mlp_modules(self, *args: Any, **kwargs: Any) -> Any:
        """Experts: one quantized MLP each."""
        return SequentialMLP, MLPSubmodules(linear_fc1=LumenColumnParallelLinear, linear_fc2=LumenRowParallelLinear)


@contextlib.contextmanager
def lumen_modules() -> Iterator[None]:
    """Let Megatron's spec builders take Lumen's modules in place of the local ones, inside the context."""
    replaced = []
    for path, names in _LOOKED_UP.items():
        module = importlib.import_module(path)
        for name in names:
            if hasattr(module, name):
                replaced.append((module, name, getattr(module, name)))
                setattr(module, name, LumenNorm if name == "LNImpl" else LumenSpecProvider)
    try:
        yield
    finally:
        for module, name, value in replaced:
            setattr(module, name, value)


def block_spec(config: Any, vp_stage: int | None = None, **kwargs: Any) -> Any:
    """Spec of the decoder block of a GPT model: `TransformerBlockSubmodules`.

    Args:
        config: the model's `TransformerConfig`; `lumen_megatron.configure` sets what Lumen does to it.
        vp_stage: virtual pipeline stage.
        **kwargs: of Megatron's `get_gpt_decoder_block_spec`.
    """
    kwargs = {"normalization": config.normalization, "qk_l2_norm": getattr(config, "qk_l2_norm", False), **kwargs}
    with lumen_modules():
        block = gpt_layer_specs.get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, vp_stage=vp_stage, **kwargs
        )
    chunk = Chunk()
    return dataclasses.replace(block, layer_specs=[_with_chunk(spec, chunk) for spec in block.layer_specs])


def _with_chunk(spec: ModuleSpec, chunk: Chunk) -> ModuleSpec:
    if spec.module is not TransformerLayer:
        raise ValueError(f"a layer spec of {spec.module!r}: Lumen knows TransformerLayer")
    return dataclasses.replace(spec, module=LumenTransformerLayer, params={**(spec.params or {}), "chunk": chunk})
