"""Megatron's parallel linear layers with quantized GEMMs.

Only the product is ours (`_forward_impl`): parameters, initialization, gathers and scatters around it, biases and
checkpoints are Megatron's. Scales are those of the whole layer: largest magnitudes are taken over the ranks that hold
parts of it, so that codes do not depend on how it is cut (blocks must end at the cuts for that).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from lumen_core.amax import ScalingState
from lumen_core.config import QuantConfig
from lumen_core.operands import LinearOperands
from lumen_core.spread import Spread
from lumen_megatron import host_fp8
from lumen_megatron.linear_function import Call, ParallelLinear
from lumen_megatron.options import options_of
from lumen_megatron.parameter import QuantizedParameter, quantized_parameter

# Arguments that newer versions pass to `_forward_impl`, with the values under which they ask for nothing.
_IDLE: dict[str, tuple[object, ...]] = {
    "gtp_remat_size": (None, 1),
    "output_dtype": (None,),
    "grad_output_buffer": (None,),
    "async_grad_allreduce": (None,),
}


class LumenLinear:
    """What both layers share; a mixin in front of Megatron's class.

    Attributes:
        quant_config: the recipe, None where the layer computes as Megatron's own.
        quant_state: amax history and rounding counter.
        spread: over which ranks the layer's matrices are cut.
        skipped_because: why the layer is not quantized; empty where it is.
    """

    quant_config: QuantConfig | None
    quant_state: ScalingState
    spread: Spread
    skipped_because: str

    def _prepare(self, cut: str, stride: int = 1) -> None:
        options = options_of(self.config)
        group = self.tp_group
        tokens = None
        if self.config.context_parallel_size > 1 and not self.is_expert:
            tokens = parallel_state.get_context_parallel_group()
        self.spread = Spread(tokens=tokens, stride=stride, zigzag=True, **{cut: group})
        self._fuse_main_grad = options.fuse_main_grad
        self._deferred: list[Callable[[], None]] = []
        self.set_recipe(options.quant if options.quantizes else None, "" if options.quantizes else "recipe bf16")

    def set_recipe(self, config: QuantConfig | None, why: str = "", key: int = 0) -> None:
        """Compute by `config`, or as Megatron does where it is None, for the reason `why`."""
        self.quant_config, self.skipped_because = config, why
        if config is None:
            return
        device = self.weight.device if self.weight is not None else torch.device("cpu")
        self.quant_state = ScalingState(config.history_len, device, key)
        # Under sequence parallelism a rank keeps its own tokens as they are, not codes of everybody's.
        self._gathering_config = config.replace(low_precision_activations=False)

    def gather_in_low_precision(self, name: str) -> None:
        """Hold the weight as codes and scales, which the distributed optimizer gathers as they are.

        A collective over the tensor-parallel ranks; once the recipe is decided, before DDP takes the parameters.

        Raises:
            ValueError: the recipe or the parameters' precision does not allow it.
        """
        rows, columns = self.quant_config.weight_block or (0, 0)
        if self.quant_config.is_mx and rows != columns:
            # One copy is gathered: dgrad's blocks along the rows are made from it.
            self.quant_config = self.quant_config.replace(dgrad_weight="from_rows")
            self._gathering_config = self._gathering_config.replace(dgrad_weight="from_rows")
        host_fp8.install()
        self.weight = quantized_parameter(self.weight, self.quant_config, self.quant_state, self.spread, name)

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.quant_config is None or input.numel() == 0:
            return super()._forward_impl(input, weight, *args, **kwargs)
        for name, idle in _IDLE.items():
            if kwargs.get(name) not in idle:
                raise ValueError(f"{name}={kwargs[name]!r}: a quantized layer does not do that, recipe bf16 does")
        if self.quant_state.device != input.device:
            self.quant_state.to(input.device)
        gather = bool(kwargs.get("sequence_parallel"))
        grad = torch.is_grad_enabled()
        config = self._gathering_config if gather else self.quant_config
        record = self.training and grad
        call = Call(
            LinearOperands(config, input.device, self.quant_state, record, self.spread),
            self.tp_group,
            gather,
            bool(kwargs.get("allreduce_dgrad")),
            self._fuse_main_grad or bool(kwargs.get("gradient_accumulation_fusion")),
            self._deferred.append if getattr(self.config, "delay_wgrad_compute", False) else None,
        )
        return ParallelLinear.apply(input, weight, kwargs.get("bias"), call, grad)

    def backward_dw(self) -> None:
        """Compute the weight gradients that `delay_wgrad_compute` put off."""
        waiting, self._deferred = self._deferred, []
        for compute in waiting:
            compute()

    def get_extra_state(self) -> dict[str, torch.Tensor] | None:
        """Scaling state that a checkpoint carries; None for recipes without any, as Megatron's own layers give."""
        config = self.quant_config
        if config is None:
            return None
        state: dict[str, torch.Tensor] = {}
        if config.scaling == "delayed":
            state |= {"history": self.quant_state.history, "current": self.quant_state.current}
        if config.stochastic_rounding:
            state["counter"] = self.quant_state.counter
        return {name: value.detach().to("cpu", copy=True) for name, value in state.items()} or None

    def set_extra_state(self, state: object) -> None:
        """Take over what `get_extra_state` gave; the states of other implementations mean nothing here."""
        config = self.quant_config
        if config is None or not isinstance(state, dict):
            return
        with torch.no_grad():
            if config.scaling == "delayed" and "history" in state:
                self.quant_state.set_history(state["history"], state["current"], config.amax_algo)
                if isinstance(self.weight, QuantizedParameter) and self.weight.holding.initial is not None:
                    self.weight.copy_(self.weight)  # it was loaded before, under another scale
            if config.stochastic_rounding and "counter" in state:
                self.quant_state.set_count(state["counter"].to(self.quant_state.device))


class LumenColumnParallelLinear(LumenLinear, ColumnParallelLinear):
    """`ColumnParallelLinear` with quantized GEMMs: each rank has rows of the weight."""

    def __init__(self, input_size: int, output_size: int, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, **kwargs)
        self._prepare("out", kwargs.get("stride", 1))


class LumenRowParallelLinear(LumenLinear, RowParallelLinear):
    """`RowParallelLinear` with quantized GEMMs: each rank has columns of the weight."""

    def __init__(self, input_size: int, output_size: int, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, **kwargs)
        self._prepare("in_")
