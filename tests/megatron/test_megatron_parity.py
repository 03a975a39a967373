"""GPT of Megatron-Core, cut in every way: losses and gradients are those of one rank."""

from __future__ import annotations

import pytest
import torch
from gpt import Layout, batches, build, pieces, run, set_up, some, whole

RECIPES = ("bf16", "tensorwise", "delayed", "hybrid", "rowwise", "blockwise", "mxfp8", "mxfp8-32x32", "mxfp4")
# In fp64, and without Megatron's fp32 cross-entropy. In fp32 sums over ranks differ in the last bit, some value rounds
# to the other neighbour of its format, and the difference grows from layer to layer, right as both results are.
WIDE = {"params_dtype": torch.float64, "pipeline_dtype": torch.float64}
TWO = (Layout(tp=2), Layout(tp=2, sp=True), Layout(pp=2), Layout(cp=2), Layout())
FOUR = (
    Layout(tp=2, sp=True, pp=2), Layout(tp=2, sp=True, cp=2), Layout(tp=2, sp=True), Layout(pp=2, cp=2),
    Layout(tp=4, sp=True), Layout(pp=2), Layout(cp=2),
)  # fmt: skip


def _model(rank: int, size: int, layout: Layout, recipe: str, overrides: dict | None = None, steps: int = 1):
    """Losses of some steps, and the gradients of the last one; delayed scaling needs more than one."""
    config = set_up(layout, **{**WIDE, **(overrides or {})})
    # The same operation everywhere: Megatron's own knows no context parallelism.
    model = build(config, recipe, labels=False, attention_backend="lumen")
    losses = []
    for step in range(steps):
        model.zero_grad_buffer()
        losses.append(run(model, batches(4, seed=step), linear=True))
    return losses, pieces(model)


@pytest.fixture(scope="module")
def alone(ranks):
    """One rank's losses and gradients for a recipe, computed once."""
    known = {}

    def compute(recipe: str):
        if recipe not in known:
            steps = 3 if "delayed" in recipe or "hybrid" in recipe else 1
            losses, parts = ranks(1).run(_model, Layout(), recipe, None, steps, seconds=60.0)[0]
            known[recipe] = losses, whole([parts], 1)
        return known[recipe]

    return compute


def _compare(ranks, alone, size: int, layout: Layout, recipe: str) -> tuple[float, float]:
    """Largest relative difference of losses, and of a parameter's gradient."""
    losses, want = alone(recipe)
    answers = ranks(size).run(_model, layout, recipe, None, len(losses), seconds=60.0)
    got = whole([parts for _, parts in answers], layout.tp)
    assert got.keys() == want.keys()
    loss = max(abs(a - b) / abs(b) for seen, _ in answers for a, b in zip(seen, losses) if a is not None)
    assert any(seen[0] is not None for seen, _ in answers)
    return loss, max(((got[name] - want[name]).norm() / want[name].norm()).item() for name in want)


def _check(ranks, alone, size: int, layout: Layout, recipe: str) -> None:
    if recipe == "mxfp4" and layout.tp * layout.pp * layout.cp < size:
        recipe = "mxfp4,stochastic_rounding=false"  # replicas draw random bits of their own
    if recipe == "blockwise" and layout.tp == 4:
        recipe = "dynamic_block-1-32-32_e4m3_e4m3_e4m3"  # 128 x 128 blocks would be cut
    loss, gradient = _compare(ranks, alone, size, layout, recipe)
    assert loss < 1e-12 and gradient < 1e-12, f"loss differs by {loss:.1e}, a gradient by {gradient:.1e}"


@pytest.mark.parametrize(
    "layout,recipe",
    [
        (Layout(tp=2, sp=True), "delayed"),
        (Layout(tp=2, sp=True), "mxfp4"),
        (Layout(pp=2), "delayed"),
        (Layout(cp=2), "tensorwise"),
        (Layout(cp=2), "mxfp8"),
    ],
    ids=str,
)
def test_some_of_two_ranks(ranks, alone, layout: Layout, recipe: str) -> None:
    _check(ranks, alone, 2, layout, recipe)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layout", TWO, ids=str)
def test_two_ranks(ranks, alone, layout: Layout, recipe: str) -> None:
    _check(ranks, alone, 2, layout, recipe)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layout", FOUR, ids=str)
def test_four_ranks(ranks, alone, layout: Layout, recipe: str) -> None:
    _check(ranks, alone, 4, layout, recipe)


def _in_fp32(rank: int, size: int, layout: Layout, recipe: str, overrides: dict | None = None):
    """Losses and last gradients of two steps in Megatron's own precision, with its cross-entropy."""
    model = build(set_up(layout, **(overrides or {})), recipe)
    losses = []
    for step in range(2):
        model.zero_grad_buffer()
        losses.append(run(model, batches(2, seed=step)))
    return losses, {name: gradient for name, (gradient, _, _) in pieces(model).items()}


@pytest.mark.parametrize("layout", some([Layout(tp=2)], [Layout(), Layout(pp=2)]), ids=str)
def test_recipe_bf16_is_megatrons_local_spec_bit_for_bit(ranks, layout: Layout) -> None:
    size = layout.tp * layout.pp
    want, got = (ranks(size).run(_in_fp32, layout, recipe, seconds=60.0) for recipe in ("local", "bf16"))
    for (losses, gradients), (expected, wanted) in zip(got, want):
        assert losses == expected and gradients.keys() == wanted.keys()
        assert all(torch.equal(gradients[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("recipe", some(["bf16"], ["mxfp8"]))
def test_sequence_parallelism_changes_nothing(ranks, recipe: str) -> None:
    off, on = (ranks(2).run(_in_fp32, Layout(tp=2, sp=sp), recipe, seconds=60.0) for sp in (False, True))
    for (losses, gradients), (expected, wanted) in zip(on, off):
        assert losses == pytest.approx(expected, rel=1e-6)
        for name in wanted:
            error = (gradients[name] - wanted[name]).norm() / wanted[name].norm()
            assert error < (1e-5 if recipe == "bf16" else 0.05), f"{name}: {error:.1e}"


@pytest.mark.parametrize("granularity", some(["full"], ["selective"]))
@pytest.mark.parametrize("recipe", some(["mxfp4"], ["delayed", "mxfp8"]))
def test_recomputed_activations_are_the_same_bits(ranks, recipe: str, granularity: str) -> None:
    how = {"recompute_granularity": granularity}
    if granularity == "full":
        how |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    plain, again = (ranks(2).run(_in_fp32, Layout(tp=2, sp=True), recipe, over, seconds=60.0) for over in (None, how))
    for (losses, gradients), (expected, wanted) in zip(again, plain):
        assert losses == expected
        assert all(torch.equal(gradients[name], wanted[name]) for name in wanted)


def test_low_precision_is_what_runs(ranks) -> None:
    exact, low = (ranks(1).run(_in_fp32, Layout(), recipe, seconds=60.0)[0] for recipe in ("bf16", "mxfp8"))
    assert low[0] == pytest.approx(exact[0], rel=0.02) and low[0] != exact[0]
    for name, wanted in exact[1].items():
        error = (low[1][name] - wanted).norm() / wanted.norm()
        assert error < 0.2
        assert error > 0.01 or "linear" not in name
