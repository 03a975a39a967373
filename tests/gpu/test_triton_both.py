"""Casts along both dimensions on a GPU, bit for bit against the reference of the matrix and of its transpose."""

from __future__ import annotations

import pytest
import torch

from lumen_core import casts
from lumen_core.casts import TENSOR_BLOCK
from lumen_core.tensor import quantize_both

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="Triton kernels run on a GPU only")
if torch.cuda.is_available():
    pytest.importorskip("triton", reason="needs the triton package")

from test_triton_cast import assert_same, here, sample  # noqa: E402

from lumen_core.kernels.triton import both  # noqa: E402

BLOCKS = [((0, 0), {}), ((1, 0), {}), ((1, 128), {}), ((1, 32), {"mx": True})]
SHAPES = [(256, 512), (512, 1024), (128, 128), (130, 257), (70, 48), (1, 1), (3, 33), (1, 5000), (300, 1), (16, 16400)]


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
@pytest.mark.parametrize("kind", ["random", "edges", "nan"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("block", "options"), BLOCKS, ids=str)
def test_both_directions(block, options, dtype, kind, element):
    if both.block_unsupported(dtype, block, "mx" in options):
        assert (dtype, block) == (torch.float32, TENSOR_BLOCK)
        return
    fmt = here(element)
    for shape in SHAPES:
        x = sample(shape, dtype, kind)
        want = casts.quantize(x, fmt, block, **options), casts.quantize(x.t().contiguous(), fmt, block, **options)
        for rows in (True, False):
            first, turned = both.quantize_both(x, fmt, block, rows=rows, **options)
            assert (first is not None) == rows
            for got, expected in zip((first, turned), want):
                for part, value in zip(got or (), expected):
                    assert_same(part, value.contiguous(), (shape, rows))


@pytest.mark.parametrize("margin", [0, 2])
def test_a_known_amax(margin):
    x, amax, fmt = sample((128, 256), torch.bfloat16, "edges"), torch.tensor(3.0, device="cuda"), here("e4m3")
    (codes, scale), (turned, other) = both.quantize_both(x, fmt, TENSOR_BLOCK, amax=amax, margin=margin)
    want = casts.quantize(x, fmt, TENSOR_BLOCK, amax=amax, margin=margin)
    assert scale is other
    for got, expected in ((codes, want[0]), (turned, want[0].t().contiguous()), (scale, want[1])):
        assert_same(got, expected)


@pytest.mark.parametrize(("block", "options"), BLOCKS, ids=str)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("rows", [True, False])
def test_in_a_compiled_graph(block, options, dynamic, rows):
    torch._dynamo.reset()
    fmt = here("e4m3")

    def run(x: torch.Tensor):
        return quantize_both(x * 2, fmt, block, rows=rows, **options)

    compiled = torch.compile(run, fullgraph=True, dynamic=dynamic)
    for shape in ((256, 512), (384, 640)):
        x = sample(shape, torch.bfloat16, "random")
        for got, want in zip(compiled(x), run(x)):
            assert (got is None) == (want is None)
            if want is not None:
                assert_same(got.data, want.data)
                assert_same(got.scale, want.scale)


def test_rows_beyond_32_bits():
    """The last values of a matrix of more than 2**31."""
    x = torch.zeros((2**31 + 2**22) // 4096, 4096, dtype=torch.bfloat16, device="cuda")
    x[-128:] = torch.randn(128, 4096, device="cuda")
    _, (turned, scale) = both.quantize_both(x, here("e4m3"), (1, 128), rows=False)
    want = casts.quantize(x[-128:].t().contiguous(), here("e4m3"), (1, 128))
    assert_same(turned[:, -128:].contiguous(), want[0])
    assert_same(scale[:, -1:].contiguous(), want[1])
