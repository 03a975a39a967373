"""Changes to Megatron-Core for low-precision parameter gathers and optimizer checkpoints, all of them; undone at once.

Megatron knows TransformerEngine's tensors only. Its buffers, optimizer and checkpoints ask functions of
`megatron.core.fp8_utils`, which read that module's globals when they are called:

* `FP8_TENSOR_CLASS`, `HAVE_TE_FP8_TENSOR_CLASS`: our parameter counts as one of them;
* `_modify_underlying_storage_impl`: its codes move into the flat buffer;
* `_quantize_param_shard_impl`: fp32 masters are cast into it;
* `te_post_all_gather_processing`: what came is counted;
* `is_te_min_version`: without TransformerEngine every version is too new (0.16 compares None).

and outside of that module:

* `dist_checkpointing.serialization.save_preprocess`: checkpoints get full precision;
* `DistributedOptimizer._copy_main_params_to_model_params`: newer ones cast parameters only where the configuration of
  DDP says `fp8_param_gather`;
* `DistributedOptimizer._set_main_param_and_optimizer_states`: torch's Adam has a `step` for each parameter. Megatron
  looks for it among a checkpoint's tensors although it saved it elsewhere (all formats but `dp_reshardable`), and sets
  one tensor for all parameters, which each of them then counts up;
* `DistributedOptimizer.state_dict`: a new process loads into an Adam that has no state yet, where Megatron asks what
  `step` it is at.

The last two of these concern machines without TransformerEngine and apex, where Megatron takes torch's Adam.

Checked on megatron-core 0.16.1 and 0.19.2; read in head d98e8a64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lumen_megatron.param_gather import count_gathered, quantize_shards, to_full_precision
from lumen_megatron.parameter import QuantizedParameter
from lumen_megatron.replacements import Replacements

_changed = Replacements()


def install() -> None:
    """Let Megatron gather and save our parameters, in this process; twice is once."""
    if _changed:
        return
    from megatron.core import fp8_utils
    from megatron.core.dist_checkpointing import serialization
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    theirs = fp8_utils.FP8_TENSOR_CLASS
    _changed.set(fp8_utils, "FP8_TENSOR_CLASS", QuantizedParameter if theirs is None else (theirs, QuantizedParameter))
    _changed.set(fp8_utils, "HAVE_TE_FP8_TENSOR_CLASS", True)
    for name, wrap in (
        ("_modify_underlying_storage_impl", _modify_storage),
        ("_quantize_param_shard_impl", _quantize),
        ("te_post_all_gather_processing", _gathered),
        ("is_te_min_version", _no_te_is_old),
    ):
        _changed.set(fp8_utils, name, wrap(getattr(fp8_utils, name)))
    _changed.set(serialization, "save_preprocess", _save_preprocess(serialization.save_preprocess))
    for name, wrap in (
        ("_copy_main_params_to_model_params", _with_cast),
        ("_set_main_param_and_optimizer_states", _with_step),
        ("state_dict", _with_state),
    ):
        _changed.set(DistributedOptimizer, name, wrap(getattr(DistributedOptimizer, name)))


def uninstall() -> None:
    """Give Megatron back its own; no quantized parameter may be in use any more."""
    _changed.take_back()


def _modify_storage(theirs: Callable[..., None]) -> Callable[..., None]:
    def modify(tensor: torch.Tensor, memory: torch.Tensor) -> None:
        if isinstance(tensor, QuantizedParameter):
            tensor.use_memory(memory)
        else:
            theirs(tensor, memory)

    return modify


def _quantize(theirs: Callable[..., None]) -> Callable[..., None]:
    def quantize(parameters: list, masters: list, starts: list, group: Any, *args: Any, **kwargs: Any) -> None:
        rows = list(zip(parameters, masters, starts))
        ours = [row for row in rows if isinstance(row[0], QuantizedParameter)]
        others = [row for row in rows if not isinstance(row[0], QuantizedParameter)]
        quantize_shards(*([row[i] for row in ours] for i in range(3)), group)
        if others:
            theirs(*([row[i] for row in others] for i in range(3)), group, *args, **kwargs)

    return quantize


def _gathered(theirs: Callable[[list], None] | None) -> Callable[[list], None]:
    def gathered(parameters: list) -> None:
        count_gathered([p for p in parameters if isinstance(p, QuantizedParameter)])
        others = [p for p in parameters if not isinstance(p, QuantizedParameter)]
        if theirs is not None and others:
            theirs(others)

    return gathered


def _no_te_is_old(theirs: Callable[..., bool]) -> Callable[..., bool]:
    def is_te_min_version(*args: Any, **kwargs: Any) -> bool:
        from megatron.core import fp8_utils

        return fp8_utils.HAVE_TE and theirs(*args, **kwargs)

    return is_te_min_version


def _save_preprocess(theirs: Callable[..., Any]) -> Callable[..., Any]:
    def save_preprocess(sharded_state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        to_full_precision(sharded_state_dict)
        return theirs(sharded_state_dict, *args, **kwargs)

    return save_preprocess


def _with_cast(theirs: Callable[..., None]) -> Callable[..., None]:
    def copy(self: Any, *args: Any, **kwargs: Any) -> None:
        groups = getattr(self, "model_float16_groups", [])
        if any(isinstance(parameter, QuantizedParameter) for group in groups for parameter in group):
            self.ddp_config.fp8_param_gather = True
        theirs(self, *args, **kwargs)

    return copy


def _with_step(theirs: Callable[..., None]) -> Callable[..., None]:
    def set_states(self: Any, model_param: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
        if not self.config.use_precision_aware_optimizer:
            group, order = self.model_param_group_index_map[model_param]
            state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].clone()  # `load_state_dict` has just set one for all
                tensors = {"step": state["step"], **tensors}
        theirs(self, model_param, tensors)

    return set_states


def _with_state(theirs: Callable[..., dict]) -> Callable[..., dict]:
    def state_dict(self: Any) -> dict:
        adam = self.optimizer
        if isinstance(adam, (torch.optim.Adam, torch.optim.AdamW)):  # what its first step would make, without a step
            for parameter in [p for group in adam.param_groups for p in group["params"] if not adam.state[p]]:
                adam.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        return theirs(self)

    return state_dict
