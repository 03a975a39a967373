"""Processes, devices, and how a model is spread over them with FSDP2."""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from launch.config import BackendConfig, ConfigError
from lumen_core import quantize as quant
from lumen_fsdp2 import LumenPolicy, fully_shard
from lumen_fsdp2.comm import LumenAllGather, LumenReduceScatter, chosen

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# A rank may wait this long for the others: longer than writing a large checkpoint to a slow file system takes.
TIMEOUT = datetime.timedelta(minutes=30)


@dataclass(frozen=True)
class World:
    """The processes of this job, seen from one of them.

    Attributes:
        rank: of this process, 0 to size - 1.
        size: number of processes.
        device: what this process computes on.
        mesh: one-dimensional, over all processes.
    """

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and talks to the user."""
        return self.rank == 0

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums ``tensor`` over all ranks in place, without waiting for the device.

        The one reduction used for decisions: a NaN on any rank gives NaN on all of them, in whatever order the ranks
        are added up. (gloo's maximum is not like that.)
        """
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def from_main(self, value: Any) -> Any:
        """Rank 0's ``value``, on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Everybody's ``value``, by rank, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values


def choose_device(setting: str, local_rank: int) -> torch.device:
    """The device for the process with this number on its machine.

    Args:
        setting: "auto", "cpu" or "cuda" (which also means ROCm).

    Raises:
        ConfigError: a GPU was asked for and there is none, or fewer than processes.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if setting == "cuda" and count == 0:
        raise ConfigError("backend.device=cuda, but torch sees no GPU on this machine; use backend.device=cpu")
    if setting == "cpu" or count == 0:
        return torch.device("cpu")
    if local_rank >= count:
        raise ConfigError(
            f"process {local_rank} of this machine has no GPU of its own: torch sees {count}; "
            f"start at most {count} processes per machine, or set backend.device=cpu"
        )
    return torch.device("cuda", local_rank)


@contextlib.contextmanager
def join_world(device: str = "auto") -> Iterator[World]:
    """Joins the processes that torchrun (or whoever sets its variables) started, or makes a world of one.

    A process group that exists already is used and left alone.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    place = choose_device(device, local_rank)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    ours = not dist.is_initialized()
    if ours:
        # gloo beside NCCL (or RCCL, which has the same name): checkpoints and Python objects travel on the CPU.
        backend = "gloo" if place.type == "cpu" else "cpu:gloo,cuda:nccl"
        if {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
            dist.init_process_group(backend, timeout=TIMEOUT)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=TIMEOUT)
    try:
        mesh = init_device_mesh(place.type, (dist.get_world_size(),), mesh_dim_names=("dp",))
        yield World(dist.get_rank(), dist.get_world_size(), place, mesh)
    finally:
        if ours:
            dist.destroy_process_group()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def transformer_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The repeated layers of ``model``, in order, with their names.

    Those of the classes a Hugging Face model says must not be split; otherwise the entries of the outermost
    ``nn.ModuleList``s that hold parameters.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    blocks = [(name, m) for name, m in model.named_modules() if type(m).__name__ in names]
    if blocks:
        return blocks
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(name.startswith(f"{b}.") for b in found):
            for index, child in enumerate(module):
                if next(child.parameters(), None) is not None:
                    found[f"{name}.{index}"] = child
    return list(found.items())


def shard_model(
    model: nn.Module,
    world: World,
    *,
    dtype: str,
    backend: BackendConfig | None = None,
    activation_checkpointing: bool = False,
    compile: bool = False,
) -> nn.Module:
    """Spreads ``model`` over ``world`` in place: one FSDP2 group a transformer block, one for the rest.

    Parameters keep their dtype (the masters that the optimizer updates); ``dtype`` "bf16" computes with bf16 copies of
    them. Gradients are summed over ranks, not averaged: the loss is divided by the number of tokens of all ranks. The
    weights of a model that `quant.enable` prepared travel as ``backend`` says, those of any other in ``dtype``; the
    bytes of both are counted (`lumen_core.comm.meter.METER`).

    Raises:
        ConfigError: collectives were asked for that cannot be used here.
    """
    backend = BackendConfig() if backend is None else backend
    blocks = transformer_blocks(model)
    for _, block in blocks:
        # Inside the FSDP hooks, so that recomputing a block gathers its weights once and not twice. The module stays
        # what it was: no wrapper, hence no other parameter names.
        if activation_checkpointing:
            block.forward = _recomputed(block.forward)
        if compile:
            block.forward = torch.compile(block.forward, dynamic=False)
    policy = _policy(dtype, backend, quantized=quant.is_enabled(model))
    options = {"mesh": world.mesh, "mp_policy": policy, "reshard_after_forward": backend.reshard_after_forward}
    with _collectives_told(backend.collectives):
        chosen(world.mesh.get_group(), backend.collectives, world.device)  # now, not at the first gather
    for _, block in blocks:
        fully_shard(block, **options)
    # One group for everything else, which keeps tied embeddings one parameter. Its weights end the forward pass and
    # begin the backward pass, so they stay gathered in between.
    fully_shard(model, **(options | {"reshard_after_forward": False}))
    if not isinstance(policy, LumenPolicy):
        _count_bytes(model, backend)
    sum_gradients(model)
    return model


def _policy(dtype: str, backend: BackendConfig, *, quantized: bool) -> MixedPrecisionPolicy:
    """What `fully_shard` is given; without a recipe, as the model was quantized before."""
    options: dict[str, Any] = {}
    if dtype == "bf16":
        # Blocks take their inputs as they come: casting would round the rotary tables (and any fp32 mask) to bf16.
        options = {
            "param_dtype": torch.bfloat16,
            "reduce_dtype": DTYPES[backend.reduce_dtype],
            "cast_forward_inputs": False,
        }
    if not quantized:
        return MixedPrecisionPolicy(**options)
    return LumenPolicy(
        **options,
        low_precision_all_gather=backend.low_precision_all_gather,
        all_gather_mode=backend.all_gather_mode,
        wire=backend.wire,
        collectives=backend.collectives,
        low_precision_reduce_scatter=backend.low_precision_reduce_scatter,
        shard_placement=backend.shard_placement,
        print_plan=False,  # the run's own report shows it
    )


def _count_bytes(model: nn.Module, backend: BackendConfig) -> None:
    """Gives a model that is not quantized the collectives that a quantized one has, which count what they send."""
    for module in fsdp_modules(model):
        module.set_custom_all_gather(LumenAllGather(backend.collectives))
        module.set_custom_reduce_scatter(LumenReduceScatter(backend.collectives, backend.low_precision_reduce_scatter))


@contextlib.contextmanager
def _collectives_told(setting: str) -> Iterator[None]:
    """Collectives that cannot be used are the user's to change."""
    try:
        yield
    except RuntimeError as error:
        if "MORI" not in str(error):
            raise
        raise ConfigError(f"backend.collectives={setting}: {error}; use backend.collectives=auto") from error


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    """The modules of ``model`` that FSDP2 manages; the root need not be one."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def sum_gradients(model: nn.Module) -> None:
    """Makes every FSDP2 group of ``model`` add gradients over ranks instead of averaging them."""
    for module in fsdp_modules(model):  # neither setter reaches the groups below its module
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward`` with its activations dropped and computed again in the backward pass."""

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run


@contextlib.contextmanager
def gradient_sync(model: nn.Module, enabled: bool) -> Iterator[None]:
    """Whether backward passes in this context reduce gradients over ranks; always on again afterwards."""
    modules = [] if enabled else fsdp_modules(model)
    for module in modules:
        module.set_requires_gradient_sync(False, recurse=False)
    try:
        yield
    finally:
        for module in modules:
            module.set_requires_gradient_sync(True, recurse=False)
