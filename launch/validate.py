"""Checks that need more than one key, or the disk: run before anything is built, all problems reported at once."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterator
from pathlib import Path

from launch.config import ModelConfig, TrainConfig
from launch.schema import nearest

EXPORT_MARK = "lumen_export.json"
"""Written into every export: an existing directory is replaced only when it holds this file."""


def validate(cfg: TrainConfig, world_size: int = 1) -> list[str]:
    """One line per problem with ``cfg`` on ``world_size`` ranks; empty when it can run.

    Types and single-key ranges are already checked (`launch.schema`); here are the contradictions and the paths.
    """
    return [
        *_batches(cfg, world_size),
        *(_model_path(cfg) if cfg.model.path is not None else _model(cfg.model)),
        *_length(cfg),
        *_quant(cfg),
        *_wire(cfg),
        *_paths(cfg),
    ]


def _batches(cfg: TrainConfig, world_size: int) -> Iterator[str]:
    t = cfg.train
    per_pass = t.micro_batch_size * world_size
    if t.global_batch_size is not None and t.global_batch_size % per_pass:
        below, above = t.global_batch_size // per_pass * per_pass, -(-t.global_batch_size // per_pass) * per_pass
        valid = " or ".join(str(n) for n in (below, above) if n)
        yield (
            f"train.global_batch_size={t.global_batch_size}: expected a multiple of train.micro_batch_size x ranks = "
            f"{t.micro_batch_size} x {world_size} = {per_pass}; nearest: {valid}"
        )
    if cfg.optim.warmup_steps is not None and cfg.optim.warmup_steps > t.max_steps:
        yield f"optim.warmup_steps={cfg.optim.warmup_steps}: expected at most train.max_steps={t.max_steps}"


def _model(m: ModelConfig) -> Iterator[str]:
    if m.head_dim is None and m.hidden_size % m.num_attention_heads:
        yield (
            f"model.hidden_size={m.hidden_size}: expected a multiple of model.num_attention_heads="
            f"{m.num_attention_heads}, or a model.head_dim"
        )
    head_dim = m.head_dim if m.head_dim is not None else m.hidden_size // m.num_attention_heads
    if head_dim % 2 or head_dim == 0:
        yield f"model.head_dim={head_dim}: expected an even number (rotary embeddings turn pairs)"
    if m.num_attention_heads % m.num_key_value_heads:
        yield (
            f"model.num_key_value_heads={m.num_key_value_heads}: expected a divisor of "
            f"model.num_attention_heads={m.num_attention_heads}"
        )
    if m.architecture == "qwen3_moe":
        for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size"):
            if getattr(m, name) < 1:
                yield f"model.{name}={getattr(m, name)}: expected an integer >= 1 for model.architecture=qwen3_moe"
        if m.num_experts_per_tok > m.num_experts:
            yield (
                f"model.num_experts_per_tok={m.num_experts_per_tok}: expected at most model.num_experts={m.num_experts}"
            )
    elif m.num_experts:
        yield f"model.num_experts={m.num_experts}: expected 0 for model.architecture={m.architecture}"
    r = m.rope_scaling
    if r.rope_type == "llama3" and r.high_freq_factor <= r.low_freq_factor:
        yield (
            f"model.rope_scaling.high_freq_factor={r.high_freq_factor}: expected more than low_freq_factor="
            f"{r.low_freq_factor}"
        )


def _model_path(cfg: TrainConfig) -> Iterator[str]:
    path = Path(cfg.model.path or "").expanduser()
    if not path.is_dir():
        yield f"model.path={cfg.model.path}: there is no such directory"
    elif not (path / "config.json").is_file():
        yield f"model.path={cfg.model.path}: there is no config.json in it"
    elif not any(path.glob("*.safetensors")):
        yield f"model.path={cfg.model.path}: there are no *.safetensors files in it"


def _length(cfg: TrainConfig) -> Iterator[str]:
    limit, origin = cfg.model.max_position_embeddings, "model.max_position_embeddings"
    if cfg.model.path is not None:
        file = Path(cfg.model.path).expanduser() / "config.json"
        if not file.is_file():
            return
        try:
            limit = json.loads(file.read_text(encoding="utf-8")).get("max_position_embeddings", 2**62)
        except (ValueError, AttributeError):
            yield f"model.path={cfg.model.path}: its config.json is not a JSON object"
            return
        origin = f"max_position_embeddings of {file}"
    if cfg.train.seq_length > limit:
        yield f"train.seq_length={cfg.train.seq_length}: expected at most {limit} ({origin})"


def _quant(cfg: TrainConfig) -> Iterator[str]:
    from lumen_core.config import RECIPES, QuantConfig

    try:
        config = cfg.quant.to_config()
    except (ValueError, TypeError) as error:
        yield f"quant: {error}"
    else:
        edges = config.first_layers_bf16 + config.last_layers_bf16
        if cfg.model.path is None and edges > cfg.model.num_hidden_layers:
            yield (
                f"quant.first_layers_bf16={config.first_layers_bf16}, quant.last_layers_bf16="
                f"{config.last_layers_bf16}: expected at most model.num_hidden_layers="
                f"{cfg.model.num_hidden_layers} together"
            )
    if cfg.compare is not None:
        try:
            QuantConfig.from_recipe(cfg.compare)
        except (ValueError, TypeError):
            yield (
                f"compare={cfg.compare}: expected a recipe ({', '.join(RECIPES)}) or a grammar string; "
                f"nearest: {nearest(cfg.compare, RECIPES)}"
            )


def _wire(cfg: TrainConfig) -> Iterator[str]:
    """How weights travel: contradictions that would leave an option without effect."""
    from lumen_core.config import RECIPES, QuantConfig

    b = cfg.backend
    given = [] if b.wire is None else [f"backend.wire={b.wire}"]
    given += [] if b.all_gather_mode == "auto" else [f"backend.all_gather_mode={b.all_gather_mode}"]
    if b.wire is not None:
        try:
            QuantConfig.from_recipe(b.wire)
        except (ValueError, TypeError):
            yield (
                f"backend.wire={b.wire}: expected a recipe ({', '.join(RECIPES)}) or a grammar string; "
                f"nearest: {nearest(b.wire, RECIPES)}"
            )
            return
    if given and not b.low_precision_all_gather:
        yield (
            f"backend.low_precision_all_gather=false: expected true with {' and '.join(given)}, which say how "
            "quantized weights travel"
        )
    if given and not cfg.quant.enabled:
        yield f"{given[0]}: expected quant.enabled=true; weights of an unquantized model travel in train.dtype"
    if not b.low_precision_all_gather or cfg.quant.options.get("dgrad_weight") != "direct":
        return
    try:
        config = QuantConfig.from_recipe(b.wire) if b.wire is not None else cfg.quant.to_config()
    except (ValueError, TypeError):
        return  # told by _quant
    if config.is_mx and config.weight_block[0] == 1 and b.all_gather_mode in ("auto", "row"):
        yield (
            f"quant.dgrad_weight=direct: expected backend.all_gather_mode=on-demand or all, or "
            f"backend.low_precision_all_gather=false; mode {b.all_gather_mode} sends fprop's blocks only, and makes "
            "dgrad's from those"
        )


def _exists(pattern: str) -> bool:
    pattern = os.path.expanduser(pattern)
    return os.path.exists(pattern) or bool(glob.glob(pattern, recursive=True))


def _paths(cfg: TrainConfig) -> Iterator[str]:
    for name, spec in (("train", cfg.data.train), ("validation", cfg.data.validation)):
        # Several sources are joined by commas; a path that holds a comma is one source (`launch.data.sources`).
        for item in [] if spec is None else [spec] if _exists(spec) else spec.split(","):
            if item.strip() not in ("stdlib", "") and not _exists(item.strip()):
                yield (
                    f'data.{name}={spec}: expected "stdlib", or existing files, directories or globs joined by '
                    f"commas; nothing matches {item.strip()}"
                )
    if cfg.data.tokenizer != "byte" and not Path(cfg.data.tokenizer).expanduser().is_dir():
        yield f'data.tokenizer={cfg.data.tokenizer}: expected "byte" or a local tokenizer directory'
    resume = cfg.checkpoint.resume
    if resume not in ("auto", "never") and not Path(resume).expanduser().is_dir():
        yield f"checkpoint.resume={resume}: expected auto, never or a checkpoint directory"
    if cfg.run_dir is not None and Path(cfg.run_dir).expanduser().is_file():
        yield f"run_dir={cfg.run_dir}: expected a directory, this is a file"
    if cfg.export is not None:
        problem = export_problem(cfg.export, cfg.model.path)
        if problem:
            yield f"export={cfg.export}: {problem}"


def export_problem(target: str | os.PathLike[str], source: str | None = None) -> str | None:
    """Why an export must not go to ``target``; None when it may. ``source`` is the directory the model came from."""
    path = Path(target).expanduser()
    if source is not None and path.resolve() == Path(source).expanduser().resolve():
        return "expected another directory than model.path"
    if path.is_dir():
        if any(path.iterdir()) and not (path / EXPORT_MARK).is_file():
            return "expected a new or empty directory, or an earlier export; this one holds other files"
    elif path.exists() or path.is_symlink():
        return "expected a directory, this is a file"
    parent = path.absolute().parent
    while not parent.exists() and not parent.is_symlink():
        parent = parent.parent
    if not parent.is_dir():
        return f"expected a place in a directory, {parent} is a file"
    if not os.access(parent, os.W_OK | os.X_OK):
        return f"nothing can be written in {parent}"
    return None
