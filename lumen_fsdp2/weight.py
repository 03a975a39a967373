"""The sharded weight: a plain tensor with FSDP2's two gather hooks."""

from __future__ import annotations

import copy
from typing import Any

import torch

from lumen_core.gathered import GatheredWeight
from lumen_fsdp2 import torch_internals
from lumen_fsdp2.policy import LumenPolicy

# What hands out the same values in another place, and must hand out the hooks with them.
_KEEP = {
    torch.Tensor.to,
    torch.Tensor.cpu,
    torch.Tensor.cuda,
    torch.Tensor.pin_memory,
    torch.Tensor.narrow,
    torch.Tensor.clone,
}


class ShardedWeight(torch.Tensor):
    """This rank's rows of a quantized weight, in high precision: storage, optimizers and checkpoints see a tensor.

    It quantizes itself at each gather from what it holds then, and keeps no copy, so nothing can go stale.

    Attributes:
        param_name: of the parameter in its module.
    """

    param_name: str

    @classmethod
    def over(cls, local: torch.Tensor, name: str) -> ShardedWeight:
        """The same storage with hooks."""
        self = local.as_subclass(cls)
        self.param_name = name
        return self

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            if func is torch.Tensor.__deepcopy__:
                out = copy.deepcopy(args[0].plain(), args[1])
            else:
                out = func(*args, **(kwargs or {}))
        if (func in _KEEP or func is torch.Tensor.__deepcopy__) and type(out) is torch.Tensor:
            out = cls.over(out, args[0].param_name)
        return out

    def plain(self) -> torch.Tensor:
        """The tensor without hooks."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor)

    def __reduce_ex__(self, protocol: int) -> Any:
        return self.plain().__reduce_ex__(protocol)

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        """What this rank sends, and what the receiver must know beside it."""
        from lumen_fsdp2.attach import bind_inside  # here: both put these weights on modules
        from lumen_fsdp2.binding import binding_of

        binding = binding_of(module, self.param_name)
        if binding is None and isinstance(mp_policy, LumenPolicy):
            bind_inside(module)  # unsharded by hand before the first forward pass
            binding = binding_of(module, self.param_name)
        local = self.plain()
        if mp_policy.param_dtype is not None:
            local = local.to(mp_policy.param_dtype)
        if binding is None or binding.wire is None:
            return (local,), None
        return binding.send(local)

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        """The parameter that the module computes with; `out` is the one of an earlier gather."""
        if metadata is None:
            return None if out is not None else (outputs[0], ())
        binding, direction, extra = metadata
        parts = binding.receive(outputs, extra)
        if out is None:
            binding.info.direction = direction
            return GatheredWeight(parts, binding.info, binding.shape, param_dtype), ()
        torch_internals.local_of(out).refresh(parts, direction)
        return None
