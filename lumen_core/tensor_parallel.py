"""The quantized linear whose weight is a DTensor: each rank multiplies its own part with its own scales.

Follows `torch.distributed.tensor.parallel`: a column-parallel weight (`Shard(0)`) gives an output cut along its last
dimension, a row-parallel one (`Shard(1)`) a sum still to be taken. What turns these into what the next module wants
stays with the host's style.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


def linear(x: torch.Tensor, weight: DTensor, bias: torch.Tensor | None, local_linear: Linear) -> DTensor:
    """`x W^T + b` over a one-dimensional mesh.

    Args:
        x: `[..., K]`; a plain tensor counts as the same on all ranks.
        weight: `[N, K]`, cut along either dimension or not at all.
        bias: `[N]`, cut as a column-parallel weight is, else whole.
        local_linear: the product of this rank's parts.

    Raises:
        ValueError: the weight is spread over a mesh of several dimensions.
    """
    mesh = weight.device_mesh
    if mesh.ndim != 1:
        raise ValueError(f"tensor-parallel weight over a mesh of {mesh.ndim} dimensions: only one is supported")
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    placement = weight.placements[0]
    last = x.dim() - 1
    if placement.is_shard(0):
        x = x.redistribute(placements=[Replicate()])
        own = local_linear(x.to_local(grad_placements=[Partial()]), weight.to_local(), _local(bias))
        return DTensor.from_local(own, mesh, [Shard(last)], run_check=False)
    if placement.is_shard(1):
        x = x.redistribute(placements=[Shard(last)])
        own = local_linear(x.to_local(), weight.to_local(), None)
        if bias is not None:
            # The sum over ranks must hold the bias once; a factor keeps the graph alike on all ranks.
            own = own + _local(bias, Partial()).to(own.dtype) * float(mesh.get_local_rank() == 0)
        return DTensor.from_local(own, mesh, [Partial()], run_check=False)
    # A whole weight: tokens may be cut, the last dimension may not.
    kept = x.placements[0] if x.placements[0].is_shard() and not x.placements[0].is_shard(last) else Replicate()
    x = x.redistribute(placements=[kept])
    sums = Partial() if kept.is_shard() else Replicate()
    own = local_linear(x.to_local(), weight.to_local(grad_placements=[sums]), _local(bias, sums))
    return DTensor.from_local(own, mesh, [kept], run_check=False)


def _local(bias: torch.Tensor | None, gradient: Partial | Replicate | None = None) -> torch.Tensor | None:
    if not isinstance(bias, DTensor):
        return bias
    return bias.to_local(grad_placements=None if gradient is None else [gradient])
