"""Our attention in Hugging Face models, through their `AttentionInterface`.

    model = AutoModelForCausalLM.from_config(config, attn_implementation=register_attention(recipe="fp8"))

Documents packed in a row are told by their `position_ids` (each begins where a position is not its predecessor plus
one), on the device: nothing waits for the host. No mask function is registered for the name, so Hugging Face builds no
mask and drops a two-dimensional padding mask: pad on the right, where a causal model's own tokens never look.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lumen_core.attention import RECIPES, attend, attention
from lumen_core.attention_bounds import position_bounds

NAME = "lumen"


def register_attention(name: str = NAME, recipe: str = "bf16", packed: bool = True) -> str:
    """Register the attention function with Hugging Face; a name that is registered already is replaced.

    Args:
        name: what `attn_implementation` calls it.
        recipe: as in `lumen_core.attention.attention`.
        packed: rows may hold several documents. Without, `position_ids` are not read and BF16 runs through SDPA.

    Returns:
        name.

    Raises:
        ValueError: unknown recipe.
    """
    from transformers import AttentionInterface

    if recipe not in RECIPES:
        raise ValueError(f"recipe={recipe!r}: must be one of {', '.join(RECIPES)}")

    def function(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        return _attend(*args, recipe=recipe, packed=packed, **kwargs)

    AttentionInterface.register(name, function)
    return name


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    recipe: str,
    packed: bool,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    position_ids: torch.Tensor | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **ignored: Any,
) -> tuple[torch.Tensor, None]:
    """Hugging Face's signature: q, k, v `[B, H, S, D]`, output `[B, S, H, D]` and no weights.

    Raises:
        ValueError: what this attention does not have: a mask of four dimensions, dropout, soft-capped scores, a sink.
    """
    for what, asked in (
        ("an attention mask (pass position_ids for packed documents)", attention_mask is not None),
        ("dropout", dropout != 0.0),
        ("softcap", softcap is not None),
        ("an attention sink", s_aux is not None),
    ):
        if asked:
            raise ValueError(f"lumen attention does not support {what}")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    # Hugging Face counts the query itself.
    left = -1 if sliding_window is None else sliding_window - 1
    window = None if sliding_window is None else (left, 0 if causal else left)
    # Rotated queries and keys may arrive in fp32.
    q, k, v = (x.to(value.dtype).transpose(1, 2) for x in (query, key, value))
    # With a cache, queries are fewer than keys: the end of one document, whatever their positions.
    if not packed or position_ids is None or q.shape[1] != k.shape[1]:
        return attention(q, k, v, causal=causal, scale=scaling, window=window, recipe=recipe), None
    bounds = position_bounds(position_ids, causal, window)
    out, _ = attend(q, k, v, bounds, scale=scaling, recipe=recipe, causal=causal, only_causal=False)
    return out, None
