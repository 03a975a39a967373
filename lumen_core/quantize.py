"""Turn low-precision training on and off: `quant.enable(model, recipe="mxfp8")`.

    import lumen_core.quantize as quant
    quant.enable(model, format="fp8_e4m3", scaling="delayed")

Modules change class in place. Parameters, their names and dtypes, hooks and `state_dict` stay those of the original
model, so optimizers, checkpoints and wrappers keep working; nothing is replaced.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from lumen_core import experts, fused
from lumen_core.amax import ScalingState
from lumen_core.config import QuantConfig
from lumen_core.controller import Controller, base_key, controllers, named_states
from lumen_core.linear import QuantLinear
from lumen_core.sharding import GATHER_ATTRIBUTE
from lumen_core.summary import Summary, summarize
from lumen_core.targets import Selection, select

__all__ = [
    "QuantConfig",
    "Summary",
    "disable",
    "enable",
    "is_enabled",
    "load_state_dict",
    "reset",
    "state_dict",
    "step_end",
    "summary",
]


def enable(
    model: torch.nn.Module,
    config: QuantConfig | str | None = None,
    *,
    recipe: str | None = None,
    amax_group: torch.distributed.ProcessGroup | None = None,
    **overrides: object,
) -> torch.nn.Module:
    """Make the selected linear layers (and expert banks) of `model` train in low precision, in place.

    Call it on the whole model, before it is compiled or sharded. Without a configuration the defaults of `QuantConfig`
    hold: FP8 E4M3, dynamic scaling.

    Args:
        model: any module; `torch.nn.Linear`s and Hugging Face expert banks in it are candidates. Output heads,
            embeddings, MoE routers and LoRA adapters stay in high precision unless `apply_modules` names them.
        config: a `QuantConfig`, or a recipe in words.
        recipe: a recipe name (`mxfp8`), a grammar string, or either followed by `,key=value`.
        amax_group: process group over which `reduce_amax` takes its maximum (default: all ranks).
        **overrides: options of `QuantConfig`, on top of `config` or `recipe`.

    Returns:
        `model` itself.

    Raises:
        TypeError: `model` is no module, an option is unknown or of the wrong type.
        ValueError: the model is enabled already, a value or combination is invalid, a pattern matches nothing, or
            nothing would be quantized. The model is untouched then.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model={model!r} has type {type(model).__name__}: it must be a torch.nn.Module")
    config = _resolve(config, recipe, overrides)
    if is_enabled(model):
        owner = "it" if controllers(model) else "the model that it is part of"
        raise ValueError(f"{type(model).__name__} is quantized already: call quant.disable on {owner} first")
    selection = select(model, config)
    _convert(selection, config)
    Controller(model, config, selection.skipped_weights(), amax_group).attach()
    return model


def enable_rest(model: torch.nn.Module, config: QuantConfig, *, may_be_empty: bool = False) -> torch.nn.Module:
    """Enable what is left in a model whose parts were enabled one by one, and let one controller own it all.

    For hosts that are given a model block by block, its root last. The parts' scaling state goes on under names
    relative to `model`.

    Args:
        model: the module that holds the parts.
        config: the recipe of all of them.
        may_be_empty: a model with neither a part nor anything to quantize is left as it is, and is no error.

    Raises:
        ValueError: a part has another recipe, or there is neither a part nor anything to quantize.
    """
    parts = controllers(model)
    for part in parts:
        if part.config != config:
            raise ValueError(
                f"recipe {config} on a model whose {type(part.model).__name__} was enabled with {part.config}"
            )
    selection = select(model, config, may_be_empty=may_be_empty or bool(parts), may_be_part=True)
    if not selection.targets and not parts:
        return model
    _convert(selection, config)
    for part in parts:
        part.detach()
    Controller(model, config, selection.skipped_weights()).attach()
    for name, state in named_states(model):
        state.rekey(base_key(name, config.seed))
    return model


def _convert(selection: Selection, config: QuantConfig) -> None:
    for target in selection.targets:
        key = base_key(target.name, config.seed)
        if target.kind == "linear":
            QuantLinear.convert_(target.module, config, key)
        else:
            experts.convert_(target.module, config, key)
    for module in selection.fused:
        fused.convert_(module)


def _resolve(config: QuantConfig | str | None, recipe: str | None, overrides: Mapping[str, object]) -> QuantConfig:
    if config is not None and recipe is not None:
        raise ValueError(f"config={config} and recipe={recipe!r} exclude each other: give one of them")
    if isinstance(config, str):
        config, recipe = None, config
    if config is not None and not isinstance(config, QuantConfig):
        raise TypeError(f"config={config!r} has type {type(config).__name__}: it must be a QuantConfig or a recipe")
    if recipe is not None:
        if not isinstance(recipe, str):
            raise TypeError(f"recipe={recipe!r} has type {type(recipe).__name__}: it must be a string")
        return QuantConfig.from_recipe(recipe, **overrides)
    if config is None:
        return QuantConfig(**overrides)
    return config.replace(**overrides) if overrides else config


def disable(model: torch.nn.Module) -> torch.nn.Module:
    """Restore every module that `enable` changed; parameters keep their present values.

    Raises:
        ValueError: the model is not enabled, or one of its quantized layers was wrapped individually since.
    """
    if not is_enabled(model):
        raise ValueError(f"{type(model).__name__} is not quantized: there is nothing to disable")
    kinds = (QuantLinear, experts.QuantExperts, fused.Fused)
    converted = [(name, m) for name, m in model.named_modules() if isinstance(m, kinds)]
    for name, module in converted:
        own = type(module) is QuantLinear or {"_bank_class", "_plain_class"} & set(vars(type(module)))
        if not own:
            raise ValueError(
                f"{name}: its class became {type(module).__name__} after enable; disable before sharding it"
            )
        if GATHER_ATTRIBUTE in module.__dict__:
            raise ValueError(f"{name}: its weight is gathered in low precision; disable before sharding it")
    for _, module in converted:
        module.restore_()
    for controller in controllers(model):
        controller.detach()
    return model


def is_enabled(model: torch.nn.Module) -> bool:
    """True where `model` or a module in it is quantized."""
    return any(isinstance(m, (QuantLinear, experts.QuantExperts)) for m in model.modules())


def summary(model: torch.nn.Module) -> Summary:
    """What is quantized and how: module, shape, recipe, precision and kernel of each GEMM; what is not, and why.

    Raises:
        ValueError: the model is not enabled.
    """
    return summarize(model, _the_controllers(model))


def _the_controllers(model: torch.nn.Module) -> list[Controller]:
    found = controllers(model)
    if not found and is_enabled(model):
        raise ValueError(
            f"{type(model).__name__} is part of a quantized model: ask for the module given to quant.enable"
        )
    if not found:
        raise ValueError(f"{type(model).__name__} is not quantized: call quant.enable first")
    return found


# --- scaling state ----------------------------------------------------------------------------------------------------


def state_dict(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Scaling state to save beside the model: amax histories and rounding counters.

    Empty for recipes that carry nothing from step to step. It is separate because `model.state_dict()` must keep
    exactly the original keys. Tensors are copies. With `reduce_amax` they are the same on every rank; without, each
    rank has its own history, and a checkpoint that keeps that of one loads at any world size.

    Returns:
        `{"<module name>.<tensor>": tensor}`.
    """
    return {name: tensor.detach().clone() for name, tensor in _state_tensors(model).items()}


def load_state_dict(model: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Restore what `state_dict` gave.

    A history of another length keeps its newest entries.

    Raises:
        ValueError: names are missing or left over, with the first of each.
    """
    own = _state_tensors(model)
    missing, extra = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    if missing or extra:
        raise ValueError(
            f"scaling state does not fit the model: {len(missing)} missing (first: {missing[:1]}), "
            f"{len(extra)} unexpected (first: {extra[:1]})"
        )
    with torch.no_grad():
        for module, scaling, config in _scaling_states(model):
            saved = {name: state.get(_key(module, name)) for name in ("history", "current", "counter")}
            if saved["history"] is not None:
                scaling.set_history(saved["history"], saved["current"], config.amax_algo)
            if saved["counter"] is not None:
                scaling.set_count(saved["counter"].to(scaling.device))


def _state_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    out = {}
    for module, state, config in _scaling_states(model):
        names = ("history", "current") if config.scaling == "delayed" else ()
        names += ("counter",) if config.stochastic_rounding else ()
        out.update({_key(module, name): getattr(state, name) for name in names})
    return out


def _scaling_states(model: torch.nn.Module) -> Iterator[tuple[str, ScalingState, QuantConfig]]:
    """`(name, state, recipe)` of every quantized module.

    Names are relative to the module that was enabled, whatever wraps it now; to `model` where several parts of it were
    enabled on their own.
    """
    found = _the_controllers(model)
    for controller in found:
        inside = {id(state) for _, state in controller.states()}
        for name, state in controller.states() if len(found) == 1 else named_states(model):
            if id(state) in inside:
                yield name, state, controller.config


def _key(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name


def step_end(model: torch.nn.Module) -> None:
    """Close a training step of delayed scaling; for hosts whose optimizer is no `torch.optim.Optimizer`.

    With a torch optimizer this happens by itself after `optimizer.step()`. With `reduce_amax` it is a collective: every
    rank of the group must call it.
    """
    for controller in controllers(model):
        controller.end_step()


def reset(model: torch.nn.Module) -> None:
    """Forget all amax history: the next step scales by current values, as the first step of a run does."""
    for _, state in named_states(model):
        state.reset()
