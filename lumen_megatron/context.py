"""Context parallelism for core attention: keys and values of all ranks, queries of one.

Rank r of n holds chunks r and 2n-1-r of 2n equal chunks of each sequence, so that causal work is balanced (Megatron's
layout). Keys and values are gathered into the sequences' own order; a query sees the keys that its own position allows.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from lumen_core.attention_bounds import Window, interval_bounds


class GatherTokens(torch.autograd.Function):
    """`[s, ...]` of each rank -> `[n s, ...]`, rank after rank; the gradient is summed and scattered back."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        out = x.new_empty((x.shape[0] * dist.get_world_size(group), *x.shape[1:]))
        dist.all_gather_into_tensor(out, x.contiguous(), group=group)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        out = grad.new_empty((grad.shape[0] // dist.get_world_size(ctx.group), *grad.shape[1:]))
        dist.reduce_scatter_tensor(out, grad.contiguous(), group=ctx.group)
        return out, None


def whole_positions(lengths: torch.Tensor, rank: int, ranks: int, total: int) -> torch.Tensor:
    """Where this rank's tokens lie among all, int64 `[total]`, in ascending order.

    Args:
        lengths: int, tokens of each sequence over all ranks, multiples of `2 * ranks`.
        total: tokens of this rank: their sum over `ranks`.
    """
    chunk = (lengths // (2 * ranks)).long()
    own_start = torch.cumsum(2 * chunk, 0) - 2 * chunk
    start = own_start * ranks
    token = torch.arange(total, device=lengths.device)
    which = torch.searchsorted(own_start + 2 * chunk, token, right=True).clamp(max=lengths.shape[0] - 1)
    inside, size = token - own_start[which], chunk[which]
    second = inside >= size
    return start[which] + torch.where(second, (2 * ranks - 1 - rank) * size + inside - size, rank * size + inside)


def gathered_order(lengths: torch.Tensor, ranks: int, total: int) -> torch.Tensor:
    """Index that brings tokens gathered rank after rank into the sequences' own order, int64 `[total * ranks]`."""
    where = torch.cat([whole_positions(lengths, rank, ranks, total) for rank in range(ranks)])
    return torch.argsort(where)


def bounds_of(
    lengths: torch.Tensor, positions: torch.Tensor, causal: bool, window: Window | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys that the queries at `positions` see: bounds int32 `[1, queries]`, of keys in the sequences' own order."""
    ends = torch.cumsum(lengths.long(), 0)
    which = torch.searchsorted(ends, positions, right=True).clamp(max=lengths.shape[0] - 1)
    first, last = interval_bounds(positions, (ends - lengths)[which], ends[which], causal, window)
    return first[None], last[None]
