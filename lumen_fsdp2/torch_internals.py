"""Everything here reads FSDP2 state that torch does not document. Checked on torch 2.11.0 and 2.13.0.

FSDP2 has no public way to ask which parameters a module's group holds, over which mesh, whether it reshards, and in
which phase it is; a plan that is right needs all of them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor


def policy_of(module: FSDPModule) -> MixedPrecisionPolicy:
    """The policy that `fully_shard` was given."""
    return module._get_fsdp_state()._mp_policy


def asking_state() -> Any | None:
    """FSDP2's state of the module whose forward pass reads a field of its policy; for use in that field's `__bool__`.

    FSDP2 reads `policy.cast_forward_inputs` in a method of that state, and hands the state to nobody.
    """
    state = sys._getframe(2).f_locals.get("self")
    return state if isinstance(state, FSDPState) else None


def modules_of(state: Any) -> tuple[torch.nn.Module, ...]:
    """The modules that were sharded together; one where they are the root of a pass."""
    return tuple(state._modules)


def sharded_with(module: FSDPModule) -> tuple[torch.nn.Module, ...]:
    """The modules of the call of `fully_shard` that sharded this one; they share its groups."""
    return tuple(module._get_fsdp_state()._modules)


def root_of_pass(state: Any) -> Any | None:
    """State of the module with which the forward pass that runs now began; None where none runs."""
    return state._state_ctx.iter_forward_root


def in_backward() -> bool:
    """True within a backward pass."""
    return torch._C._current_graph_task_id() != -1


def groups(module: FSDPModule) -> list[Any]:
    """FSDP2's parameter groups of this module (not of those below it)."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def parameters(group: Any) -> Iterator[tuple[torch.nn.Module, str, Any]]:
    """`(module, parameter name, FSDPParam)` of every parameter of a group."""
    for param in group.fsdp_params:
        yield param._module_info.module, param._module_info.param_name, param


def is_tied(param: Any) -> bool:
    """True where several modules share the parameter."""
    return bool(param._module_info.shared_modules)


def shard_dim(param: Any) -> int:
    """Dimension that FSDP2 cut."""
    return param.fsdp_placement.dim


def local_shape(param: Any) -> tuple[int, ...]:
    """Shape before FSDP2 cut it (of this rank's part where tensor parallelism did before)."""
    return tuple(param._orig_size)


def world_size(param: Any) -> int:
    """Ranks that the parameter is cut over."""
    return param.shard_mesh.size()


def process_group(param: Any) -> torch.distributed.ProcessGroup:
    """Of those ranks."""
    return param.shard_mesh.get_group()


def reshards_after_forward(group: Any) -> bool:
    """True where the weights are gathered again for the backward pass."""
    return group.post_forward_mesh_info is not None


def will_keep_weights_as_root(module: FSDPModule) -> bool:
    """True before the first forward pass for a module that, if it is the root then, will not reshard after it."""
    state = module._get_fsdp_state()
    return state._is_root is None and bool(state._auto_reshard_after_forward)


def reshards_to_smaller_world(group: Any) -> bool:
    """True for `reshard_after_forward=<int>` with a size that is not the group's own."""
    after = group.post_forward_mesh_info
    return after is not None and after.shard_mesh_size != group.mesh_info.shard_mesh_size


def gathers_for_backward_only(group: Any) -> bool:
    """True where what is gathered now is dropped before the next forward pass."""
    state_is_backward = group._training_state == TrainingState.PRE_BACKWARD
    return state_is_backward and group.reshard_after_backward and reshards_after_forward(group)


def sharded_local(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    """This rank's part of a parameter that was cut evenly along its first dimension, else None.

    With tensor parallelism the last mesh dimension comes first to cut; both cuts must be even.
    """
    if not isinstance(parameter, DTensor):
        return None
    mesh = parameter._spec.mesh
    sizes = list(parameter.shape)
    for index, placement in enumerate(parameter._spec.placements):
        if placement.is_shard() or type(placement).__name__ == "_StridedShard":
            if sizes[placement.dim] % mesh.size(index):
                return None
            sizes[placement.dim] //= mesh.size(index)
    local = parameter._local_tensor
    return local if tuple(local.shape) == tuple(sizes) and local.numel() else None


def set_local(parameter: torch.nn.Parameter, local: torch.Tensor) -> None:
    """Put another tensor object over the same values behind a sharded parameter."""
    parameter._local_tensor = local


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor behind a DTensor; any other as it is."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
