"""Training GPT with Megatron's optimizers, data parallelism and interleaved pipelines."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpt import Layout, batches, build, run, set_up, some

STEPS = 6
DISTRIBUTED = {"use_distributed_optimizer": True}
OVERLAP = {**DISTRIBUTED, "overlap_grad_reduce": True, "overlap_param_gather": True}


def _train(
    rank: int, size: int, recipe: str, ddp: dict[str, Any], dtype: torch.dtype, options: dict[str, Any]
) -> list[float]:
    """Losses of some steps with Adam; the last ranks of a pipeline have them."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    half = {"bf16": True, "params_dtype": dtype, "pipeline_dtype": dtype} if dtype == torch.bfloat16 else {}
    model = build(set_up(Layout(), **half), recipe, ddp=ddp, **options)
    settings = {"use_distributed_optimizer": ddp.get("use_distributed_optimizer", False), "bf16": bool(half)}
    overlap = ddp.get("overlap_param_gather", False)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=3e-3, params_dtype=dtype, clip_grad=1.0, overlap_param_gather=overlap, **settings
        ),
        [model],
    )
    losses = []
    for _ in range(STEPS):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses.append(run(model, batches(4)))
        optimizer.step()
    return losses


@pytest.mark.parametrize("recipe", some(["delayed"], ["bf16", "tensorwise", "mxfp8"]))
def test_every_way_of_data_parallelism_trains_alike(ranks, recipe: str) -> None:
    call = (recipe, {}, torch.float32, {})
    alone = ranks(1).run(_train, *call, seconds=60.0)[0]
    assert alone[-1] < alone[0] - 0.5
    for ddp in ({}, DISTRIBUTED, OVERLAP):
        for losses in ranks(2).run(_train, recipe, ddp, torch.float32, {}, seconds=60.0):
            assert losses == pytest.approx(alone, rel=1e-6 if recipe == "bf16" else 5e-3), ddp


@pytest.mark.parametrize("ddp", some([OVERLAP], [DISTRIBUTED]))
def test_gradients_in_main_grad_train_alike(ranks, ddp: dict[str, Any]) -> None:
    """Added inside backward, a gradient is not rounded to the parameters' precision on its way: fp32 here."""
    apart, fused = (
        ranks(2).run(_train, "mxfp8", ddp, torch.float32, {"fuse_main_grad": fuse}, seconds=60.0)[0]
        for fuse in (False, True)
    )
    assert fused == pytest.approx(apart, rel=1e-6)


@pytest.mark.slow
def test_bf16_parameters(ranks) -> None:
    local, ours, low = (
        ranks(2).run(_train, recipe, DISTRIBUTED, torch.bfloat16, {}, seconds=90.0)[0]
        for recipe in ("local", "bf16", "mxfp8")
    )
    assert ours == local
    assert low == pytest.approx(local, rel=0.03) and low != local and low[-1] < low[0] - 0.5


def _interleaved(rank: int, size: int, recipe: str) -> list[list[float]]:
    """Losses of a pipeline of two ranks with two chunks each."""
    import gpt
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from lumen_megatron.options import configure
    from lumen_megatron.spec import block_spec

    stages = size > 1
    cut = {"virtual_pipeline_model_parallel_size": 2} if stages else {}
    # Two ranks are each other's next and previous one: gloo cannot tell the messages of one batch apart.
    config = set_up(Layout(pp=size), num_layers=4, batch_p2p_comm=False, overlap_p2p_comm=stages, **cut)
    configure(config, recipe)
    if stages:
        parallel_state.set_virtual_pipeline_model_parallel_world_size(2)
    chunks = []
    for stage in range(2 if stages else 1):
        ends = {}
        if stages:
            ends = {
                "pre_process": parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
                "post_process": parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
                "vp_stage": stage,
            }
        model = GPTModel(
            config, block_spec(config, vp_stage=stage if stages else None), gpt.VOCABULARY, gpt.SEQUENCE,
            position_embedding_type="rope", **ends,
        )  # fmt: skip
        model.model_type = None
        gpt.initialize(model)
        chunks.append(model)
    config.finalize_model_grads_func = None
    config.no_sync_func = None
    tokens = batches(4)
    mask = torch.ones(1, 1, gpt.SEQUENCE, gpt.SEQUENCE).triu(1).bool()

    def forward_step(iterator: Any, chunk: Any) -> Any:
        ids = next(iterator)
        out = chunk(ids, torch.arange(gpt.SEQUENCE)[None].expand(2, -1), mask, labels=ids)
        return out, lambda losses: (losses.mean(), {"loss": losses.mean().detach().item()})

    seen = []
    for _ in range(3):
        for parameter in (p for chunk in chunks for p in chunk.parameters()):
            parameter.grad = None
        answers = get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=[iter(tokens) for _ in chunks] if stages else iter(tokens),
            model=chunks if stages else chunks[0], num_microbatches=4, seq_length=gpt.SEQUENCE, micro_batch_size=2,
            forward_only=False,
        )  # fmt: skip
        with torch.no_grad():
            for parameter in (p for chunk in chunks for p in chunk.parameters()):
                parameter -= 0.5 * parameter.grad
        seen.append([answer["loss"] for answer in answers])
    if stages:
        parallel_state.set_virtual_pipeline_model_parallel_world_size(None)
        parallel_state.set_virtual_pipeline_model_parallel_rank(None)
    return seen


@pytest.mark.parametrize("recipe", some(["delayed"], ["mxfp8"]))
def test_interleaved_pipeline(ranks, recipe: str) -> None:
    want = ranks(1).run(_interleaved, recipe, seconds=60.0)[0]
    got = ranks(2).run(_interleaved, recipe, seconds=60.0)[-1]
    assert got == [pytest.approx(step, rel=1e-6) for step in want]
    assert want[-1] != want[0]
