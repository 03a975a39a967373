"""The command line and the YAML tree, composed by Hydra into a `launch.config.TrainConfig`.

Hydra reads the tree and merges; the checks in front of it and behind it are ours, so that every mistake comes out as
one line with the key, the value, what was expected and the nearest valid name. Nothing here imports torch, writes a
file or changes directory.
"""

from __future__ import annotations

import contextlib
import re
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch import aliases
from launch.config import ConfigError, TrainConfig, resolve
from launch.schema import Key, from_plain, keys, nearest, unknown_key
from launch.validate import validate

GROUPS = ("model", "quant", "data", "optim", "backend", "experiment")


def tree() -> Path:
    """The directory of the YAML tree: inside `launch` in an installed wheel, beside it in a checkout."""
    here = Path(__file__).resolve().parent
    for candidate in (here / "configs", here.parent / "configs"):
        if (candidate / "train.yaml").is_file():
            return candidate
    raise ConfigError(f"the configuration tree is missing: neither {here / 'configs'} nor {here.parent / 'configs'}")


def group_options(dirs: Sequence[Path]) -> dict[str, list[str]]:
    """Every group (a directory of the tree) with its options (its YAML files), known groups first."""
    found: dict[str, set[str]] = {g: set() for g in GROUPS}
    for directory in dirs:
        for file in sorted(directory.glob("*/**/*.yaml")):
            group, _, option = file.relative_to(directory).with_suffix("").as_posix().partition("/")
            found.setdefault(group, set()).add(option)
    return {g: sorted(options) for g, options in found.items()}


@dataclass
class _CommandLine:
    """The overrides after checking: what Hydra gets, what the user typed by key, and the problems found."""

    known: dict[str, Key]
    groups: dict[str, list[str]]
    hydra: list[str] = field(default_factory=list)
    shown: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    chosen: dict[str, str] = field(default_factory=dict)

    def add(self, line: str) -> None:
        try:
            self._add(line)
        except ConfigError as error:
            self.problems.extend(error.problems)

    def _add(self, line: str) -> None:
        name, equals, value = line.partition("=")
        bare = name.lstrip("+").strip()
        if line.startswith("~"):
            raise ConfigError(f"{line}: keys cannot be deleted; leave the key out{self._or_null(name[1:])}")
        if not equals:
            every = [*self.groups, *self.known]
            raise ConfigError(f"{line}: expected key=value; nearest: {nearest(bare, every)}=…")
        if bare in self.groups:
            self._group(name, bare, value.strip())
        elif aliases.leaf(bare) in aliases.ALIASES:
            self._alias(aliases.leaf(bare), value)
        elif bare in self.known:
            self.shown[bare] = value
            self.hydra.append(f"++{bare}={self._value(self.known[bare], value)}")
        else:
            if bare.startswith("hydra"):
                raise ConfigError(f"{line}: Hydra's own settings are not used; run_dir=… is where a run is written")
            prefix = f"{bare}."
            if any(k.startswith(prefix) for k in self.known):
                # A whole section, e.g. model.rope_scaling={…}: what was typed for its keys before no longer holds.
                self.shown = {k: v for k, v in self.shown.items() if not k.startswith(prefix)}
                self.hydra.append(f"++{bare}={value}")
                return
            raise ConfigError(unknown_key(bare, value, self.known))

    def _or_null(self, name: str) -> str:
        key = self.known.get(name.strip())
        return f", or write {key.name}=null" if key is not None and key.optional else ""

    def _group(self, name: str, group: str, value: str) -> None:
        options = self.groups[group]
        self.chosen[group] = value
        plus = name[: len(name) - len(name.lstrip("+"))] if group not in GROUPS else ""
        if group == "experiment" and value == "null":
            self.hydra.append("~experiment")
        elif value in options or value.lower() in options:
            self.hydra.append(f"{plus}{group}={value if value in options else value.lower()}")
        elif group == "quant":
            self._recipe(value)
        else:
            raise ConfigError(_no_option(group, value, options))

    def _recipe(self, value: str) -> None:
        """``quant=<anything QuantConfig reads>``, such as a grammar string."""
        from lumen_core.config import QuantConfig

        try:
            QuantConfig.from_recipe(value)
        except (ValueError, TypeError) as error:
            if "_" not in value.strip("_"):  # not meant as a grammar string
                raise ConfigError(_no_option("quant", value, self.groups["quant"])) from None
            raise ConfigError(f"quant={value}: {error}") from None
        self.shown["quant.recipe"] = value
        self.hydra += ["quant=bf16", f"++quant.recipe={_quote(value)}"]

    def _alias(self, old: str, value: str) -> None:
        if old == "quant_recipe_name" and self.chosen.get("quant", value) != value:
            raise ConfigError(f"quant_recipe_name={value} and quant={self.chosen['quant']} differ; give quant=… only")
        if value.startswith("["):
            text = _string_list(value)
        else:
            text = _quote(value)
        self.hydra.append(f"++{old}={text}")

    def _value(self, key: Key, value: str) -> str:
        """``value`` as Hydra's grammar has to see it to end up in the key's type.

        Paths and globs hold characters that mean something else in that grammar, so text is quoted here.
        """
        value = value.strip()
        if value == "null" or (value.startswith(("'", '"')) and value[-1:] == value[:1]):
            return value
        if key.type is str:
            if value in ("true", "false") and value not in key.choices:
                raise ConfigError(f"{key.name}={value}: expected {key.expected()}")
            return _quote(value)
        if typing.get_origin(key.type) is tuple and typing.get_args(key.type)[0] is str:
            if value.count("[") != value.count("]"):
                raise ConfigError(f"{key.name}={value}: expected {key.expected()}, such as [a,b]")
            return _string_list(value)
        self._check_grammar(key, value)
        return value

    def _check_grammar(self, key: Key, value: str) -> None:
        from hydra.core.override_parser.overrides_parser import OverridesParser
        from hydra.errors import HydraException

        try:
            parsed = OverridesParser.create().parse_override(f"++{key.name}={value}")
        except HydraException:
            raise ConfigError(f"{key.name}={value}: expected {key.expected()}") from None
        if parsed.is_sweep_override():
            hint = f"; write [{value}]" if typing.get_origin(key.type) is tuple else "; one run takes one value"
            raise ConfigError(f"{key.name}={value}: expected {key.expected()}{hint}")


def _no_option(group: str, value: str, options: Sequence[str]) -> str:
    best = nearest(value, options)
    return f"{group}={value}: expected one of {', '.join(options)}; nearest: {group}={best}"


def _quote(text: str) -> str:
    from hydra.core.override_parser.types import Quote, QuotedString

    return QuotedString(text=text, quote=Quote.single).with_quotes()


def _string_list(value: str) -> str:
    inner = value.strip()
    if inner.startswith("[") and inner.endswith("]"):  # a glob may hold one: layers.[01]
        inner = inner[1:-1]
    return "[" + ",".join(_quote(part.strip().strip("'\"")) for part in inner.split(",") if part.strip()) + "]"


def load(
    overrides: Sequence[str], *, config_dir: str | None = None, config_name: str = "train", world_size: int = 1
) -> tuple[TrainConfig, list[str]]:
    """Compose, convert, validate and resolve one job.

    Args:
        overrides: ``key=value`` and ``group=option`` words of the command line.
        config_dir: a directory of the user's own YAML, searched before the package's tree.
        config_name: the file to start from, with or without ``.yaml``.
        world_size: ranks that will run the job.

    Returns:
        The job, with every derived value filled in, and lines to tell the user (translated names).

    Raises:
        ConfigError: with one line per problem.
    """
    dirs = [tree()]
    if config_dir is not None:
        if not Path(config_dir).expanduser().is_dir():
            raise ConfigError(f"--config-dir {config_dir}: there is no such directory")
        dirs.insert(0, Path(config_dir).expanduser().resolve())
    config_name = config_name.removesuffix(".yaml")
    names = sorted({f.stem for d in dirs for f in d.glob("*.yaml")})
    if config_name not in names:
        best = nearest(config_name, names)
        raise ConfigError(f"--config-name {config_name}: expected one of {', '.join(names)}; nearest: {best}")
    line = _CommandLine(keys(), group_options(dirs))
    for word in overrides:
        line.add(word)
    if line.problems:
        raise ConfigError(*line.problems)
    plain = _compose(dirs, config_name, line.hydra)
    notes = aliases.translate(plain, lambda name: _recipe_file(name, dirs))
    plain = {k: v for k, v in plain.items() if not (k in line.groups and k not in GROUPS and v is None)}
    plain.pop("experiment", None)
    cfg = from_plain(plain, line.shown)
    problems = validate(cfg, world_size)
    if problems:
        raise ConfigError(*problems)
    return resolve(cfg, world_size), notes


def _recipe_file(name: str, dirs: Sequence[Path]) -> dict[str, Any]:
    from omegaconf import OmegaConf

    for directory in dirs:
        file = directory / "quant" / f"{name.lower()}.yaml"
        if file.is_file():
            return typing.cast(dict, OmegaConf.to_container(OmegaConf.load(file)))
    return {"recipe": name}


_FIRST: list[Path] = []
"""Directories that Hydra searches before the package's tree while `_searched_first` is active."""


@contextlib.contextmanager
def _searched_first(dirs: Sequence[Path]) -> Iterator[None]:
    """Have Hydra look into ``dirs`` before anything else, for the start file too (`hydra.searchpath` comes last)."""
    from hydra.core.config_search_path import ConfigSearchPath
    from hydra.core.plugins import Plugins
    from hydra.plugins.search_path_plugin import SearchPathPlugin

    if not any(p.__name__ == "LumenSearchPath" for p in Plugins.instance().discover(SearchPathPlugin)):

        class LumenSearchPath(SearchPathPlugin):
            def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
                for directory in reversed(_FIRST):
                    search_path.prepend(provider="lumen-train", path=f"file://{directory}")

        Plugins.instance().register(LumenSearchPath)
    _FIRST[:] = dirs
    try:
        yield
    finally:
        _FIRST.clear()


def _compose(dirs: Sequence[Path], config_name: str, overrides: Sequence[str]) -> dict[str, Any]:
    import yaml
    from hydra import initialize_config_dir
    from hydra.errors import HydraException, MissingConfigException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        with _searched_first(dirs[:-1]), initialize_config_dir(version_base="1.3", config_dir=str(dirs[-1])):
            composed = _compose_groups(config_name, overrides)
        return typing.cast(dict, OmegaConf.to_container(composed, resolve=True))
    except MissingConfigException as error:
        missing = str(error.missing_cfg_file or config_name)
        group, _, option = missing.rpartition("/")
        options = group_options(dirs).get(group) or [f.stem for d in dirs for f in d.glob("*.yaml")]
        raise ConfigError(
            f"{missing}: there is no such file in the tree; nearest: {nearest(option, options)}"
        ) from None
    except yaml.YAMLError as error:
        raise ConfigError("a configuration file is not valid YAML: " + " ".join(str(error).split())) from None
    except OmegaConfBaseException as error:
        where = getattr(error, "full_key", None) or "a value"
        raise ConfigError(f"{where}: {str(error).splitlines()[0]}") from None
    except (HydraException, ValueError) as error:
        text = re.sub(r"\s+", " ", str(error.__cause__ or error))
        raise ConfigError(f"the configuration cannot be put together: {text}") from None


def _compose_groups(config_name: str, overrides: Sequence[str]) -> Any:
    """Hydra's compose, where a group that the start file does not list is added instead of refused."""
    from hydra import compose
    from hydra.errors import ConfigCompositionException

    words = list(overrides)
    while True:
        try:
            return compose(config_name=config_name, overrides=words)
        except ConfigCompositionException as error:
            missing = re.search(r"Could not (override|delete) '([^'@]+)'", str(error))
            old = [w for w in words if missing and w.lstrip("~").split("=")[0] == missing[2]]
            if not missing or not old:
                raise
            words = [w for w in words if w not in old] + [f"+{w}" for w in old if missing[1] == "override"]
