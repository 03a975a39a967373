"""Rotary embedding against complex multiplication in fp64."""

from __future__ import annotations

import math

import pytest
import torch

from lumen_core.rope import apply_rope, rope_tables

LIMIT = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}


def exact(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`x [..., S, H, D]` as complex numbers times e^(i angle)."""
    half = cos.shape[-1]
    z = torch.complex(x[..., :half].double(), x[..., half : 2 * half].double())
    z = z * torch.complex(cos.double(), sin.double())[..., None, :]
    return torch.cat((z.real, z.imag, x[..., 2 * half :].double()), -1)


@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize("tokens", [(2, 5), (7,), (1, 1)])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (33, 1)])
@pytest.mark.parametrize(("dim", "rotary"), [(16, 16), (128, 128), (24, 12), (30, 10)])
def test_values_and_gradients(dtype, tokens, heads, dim: int, rotary: int, device: torch.device) -> None:
    q, k = (torch.randn(*tokens, h, dim, device=device).to(dtype).requires_grad_() for h in heads)
    cos, sin = rope_tables(torch.arange(tokens[-1], device=device) * 3, rotary)
    outs, grads = apply_rope(q, k, cos, sin), [torch.randn_like(q), torch.randn_like(k)]
    torch.autograd.backward(outs, grads)
    for x, y, g in zip((q, k), outs, grads):
        assert y.dtype == x.grad.dtype == dtype and y.is_contiguous()
        for got, want in ((y, exact(x.detach(), cos, sin)), (x.grad, exact(g, cos, -sin))):
            assert (got.double() - want).norm() <= LIMIT[dtype] * want.norm()


def test_positions_of_each_sequence_and_shared_tables_agree(device: torch.device) -> None:
    q, k = torch.randn(2, 3, 4, 2, 8, device=device)
    cos, sin = rope_tables(torch.arange(4, device=device), 8)
    want = apply_rope(q, k, cos, sin)
    for tables in ((cos[None], sin[None]), (cos.expand(3, 4, 4), sin.expand(3, 4, 4))):
        for a, b in zip(apply_rope(q, k, *tables), want):
            assert torch.equal(a, b)
    cos, sin = rope_tables(torch.tensor([[0, 1, 2, 3], [0, 1, 0, 1], [9, 8, 7, 6]], device=device), 8)
    torch.testing.assert_close(apply_rope(q, k, cos, sin)[0].double(), exact(q, cos, sin), rtol=1e-6, atol=1e-6)


def test_slices_of_a_fused_projection(device: torch.device) -> None:
    qkv = torch.randn(2, 5, 8, 16, device=device)
    q, k, _ = qkv.split((4, 2, 2), dim=2)
    cos, sin = rope_tables(torch.arange(5, device=device), 16)
    for x, y in zip((q, k), apply_rope(q, k, cos, sin)):
        torch.testing.assert_close(y.double(), exact(x, cos, sin), rtol=1e-6, atol=1e-6)
    turned = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(apply_rope(turned, k, cos, sin)[0], apply_rope(q, k, cos, sin)[0])


def test_gradcheck_and_unused_keys() -> None:
    q, k = (torch.randn(2, 3, h, 6, dtype=torch.float64, requires_grad=True) for h in (2, 1))
    angle = torch.randn(3, 2, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda q, k: apply_rope(q, k, angle.cos(), angle.sin()), (q, k))


def test_b44_long_contexts(device: torch.device) -> None:
    """Scores depend on the distance only, up to a million tokens in; bf16 tables and positions are refused."""
    q, k = torch.randn(2, 1, 1, 64, device=device)
    scores = []
    for start in (0, 4095, 1_000_000):
        cos, sin = rope_tables(torch.tensor([start, start + 17], device=device), 64)
        assert cos.dtype == torch.float32
        q_out, _ = apply_rope(q, k, cos[:1], sin[:1])
        _, k_out = apply_rope(q, k, cos[1:], sin[1:])
        scores.append((q_out * k_out).sum())
    for score in scores[1:]:
        torch.testing.assert_close(score, scores[0], rtol=0, atol=2e-5)
    assert cos[0, 0].item() == pytest.approx(math.cos(1_000_000), abs=1e-7)
    with pytest.raises(TypeError, match=r"must be torch\.float32"):
        apply_rope(q, k, cos[:1].bfloat16(), sin[:1].bfloat16())
    with pytest.raises(TypeError, match="must be integers"):
        rope_tables(torch.arange(3, device=device).bfloat16(), 64)


def test_no_tokens_and_wrong_shapes(device: torch.device) -> None:
    q = torch.randn(0, 4, 8, device=device, requires_grad=True)
    cos, sin = rope_tables(torch.arange(0, device=device), 8)
    out = apply_rope(q, q, cos, sin)[0]
    out.sum().backward()
    assert out.shape == q.grad.shape == (0, 4, 8)
    q = torch.randn(2, 3, 4, 8, device=device)
    for positions, rotary in ((4, 8), (6, 8), (3, 10)):
        tables = rope_tables(torch.arange(positions, device=device), rotary)
        with pytest.raises(ValueError, match="do not fit"):
            apply_rope(q, q, *tables)
    with pytest.raises(ValueError, match="rotary_dim=5"):
        rope_tables(torch.arange(3), 5)


def test_compiled_whole(device: torch.device) -> None:
    torch._dynamo.reset()
    q, k = (torch.randn(2, 3, h, 8, device=device, requires_grad=True) for h in (4, 2))
    cos, sin = rope_tables(torch.arange(3, device=device), 8)
    got = torch.compile(apply_rope, fullgraph=True, backend="aot_eager")(q, k, cos, sin)
    want = apply_rope(q, k, cos, sin)
    grads = [torch.autograd.grad([t.square().sum() + 3 * t.sum() for t in outs], (q, k)) for outs in (got, want)]
    for a, b in zip((*got, *grads[0]), (*want, *grads[1])):
        torch.testing.assert_close(a, b)
