"""A small GPT of Megatron-Core on gloo ranks: built, run and compared. Functions here run inside the ranks."""

from __future__ import annotations

import dataclasses
import re
import zlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F


def start(rank: int, size: int) -> None:
    """What a new rank does first. Not in conftest: ranks find functions by their module's name, which several have."""
    from lumen_megatron import cpu

    cpu.install()


def some(quick: list[Any], slow: list[Any]) -> list[Any]:
    """Parameters of a test: `quick` ones for `make test`, `slow` ones for `make test-full`."""
    return [*quick, *(pytest.param(each, marks=pytest.mark.slow) for each in slow)]


SEQUENCE, BATCH, VOCABULARY = 256, 2, 128


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a model is cut: sizes of the parallel groups, and sequence parallelism."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    sp: bool = False

    def __str__(self) -> str:
        return f"tp{self.tp}{'sp' if self.sp else ''}pp{self.pp}cp{self.cp}ep{self.ep}"


def set_up(layout: Layout, **overrides: Any) -> Any:
    """Process groups and random states for `layout`, and its `TransformerConfig`."""
    from megatron.core import tensor_parallel
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.transformer.transformer_config import TransformerConfig

    groups_for(layout)
    tensor_parallel.model_parallel_cuda_manual_seed(123)
    settings = dict(
        num_layers=2, hidden_size=256, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=256,
        gated_linear_unit=True, activation_func=F.silu, normalization="RMSNorm", add_bias_linear=False,
        use_cpu_initialization=True, gradient_accumulation_fusion=False, bias_dropout_fusion=False,
        bias_activation_fusion=False, masked_softmax_fusion=False, hidden_dropout=0.0, attention_dropout=0.0,
        pipeline_dtype=torch.float32, tensor_model_parallel_size=layout.tp, sequence_parallel=layout.sp,
        pipeline_model_parallel_size=layout.pp, context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
    )  # fmt: skip
    config = TransformerConfig(**{**settings, **overrides})
    config.finalize_model_grads_func = finalize_model_grads
    return config


_groups: list[Layout] = []


def groups_for(layout: Layout) -> None:
    """Megatron's process groups; those of another layout are ended first: each has threads of its own."""
    from megatron.core import parallel_state

    layout = dataclasses.replace(layout, sp=False)
    if _groups == [layout]:
        return
    parallel_state.destroy_model_parallel()
    world = torch.distributed.distributed_c10d._world
    for group in [g for g in world.pg_map if g is not torch.distributed.group.WORLD]:
        torch.distributed.destroy_process_group(group)
    parallel_state.initialize_model_parallel(
        layout.tp, layout.pp, context_parallel_size=layout.cp, expert_model_parallel_size=layout.ep
    )
    _groups[:] = [layout]


def build(config: Any, recipe: str, *, ddp: dict[str, Any] | None = None, labels: bool = True, **options: Any) -> Any:
    """GPT of `config` in DDP; `recipe` is one of Lumen's, or `local` for Megatron's own layers.

    Args:
        labels: False for a model that gives whole logits rather than losses.
    """
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.module import Float16Module

    from lumen_megatron.options import configure
    from lumen_megatron.spec import block_spec

    if recipe == "local":
        spec = get_gpt_decoder_block_spec(config, False, normalization=config.normalization)
    else:
        spec = block_spec(configure(config, recipe, **options))
    torch.manual_seed(1)
    model = GPTModel(
        config,
        spec,
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        parallel_output=labels,
    )
    if config.bf16:
        model = Float16Module(config, model)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(**(ddp or {})), model)
    initialize(model)
    return model


def initialize(model: Any) -> None:
    """Values that depend on a parameter's name only: pipeline stages would draw others than one rank does."""
    from megatron.core import parallel_state

    tp, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    with torch.no_grad():
        for name, (parameter, cut, stride) in pieces(model, parameters=True).items():
            shape = list(parameter.shape)
            if cut >= 0:
                shape[cut] *= tp
            values = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
            values = values * 0.05 if parameter.dim() > 1 else 1 + 0.1 * values
            if cut >= 0:
                values = torch.cat([part.chunk(tp, cut)[rank] for part in values.chunk(stride, cut)], cut)
            parameter.copy_(values)


def batches(count: int, seed: int = 3) -> list[torch.Tensor]:
    """Micro-batches of tokens `[BATCH, SEQUENCE]`."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCABULARY, (BATCH, SEQUENCE), generator=generator) for _ in range(count)]


def run(model: Any, tokens: list[torch.Tensor], *, forward_only: bool = False, linear: bool = False) -> float | None:
    """Forward and backward of the global micro-batches `tokens`: the mean loss, on ranks that have it.

    Args:
        linear: a fixed linear function of the logits in place of the cross-entropy, which is computed in fp32.
    """
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    replica, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    cp, cp_rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    own = tokens[replica::replicas]
    position = torch.arange(SEQUENCE)
    if cp > 1:  # chunks r and 2n-1-r of 2n
        chunks = position.chunk(2 * cp)
        position = torch.cat([chunks[cp_rank], chunks[2 * cp - 1 - cp_rank]])
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE).triu(1).bool()

    def forward_step(iterator: Any, chunk: Any) -> Any:
        ids = next(iterator)[:, position]
        if linear:
            weights = torch.randn(SEQUENCE, VOCABULARY, generator=torch.Generator().manual_seed(9))[position]
            logits = chunk(ids, position[None].expand(BATCH, -1), mask)
            if not parallel_state.is_pipeline_last_stage():
                return logits, lambda losses: losses
            scores = (logits * weights).sum(-1)
            return scores, lambda losses: (losses.mean() / cp, {"loss": losses.mean().detach()})
        out = chunk(ids, position[None].expand(BATCH, -1), mask, labels=ids)
        return out, lambda losses: (losses.mean() / cp, {"loss": losses.mean().detach()})

    answers = get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=iter(own), model=[model], num_microbatches=len(own),
        seq_length=SEQUENCE, micro_batch_size=BATCH, forward_only=forward_only,
    )  # fmt: skip
    if not answers:
        return None
    loss = torch.stack([answer["loss"] for answer in answers]).mean()
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    torch.distributed.all_reduce(loss, group=group)
    return (loss / torch.distributed.get_world_size(group)).item()


def bare(model: Any) -> Any:
    """The GPT inside of its wrappers."""
    while hasattr(model, "module"):
        model = model.module
    return model


def pieces(model: Any, *, parameters: bool = False) -> dict[str, tuple[torch.Tensor, int, int]]:
    """`{name: (gradient or parameter, dimension it is cut along or -1, stride)}` by names of the whole model."""
    out = {}
    model = bare(model)
    layers = {f"decoder.layers.{i}.": layer.layer_number - 1 for i, layer in enumerate(model.decoder.layers)}
    experts = model.config.num_moe_experts or 0
    first_expert = experts // model.config.expert_model_parallel_size * _expert_rank()
    for name, parameter in model.named_parameters():
        for prefix, number in layers.items():
            if name.startswith(prefix):
                name = f"decoder.layers.{number}.{name[len(prefix) :]}"
                break
        name = re.sub(r"local_experts\.(\d+)", lambda found: f"expert.{int(found[1]) + first_expert}", name)
        cut = parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else -1
        stride = 2 if "linear_fc1" in name and cut == 0 else 1
        out[name] = (parameter if parameters else parameter.main_grad.clone(), cut, stride)
    return out


def _expert_rank() -> int:
    from megatron.core import parallel_state

    return parallel_state.get_expert_model_parallel_rank()


def whole(parts: list[dict[str, tuple[torch.Tensor, int, int]]], tp: int) -> dict[str, torch.Tensor]:
    """Whole tensors from the `pieces` of all ranks; of tensor-parallel groups the first ranks of each stage."""
    out: dict[str, torch.Tensor] = {}
    for first in range(0, len(parts), tp):
        group = parts[first : first + tp]
        for name, (tensor, cut, stride) in group[0].items():
            if cut < 0:
                out.setdefault(name, tensor)
                continue
            shards = [part[name][0].chunk(stride, dim=cut) for part in group]
            out.setdefault(name, torch.cat([s[i] for i in range(stride) for s in shards], dim=cut))
    return out
