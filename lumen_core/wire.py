"""How a weight travels: the codes and scales of one shard as bytes, and the whole weight read back from them.

A shard is cut at block edges, so that quantizing shards and gathering them gives the bits of gathering the weight and
quantizing it. Codes and scales are flat `uint8` tensors: no collective library takes every 8-bit float type.

Sources for the byte counts: OCP MX v1.0 section 5 (one E8M0 byte a block).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from lumen_core import casts
from lumen_core.casts import ROW_BLOCK, TENSOR_BLOCK
from lumen_core.config import QuantConfig
from lumen_core.formats import E8M0_DTYPE, ElementFormat, element_format, resolve_flavour
from lumen_core.tensor import QuantizedTensor, quantize

# Blocks along the rows: the other direction of a 1x32 weight, which dgrad contracts.
COLUMN_BLOCK_ROWS = 32


@dataclass(frozen=True)
class WireFormat:
    """One way of sending a weight.

    Attributes:
        name: recipe that it was made from, as `QuantConfig.recipe` spells it.
        fmt: element format.
        block: `(rows, columns)` that share a scale; `(0, 0)` one for the matrix, `(1, 0)` one a row.
        mx: E8M0 scales rather than fp32.
        rounding, margin, pow2: see `tensor.quantize`.
    """

    name: str
    fmt: ElementFormat
    block: tuple[int, int]
    mx: bool
    rounding: str = "ceil"
    margin: int = 0
    pow2: bool = False

    @classmethod
    def of(cls, config: QuantConfig, device: torch.device) -> WireFormat | None:
        """The form in which `config` holds a weight, or None where it does not quantize weights."""
        if config.weight_block is None or config.format == "bf16":
            return None
        return cls(
            config.recipe,
            element_format(config.weight_format, resolve_flavour(config.flavour, device)),
            config.weight_block,
            config.is_mx,
            config.scale_rounding,
            config.margin if config.scaling == "delayed" else 0,
            config.pow2_scale,
        )

    def same_numbers(self, other: WireFormat | None) -> bool:
        """True where a weight sent this way is what `other` would have made of it."""
        return other is not None and (self.fmt, self.block, self.mx, self.rounding, self.margin, self.pow2) == (
            (other.fmt, other.block, other.mx, other.rounding, other.margin, other.pow2)
        )

    @property
    def per_tensor(self) -> bool:
        """One scale for the matrix: it must be known before any shard is quantized, and does not travel with it."""
        return self.block == TENSOR_BLOCK

    @property
    def one_copy(self) -> bool:
        """The codes serve fprop and dgrad alike, so a direction means nothing."""
        return self.block[0] == self.block[1] or self.block == ROW_BLOCK

    @property
    def row_multiple(self) -> int:
        """A shard must hold a multiple of so many rows."""
        return max(self.block[0], 1)

    def code_bytes(self, rows: int, columns: int) -> int:
        """Bytes of the codes of a `[rows, columns]` matrix."""
        return rows * (math.ceil(columns / 2) if self.fmt.packed else columns)

    def scale_bytes(self, rows: int, columns: int) -> int:
        """Bytes of the scales that travel with them."""
        if self.per_tensor:
            return 0
        if self.block == ROW_BLOCK:
            return 4 * rows
        blocks = math.ceil(rows / self.block[0]) * math.ceil(columns / self.block[1])
        return blocks * (1 if self.mx else 4)

    # --- sending ------------------------------------------------------------------------------------------------------

    def encode(self, x: torch.Tensor, amax: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales of a shard `[R, C]`, flat uint8; for one scale a matrix that scale, 0-dim fp32.

        Args:
            amax: of the whole matrix, 0-dim fp32, where `per_tensor`.
        """
        q = self._quantize(x, amax)
        return _bytes(q.data), (q.scale if self.per_tensor else _bytes(q.scale))

    def encode_columns(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The same with blocks along the rows: what dgrad multiplies. Shards still join along the first dimension."""
        q = self._quantize(x.t())
        return _bytes(q.data.view(torch.uint8).t()), _bytes(q.scale.view(torch.uint8).t())

    def encode_experts(self, x: torch.Tensor, floor: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """A bank `[E, N, K]` with one scale an expert: codes and fp32 scales `[E]`, flat uint8.

        Args:
            floor: least amax to scale by, 0-dim fp32 (delayed scaling); the experts' own amaxes `[E]` then come third.
        """
        own = x.abs().amax(dim=(1, 2)).to(torch.float32)
        scale = casts.scale_from_amax(
            own if floor is None else torch.maximum(own, floor), self.fmt, self.margin, self.pow2
        )
        codes = casts.encode(x.to(torch.float32) * (1.0 / scale)[:, None, None], self.fmt)
        return (_bytes(codes), _bytes(scale), *(() if floor is None else (_bytes(own),)))

    def _quantize(self, x: torch.Tensor, amax: torch.Tensor | None = None) -> QuantizedTensor:
        return quantize(
            x,
            self.fmt,
            self.block,
            mx=self.mx,
            rounding=self.rounding,
            margin=self.margin,
            pow2=self.pow2,
            amax=amax if self.per_tensor else None,
        )

    # --- receiving ----------------------------------------------------------------------------------------------------

    def decode(self, codes: torch.Tensor, scale: torch.Tensor, shape: tuple[int, int]) -> QuantizedTensor:
        """The weight `[N, K]` from gathered codes and scales, as fprop multiplies it; no value is computed."""
        rows, columns = shape
        data = codes.view(rows, -1)
        data = data if self.fmt.packed else data.view(self.fmt.dtype)
        if self.per_tensor:
            scale = scale.view(torch.float32).reshape(()) if scale.dtype == torch.uint8 else scale
        elif self.block == ROW_BLOCK:
            scale = scale.view(torch.float32).view(rows, 1)
        else:
            scale = scale.view(E8M0_DTYPE if self.mx else torch.float32).view(-1, math.ceil(columns / self.block[1]))
        return QuantizedTensor(data, scale, self.fmt, self.block, shape)

    def decode_columns(self, codes: torch.Tensor, scale: torch.Tensor, shape: tuple[int, int]) -> QuantizedTensor:
        """The transposed weight `[K, N]`, as dgrad multiplies it, from what `encode_columns` sent."""
        rows, columns = shape
        data = codes.view(-1, columns).t().contiguous()
        data = data if self.fmt.packed else data.view(self.fmt.dtype)
        scale = scale.view(-1, columns).t().contiguous().view(E8M0_DTYPE)
        return QuantizedTensor(data, scale, self.fmt, self.block, (columns, rows))


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8).reshape(-1)
