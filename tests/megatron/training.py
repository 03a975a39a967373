"""Training steps and checkpoints of the small GPT in `gpt`: functions here run inside the ranks."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import torch
from gpt import Layout, batches, build, run, set_up


class Trainer:
    """A bf16 GPT under Megatron's distributed optimizer.

    Args:
        layout: how it is cut.
        recipe: of Lumen, or `local` for Megatron's own layers.
        ddp: fields of `DistributedDataParallelConfig`.
        config: fields of `TransformerConfig`.
        options: of `configure`.
    """

    def __init__(
        self,
        layout: Layout,
        recipe: str,
        *,
        ddp: dict[str, Any] | None = None,
        config: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        from lumen_megatron import host_fp8

        host_fp8.install()  # Megatron's own layers, too, need it to load what torch's Adam had
        ddp = {"use_distributed_optimizer": True, "grad_reduce_in_fp32": True, **(ddp or {})}
        precision = {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
        self.config = set_up(layout, **precision, **(config or {}))
        self.model = build(self.config, recipe, ddp=ddp, **options)
        self.config.no_sync_func = self.model.no_sync if ddp.get("overlap_grad_reduce") else None
        # Not clipped: the norm's last bit depends on how parameters lie in the buffers.
        settings = OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            bf16=True,
            params_dtype=torch.bfloat16,
            clip_grad=0.0,
            use_distributed_optimizer=True,
            overlap_param_gather=ddp.get("overlap_param_gather", False),
        )
        self.optimizer = get_megatron_optimizer(settings, [self.model])

    def step(self, number: int, micro_batches: int = 4) -> float | None:
        """One training step on the step's own data: the loss, on ranks that have it."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = run(self.model, batches(micro_batches, seed=number))
        assert self.optimizer.step()[0]
        return loss

    def steps(self, first: int, last: int) -> list[float | None]:
        """Losses of the steps from `first` to before `last`."""
        return [self.step(number) for number in range(first, last)]

    def finish_gather(self) -> None:
        """Wait for gathers of parameters that the next forward pass would have waited for."""
        if self.model.ddp_config.overlap_param_gather:
            self.model.start_param_sync(force_sync=True)

    def sharded(self, *, loading: bool, optimizer: bool = True) -> dict[str, Any]:
        """What a distributed checkpoint takes."""
        from megatron.core import parallel_state

        metadata = {
            "distrib_optim_sharding_type": "fully_reshardable",
            "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True,
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        }
        state = {"model": self.model.module.sharded_state_dict(metadata=metadata)}
        if optimizer:
            state["optimizer"] = self.optimizer.sharded_state_dict(state, is_loading=loading, metadata=metadata)
        return state

    def save(self, folder: str, *, optimizer: bool = True) -> None:
        """Write a checkpoint; a collective over all ranks."""
        from megatron.core import dist_checkpointing

        # Ranks are daemons, which may have no children; Megatron writes from forked ones.
        multiprocessing.current_process()._config["daemon"] = False
        self.finish_gather()
        Path(folder).mkdir(exist_ok=True, parents=True)
        torch.distributed.barrier()
        dist_checkpointing.save(self.sharded(loading=False, optimizer=optimizer), folder)
        torch.distributed.barrier()

    def load(self, folder: str, *, optimizer: bool = True) -> None:
        """Read one, whatever layout wrote it; without `optimizer` the masters start from the model's weights."""
        from megatron.core import dist_checkpointing

        state = dist_checkpointing.load(self.sharded(loading=True, optimizer=optimizer), folder)
        with torch.no_grad():
            self.model.module.load_state_dict(state["model"])
        if optimizer:
            self.optimizer.load_state_dict(state["optimizer"])
        else:
            self.optimizer.reload_model_params()
