"""Layer specs: Megatron's own builders, with Lumen's modules where Megatron would put its local ones.

No spec is copied. `block_spec` calls Megatron's builder while the provider that it asks for modules is ours, so that
what a version adds to its layers is in ours, too. Checked on megatron-core 0.16.1.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

from megatron.core.models.backends import LocalSpecProvider
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from lumen_megatron.attention import LumenCoreAttention
from lumen_megatron.layer import LumenTransformerLayer
from lumen_megatron.linear import LumenColumnParallelLinear, LumenRowParallelLinear
from lumen_megatron.norm import LumenNorm

# Where Megatron's builders look modules up, and what stands there instead.
_BUILDERS = "megatron.core.models.gpt.gpt_layer_specs"


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

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool, *args: Any, **kwargs: Any) -> Any:
        """Experts: one quantized MLP each, in the form that this version of Megatron has for them."""
        return super().grouped_mlp_modules(False, *args, **kwargs)


def _replacements() -> dict[str, dict[str, type]]:
    provider = {"LocalSpecProvider": LumenSpecProvider}
    return {
        "megatron.core.models.backends": {
            **provider,
            "LNImpl": LumenNorm,
            "ColumnParallelLinear": LumenColumnParallelLinear,
            "RowParallelLinear": LumenRowParallelLinear,
        },
        _BUILDERS: {**provider, "LNImpl": LumenNorm, "TransformerLayer": LumenTransformerLayer},
        "megatron.core.models.gpt.moe_module_specs": provider,
    }


@contextlib.contextmanager
def lumen_modules() -> Iterator[None]:
    """Let Megatron's spec builders take Lumen's modules in place of the local ones, inside the context."""
    replaced = []
    for path, names in _replacements().items():
        module = importlib.import_module(path)
        for name, ours in names.items():
            if hasattr(module, name):
                replaced.append((module, name, getattr(module, name)))
                setattr(module, name, ours)
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
    build = importlib.import_module(_BUILDERS).get_gpt_decoder_block_spec
    with lumen_modules():
        return build(config, use_transformer_engine=False, vp_stage=vp_stage, **kwargs)


class _BlockOfArguments(TransformerBlockSubmodules):
    """The block of a script's own arguments: `--spec lumen_megatron.spec lumen_block_spec`.

    Up to 0.17 Megatron takes the named object itself for the spec, so that it is made where it is looked at first;
    from 0.18 it calls the object with the model's configuration.
    """

    def __init__(self) -> None:
        self._made: Any = None

    def __call__(self, model_config: Any, vp_stage: int | None = None) -> Any:
        return block_spec(getattr(model_config, "transformer", model_config), vp_stage)

    def _block(self) -> Any:
        if self._made is None:
            from megatron.training import get_args
            from megatron.training.arguments import core_transformer_config_from_args

            args = get_args()
            if getattr(args, "virtual_pipeline_model_parallel_size", None):
                raise ValueError(
                    "--spec lumen_megatron.spec lumen_block_spec with interleaved pipeline stages: Megatron does not "
                    "say which stage it builds; use --transformer-impl lumen"
                )
            self._made = block_spec(core_transformer_config_from_args(args))
        return self._made

    @property
    def layer_specs(self) -> Any:
        return self._block().layer_specs

    @property
    def layer_norm(self) -> Any:
        return self._block().layer_norm


lumen_block_spec = _BlockOfArguments()
"""For `--spec`; the recipe is that of Megatron's FP8 flags, or of `--lumen-*` flags where `lumen_megatron.auto` ran."""
