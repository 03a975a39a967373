"""A matrix quantized in flat pieces has the bits of the same matrix quantized at once."""

from __future__ import annotations

import pytest
import torch

from lumen_core import casts
from lumen_core.amax import INPUT, WEIGHT, ScalingState, end_step
from lumen_core.config import QuantConfig
from lumen_core.pieces import empty_bounds, encode_piece, note_piece, scale_of
from lumen_core.tensor import quantize
from lumen_core.wire import WireFormat

RECIPES = ("tensorwise", "tensorwise,pow2_scale=true", "delayed,margin=1", "rowwise", "blockwise")
MX_RECIPES = ("mxfp8", "mxfp8-32x32")
SHAPES = ((96, 160), (130, 70), (1, 300), (300, 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("recipe", RECIPES + MX_RECIPES)
def test_pieces_have_the_bits_of_the_whole(recipe: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    wire = WireFormat.of(QuantConfig.parse(recipe), torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator) * torch.randn(shape[0], 1, generator=generator).exp()
    flat = x.to(dtype).reshape(-1)
    cuts = [0, *sorted(torch.randint(0, flat.numel() + 1, (4,), generator=generator).tolist()), flat.numel()]
    pieces = [(start, flat[start:end]) for start, end in zip(cuts, cuts[1:])]
    each = []
    for start, piece in pieces:  # as on ranks of their own
        each.append(empty_bounds(wire, shape, flat.device))
        note_piece(each[-1], piece, start, wire, shape)
    scale = scale_of(torch.stack(each).amax(dim=0), wire, shape)
    codes = torch.cat([encode_piece(piece, start, scale, wire, shape) for start, piece in pieces])
    whole = quantize(
        flat.view(shape),
        wire.fmt,
        wire.block,
        mx=wire.mx,
        rounding=wire.rounding,
        margin=wire.margin,
        pow2=wire.pow2,
        amax=flat.abs().amax().float() if wire.margin else None,
    )
    assert torch.equal(codes, whole.data.view(torch.uint8).reshape(-1))
    assert scale.dtype == whole.scale.dtype and scale.shape == whole.scale.shape
    assert torch.equal(scale.reshape(-1).view(torch.uint8), whole.scale.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("rounding", ["ceil", "floor", "even"])
def test_a_larger_amax_never_has_a_smaller_byte(rounding: str) -> None:
    fmt = WireFormat.of(QuantConfig.from_recipe("mxfp8"), torch.device("cpu")).fmt
    amax = torch.randn(4096, generator=torch.Generator().manual_seed(0)).exp().mul(40).sort().values
    assert (casts.e8m0_from_amax(amax, fmt, rounding).int().diff() >= 0).all()


@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("seen", [-1.0, 3.0, float("inf")])
def test_coming_weight_amax_is_that_after_the_step(algo: str, seen: float) -> None:
    state = ScalingState(3, "cpu")
    state.set_history(torch.tensor([[1.0] * 3, [5.0] * 3, [2.0] * 3]), torch.tensor([-1.0, seen, -1.0]), algo)
    own = torch.tensor(0.5)
    coming = state.coming_weight_amax(own, state.current[WEIGHT], algo)
    end_step([state], algo)
    assert coming == state.weight_amax(own)


def test_a_history_saved_before_any_step_is_none() -> None:
    state = ScalingState(3, "cpu")
    state.set_history(torch.zeros(3, 3), torch.full((3,), -1.0), "max")
    assert state.fresh and state.in_use[INPUT] == 0
