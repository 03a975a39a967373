"""Core attention of a Megatron layer: Lumen's operation, Megatron's unfused module, or TransformerEngine's."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType

from lumen_core.attention import attend, attention
from lumen_core.attention_bounds import Window
from lumen_megatron.context import GatherTokens, bounds_of, gathered_order, whole_positions
from lumen_megatron.options import options_of

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)
_STOCK_ARGUMENTS = set(inspect.signature(DotProductAttention.__init__).parameters)


class LumenCoreAttention(DotProductAttention):
    """`softmax(q k^T) v` for queries, keys and values `[s, b, heads, d]`, or packed `[t, heads, d]`.

    By `lumen_core.attention` where `attention_backend` says so and for what Megatron's module cannot do: FP8 and MXFP8,
    packed documents, context parallelism, values of another width than keys (multi-latent attention).

    Where TransformerEngine is to compute attention, the constructor gives Megatron's wrapper of its module instead, so
    that names in checkpoints are those of a TransformerEngine model.

    Raises:
        ValueError: from the constructor, for options that nobody computes together, or a missing TransformerEngine.
    """

    def __new__(cls, config: Any, *args: Any, **kwargs: Any) -> Any:
        options = options_of(config)
        if options.attention_backend == "te" or (options.attention_backend == "auto" and options.attention == "bf16"):
            module = _transformer_engine()
            if module is not None:
                return module(config, *args, **kwargs)
            if options.attention_backend == "te":
                raise ValueError("attention_backend=te: transformer_engine is not installed; auto takes what is there")
        return super().__new__(cls)

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **kwargs: Any,
    ) -> None:
        # The parent refuses context parallelism, which is handled here.
        alone = copy.copy(config)
        alone.context_parallel_size = 1
        known = {name: value for name, value in kwargs.items() if name in _STOCK_ARGUMENTS}
        super().__init__(alone, layer_number, attn_mask_type, attention_type, attention_dropout, softmax_scale, **known)
        self.config = config
        self.cp_group = parallel_state.get_context_parallel_group() if config.context_parallel_size > 1 else None
        if softmax_scale is None and k_channels is not None:
            self.softmax_scale = k_channels**-0.5
        options = options_of(config)
        self.recipe = options.attention
        self.window: Window | None = getattr(self.scale_mask_softmax, "window_size", None)
        self.uneven = k_channels is not None and k_channels != v_channels
        backend = options.attention_backend
        self._prefers_own = backend == "lumen" or self.recipe != "bf16" or (backend == "auto" and _on_gpu(config))
        self._cannot = self._unsupported()
        must = self._must()
        if must and self._cannot:
            raise ValueError(f"layer {layer_number}: {must} needs Lumen's attention, which does not do {self._cannot}")
        if must and backend == "megatron":
            raise ValueError(f"layer {layer_number}: attention_backend=megatron does not do {must}")
        self._prefers_own |= bool(must)

    def _unsupported(self) -> str:
        dropout = self.attention_dropout.p
        if dropout > 0:
            return f"attention_dropout={dropout}"
        if getattr(self.config, "softmax_type", "vanilla") != "vanilla":
            return f"softmax_type={self.config.softmax_type}"
        if self.config.apply_query_key_layer_scaling:
            return "apply_query_key_layer_scaling"
        return ""

    def _must(self) -> str:
        if self.recipe != "bf16":
            return f"attention={self.recipe}"
        if self.cp_group is not None:
            return f"context_parallel_size={self.config.context_parallel_size}"
        return "multi-latent attention" if self.uneven else ""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """`[s, b, heads * d]`, or packed `[t, heads * d]`.

        Raises:
            ValueError: a bias or a mask that is no causal one, where Megatron's module cannot help.
        """
        mask_type = attn_mask_type or self.attn_mask_type
        reason = self._cannot
        if attention_bias is not None:
            reason = "attention_bias"
        elif mask_type not in (*_CAUSAL, AttnMaskType.no_mask):
            reason = f"an attention mask of type {mask_type.name}"
        if packed_seq_params is None and self.cp_group is None and not self.uneven and self.recipe == "bf16":
            if reason or not self._prefers_own:
                return super().forward(query, key, value, attention_mask, attn_mask_type=mask_type, attention_bias=None)
        if reason:
            raise ValueError(f"layer {self.layer_number}: attention with {reason} is not supported here")
        width = value.shape[-1]
        if width != query.shape[-1]:  # one head size for all: zeros add nothing to a score, and are cut off again
            value = torch.nn.functional.pad(value, (0, query.shape[-1] - width))
        causal = mask_type in _CAUSAL
        if packed_seq_params is not None:
            out = self._packed(query, key, value, causal, packed_seq_params)
        else:
            out = self._dense(query, key, value, causal)
        return out[..., :width].reshape(*out.shape[:-2], -1)

    def _dense(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        options = {"scale": self.softmax_scale, "recipe": self.recipe}
        if self.cp_group is None:
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
            return attention(q, k, v, causal=causal, window=self.window, **options).transpose(0, 1)
        ranks = self.config.context_parallel_size
        lengths = torch.tensor([q.shape[0] * ranks], device=q.device)
        q, k, v, bounds = self._spread(q, k, v, lengths, causal)
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        return attend(q, k, v, bounds, causal=causal, only_causal=False, **options)[0].transpose(0, 1)

    def _packed(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, packed: Any) -> torch.Tensor:
        # Padded offsets say where documents lie; the tokens between them and the real ends are of no document.
        cu = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
        options = {"scale": self.softmax_scale, "recipe": self.recipe}
        if self.cp_group is None:
            cu_k = packed.cu_seqlens_kv if packed.cu_seqlens_kv_padded is None else packed.cu_seqlens_kv_padded
            return attention(
                q, k, v, causal=causal, window=self.window, cu_seqlens_q=cu.int(),
                cu_seqlens_k=None if cu_k is None else cu_k.int(), **options,
            )  # fmt: skip
        q, k, v, bounds = self._spread(q, k, v, cu.diff(), causal)
        q, k, v = (x[None] for x in (q, k, v))
        return attend(q, k, v, bounds, causal=causal, only_causal=False, **options)[0][0]

    def _spread(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Queries of this rank, keys and values of all in the sequences' order, and what the queries see."""
        group, ranks = self.cp_group, self.config.context_parallel_size
        rank = torch.distributed.get_rank(group)
        order = gathered_order(lengths, ranks, q.shape[0])
        k, v = (GatherTokens.apply(x, group).index_select(0, order) for x in (k, v))
        positions = whole_positions(lengths, rank, ranks, q.shape[0])
        return q, k, v, bounds_of(lengths, positions, causal, self.window)


def _transformer_engine() -> type | None:
    """Megatron's wrapper of TransformerEngine's attention, or None where that is not installed."""
    from megatron.core.extensions import transformer_engine

    return transformer_engine.TEDotProductAttention if transformer_engine.HAVE_TE else None


def _on_gpu(config: Any) -> bool:
    return torch.cuda.is_available() and not config.use_cpu_initialization or torch.version.hip is not None
