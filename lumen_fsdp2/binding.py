"""How one sharded weight is gathered: its plan, its gather hooks, and when it gets these."""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from lumen_core import sharding
from lumen_core.amax import WEIGHT
from lumen_core.config import QuantConfig
from lumen_core.gathered import BOTH, COLUMNS, ROWS, GatherInfo
from lumen_core.wire import WireFormat
from lumen_fsdp2 import torch_internals
from lumen_fsdp2.amax import AmaxKeeper
from lumen_fsdp2.on_demand import SWITCHED, OnDemand
from lumen_fsdp2.plan import ALL, ON_DEMAND, ROW, PlanRow, choose_mode, part_bytes, why_not
from lumen_fsdp2.policy import LumenPolicy
from lumen_fsdp2.weight import ShardedWeight

BINDINGS = sharding.GATHER_ATTRIBUTE  # parameter name -> Binding


class Binding:
    """How one parameter of a quantized module is gathered.

    Attributes:
        wire: form that travels; None leaves the parameter to a plain gather.
        mode, reason: see `plan.PlanRow`.
        info: shared with the gathered parameter.
        shape: of the whole weight.
        group: process group that the weight is cut over.
        amax: of the whole weight, 0-dim fp32, where one scale serves it.
        compute_dtype: in which the weight is quantized.
        keeper: of the amax.
        on_demand: decides its direction in that mode.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        name: str,
        param: Any,
        fsdp_module: FSDPModule,
        fsdp_group: Any,
        policy: LumenPolicy,
    ) -> None:
        self._module = weakref.ref(module)
        self._name = name
        self._param = weakref.ref(param)
        self._fsdp_module = weakref.ref(fsdp_module)
        self._fsdp_group = weakref.ref(fsdp_group)
        self.policy = policy
        self.shape = torch_internals.local_shape(param)
        self.world = torch_internals.world_size(param)
        self.group = torch_internals.process_group(param)
        self.compute_dtype = policy.param_dtype or param.sharded_param.dtype
        self.amax: torch.Tensor | None = None
        self.keeper: AmaxKeeper | None = None
        self.on_demand: OnDemand | None = None
        self.mode, self.wire, self.reason = "-", None, ""
        self.delayed = False
        self._decide(module, param, policy)
        self.info = None
        if self.wire is not None:
            self.info = GatherInfo(self.wire, name, on_demand=self.mode == ON_DEMAND)

    def _decide(self, module: torch.nn.Module, param: Any, policy: LumenPolicy) -> None:
        config: QuantConfig = module.quant_config
        multiplied = WireFormat.of(config, param.device)
        wire = multiplied if policy.wire is None else WireFormat.of(policy.wire, param.device)
        if not policy.low_precision_all_gather:
            self.reason = "low_precision_all_gather=False: quantized after the gather"
        elif wire is None:
            self.reason = "wire=bf16" if policy.wire is not None else "the recipe does not quantize weights"
        elif torch_internals.is_tied(param):
            self.reason = "tied: another module reads the same weight"
        elif torch_internals.shard_dim(param) != 0:
            self.reason = f"cut along dimension {torch_internals.shard_dim(param)}: quantized after the gather"
        elif getattr(module, "is_transposed", False) and len(self.shape) == 3:
            self.reason = "bank stored transposed: quantized after the gather"
        elif reason := why_not(wire, self.shape, self.world):
            self.reason = f"{reason}: quantized after the gather"
        elif not isinstance(torch_internals.sharded_local(param.sharded_param), ShardedWeight):
            self.reason = "sharded before quant.enable: quantized after the gather"
        else:
            self.wire = wire
            self.mode, self.reason = choose_mode(
                wire, self.shape, self.world, policy.all_gather_mode, multiplied, config.recipe
            )
            self.delayed = wire.per_tensor and config.scaling == "delayed"

    @property
    def module(self) -> torch.nn.Module:
        """The quantized module."""
        return self._module()

    @property
    def companions(self) -> Any:
        """What stands for the weights that are gathered in the same call."""
        return self._fsdp_group()

    @property
    def device(self) -> torch.device:
        """Where the weight is gathered; with CPU offload its parts are elsewhere."""
        return self._fsdp_group().device

    def release(self) -> None:
        """Another binding of the same parameter takes its place."""
        if self.keeper is not None:
            self.keeper.bindings.remove(self)

    def in_forward_pass(self) -> bool:
        """True while the model around it runs forward."""
        return torch_internals.root_of_pass(self._fsdp_module()._get_fsdp_state()) is not None

    def local(self) -> torch.Tensor:
        """This rank's rows in high precision."""
        local = torch_internals.local_of(self._param().sharded_param)
        return local.plain() if isinstance(local, ShardedWeight) else local

    def send(self, local: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], tuple]:
        """What FSDP2 gathers, and `(binding, direction, extra)` for `receive`."""
        matrix = local if local.dim() == 2 else local.reshape(-1, local.shape[-1])
        extra: tuple[torch.Tensor, ...] = ()
        direction = self._direction()
        if self.wire.per_tensor and local.dim() == 3:
            floor = self.module.quant_states[self._name].in_use[WEIGHT] if self.delayed else None
            sent = list(self.wire.encode_experts(local, floor))
        elif self.wire.per_tensor:
            self.keeper.before_gather(self)
            amax = self.amax
            if self.delayed:
                amax = self.module.quant_state.weight_amax(self.amax)
            codes, scale = self.wire.encode(matrix, amax)
            sent, extra = [codes], (scale, self.amax) if self.delayed else (scale,)
        elif direction == COLUMNS:
            sent = list(self.wire.encode_columns(matrix))
        else:
            sent = list(self.wire.encode(matrix))
            if direction == BOTH:
                sent += self.wire.encode_columns(matrix)
        if self.world == 1 and len(sent) > 1:
            sent = [_packed(sent)]  # one rank alone gets only the first tensor back
        return tuple(sent), (self, direction, extra)

    def receive(self, outputs: tuple[torch.Tensor, ...], extra: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        """The parts of the gathered weight, as `GatheredWeight` takes them."""
        parts = [out.view(torch.uint8).reshape(-1) for out in outputs]
        if self.world == 1 and not extra:
            parts = _unpacked(parts[0], part_bytes(self.wire, self.shape, self.mode, delayed=self.delayed))
        return [*parts, *extra]

    def _direction(self) -> str:
        if self.mode == ALL:
            return BOTH
        return ROWS if self.on_demand is None else self.on_demand.direction(self)

    def row(self, name: str, gathers: int) -> PlanRow:
        """The plan's line; `gathers` in a forward and a backward pass."""
        mode, reason = self.mode, self.reason
        if mode == ON_DEMAND and (self.on_demand.rows_only or gathers == 1):
            mode, reason = ROW, f"on-demand became row: {SWITCHED}"
        return plan_row(name, self._param(), gathers, self.wire, mode, reason, self.compute_dtype, delayed=self.delayed)


def plan_row(name, param, gathers, wire, mode, reason, dtype, *, delayed=False) -> PlanRow:
    shape, world = torch_internals.local_shape(param), torch_internals.world_size(param)
    if wire is None:
        padded = math.ceil(shape[0] / world) * world if torch_internals.shard_dim(param) == 0 else shape[0]
        size = padded * math.prod(shape[1:]) * dtype.itemsize
    else:
        size = sum(part_bytes(wire, shape, mode, delayed=delayed))
    text = str(dtype).removeprefix("torch.") if wire is None else wire.name
    return PlanRow(name, shape, text, mode, size if world > 1 else 0, gathers, reason, dtype)


def _packed(sent: list[torch.Tensor]) -> torch.Tensor:
    padded = [torch.nn.functional.pad(part, (0, -part.numel() % 16)) for part in sent]
    return torch.cat(padded)


def _unpacked(buffer: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    parts, start = [], 0
    for size in sizes:
        parts.append(buffer[start : start + size])
        start += size + -size % 16
    return parts


def notice(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter) -> None:
    """Give a sharded weight its hooks; called by the quantized modules when a parameter is put on them."""
    if isinstance(torch_internals.local_of(parameter), ShardedWeight):
        return  # the usual case, at every reshard
    local = torch_internals.sharded_local(parameter)
    if type(local) is not torch.Tensor or local.dim() not in (2, 3) or name.endswith("bias"):
        return
    torch_internals.set_local(parameter, ShardedWeight.over(local, name))


sharding.observe(notice)


def binding_of(module: torch.nn.Module, name: str) -> Binding | None:
    """The binding of a parameter, or None for a host with a policy of its own."""
    return module.__dict__.get(BINDINGS, {}).get(name)
