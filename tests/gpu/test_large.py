"""Sizes at which a 32-bit offset overflows (B73)."""

import pytest
import torch

import lumen_core.quantize as quant
from lumen_core import casts
from lumen_core.formats import element_format

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs tens of GiB of GPU memory")

ROWS = (0, 14200, 16383)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "mxfp8"])
def test_b73_a_quantized_head_with_more_than_2_31_outputs(recipe: str) -> None:
    head = torch.nn.Linear(256, 151936, bias=False, device="cuda", dtype=torch.bfloat16)
    model = torch.nn.ModuleDict({"lm_head": head})
    quant.enable(model, recipe=recipe, apply_modules=("lm_head",))
    x = torch.randn(16384, 256, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        y = head(x)
    assert y.numel() > 2**31
    for row in ROWS:
        want = x[row].float() @ head.weight.float().t()
        assert (y[row].float() - want).norm() <= 0.05 * want.norm()


@pytest.mark.parametrize("granularity", ["tensor", "row", "mx"])
def test_b73_a_cast_of_more_than_2_31_values(granularity: str) -> None:
    fmt = element_format("e4m3")
    x = torch.randn(70000, 32768, device="cuda", dtype=torch.bfloat16)
    if granularity == "mx":
        codes, scale = casts.quantize_mx(x, fmt)
        factor = casts.e8m0_decode(scale[-1]).repeat_interleave(32)
    elif granularity == "row":
        codes, scale = casts.quantize_row(x, fmt)
        factor = scale[-1]
    else:
        codes, scale = casts.quantize_tensor(x, fmt)
        factor = scale
    last = codes[-1].float() * factor
    assert (last - x[-1].float()).norm() <= 0.05 * x[-1].float().norm()
