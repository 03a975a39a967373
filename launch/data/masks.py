"""Attention masks that keep packed documents apart."""

from __future__ import annotations

from typing import Any

import torch

from launch.attention import NAME as ATTENTION
from launch.data.batches import Batch


def block_diagonal_mask(document_ids: torch.Tensor, dtype: torch.dtype = torch.bool) -> torch.Tensor:
    """Causal attention inside each document only.

    Args:
        document_ids: integer [B, S]; neighbours with equal numbers are one document.
        dtype: ``torch.bool`` (True = attend), or a floating type for the additive form, 0 = attend and the
            type's lowest finite value = not. Hugging Face's ``sdpa`` takes both, its ``eager`` adds the mask
            to the scores and so needs the additive form.

    Returns:
        [B, 1, S, S], query before key. Every token sees itself, padding included, so no softmax is over
        nothing.
    """
    if document_ids.dim() != 2:
        raise ValueError(f"document_ids must be [batch, sequence], got shape {tuple(document_ids.shape)}")
    length = document_ids.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=document_ids.device).tril()
    mask = ((document_ids[:, :, None] == document_ids[:, None, :]) & causal)[:, None]
    if dtype == torch.bool:
        return mask
    additive = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return additive.masked_fill_(~mask, torch.finfo(dtype).min)


def model_inputs(batch: Batch, *, attention: str = "sdpa", dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Keyword arguments of a Hugging Face causal model's ``forward``, labels left out.

    Args:
        attention: the model's ``config._attn_implementation``. ``flash_attention*`` and ``flex_attention``
            find the documents in the restarting positions themselves, so they get no mask.
        dtype: the type the model computes in; only ``eager`` needs it.
    """
    inputs: dict[str, Any] = {"input_ids": batch.input_ids}
    if batch.document_ids is None:
        return inputs
    inputs["position_ids"] = batch.position_ids
    if attention in ("sdpa", ATTENTION):
        inputs["attention_mask"] = block_diagonal_mask(batch.document_ids)
    elif attention == "eager":
        inputs["attention_mask"] = block_diagonal_mask(batch.document_ids, dtype)
    elif not attention.startswith(("flash_attention", "flex_attention")):
        raise ValueError(
            f"isolate_documents does not know attention {attention!r}; "
            "allowed: sdpa, eager, flash_attention_2, flash_attention_3, flex_attention"
        )
    return inputs
