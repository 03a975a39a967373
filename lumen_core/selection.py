"""Which modules a configuration selects, by glob patterns on full dotted names.

Patterns are those of `fnmatch`, case-sensitive: ``*`` spans dots, ``?`` is one character, ``[ab]`` one of a
set.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

_SENSITIVE = (
    "lm_head",  # output projections: their error goes straight into the logits
    "output_layer",
    "gate",  # MoE routers: another expert is no rounding error (`gate_proj` is another name, so it is quantized)
    "router",
    "shared_expert_gate",
    "lora_[AB]",  # adapters: a contraction over the rank (8, 16) fills no block and costs nothing in bf16
    "lora_embedding_[AB]",
    "lora_magnitude*",
)


def _anywhere(part: str) -> tuple[str, ...]:
    """Patterns for a module called `part`, at the root or nested, and for what it wraps (PEFT)."""
    return part, f"*.{part}", f"{part}.*", f"*.{part}.*"


DEFAULT_IGNORED: tuple[str, ...] = (
    "*embed*",
    *(pattern for part in _SENSITIVE for pattern in _anywhere(part)),
)
"""Modules that stay in high precision unless ``apply_modules`` names them exactly: output heads, embeddings,
MoE routers and LoRA adapters."""


def glob_match(name: str, pattern: str) -> bool:
    """True when the full dotted name `name` matches `pattern`."""
    return fnmatchcase(name, pattern)


def is_exact(pattern: str) -> bool:
    """True for a pattern without wildcards, that is a module's full name."""
    return not any(c in pattern for c in "*?[")


def _first_match(name: str, patterns: Iterable[str]) -> str | None:
    return next((pattern for pattern in patterns if glob_match(name, pattern)), None)


def module_selected(name: str, apply: Iterable[str] = ("*",), ignored: Iterable[str] = ()) -> tuple[bool, str]:
    """Whether the module called `name` is quantized, and the reason in words.

    `apply` and `ignored` are a config's ``apply_modules`` and ``ignored_modules``. The user's `ignored`
    always wins; then an exact name in `apply` selects even what `DEFAULT_IGNORED` holds; then those built-in
    ignores; then the patterns of `apply`.
    """
    hit = _first_match(name, ignored)
    if hit is not None:
        return False, f"ignored_modules has {hit!r}"
    apply = tuple(apply)
    if name in apply and is_exact(name):
        return True, f"apply_modules names {name!r}"
    hit = _first_match(name, DEFAULT_IGNORED)
    if hit is not None:
        return False, f"ignored by default ({hit!r}); put {name!r} itself into apply_modules to quantize it"
    hit = _first_match(name, apply)
    if hit is None:
        return False, f"apply_modules has no pattern for it: {', '.join(map(repr, apply))}"
    return True, f"apply_modules has {hit!r}"
