"""Parameters gathered in low precision: the bits and losses of a run that gathers bf16, and fewer bytes."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from gpt import Layout, set_up
from training import Trainer

RECIPES = ("tensorwise", "delayed", "hybrid", "rowwise", "blockwise", "mxfp8", "mxfp8-32x32")
# Small buckets of odd sizes: several gathers, and parts that begin inside of rows and blocks.
SMALL, ODD = {"bucket_size": 60_000}, 211
OVERLAPS = (
    {"overlap_grad_reduce": True},
    {"overlap_grad_reduce": True, "overlap_param_gather": True},
)


def _run(rank: int, size: int, layout: Layout, recipe: str, gather: bool, ddp: dict, steps: int = 3):
    """Losses; of the gathered weights whether their codes are those of the masters, and where parts begin."""
    from lumen_core.tensor import quantize
    from lumen_megatron.parameter import QuantizedParameter

    options = {"dgrad_weight": "from_rows"} if recipe == "mxfp8" else {}
    config = {"ffn_hidden_size": ODD * layout.tp, "num_layers": 1}
    trainer = Trainer(layout, recipe, ddp={**SMALL, **ddp}, config=config, param_gather=gather, **options)
    losses = trainer.steps(0, steps)
    trainer.finish_gather()
    starts, weights = [], {}
    for name, parameter in trainer.model.named_parameters():
        if not isinstance(parameter, QuantizedParameter):
            continue
        held = parameter.holding
        wire, values = held.wire, held.full_precision()
        options = {"mx": wire.mx, "rounding": wire.rounding, "margin": wire.margin, "pow2": wire.pow2}
        amax = None
        if layout.tp > 1 and wire.block in ((0, 0), (1, 0)):
            amax = held.spread.maximum(*_amax(values, wire.block))
        if recipe in ("delayed", "hybrid"):
            amax = held.scale * wire.fmt.max  # its history is the losses' concern
        whole = quantize(values, wire.fmt, wire.block, amax=amax, **options)
        same = torch.equal(whole.data.view(torch.uint8).reshape(-1), held.codes)
        same &= torch.equal(whole.scale.float(), wire.decode(held.codes, held.scale, held.shape).scale.float())
        weights[name] = same
        starts.append(held.master.start % held.shape[1])
    return losses, weights, starts


def _amax(values: torch.Tensor, block: tuple[int, int]):
    if block == (0, 0):
        return values.abs().amax().float(), ("out", "in")
    return values.abs().amax(dim=-1, keepdim=True).float(), ("in",)


def _check(ranks, size: int, layout: Layout, recipe: str, ddp: dict | None = None) -> None:
    plain, gathered = (
        ranks(size).run(_run, layout, recipe, gather, ddp or {}, seconds=90.0) for gather in (False, True)
    )
    for (losses, weights, _), (wanted, none, _) in zip(gathered, plain):
        assert losses == wanted and not none
        assert len(weights) == 4 and all(weights.values()), weights
        assert len(set(losses)) == len(losses)
    assert any(start for _, _, starts in gathered for start in starts), "no part began inside of a row"


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_losses_and_codes_are_those_without_it(ranks, recipe: str) -> None:
    _check(ranks, 2, Layout(), recipe)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [r for r in RECIPES if r not in ("delayed", "mxfp8")])
def test_losses_and_codes_of_the_other_recipes(ranks, recipe: str) -> None:
    _check(ranks, 2, Layout(), recipe)


@pytest.mark.parametrize("ddp", OVERLAPS[1:], ids=lambda ddp: "+".join(ddp))
def test_overlap_changes_nothing(ranks, ddp: dict) -> None:
    _check(ranks, 2, Layout(), "mxfp8-32x32", ddp)


@pytest.mark.slow
@pytest.mark.parametrize("ddp", OVERLAPS, ids=lambda ddp: "+".join(ddp))
@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_overlap_changes_nothing_for_scales_in_fp32(ranks, recipe: str, ddp: dict) -> None:
    _check(ranks, 2, Layout(), recipe, ddp)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_cut_over_tensor_and_data_parallel_ranks(ranks, recipe: str) -> None:
    _check(ranks, 4, Layout(tp=2, sp=True), recipe)


def _bytes(rank: int, size: int, recipe: str, gather: bool) -> tuple[int, int, int, int]:
    """Bytes of the parameter gathers of one step as Megatron asks for them, as the meter has them, and of scales."""
    from megatron.core.distributed import param_and_grad_buffer

    from lumen_core.comm.meter import METER

    trainer = Trainer(Layout(), recipe, config={"num_layers": 1}, param_gather=gather)
    trainer.step(0, micro_batches=2)
    sent, collective, before = [], param_and_grad_buffer.dist_all_gather_func, METER.snapshot()

    def counted(output: torch.Tensor, *args, **kwargs):
        sent.append(output.numel() * output.element_size())
        return collective(output, *args, **kwargs)

    param_and_grad_buffer.dist_all_gather_func = counted
    try:
        trainer.step(1, micro_batches=2)
    finally:
        param_and_grad_buffer.dist_all_gather_func = collective
    read = METER.since(before)
    weights = sum(p.numel() for n, p in trainer.model.named_parameters() if "linear" in n and p.dim() == 2)
    return sum(sent), read.total("all_gather", "parameters"), read.total("all_reduce", "weight scales"), weights


def test_half_the_bytes_travel(ranks) -> None:
    for recipe, scales in (("mxfp8", 1 / 32), ("tensorwise", 4 / 2**16)):
        wide, low = (ranks(2).run(_bytes, recipe, gather, seconds=60.0)[0] for gather in (False, True))
        weights = low[3]
        assert low[1] == weights and wide[1] == wide[2] == 0
        assert wide[0] - low[0] == pytest.approx(weights, rel=0.01)  # bf16's second byte; the rest is padding
        assert 0 < low[2] <= weights * scales


def _written(rank: int, size: int) -> dict:
    """What a quantized parameter does outside of training."""
    from lumen_megatron.parameter import QuantizedParameter

    trainer = Trainer(Layout(), "mxfp8-32x32", param_gather=True)
    name, parameter = next((n, p) for n, p in trainer.model.named_parameters() if isinstance(p, QuantizedParameter))
    values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)).bfloat16()
    with torch.no_grad():
        parameter.copy_(values)
    out = {"exact before a step": torch.equal(parameter.dequantize(), values)}
    error = (parameter.detach().float() - values.float()).norm() / values.float().norm()
    out["operations see codes"] = 0.01 < error < 0.05
    copied = copy.deepcopy(parameter)
    with torch.no_grad():
        copied.copy_(values * 2)
    out["a copy is apart"] = torch.equal(parameter.dequantize(), values)
    file = io.BytesIO()
    torch.save({"w": parameter.detach()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["w"]
    out["files hold plain tensors"] = type(loaded) is torch.Tensor and torch.equal(loaded, values)
    try:
        with torch.no_grad():
            parameter.mul_(2)
    except RuntimeError as error:
        out["others may not write"] = "read-only" in str(error)
    trainer.model.module.bfloat16()  # as Float16Module does
    out["attributes stay"] = parameter.tensor_model_parallel and parameter.main_grad is not None
    trainer.step(0)
    out["trains"] = not torch.equal(parameter.dequantize(), values)
    return out


def test_a_parameter_is_written_copied_and_saved_as_values(ranks) -> None:
    assert not [what for what, right in ranks(1).run(_written, seconds=60.0)[0].items() if not right]


def _refused(rank: int, size: int, recipe: str, overrides: dict) -> str:
    from gpt import build

    config = set_up(Layout(), **overrides)
    try:
        build(config, recipe, param_gather=True)
    except ValueError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("recipe", "overrides", "says"),
    [
        ("mxfp4", {"bf16": True, "params_dtype": torch.bfloat16}, "two of its codes share a byte"),
        ("mxfp8", {}, "fp32 masters of bf16 and fp16 only"),
        ("bf16", {"bf16": True, "params_dtype": torch.bfloat16}, "no low precision to gather in"),
    ],
)
def test_what_cannot_be_gathered_is_refused(ranks, recipe: str, overrides: dict, says: str) -> None:
    assert says in ranks(1).run(_refused, recipe, overrides, seconds=60.0)[0]


def _installed(rank: int, size: int) -> dict:
    from megatron.core import fp8_utils
    from megatron.core.dist_checkpointing import serialization

    from lumen_megatron import host_fp8

    host_fp8.uninstall()
    names = ("FP8_TENSOR_CLASS", "HAVE_TE_FP8_TENSOR_CLASS", "_modify_underlying_storage_impl")
    names += ("_quantize_param_shard_impl", "te_post_all_gather_processing", "is_te_min_version")
    before = [getattr(fp8_utils, name) for name in names] + [serialization.save_preprocess]
    host_fp8.install()
    host_fp8.install()
    during = [getattr(fp8_utils, name) for name in names] + [serialization.save_preprocess]
    host_fp8.uninstall()
    after = [getattr(fp8_utils, name) for name in names] + [serialization.save_preprocess]
    return {"changed": all(a is not b for a, b in zip(before, during)), "back": before == after}


def test_changes_to_megatron_are_undone(ranks) -> None:
    assert ranks(1).run(_installed, seconds=60.0)[0] == {"changed": True, "back": True}
