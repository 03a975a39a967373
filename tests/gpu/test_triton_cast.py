"""Triton casts on a GPU, bit for bit against the reference on the same device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lumen_core import casts, requantize
from lumen_core.formats import ElementFormat, element_format, resolve_flavour
from lumen_core.kernels import registry
from lumen_core.tensor import quantize

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="Triton kernels run on a GPU only")
if torch.cuda.is_available():
    pytest.importorskip("triton", reason="needs the triton package")

from lumen_core.kernels.triton import amax, cast, retile  # noqa: E402

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Aligned, ragged against every tile and block, tiny, one row, one column, rows longer than one pass keeps.
SHAPES = [(256, 512), (130, 257), (70, 48), (1, 1), (3, 33), (1, 5000), (300, 1), (5, 16400), (2, 40000)]
KINDS = ["random", "scales", "edges", "nan"]
ROUNDINGS = ["ceil", "floor", "even"]
TENSOR_AND_ROW = [(0, 0), (1, 0)]

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# Each combination compiles kernels of its own: the odd shapes in one dtype are enough.
SHAPES_AND_DTYPES = [(s, d) for i, s in enumerate(SHAPES) for d in DTYPES if i < 3 or d == torch.bfloat16]
every_matrix = pytest.mark.parametrize(("shape", "dtype"), SHAPES_AND_DTYPES, ids=str)
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
every_kind = pytest.mark.parametrize("kind", KINDS)
every_element = pytest.mark.parametrize("element", ["e4m3", "e5m2"])


def here(element: str) -> ElementFormat:
    return element_format(element, resolve_flavour("auto", torch.device("cuda")))


def sample(shape: tuple[int, int], dtype: torch.dtype, kind: str) -> torch.Tensor:
    """Values over many binary orders; with zero blocks, subnormals and ties; with NaN and infinities."""
    x = torch.randn(shape, device="cuda")
    if kind == "random":
        return x.to(dtype)
    x *= torch.exp2(torch.randint(-12, 13, shape, device="cuda").float())
    if kind == "scales":  # powers of two and their neighbours: where a scale rounds
        x = torch.exp2(x.abs().log2().round().clamp(-14, 15)) * (1 + 2.0**-9 * torch.randint(-2, 3, shape).to(x))
    if kind in ("edges", "nan"):
        rows, columns = shape
        x[: rows // 3] = 0
        x[:, : columns // 3] = -0.0
        x[rows // 2] *= 2.0**-128  # subnormal in fp32 and bf16, zero in fp16
        x[rows - 1 :, : columns // 2] = torch.randint(-16, 17, (1, columns // 2), device="cuda") / 16  # ties
        x.view(-1)[-1] = 3e38 if dtype != torch.float16 else 65504.0
    if kind == "nan":
        count = max(1, x.numel() // 300)
        bad = torch.tensor([float("nan"), float("inf"), -float("inf"), -float("nan")], device="cuda")
        at = torch.randint(0, x.numel(), (count,), device="cuda")
        x.view(-1)[at] = bad[torch.randint(0, 4, (count,), device="cuda")]
    return x.to(dtype)


def assert_same(got: torch.Tensor, want: torch.Tensor, what: Any = "") -> None:
    """Equal bits, and NaN (whose payload and sign nobody reads) in the same places."""
    assert got.dtype == want.dtype and got.shape == want.shape and got.is_contiguous(), what
    if got.dtype in (torch.uint8, casts.E8M0_DTYPE):
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)), what
        return
    nan = want.float().isnan()
    assert torch.equal(got.float().isnan(), nan), what
    bits = torch.int32 if got.dtype == torch.float32 else torch.uint8
    differ = (got.view(bits) != want.view(bits)) & ~nan
    assert not differ.any(), (what, int(differ.sum()), got.float()[differ][:4], want.float()[differ][:4])


def check(x: torch.Tensor, fmt: ElementFormat, block: tuple[int, int], **options: Any) -> None:
    codes, scale = cast.quantize(x, fmt, block, **options)
    want = casts.quantize(x, fmt, block, **options)
    assert_same(scale, want[1], ("scale", block, options))
    assert_same(codes, want[0].contiguous(), ("codes", block, options))


# --- casts ------------------------------------------------------------------------------------------------------------


@every_kind
@every_matrix
@every_element
def test_mx(element, shape, dtype, kind):
    x = sample(shape, dtype, kind)
    for block in cast.MX_BLOCKS:
        for rounding in ROUNDINGS:
            check(x, here(element), block, mx=True, rounding=rounding)


@every_kind
@every_matrix
@every_element
def test_tensor_and_row(element, shape, dtype, kind):
    x = sample(shape, dtype, kind)
    for block in TENSOR_AND_ROW:
        for pow2 in (False, True):
            check(x, here(element), block, pow2=pow2)


@every_kind
@every_matrix
def test_fp32_blocks(shape, dtype, kind):
    x = sample(shape, dtype, kind)
    for block in cast.FP32_BLOCKS:
        for pow2 in (False, True):
            check(x, here("e4m3"), block, pow2=pow2)
    check(x, here("e5m2"), (1, 128))
    check(x, here("e5m2"), (128, 128), pow2=True)


@every_dtype
@every_element
def test_a_known_scale_or_amax(element, dtype):
    fmt = here(element)
    x = sample((130, 257), dtype, "edges")
    for value in (1.0, 0.0, 1e-30, 3e38, float("inf"), float("nan")):
        amax_ = torch.tensor(value, device="cuda")
        for margin in (0, 3):
            check(x, fmt, (0, 0), amax=amax_, margin=margin)
            check(x, fmt, (0, 0), amax=amax_, margin=margin, pow2=True)
        scale = casts.scale_from_amax(amax_, fmt)
        want = casts.encode(x.float() * (1.0 / scale), fmt)
        assert_same(cast.cast_tensor(x, fmt, scale), want)
        assert_same(cast.cast_tensor(x.view(-1), fmt, scale), want.view(-1))


@pytest.mark.parametrize("offset", [1, 3, 8])
@every_dtype
def test_storage_that_starts_anywhere(dtype, offset):
    """A shard is a view into a flat buffer: its first byte need not be aligned."""
    x = torch.randn(64 * 96 + offset, device="cuda").to(dtype)[offset:].view(64, 96)
    fmt = here("e4m3")
    for block in (*TENSOR_AND_ROW, (1, 128), (128, 128)):
        check(x, fmt, block)
    check(x, fmt, (32, 32), mx=True)
    codes, scale = casts.quantize_mx(x, fmt, (32, 32))
    shifted = torch.empty(64 * 96 + offset, dtype=torch.uint8, device="cuda")[offset:].view(64, 96)
    shifted.copy_(codes.view(torch.uint8))
    assert_same(retile.transpose_bytes(shifted), shifted.t().contiguous())
    want = requantize.mx_to_tensor(codes, scale, fmt, (32, 32), (64, 96))
    assert_same(retile.mx_to_tensor(shifted.view(codes.dtype), scale, fmt)[0], want[0])


def test_every_bf16_value():
    """All 65536, each as its own 1x32 block beside zeros, and all at scale 1."""
    bits = torch.arange(65536, device="cuda").to(torch.int16)
    x = torch.zeros(65536, 32, dtype=torch.bfloat16, device="cuda")
    x[:, 5] = bits.view(torch.bfloat16)
    for element in ("e4m3", "e5m2"):
        for rounding in ROUNDINGS:
            check(x, here(element), (1, 32), mx=True, rounding=rounding)
        one = torch.ones((), device="cuda")
        flat = x[:, 5].contiguous()
        assert_same(cast.cast_tensor(flat, here(element), one), casts.encode(flat.float(), here(element)))


def test_empty():
    fmt = here("e4m3")
    for shape in ((0, 64), (64, 0)):
        x = torch.empty(shape, device="cuda")
        for block, mx in (((1, 32), True), ((32, 32), True), ((1, 128), False), ((128, 128), False)):
            check(x, fmt, block, mx=mx)
        scale = torch.ones((), device="cuda")
        assert cast.cast_tensor(x, fmt, scale).shape == shape
        codes = x.to(fmt.dtype)
        assert retile.transpose_bytes(codes).shape == shape[::-1]
        assert retile.mx_to_tensor(codes, x.to(torch.uint8), fmt, transposed=True)[0].shape == shape[::-1]
    check(torch.empty(0, 64, device="cuda"), fmt, (1, 0))


def test_strided_input_is_refused():
    with pytest.raises(ValueError, match="contiguous"):
        cast.cast_mx(torch.ones(32, 64, device="cuda").t(), here("e4m3"))
    with pytest.raises(ValueError, match=r"cieling.*ceil.*floor.*even"):
        cast.cast_mx(torch.ones(32, 64, device="cuda"), here("e4m3"), (1, 32), "cieling")


# --- amax -------------------------------------------------------------------------------------------------------------


def largest(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([t.abs().amax().float() if t.numel() else torch.zeros((), device="cuda") for t in tensors])


def test_absmax():
    tensors = [sample(shape, dtype, kind) for shape in SHAPES for dtype in DTYPES for kind in KINDS]
    tensors += [torch.empty(0, device="cuda"), torch.empty(4, 0, device="cuda", dtype=torch.bfloat16)]
    tensors += [torch.randn(1001, device="cuda")[1:], torch.randn(60, 70, device="cuda").t()]
    tensors += [torch.full((9000,), -2.0, device="cuda"), torch.full((3,), float("-inf"), device="cuda")]
    order = torch.randperm(len(tensors)).tolist()
    tensors = [tensors[i] for i in order]
    assert_same(amax.absmax(tensors), largest(tensors))
    same_dtype = [t for t in tensors if t.dtype == torch.bfloat16 and t.data_ptr() % 16 == 0]
    for some in (same_dtype, same_dtype[:1], [torch.empty(0, device="cuda")], [torch.randn(1, device="cuda")]):
        assert_same(amax.absmax(some), largest(some))


def test_absmax_of_tensors_that_several_programs_share():
    tensors = [torch.randn(n, device="cuda", dtype=torch.bfloat16) for n in (70_000_000, 3, 8 * 8192 + 5, 12_345_678)]
    for t in tensors:
        t[-1] = 77.0
    assert amax.absmax(tensors).tolist() == [77.0] * 4
    assert amax.absmax(tensors[:1]).tolist() == [77.0]
    with pytest.raises(ValueError, match="absmax"):
        amax.absmax([tensors[0], torch.ones(3, device="cuda", dtype=torch.float64)])


# --- codes to codes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["random", "scales", "edges", "nan"])
@every_shape
@every_element
def test_mx_to_tensor(element, shape, kind):
    fmt = here(element)
    x = sample(shape, torch.float32, kind)
    codes, scale = casts.quantize_mx(x, fmt, (32, 32))
    want, tensor_scale = requantize.mx_to_tensor(codes, scale, fmt, (32, 32), shape)
    for transposed in (False, True):
        got = retile.mx_to_tensor(codes, scale, fmt, transposed=transposed)
        assert_same(got[0], want.t().contiguous() if transposed else want)
        assert_same(got[1], tensor_scale)


@every_shape
def test_transpose_bytes(shape):
    codes = torch.randint(0, 256, shape, device="cuda", dtype=torch.uint8)
    assert_same(retile.transpose_bytes(codes), codes.t().contiguous())
    fp8 = codes.view(here("e4m3").dtype)
    turned = retile.transpose_bytes(fp8)
    assert turned.dtype == fp8.dtype and torch.equal(turned.view(torch.uint8), codes.t())


# --- the choice -------------------------------------------------------------------------------------------------------

RECIPES = [
    ((0, 0), {}),
    ((0, 0), {"margin": 1, "pow2": True}),
    ((1, 0), {}),
    ((1, 128), {}),
    ((128, 128), {"pow2": True}),
    ((1, 32), {"mx": True, "rounding": "even"}),
    ((32, 32), {"mx": True}),
]


@pytest.mark.parametrize(("block", "options"), RECIPES, ids=str)
def test_quantize_runs_the_kernel(block, options, monkeypatch):
    launched = []
    run = cast.quantize
    monkeypatch.setattr(cast, "quantize", lambda *a, **k: launched.append(1) or run(*a, **k))
    fmt = here("e4m3")
    x = torch.randn(130, 256, device="cuda", dtype=torch.bfloat16)
    for source in (x, torch.nn.Parameter(x), x.t()):
        with torch.no_grad():
            got = quantize(source, fmt, block, **options)
            monkeypatch.setenv(registry.ENVIRONMENT, "quantize=reference")
            want = quantize(source, fmt, block, **options)
            monkeypatch.delenv(registry.ENVIRONMENT)
        assert_same(got.data, want.data.contiguous())
        assert_same(got.scale, want.scale)
    assert len(launched) == 3
    noise = torch.rand(130, 256, device="cuda")
    quantize(x, fmt, block, noise=noise, **options)
    assert len(launched) == 3


@pytest.mark.parametrize(("block", "options"), RECIPES[-2:], ids=str)
def test_the_compiler_traces_the_reference(block, options, monkeypatch):
    fmt = here("e4m3")
    x = torch.randn(128, 256, device="cuda", dtype=torch.bfloat16)

    def cast_twice(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = quantize(x * 2, fmt, block, **options)
        return out.data, out.scale.view(torch.uint8)

    want = cast_twice(x)
    monkeypatch.setattr(cast, "quantize", lambda *a, **k: pytest.fail("a kernel was launched"))
    got = torch.compile(cast_twice, fullgraph=True)(x)
    for a, b in zip(got, want):
        assert_same(a, b)


def test_nothing_waits_for_the_host():
    fmt = here("e4m3")
    x = torch.randn(130, 256, device="cuda", dtype=torch.bfloat16)
    many = [x, x[:1], torch.randn(5000, device="cuda", dtype=torch.bfloat16)]
    codes, scale = casts.quantize_mx(x, fmt, (32, 32))

    def everything() -> None:
        for block, options in RECIPES:
            quantize(x, fmt, block, **options)
        amax.absmax(many)
        amax.absmax([*many, torch.zeros(5, device="cuda")])
        retile.mx_to_tensor(codes, scale, fmt, transposed=True)
        retile.transpose_bytes(codes)

    everything()
    torch.cuda.set_sync_debug_mode("error")
    try:
        everything()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# --- B73: more than 2**31 values --------------------------------------------------------------------------------------


def needs_memory(gib: int) -> None:
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] / 2**30
    if free < gib:
        pytest.skip(f"needs {gib} GiB of free GPU memory, has {free:.0f}")


@pytest.mark.parametrize("shape", [(70016, 32768), (33, 2**26 + 32)], ids=str)
def test_b73_casts_of_more_than_2_31_values(shape):
    """The last rows against a cast of only these; the second shape overflows within one tile."""
    needs_memory(24)
    fmt = here("e4m3")
    x = torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_()
    assert x.numel() > 2**31
    rows = 32 if shape[0] % 32 == 0 else 1
    last = x[-rows:]
    x[0, 0] = 100.0
    for block, options in [((1, 32), {"mx": True}), ((32, 32), {"mx": True}), ((1, 128), {})]:
        codes, scale = cast.quantize(x, fmt, block, **options)
        want = casts.quantize(last, fmt, block, **options)
        assert_same(codes[-rows:], want[0])
        assert_same(scale[-want[1].shape[0] :], want[1])
        del codes, scale, want
    codes, scale = cast.quantize(x, fmt, (0, 0))
    want, want_scale = casts.quantize(last, fmt, (0, 0), amax=torch.tensor(100.0, device="cuda"))
    assert_same(scale, want_scale)
    assert_same(codes[-rows:], want)
    del codes, want
    codes, scale = cast.cast_row(x, fmt)
    want, want_scale = casts.quantize_row(last, fmt)
    assert_same(codes[-rows:], want)
    assert_same(scale[-rows:], want_scale)
    x[-1, -1] = 200.0
    assert amax.absmax([x]).item() == 200.0 and amax.absmax([x, last]).tolist() == [200.0, 200.0]


@pytest.mark.parametrize("shape", [(70016, 32768), (33, 2**26 + 32)], ids=str)
def test_b73_codes_of_more_than_2_31_values(shape):
    needs_memory(24)
    fmt = here("e4m3")
    codes = torch.empty(shape, device="cuda", dtype=torch.uint8).random_(0, 0x78)
    scale = torch.full((-(-shape[0] // 32), shape[1] // 32), 120, device="cuda", dtype=torch.uint8)
    scale[0, 0] = 121
    rows = 32 if shape[0] % 32 == 0 else 1
    bottom = codes[-rows:]
    assert torch.equal(retile.transpose_bytes(codes)[:, -rows:], bottom.t())
    halved = casts.encode(bottom.view(fmt.dtype).float() / 2, fmt)
    codes = codes.view(fmt.dtype)
    for transposed in (False, True):
        got, tensor_scale = retile.mx_to_tensor(codes, scale.view(casts.E8M0_DTYPE), fmt, transposed=transposed)
        end = got[:, -rows:].t() if transposed else got[-rows:]
        assert_same(end.contiguous(), halved)
        assert tensor_scale.item() == 2.0**-6
        del got, end
