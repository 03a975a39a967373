"""What Megatron's distributed optimizer asks of parameters that it gathers in low precision.

After a step each data-parallel rank casts its part of the fp32 masters into the flat uint8 buffer that is then
gathered. Parts begin and end inside of blocks; scales are agreed on first, so that the gathered codes are those of
quantizing the whole weight at once. fp32 master -> the model's dtype -> codes: as without the gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from lumen_core.comm.meter import METER
from lumen_megatron.parameter import Master, QuantizedParameter, maximum_over


def quantize_shards(
    parameters: Sequence[QuantizedParameter],
    masters: Sequence[torch.Tensor | None],
    starts: Sequence[int | None],
    group: dist.ProcessGroup,
) -> None:
    """Cast this rank's parts of the fp32 masters into the parameters' memory; a collective over `group`.

    Args:
        parameters: all of one optimizer, in one order on every rank.
        masters: flat fp32; None for a parameter of which this rank has nothing.
        starts: index of each part's first value in its parameter.
        group: the data-parallel ranks that the parts are cut over.
    """
    if not parameters:
        return
    with torch.no_grad():
        nothing = torch.empty(0, device=parameters[0].holding.codes.device)
        pieces, bounds = [], []
        for parameter, master, start in zip(parameters, masters, starts):
            held = parameter.holding
            pieces.append((nothing.to(held.dtype), 0) if master is None else (master.detach().to(held.dtype), start))
            bounds.append(held.bounds(*pieces[-1]))
            held.master = Master(None if master is None else master.detach(), start or 0, group)
        bounds = maximum_over(
            bounds, [[group, *parameter.holding.tensor_parallel_groups()] for parameter in parameters]
        )
        for parameter, piece, bound in zip(parameters, pieces, bounds):
            held = parameter.holding
            held.initial = None
            held.set_scales(bound, step_ends=True)
            held.encode(*piece)


def count_gathered(parameters: Sequence[QuantizedParameter]) -> None:
    """Tell the meter what a gather brought; Megatron sends it through torch itself."""
    held = [parameter.holding for parameter in parameters]
    size = sum(each.codes.numel() for each in held if each.master is not None and each.master.group.size() > 1)
    METER.record("all_gather", "parameters", size)


def to_full_precision(sharded_state_dict: Any) -> None:
    """Put the masters' values, in the model's dtype, where a state dict for a checkpoint has quantized parameters.

    A collective: every rank calls with the same entries in the same order.
    """
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    for entry in nested_values(sharded_state_dict):
        if isinstance(getattr(entry, "data", None), QuantizedParameter):
            entry.data = entry.data.holding.full_precision()
