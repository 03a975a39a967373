"""What runs where, for the usual recipes: the table of `lumen-doctor`."""

from __future__ import annotations

import torch

from lumen_core.formats import element_format, resolve_flavour
from lumen_core.kernels.attention import ATTENTION, AttentionQuery
from lumen_core.kernels.cross_entropy import CROSS_ENTROPY
from lumen_core.kernels.gemm import GEMM
from lumen_core.kernels.norm import NORM
from lumen_core.kernels.quantize import QUANTIZE
from lumen_core.kernels.quantize_both import QUANTIZE_BOTH
from lumen_core.kernels.query import GemmQuery, QuantizeQuery, RowsQuery
from lumen_core.kernels.rope import ROPE
from lumen_core.kernels.swiglu import SWIGLU

# Label, elements, blocks.
_GEMMS = (
    ("gemm tensorwise e4m3", "e4m3", "e4m3", (0, 0), (0, 0)),
    ("gemm tensorwise e5m2 x e4m3", "e5m2", "e4m3", (0, 0), (0, 0)),
    ("gemm rowwise e4m3", "e4m3", "e4m3", (1, 0), (1, 0)),
    ("gemm 1x128 x 128x128 e4m3", "e4m3", "e4m3", (1, 128), (128, 128)),
    ("gemm mxfp8 1x32", "e4m3", "e4m3", (1, 32), (1, 32)),
    ("gemm mxfp4 1x32", "e2m1", "e2m1", (1, 32), (1, 32)),
)
_CASTS = (
    ("quantize tensorwise e4m3", "e4m3", (0, 0), False),
    ("quantize tensorwise e5m2", "e5m2", (0, 0), False),
    ("quantize rowwise e4m3", "e4m3", (1, 0), False),
    ("quantize 1x128 e4m3", "e4m3", (1, 128), False),
    ("quantize 128x128 e4m3", "e4m3", (128, 128), False),
    ("quantize mxfp8 1x32", "e4m3", (1, 32), True),
    ("quantize mxfp8 32x32", "e4m3", (32, 32), True),
    ("quantize mxfp4 1x32", "e2m1", (1, 32), True),
)
_BOTH = (
    ("quantize_both tensorwise e4m3", (0, 0), False),
    ("quantize_both rowwise e4m3", (1, 0), False),
    ("quantize_both 1x128 e4m3", (1, 128), False),
    ("quantize_both mxfp8 1x32", (1, 32), True),
)
_ROWS = (NORM, SWIGLU, CROSS_ENTROPY, ROPE)  # of 4096 values
# Label, recipe, nothing but causal.
_ATTENTIONS = (
    ("attention bf16 causal", "bf16", True),
    ("attention bf16 packed", "bf16", False),
    ("attention fp8", "fp8", False),
    ("attention mxfp8", "mxfp8", False),
)
_SIZE = 4096


def table(device: torch.device | str) -> list[tuple[str, str, list[tuple[str, str | None]]]]:
    """Rows `(operands, chosen, [(candidate, why not)])` for the usual recipes on `device` at an aligned shape."""
    device = torch.device(device)
    flavour = resolve_flavour("auto", device)
    rows = []
    for label, a, b, block_a, block_b in _GEMMS:
        formats = element_format(a, flavour), block_a, element_format(b, flavour), block_b
        query = GemmQuery(device.type, *formats, _SIZE, _SIZE, _SIZE, torch.bfloat16)
        rows.append((label, GEMM.choose(query).name, GEMM.explain(query)))
    for label, element, block, mx in _CASTS:
        fmt = element_format(element, flavour)
        query = QuantizeQuery(
            device.type, torch.bfloat16, fmt, block, mx, noise=False, elements=_SIZE * _SIZE, columns=_SIZE
        )
        rows.append((label, QUANTIZE.choose(query).name, QUANTIZE.explain(query)))
    for label, block, mx in _BOTH:
        fmt = element_format("e4m3", flavour)
        query = QuantizeQuery(
            device.type, torch.bfloat16, fmt, block, mx, noise=False, elements=_SIZE * _SIZE, columns=_SIZE
        )
        rows.append((label, QUANTIZE_BOTH.choose(query).name, QUANTIZE_BOTH.explain(query)))
    for operation in _ROWS:
        query = RowsQuery(device.type, torch.bfloat16, _SIZE, _SIZE)
        rows.append((operation.name, operation.choose(query).name, operation.explain(query)))
    for label, recipe, only_causal in _ATTENTIONS:
        query = AttentionQuery(
            device.type, torch.bfloat16, recipe, flavour, batch=1, queries=_SIZE, keys=_SIZE, heads=32, kv_heads=8,
            head_dim=128, causal=True, only_causal=only_causal, lse=False,
        )  # fmt: skip
        rows.append((label, ATTENTION.choose(query).name, ATTENTION.explain(query)))
    return rows
