"""Rotary embeddings in fp32 under bf16 training.

Hugging Face rounds the cosine and sine tables to the dtype of the hidden states. In bf16 their error is up to 2e-3,
where a neighbouring position differs by less at low frequencies: far positions blur. Tables of 2 x sequence x head_dim
values cost nothing in fp32, so they stay there; `launch.attention` rounds queries and keys once, after the rotation.
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
    return len(modules)


def _as_fp32(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The first argument only tells device and dtype."""
    like, *rest = args
    return (torch.empty(0, dtype=torch.float32, device=like.device), *rest)
