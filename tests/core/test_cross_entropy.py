"""Cross-entropy against fp64 torch: chunks, smoothing, soft cap, ignored targets."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lumen_core.cross_entropy import _weighted, cross_entropy, linear_cross_entropy

OPTIONS = [{}, {"label_smoothing": 0.1}, {"softcap": 2.0}, {"label_smoothing": 0.3, "softcap": 5.0}]


def inputs(device, tokens=11, k=8, vocabulary=37):
    hidden = torch.randn(tokens, k, device=device)
    weight = torch.randn(vocabulary, k, device=device)
    targets = torch.randint(0, vocabulary, (tokens,), device=device)
    targets[::4] = -100
    return hidden, weight, targets


def exact(hidden, weight, targets, *, softcap=None, reduction="mean", **options):
    z = hidden @ weight.t()
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    return F.cross_entropy(z, targets, reduction=reduction, **options)


def both(hidden, weight, targets, factor, fn, **options):
    """Loss and gradients, as computed and in fp64."""
    out = []
    for function, dtype in ((fn, hidden.dtype), (exact, torch.float64)):
        h, w = (t.detach().to(dtype).requires_grad_() for t in (hidden, weight))
        loss = function(h, w, targets, **options)
        (loss * factor.to(loss.dtype)).sum().backward()
        out.append([loss.detach(), h.grad, w.grad])
    return zip(*out)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("chunk", [1, 4, 11, None])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_values_and_gradients(options: dict, chunk: int | None, reduction: str, device: torch.device) -> None:
    tensors = inputs(device)
    factor = torch.rand(11, device=device) if reduction == "none" else torch.tensor(0.3, device=device)

    def fn(h, w, t, **o):
        return linear_cross_entropy(h, w, t, chunk=chunk, **o)

    for got, want in both(*tensors, factor, fn, reduction=reduction, **options):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("vocabulary", [37, 9001])
def test_given_logits(options: dict, inplace: bool, vocabulary: int, device: torch.device) -> None:
    def fn(h, w, t, **o):
        return cross_entropy(h @ w.t(), t, inplace=inplace, **o)

    tensors = inputs(device, vocabulary=vocabulary)
    for got, want in both(*tensors, torch.tensor(0.3, device=device), fn, **options):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)


def test_bf16(device: torch.device) -> None:
    hidden, weight, targets = inputs(device, tokens=40)
    tensors = hidden.bfloat16(), weight.bfloat16(), targets
    factor = torch.ones((), device=device)
    for got, want in both(*tensors, factor, lambda *a, **o: linear_cross_entropy(*a, chunk=16, **o)):
        assert (got.double() - want).norm() <= 8e-3 * want.norm()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradcheck(reduction: str) -> None:
    hidden, weight, targets = inputs("cpu", tokens=5, vocabulary=7)
    leaves = [t.double().requires_grad_() for t in (hidden, weight)]
    options = {"chunk": 2, "softcap": 3.0, "reduction": reduction}
    assert torch.autograd.gradcheck(lambda h, w: linear_cross_entropy(h, w, targets, **options), leaves)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_b28_nothing_to_learn_gives_zero(reduction: str, device: torch.device) -> None:
    for tokens in (0, 6):
        hidden, weight, targets = inputs(device, tokens=tokens)
        targets[:] = -100
        leaves = [t.requires_grad_() for t in (hidden, weight)]
        loss = linear_cross_entropy(*leaves, targets, chunk=4, reduction=reduction)
        loss.sum().backward()
        for t in (loss, *[t.grad for t in leaves]):
            assert torch.equal(t, torch.zeros_like(t))


def test_split_into_batches_sums_to_one_batch(device: torch.device) -> None:
    """B32: sums over the global number of targets do not depend on the split."""
    hidden, weight, targets = inputs(device, tokens=12)
    count = (targets != -100).sum()
    parts = [linear_cross_entropy(hidden[s], weight, targets[s], reduction="sum") for s in (slice(0, 2), slice(2, 12))]
    torch.testing.assert_close(sum(parts) / count, linear_cross_entropy(hidden, weight, targets))


def test_large_logits_stay_finite(device: torch.device) -> None:
    logits = torch.zeros(2, 70, device=device)
    logits[0, 3], logits[1] = 1e4, -1e30
    loss = cross_entropy(logits, torch.tensor([3, 0], device=device), reduction="sum")
    torch.testing.assert_close(loss, torch.tensor(70.0, device=device).log())


def test_masked_logits(device: torch.device) -> None:
    """A vocabulary whose first blocks are all minus infinity, as padding or banned tokens are."""
    logits = torch.full((1, 20000), float("-inf"), device=device)
    logits[0, -2:] = 1.0
    leaf = logits.requires_grad_()
    loss = cross_entropy(leaf, torch.tensor([19999], device=device))
    loss.backward()
    torch.testing.assert_close(loss, torch.tensor(2.0, device=device).log())
    torch.testing.assert_close(leaf.grad[0, -2:], torch.tensor([0.5, -0.5], device=device))
    assert torch.equal(leaf.grad[0, :-2], torch.zeros(19998, device=device))


class Largest(TorchDispatchMode):
    """Most elements of any tensor made, by dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[torch.dtype, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else (out,):
            if isinstance(t, torch.Tensor):
                self.found[t.dtype] = max(self.found.get(t.dtype, 0), t.numel())
        return out


def test_no_more_logits_than_a_chunk(device: torch.device) -> None:
    hidden, weight, targets = inputs(device, tokens=64, k=2, vocabulary=100)
    factor = torch.ones(64, device=device)
    with Largest() as seen:  # which sees nothing within an operation, so its body is called
        _weighted._init_fn(hidden, weight, targets, factor, 4, -100, 0.0, None, True, True)
    assert 400 <= max(seen.found.values()) < 64 * 100 / 8


def test_a_target_outside_the_vocabulary(device: torch.device) -> None:
    hidden, weight, targets = inputs(device)
    for wrong in (37, -1):
        targets[1] = wrong
        if device.type == "cpu":
            for reduction in ("mean", "none"):
                with pytest.raises(ValueError, match=f"target {wrong} is outside a vocabulary of 37"):
                    linear_cross_entropy(hidden, weight, targets, reduction=reduction)
            with pytest.raises(ValueError, match="outside a vocabulary"):
                cross_entropy(hidden @ weight.t(), targets)
        else:
            loss = linear_cross_entropy(hidden, weight, targets, reduction="none")
            assert loss.isnan().tolist() == [i == 1 for i in range(11)]


def test_overwriting_is_noticed(device: torch.device) -> None:
    hidden, weight, targets = inputs(device)
    weight.requires_grad_()
    logits = hidden @ weight.t()
    other = logits.square().sum()  # keeps the logits
    loss = cross_entropy(logits, targets, inplace=True) + other
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with pytest.raises(ValueError, match="no leaf"):
        cross_entropy(logits.detach().requires_grad_(), targets, inplace=True)


def test_autocast_and_errors(device: torch.device) -> None:
    hidden, weight, targets = inputs(device)
    weight.requires_grad_()
    with torch.autocast(device.type, torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, targets)
    loss.backward()
    assert loss.dtype == weight.grad.dtype == torch.float32
    assert not torch.equal(loss, linear_cross_entropy(hidden, weight, targets))  # the products were in bf16
    with pytest.raises(TypeError, match=r"hidden is torch\.bfloat16"):
        linear_cross_entropy(hidden.bfloat16(), weight, targets)
    for options in ({"label_smoothing": 2.0}, {"reduction": "avg"}, {"softcap": 0.0}, {"chunk": 0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            linear_cross_entropy(hidden, weight, targets, **options)
    with pytest.raises(ValueError, match="do not fit"):
        linear_cross_entropy(hidden, weight, targets[:3])


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiled_whole(reduction: str, device: torch.device) -> None:
    torch._dynamo.reset()
    tensors = inputs(device)
    fn = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
    factor = torch.ones((), device=device)
    for got, want in both(*tensors, factor, lambda *a, **o: fn(*a, chunk=4, **o), reduction=reduction):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)
    of_logits = torch.compile(cross_entropy, fullgraph=True, backend="aot_eager")
    for got, want in both(*tensors, factor, lambda h, w, t: of_logits(h @ w.t(), t, inplace=True)):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)
