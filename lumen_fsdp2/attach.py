"""Binding FSDP2's groups to a plan, and the plan of a whole model.

When FSDP2 puts a sharded parameter on a quantized module, the parameter gets its gather hooks (`binding.notice`);
nothing is known of the policy yet. Then each FSDP2 group whose policy is a `LumenPolicy` is bound: by
`lumen_fsdp2.fully_shard` at once, with torch's own at the first forward pass or by `plan`, before anything is gathered.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from lumen_core.controller import controller_over, controllers, live_controllers
from lumen_core.experts import QuantExperts
from lumen_core.linear import QuantLinear
from lumen_core.names import plain_name
from lumen_fsdp2 import torch_internals
from lumen_fsdp2.amax import AmaxKeeper, keeper_of
from lumen_fsdp2.binding import BINDINGS, Binding, binding_of, plan_row
from lumen_fsdp2.comm import LumenAllGather, LumenReduceScatter
from lumen_fsdp2.on_demand import OnDemand
from lumen_fsdp2.plan import ON_DEMAND, ROW, Plan, PlanRow
from lumen_fsdp2.policy import LumenPolicy

_BOUND = "_lumen_bound"  # of a sharded module: the policy that it was bound with
LEFT = "_lumen_left"  # of a linear that `fully_shard` was given itself, and did not quantize
_PRINTED = "_lumen_plan_printed"  # of a model that ran
_HOOKED = "_lumen_begins"  # of a root that tells when its passes begin
_QUANTIZED = (QuantLinear, QuantExperts)
_passes: weakref.WeakKeyDictionary[Any, AmaxKeeper] = weakref.WeakKeyDictionary()  # by FSDP2's state of a root


def fewer_ranks(value: object) -> ValueError:
    """The error of `reshard_after_forward=value`, a number."""
    return ValueError(
        f"reshard_after_forward={value} keeps a copy sharded over fewer ranks, which FSDP2 cannot do with quantized "
        "weights: use True or False"
    )


def bind(module: FSDPModule, policy: LumenPolicy, keeper: AmaxKeeper) -> int:
    """Bind the groups of one FSDP2 module, and of those sharded together with it.

    Returns:
        How many of their parameters belong to quantized modules.
    """
    found = 0
    for group in torch_internals.groups(module):
        if torch_internals.reshards_to_smaller_world(group):
            raise fewer_ranks("<int>")
        on_demand = OnDemand(group)
        for owner, name, param in torch_internals.parameters(group):
            if not isinstance(owner, _QUANTIZED) or len(torch_internals.local_shape(param)) not in (2, 3):
                continue
            _check_recipe(owner, policy)
            binding = Binding(owner, name, param, module, group, policy)
            bindings = owner.__dict__.setdefault(BINDINGS, {})
            if name in bindings:
                bindings[name].release()
            bindings[name] = binding
            found += 1
            if binding.mode == ON_DEMAND:
                binding.on_demand = on_demand
                on_demand.bindings.append(binding)
            if binding.mode == ON_DEMAND or _dgrad_from_rows(binding, policy):
                _from_rows(owner)
            if binding.wire is not None and binding.wire.per_tensor and len(binding.shape) == 2:
                binding.keeper = keeper
                keeper.bindings.append(binding)
        _attach_collectives(module, policy)
    for each in torch_internals.sharded_with(module):
        each.__dict__[_BOUND] = policy
    for root in [root for root in _passes if _holds(root, module)]:
        del _passes[root]  # to be introduced again
    return found


def _holds(root: Any, module: torch.nn.Module) -> bool:
    return any(m is module for top in torch_internals.modules_of(root) for m in top.modules())


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


def _attach_collectives(module: FSDPModule, policy: LumenPolicy) -> None:
    module.set_custom_all_gather(LumenAllGather(policy.collectives, shares=_Shares(module)))
    module.set_custom_reduce_scatter(LumenReduceScatter(policy.collectives, policy.low_precision_reduce_scatter))


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


def at_forward(policy: LumenPolicy, state: Any) -> None:
    """A module sharded with `policy` is about to run forward; `state` is FSDP2's of it.

    The first time in each model: bind what torch's own `fully_shard` left, and print the plan. Every time that this
    begins a forward pass: the amax of the weights below is to be taken again.

    Raises:
        RuntimeError: the policy would change nothing in the model that runs.
    """
    if torch_internals.in_backward():
        return  # recomputation
    root = torch_internals.root_of_pass(state)
    if root not in _passes:
        _introduce(policy, root)
    if root is state:
        _begin(root)


def _introduce(policy: LumenPolicy, root: Any) -> None:
    """Bind what is not yet in the model that runs for the first time."""
    (module,) = torch_internals.modules_of(root)
    bind_inside(module)
    inside = list(module.modules())
    if not any(isinstance(m, _QUANTIZED) for m in inside) and controller_over(module) is None:
        _check_effect(policy, inside)
    for name, each in module.named_modules():
        for parameter, binding in each.__dict__.get(BINDINGS, {}).items():
            if binding.info is not None:
                binding.info.name = ".".join(filter(None, (plain_name(name), parameter)))  # for messages
    _passes[root] = _one_keeper([b for m in inside for b in m.__dict__.get(BINDINGS, {}).values()])
    _passes[root].begin_pass()
    if not isinstance(torch_internals.policy_of(module), LumenPolicy) and _HOOKED not in module.__dict__:
        module.__dict__[_HOOKED] = True
        # Its policy says nothing of its passes. Not traced: FSDP2's own hooks are not, either.
        module.register_forward_pre_hook(torch.compiler.disable(_Begins(root)), prepend=True)
    if policy.print_plan:
        _print_plan(module)


def _check_effect(policy: LumenPolicy, modules: list[torch.nn.Module]) -> None:
    """Raise where a policy was meant to quantize some of `modules`, none of which is; norms may have one, too."""
    if not any(_BOUND in m.__dict__ for m in modules):
        raise RuntimeError(
            "LumenPolicy has no effect here: no module sharded with it was quantized. Call quant.enable(model, ...) "
            "before torch's fully_shard, or use lumen_fsdp2.fully_shard, which does"
        )
    # A head that runs by itself, beside the model that holds its policy's quantized layers, is left on purpose.
    if any(LEFT in m.__dict__ for m in modules) and not any(
        isinstance(m, FSDPModule) and torch_internals.policy_of(m) == policy
        for controller in live_controllers()
        for m in controller.model.modules()
    ):
        raise RuntimeError(
            "LumenPolicy has no effect here: a torch.nn.Linear that fully_shard is given itself is not quantized, as "
            "its name is unknown. Call quant.enable(model, ...) on the whole model before fully_shard"
        )


def _print_plan(root: torch.nn.Module) -> None:
    """Print the plan of the model that runs, once, on rank 0; where `root` is a part of an enabled model, of that."""
    over = controller_over(root)
    model = root if over is None else over.model
    if _PRINTED not in model.__dict__ and (over is not None or controllers(model)):
        model.__dict__[_PRINTED] = True
        if torch.distributed.get_rank() == 0:
            print(plan(model), flush=True)


class _Begins:
    """Hook of a root with a policy that is not ours."""

    def __init__(self, root: Any) -> None:
        self._root = weakref.ref(root)

    def __call__(self, module: torch.nn.Module, args: tuple) -> None:
        if not torch_internals.in_backward():
            _begin(self._root())


def _begin(root: Any) -> None:
    if root in _passes:
        _passes[root].begin_pass()


def _one_keeper(bindings: list[Binding]) -> AmaxKeeper:
    """One keeper for what runs in one pass, where blocks were enabled one by one."""
    keepers = list({id(b.keeper): b.keeper for b in bindings if b.keeper is not None}.values())
    one = keepers[0] if keepers else AmaxKeeper()
    for other in keepers[1:]:
        one.take(other)
        for root in [root for root, keeper in _passes.items() if keeper is other]:
            _passes[root] = one
    return one


def bind_inside(model: torch.nn.Module) -> None:
    """Bind what is sharded with a `LumenPolicy` in `model`, or in the enabled model that it is part of.

    Only where `quant.enable` was called; nothing else is touched, and nothing is sent.
    """
    over = controller_over(model)
    for controller in controllers(model) if over is None else [over]:
        for module in controller.model.modules():
            if isinstance(module, FSDPModule):
                policy = torch_internals.policy_of(module)
                if isinstance(policy, LumenPolicy) and module.__dict__.get(_BOUND) is not policy:
                    bind(module, policy, keeper_of(controller))


def plan(model: torch.nn.Module) -> Plan:
    """What each parameter of a sharded model sends, and why; the same on every rank.

    Raises:
        ValueError: nothing in the model is sharded by FSDP2.
    """
    modules = [m for m in model.modules() if isinstance(m, FSDPModule)]
    if not modules:
        raise ValueError(f"{type(model).__name__} is not sharded: call fully_shard first")
    bind_inside(model)  # with torch's own fully_shard nothing is bound before the first pass
    names = {id(m): plain_name(name) for name, m in model.named_modules()}
    inner = {id(m) for module in modules for m in module.modules() if m is not module}
    first: dict[int, FSDPModule] = {}  # of those that were sharded together and share their groups
    for module in modules:
        first.setdefault(id(torch_internals.sharded_with(module)[0]), module)
    return Plan([row for module in first.values() for row in _rows(module, names, root=id(module) not in inner)])


def _rows(module: FSDPModule, names: dict[int, str], *, root: bool = False) -> list[PlanRow]:
    """The plan's lines for the groups of one FSDP2 module; `names` of modules by id."""
    rows = []
    policy = torch_internals.policy_of(module)
    keeps = root and torch_internals.will_keep_weights_as_root(module)
    for group in torch_internals.groups(module):
        gathers = 1 if keeps or not torch_internals.reshards_after_forward(group) else 2
        for owner, name, param in torch_internals.parameters(group):
            full = ".".join(filter(None, (names.get(id(owner), ""), name)))
            binding = binding_of(owner, name)
            if binding is not None:
                rows.append(binding.row(full, gathers))
                continue
            dtype = policy.param_dtype or param.sharded_param.dtype
            alone = LEFT in owner.__dict__
            reason = "not quantized: sharded by itself before quant.enable" if alone else "not quantized"
            rows.append(plan_row(full, param, gathers, None, "-", reason, dtype))
    return rows
