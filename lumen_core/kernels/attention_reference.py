"""Attention in plain torch: the specification that kernels are tested against, and what runs where none can.

Forward: online softmax over blocks of keys ("Online normalizer calculation for softmax", arXiv 1805.02867;
FlashAttention-2, arXiv 2307.08691, algorithm 1), backward: algorithm 2 of the same, S recomputed. Memory is linear in
the length of the sequence. Low-precision operands are rounded to their format and multiplied in fp32.

Tensors are `[B, S, H, D]`; bounds are those of `lumen_core.attention_bounds`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from lumen_core import casts
from lumen_core.formats import ElementFormat, element_format

QUERY_BLOCK = 128
KEY_BLOCK = 256
MX = 32


@dataclass(frozen=True)
class Precision:
    """What the operands of the products are rounded to.

    Attributes:
        recipe: `bf16` (not at all), `fp8` or `mxfp8`.
        fmt: element format of the two others.
    """

    recipe: str
    fmt: ElementFormat

    def operand(self, x: torch.Tensor, axis: int = -1) -> torch.Tensor:
        """q, k, v or the gradient of the output, `[B, Hk, G, S, D]`, for a product that contracts `axis`."""
        if self.recipe == "bf16":
            return x
        if self.recipe == "mxfp8":
            return blocked(x, self.fmt, MX, axis)
        scale = casts.scale_from_amax(x.abs().amax(dim=(-2, -1), keepdim=True), self.fmt, pow2=True)
        return (casts.decode(casts.encode(x * (1.0 / scale), self.fmt), self.fmt) * scale).to(x.dtype)

    def probabilities(self, p: torch.Tensor) -> torch.Tensor:
        """exp(S - running maximum) of a block, in [0, 1], for the product with v."""
        if self.recipe == "fp8":
            scale = probability_scale(self.fmt)
            return (casts.decode(casts.encode(p * scale, self.fmt), self.fmt) * (1.0 / scale)).to(p.dtype)
        return self.tile(p, -1)

    def tile(self, x: torch.Tensor, axis: int) -> torch.Tensor:
        """P or dS of a block, in the backward pass, for a product that contracts `axis`."""
        if self.recipe == "bf16":
            return x
        return blocked(x, self.fmt, MX if self.recipe == "mxfp8" else x.shape[axis], axis)


def precision(recipe: str, flavour: str) -> Precision:
    """What a recipe rounds to on a device of that flavour."""
    return Precision(recipe, element_format("e4m3", flavour))


def probability_scale(fmt: ElementFormat) -> float:
    """The largest power of two that E4M3 can hold: what 1 becomes (256, FNUZ: 128)."""
    return 2.0**fmt.emax


def blocked(x: torch.Tensor, fmt: ElementFormat, block: int, axis: int) -> torch.Tensor:
    """Values rounded to codes with one power-of-two scale for each `block` of them along `axis`."""
    x = x.transpose(axis, -1)
    length = x.shape[-1]
    blocks = F.pad(x, (0, -length % block)).unflatten(-1, (-1, block))
    byte = casts.e8m0_from_amax(blocks.abs().amax(dim=-1, keepdim=True), fmt)
    # fp32 has no reciprocal of the smallest scale but in two steps; a block with such a scale holds next to nothing.
    scale = casts.e8m0_decode(byte.clamp(min=1))
    rounded = (casts.decode(casts.encode(blocks / scale, fmt), fmt) * scale).to(x.dtype)
    return rounded.flatten(-2)[..., :length].transpose(axis, -1)


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    first: torch.Tensor,
    last: torch.Tensor,
    scale: float,
    p: Precision,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output `[B, Sq, H, D]` in q's dtype, and the logarithm of each row's sum, fp32 `[B, H, Sq]` (fp64 for fp64)."""
    qs, ks, vs = p.operand(_grouped(q, k)), p.operand(_grouped(k, k)), p.operand(_grouped(v, k), -2)
    out = torch.zeros_like(qs[..., :1]).expand(*qs.shape[:-1], v.shape[-1]).contiguous()
    lse = torch.full_like(qs[..., :1], -torch.inf)
    for rows in _blocks(0, q.shape[1], QUERY_BLOCK):
        acc, total, largest = out[..., rows, :], torch.zeros_like(lse[..., rows, :]), lse[..., rows, :]
        for columns in _key_blocks(first, last, rows, k.shape[1]):
            s, seen = _scores(qs, ks, first, last, rows, columns, scale)
            s = s.masked_fill(~seen, -torch.inf)
            higher = torch.maximum(largest, s.amax(dim=-1, keepdim=True))
            base = _finite(higher)  # a row that has seen no key yet has no maximum
            weights = torch.exp(s - base)
            shrink = torch.exp(largest - base)
            total = total * shrink + weights.sum(dim=-1, keepdim=True)
            acc = acc * shrink + p.probabilities(weights) @ vs[..., columns, :]
            largest = higher
        out[..., rows, :] = acc / torch.where(total == 0, 1.0, total)
        lse[..., rows, :] = largest + torch.log(total)
    return _ungrouped(out).to(q.dtype), lse.squeeze(-1).flatten(1, 2)


def backward(
    grad: torch.Tensor,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    first: torch.Tensor,
    last: torch.Tensor,
    scale: float,
    p: Precision,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v in their dtypes."""
    qg, kg, vg, og = _grouped(q, k), _grouped(k, k), _grouped(v, k), _grouped(grad, k)
    # Contracted along D for S and dP; along tokens for dQ, dK and dV.
    qs, ks, vs, os = p.operand(qg), p.operand(kg), p.operand(vg), p.operand(og)
    qt, kt, ot = p.operand(qg, -2), p.operand(kg, -2), p.operand(og, -2)
    delta = (og * _grouped(out, k)).sum(dim=-1, keepdim=True)
    if grad_lse is not None:
        delta = delta - grad_lse.to(delta.dtype).reshape(delta.shape)
    base = _finite(lse).reshape(delta.shape)
    dq, dk, dv = torch.zeros_like(qg), torch.zeros_like(kg), torch.zeros_like(vg)
    for rows in _blocks(0, q.shape[1], QUERY_BLOCK):
        for columns in _key_blocks(first, last, rows, k.shape[1]):
            s, seen = _scores(qs, ks, first, last, rows, columns, scale)
            weights = torch.exp(s - base[..., rows, :]).masked_fill(~seen, 0.0)
            slope = os[..., rows, :] @ vs[..., columns, :].transpose(-1, -2) - delta[..., rows, :]
            ds = weights * slope
            dv[..., columns, :] += (p.tile(weights, -2).transpose(-1, -2) @ ot[..., rows, :]).sum(dim=2, keepdim=True)
            dk[..., columns, :] += (p.tile(ds, -2).transpose(-1, -2) @ qt[..., rows, :]).sum(dim=2, keepdim=True)
            dq[..., rows, :] += p.tile(ds, -1) @ kt[..., columns, :]
    return _ungrouped(dq * scale).to(q.dtype), _ungrouped(dk * scale).to(k.dtype), _ungrouped(dv).to(v.dtype)


def _grouped(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """`[B, S, H, D]` as `[B, Hk, H / Hk, S, D]` in the dtype that is computed in."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x.unflatten(2, (k.shape[2], -1)).permute(0, 2, 3, 1, 4).contiguous()


def _ungrouped(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(1, 2).transpose(1, 2).contiguous()


def _finite(x: torch.Tensor) -> torch.Tensor:
    return x.masked_fill(x == -torch.inf, 0.0)


def _scores(
    q: torch.Tensor, k: torch.Tensor, first: torch.Tensor, last: torch.Tensor, rows: slice, columns: slice, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores `[B, Hk, G, rows, columns]`, and which of them are seen, `[B or 1, 1, 1, rows, columns]`."""
    key = torch.arange(columns.start, columns.stop, device=q.device)
    seen = (key >= first[:, rows, None]) & (key < last[:, rows, None])
    return (q[..., rows, :] @ k[..., columns, :].transpose(-1, -2)) * scale, seen[:, None, None]


def _blocks(begin: int, end: int, size: int) -> Iterator[slice]:
    return (slice(i, min(i + size, end)) for i in range(begin, end, size))


def _key_blocks(first: torch.Tensor, last: torch.Tensor, rows: slice, keys: int) -> Iterator[slice]:
    """Blocks of keys that the queries may see; on a GPU, where asking would wait for it, all."""
    if first.device.type != "cpu":
        return _blocks(0, keys, KEY_BLOCK)
    begin, end = int(first[:, rows].min()), int(last[:, rows].max())
    return _blocks(begin // KEY_BLOCK * KEY_BLOCK, end, KEY_BLOCK)
