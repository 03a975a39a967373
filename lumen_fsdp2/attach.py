"""Where weights get their gather hooks, and where hooks get their plan.

Two moments. When FSDP2 puts a sharded parameter on a quantized module, its local tensor becomes a `ShardedWeight`
(nothing is known of the policy yet). Then each FSDP2 group whose policy is a `LumenPolicy` is bound: by
`lumen_fsdp2.fully_shard` at once, with torch's own at the first forward pass, before anything is gathered.
"""

from __future__ import annotations

import functools
import math
import weakref
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from lumen_core import sharding
from lumen_core.amax import WEIGHT
from lumen_core.comm.collectives import Collectives, collectives_for
from lumen_core.config import QuantConfig
from lumen_core.controller import controller_over, live_controllers
from lumen_core.experts import QuantExperts
from lumen_core.gathered import BOTH, COLUMNS, ROWS, GatherInfo
from lumen_core.linear import QuantLinear
from lumen_core.names import plain_name
from lumen_core.wire import WireFormat
from lumen_fsdp2 import torch_internals
from lumen_fsdp2.amax import WeightAmax, amax_of
from lumen_fsdp2.comm import LumenAllGather, LumenReduceScatter
from lumen_fsdp2.plan import ALL, ON_DEMAND, ROW, Plan, PlanRow, choose_mode, part_bytes, why_not
from lumen_fsdp2.policy import LumenPolicy
from lumen_fsdp2.weight import ShardedWeight

_BINDINGS = sharding.GATHER_ATTRIBUTE  # parameter name -> Binding
_SWITCHED = "on-demand became row: weights are read again outside the pass that they were gathered for"
_QUANTIZED = (QuantLinear, QuantExperts)


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
    """

    def __init__(self, module: torch.nn.Module, name: str, param: Any, fsdp_group: Any, policy: LumenPolicy) -> None:
        self._module = weakref.ref(module)
        self._name = name
        self._param = weakref.ref(param)
        self._fsdp_group = weakref.ref(fsdp_group)
        self.policy = policy
        self.shape = torch_internals.local_shape(param)
        self.world = torch_internals.world_size(param)
        self.group = torch_internals.process_group(param)
        self.compute_dtype = policy.param_dtype or param.sharded_param.dtype
        self.amax: torch.Tensor | None = None
        self.refresher: WeightAmax | None = None
        self._switched = False
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

    def local(self) -> torch.Tensor:
        """This rank's rows in high precision."""
        local = torch_internals.local_of(self._param().sharded_param)
        return local.plain() if isinstance(local, ShardedWeight) else local

    def send(self, local: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], tuple]:
        """What FSDP2 gathers, and `(binding, direction, extra)` for `receive`."""
        matrix = local if local.dim() == 2 else local.reshape(-1, local.shape[-1])
        extra: tuple[torch.Tensor, ...] = ()
        direction = BOTH if self.mode == ALL else self._direction()
        if self.wire.per_tensor and local.dim() == 3:
            floor = self.module.quant_states[self._name].in_use[WEIGHT] if self.delayed else None
            sent = list(self.wire.encode_experts(local, floor))
        elif self.wire.per_tensor:
            self.refresher.before_gather(self)
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
        if self.mode != ON_DEMAND or self.info.rows_only:
            self._tell_switch()
            return ROWS
        if not torch_internals.gathers_for_backward_only(self._fsdp_group()):
            return ROWS
        return COLUMNS

    def _tell_switch(self) -> None:
        if self.mode == ON_DEMAND and not self._switched:
            self._switched = True
            _say_once(_SWITCHED)

    def row(self, name: str) -> PlanRow:
        """The plan's line."""
        mode, reason, group = self.mode, self.reason, self._fsdp_group()
        if mode == ON_DEMAND and (self._switched or not torch_internals.reshards_after_forward(group)):
            mode, reason = ROW, _SWITCHED
        return _row(name, self._param(), group, self.wire, mode, reason, self.compute_dtype, delayed=self.delayed)


def _row(name, param, group, wire, mode, reason, dtype, *, delayed=False) -> PlanRow:
    shape, world = torch_internals.local_shape(param), torch_internals.world_size(param)
    if wire is None:
        padded = math.ceil(shape[0] / world) * world if torch_internals.shard_dim(param) == 0 else shape[0]
        size = padded * math.prod(shape[1:]) * dtype.itemsize
    else:
        size = sum(part_bytes(wire, shape, mode, delayed=delayed))
    gathers = 2 if torch_internals.reshards_after_forward(group) else 1
    text = str(dtype).removeprefix("torch.") if wire is None else wire.name
    return PlanRow(name, shape, text, mode, size if world > 1 else 0, gathers, reason)


def _packed(sent: list[torch.Tensor]) -> torch.Tensor:
    padded = [torch.nn.functional.pad(part, (0, -part.numel() % 16)) for part in sent]
    return torch.cat(padded)


def _unpacked(buffer: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    parts, start = [], 0
    for size in sizes:
        parts.append(buffer[start : start + size])
        start += size + -size % 16
    return parts


@functools.cache
def _say_once(text: str) -> None:
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        print(f"lumen_fsdp2: {text}", flush=True)


# --- hooks ------------------------------------------------------------------------------------------------------------


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
    return module.__dict__.get(_BINDINGS, {}).get(name)


# --- binding groups to a plan ----------------------------------------------------------------------------------------


def fewer_ranks(value: object) -> ValueError:
    """The error of `reshard_after_forward=value`, a number."""
    return ValueError(
        f"reshard_after_forward={value} keeps a copy sharded over fewer ranks, which FSDP2 cannot do with quantized "
        "weights: use True or False"
    )


def bind(module: FSDPModule, policy: LumenPolicy, refresher: WeightAmax) -> int:
    """Bind the groups of one FSDP2 module; the number of its parameters that belong to quantized modules."""
    found = 0
    for group in torch_internals.groups(module):
        if torch_internals.reshards_to_smaller_world(group):
            raise fewer_ranks("<int>")
        for owner, name, param in torch_internals.parameters(group):
            if not isinstance(owner, _QUANTIZED) or len(torch_internals.local_shape(param)) not in (2, 3):
                continue
            _check_recipe(owner, policy)
            binding = Binding(owner, name, param, group, policy)
            owner.__dict__.setdefault(_BINDINGS, {})[name] = binding
            found += 1
            if binding.mode == ON_DEMAND or _dgrad_from_rows(binding, policy):
                _from_rows(owner)
            if binding.wire is not None and binding.wire.per_tensor and len(binding.shape) == 2:
                binding.refresher = refresher
                refresher.bindings.append(binding)
        _attach_collectives(module, group, policy)
    module.__dict__["_lumen_bound"] = policy
    return found


def _check_recipe(owner: torch.nn.Module, policy: LumenPolicy) -> None:
    if policy.recipe is None:
        return
    given, own = policy.recipe, owner.quant_config
    if given.replace(dgrad_weight=own.dgrad_weight) != own:
        raise ValueError(
            f"LumenPolicy(recipe={given.recipe!r}) on a model that quant.enable prepared with {own.recipe!r} "
            f"({own}): give the policy no recipe, or the same"
        )


def _dgrad_from_rows(binding: Binding, policy: LumenPolicy) -> bool:
    """True where dgrad's blocks come from the rows.

    Also for a weight that does not divide over this many ranks: the numbers must not depend on how many there are.
    """
    if binding.wire is not None:
        return binding.mode == ROW and not binding.wire.one_copy
    return policy.low_precision_all_gather and policy.wire is None and policy.all_gather_mode in ("auto", ROW)


def _from_rows(owner: torch.nn.Module) -> None:
    config = owner.quant_config
    if config.dgrad_weight != "from_rows" and config.is_mx and config.weight_block[0] == 1:
        owner.quant_config = config.replace(dgrad_weight="from_rows")


def _attach_collectives(module: FSDPModule, group: Any, policy: LumenPolicy) -> None:
    collectives = _collectives(group.mesh_info.shard_process_group, policy.collectives, group.device)
    module.set_custom_all_gather(LumenAllGather(collectives, shares=_Shares(module)))
    module.set_custom_reduce_scatter(LumenReduceScatter(collectives, policy.low_precision_reduce_scatter))


@functools.cache
def _collectives(process_group: torch.distributed.ProcessGroup, choice: str, device: torch.device) -> Collectives:
    """One for all modules over a group: choosing may take a collective, and MORI's buffers are hundreds of megabytes.

    Kept as long as the process: letting go of it when the last model does would leave to each rank's garbage collector
    which of them choose again.
    """
    collectives, reason = collectives_for(process_group, choice, device)
    _say_once(f"collectives: {collectives.name} ({reason})")
    return collectives


class _Shares:
    """Bytes of one gather of a module's group by parameter, under the names that the enabled model gives them."""

    def __init__(self, module: FSDPModule) -> None:
        self._module = weakref.ref(module)
        self._shares: dict[str, int] | None = None

    def __call__(self) -> dict[str, int]:
        if self._shares is None:
            module = self._module()
            owner = controller_over(module)
            root = module if owner is None else owner.model
            names = {id(m): plain_name(name) for name, m in root.named_modules()}
            self._shares = {row.name: row.bytes_per_gather for row in _rows(module, names)}
        return self._shares


def start(policy: LumenPolicy, *, again: bool = False) -> None:
    """Bind every sharded module with this policy below an enabled model, print the plan; called at each forward.

    Raises:
        RuntimeError: the policy would change nothing.
    """
    if policy.__dict__.get("_started") and not again:
        return
    found, bound = 0, []
    for controller in live_controllers():
        modules = [m for m in controller.model.modules() if isinstance(m, FSDPModule)]
        mine = [m for m in modules if torch_internals.policy_of(m) is policy]
        refresher = amax_of(controller)
        for module in mine:
            if module.__dict__.get("_lumen_bound") is not policy:
                bind(module, policy, refresher)
        bindings = [b for m in controller.model.modules() for b in m.__dict__.get(_BINDINGS, {}).values()]
        found += sum(binding.policy is policy for binding in bindings)
        bound += [controller.model] if mine else []
    if not found:
        raise RuntimeError(
            "LumenPolicy has no effect here: no module sharded with it was quantized. Call quant.enable(model, ...) "
            "before torch's fully_shard, or use lumen_fsdp2.fully_shard, which does"
        )
    object.__setattr__(policy, "_started", True)
    if policy.print_plan and torch.distributed.get_rank() == 0:
        for model in bound:
            print(plan(model), flush=True)


def plan(model: torch.nn.Module) -> Plan:
    """What each parameter of a sharded model sends, and why; the same on every rank.

    Raises:
        ValueError: nothing in the model is sharded by FSDP2.
    """
    modules = [(name, m) for name, m in model.named_modules() if isinstance(m, FSDPModule)]
    if not modules:
        raise ValueError(f"{type(model).__name__} is not sharded: call fully_shard first")
    names = {id(m): plain_name(name) for name, m in model.named_modules()}
    return Plan([row for _, module in modules for row in _rows(module, names)])


def _rows(module: FSDPModule, names: dict[int, str]) -> list[PlanRow]:
    """The plan's lines for the groups of one FSDP2 module; `names` of modules by id."""
    rows = []
    policy = torch_internals.policy_of(module)
    for group in torch_internals.groups(module):
        for owner, name, param in torch_internals.parameters(group):
            full = ".".join(filter(None, (names.get(id(owner), ""), name)))
            binding = binding_of(owner, name)
            if binding is not None:
                rows.append(binding.row(full))
                continue
            dtype = policy.param_dtype or param.sharded_param.dtype
            rows.append(_row(full, param, group, None, "-", "not quantized", dtype))
    return rows
