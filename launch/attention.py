"""The attention that our Hugging Face models use: torch's SDPA, registered under a name of our own.

Two things differ from the library's own `sdpa`. Hugging Face builds no mask for a name it knows no mask function of:
to find out whether a batch is packed it would read a tensor on the host in every forward, and wait for the GPU. And
rotated queries and keys may arrive in fp32 (see `launch.rope`); they are rounded to the values' dtype here, once.
"""

from __future__ import annotations

from typing import Any

from torch import nn

NAME = "lumen_sdpa"


def register_attention() -> str:
    """Register the function with Hugging Face and return the name for `attn_implementation`."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attend)
    return NAME


def _attend(module: nn.Module, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
    """Causal without a mask; a boolean or additive 4-D mask (packed documents) is taken as it is."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(module, query.to(value.dtype), key.to(value.dtype), value, attention_mask, **kwargs)
