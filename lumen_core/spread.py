"""Which process groups the matrices of a linear layer are cut over, so that scales are those of the whole matrices.

A host with tensor or context parallelism hands each rank a part of x `[M, K]`, W `[N, K]` and g `[M, N]`. What covers a
whole tensor, or a whole row along a cut dimension, needs the largest magnitude over the ranks; blocks end at the cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed import ProcessGroup, ReduceOp, all_reduce, get_rank, get_world_size

TOKENS, OUT, IN = "tokens", "out", "in"
Dims = tuple[str, str]


@dataclass(frozen=True)
class Spread:
    """Groups over which M (tokens), N (output features) and K (input features) are cut; None where whole.

    Attributes:
        tokens: as under context parallelism.
        out: as in a column-parallel layer.
        in_: as in a row-parallel layer.
        stride: pieces that each rank holds of N (2 where gate and up lie behind one another).
        zigzag: rank r of n holds chunks r and 2n-1-r of 2n of the tokens, as causal attention is balanced.
    """

    tokens: ProcessGroup | None = None
    out: ProcessGroup | None = None
    in_: ProcessGroup | None = None
    stride: int = 1
    zigzag: bool = False

    @property
    def anything(self) -> bool:
        """False where every dimension is whole."""
        return any(self._cut(d) for d in (TOKENS, OUT, IN))

    def group(self, dim: str) -> ProcessGroup | None:
        """Where `dim` is cut, or None."""
        return {TOKENS: self.tokens, OUT: self.out, IN: self.in_}[dim] if self._cut(dim) else None

    def _cut(self, dim: str) -> bool:
        group = {TOKENS: self.tokens, OUT: self.out, IN: self.in_}[dim]
        return group is not None and get_world_size(group) > 1

    def maximum(self, amax: torch.Tensor, dims: tuple[str, ...]) -> torch.Tensor:
        """Maximum of `amax` over the ranks among which any of `dims` is cut, fp32; NaN counts as infinity."""
        groups = [g for g in map(self.group, dims) if g is not None]
        if not groups:
            return amax
        # With NaN a maximum depends on the order of ranks in some backends; infinity does not.
        amax = torch.nan_to_num(amax.to(torch.float32), nan=float("inf"), posinf=float("inf"))
        for group in groups:
            all_reduce(amax, op=ReduceOp.MAX, group=group)
        return amax

    def positions(self, dim: str, size: int, device: torch.device) -> torch.Tensor | None:
        """Indices of this rank's `size` entries in the whole dimension, int64; None where it is whole."""
        group = self.group(dim)
        if group is None:
            return None
        rank, ranks = get_rank(group), get_world_size(group)
        if dim == TOKENS and self.zigzag and size % 2 == 0:
            half = torch.arange(size // 2, device=device)
            return torch.cat([rank * (size // 2) + half, (2 * ranks - 1 - rank) * (size // 2) + half])
        stride = self.stride if dim == OUT and size % self.stride == 0 else 1
        piece = size // stride
        starts = (torch.arange(stride, device=device) * ranks + rank) * piece
        return (starts[:, None] + torch.arange(piece, device=device)).reshape(-1)
