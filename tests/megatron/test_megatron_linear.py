"""Parallel linear layers: codes, outputs and gradients of a cut layer are those of the whole one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpt import some

RECIPES = ("tensorwise", "delayed", "hybrid", "rowwise", "blockwise", "mxfp8", "mxfp8-32x32", "mxfp4")
TOKENS, BATCH, IN, OUT = 32, 2, 512, 512


def _tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(TOKENS, BATCH, IN, generator=generator)
    x[:, :, 5] *= 40.0  # what lies on one rank decides scales on all
    weight = torch.randn(OUT, IN, generator=generator) * 0.05
    weight[3] *= 20.0
    bias = torch.randn(OUT, generator=generator)
    grad = torch.randn(TOKENS, BATCH, OUT, generator=generator)
    grad[:, :, -2] *= 30.0
    return x, weight, bias, grad


def _layer(rank: int, size: int, kind: str, recipe: str, sp: bool, steps: int, **extra: Any) -> list[Any]:
    """Output, gradient of the input, of the weight and of the bias, as this rank has them; the last of `steps`."""
    from gpt import Layout, set_up
    from megatron.core import parallel_state

    from lumen_core.amax import end_step
    from lumen_megatron.layer import amax_group
    from lumen_megatron.linear import LumenColumnParallelLinear, LumenRowParallelLinear
    from lumen_megatron.options import configure

    config = configure(set_up(Layout(tp=size, sp=sp), **extra.pop("config", {})), recipe, **extra)
    column = kind == "column"
    cls = LumenColumnParallelLinear if column else LumenRowParallelLinear
    given = {"gather_output": False} if column else {"input_is_parallel": True}
    layer = cls(
        IN, OUT, config=config, init_method=torch.nn.init.zeros_, bias=True, skip_bias_add=False,
        tp_group=parallel_state.get_tensor_model_parallel_group(), **given,
    )  # fmt: skip
    x, weight, bias, grad = _tensors()
    with torch.no_grad():
        layer.weight.copy_(weight.chunk(size, 0 if column else 1)[rank])
        layer.bias.copy_(bias.chunk(size)[rank] if column else bias)
    x = x if column and not sp else x.chunk(size, 0 if column else 2)[rank]
    grad = grad.chunk(size, 2)[rank] if column else grad.chunk(size)[rank] if sp else grad
    for step in range(steps):
        own = x.clone().requires_grad_()
        layer.weight.grad = layer.bias.grad = None
        out, _ = layer(own * (1 + step))
        out.backward(grad * (1 + step))
        if layer.quant_config is not None and layer.quant_config.scaling == "delayed":
            end_step([layer.quant_state], "max", reduce=True, group=amax_group())
    bias_grad = layer.bias.grad
    if not column and sp:  # Megatron sums gradients of parameters marked `sequence_parallel` after the pass
        torch.distributed.all_reduce(bias_grad)
    return [out.detach(), own.grad, layer.weight.grad, bias_grad]


def _whole(answers: list[list[torch.Tensor]], kind: str, sp: bool) -> list[torch.Tensor]:
    def cat(index: int, dim: int | None) -> torch.Tensor:
        return answers[0][index] if dim is None else torch.cat([a[index] for a in answers], dim)

    if kind == "column":
        return [cat(0, 2), cat(1, 0 if sp else None), cat(2, 0), cat(3, 0)]
    return [cat(0, 0 if sp else None), cat(1, 2), cat(2, 1), cat(3, None)]


@pytest.mark.parametrize("size_sp", some([(2, True)], [(2, False), (4, True)]))
@pytest.mark.parametrize("kind", ["column", "row"])
def test_a_cut_layer_computes_what_the_whole_one_does(ranks, kind: str, size_sp: tuple[int, bool]) -> None:
    size, sp = size_sp
    for recipe in RECIPES:
        # The third step of delayed scaling scales by history alone.
        steps = 3 if recipe in ("delayed", "hybrid") else 1
        want = ranks(1).run(_layer, kind, recipe, False, steps)[0]
        got = _whole(ranks(size).run(_layer, kind, recipe, sp, steps), kind, sp)
        for name, a, b in zip(("output", "dgrad", "wgrad", "bias"), got, want):
            error = (a - b).norm() / b.norm()
            assert error < 1e-6, f"{recipe} {kind}: {name} differs by {error:.1e}"


def test_without_the_maximum_over_ranks_it_would_not(ranks, monkeypatch) -> None:
    want = ranks(1).run(_layer, "row", "rowwise", False, 1)[0]
    got = _whole(ranks(2).run(_layer_alone, "row", "rowwise", False, 1), "row", False)
    assert (got[0] - want[0]).norm() / want[0].norm() > 1e-4


def _layer_alone(*args: Any) -> list[Any]:
    from lumen_core.spread import Spread

    maximum = Spread.maximum
    Spread.maximum = lambda self, amax, dims: amax
    try:
        return _layer(*args)
    finally:
        Spread.maximum = maximum


@pytest.mark.parametrize("recipe", ["mxfp8", "tensorwise"])
def test_quantization_happens(ranks, recipe: str) -> None:
    exact, low = (ranks(1).run(_layer, "column", r, False, 1)[0] for r in ("bf16", recipe))
    for name, a, b in zip(("output", "dgrad", "wgrad"), low, exact):
        snr = -20 * torch.log10((a - b).norm() / b.norm())
        assert 20 < snr < 40, f"{name}: {snr:.1f} dB"


def test_recipe_bf16_is_megatrons_own_layer(ranks) -> None:
    for kind in ("column", "row"):
        want, got = ranks(2).run(_layer_of_megatron, kind), ranks(2).run(_layer, kind, "bf16", False, 1)
        for a, b in zip(want, got):
            assert all(torch.equal(x, y) for x, y in zip(a, b))


def _layer_of_megatron(rank: int, size: int, kind: str) -> list[Any]:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    from lumen_megatron import linear

    class Column(ColumnParallelLinear):
        quant_config = None

    class Row(RowParallelLinear):
        quant_config = None

    ours = linear.LumenColumnParallelLinear, linear.LumenRowParallelLinear
    linear.LumenColumnParallelLinear, linear.LumenRowParallelLinear = Column, Row
    try:
        return _layer(rank, size, kind, "bf16", False, 1)
    finally:
        linear.LumenColumnParallelLinear, linear.LumenRowParallelLinear = ours


@pytest.mark.parametrize("fuse", [False, True])
def test_deferred_and_fused_weight_gradients(ranks, fuse: bool) -> None:
    for sp in (False, True):
        for at_once, later, again in ranks(2).run(_deferred, sp, fuse):
            assert torch.equal(at_once, later)
            assert torch.allclose(again, 2 * at_once), "gradients add up in main_grad"


def _deferred(rank: int, size: int, sp: bool, fuse: bool) -> tuple[torch.Tensor, ...]:
    from gpt import Layout, set_up

    from lumen_megatron.linear import LumenColumnParallelLinear
    from lumen_megatron.options import configure

    grads = []
    for delay in (False, True):
        config = configure(set_up(Layout(tp=size, sp=sp)), "mxfp8", fuse_main_grad=fuse)
        config.delay_wgrad_compute = delay
        layer = LumenColumnParallelLinear(
            IN, OUT, config=config, init_method=torch.nn.init.zeros_, bias=False, gather_output=False
        )
        x, weight, _, grad = _tensors()
        with torch.no_grad():
            layer.weight.copy_(weight.chunk(size)[rank])
        if fuse:
            layer.weight.main_grad = torch.zeros_like(layer.weight)
            layer.weight.grad_added_to_main_grad = False
        x = x.chunk(size)[rank] if sp else x

        def step(layer=layer, x=x, grad=grad, delay=delay) -> torch.Tensor:
            layer(x)[0].backward(grad.chunk(size, 2)[rank])
            if delay:
                if not fuse:
                    assert layer.weight.grad is None or len(grads) == 2
                layer.backward_dw()
            assert not fuse or layer.weight.grad_added_to_main_grad
            return (layer.weight.main_grad if fuse else layer.weight.grad).clone()

        grads.append(step())
    grads.append(step())
    return tuple(grads)


def test_what_a_quantized_layer_does_not_do_is_named(ranks) -> None:
    assert all("output_dtype" in message for message in ranks(1).run(_with_output_dtype))


def _with_output_dtype(rank: int, size: int) -> str:
    from gpt import Layout, set_up

    from lumen_megatron.linear import LumenColumnParallelLinear
    from lumen_megatron.options import configure

    config = configure(set_up(Layout()), "mxfp8")
    layer = LumenColumnParallelLinear(IN, OUT, config=config, init_method=torch.nn.init.zeros_, bias=False)
    try:
        layer._forward_impl(torch.randn(4, IN), layer.weight, output_dtype=torch.float32)
    except ValueError as error:
        return str(error)
    return ""
