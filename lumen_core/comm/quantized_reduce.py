"""Reduce-scatter of gradients in FP8: a quarter of the bytes of fp32, at the price of one rounding of each addend.

Each rank quantizes the chunk for every destination with one fp32 scale for 128 values, an all-to-all carries codes and
scales in one buffer, and the destination decodes every chunk with the scales that came with it and adds in fp32.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from lumen_core.comm.collectives import Collectives, Label, ReduceOp, finished_later
from lumen_core.formats import element_format, resolve_flavour
from lumen_core.tensor import QuantizedTensor, quantize

BLOCK = (1, 128)
_ALIGN = 4  # bytes: rows hold fp32 scales


def quantized_reduce_scatter(
    output: torch.Tensor,
    input: torch.Tensor,
    op: ReduceOp,
    collectives: Collectives,
    *,
    flavour: str = "auto",
    async_op: bool = False,
    label: Label = None,
) -> dist.Work | None:
    """`output` becomes this rank's part of the sum or average of every `input`, to about 3 % of its norm.

    The addends are taken in rank order, so that the result does not depend on the transport. A value that is not
    finite makes its block of 128 NaN. The meter counts one all-to-all.

    Args:
        output: `[n]`, any float dtype.
        input: `[world * n]`, any float dtype; every rank's part may have any length.
        op: SUM or AVG.
        flavour: of E4M3, see `formats.resolve_flavour`; the same on every rank.

    Raises:
        ValueError: another `op`, or sizes that do not fit.
    """
    world, n = collectives.group.size(), output.numel()
    average = op == dist.ReduceOp.AVG
    if not average and not op == dist.ReduceOp.SUM:
        raise ValueError(f"quantized reduce-scatter: op must be SUM or AVG, not {op}")
    if input.numel() != world * n:
        raise ValueError(f"{world} ranks: {input.numel()} elements do not scatter to {n} on each rank")
    if n == 0:
        return finished_later(lambda: None, output.device, async_op)
    fmt = element_format("e4m3", resolve_flavour(flavour, input.device))
    chunks = quantize(input.reshape(world, n), fmt, BLOCK)
    scale_bytes = chunks.scale.shape[1] * chunks.scale.itemsize
    padding = chunks.data.new_empty(world, 0, dtype=torch.uint8)
    if n % _ALIGN:
        padding = torch.zeros(world, -n % _ALIGN, dtype=torch.uint8, device=input.device)
    sent = torch.cat([chunks.scale.view(torch.uint8), chunks.data.view(torch.uint8), padding], dim=1)
    got = torch.empty_like(sent)
    work = collectives.all_to_all(got, sent, async_op=async_op, label=label)

    def finish() -> None:
        if work is not None:
            work.wait()
        total = torch.zeros(1, n, dtype=torch.float32, device=input.device)
        for row in got.split(1):
            scale, codes = row[:, :scale_bytes].view(torch.float32), row[:, scale_bytes : scale_bytes + n]
            total += QuantizedTensor(codes.view(fmt.dtype), scale, fmt, BLOCK, (1, n)).dequantize()
        output.copy_((total / world if average else total).view(output.shape))

    return finished_later(finish, output.device, async_op)
