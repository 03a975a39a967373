"""What a kernel must know of its operands to say whether it can run it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lumen_core.formats import ElementFormat


@dataclass(frozen=True)
class GemmQuery:
    """`[m, k] x [n, k] -> [m, n]` with the formats and blocks of both operands."""

    device_type: str
    a_fmt: ElementFormat
    a_block: tuple[int, int]
    b_fmt: ElementFormat
    b_block: tuple[int, int]
    m: int
    n: int
    k: int
    out_dtype: torch.dtype


@dataclass(frozen=True)
class QuantizeQuery:
    """A matrix of `elements` values of `dtype`, to be quantized to `fmt` with one scale for each `block`.

    Attributes:
        mx: E8M0 scales rather than fp32.
        noise: rounded stochastically.
        plain: a `torch.Tensor` or `Parameter`, whose bytes a kernel may read, that autograd does not follow.
        columns: length of a row.
        rounding: how an E8M0 scale is rounded.
        pow2: fp32 scales are powers of two.
        given_amax: the scale comes from an amax that the caller brings.
    """

    device_type: str
    dtype: torch.dtype
    fmt: ElementFormat
    block: tuple[int, int]
    mx: bool
    noise: bool
    elements: int
    plain: bool = True
    columns: int = 0
    rounding: str = "ceil"
    pow2: bool = False
    given_amax: bool = False


@dataclass(frozen=True)
class RowsQuery:
    """An operation on `rows` rows of `columns` values of `dtype`, each row for itself."""

    device_type: str
    dtype: torch.dtype
    rows: int
    columns: int
