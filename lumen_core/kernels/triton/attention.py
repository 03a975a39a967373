"""Attention on a GPU: launchers of the kernels in `attention_kernels.py`, which wait for nothing on the host.

`fp8` multiplies 8-bit codes. `mxfp8` multiplies bf16 that holds the rounded values, which is exact, on every device:
an operand is read again for each block of the other side, so that decoding it once costs less than in each tile.
Importing this file does not import `triton`; calling a launcher does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lumen_core.attention_bounds import query_bounds
from lumen_core.formats import ElementFormat, element_format
from lumen_core.kernels.triton.cast import _arch, format_unsupported
from lumen_core.kernels.triton.launching import element_constants, has_triton, on_device_of, power_of_two
from lumen_core.tracing import constant_when_traced

if TYPE_CHECKING:
    from lumen_core.kernels.attention import AttentionQuery
    from lumen_core.kernels.attention_reference import Precision

WIDEST = 256
_OPERAND_ROWS = 64


def unsupported(query: AttentionQuery) -> str | None:
    """Why this attention cannot run here, or None where it can."""
    if query.device_type != "cuda":
        return "needs a GPU"
    if query.head_dim > WIDEST:
        return f"heads of {query.head_dim}: at most {WIDEST}"
    # Unquantized fp32 is multiplied in fp32, which tensor cores do not do.
    if query.dtype not in (torch.bfloat16, torch.float16) + ((torch.float32,) if query.recipe != "bf16" else ()):
        return f"input dtype {query.dtype}"
    return _device_unsupported(query.recipe, query.flavour)


@constant_when_traced
def _device_unsupported(recipe: str, flavour: str) -> str | None:
    if not has_triton():
        return "triton is not installed"
    return None if recipe == "bf16" else format_unsupported(element_format("e4m3", flavour), _arch())


# --- constants --------------------------------------------------------------------------------------------------------


def format_constants(fmt: ElementFormat, hip: bool | None = None) -> dict[str, Any]:
    """Compile-time arguments that describe E4M3 (`hip`: on AMD; default: as this torch is built)."""
    from triton import language as tl

    constants = element_constants(fmt, hip)
    top = int((fmt.max / 2.0**fmt.emax - 1.0) * 2**23)
    codes = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e4m3fnuz: tl.float8e4b8}[fmt.dtype]
    return {**constants, "EMAX": fmt.emax, "TOP": top, "CODES": codes}


def blocks(kernel: str, recipe: str, width: int, hip: bool | None = None) -> tuple[dict[str, int], dict[str, int]]:
    """Block sizes, and warps and stages, of `forward`, `backward_queries` or `backward_keys` for heads of `width`.

    About the largest that compile without spilling; `tests/contract/test_attention_compile.py` holds them to that. On
    Hopper, 8-bit products need 64 rows: below, Triton widens codes to fp16, as it does for dK and dV of 256 channels.
    """
    hip = torch.version.hip is not None if hip is None else hip
    table, width = _HIP if hip else _CUDA, max(64, width)
    own, other, warps, stages = table.get((kernel, recipe, width)) or table[kernel, "", width]
    rows, columns = (other, own) if kernel == "backward_keys" else (own, other)
    return {"BM": rows, "BN": columns}, {"num_warps": warps, "num_stages": stages}


# Rows that a program owns, rows of a step, warps, stages: for heads padded to 64, 128 and 256, and recipes that differ.
_CUDA = {
    ("forward", "", 64): (128, 64, 8, 3),
    ("forward", "", 128): (128, 64, 8, 3),
    ("forward", "", 256): (64, 32, 8, 2),
    ("backward_queries", "", 64): (128, 64, 8, 2),
    ("backward_queries", "", 128): (128, 64, 8, 2),
    ("backward_queries", "mxfp8", 128): (64, 64, 8, 2),
    ("backward_queries", "", 256): (32, 32, 4, 1),
    ("backward_queries", "fp8", 256): (64, 32, 8, 1),
    ("backward_keys", "", 64): (128, 32, 8, 2),
    ("backward_keys", "", 128): (64, 32, 8, 2),
    ("backward_keys", "", 256): (32, 32, 8, 1),
}
_HIP = {
    ("forward", "", 64): (128, 64, 4, 1),
    ("forward", "", 128): (128, 64, 4, 1),
    ("forward", "", 256): (64, 64, 4, 1),
    ("backward_queries", "", 64): (64, 64, 4, 1),
    ("backward_queries", "", 128): (64, 64, 4, 1),
    ("backward_queries", "", 256): (64, 32, 4, 1),
    ("backward_queries", "fp8", 256): (16, 64, 4, 1),
    ("backward_keys", "", 64): (64, 32, 4, 1),
    ("backward_keys", "", 128): (64, 32, 4, 1),
    ("backward_keys", "bf16", 128): (64, 16, 4, 1),
    ("backward_keys", "bf16", 256): (32, 16, 4, 1),
    ("backward_keys", "fp8", 256): (16, 64, 4, 1),
    ("backward_keys", "mxfp8", 256): (16, 32, 4, 1),
}


def padded(width: int) -> int:
    """Channels of a tile."""
    return max(32, power_of_two(width))


# --- operands ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operand:
    """What the kernels read of q, k, v or the output's gradient.

    Attributes:
        by_channel, by_token: for products that contract channels, and tokens; None where no kernel asks for it.
        scale: fp32 `[B, H]` of codes.
        turned: by_token is `[B, H, D, tokens]`.
    """

    by_channel: torch.Tensor | None
    by_token: torch.Tensor | None
    scale: torch.Tensor
    turned: bool

    @property
    def channel_strides(self) -> tuple[int, int, int]:
        """Of a batch, a token and a head."""
        batch, token, head, _ = self.by_channel.stride()
        return batch, token, head

    @property
    def token_strides(self) -> tuple[int, int, int]:
        """Of a batch, a token (turned: a channel) and a head."""
        a, b, c, _ = self.by_token.stride()
        return (a, c, b) if self.turned else (a, b, c)


def operand(x: torch.Tensor, p: Precision, *, by_channel: bool, by_token: bool) -> Operand:
    """`[B, S, H, D]` rounded as the recipe says; its last dimension must be contiguous."""
    nothing = x.new_empty(0, dtype=torch.float32)
    if p.recipe == "bf16":
        return Operand(x, x, nothing, False)
    from lumen_core.kernels.triton import attention_operand_kernels as kernels

    batch, tokens, heads, width = x.shape
    grid = (-(-tokens // _OPERAND_ROWS), heads, batch)
    sizes = {"ROWS": _OPERAND_ROWS, "D": width, "BD": padded(width), "num_warps": 4}
    strides = x.stride()[:3]
    constants = format_constants(p.fmt)
    if p.recipe == "mxfp8":
        channel = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device) if by_channel else None
        token = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device) if by_token else None
        kernels.mx_operand[grid](
            x, nothing if channel is None else channel, nothing if token is None else token, *strides, tokens,
            BY_CHANNEL=by_channel, BY_TOKEN=by_token, **constants, **sizes,
        )  # fmt: skip
        return Operand(channel, token, nothing, False)
    amax = torch.zeros((batch, heads), dtype=torch.int32, device=x.device)
    scale = torch.empty((batch, heads), dtype=torch.float32, device=x.device)
    kernels.head_amax[grid](x, amax, *strides, tokens, **sizes)
    # Rows of a multiple of 16 bytes.
    long = -(-tokens // 16) * 16
    by_kernel = by_token and x.dtype != torch.float32  # of which Triton 3.6 misplaces turned codes (seen on an H200)
    plain = by_channel or not by_kernel
    codes = torch.empty(x.shape, dtype=p.fmt.dtype, device=x.device) if plain else None
    turned = torch.empty((batch, heads, width, long), dtype=p.fmt.dtype, device=x.device) if by_token else None
    some = codes if turned is None else turned
    kernels.head_codes[grid](
        x, amax, scale, some if codes is None else codes, some if turned is None else turned, *strides, tokens, long,
        PLAIN=plain, TURNED=by_kernel, **{k: v for k, v in constants.items() if k != "CODES"}, **sizes,
    )  # fmt: skip
    if by_token and not by_kernel:
        as_bytes = turned.view(torch.uint8).zero_()
        as_bytes[..., :tokens] = codes.view(torch.uint8).permute(0, 2, 3, 1)
    return Operand(codes, turned, scale, True)


# --- passes -----------------------------------------------------------------------------------------------------------


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    first: torch.Tensor,
    last: torch.Tensor,
    scale: float,
    p: Precision,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `lumen_core.kernels.attention_reference.forward`."""
    from lumen_core.kernels.triton import attention_kernels as kernels

    batch, queries, heads, width = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, queries), dtype=torch.float32, device=q.device)
    with on_device_of(q):
        qs = operand(_last_contiguous(q), p, by_channel=True, by_token=False)
        ks = operand(_last_contiguous(k), p, by_channel=True, by_token=False)
        vs = operand(_last_contiguous(v), p, by_channel=False, by_token=True)
        sizes, options = blocks("forward", p.recipe, padded(width))
        kernels.forward[(-(-queries // sizes["BM"]), heads, batch)](
            qs.by_channel, ks.by_channel, vs.by_token, qs.scale, ks.scale, vs.scale, first, last, out, lse,
            *qs.channel_strides, *ks.channel_strides, *vs.token_strides, _bounds_stride(first),
            queries, k.shape[1], scale, **_constants(q, k, p), **sizes, **options,
        )  # fmt: skip
    return out, lse


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
    """As `lumen_core.kernels.attention_reference.backward`."""
    from lumen_core.kernels.triton import attention_kernels as kernels

    batch, queries, heads, width = q.shape
    keys, kv_heads = k.shape[1], k.shape[2]
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    constants = _constants(q, k, p)
    with on_device_of(q):
        grad = _last_contiguous(grad)
        delta = _delta(grad, grad_lse, out)
        qs, ks, gs = (operand(_last_contiguous(x), p, by_channel=True, by_token=True) for x in (q, k, grad))
        vs = operand(_last_contiguous(v), p, by_channel=True, by_token=False)
        scales = qs.scale, ks.scale, vs.scale, gs.scale
        strides = *qs.channel_strides, *ks.channel_strides, *vs.channel_strides, *gs.channel_strides
        tensors = qs.by_channel, ks.by_channel, vs.by_channel, gs.by_channel
        sizes, options = blocks("backward_queries", p.recipe, padded(width))
        kernels.backward_queries[(-(-queries // sizes["BM"]), heads, batch)](
            *tensors, ks.by_token, *scales, first, last, lse, delta, dq, *strides, *ks.token_strides,
            _bounds_stride(first), queries, keys, scale, **constants, **sizes, **options,
        )  # fmt: skip
        begin, end = query_bounds(first, last, keys)
        sizes, options = blocks("backward_keys", p.recipe, padded(width))
        kernels.backward_keys[(-(-keys // sizes["BN"]), kv_heads, batch)](
            *tensors, qs.by_token, gs.by_token, *scales, first, last, begin, end, lse, delta, dk, dv, *strides,
            *qs.token_strides, *gs.token_strides, _bounds_stride(first), _bounds_stride(begin), queries, keys, scale,
            **constants, **sizes, **options,
        )  # fmt: skip
    return dq, dk, dv


def _delta(grad: torch.Tensor, grad_lse: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    from lumen_core.kernels.triton import attention_operand_kernels as kernels

    batch, tokens, heads, width = grad.shape
    delta = torch.empty((batch, heads, tokens), dtype=torch.float32, device=grad.device)
    kernels.row_delta[(-(-tokens // _OPERAND_ROWS), heads, batch)](
        grad, out, delta if grad_lse is None else grad_lse.contiguous(), delta, *grad.stride()[:3], tokens,
        HAS_LSE=grad_lse is not None, ROWS=_OPERAND_ROWS, D=width, BD=padded(width), num_warps=4,
    )  # fmt: skip
    return delta


def _constants(q: torch.Tensor, k: torch.Tensor, p: Precision) -> dict[str, Any]:
    return {
        "GROUP": q.shape[2] // k.shape[2],
        "RECIPE": p.recipe,
        **format_constants(p.fmt),
        "TURNED": p.recipe == "fp8",
        "D": q.shape[3],
        "BD": padded(q.shape[3]),
    }


def _last_contiguous(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _bounds_stride(bounds: torch.Tensor) -> int:
    """From one row of a batch to the next; all may share one."""
    return bounds.shape[1] if bounds.shape[0] > 1 else 0
