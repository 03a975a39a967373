"""Checkpoints: complete or absent, loadable at another number of ranks, and exact at the same one.

A checkpoint is a directory ``step_00000100`` of `torch.distributed.checkpoint` files and a ``state.json``. It is
written under another name, flushed to disk and renamed, so that a directory of that name is always whole: a crash or a
full disk leaves the one before untouched.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from launch import schema
from launch.config import ConfigError, TrainConfig
from launch.distributed import World
from lumen_core import quantize as quant

FORMAT = 1
STATE = "state.json"
FOLDER = "checkpoints"
_NAME = re.compile(r"step_(\d{8,})")
_UNFINISHED = (".writing-", ".removing-")

# What makes two jobs the same training run. A change of anything else (length, learning rate, logging, ranks, batch
# sizes) is the user's right.
_IDENTITY = ("model.", "data.", "quant.", "train.seq_length", "optim.name", "optim.state", "optim.master_weights")
_NOT_IDENTITY = ("model.name", "model.init_on_meta", "data.cache_dir")


@dataclasses.dataclass
class Position:
    """Where a run stands: everything of a checkpoint that is not a tensor.

    Attributes:
        step: optimizer steps done.
        data: `TrainStream.state_dict()`.
        fingerprint: of the data, see `launch.data.Data`.
        evaluated: step of the last evaluation, -1 without any.
        nonfinite: steps skipped so far because loss or gradient was not finite.
        seconds: training time so far.
    """

    step: int = 0
    data: dict[str, Any] = dataclasses.field(default_factory=dict)
    fingerprint: str = ""
    evaluated: int = -1
    nonfinite: int = 0
    seconds: float = 0.0


class CheckpointError(RuntimeError):
    """A checkpoint could not be written (the ones before it are untouched), or one is damaged."""


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """What a damaged file makes torch raise comes out as the one thing the user can do about it."""
    try:
        yield
    except (ConfigError, torch.OutOfMemoryError):
        raise
    except (Exception, CheckpointException) as error:  # torch's is a BaseException
        raise CheckpointError(
            f"checkpoint {path} cannot be read, it looks damaged ({type(error).__name__}: {_first_cause(error)}); "
            "delete it, or pass checkpoint.resume=<an older one>"
        ) from error


# --- finding --------------------------------------------------------------------------------------------------------


def _read_state(path: Path) -> dict[str, Any] | None:
    """``state.json`` of a complete checkpoint; None for anything else."""
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        return state if (path / ".metadata").is_file() and state["format"] == FORMAT else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def complete_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in ``folder``, oldest first."""
    found = []
    for path in folder.glob("step_*") if folder.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match and _read_state(path) is not None:
            found.append((int(match[1]), path))
    return [path for _, path in sorted(found)]


def find_checkpoint(path: str | os.PathLike[str]) -> Path:
    """The checkpoint that ``path`` means: itself, or the newest of a run directory or of a folder of checkpoints.

    Raises:
        ConfigError: there is none.
    """
    path = Path(path).expanduser()
    if _read_state(path) is not None:
        return path
    for folder in (path / FOLDER, path):
        found = complete_checkpoints(folder)
        if found:
            return found[-1]
    raise ConfigError(f"{path}: no complete checkpoint here (expected a checkpoint, or a run_dir with checkpoints)")


def load_config(path: str | os.PathLike[str]) -> TrainConfig:
    """The configuration of the run that wrote the checkpoint ``path`` (or the newest one of that run directory)."""
    state = _read_state(find_checkpoint(path))
    assert state is not None
    return schema.from_plain(state["config"])


# --- what is saved ----------------------------------------------------------------------------------------------------


def _model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Weights and persistent buffers under their original names, sharing memory with the model."""
    return {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """State of the optimizer as ``{"<kind>/<parameter name>": tensor}``, sharing memory with it."""
    tensors: dict[str, torch.Tensor] = {}
    for name, param in model.named_parameters():
        for kind, value in optimizer.state.get(param, {}).items():
            tensors[f"{kind}/{name}"] = value
    return tensors


def _random_tensors(world: World) -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if world.device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(world.device)
    return state


def _set_random(tensors: Mapping[str, torch.Tensor], world: World) -> None:
    torch.set_rng_state(tensors["cpu"])
    if "cuda" in tensors:
        torch.cuda.set_rng_state(tensors["cuda"], world.device)


def _named(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{prefix}/{name}": tensor for name, tensor in tensors.items()}


def _own(kind: str, rank: int) -> str:
    """Prefix of what each rank saves for itself: its random numbers, and its amax histories, which differ by rank."""
    return f"{kind}/rank{rank}"


# --- writing --------------------------------------------------------------------------------------------------------


class Checkpointer:
    """Writes, prunes and loads the checkpoints of one run.

    All methods are collective, and ``run_dir`` is on a file system that all ranks share. ``keep`` is the number of
    newest checkpoints that stay; 0 keeps all.
    """

    def __init__(self, run_dir: str | os.PathLike[str], world: World, *, config: TrainConfig, keep: int = 3) -> None:
        self.folder = Path(run_dir) / FOLDER
        self.world = world
        self.config = config
        self.keep = keep

    def latest(self) -> Path | None:
        """The newest complete checkpoint of the run, on every rank."""
        found = complete_checkpoints(self.folder) if self.world.is_main else []
        return self.world.from_main(found[-1] if found else None)

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, position: Position) -> Path:
        """Writes a checkpoint and removes the ones that are too many.

        Raises:
            CheckpointError: on every rank, whichever failed. Nothing that was there before is touched then.
        """
        world = self.world
        path = self.folder / f"step_{position.step:08d}"
        writing = self.folder / f".writing-{path.name}"
        tensors = _named("model", _model_tensors(model)) | _named("optimizer", _optimizer_tensors(model, optimizer))
        tensors |= _named(_own("random", world.rank), _random_tensors(world))
        if quant.is_enabled(model):
            tensors |= _named(_own("scaling", world.rank), quant.state_dict(model))
        with self._failing_together(path):
            if world.is_main:
                self._sweep()
                writing.mkdir(parents=True, exist_ok=True)
        with self._failing_together(path):
            dcp.save(tensors, storage_writer=FileSystemWriter(writing, sync_files=True))
        with self._failing_together(path):
            if world.is_main:
                self._publish(writing, path, position)
        return path

    def _publish(self, writing: Path, path: Path, position: Position) -> None:
        state = {
            "format": FORMAT,
            "ranks": self.world.size,
            "position": dataclasses.asdict(position),
            "config": schema.to_plain(self.config),
        }
        with open(writing / STATE, "w", encoding="utf-8") as file:
            json.dump(state, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        _sync_directory(writing)
        if path.exists():
            _rename_for_removal(path)
        writing.rename(path)
        _sync_directory(self.folder)
        if self.keep:
            for old in complete_checkpoints(self.folder)[: -self.keep]:
                _rename_for_removal(old)
        self._sweep()

    def _sweep(self) -> None:
        """Removes what a killed process left half-written or half-removed."""
        for path in self.folder.glob(".*") if self.folder.is_dir() else ():
            if path.name.startswith(_UNFINISHED):
                shutil.rmtree(path, ignore_errors=True)

    @contextlib.contextmanager
    def _failing_together(self, path: Path) -> Iterator[None]:
        problem = None
        try:
            yield
        except (Exception, CheckpointException) as error:  # torch's is a BaseException
            problem = f"{type(error).__name__}: {_first_cause(error)}"
        problems = [p for p in self.world.gather(problem) if p is not None]
        if problems:
            if self.world.is_main:
                shutil.rmtree(path.parent / f".writing-{path.name}", ignore_errors=True)
            raise CheckpointError(f"checkpoint {path} was not written: {problems[0]}")

    def load(
        self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, other_recipe: bool = False
    ) -> Position:
        """Restores model, optimizer, scaling state and random numbers from ``path``, at any number of ranks.

        Args:
            other_recipe: whether another quantization than the checkpoint's is fine; its scaling state is dropped then.

        Raises:
            ConfigError: it belongs to another model or job; names what differs. For damage see `reading`.
        """
        state = self.world.from_main(_read_state(path) if self.world.is_main else None)
        if state is None:
            raise ConfigError(f"{path}: not a complete checkpoint")
        differences = config_differences(state["config"], schema.to_plain(self.config))
        recipe = [d for d in differences if d.startswith("quant.")]
        if other_recipe:
            differences = [d for d in differences if d not in recipe]
        if differences:
            raise ConfigError(f"checkpoint {path} is of another job:", *(f"  {d}" for d in differences))
        saved = _saved_tensors(path)
        weights = _named("model", _model_tensors(model))
        _check_tensors(path, saved, weights, "model/")
        targets = weights | _named("optimizer", _optimizer_tensors(model, optimizer))
        _check_tensors(path, saved, targets, "optimizer/")
        rank, size = self.world.rank, self.world.size
        random = _random_tensors(self.world)
        # With another number of ranks each rank goes on with the seed it has: nothing in the file is its own.
        exact = size == state["ranks"] and all(f"{_own('random', rank)}/{k}" in saved for k in random)
        if exact:
            targets |= _named(_own("random", rank), random)
        scaling: list[dict[str, torch.Tensor]] = []
        if quant.is_enabled(model) and not recipe:
            for saver in [rank] if size == state["ranks"] else range(state["ranks"]):
                scaling.append(quant.state_dict(model))
                targets |= _named(_own("scaling", saver), scaling[-1])
        dcp.load(targets, storage_reader=FileSystemReader(path))
        if exact:
            _set_random(random, self.world)
        if scaling:
            quant.load_state_dict(model, _merge(scaling))
        elif quant.is_enabled(model):
            quant.reset(model)
        return Position(**state["position"])

    def set_aside(self, after: int) -> None:
        """Moves checkpoints of steps beyond ``after`` out of the way: they are of a history that is given up."""
        with self._failing_together(self.folder):
            if self.world.is_main:
                later = [p for p in complete_checkpoints(self.folder) if int(p.name[5:]) > after]
                if later:
                    number = 1
                    while (attic := self.folder.parent / f"{FOLDER}-old-{number}").exists():
                        number += 1
                    attic.mkdir()
                    for path in later:
                        path.rename(attic / path.name)


def _first_cause(error: BaseException) -> str:
    """The message under the wrapping that `torch.distributed.checkpoint` adds."""
    failures = getattr(error, "failures", None)
    if failures:
        inner = next(iter(failures.values()))
        return str(inner[0] if isinstance(inner, tuple) else inner)
    return str(error)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _rename_for_removal(path: Path) -> None:
    """Takes the name of a checkpoint away before its files: at no moment does a part of it look whole."""
    gone = path.with_name(f".removing-{path.name}")
    shutil.rmtree(gone, ignore_errors=True)
    path.rename(gone)


# --- reading --------------------------------------------------------------------------------------------------------


def _saved_tensors(path: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Name, shape and dtype of every tensor in a checkpoint."""
    entries = FileSystemReader(path).read_metadata().state_dict_metadata
    return {k: (m.size, m.properties.dtype) for k, m in entries.items() if isinstance(m, TensorStorageMetadata)}


def _check_tensors(
    path: Path, saved: Mapping[str, tuple[torch.Size, torch.dtype]], wanted: Mapping[str, torch.Tensor], prefix: str
) -> None:
    here = {k: (v.shape, v.dtype) for k, v in wanted.items() if k.startswith(prefix)}
    there = {k: v for k, v in saved.items() if k.startswith(prefix)}
    lines = [f"  {k[len(prefix) :]}: not in the checkpoint" for k in here if k not in there]
    lines += [f"  {k[len(prefix) :]}: in the checkpoint only" for k in there if k not in here]
    for key in here.keys() & there.keys():
        if here[key] != there[key]:
            shapes = [f"{list(shape)} {str(dtype).removeprefix('torch.')}" for shape, dtype in (there[key], here[key])]
            lines.append(f"  {key[len(prefix) :]}: {shapes[0]} in the checkpoint, {shapes[1]} here")
    if lines:
        shown = sorted(lines)[:10] + ([f"  … and {len(lines) - 10} more"] if len(lines) > 10 else [])
        raise ConfigError(f"checkpoint {path} does not fit the {prefix[:-1]}:", *shown)


def _merge(states: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Scaling state for another number of ranks: the largest amax any rank saw, so that nothing saturates."""
    return {name: torch.stack([s[name] for s in states]).amax(dim=0) for name in states[0]}


def config_differences(saved: Mapping[str, Any], present: Mapping[str, Any]) -> list[str]:
    """What makes two configurations (nested dicts) different runs, a line each."""
    left, right = (_flat(c) for c in (saved, present))
    lines = []
    for key in sorted(left.keys() | right.keys()):
        if key.startswith(_IDENTITY) and key not in _NOT_IDENTITY and left.get(key) != right.get(key):
            lines.append(f"{key}: {left.get(key)} in the checkpoint, {right.get(key)} here")
    return lines


def _flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = list(value) if isinstance(value, tuple) else value
    return flat


def load_model_weights(path: str | os.PathLike[str], model: nn.Module) -> None:
    """Loads the weights of a checkpoint (or the newest one of a run directory) into ``model``, sharded or not.

    Raises:
        ConfigError: no checkpoint there, or one of another model; names what differs.
        CheckpointError: it is damaged.
    """
    path = find_checkpoint(path)
    weights = _named("model", _model_tensors(model))
    with reading(path), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # reading alone is what was asked for
        _check_tensors(path, _saved_tensors(path), weights, "model/")
        dcp.load(weights, storage_reader=FileSystemReader(path))
    if quant.is_enabled(model):
        quant.reset(model)
