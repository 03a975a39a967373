"""Two recipes side by side: the same data, seed and initial weights, one after the other."""

from __future__ import annotations

import copy
from pathlib import Path

from launch import summary
from launch.config import ConfigError, TrainConfig
from launch.distributed import World
from launch.loop import train
from launch.report import METRICS, read_metrics
from launch.result import RunResult, finished_result, recipe_label
from launch.stop import GracefulStop


def recipe_folder(recipe: str) -> str:
    """A directory name for a recipe or grammar string."""
    return "".join(c if c.isalnum() or c in "-_" else "_" for c in recipe.lower())


def sides(cfg: TrainConfig) -> list[TrainConfig]:
    """The two runs of ``cfg``: as configured, and with the recipe ``cfg.compare`` and nothing set on top of it.

    Each has a directory of its own below ``cfg.run_dir``. Only the first exports its weights.
    """
    reference = copy.deepcopy(cfg)
    reference.quant.enabled, reference.quant.recipe, reference.quant.options = True, cfg.compare, {}
    reference.export = None
    reference.backend.wire, reference.backend.all_gather_mode = None, "auto"  # they belong to the configured recipe
    runs = [copy.deepcopy(cfg), reference]
    names = [recipe_folder(recipe_label(c)) for c in runs]
    if names[0] == names[1]:  # one recipe with and without options on top
        names[1] += "-reference"
    for side, name in zip(runs, names, strict=True):
        side.compare, side.run_dir = None, str(Path(cfg.run_dir) / name)
    return runs


def run_compare(cfg: TrainConfig, world: World, stop: GracefulStop) -> RunResult:
    """Trains both sides (or continues, or finds them done), then reports both curves and their gap.

    Returns:
        The result of the configured recipe, with the gap, and with the paths of the common report.
    """
    results: list[RunResult] = []
    for side in sides(cfg):
        done = world.from_main(finished_result(side) if world.is_main else None)
        if done is not None and world.is_main:
            print(f"[{done.recipe}] finished already: {done.run_dir}", flush=True)
        results.append(train(side, world, stop) if done is None else done)
        if results[-1].interrupted or (len(results) == 1 and stop.agreed()):
            results[-1].interrupted = True
            return results[-1]
        _check_length(results[-1], cfg.train.max_steps)
    first, reference = results
    first.gap_percent = summary.gap_percent(first.validation_loss, reference.validation_loss)
    if world.is_main:
        _report(cfg, first, reference, world)
    return world.from_main(first)


def _check_length(side: RunResult, steps: int) -> None:
    """Losses after unequally many steps say nothing about recipes.

    Raises:
        ConfigError: an earlier command trained ``side`` for more than ``steps``.
    """
    if side.steps != steps:
        raise ConfigError(
            f"compare: {side.run_dir} has {side.steps} steps done, train.max_steps={steps}; set "
            f"train.max_steps={side.steps}, another run_dir, or checkpoint.resume=never"
        )


def _report(cfg: TrainConfig, first: RunResult, reference: RunResult, world: World) -> None:
    folder = Path(cfg.run_dir)
    names = [first.recipe, reference.recipe]
    if names[0] == names[1]:
        names[0] += " with options"
    rows = [read_metrics(Path(r.run_dir) / METRICS) for r in (first, reference)]
    tables = {}
    for name, result in zip(names, (first, reference), strict=True):
        own = Path(result.run_dir) / "summary.md"
        tables[name] = f"see {own.relative_to(folder)}"
    first.plot = summary.plot_losses(folder / "loss.png", dict(zip(names, rows, strict=True)))
    title = f"{cfg.model.name}: {names[0]} against {names[1]}"
    first.summary = summary.write_summary(folder / "summary.md", title, [first, reference], cfg, tables, world)
    lines = summary.last_words(first)
    if first.gap_percent is not None:
        lines[0] = (
            f"validation loss: {names[0]} {first.validation_loss:.4f}, {names[1]} {reference.validation_loss:.4f}"
        )
        lines.append(f"relative gap of the validation loss: {first.gap_percent:+.2f} %")
    lines += summary.wire_lines(names, (first, reference))
    print("\n".join(lines), flush=True)
