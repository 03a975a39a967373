"""Weights to a Hugging Face directory: what any other program loads with ``AutoModelForCausalLM.from_pretrained``.

Nothing of the low-precision training goes along: the files hold the model's own high-precision weights under their
original names, in the layout of that model family on the Hub (experts one by one). `launch.models` reads such a
directory back (``model.path=``).
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import shutil
import sys
import uuid
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from launch.config import ConfigError
from launch.models import allocate, empty_model, hf_config, plain_name, quiet
from launch.preflight import import_problem, missing_packages
from launch.validate import EXPORT_MARK, export_problem


def export_model(
    model: nn.Module, target: str | os.PathLike[str], *, tokenizer: Any = None, source: str | None = None
) -> Path:
    """Write ``model`` to the directory ``target``: safetensors, config.json and the tokenizer's files.

    Every rank has to call it; sharded weights are gathered one at a time and rank 0 writes. ``target`` appears
    complete or not at all: the files are written beside it and moved. An earlier export there is replaced.

    Args:
        model: a Hugging Face model, quantized or not, sharded or not. Weights keep their dtype, bit by bit.
        target: a new or empty directory, or an earlier export.
        tokenizer: anything with ``save_pretrained(directory)``, ``eos_id`` and ``pad_id`` (`launch.data`), or None.
        source: the directory the model was read from, which is never overwritten.

    Returns:
        The directory.

    Raises:
        ConfigError: ``target`` holds something else (on every rank).
        RuntimeError: writing failed (on every rank).
    """
    path = Path(target).expanduser().resolve()
    with _failing_together() as first:
        if first:
            problem = export_problem(path, source)
            if problem:
                raise ConfigError(f"export={target}: {problem}")
    state = full_state(model)
    with _failing_together() as first:
        if first:
            _write(model.config, state, path, tokenizer)
    return path


@contextlib.contextmanager
def _failing_together() -> Iterator[bool]:
    """Gives True on the rank that acts; what it raises is raised on all of them, so that none is left waiting."""
    many = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    first = not many or dist.get_rank() == 0
    error: BaseException | None = None
    try:
        yield first
    except Exception as caught:
        error = caught
    if many:
        box = [None if error is None else (isinstance(error, ConfigError), f"{type(error).__name__}: {error}")]
        dist.broadcast_object_list(box, src=0)
        if box[0] is not None and error is None:
            mistake, text = box[0]
            raise ConfigError(text.partition(": ")[2]) if mistake else RuntimeError(f"rank 0 failed: {text}")
    if error is not None:
        raise error


@torch.no_grad()
def full_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """What `nn.Module.state_dict` names, whole, as ordinary CPU tensors, tied names sharing one; empty on later ranks.

    Collective where parameters are sharded.
    """
    from torch.distributed.tensor import DTensor

    first = not dist.is_initialized() or dist.get_rank() == 0
    copies: dict[int, torch.Tensor] = {}
    state: dict[str, torch.Tensor] = {}
    for name, tensor in _saved_tensors(model):
        if id(tensor) not in copies:
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            # Copied into a tensor of our own: it may be a subclass, or memory that training goes on to use.
            copies[id(tensor)] = torch.empty(whole.shape if first else 0, dtype=whole.dtype)
            if first:
                copies[id(tensor)].copy_(whole)
        if first:
            state[plain_name(name)] = copies[id(tensor)]
    return state


def _saved_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


def _write(config: Any, state: dict[str, torch.Tensor], path: Path, tokenizer: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unique = f"{path.name}.{uuid.uuid4().hex[:8]}"
    temporary, old = path.parent / f".{unique}.writing", path.parent / f".{unique}.old"
    try:
        temporary.mkdir()
        _write_files(copy.deepcopy(config), state, temporary, tokenizer)
        _sync(temporary)
        if path.exists():
            path.rename(old)
        try:
            temporary.rename(path)
        except OSError:
            if old.exists():
                old.rename(path)
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def _write_files(config: Any, state: dict[str, torch.Tensor], directory: Path, tokenizer: Any) -> None:
    dtype = next(iter(state.values())).dtype
    config.use_cache = True  # off while training only
    if hasattr(config, "output_router_logits"):
        config.output_router_logits = False
    if tokenizer is not None:
        config.eos_token_id, config.pad_token_id = int(tokenizer.eos_id), int(tokenizer.pad_id)
        bos = getattr(tokenizer, "bos_id", None)
        config.bos_token_id = bos if bos is None else int(bos)
    # A fresh model takes the tensors over: hooks, wrappers and quantization of the trained one stay behind.
    plain = empty_model(config, dtype)
    plain.load_state_dict(state, strict=True, assign=True)
    plain.tie_weights()  # type: ignore[operator]  # does nothing where the configuration ties nothing
    if tokenizer is not None and getattr(plain, "generation_config", None) is not None:
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(plain.generation_config, name, getattr(config, name))
    with quiet():
        plain.save_pretrained(directory)  # type: ignore[operator]
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)
    mark = {"written_by": "lumen-train", "parameters": sum(p.numel() for p in plain.parameters())}
    (directory / EXPORT_MARK).write_text(json.dumps(mark) + "\n", encoding="utf-8")


def _sync(directory: Path) -> None:
    """Have the files on disk before the move that makes them visible."""
    for file in [*directory.rglob("*"), directory]:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def export_checkpoint(checkpoint: str | os.PathLike[str], target: str | os.PathLike[str]) -> Path:
    """Export the weights of a checkpoint (or the newest one of a run directory) to the directory ``target``.

    Raises:
        ConfigError: there is no checkpoint, its model or tokenizer is not to be had, or ``target`` is in use.
    """
    from launch.checkpoint import find_checkpoint, load_config, load_model_weights
    from launch.data.tokenizer import load_tokenizer

    path = find_checkpoint(checkpoint)
    cfg = load_config(path)
    problem = export_problem(target, cfg.model.path)
    if problem:
        raise ConfigError(f"{target}: {problem}")
    try:
        tokenizer = load_tokenizer(cfg.data.tokenizer)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None
    model = empty_model(hf_config(cfg.model, tokenizer.vocab_size), _stored_dtype(path))
    allocate(model, "cpu")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is what is meant
        load_model_weights(path, model)
    return export_model(model, target, tokenizer=tokenizer, source=cfg.model.path)


def _stored_dtype(path: Path) -> torch.dtype:
    """The dtype of the weights in a checkpoint."""
    from torch.distributed.checkpoint import FileSystemReader

    from launch.checkpoint import reading

    with reading(path):
        entries = FileSystemReader(path).read_metadata().state_dict_metadata
    dtypes = [e.properties.dtype for name, e in entries.items() if name.startswith("model/")]
    if not dtypes:
        raise ConfigError(f"{path}: there are no weights in this checkpoint")
    return dtypes[0]


def main_export(argv: Sequence[str] | None = None) -> int:
    """`lumen-export CHECKPOINT OUT`; returns the exit code: 0 done, 1 a checkpoint is damaged, 2 a user's mistake."""
    from launch.checkpoint import CheckpointError

    parser = argparse.ArgumentParser(
        prog="lumen-export", description="Write the weights of a lumen-train checkpoint as a Hugging Face directory."
    )
    parser.add_argument("checkpoint", help="a checkpoint, or a run directory (then its newest checkpoint)")
    parser.add_argument("out", help="a new or empty directory, or an earlier export")
    args = parser.parse_args(sys.argv[1:] if argv is None else argv)
    try:
        missing = missing_packages("transformers", "tokenizers", "safetensors")
        if missing:
            raise ConfigError(*missing)
        written = export_checkpoint(args.checkpoint, args.out)
    except ConfigError as error:
        print("\n".join(f"lumen-export: {p}" for p in error.problems), file=sys.stderr)
        return 2
    except CheckpointError as error:
        print(f"lumen-export: {error}", file=sys.stderr)
        return 1
    except ImportError as error:
        problem = import_problem(error)
        if problem is None:
            raise
        print(f"lumen-export: {problem}", file=sys.stderr)
        return 2
    print(f"written: {written}")
    return 0
