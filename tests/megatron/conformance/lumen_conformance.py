"""pytest plugin: Megatron-LM's own unit tests with Lumen's modules in place of its local and TransformerEngine ones.

    cd $LUMEN_MEGATRON_LM
    PYTHONPATH=<this folder>:<checkout of Lumen>:. LUMEN_RECIPE=mxfp8 \
        torchrun --nproc-per-node 1 -m pytest -o addopts= -p lumen_conformance --noconftest tests/unit_tests/...

`LUMEN_RECIPE` (default bf16) is the recipe of every model that is built. docs/megatron.md lists the files and results.
"""

from __future__ import annotations

import os

import torch

from lumen_megatron import cpu, host

if not torch.cuda.is_available():
    cpu.install()
    join = torch.distributed.init_process_group

    def over_gloo(backend: object = None, *args: object, device_id: object = None, **kwargs: object) -> None:
        """The tests ask for NCCL by name."""
        join("gloo", *args, **kwargs)

    torch.distributed.init_process_group = over_gloo

from megatron.core import utils
from megatron.core.models.gpt import gpt_layer_specs

from lumen_megatron.attention import LumenCoreAttention
from lumen_megatron.linear import LumenColumnParallelLinear, LumenRowParallelLinear
from lumen_megatron.norm import LumenNorm
from lumen_megatron.norm_linear import LumenLayerNormColumnParallelLinear
from lumen_megatron.options import LumenOptions, set_default
from lumen_megatron.spec import LumenSpecProvider, lumen_modules


class FusedProvider(LumenSpecProvider):
    """For the builder of TransformerEngine's specs, whose linear layers hold the norm before them."""

    def linear(self) -> type:
        """A linear layer that is not parallel: no test here builds one."""
        return LumenColumnParallelLinear

    def fuse_layernorm_and_linear(self) -> bool:
        """Whether a dense MLP's first layer is the fused one."""
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        """The fused layer."""
        return LumenLayerNormColumnParallelLinear


# Without TransformerEngine 0.16.1 fails to compare its version; tests of its newer features are skipped.
utils.is_te_min_version = lambda version, check_equality=True: False
host._missing_names()
lumen_modules().__enter__()
set_default(LumenOptions().with_recipe(os.environ.get("LUMEN_RECIPE", "bf16")))
for name, value in {
    "HAVE_TE": True, "TESpecProvider": FusedProvider, "TENorm": LumenNorm,
    "TEColumnParallelLinear": LumenColumnParallelLinear, "TERowParallelLinear": LumenRowParallelLinear,
    "TEDotProductAttention": LumenCoreAttention,
}.items():  # fmt: skip
    setattr(gpt_layer_specs, name, value)
