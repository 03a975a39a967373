"""Rotary embeddings in fp32 under bf16 training.

Hugging Face rounds the cosine and sine tables to the dtype of the hidden states. In bf16 their error is up to 2e-3,
where a neighbouring position differs by less at low frequencies: far positions blur. Tables of 2 x sequence x head_dim
values cost nothing in fp32, so they stay there and queries and keys are rounded once, after the rotation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def keep_rotary_tables_fp32(model: nn.Module) -> int:
    """Makes the rotary modules of a Hugging Face ``model`` return fp32 tables; returns how many there are."""
    modules = [m for m in model.modules() if type(m).__name__.endswith("RotaryEmbedding")]
    for module in modules:
        module.register_forward_pre_hook(_as_fp32)
    if modules:
        _accept_fp32_queries()
    return len(modules)


def _as_fp32(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The first argument only tells device and dtype."""
    like, *rest = args
    return (torch.empty(0, dtype=torch.float32, device=like.device), *rest)


def _accept_fp32_queries() -> None:
    """Has Hugging Face's attention round rotated queries and keys to the dtype of the values.

    Registered under the name it had, and the same as before for tensors of one dtype.
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def attend(module: nn.Module, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        return sdpa_attention_forward(module, query.to(value.dtype), key.to(value.dtype), value, *args, **kwargs)

    AttentionInterface.register("sdpa", attend)
