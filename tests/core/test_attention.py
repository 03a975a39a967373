"""Attention against a softmax written out in fp64: masks, documents, gradients and the noise of FP8."""

from __future__ import annotations

import pytest
import torch

from lumen_core.attention import RECIPES, attention
from lumen_core.attention_bounds import dense_bounds, document_bounds, position_bounds, query_bounds
from lumen_core.kernels.attention import ATTENTION, AttentionQuery
from lumen_core.kernels.triton import attention as triton_attention

WINDOWS = [None, (16, 0), (0, 0), (7, 5), (-1, 9), (3, -1)]
every_recipe = pytest.mark.parametrize("recipe", RECIPES)


def oracle(q, k, v, seen, scale=None):
    """Output `[B, Sq, H, D]` and statistics `[B, H, Sq]` of fp64 values; `seen` is `[Sq, Sk]`."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    s = torch.einsum("bqhd,bkhd->bhqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = s.masked_fill(~seen, -torch.inf)
    p = torch.where(seen.any(dim=-1)[:, None], torch.softmax(s, dim=-1), 0.0)
    return torch.einsum("bhqk,bkhd->bqhd", p, v), torch.logsumexp(s, dim=-1)


def mask(queries: int, keys: int, causal: bool, window, device) -> torch.Tensor:
    own = torch.arange(queries, device=device)[:, None] + keys - queries
    key = torch.arange(keys, device=device)[None]
    left, right = (-1, -1) if window is None else window
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device)
    if causal:
        seen &= key <= own
    if left >= 0:
        seen &= key >= own - left
    if right >= 0:
        seen &= key <= own + right
    return seen


def inputs(device, batch=2, queries=70, keys=70, heads=4, kv_heads=2, width=32, dtype=torch.float32):
    """q, k, v that want gradients, and a gradient of the output."""
    shapes = [(batch, queries, heads, width), (batch, keys, kv_heads, width), (batch, keys, kv_heads, width)]
    q, k, v = (torch.randn(s, device=device).to(dtype).requires_grad_() for s in shapes)
    return q, k, v, torch.randn(shapes[0], device=device).to(dtype)


def exact(q, k, v, g, seen, scale=None):
    """fp64 output, statistics and gradients of the same values."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    out, lse = oracle(q, k, v, seen, scale)
    return out, lse, torch.autograd.grad(out, (q, k, v), g.double())


def snr(got: torch.Tensor, want: torch.Tensor) -> float:
    got, want = got.detach().double(), want.detach()
    return float(10 * torch.log10(want.square().sum() / (got - want).square().sum()))


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=tolerance)


# --- which keys -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("sizes", [(20, 20), (5, 20), (20, 5), (20, 0)])
def test_bounds_are_the_mask_and_never_decrease(device, sizes, causal, window) -> None:
    first, last = dense_bounds(*sizes, causal, window, device)
    key = torch.arange(sizes[1], device=device)
    seen = (key >= first[0, :, None]) & (key < last[0, :, None])
    assert torch.equal(seen, mask(*sizes, causal, window, device))
    assert (first.diff() >= 0).all() and (last.diff() >= 0).all()
    begin, end = query_bounds(first, last, sizes[1])
    query = torch.arange(sizes[0], device=device)[:, None]
    assert torch.equal((query >= begin) & (query < end), seen)
    assert begin.dtype == end.dtype == torch.int32


def test_bounds_of_documents_told_by_lengths_and_by_positions(device) -> None:
    cu = torch.tensor([0, 3, 3, 8, 9], dtype=torch.int32, device=device)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 0], [4, 5, 6, 7, 8, 0, 1, 2, 3]], device=device)
    for causal in (True, False):
        for window in (None, (1, 1)):
            by_length = document_bounds(cu, cu, 9, causal, window)
            by_position = position_bounds(positions, causal, window)
            assert all(torch.equal(a[0], b[0]) for a, b in zip(by_length, by_position))
            two = position_bounds(positions[1:], causal, window)
            assert all(torch.equal(a[1:], b) for a, b in zip(by_position, two))
            assert two[0][0, 5] == 5 and two[1][0, 4] == 5


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("sizes", [(70, 70), (33, 150), (150, 33)])
def test_unquantized_equals_fp64(device, sizes, causal, window) -> None:
    q, k, v, g = inputs(device, queries=sizes[0], keys=sizes[1])
    seen = mask(*sizes, causal, window, device)
    want, statistics, grads = exact(q, k, v, g, seen, 0.2)
    out, lse = attention(q, k, v, causal=causal, window=window, scale=0.2, return_lse=True)
    close(out, want)
    close(lse, statistics)
    for got, expected in zip(torch.autograd.grad(out, (q, k, v), g), grads):
        close(got, expected)
    # Without the statistics another implementation may run.
    close(attention(q, k, v, causal=causal, window=window, scale=0.2), want)


@pytest.mark.parametrize(("queries", "keys"), [(5, 7), (7, 5)])
def test_gradients_including_those_of_the_statistics(queries, keys) -> None:
    q, k, v, _ = inputs("cpu", 1, queries, keys, 2, 1, 4, torch.float64)

    def run(q, k, v):
        out, lse = attention(q, k, v, return_lse=True)
        return out, lse[..., max(0, queries - keys) :]  # the first queries of the second case see nothing: -inf

    assert torch.autograd.gradcheck(run, (q, k, v))
    assert torch.autograd.gradcheck(lambda *x: run(*x)[1], (q, k, v))


def test_many_blocks_and_their_edges(device) -> None:
    """Longer than a block of queries or keys in every implementation, and a multiple of none."""
    q, k, v, g = inputs(device, 1, 601, 601, 2, 1, 16)
    for window in (None, (150, 0)):
        want, statistics, grads = exact(q, k, v, g, mask(601, 601, True, window, device))
        out, lse = attention(q, k, v, window=window, return_lse=True)
        close(out, want)
        close(lse, statistics)
        for got, expected in zip(torch.autograd.grad(out, (q, k, v), g), grads):
            close(got, expected, 2e-5)


def test_causal_bf16_equals_sdpa(device) -> None:
    q, k, v, _ = inputs(device, 1, 40, 40, 2, 2, 16, torch.bfloat16)
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    want = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)
    for out in (attention(q, k, v), attention(q, k, v, return_lse=True)[0]):
        torch.testing.assert_close(out, want, rtol=2**-7, atol=2**-8)


@pytest.mark.parametrize("flavour", ["ocp", "fnuz"])
@pytest.mark.parametrize("width", [64, 96, 128])
@pytest.mark.parametrize("recipe", ["fp8", "mxfp8"])
def test_noise_of_fp8(device, recipe, width, flavour) -> None:
    """20 dB forward, 15 dB gradients; and no better than E4M3 allows, or something was not quantized."""
    q, k, v, g = inputs(device, 1, 300, 300, 4, 2, width)
    want, _, grads = exact(q, k, v, g, mask(300, 300, True, None, device))
    out = attention(q, k, v, recipe=recipe, flavour=flavour)
    assert 24 <= snr(out, want) <= 30
    for got, expected in zip(torch.autograd.grad(out, (q, k, v), g), grads):
        assert 21 <= snr(got, expected) <= 29


def test_mxfp8_with_outlier_channels(device) -> None:
    q, k, v, g = inputs(device, 1, 300, 300, 4, 2, 64)
    with torch.no_grad():  # channels of the others' size in S, as a large one would only make S ill-conditioned
        for channel, factor in ((5, 2.0**10), (45, 2.0**-14)):
            q[..., channel] *= factor
            k[..., channel] /= factor
        v[..., 9] *= 2.0**8
        g[..., 9] *= 2.0**-8
    want, _, grads = exact(q, k, v, g, mask(300, 300, True, None, device))
    out = attention(q, k, v, recipe="mxfp8")
    quiet = [c for c in range(64) if c != 9]
    assert snr(out, want) >= 20 and snr(out[..., quiet], want[..., quiet]) >= 20
    for got, expected in zip(torch.autograd.grad(out, (q, k, v), g), grads):
        assert snr(got, expected) >= 15


def test_mxfp8_keeps_small_values_beside_large_tokens(device) -> None:
    """With one scale for the whole head, as `fp8` has it, they underflow."""
    q, k, v, g = inputs(device, 1, 300, 300, 4, 2, 64)
    with torch.no_grad():
        v[:, 256:] *= 2.0**20
    want = exact(q, k, v, g, mask(300, 300, True, None, device))[0][:, :256]
    assert snr(attention(q, k, v, recipe="mxfp8")[:, :256], want) >= 24
    assert snr(attention(q, k, v, recipe="fp8")[:, :256], want) < 10


@every_recipe
def test_grouped_queries_are_repeated_keys(device, recipe) -> None:
    q, k, v, _ = inputs(device, 1, 50, 50, 6, 2)
    repeated = [x.repeat_interleave(3, dim=2) for x in (k, v)]
    close(attention(q, k, v, recipe=recipe), attention(q, *repeated, recipe=recipe), 1e-4)
    single = attention(q, k[:, :, :1], v[:, :, :1], recipe=recipe)
    close(single, attention(q, k[:, :, :1].expand_as(q), v[:, :, :1].expand_as(q), recipe=recipe), 1e-4)


# --- packed documents -------------------------------------------------------------------------------------------------


@every_recipe
@pytest.mark.parametrize("window", [None, (10, 0)])
def test_packed_documents_equal_each_alone(device, recipe, window) -> None:
    lengths = [3, 5, 0, 90, 1, 40]
    cu = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
    q, k, v, g = (x[0] for x in inputs(device, 1, sum(lengths), sum(lengths)))
    packed, lse = attention(q, k, v, cu_seqlens_q=cu, window=window, recipe=recipe, return_lse=True)
    grads = torch.autograd.grad(packed, (q, k, v), g)
    for begin, length in zip(cu.tolist(), lengths):
        own = slice(begin, begin + length)
        one = [x[None, own].detach().requires_grad_() for x in (q, k, v)]
        out, statistics = attention(*one, window=window, recipe=recipe, return_lse=True)
        # Scales of powers of two change nothing but what underflows; a block of keys that begins elsewhere has another
        # maximum, and rounds other values.
        close(lse[:, own], statistics[0], 1e-5 if recipe == "bf16" else 2e-2)
        if recipe == "bf16":
            close(packed[own], out[0])
        elif length:
            assert snr(packed[own], out[0].double()) > 25
        for x, want in zip(grads, torch.autograd.grad(out, one, g[None, own])):
            if recipe == "bf16":
                close(x[own], want[0])
            elif length > 1:
                assert snr(x[own], want[0].double()) > 20


@every_recipe
def test_a_document_does_not_see_its_neighbours(device, recipe) -> None:
    cu = torch.tensor([0, 30, 64], device=device, dtype=torch.int32)
    q, k, v, g = (x[0].detach() for x in inputs(device, 1, 64, 64))
    before = attention(q, k, v, cu_seqlens_q=cu, causal=False, recipe=recipe)
    for x in (q, k, v):
        x[30:] = torch.randn_like(x[30:]).clamp(-1, 1)
    after = attention(q, k, v, cu_seqlens_q=cu, causal=False, recipe=recipe)
    close(after[:30], before[:30], 1e-6 if recipe == "bf16" else 2e-2)
    assert (after[30:] - before[30:]).abs().max() > 0.1


def test_documents_of_other_lengths_in_keys(device) -> None:
    """Each aligned at its end; a document without keys, one without queries, and queries beyond the last document."""
    cu_q = torch.tensor([0, 4, 6, 6, 20], device=device, dtype=torch.int32)
    cu_k = torch.tensor([0, 9, 9, 12, 20], device=device, dtype=torch.int32)
    q, k, v, g = (x[0] for x in inputs(device, 1, 22, 20))
    out, lse = attention(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, return_lse=True)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), g)
    for n in (0, 3):
        rows, columns = slice(int(cu_q[n]), int(cu_q[n + 1])), slice(int(cu_k[n]), int(cu_k[n + 1]))
        one = [q[None, rows], k[None, columns], v[None, columns]]
        seen = mask(one[0].shape[1], one[1].shape[1], True, None, device)
        want, _, grads = exact(*one, g[None, rows], seen)
        close(out[rows], want[0])
        for got, expected in zip((dq[rows], dk[columns], dv[columns]), grads):
            close(got, expected[0])
    nothing = [4, 5, *range(6, 12), 20, 21]  # no keys; the six queries more than keys; no document
    assert not out[nothing].any() and not dq[nothing].any()
    assert (lse[:, nothing] == -torch.inf).all()
    assert not dk[9:12].any() and not dv[9:12].any()


# --- edges ------------------------------------------------------------------------------------------------------------


@every_recipe
@pytest.mark.parametrize("zero", ["q", "k", "v", "rows of all", "g"])
def test_zeros(device, recipe, zero) -> None:
    q, k, v, g = inputs(device, 1, 64, 64)
    with torch.no_grad():
        for name, x in (("q", q), ("k", k), ("v", v), ("g", g)):
            if zero == name:
                x.zero_()
            elif zero == "rows of all":
                x[:, 10:50] = 0
    out = attention(q, k, v, recipe=recipe)
    grads = torch.autograd.grad(out, (q, k, v), g)
    assert all(x.isfinite().all() for x in (out, *grads))
    if zero == "v":
        assert not out.any()
    if zero == "g":
        assert not any(x.any() for x in grads)
    want, _, expected = exact(q, k, v, g, mask(64, 64, True, None, device))
    for got, x in zip((out, *grads), (want, *expected)):
        assert (got.double() - x).norm() <= 0.12 * x.norm() + 1e-6


@every_recipe
def test_queries_that_see_nothing(device, recipe) -> None:
    q, k, v, g = inputs(device, 1, 90, 20)
    out, lse = attention(q, k, v, recipe=recipe, return_lse=True)
    dq, dk, dv = torch.autograd.grad((out, lse), (q, k, v), (g, torch.zeros_like(lse)))
    assert not out[:, :70].any() and not dq[:, :70].any() and (lse[..., :70] == -torch.inf).all()
    assert all(x.isfinite().all() for x in (out, dq, dk, dv)) and out[:, 70:].any() and dk.any()


@every_recipe
@pytest.mark.parametrize("sizes", [(2, 0, 5), (2, 5, 0), (0, 5, 5), (2, 0, 0)])
def test_nothing_at_all(device, recipe, sizes) -> None:
    batch, queries, keys = sizes
    q, k, v, g = inputs(device, batch, queries, keys)
    out, lse = attention(q, k, v, recipe=recipe, return_lse=True)
    assert out.shape == q.shape and lse.shape == (batch, 4, queries) and not out.any()
    for x, grad in zip((q, k, v), torch.autograd.grad(out, (q, k, v), g)):
        assert grad.shape == x.shape and not grad.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"recipe": "fp4"}, "recipe='fp4'"),
        ({"k": (2, 8, 3, 16), "v": (2, 8, 3, 16)}, "multiple of key heads"),
        ({"v": (2, 7, 2, 16)}, "must agree"),
        ({"q": (8, 4, 16)}, "expected \\[B, S, H, D\\]"),
        ({"cu_seqlens_q": torch.tensor([0, 8], dtype=torch.int32)}, "expected \\[T, H, D\\]"),
        ({"cu_seqlens_k": torch.tensor([0, 8], dtype=torch.int32)}, "without cu_seqlens_q"),
        ({"window": (1.5, 0)}, "window="),
        ({"dtype": torch.int32}, "floating-point"),
    ],
)
def test_errors_name_what_is_wrong(change, message) -> None:
    shapes = {"q": (2, 8, 4, 16), "k": (2, 8, 2, 16), "v": (2, 8, 2, 16)}
    dtype = change.pop("dtype", torch.float32)
    q, k, v = (torch.zeros(change.pop(name, shape), dtype=dtype) for name, shape in shapes.items())
    with pytest.raises(ValueError, match=message):
        attention(q, k, v, **change)


def test_errors_of_packed_lengths() -> None:
    q = torch.zeros(8, 2, 16)
    cu = torch.tensor([0, 3, 8], dtype=torch.int32)
    with pytest.raises(ValueError, match="expected int32"):
        attention(q, q, q, cu_seqlens_q=cu.long())
    with pytest.raises(ValueError, match="2 documents of queries, 1 of keys"):
        attention(q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu[:2])
    with pytest.raises(ValueError, match="as many queries as keys"):
        attention(q, q[:4], q[:4], cu_seqlens_q=cu)


# --- choice and compilation -------------------------------------------------------------------------------------------


def test_choice_by_environment(device, monkeypatch) -> None:
    q, k, v, _ = inputs(device, 1, 20, 20)
    usual = attention(q, k, v)
    monkeypatch.setenv("LUMEN_KERNELS", "attention=reference")
    close(attention(q, k, v), usual)
    monkeypatch.setenv("LUMEN_KERNELS", "attention=sdpa")
    with pytest.raises(ValueError, match="packed documents"):
        attention(q, k, v, window=(3, 0))
    assert ATTENTION.candidates[-1].name == "reference"


@pytest.mark.parametrize(
    ("change", "chosen"),
    [
        ({}, "sdpa"),
        ({"lse": True}, "triton"),
        ({"only_causal": False}, "triton"),
        ({"queries": 5}, "triton"),
        ({"recipe": "fp8"}, "triton"),
        ({"recipe": "mxfp8", "dtype": torch.float32}, "triton"),
        ({"recipe": "fp8", "flavour": "fnuz"}, "reference"),
        ({"recipe": "fp8", "head_dim": 320}, "reference"),
        ({"lse": True, "dtype": torch.float32}, "reference"),
        ({"recipe": "fp8", "device_type": "cpu"}, "reference"),
    ],
)
def test_choice_on_a_gpu_also_while_compiling(change, chosen, monkeypatch) -> None:
    monkeypatch.setattr(triton_attention, "_arch", lambda: "sm_90")
    monkeypatch.setattr(triton_attention, "has_triton", lambda: True)
    usual = dict(device_type="cuda", dtype=torch.bfloat16, recipe="bf16", flavour="ocp", batch=1, queries=9, keys=9)
    usual |= dict(heads=4, kv_heads=2, head_dim=64, causal=True, only_causal=True, lse=False)
    torch._dynamo.reset()

    def choose(x: torch.Tensor) -> tuple[torch.Tensor, str]:
        return x + 1, ATTENTION.choose(AttentionQuery(**usual | change)).name

    x = torch.zeros(1)
    assert choose(x)[1] == chosen
    assert torch.compile(choose, fullgraph=True, backend="eager")(x)[1] == chosen


@every_recipe
@pytest.mark.parametrize("packed", [False, True])
def test_compiles_as_one_graph(device, recipe, packed) -> None:
    torch._dynamo.reset()
    q, k, v, g = inputs(device, 1, 40, 40)
    options = {"cu_seqlens_q": torch.tensor([0, 11, 40], dtype=torch.int32, device=device)} if packed else {}
    squeeze = (lambda x: x[0]) if packed else (lambda x: x)

    def run(q, k, v):
        return attention(squeeze(q), squeeze(k), squeeze(v), recipe=recipe, **options)

    out, want = torch.compile(run, fullgraph=True)(q, k, v), run(q, k, v)
    close(out, want)
    grads = (torch.autograd.grad(x, (q, k, v), squeeze(g)) for x in (out, want))
    for got, expected in zip(*grads):
        close(got, expected)


@every_recipe
def test_operations_are_registered_as_torch_asks(recipe) -> None:
    q, k, v, _ = inputs("cpu", 1, 20, 20, 2, 1, 16)
    bounds = dense_bounds(20, 20, True, None, torch.device("cpu"))
    torch.library.opcheck(torch.ops.lumen.attention.default, (q, k, v, *bounds, 0.25, recipe, "ocp", "reference"))
