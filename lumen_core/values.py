"""Checks and text forms of option values, shared by every route an option can arrive on.

Each option has one kind: ``choice`` (a word of a list, any case), ``bool``, ``int``, ``block`` (rows,
columns) or ``names`` (a tuple of strings). `check` accepts Python values (constructor, Hydra, JSON) and
returns the canonical one; `to_text` and `from_text` are exact inverses on canonical values (``str(config)``,
command lines).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

AUTO = "auto"  # how "derive it from the recipe" is written as text; choices may hold it as a word of their own


def nearest(word: object, words: Iterable[str]) -> str | None:
    """The word of `words` that `word` most likely meant, or None when nothing is close."""
    close = difflib.get_close_matches(str(word).lower().removeprefix("torch."), list(words), n=1, cutoff=0.4)
    return close[0] if close else None


def listed(words: Iterable[str]) -> str:
    return ", ".join(repr(word) for word in words)


def suggestion(word: object, words: Iterable[str]) -> str:
    """`` (nearest: 'x')``, or nothing when no word is close."""
    close = nearest(word, words)
    return f" (nearest: {close!r})" if close else ""


def allowed(spec: Mapping[str, Any]) -> str:
    """What an option accepts, in words, for messages, help texts and the manual."""
    kind, low, high = spec["kind"], spec.get("minimum"), spec.get("maximum")
    if kind == "choice":
        return f"one of {listed(spec['choices'])}"
    if kind == "names" and spec.get("choices"):
        return f"a list of {listed(spec['choices'])}"
    if kind == "int":
        return f"an integer >= {low}" + (f" and <= {high}" if high is not None else "")
    return {"bool": "True or False", "block": "a pair (rows, columns)", "names": "a list of strings"}[kind]


def _wrong_type(name: str, value: object, spec: Mapping[str, Any], why: str = "") -> TypeError:
    hint = suggestion(value, spec["choices"]) if spec.get("choices") else ""
    return TypeError(f"{name}={value!r} has type {type(value).__name__}: {name} must be {allowed(spec)}{hint}{why}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


def _check_word(name: str, value: object, spec: Mapping[str, Any]) -> str:
    if not isinstance(value, str):
        raise _wrong_type(name, value, spec)
    word = str(value.lower())
    if word not in spec["choices"]:
        hint = suggestion(value, spec["choices"])
        raise ValueError(f"{name}={value!r} is not valid: {name} must be {allowed(spec)}{hint}")
    return word


def _check_names(name: str, value: object, spec: Mapping[str, Any]) -> tuple[str, ...]:
    if not _is_list(value):
        why = f"; for one entry write [{value!r}]" if isinstance(value, str) else ""
        raise _wrong_type(name, value, spec, why)
    if spec.get("choices"):
        return tuple(_check_word(name, item, spec) for item in value)
    for item in value:
        if not isinstance(item, str):
            raise _wrong_type(name, value, spec, f"; entry {item!r} is not a string")
        if not item:
            raise ValueError(f"{name}={value!r} holds an empty string: every entry must name or match a module")
    return tuple(str(item) for item in value)


def check(name: str, value: object, spec: Mapping[str, Any]) -> Any:
    """`value` in canonical form, or a TypeError or ValueError with `name`, the value and what is allowed.

    `spec` is the option's metadata: ``kind``, and where they apply ``choices``, ``minimum``, ``maximum`` and
    ``optional`` (None is allowed and means "from the recipe").
    """
    kind = spec["kind"]
    if value is None and spec.get("optional"):
        return None
    if kind == "choice":
        return _check_word(name, value, spec)
    if kind == "names":
        return _check_names(name, value, spec)
    if kind == "bool":
        if not isinstance(value, bool):
            raise _wrong_type(name, value, spec)
        return value
    if kind == "int":
        if not _is_int(value):
            raise _wrong_type(name, value, spec)
        low, high = spec["minimum"], spec.get("maximum")
        if value < low or (high is not None and value > high):
            end = low if value < low else high
            raise ValueError(f"{name}={value} is not valid: {name} must be {allowed(spec)} (nearest: {end})")
        return int(value)
    if not _is_list(value) or not all(_is_int(item) for item in value):
        raise _wrong_type(name, value, spec, " of integers")
    if len(value) != 2 or min(value) < 0:
        raise ValueError(f"{name}={tuple(value)} is not valid: {name} must be {allowed(spec)} of integers >= 0")
    return (int(value[0]), int(value[1]))


def check_known(options: Iterable[str], names: Sequence[str], error: type[Exception] = TypeError) -> None:
    """Refuse an option that does not exist: dropped in silence, it would change what is trained."""
    for option in options:
        if option not in names:
            raise error(f"unknown option {option!r}{suggestion(option, names)}; the options are {', '.join(names)}")


def _escape(text: str) -> str:
    """Percent-encode what separates or could be stripped, so that a pattern may hold any character at all."""
    return "".join(
        c if c.isprintable() and c not in "%,| " else "".join(f"%{b:02X}" for b in c.encode("utf-8", "surrogatepass"))
        for c in text
    )


def to_text(value: object, spec: Mapping[str, Any]) -> str:
    """The text of a canonical value: ``true``, ``16``, ``1x128``, ``a|b`` (entries percent-encoded)."""
    if value is None:
        return AUTO
    kind = spec["kind"]
    if kind == "bool":
        return "true" if value else "false"
    if kind == "block":
        return "{}x{}".format(*value)
    if kind == "names":
        return "|".join(_escape(item) for item in value)
    return str(value)


def from_text(name: str, text: str, spec: Mapping[str, Any]) -> Any:
    """Inverse of `to_text`; ValueError names the option, the text and what is allowed."""
    kind = spec["kind"]
    if spec.get("optional") and text.lower() == AUTO:
        return None
    if kind == "choice":
        return check(name, text, spec)
    if kind == "names":
        return check(name, [unquote(t, errors="surrogatepass") for t in text.split("|")] if text else [], spec)
    if kind == "bool":
        if text.lower() not in ("true", "false"):
            hint = suggestion(text, ("true", "false"))
            raise ValueError(f"{name}={text!r} is not valid: {name} must be true or false{hint}")
        return text.lower() == "true"
    if kind == "int":
        if not re.fullmatch(r"[+-]?[0-9]+", text):
            raise ValueError(f"{name}={text!r} is not valid: {name} must be {allowed(spec)}")
        return check(name, int(text), spec)
    match = re.fullmatch(r"([0-9]+)[xX]([0-9]+)", text)
    if not match:
        raise ValueError(f"{name}={text!r} is not valid: {name} must be rows and columns, such as 1x128")
    return check(name, (int(match[1]), int(match[2])), spec)
