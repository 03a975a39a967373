"""From untyped values to `launch.config.TrainConfig`: names, types and ranges, with messages a user can act on.

YAML and shells both lose types (``1e-4`` is a string to PyYAML, ``1e3`` a float to Hydra, ``$STEPS`` always a string),
so every value is brought to the type its field declares, or refused; none reaches the trainer as anything else.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Any

from launch.config import ConfigError, QuantSection, TrainConfig

TRUE = ("true", "yes", "on", "1")
FALSE = ("false", "no", "off", "0")
MISSING = "???"  # OmegaConf's mark for a value that the user has to give


@dataclass(frozen=True)
class Key:
    """One configurable value: its dotted name, type, whether null is allowed, default, documentation and range."""

    name: str
    type: Any
    optional: bool
    default: Any
    help: str
    limits: Mapping[str, Any]

    @property
    def choices(self) -> tuple:
        return tuple(self.limits.get("choices") or ())

    def expected(self) -> str:
        """What a valid value looks like, e.g. ``an integer >= 1``."""
        if self.choices:
            words = [str(c) for c in self.choices]
            text = "one of " + ", ".join(words) if len(words) > 1 else words[0]
        elif typing.get_origin(self.type) is tuple:
            count, what = len(typing.get_args(self.type)), {int: "integers", float: "numbers", str: "strings"}
            element = typing.get_args(self.type)[0]
            several = "" if typing.get_args(self.type)[-1] is Ellipsis else f"{count} "
            text = f"a list of {several}{what.get(element, 'values')}{self._range()}"
        else:
            nouns = {bool: "true or false", int: "an integer", float: "a number", str: "a non-empty string"}
            text = nouns.get(self.type, "a value") + self._range()
        return text + (", or null" if self.optional else "")

    def _range(self) -> str:
        signs = {"low": ">=", "above": ">", "high": "<=", "below": "<"}
        found = {sign: self.limits[k] for k, sign in signs.items() if self.limits.get(k) is not None}
        parts = [f"{sign} {v:g}" if isinstance(v, float) else f"{sign} {v}" for sign, v in found.items()]
        return " " + " and ".join(parts) if parts else ""


def _split_optional(hint: Any) -> tuple[Any, bool]:
    if typing.get_origin(hint) in (typing.Union, UnionType):
        rest = [a for a in typing.get_args(hint) if a is not type(None)]
        return rest[0], len(rest) < len(typing.get_args(hint))
    return hint, False


def _default(field: dataclasses.Field) -> Any:
    return field.default_factory() if field.default is dataclasses.MISSING else field.default


def _fields(cls: type, prefix: str) -> Iterable[tuple[str, Any, dataclasses.Field]]:
    hints = typing.get_type_hints(cls)
    for f in dataclasses.fields(cls):
        yield f"{prefix}{f.name}", hints[f.name], f


def quant_keys() -> list[Key]:
    """The keys of the quant group, generated from `lumen_core.config`; null means "as the recipe has it"."""
    from lumen_core.config import option_table

    found = [
        Key("quant.enabled", bool, False, True, "false trains the model unquantized", {}),
        Key("quant.recipe", str, False, "mxfp8", "recipe name or grammar string", {}),
    ]
    for o in option_table():
        limits = {"choices": o.choices, "low": o.minimum, "high": o.maximum}
        found.append(Key(f"quant.{o.name}", o.type, True, o.default_text, o.help, limits))
    return found


def keys(cls: type = TrainConfig, prefix: str = "") -> dict[str, Key]:
    """Every configurable key below ``cls``, by dotted name."""
    found: dict[str, Key] = {}
    for name, hint, f in _fields(cls, prefix):
        if hint is QuantSection:
            found.update({k.name: k for k in quant_keys()})
        elif dataclasses.is_dataclass(hint):
            found.update(keys(hint, f"{name}."))
        else:
            base, optional = _split_optional(hint)
            found[name] = Key(name, base, optional, _default(f), f.metadata.get("help", ""), f.metadata)
    return found


def nearest(word: str, names: Iterable[str]) -> str:
    """The name most like ``word``; a dotted name also competes with its last part alone (``lr`` finds ``optim.lr``)."""
    word = word.lower()
    leaf = word.rpartition(".")[2]

    def likeness(name: str) -> tuple[float, int]:
        low = name.lower()
        whole = difflib.SequenceMatcher(None, word, low).ratio()
        last = difflib.SequenceMatcher(None, leaf, low.rpartition(".")[2]).ratio()
        return whole + 2 * last, -sum(abs(ord(a) - ord(b)) for a, b in zip(word, low))

    return max(names, key=likeness, default="")


def unknown_key(name: str, value: str, known: Mapping[str, Key]) -> str:
    """The message for a key that does not exist."""
    best = nearest(name, known)
    return f"{name}={value}: there is no key {name!r}; nearest: {best} ({known[best].expected()})"


def _number(value: Any) -> Any:
    """``value`` as int or float where it is one or spells one, else None. Never for a bool."""
    if isinstance(value, str):
        text = value.strip().replace("_", "")
        for kind in (int, float):
            try:
                return kind(text)
            except ValueError:
                continue
        return None
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _scalar(value: Any, kind: type) -> Any:
    """``value`` as ``kind``; None when it is not one."""
    if kind is bool:
        if isinstance(value, bool):
            return value
        text = str(value).strip().lower()
        return True if text in TRUE else False if text in FALSE else None
    if kind in (int, float):
        number = _number(value)
        if number is None or not math.isfinite(number) or (kind is int and number != int(number)):
            return None
        return kind(number)
    if kind is str:
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        return value if isinstance(value, str) and value.strip() else None
    return value


def _in_range(value: Any, limits: Mapping[str, Any]) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return True
    low, high, above, below = (limits.get(k) for k in ("low", "high", "above", "below"))
    return not (
        (low is not None and value < low)
        or (high is not None and value > high)
        or (above is not None and value <= above)
        or (below is not None and value >= below)
    )


def convert(key: Key, value: Any, shown: str | None = None) -> Any:
    """``value`` in the type and range of ``key``.

    ``shown`` is the value as the user typed it. Raises `ConfigError` naming key, value and expected type.
    """
    shown = _show(value) if shown is None else shown
    if isinstance(value, str) and value.strip() == MISSING:
        raise ConfigError(f"{key.name} has to be given: {key.help}")
    if value is None or (value == "auto" and key.name.startswith("quant.") and "auto" not in key.choices):
        if key.optional:
            return None
        raise ConfigError(f"{key.name}={shown}: expected {key.expected()}")
    if typing.get_origin(key.type) is tuple:
        result = _tuple(key, value)
    else:
        if key.choices and isinstance(value, (bool, str)):
            value = str(value).lower()
        result = _scalar(value, key.type)
    items = result if isinstance(result, tuple) else (result,)
    bad = result is None or any(i is None or not _in_range(i, key.limits) for i in items)
    if bad or (key.choices and any(i not in key.choices for i in items)):
        hint = ""
        words = key.choices or (("true", "false") if key.type is bool else ())
        if isinstance(value, str) and words:
            hint = f"; did you mean {nearest(value, [str(w) for w in words])}?"
        raise ConfigError(f"{key.name}={shown}: expected {key.expected()}{hint}")
    return result


def _tuple(key: Key, value: Any) -> tuple | None:
    kinds = typing.get_args(key.type)
    if isinstance(value, str):
        # One name stands for a list of one, 1x128 for [1,128].
        value = [value] if kinds[0] is str else value.lower().split("x")
    if not isinstance(value, (list, tuple)):
        return None
    if kinds[-1] is Ellipsis:
        kinds = (kinds[0],) * len(value)
    if len(kinds) != len(value):
        return None
    return tuple(_scalar(v, k) for v, k in zip(value, kinds))


def _show(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return repr(value) if isinstance(value, str) else str(value)


def from_plain(plain: Mapping[str, Any], shown: Mapping[str, str] | None = None) -> TrainConfig:
    """`TrainConfig` from nested dicts of untyped values.

    ``shown`` maps dotted keys to what the user typed, for the messages. Raises `ConfigError` with every problem found.
    """
    problems: list[str] = []
    cfg = _section(TrainConfig, plain, "", keys(), dict(shown or {}), problems)
    if problems:
        raise ConfigError(*problems)
    return cfg


def _section(
    cls: type, plain: Any, prefix: str, known: Mapping[str, Key], shown: Mapping[str, str], problems: list[str]
) -> Any:
    if not isinstance(plain, Mapping):
        problems.append(f"{prefix[:-1]}={_show(plain)}: expected a section of keys, such as {prefix}…")
        return cls()
    names = {name[len(prefix) :]: (hint, f) for name, hint, f in _fields(cls, prefix)}
    values: dict[str, Any] = {}
    for name, value in plain.items():
        dotted = f"{prefix}{name}"
        text = shown.get(dotted, _show(value))
        if name not in names:
            problems.append(unknown_key(dotted, text, known))
            continue
        hint = names[name][0]
        try:
            if hint is QuantSection:
                values[name] = _quant(value, known, shown, problems)
            elif dataclasses.is_dataclass(hint):
                if value is not None:  # a section set to null is a section left at its defaults
                    values[name] = _section(hint, value, f"{dotted}.", known, shown, problems)
            else:
                values[name] = convert(known[dotted], value, text)
        except ConfigError as error:
            problems.extend(error.problems)
    return cls(**values)


def _quant(plain: Any, known: Mapping[str, Key], shown: Mapping[str, str], problems: list[str]) -> QuantSection:
    if isinstance(plain, str):  # "quant: mxfp8" in a file
        plain = {"recipe": plain}
    if not isinstance(plain, Mapping):
        problems.append(f"quant={_show(plain)}: expected a recipe name or a section of keys, such as quant.recipe")
        return QuantSection()
    section = QuantSection()
    for name, value in plain.items():
        dotted = f"quant.{name}"
        text = shown.get(dotted, _show(value))
        try:
            if dotted not in known:
                raise ConfigError(unknown_key(dotted, text, known))
            converted = convert(known[dotted], value, text)
        except ConfigError as error:
            problems.extend(error.problems)
            continue
        if name in ("enabled", "recipe"):
            setattr(section, name, converted)
        elif converted is not None:
            section.options[name] = converted
    return section


def to_plain(cfg: TrainConfig) -> dict[str, Any]:
    """``cfg`` as nested dicts of YAML values, in the layout `from_plain` reads."""

    def walk(value: Any) -> Any:
        if isinstance(value, QuantSection):
            return {"enabled": value.enabled, "recipe": value.recipe, **{k: walk(v) for k, v in value.options.items()}}
        if dataclasses.is_dataclass(value):
            return {f.name: walk(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return [walk(v) for v in value] if isinstance(value, (tuple, list)) else value

    return walk(cfg)
