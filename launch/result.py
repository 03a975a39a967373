"""What a run came to, and the files that say so."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launch import schema
from launch.config import TrainConfig
from launch.stop import INTERRUPTED

RESULT = "result.json"


@dataclass
class RunResult:
    """What a run came to; the same on every rank.

    Attributes:
        run_dir: where everything was written.
        recipe: what the linear layers computed in.
        steps: optimizer steps done, of ``max_steps``.
        train_loss: mean of the last tenth of the steps (at most 50).
        first_validation_loss: before the first step.
        validation_loss: the last one.
        tokens_per_second: median over the logging intervals of this process; None where it trained nothing.
        seconds: of training, over all parts of the run.
        peak_memory_gib: see `launch.report.peak_memory`; of the rank that took most.
        wire_bytes: what the last step sent, by kind of collective and without kinds that sent nothing, as
            `lumen_core.comm.meter` counts; None where no step was recorded.
        parameters: of the model.
        quantized_share: part of the linear weights that the recipe covers, 0 to 1.
        nonfinite_steps: steps that were skipped.
        interrupted: whether it was asked to stop before its last step.
        plot, summary: paths of the files; None where interrupted.
        gap_percent: with ``compare``: how much higher the validation loss is than that of the other recipe.
    """

    run_dir: str
    recipe: str
    steps: int = 0
    max_steps: int = 0
    train_loss: float | None = None
    first_validation_loss: float | None = None
    validation_loss: float | None = None
    tokens_per_second: float | None = None
    seconds: float = 0.0
    peak_memory_gib: float = 0.0
    wire_bytes: dict[str, int] | None = None
    parameters: int = 0
    quantized_share: float = 0.0
    nonfinite_steps: int = 0
    interrupted: bool = False
    plot: str | None = None
    summary: str | None = None
    gap_percent: float | None = None

    @property
    def exit_code(self) -> int:
        """For the shell: 130 after Ctrl-C or SIGTERM, else 0."""
        return INTERRUPTED if self.interrupted else 0


def recipe_label(cfg: TrainConfig) -> str:
    """A word for what the linear layers compute in."""
    return cfg.quant.recipe if cfg.quant.enabled else "unquantized"


def _run_identity(cfg: TrainConfig) -> Mapping[str, Any]:
    """What has to be equal for a finished run to be the one that is asked for."""
    return json.loads(json.dumps({k: v for k, v in schema.to_plain(cfg).items() if k != "checkpoint"}))


def write_result(result: RunResult, cfg: TrainConfig) -> None:
    """Leaves ``result.json`` in the run's directory."""
    content = {"result": asdict(result), "config": _run_identity(cfg)}
    (Path(result.run_dir) / RESULT).write_text(json.dumps(content, indent=1), encoding="utf-8")


def finished_result(cfg: TrainConfig) -> RunResult | None:
    """The result of the finished run in ``cfg.run_dir``; None where it has to be trained, or is of another job."""
    try:
        saved = json.loads((Path(cfg.run_dir) / RESULT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if cfg.checkpoint.resume == "never" or saved.get("config") != _run_identity(cfg):
        return None
    return RunResult(**saved["result"])
