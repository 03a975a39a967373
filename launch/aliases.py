"""MindSpeed's option names, translated to this package's with a line that says the new name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from launch.config import ConfigError
from launch.schema import FALSE, TRUE, Key, convert, keys, nearest

ALIASES = {
    "quant_recipe_name": "quant",
    "quant_format": "quant.format",
    "quant_block_size": "quant.activation_block",
    "quant_converters": "quant.converters",
    "quant_apply_modules": "quant.apply_modules",
    "quant_ignored_modules": "quant.ignored_modules",
    "enable_fsdp_low_precision_all_gather": "backend.low_precision_all_gather",
    "fsdp_low_precision_all_gather_mode": "backend.all_gather_mode",
    "efsdp_shard_placement_fn": "backend.shard_placement",
}
"""Old name -> the key that does the same here."""


def leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _patterns(value: Any) -> list[str]:
    """MindSpeed writes ``model.layers.{*}`` for what a glob writes as ``model.layers.*``."""
    items = [str(v).replace("{*}", "*") for v in (value if isinstance(value, (list, tuple)) else [value])]
    for item in items:
        if "{" in item:
            raise ConfigError(f"{item!r}: braces other than {{*}} are not understood; list the globs one by one")
    return items


def translate(plain: dict[str, Any], recipe_file: Callable[[str], Mapping[str, Any]]) -> list[str]:
    """Replace old names anywhere in ``plain``, in place; returns one line per name.

    ``recipe_file`` gives the contents of the quant group's file for a recipe name (``{"recipe": name}`` without one).
    """
    found: dict[str, Any] = {}
    for holder in [plain, *[v for v in plain.values() if isinstance(v, dict)]]:
        for name in [n for n in holder if n in ALIASES]:
            found[name] = holder.pop(name)
    notes = _backend({n: found.pop(n) for n in list(found) if ALIASES[n].startswith("backend.")}, plain)
    if not found:
        return notes
    quant = plain.get("quant")
    quant = plain["quant"] = dict(quant) if isinstance(quant, Mapping) else {"recipe": quant} if quant else {}

    def put(old: str, new: Mapping[str, Any]) -> None:
        for name, value in new.items():
            if name != "recipe" and quant.get(name, value) != value:
                raise ConfigError(f"{old} and quant.{name} are both given and differ; give quant.{name} only")
        quant.update(new)
        said = " ".join(f"quant.{k}={_text(v)}" for k, v in new.items())
        notes.append(f"{old} is {ALIASES[old]} here: {said}")

    if "quant_recipe_name" in found:
        name = str(found.pop("quant_recipe_name"))
        quant.update(recipe_file(name))
        notes.append(f"quant_recipe_name is quant here: quant={name}")
    for old, value in found.items():
        if old == "quant_format":
            put(old, _format(value))
        elif old == "quant_block_size":
            notes.append(_block(value, quant, put))
        elif old == "quant_converters":
            put(old, {"converters": list(value) if isinstance(value, (list, tuple)) else [value]})
        else:
            put(old, {ALIASES[old].partition(".")[2]: _patterns(value)})
    return [n for n in notes if n]


def _backend(found: Mapping[str, Any], plain: dict[str, Any]) -> list[str]:
    """Replace the old names of the backend group's keys; values are checked where the new keys' are."""
    if not found:
        return []
    known, train = keys(), plain.get("train") or {}
    section = plain["backend"] = dict(plain.get("backend") or {})
    notes: list[str] = []
    for old, value in found.items():
        key = known[ALIASES[old]]
        name, extra = key.name.partition(".")[2], ""
        value = _checked(old, key, value)
        if name == "all_gather_mode":
            enabled = found.get("enable_fsdp_low_precision_all_gather", section.get("low_precision_all_gather", True))
            if str(enabled).lower() in FALSE:  # there it has a default that is written out beside the switch
                notes.append(f"{old} is {key.name} here: left out, as nothing quantized is gathered")
                continue
            if value == "on-demand" and str(train.get("activation_checkpointing", False)).lower() in TRUE:
                value, extra = "all", " (on-demand is not right where activations are recomputed)"
        if section.get(name, key.default) not in (key.default, value):
            raise ConfigError(f"{old} and {key.name} are both given and differ; give {key.name} only")
        section[name] = value
        notes.append(f"{old} is {key.name} here: {key.name}={_text(value)}{extra}")
    return notes


def _checked(old: str, key: Key, value: Any) -> Any:
    try:
        return convert(key, value)
    except ConfigError as error:
        raise ConfigError(f"{old}: {error}") from None


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{','.join(map(str, value))}]" if isinstance(value, (list, tuple)) else str(value)


def _format(value: Any) -> dict[str, Any]:
    from lumen_core.config import option_table

    text = str(value).lower()
    if text in ("e4m3", "e5m2"):
        return {f"{role}_format": text for role in ("activation", "weight", "gradient")}
    choices = next(o.choices for o in option_table() if o.name == "format")
    if text in choices:
        return {"format": text}
    valid = ["e4m3", "e5m2", *choices]
    reason = "HiF8 exists on Ascend only; " if text == "hif8" else ""
    raise ConfigError(
        f"quant_format={value}: {reason}expected one of {', '.join(valid)}; did you mean {nearest(text, valid)}?"
    )


def _block(value: Any, quant: Mapping[str, Any], put: Callable[[str, Mapping[str, Any]], None]) -> str:
    from lumen_core.config import QuantConfig

    recipe = str(quant.get("recipe", "mxfp8"))
    try:
        size = int(str(value))
    except ValueError:
        raise ConfigError(f"quant_block_size={value}: expected an integer > 0") from None
    config = QuantConfig.from_recipe(recipe)
    if config.is_mx:
        if size != 32:
            raise ConfigError(f"quant_block_size={value}: expected 32, the only block of recipe {recipe}")
        return f"quant_block_size is fixed here: recipe {recipe} has blocks of 32"
    if config.scaling != "blockwise":
        raise ConfigError(f"quant_block_size={value}: recipe {recipe} has no blocks; did you mean quant=blockwise?")
    put("quant_block_size", {"activation_block": [1, size], "weight_block": [size, size], "gradient_block": [1, size]})
    return ""
