"""What a run shows and records: the screen, ``metrics.jsonl`` and TensorBoard."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import math
import os
import re
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

METRICS = "metrics.jsonl"


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The records of a ``metrics.jsonl``; a line that a crash cut short is left out."""
    rows = []
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    for line in text.splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def _number(value: Any) -> Any:
    """JSON knows no NaN and no infinity: null stands for them."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Metrics:
    """``metrics.jsonl``: one line a step (``kind`` "train") and one an evaluation ("eval"), flushed at once.

    Args:
        path: of the file; records of an earlier part of the run stay, up to where this part begins.
        step: the step this part begins after; later training records go.
        evaluated: the last evaluation that counts; later ones go.
    """

    def __init__(self, path: Path, *, step: int = 0, evaluated: int = -1) -> None:
        last = {"train": step, "eval": evaluated}
        kept = [r for r in read_metrics(path) if r["step"] <= last[r["kind"]]]
        fresh = path.with_name(f".{path.name}.new")
        with open(fresh, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(r) + "\n" for r in kept)
        fresh.replace(path)
        self.file = open(path, "a", encoding="utf-8")

    def write(self, rows: Sequence[dict[str, Any]]) -> None:
        """Appends ``rows``."""
        for row in rows:
            self.file.write(json.dumps({k: _number(v) for k, v in row.items()}) + "\n")
        self.file.flush()

    def close(self) -> None:
        """No more records."""
        self.file.close()


def reset_peak_memory(device: torch.device) -> None:
    """`peak_memory` counts from here, where the system can do that, after what nobody holds any more was freed."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory(device: torch.device) -> float:
    """GiB: most memory that tensors took on a GPU; on a CPU, the largest resident size of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    with contextlib.suppress(OSError):
        found = re.search(r"^VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.M)
        if found:
            return int(found[1]) / 2**20
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


_SHORT = {"all_gather": "gather", "reduce_scatter": "scatter", "all_reduce": "reduce", "all_to_all": "to-all"}


def amount(count: float) -> str:
    """Bytes as ``1.23 MB``, in decimal units."""
    size, unit = next(((s, u) for s, u in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if count >= s), (1.0, "B"))
    return f"{count / size:.4g} {unit}"


def traffic_text(by_kind: Mapping[str, float]) -> str:
    """Bytes of each kind of collective as ``3.1 MB (gather 2.1 MB, scatter 1 MB, reduce 44 B)``."""
    parts = [f"{_SHORT[kind]} {amount(value)}" for kind, value in by_kind.items() if value]
    return amount(sum(by_kind.values())) + (f" ({', '.join(parts)})" if len(parts) > 1 else "")


def duration(seconds: float) -> str:
    """As ``1:02:03`` or ``2:03``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@dataclass
class Status:
    """What the screen shows at a logging interval; ``None`` where there is nothing yet.

    ``wire_bytes``: of the last step, by kind of collective; gathered outputs over all ranks, see `ByteMeter`.
    ``validation_loss``: the last one, of ``validation_step``.
    """

    step: int
    max_steps: int
    loss: float
    grad_norm: float
    lr: float
    tokens_per_second: float
    memory: float
    seconds_left: float
    validation_loss: float | None = None
    validation_step: int | None = None
    wire_bytes: Mapping[str, int] | None = None

    def fields(self) -> list[tuple[str, str]]:
        """Name and value of each figure, with its unit."""
        loss = self.validation_loss
        validation = "-" if loss is None else f"{loss:.4f} (step {self.validation_step})"
        wire = [] if self.wire_bytes is None else [("wire", f"{traffic_text(self.wire_bytes)} a step")]
        return [
            ("loss", f"{self.loss:.4f}"),
            ("validation", validation),
            ("grad norm", f"{self.grad_norm:.3g}"),
            ("lr", f"{self.lr:.2e}"),
            ("tokens/s", f"{self.tokens_per_second:,.0f}"),
            ("memory", f"{self.memory:.2f} GiB"),
            *wire,
            ("left", duration(self.seconds_left)),
        ]


class Display(Protocol):
    """Where messages and progress go."""

    def message(self, text: str) -> None: ...

    def update(self, status: Status) -> None: ...

    def close(self) -> None: ...


class PlainDisplay:
    """Lines, for log files and terminals without rich."""

    def __init__(self, label: str) -> None:
        self.label = label

    def message(self, text: str) -> None:
        print(f"[{self.label}] {text}", flush=True)

    def update(self, status: Status) -> None:
        width = len(str(status.max_steps))
        figures = "  ".join(f"{name} {value}" for name, value in status.fields())
        self.message(f"step {status.step:>{width}}/{status.max_steps}  {figures}")

    def close(self) -> None:
        pass


class RichDisplay:
    """A progress bar with the figures under it; messages scroll above."""

    def __init__(self, label: str, console: Any = None) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self.label = label
        self.console = console or Console()
        columns = (TextColumn("[bold]{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.progress = Progress(*columns, console=self.console)
        self.task = self.progress.add_task(label, total=None)
        self.live = Live(self.progress, console=self.console, refresh_per_second=4)
        self.live.start()

    def message(self, text: str) -> None:
        self.console.print(f"[{self.label}] {text}", markup=False, highlight=False)

    def update(self, status: Status) -> None:
        from rich.columns import Columns
        from rich.console import Group
        from rich.text import Text

        self.progress.update(self.task, completed=status.step, total=status.max_steps)
        figures = [Text.assemble((f"{name} ", "dim"), (value, "bold")) for name, value in status.fields()]
        self.live.update(Group(self.progress, Columns(figures, padding=(0, 3))))

    def close(self) -> None:
        self.live.stop()


class SilentDisplay:
    """For all ranks but the first."""

    def message(self, text: str) -> None:
        pass

    def update(self, status: Status) -> None:
        pass

    def close(self) -> None:
        pass


def open_display(label: str, *, main: bool = True) -> Display:
    """The best display this terminal can show."""
    if not main:
        return SilentDisplay()
    terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    if terminal and importlib.util.find_spec("rich") is not None:
        return RichDisplay(label)
    return PlainDisplay(label)


def _open_tensorboard(folder: Path, step: int) -> Any:
    """A writer that drops what an earlier part of the run wrote beyond ``step``; None without tensorboard."""
    if importlib.util.find_spec("tensorboard") is None:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder), purge_step=step + 1)


_SCALARS = {
    "loss": "loss/train",
    "validation_loss": "loss/validation",
    "grad_norm": "gradient norm",
    "lr": "learning rate",
    "tokens_per_second": "tokens per second",
    "memory_gib": "memory GiB",
    "wire_bytes": "wire bytes",
}


class Reporter:
    """Everything a rank reports; on all ranks but the first it does nothing.

    Args:
        run_dir: where ``metrics.jsonl`` and ``tensorboard/`` are.
        label: stands before every line; the recipe.
        step, evaluated: where this part of the run begins, see `Metrics`.
        main: whether this is the first rank.
    """

    def __init__(self, run_dir: Path, label: str, *, step: int = 0, evaluated: int = -1, main: bool = True) -> None:
        self.display = open_display(label, main=main)
        self.metrics = Metrics(run_dir / METRICS, step=step, evaluated=evaluated) if main else None
        self.tensorboard = _open_tensorboard(run_dir / "tensorboard", step) if main else None
        self.message = self.display.message
        self.status: Status | None = None
        self.failed = False  # whether a warning was given that something could not be written

    def steps(self, rows: Sequence[dict[str, Any]], status: Status) -> None:
        """Records the steps since the last call (``step``, ``loss``, ``grad_norm``, ``lr``, …) and shows ``status``."""
        self._record([{"kind": "train", **row} for row in rows])
        self.status = status
        self.display.update(status)

    def evaluation(self, step: int, loss: float) -> None:
        """Records a validation loss."""
        self._record([{"kind": "eval", "step": step, "validation_loss": loss}])
        if self.status is not None and isinstance(self.display, RichDisplay):
            self.display.update(replace(self.status, validation_loss=loss, validation_step=step))  # not the one before
        self.message(f"step {step}: validation loss {loss:.4f}")

    def _record(self, rows: Sequence[dict[str, Any]]) -> None:
        try:
            self._write(rows)
        except OSError as error:  # a full disk, say: training is worth more than its curves
            if not self.failed:
                self.message(f"WARNING: metrics cannot be written, some will be missing: {error}; training goes on")
            self.failed = True

    def _write(self, rows: Sequence[dict[str, Any]]) -> None:
        if self.metrics is not None:
            self.metrics.write(rows)
        if self.tensorboard is not None:
            for row in rows:
                for key, tag in _SCALARS.items():
                    if row.get(key) is not None:
                        self.tensorboard.add_scalar(tag, row[key], row["step"])
            self.tensorboard.flush()

    def close(self) -> None:
        """Gives the terminal back and closes the files."""
        self.display.close()
        for writer in (self.metrics, self.tensorboard):
            if writer is not None:
                with contextlib.suppress(OSError):  # what is still buffered goes the way of what was warned of
                    writer.close()
