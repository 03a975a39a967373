"""The report at the end of a run: ``summary.md`` and ``loss.png``."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from launch import schema
from launch.config import TrainConfig
from launch.distributed import World
from launch.report import traffic_text
from launch.result import RunResult
from lumen_core import quantize as quant
from lumen_core.comm.meter import KINDS

_PACKAGES = ("lumen-train", "torch", "transformers", "torchao", "triton", "numpy")
_NO_PLOT = "not drawn, matplotlib is missing"
Rows = Sequence[Mapping[str, Any]]


def final_numbers(rows: Rows) -> dict[str, float | None]:
    """The losses of a run by the names they have in `RunResult`, from its ``metrics.jsonl``."""
    losses = [r["loss"] for r in rows if r["kind"] == "train" and not r["skipped"] and r["loss"] is not None]
    evaluations = [r["validation_loss"] for r in rows if r["kind"] == "eval"]
    tail = losses[-min(max(len(losses) // 10, 1), 50) :]
    return {
        "train_loss": statistics.fmean(tail) if tail else None,
        "first_validation_loss": evaluations[0] if evaluations else None,
        "validation_loss": evaluations[-1] if evaluations else None,
    }


def wire_numbers(rows: Rows) -> dict[str, dict[str, int] | None]:
    """`RunResult.wire_bytes`, from a run's ``metrics.jsonl``."""
    found = [r for r in rows if r["kind"] == "train" and r.get("wire_bytes") is not None]
    if not found:
        return {"wire_bytes": None}
    return {"wire_bytes": {kind: n for kind in KINDS if (n := found[-1][f"{kind}_bytes"])}}


def wire_lines(names: Sequence[str], results: Sequence[RunResult]) -> list[str]:
    """What two runs sent and took, a line each, for the user to compare."""
    first, reference = results
    lines = []
    if first.wire_bytes is not None and reference.wire_bytes is not None:
        sent = [sum(r.wire_bytes.values()) for r in results]
        ratio = f", {sent[0] / sent[1]:.3g} times as much" if sent[1] else ""
        texts = [f"{name} {traffic_text(r.wire_bytes)}" for name, r in zip(names, results, strict=True)]
        lines.append(f"wire per step:   {'; '.join(texts)}{ratio}")
    memory = [f"{name} {r.peak_memory_gib:.2f} GiB" for name, r in zip(names, results, strict=True)]
    return [*lines, f"peak memory:     {'; '.join(memory)}"]


def diverged(rows: Rows, step: int) -> bool:
    """Whether the validation loss after ``step`` was not finite, which ``metrics.jsonl`` has as null."""
    return any(r["kind"] == "eval" and r["step"] == step and r["validation_loss"] is None for r in rows)


def fall_percent(result: RunResult) -> float | None:
    """How far the validation loss fell from its value before the first step."""
    first, last = result.first_validation_loss, result.validation_loss
    return None if not first or last is None else 100 * (1 - last / first)


def gap_percent(loss: float | None, reference: float | None) -> float | None:
    """How much higher ``loss`` is than ``reference``."""
    return None if loss is None or not reference else 100 * (loss / reference - 1)


def last_words(result: RunResult) -> list[str]:
    """What the user reads when a run is done, a line each."""
    loss, fall = result.validation_loss, fall_percent(result)
    if loss is None or fall is None:
        lines = ["validation loss: not measured (train.eval_batches=0, or no validation data)"]
    else:
        lines = [f"validation loss: {loss:.4f}, {fall:.1f} % below its start"]
    return [*lines, f"loss curves:     {result.plot or _NO_PLOT}", f"summary:         {result.summary}"]


def report_run(
    result: RunResult, rows: Rows, cfg: TrainConfig, model: nn.Module, world: World, sent: str | None = None
) -> None:
    """Writes the report of a single run and notes its paths in ``result``; ``sent`` is the plan of the all-gather."""
    folder = Path(result.run_dir)
    result.plot = plot_losses(folder / "loss.png", {result.recipe: rows})
    tables = {result.recipe: str(quant.summary(model))} if quant.is_enabled(model) else {}
    title = f"{cfg.model.name}, {result.recipe}"
    result.summary = write_summary(folder / "summary.md", title, [result], cfg, tables, world, sent)


def versions(world: World) -> dict[str, str]:
    """What the run ran on."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    found["torch"] = torch.__version__
    if torch.version.hip:
        found["ROCm"] = torch.version.hip
    elif torch.version.cuda:
        found["CUDA"] = torch.version.cuda
    cuda = world.device.type == "cuda"
    name = torch.cuda.get_device_name(world.device) if cuda else f"CPU, {torch.get_num_threads()} threads"
    found["device"] = f"{world.size} x {name}"
    return found


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def results_table(results: Sequence[RunResult]) -> list[str]:
    """Markdown, a line each."""
    head = ["recipe", "steps", "validation loss at the start", "at the end", "fall", "gap", "train loss"]
    head += ["tokens/s", "memory", "wire/step", "quantized", "skipped"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for r in results:
        cells = [
            r.recipe,
            str(r.steps),
            _cell(r.first_validation_loss, ".4f"),
            _cell(r.validation_loss, ".4f"),
            _cell(fall_percent(r), ".1f") + " %",
            "-" if r.gap_percent is None else f"{r.gap_percent:+.2f} %",
            _cell(r.train_loss, ".4f"),
            _cell(r.tokens_per_second, ",.0f"),
            f"{r.peak_memory_gib:.2f} GiB",
            "-" if r.wire_bytes is None else traffic_text(r.wire_bytes),
            f"{r.quantized_share:.1%}",
            str(r.nonfinite_steps),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def write_summary(
    path: Path,
    title: str,
    results: Sequence[RunResult],
    cfg: TrainConfig,
    quant_tables: Mapping[str, str],
    world: World,
    sent: str | None = None,
) -> str:
    """Writes ``summary.md``; returns its path.

    Args:
        results: a line each; a recipe that is compared with first, its reference second.
        quant_tables: by recipe, what `quantize.summary` printed.
        sent: what `lumen_fsdp2.plan` printed.
    """
    lines = [f"# {title}", "", *results_table(results), ""]
    lines.append(
        "Losses are nats per token. The train loss is the mean of the last tenth of the steps (at most 50). "
        '"quantized" is the share of the linear weights, by elements, whose GEMMs follow the recipe; "gap" is how much '
        "higher the validation loss is than the reference's. Tokens/s is the median over the logging intervals, memory "
        f"the peak of {'a GPU' if world.device.type == 'cuda' else 'a process'}. Wire is what the collectives of the "
        "last step carried: gathered outputs and inputs of reductions over all ranks, nothing with one rank."
    )
    if results[0].plot:
        lines += ["", f"![loss curves]({os.path.basename(results[0].plot)})"]
    for recipe, table in quant_tables.items():
        lines += ["", f"## Layers: {recipe}", "", "```", table, "```"]
    if sent is not None:
        lines += ["", "## What travels", "", "```", sent, "```"]
    lines += ["", "## Configuration", "", "```yaml", _yaml(schema.to_plain(cfg)), "```", "", "## Versions", ""]
    lines += [f"- {name}: {version}" for name, version in versions(world).items()]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def _yaml(nested: Mapping[str, Any], indent: str = "") -> str:
    """Nested dicts of plain values as YAML (JSON's scalars and lists are YAML)."""
    lines = []
    for key, value in nested.items():
        if isinstance(value, Mapping) and value:
            lines += [f"{indent}{key}:", _yaml(value, indent + "  ")]
        else:
            lines.append(f"{indent}{key}: {json.dumps(value, ensure_ascii=False)}")
    return "\n".join(lines)


# --- the plot -------------------------------------------------------------------------------------------------------

_COLOURS = ("tab:red", "tab:blue", "tab:green", "tab:purple")


def plot_losses(path: Path, runs: Mapping[str, Rows]) -> str | None:
    """Draws the loss curves of one run, or of two and their gap below; returns the path, None without matplotlib.

    Args:
        runs: records of ``metrics.jsonl`` by recipe; the reference last.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return None
    # Figures of their own canvas: no display, and no state of pyplot that belongs to somebody else.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    pair = len(runs) == 2
    figure = Figure(figsize=(8, 6.5 if pair else 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2 if pair else 1, sharex=True, height_ratios=[3, 1] if pair else None, squeeze=False)[:, 0]
    curves = {name: (_curve(r, "train", "loss"), _curve(r, "eval", "validation_loss")) for name, r in runs.items()}
    for (name, (train, validation)), colour in zip(curves.items(), _COLOURS):
        draw = functools.partial(axes[0].plot, color=colour)
        draw(list(train), list(train.values()), alpha=0.35, linewidth=1, label=f"{name}, training")
        draw(list(validation), list(validation.values()), marker="o", markersize=4, label=f"{name}, validation")
    axes[0].set_ylabel("loss (nats per token)")
    axes[0].legend()
    axes[0].grid(alpha=0.3)
    if pair:
        (name, (_, first)), (reference, (_, second)) = curves.items()
        gaps = {step: gap_percent(first[step], second[step]) for step in first if step in second}
        axes[1].plot(list(gaps), list(gaps.values()), color="black", marker="o", markersize=4)
        axes[1].axhline(0, color="grey", linewidth=0.8)
        axes[1].set_ylabel("validation gap (%)")
        axes[1].set_title(f"{name} above {reference}", fontsize=9)
        axes[1].grid(alpha=0.3)
    axes[-1].set_xlabel("step")
    figure.savefig(path, dpi=120)
    return str(path)


def _curve(rows: Rows, kind: str, key: str) -> dict[int, float]:
    return {r["step"]: r[key] for r in rows if r["kind"] == kind and r[key] is not None}
