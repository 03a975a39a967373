"""Hugging Face causal language models: built from numbers (offline), or read from a local directory.

Initial weights depend on the seed, the parameter's name and its shape only: every device, every world size and every
way of sharding starts from the same bits. Each block of rows has a generator of its own, so a rank draws only the
rows it holds.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from launch.attention import register_attention
from launch.config import ConfigError, ModelConfig

_BLOCK = 1 << 20  # values drawn from one generator; part of what a seed means, so never change it


def hf_config(model: ModelConfig, vocab_size: int) -> Any:
    """The Hugging Face configuration of ``model``; ``vocab_size`` is the tokenizer's and may be smaller.

    Raises:
        ConfigError: the tokenizer has more entries than the model.
    """
    from transformers import AutoConfig

    if model.path is not None:
        if not (Path(model.path).expanduser() / "config.json").is_file():
            raise ConfigError(f"model.path={model.path}: there is no config.json in it")
        with _usable(model.path, "config.json"):
            config = AutoConfig.from_pretrained(Path(model.path).expanduser(), local_files_only=True)
        if getattr(config, "quantization_config", None) is not None:
            raise ConfigError(f"model.path={model.path}: its weights are stored quantized; use an unquantized model")
    else:
        config = AutoConfig.for_model(model.architecture, **_numbers(model, vocab_size))
    if vocab_size > config.vocab_size:
        key = "model.vocab_size" if model.path is None else f"vocab_size of model.path={model.path}"
        raise ConfigError(f"{key}={config.vocab_size}: expected at least the tokenizer's {vocab_size} entries")
    return config


@contextlib.contextmanager
def _usable(path: str, what: str) -> Iterator[None]:
    """The many kinds of error that Hugging Face has for a broken directory, as one line that names the file."""
    try:
        yield
    except (ConfigError, ImportError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"model.path={path}: {what} cannot be read: {reason}") from error


def _damaged(path: str) -> str | None:
    """Name of the first safetensors file in ``path`` whose header cannot be read; None where all are fine."""
    from safetensors import safe_open

    for file in sorted(Path(path).expanduser().glob("*.safetensors")):
        try:
            with safe_open(str(file), framework="pt"):
                pass
        except Exception:  # safetensors has an error class of its own for each version
            return file.name
    return None


def _numbers(model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_theta": model.rope_theta, "rope_type": model.rope_scaling.rope_type}
    if model.rope_scaling.rope_type != "default":
        rope["factor"] = model.rope_scaling.factor
    if model.rope_scaling.rope_type == "llama3":
        for name in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
            rope[name] = getattr(model.rope_scaling, name)
    same = (
        "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
        "max_position_embeddings rms_norm_eps tie_word_embeddings attention_bias initializer_range"
    ).split()
    if model.architecture == "qwen3_moe":
        same += ("num_experts num_experts_per_tok moe_intermediate_size norm_topk_prob router_aux_loss_coef").split()
    numbers = {name: getattr(model, name) for name in same}
    numbers["head_dim"] = model.head_dim or model.hidden_size // model.num_attention_heads
    numbers["vocab_size"] = model.vocab_size or vocab_size
    numbers["rope_parameters"] = rope
    numbers.update(bos_token_id=None, eos_token_id=None, pad_token_id=None)  # the tokenizer's business
    return numbers


def build_model(
    model: ModelConfig,
    vocab_size: int,
    seq_length: int | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> nn.Module:
    """A causal language model in training mode, with SDPA attention and no key/value cache.

    Args:
        model: sizes, or ``path`` of a local Hugging Face directory of safetensors.
        vocab_size: entries of the tokenizer.
        seq_length: longest sequence it will see.
        dtype: of every parameter; rotary tables stay fp32.
        device: where it is built. With ``model.init_on_meta`` it comes back on the meta device whatever this says:
            shard it, then call `materialize`.
        seed: of the initial weights; unused with ``path``.

    Raises:
        ConfigError: sizes and tokenizer do not fit, or the directory lacks weights of the model.
    """
    config = hf_config(model, vocab_size)
    limit = config.max_position_embeddings
    if seq_length is not None and seq_length > limit:
        raise ConfigError(f"train.seq_length={seq_length}: expected at most the model's {limit} positions")
    if model.path is not None and not model.init_on_meta:
        built = _pretrained(model.path, config, dtype).to(torch.device(device))
        return _ready(built)
    built = empty_model(config, dtype)
    if not model.init_on_meta:
        materialize(built, model, device=device, seed=seed)
    return _ready(built)


def empty_model(config: Any, dtype: torch.dtype) -> nn.Module:
    """The model of a Hugging Face configuration on the meta device: shapes, no memory."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=register_attention())


def _ready(built: nn.Module) -> nn.Module:
    built.config.use_cache = False  # type: ignore[union-attr]  # a cache per layer is of no use in training
    if getattr(built.config, "router_aux_loss_coef", None):
        built.config.output_router_logits = True  # type: ignore[union-attr]  # or there is no load-balancing loss
    return built.train()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No Hugging Face progress bars and warnings in this context: a run has a display of its own."""
    from transformers.utils import logging

    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _pretrained(path: str, config: Any, dtype: torch.dtype) -> nn.Module:
    from transformers import AutoModelForCausalLM

    with quiet(), _usable(path, _damaged(path) or "its weights"):
        built, info = AutoModelForCausalLM.from_pretrained(
            Path(path).expanduser(),
            config=config,
            dtype=dtype,
            attn_implementation=register_attention(),
            local_files_only=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # to be reported below like the others
            output_loading_info=True,
        )
    for what in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        names = sorted(str(n) for n in info.get(what) or ())
        if names:  # Hugging Face only warns, and trains on random weights
            some = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
            raise ConfigError(f"model.path={path}: {len(names)} {what.replace('_', ' ')} in its weights ({some})")
    return built


def materialize(
    built: nn.Module, model: ModelConfig, *, device: torch.device | str = "cpu", seed: int = 0
) -> nn.Module:
    """Give a model on the meta device its memory and its weights, in place; sharded parameters stay sharded.

    Collective when parameters are sharded and ``model.path`` is set: the first rank reads and scatters.
    """
    allocate(built, device)
    if model.path is None:
        initialize(built, std=built.config.initializer_range, seed=seed)  # type: ignore[union-attr]
    else:
        _load(built, model.path)
    return built


def allocate(built: nn.Module, device: torch.device | str) -> None:
    """Move a model from the meta device to ``device``: rotary tables right, tied weights tied, weights not yet set."""
    ties = _ties(built)
    if any(p.is_meta for p in built.parameters()):
        built.to_empty(device=torch.device(device))
        for owners in ties:
            for module, name in owners[1:]:
                module._parameters[name] = getattr(*owners[0])
    _fill_buffers(built)


def _ties(built: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Places that hold one and the same parameter (`nn.Module.to_empty` gives each a parameter of its own)."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in built.modules():
        for name, param in module._parameters.items():
            if param is not None:
                places.setdefault(id(param), []).append((module, name))
    return [owners for owners in places.values() if len(owners) > 1]


def _fill_buffers(built: nn.Module) -> None:
    """Recompute the rotary tables: they are in no state dict, and `to_empty` leaves garbage in them."""
    for path, module in built.named_modules():
        own = dict(module.named_buffers(recurse=False))
        if not own:
            continue
        if "inv_freq" not in own or not hasattr(module, "config"):
            raise NotImplementedError(f"the buffers of {path or 'the model'} ({', '.join(own)}) cannot be recomputed")
        fresh = dict(type(module)(module.config).named_buffers(recurse=False))
        for name, buffer in own.items():
            buffer.copy_(fresh[name])


def plain_name(name: str) -> str:
    """A parameter's name without what activation checkpointing and torch.compile insert."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


@torch.no_grad()
def initialize(built: nn.Module, *, std: float, seed: int) -> None:
    """Draw every parameter anew: matrices from N(0, std), biases zero, norm weights one."""
    for name, param in built.named_parameters():
        _draw_into(param, plain_name(name), std, seed)


def _draw_into(param: torch.Tensor, name: str, std: float, seed: int) -> None:
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    shape = tuple(param.shape)
    if not isinstance(param, DTensor):
        param.copy_(_draw(name, shape, std, seed, 0, shape[0]))
        return
    mesh, placements = param.device_mesh, param.placements
    cuts = [i for i, p in enumerate(placements) if not p.is_replicate()]
    local = param.to_local()
    if not cuts:
        local.copy_(_draw(name, shape, std, seed, 0, shape[0]))
    elif len(cuts) == 1 and type(placements[cuts[0]]) is Shard and placements[cuts[0]].is_shard(0):
        step = -(-shape[0] // mesh.size(cuts[0]))
        start = min(shape[0], step * mesh.get_local_rank(cuts[0]))
        local.copy_(_draw(name, shape, std, seed, start, min(shape[0], start + step)))
    else:  # cut along another dimension or twice: every rank draws all of it and keeps its part
        full = _draw(name, shape, std, seed, 0, shape[0]).to(local.device, local.dtype)
        local.copy_(distribute_tensor(full, mesh, placements, src_data_rank=None).to_local())


def _draw(name: str, shape: tuple[int, ...], std: float, seed: int, start: int, stop: int) -> torch.Tensor:
    """Rows ``start`` to ``stop`` of the initial value of parameter ``name``, fp32 on the CPU."""
    rows = stop - start
    if len(shape) < 2:
        return torch.full((rows,), 0.0 if name.endswith("bias") else 1.0)
    per_block = max(1, _BLOCK // max(1, torch.Size(shape[1:]).numel()))
    out = torch.empty(rows, *shape[1:])
    for block in range(start // per_block, -(-stop // per_block) if rows else 0):
        first, last = block * per_block, min(shape[0], (block + 1) * per_block)
        digest = hashlib.sha256(f"{seed}/{name}/{block}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        values = torch.empty(last - first, *shape[1:]).normal_(0.0, std, generator=generator)
        low, high = max(first, start), min(last, stop)
        out[low - start : high - start] = values[low - first : high - first]
    return out


@torch.no_grad()
def _load(built: nn.Module, path: str) -> None:
    """Weights of the directory ``path`` into ``built``, whose parameters may be sharded."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    sharded = any(isinstance(p, DTensor) for p in built.parameters())
    reads = not sharded or torch.distributed.get_rank() == 0
    source: dict[str, torch.Tensor] = {}
    problem: list[Any] = [None]
    if reads:
        try:
            loaded = _pretrained(path, built.config, next(built.parameters()).dtype)  # type: ignore[arg-type]
            source = dict(loaded.named_parameters(remove_duplicate=False))
        except (ConfigError, OSError) as error:
            problem = [error]
    if sharded:  # a rank that fails alone leaves the others waiting in the first scatter
        torch.distributed.broadcast_object_list(problem, src=0)
    if problem[0] is not None:
        raise problem[0]
    for name, param in built.named_parameters():
        value = source.get(plain_name(name))
        if not isinstance(param, DTensor):
            param.copy_(value)  # type: ignore[arg-type]
            continue
        local = param.to_local()
        full = torch.empty(param.shape, dtype=local.dtype, device=local.device) if value is None else value
        full = full.detach().to(local.device, local.dtype)
        local.copy_(distribute_tensor(full, param.device_mesh, param.placements).to_local())


def count_parameters(built: nn.Module) -> int:
    """Parameters of the whole model, tied ones once."""
    return sum(p.numel() for p in built.parameters())
