"""The transformer layer that names its linear layers, decides which are quantized, and ends training steps.

Megatron's schedules tell each layer which micro-batch of the step comes (`current_microbatch`). The first one says that
the step before is over, whatever optimizer ran.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import TransformerLayer

from lumen_core.amax import ScalingState, end_step
from lumen_core.controller import base_key
from lumen_core.selection import module_selected
from lumen_megatron import host_fp8
from lumen_megatron.linear import LumenLinear
from lumen_megatron.options import options_of


class Chunk:
    """The layers on this rank that were built from one configuration; those of a chunk reduce their amax together."""

    def __init__(self) -> None:
        self._announced = False
        self._layers: dict[object, weakref.WeakSet[LumenTransformerLayer]] = {}

    @classmethod
    def of(cls, config: Any) -> Chunk:
        """The one of a `TransformerConfig`, on which it is kept."""
        return config.__dict__.setdefault("_lumen_chunk", cls())

    def __deepcopy__(self, memo: dict) -> Chunk:
        return Chunk()  # a copied configuration builds other layers

    def add(self, layer: LumenTransformerLayer) -> None:
        """Take in a layer; those of one virtual pipeline stage are a chunk."""
        self._layers.setdefault(layer.chunk_number, weakref.WeakSet()).add(layer)

    def announce(self) -> None:
        """Print once, on rank 0, what the layers compute in."""
        if self._announced:
            return
        self._announced = True
        if torch.distributed.get_rank() == 0:
            from lumen_megatron.summary import of_layers  # here: it looks for these layers

            layers = {layer for members in self._layers.values() for layer in members}
            print(of_layers(sorted(layers, key=lambda each: each.layer_number)), flush=True)

    def end_step(self, layer: LumenTransformerLayer) -> None:
        """Close the training step of `layer` and its companions; a collective over the amax group."""
        # A copied layer is in no set: it stands for itself.
        members = self._layers.get(layer.chunk_number, ())
        layers = sorted({*members, layer}, key=lambda each: each.layer_number)
        trained = any(each.trained for each in layers)
        states = []
        for each in layers:
            each.step_begins = each.trained = False
            states += [state for _, state in each.scaling_states()]
        quant = options_of(layer.config).quant
        if quant.scaling == "delayed" and states and trained:
            end_step(states, quant.amax_algo, reduce=quant.reduce_amax, group=amax_group())


def amax_group() -> torch.distributed.ProcessGroup:
    """Ranks that hold parts of the same layers, or their replicas: tensor, context and data parallel."""
    return parallel_state.get_amax_reduction_group(with_context_parallel=True)


def step_end(model: torch.nn.Module) -> None:
    """Close a training step of delayed scaling; for loops without Megatron's schedules, which tell it by themselves.

    A collective over the amax group: every rank calls it.
    """
    for layer in model.modules():
        if isinstance(layer, LumenTransformerLayer) and layer.trained:
            Chunk.of(layer.config).end_step(layer)


class LumenTransformerLayer(TransformerLayer):
    """Megatron's layer, built as `TransformerLayer` is.

    Attributes:
        chunk_number: of the virtual pipeline stage; None without interleaving.
        step_begins: the pass to come is the first of a step.
        trained: a pass with gradients ran in this step.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.chunk_number = kwargs.get("vp_stage")
        self.step_begins = self.trained = False
        self._choose()
        Chunk.of(self.config).add(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As `TransformerLayer`."""
        if self.step_begins:
            Chunk.of(self.config).end_step(self)
            if options_of(self.config).announce:
                Chunk.of(self.config).announce()
        self.trained |= self.training and torch.is_grad_enabled()
        return super().forward(*args, **kwargs)

    @property
    def current_microbatch(self) -> int:
        """Number of the micro-batch within its step; the schedules set it."""
        return self._current_microbatch

    @current_microbatch.setter
    def current_microbatch(self, number: int) -> None:
        self._current_microbatch = number
        self.step_begins |= number == 0

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As `TransformerLayer`. The step is over where a checkpoint is made: a collective over the amax group."""
        Chunk.of(self.config).end_step(self)
        host_fp8.install()
        return super().sharded_state_dict(*args, **kwargs)

    def linears(self) -> Iterator[tuple[str, LumenLinear]]:
        """`(name, module)` of our linear layers, by the names that the whole model has for them."""
        for name, module in self.named_modules():
            if isinstance(module, LumenLinear):
                yield f"decoder.layers.{self.layer_number - 1}.{name}", module

    def scaling_states(self) -> Iterator[tuple[str, ScalingState]]:
        """`(name, state)` of every quantized linear layer."""
        for name, module in self.linears():
            if module.quant_config is not None:
                yield name, module.quant_state

    def _choose(self) -> None:
        options = options_of(self.config)
        if not options.quantizes:
            return
        quant, layers = options.quant, self.config.num_layers
        first = self.layer_number <= quant.first_layers_bf16
        last = self.layer_number > layers - quant.last_layers_bf16
        for name, module in self.linears():
            if first or last:
                module.set_recipe(None, f"{'first' if first else 'last'}_layers_bf16")
                continue
            selected, why = module_selected(name, quant.apply_modules, quant.ignored_modules)
            # Ranks that hold parts of one layer draw from one stream; replicas must not.
            key = base_key(name, quant.seed, parallel_state.get_data_parallel_rank())
            module.set_recipe(quant if selected else None, "" if selected else why, key)
            if selected and options.param_gather and module.weight is not None:
                module.gather_in_low_precision(name)
