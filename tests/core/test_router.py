"""Top-k routing: choice, weights, groups, bias, ties."""

from __future__ import annotations

import pytest
import torch

from lumen_core.router import topk_route


def by_hand(logits, k, score, groups, topk_groups, bias, renormalize):
    """One token at a time, in Python floats."""
    weights, indices = [], []
    for row in logits.double().tolist():
        z = torch.tensor(row, dtype=torch.float64)
        scores = (z.softmax(0) if score == "softmax" else z.sigmoid()).tolist()
        choice = [s + (0.0 if bias is None else b) for s, b in zip(scores, bias.tolist() if bias is not None else row)]
        allowed = set(range(len(row)))
        if groups:
            size, best = len(row) // groups, 2 if score == "sigmoid" else 1
            sums = [sum(sorted(choice[g * size : (g + 1) * size])[-best:]) for g in range(groups)]
            kept = sorted(range(groups), key=lambda g: (-sums[g], g))[:topk_groups]
            allowed = {g * size + i for g in kept for i in range(size)}
        top = sorted(allowed, key=lambda e: (-choice[e], e))[:k]
        total = sum(scores[e] for e in top) if renormalize else 1.0
        indices.append(top)
        weights.append([scores[e] / total for e in top])
    return torch.tensor(weights, dtype=torch.float64), torch.tensor(indices)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(
    ("k", "groups", "topk_groups"), [(1, None, None), (3, None, None), (12, None, None), (4, 4, 2)]
)
def test_against_a_loop(score, biased, renormalize, k, groups, topk_groups, device: torch.device) -> None:
    logits = torch.randn(50, 12, device=device) * 2
    bias = -torch.rand(12, device=device) * 2 if biased else None
    options = {"score": score, "groups": groups, "topk_groups": topk_groups, "bias": bias, "renormalize": renormalize}
    weights, indices = topk_route(logits, k, **options)
    want_weights, want_indices = by_hand(logits, k, score, groups, topk_groups, bias, renormalize)
    assert torch.equal(indices.cpu(), want_indices) and weights.dtype == torch.float32
    torch.testing.assert_close(weights.cpu().double(), want_weights, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_gradcheck(score: str) -> None:
    logits = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z: topk_route(z, 2, score=score, bias=bias.detach())[0], logits)
    topk_route(logits, 2, score=score, bias=bias)[0].square().sum().backward()
    assert bias.grad is None and logits.grad.abs().sum() > 0


def test_b42_fp32_under_autocast_and_from_bf16(device: torch.device) -> None:
    logits = torch.tensor([[4.001, 4.002, 0.0, 0.0]], device=device)
    with torch.autocast(device.type, torch.bfloat16):
        weights, indices = topk_route(logits, 1, renormalize=False)
    assert indices.tolist() == [[1]] and weights.dtype == torch.float32
    bf16 = torch.randn(4096, 64, device=device).bfloat16()
    for score in ("softmax", "sigmoid"):
        for a, b in zip(topk_route(bf16, 2, score=score), topk_route(bf16.float(), 2, score=score)):
            assert torch.equal(a, b)


def test_ties_go_to_the_lower_index(device: torch.device) -> None:
    logits = torch.zeros(300, 128, device=device)
    assert topk_route(logits, 5)[1].unique(dim=0).tolist() == [[0, 1, 2, 3, 4]]
    assert topk_route(logits, 3, groups=4, topk_groups=1)[1].unique(dim=0).tolist() == [[0, 1, 2]]


def test_extremes(device: torch.device) -> None:
    """B70: k = 1 gives weight 1; no token is no error; scores that underflow give no NaN."""
    assert torch.equal(topk_route(torch.randn(5, 8, device=device), 1)[0], torch.ones(5, 1, device=device))
    weights, indices = topk_route(torch.zeros(0, 8, device=device), 2)
    assert weights.shape == indices.shape == (0, 2)
    logits = torch.full((1, 4), -500.0, device=device, requires_grad=True)
    weights, _ = topk_route(logits, 2, score="sigmoid")
    weights.sum().backward()
    assert torch.isfinite(weights).all() and torch.isfinite(logits.grad).all()


def test_compiled_whole(device: torch.device) -> None:
    torch._dynamo.reset()
    logits = torch.randn(6, 8, device=device)
    options = {"score": "sigmoid", "groups": 4, "topk_groups": 2}
    got = torch.compile(topk_route, fullgraph=True, backend="aot_eager")(logits, 2, **options)
    for a, b in zip(got, topk_route(logits, 2, **options)):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"score": "relu"}, "score='relu'"),
        ({"k": 9}, "k=9"),
        ({"groups": 3, "topk_groups": 1}, "groups=3"),
        ({"groups": 4}, "give both"),
        ({"groups": 4, "topk_groups": 5}, "topk_groups=5"),
        ({"k": 3, "groups": 4, "topk_groups": 1}, "hold fewer"),
        ({"bias": torch.zeros(3)}, "bias of shape"),
    ],
)
def test_errors(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        topk_route(torch.zeros(2, 8), **{"k": 2, **options})
