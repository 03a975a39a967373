"""Which modules of a model `enable` converts, and why it leaves the others."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field

import torch

from lumen_core.config import QuantConfig
from lumen_core.experts import QuantExperts, is_expert_bank, unsupported_bank
from lumen_core.fused import fused_kind
from lumen_core.linear import QuantLinear
from lumen_core.names import plain_name
from lumen_core.selection import glob_match, module_selected


@dataclass(frozen=True)
class Target:
    """A module to convert: full dotted name (empty for the model itself) and `linear` or `experts`."""

    name: str
    module: torch.nn.Module
    kind: str


@dataclass
class Selection:
    """Modules to convert, and `(name, module, reason)` of each linear layer or expert bank that stays as it is.

    `fused` holds the norms and MLPs that are to run by our operations.
    """

    targets: list[Target] = field(default_factory=list)
    fused: list[torch.nn.Module] = field(default_factory=list)
    skipped: list[tuple[str, torch.nn.Module, str]] = field(default_factory=list)

    def skipped_weights(self) -> list[tuple[str, tuple[int, ...], str]]:
        """`(name, shape, reason)` of every weight that stays, without holding on to its module."""
        out = []
        for name, module, reason in self.skipped:
            projections = ("gate_up_proj", "down_proj") if is_expert_bank(module) else ("weight",)
            out += [
                (name if p == "weight" else f"{name}.{p}", tuple(getattr(module, p).shape), reason) for p in projections
            ]
        return out


def select(
    model: torch.nn.Module, config: QuantConfig, *, may_be_empty: bool = False, may_be_part: bool = False
) -> Selection:
    """Apply a configuration's patterns, converters and first/last-layer rule to `model`.

    Args:
        may_be_empty: selecting nothing is no error, as where parts of the model are quantized already.
        may_be_part: `model` may be a block of a model, whose patterns then hold names that it does not know.

    Raises:
        ValueError: a pattern matches nothing, nothing at all is selected, or the layer rule finds no stack of layers.
    """
    names = [plain_name(name) for name, _ in model.named_modules()]
    hint = _relative_to(model) if may_be_part else ""
    for pattern in config.ignored_modules:
        _require_match("ignored_modules", pattern, names, hint)
    kept_layers = _kept_layers(model, config)
    encoder_layers = {
        plain_name(n) for n, m in model.named_modules() if isinstance(m, torch.nn.TransformerEncoderLayer)
    }
    selection = Selection()
    for name, module in model.named_modules():
        name = plain_name(name)
        if fused_kind(module) in config.converters and not any(glob_match(name, p) for p in config.ignored_modules):
            selection.fused.append(module)
        kind = _kind(module)
        if kind is None:
            if isinstance(module, torch.nn.Linear) and not isinstance(module, QuantLinear):
                reason = f"{type(module).__name__} is a subclass of Linear, whose weight may be used in other ways"
                selection.skipped.append((name, module, reason))
            continue
        if name.rpartition(".")[0] in encoder_layers:
            reason = "torch's fused inference path of TransformerEncoderLayer reads this weight itself"
            selection.skipped.append((name, module, reason))
            continue
        reason = _why_not(name, module, kind, config, kept_layers)
        if reason is None:
            selection.targets.append(Target(name, module, kind))
        else:
            selection.skipped.append((name, module, reason))
    convertible = [t.name for t in selection.targets] + [name for name, _, _ in selection.skipped]
    if convertible:
        # Parts may have been converted before, as this pattern said.
        convertible += [plain_name(n) for n, m in model.named_modules() if isinstance(m, (QuantLinear, QuantExperts))]
        for pattern in config.apply_modules:
            _require_match("apply_modules", pattern, convertible, hint)
    if not selection.targets and not may_be_empty:
        raise ValueError(_nothing_selected(model, selection))
    return selection


def _kind(module: torch.nn.Module) -> str | None:
    # Exactly nn.Linear: a subclass may use its weight in ways that its forward does not show (attention's out_proj).
    if type(module) is torch.nn.Linear:
        return "linear"
    return "experts" if is_expert_bank(module) and not isinstance(module, QuantExperts) else None


def _why_not(
    name: str, module: torch.nn.Module, kind: str, config: QuantConfig, kept_layers: tuple[str, ...]
) -> str | None:
    converter = "quantize.linear" if kind == "linear" else "quantize.moe"
    if not {converter, f"{converter}.mx"} & set(config.converters):
        return f"converters has no {converter!r}"
    if kind == "experts" and (reason := unsupported_bank(module)):
        return reason
    selected, reason = module_selected(name, config.apply_modules, config.ignored_modules)
    if not selected:
        return reason
    if any(name == layer or name.startswith(layer + ".") for layer in kept_layers):
        return "first_layers_bf16/last_layers_bf16"
    return None


def _kept_layers(model: torch.nn.Module, config: QuantConfig) -> tuple[str, ...]:
    """Names of the layers that stay in bf16 at both ends of each stack."""
    first, last = config.first_layers_bf16, config.last_layers_bf16
    if not first and not last:
        return ()
    stacks = _layer_stacks(model)
    if not stacks:
        raise ValueError(
            f"first_layers_bf16={first}, last_layers_bf16={last}: {type(model).__name__} holds no stack of layers, so "
            "first and last are unknown here; call quant.enable(root) on the whole model first"
        )
    kept = []
    for prefix, layers in stacks:
        if first + last >= len(layers):
            raise ValueError(
                f"first_layers_bf16={first} and last_layers_bf16={last} leave none of the {len(layers)} layers of "
                f"{prefix or type(model).__name__!r} to quantize"
            )
        kept += layers[:first] + layers[len(layers) - last :]
    return tuple(kept)


def _layer_stacks(model: torch.nn.Module) -> list[tuple[str, list[str]]]:
    """Outermost lists of layers: `(name, full names of its layers)`.

    A `ModuleList` whose every child holds linear weights is one, and so are the children with weights of an
    `nn.Sequential`: activations between or after the layers do not count.
    """
    found: list[tuple[str, list[str], bool]] = []
    for name, module in model.named_modules():
        if not isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential)):
            continue
        name = plain_name(name)
        layers = {child: type(m) for child, m in module.named_children() if any(_kind(sub) for sub in m.modules())}
        complete = len(layers) == len(module) or isinstance(module, torch.nn.Sequential)
        if complete and len(layers) > isinstance(module, torch.nn.Sequential):
            full = [f"{name}.{child}" if name else child for child in layers]
            found.append((name, full, len(set(layers.values())) == 1))
    # nn.Sequential(embedding, blocks, head) is no stack where it holds one: layers are of one class.
    if any(uniform for _, _, uniform in found):
        found = [entry for entry in found if entry[2]]
    stacks: list[tuple[str, list[str]]] = []
    for name, layers, _ in found:
        if not any(not outer or name.startswith(outer + ".") for outer, _ in stacks):
            stacks.append((name, layers))
    return stacks


def _relative_to(model: torch.nn.Module) -> str:
    return (
        f"; names are relative to the module given to fully_shard, here {type(model).__name__}: for those of the whole "
        "model call quant.enable(root) on it first"
    )


def _require_match(option: str, pattern: str, names: list[str], more: str) -> None:
    if any(glob_match(name, pattern) for name in names):
        return
    near = difflib.get_close_matches(pattern.strip("*."), names, 1, 0.4)
    hint = f" (nearest: {near[0]!r})" if near else ""
    raise ValueError(f"{option}: pattern {pattern!r} matches no module of the model{hint}{more}")


def _nothing_selected(model: torch.nn.Module, selection: Selection) -> str:
    if not selection.skipped:
        return (
            f"nothing to quantize: {type(model).__name__} holds no torch.nn.Linear and no expert bank "
            "(enable the model before it is replaced or wrapped)"
        )
    reasons = "; ".join(f"{name or '(the model)'}: {reason}" for name, _, reason in selection.skipped[:5])
    more = len(selection.skipped) - 5
    return f"nothing to quantize: {reasons}{f'; and {more} more' if more > 0 else ''}"
