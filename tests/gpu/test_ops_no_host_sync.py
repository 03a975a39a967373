"""Norms, SwiGLU, rotary embedding, router and cross-entropy never make the host wait, and run by Triton."""

import pytest
import torch

from lumen_core.cross_entropy import cross_entropy, linear_cross_entropy
from lumen_core.kernels.norm import NORM
from lumen_core.kernels.query import RowsQuery
from lumen_core.mlp import swiglu
from lumen_core.norm import layer_norm, rms_norm
from lumen_core.rope import apply_rope, rope_tables
from lumen_core.router import topk_route

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def step(x: torch.Tensor, weight: torch.Tensor, head: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    y = layer_norm(rms_norm(x, weight), weight, weight)
    y = swiglu(y, y, storage="fp8_row")
    cos, sin = rope_tables(torch.arange(len(y), device=y.device), 32)
    q, _ = apply_rope(y.view(-1, 4, 32), y.view(-1, 4, 32), cos, sin)
    weights, _ = topk_route(y, 4, groups=8, topk_groups=4)
    loss = linear_cross_entropy(q.reshape(y.shape), head, targets, chunk=16)
    return loss + cross_entropy(y @ head.t(), targets, inplace=True) + weights.square().sum()


def test_no_host_sync() -> None:
    x, weight, head = (
        torch.randn(s, 128, device="cuda", dtype=torch.bfloat16).squeeze(0).requires_grad_() for s in (64, 1, 1000)
    )
    targets = torch.randint(0, 1000, (64,), device="cuda")
    step(x, weight, head, targets).backward()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(x, weight, head, targets).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.isfinite(t.grad).all() for t in (x, weight, head))
    assert NORM.choose(RowsQuery("cuda", torch.bfloat16, 64, 128)).name == "triton"
