"""Command-line flags, Hydra schema and manual, generated from the fields of `QuantConfig`.

``python -m lumen_core.options`` prints the manual; with a path it writes it there (docs/options.md).
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, List, Optional  # noqa: UP035 - OmegaConf reads these forms in every version

from lumen_core.config import DEFAULT_IGNORED, RECIPES, QuantConfig
from lumen_core.recipes import RECIPE_NOTES
from lumen_core.rules import BLOCK_SIZES
from lumen_core.values import allowed, check_known, from_text, to_text

DEFAULT_RECIPE = "bf16"
"""What a command line or a Hydra job trains in when it names no recipe."""


@dataclasses.dataclass(frozen=True)
class Option:
    """One option of `QuantConfig`, for schemas, help texts and forms.

    Attributes:
        name: field name.
        type: Python type: ``str``, ``bool``, ``int``, ``tuple[int, int]`` or ``tuple[str, ...]``.
        default: the field's default; None and ``"auto"`` are derived from other options, as `auto` says.
        choices: the words allowed; empty where the values are no words of a list.
        help: what the option does, in the words of the consequence.
        minimum: smallest integer allowed, else None.
        maximum: largest integer allowed, else None.
        kind: ``choice``, ``bool``, ``int``, ``block`` or ``names``.
        auto: what a default of None or ``"auto"`` becomes, in words; empty where the default is meant as it stands.
        allowed: the values allowed, in words.
    """

    name: str
    type: Any
    default: Any
    choices: tuple[str, ...]
    help: str
    minimum: int | None
    maximum: int | None
    kind: str
    auto: str
    allowed: str

    @property
    def default_text(self) -> str:
        """The default as it is written, with what it is derived from."""
        text = to_text(self.default, {"kind": self.kind})
        return f"{text} ({self.auto})" if self.auto else text or "none"


_TYPES = {"choice": str, "bool": bool, "int": int, "block": tuple[int, int], "names": tuple[str, ...]}


def option_table() -> list[Option]:
    """Every option, in the order of the fields."""
    return [_option(field) for field in dataclasses.fields(QuantConfig)]


def _option(field: dataclasses.Field[Any]) -> Option:
    spec = field.metadata
    return Option(
        name=field.name,
        type=_TYPES[spec["kind"]],
        default=field.default,
        choices=tuple(spec.get("choices", ())),
        help=spec["help"],
        minimum=spec.get("minimum"),
        maximum=spec.get("maximum"),
        kind=spec["kind"],
        auto=spec.get("auto", ""),
        allowed=allowed(spec),
    )


def _destination(prefix: str, name: str) -> str:
    return f"{prefix.strip('-')}-{name}".strip("-").replace("-", "_")


def _reader(name: str, spec: Mapping[str, Any]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return from_text(name, text, spec)
        except (TypeError, ValueError) as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def add_arguments(parser: argparse.ArgumentParser, prefix: str = "--lumen-") -> Callable[..., QuantConfig]:
    """Add ``<prefix>recipe`` and one flag an option to `parser`; returns `config_from_args`.

    Every flag defaults to None, "as the recipe has it", except the recipe itself (bf16). Booleans get a
    ``--no-`` form, lists take several values, blocks are written 1x128.
    """
    group = parser.add_argument_group("Low-precision training")
    names = ", ".join(RECIPES)
    group.add_argument(
        f"{prefix}recipe",
        default=DEFAULT_RECIPE,
        metavar="RECIPE",
        help=f"One of {names}, or a grammar string such as dynamic_mx-1-1-32_e4m3_e4m3_e5m2. "
        f"Default: {DEFAULT_RECIPE}.",
    )
    for field in dataclasses.fields(QuantConfig):
        spec, option = field.metadata, _option(field)
        flag = prefix + field.name.replace("_", "-")
        kwargs: dict[str, Any] = {"help": f"{option.help} Default: {option.default_text}.".replace("%", "%%")}
        if option.kind == "bool":
            kwargs["action"] = argparse.BooleanOptionalAction
        elif option.kind == "names":
            kwargs |= {"nargs": "*", "metavar": "NAME"}
        else:
            metavar = {"int": "N", "block": "ROWSxCOLUMNS"}.get(option.type, "{" + ",".join(option.choices) + "}")
            kwargs |= {"type": _reader(field.name, spec), "metavar": metavar}
        group.add_argument(flag, default=None, dest=_destination(prefix, field.name), **kwargs)
    return config_from_args


def config_from_args(args: argparse.Namespace, prefix: str = "--lumen-") -> QuantConfig:
    """The configuration that flags added by `add_arguments` with the same `prefix` describe.

    Raises TypeError or ValueError as `QuantConfig.from_recipe` does.
    """
    given = {name: getattr(args, _destination(prefix, name)) for name in ("recipe", *_FIELDS)}
    return config_from_schema(given)


_FIELDS = tuple(field.name for field in dataclasses.fields(QuantConfig))


def _make_schema() -> type:
    hints = {"choice": str, "bool": bool, "int": int, "block": List[int], "names": List[str]}  # noqa: UP006
    fields: list[Any] = [("recipe", str, dataclasses.field(default=DEFAULT_RECIPE))]
    for option in option_table():
        hint = Optional[hints[option.kind]]  # noqa: UP045
        fields.append((option.name, hint, dataclasses.field(default=None)))
    schema = dataclasses.make_dataclass("QuantSchema", fields)
    schema.__doc__ = 'Hydra form of QuantConfig: a recipe, and every option with None for "as the recipe has it".'
    schema.__module__ = __name__  # so that it pickles
    return schema


QuantSchema = _make_schema()


def hydra_schema() -> type:
    """The dataclass `QuantSchema` for Hydra's ConfigStore: ``recipe: str = "bf16"``, every option None."""
    return QuantSchema


def config_from_schema(node: object) -> QuantConfig:
    """The configuration that a `QuantSchema`, or a mapping with its keys (OmegaConf's too), describes.

    None means "as the recipe has it"; a missing recipe is bf16. Raises TypeError for an unknown key, else as
    `QuantConfig.from_recipe` does.
    """
    if isinstance(node, QuantSchema):
        node = vars(node)
    if not isinstance(node, Mapping):
        raise TypeError(f"expected a QuantSchema or a mapping of options, got {type(node).__name__}")
    given = {str(name): node[name] for name in node}
    check_known(given, ("recipe", *_FIELDS))
    recipe = given.pop("recipe", DEFAULT_RECIPE)
    return QuantConfig.from_recipe(recipe, **{name: value for name, value in given.items() if value is not None})


_INTRODUCTION = """# Options of low-precision training

*Generated from `lumen_core/config.py` by `python -m lumen_core.options docs/options.md`; edit the fields
there.*

An option is a keyword of `QuantConfig` and `quant.enable`, a Hydra key `quant.<option>`, a flag
`--lumen-<option>` (with dashes; booleans also as `--no-lumen-<option>`), or `,<option>=<value>` after a
recipe's name:

```
mxfp8,scale_rounding=even,ignored_modules=*.q_proj|*.k_proj
```

Words are read in any case. `str(config)` writes this form and `QuantConfig.parse` reads it back; there lists
are joined by `|`, and `%`, `,`, `|` and blanks inside an entry are percent-encoded. Options that contradict
each other are refused.
"""


def manual() -> str:
    """The text of docs/options.md."""
    lines = [_INTRODUCTION, "## Recipes", "", "| recipe | settings | |", "|---|---|---|"]
    for name, settings in RECIPES.items():
        values = ", ".join(f"`{key}={value}`" for key, value in settings.items())
        lines.append(f"| `{name}` | {values} | {RECIPE_NOTES[name]} |")
    sizes = ", ".join(map(str, BLOCK_SIZES))
    lines += [
        "",
        "Any other mix is written `<strategy>_<granularity>_<input>_<weight>_<grad>`, in any case, "
        "wherever a recipe's name is taken:",
        "",
        "- strategy: `dynamic`, or `delayed` (per tensor only);",
        "- granularity: `tensor` (`pertensor`), `row` (`perchannel`), `block-1-<rows>-<B>` (B one of "
        f"{sizes}; rows of the weight block 1 or B), `mx-1-1-32` or `mx-1-32-32`;",
        "- input, weight, grad: `e4m3`, `e5m2`, with `mx` also `e2m1`.",
        "",
        "Example: `dynamic_mx-1-1-32_e4m3_e4m3_e5m2` is `mxfp8` with E5M2 gradients.",
        "",
        "## Options",
        "",
    ]
    for option in option_table():
        default = f"`{to_text(option.default, {'kind': option.kind}) or '[]'}`"
        default += f" ({option.auto})" if option.auto else ""
        lines += [f"### `{option.name}`", "", option.help, ""]
        lines += [f"Accepts {option.allowed}. Default: {default}.", ""]
    ignored = " ".join(f"`{pattern}`" for pattern in DEFAULT_IGNORED)
    lines += [
        "## Modules ignored by default",
        "",
        "Patterns are globs on the full dotted name, in which `*` spans dots. A name in `ignored_modules` "
        "always wins; a full name in `apply_modules` selects a module that these patterns would leave out:",
        "",
        ignored,
    ]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    if arguments:
        Path(arguments[0]).write_text(manual(), encoding="utf-8")
    else:
        sys.stdout.write(manual())


if __name__ == "__main__":
    main(sys.argv[1:])
