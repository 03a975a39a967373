"""The table of what is quantized in a Megatron model, on this rank."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from lumen_core.config import QuantConfig
from lumen_core.formats import resolve_flavour
from lumen_core.summary import Row, Summary, row_of
from lumen_megatron.layer import LumenTransformerLayer
from lumen_megatron.linear import LumenLinear


def summary(model: torch.nn.Module | Iterable[torch.nn.Module]) -> Summary:
    """What each linear layer of this rank computes in, and why others are left as they are; `str()` gives a table.

    Args:
        model: a GPT model, wrapped or not, or the list of a pipeline's chunks.

    Raises:
        ValueError: the model has no layer of Lumen's.
    """
    chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
    layers = [m for chunk in chunks for m in chunk.modules() if isinstance(m, LumenTransformerLayer)]
    if not layers:
        raise ValueError("this model has no layer of Lumen's: build it from lumen_megatron.block_spec")
    found = of_layers(layers)
    for chunk in chunks:
        for name, module in chunk.named_modules():
            stock = isinstance(module, (ColumnParallelLinear, RowParallelLinear)) and not isinstance(
                module, LumenLinear
            )
            if stock and module.weight is not None:
                found.skipped.append((name.removeprefix("module."), tuple(module.weight.shape), "Megatron's own layer"))
    return found


def of_layers(layers: Iterable[LumenTransformerLayer]) -> Summary:
    """The part of a summary that these layers make."""
    rows: list[Row] = []
    skipped: list[tuple[str, tuple[int, ...], str]] = []
    config, device = QuantConfig.from_recipe("bf16"), torch.device("cpu")
    for name, module in (each for layer in layers for each in layer.linears()):
        if module.quant_config is None:
            skipped.append((name, tuple(module.weight.shape), module.skipped_because))
        else:
            config, device = module.quant_config, module.weight.device
            rows.append(row_of(name, module.weight, config))
    return Summary(config, resolve_flavour(config.flavour, device), rows, skipped)
