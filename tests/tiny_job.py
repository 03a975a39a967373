"""A training job small enough for a test: seconds, a two-layer Llama, a few kilobytes of text."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from launch.config import BackendConfig, DataConfig, ModelConfig, TrainConfig, TrainLoopConfig
from launch.report import METRICS, read_metrics


def write_text(folder: Path) -> Path:
    """Twelve documents of made-up words, always the same; returns their folder."""
    folder = Path(folder) / "text"
    if folder.is_dir():
        return folder
    folder.mkdir(parents=True)
    rng = random.Random(5)
    words = ["".join(rng.choices("abcdefgh", k=rng.randint(2, 6))) for _ in range(40)]
    for number in range(12):
        lines = [" ".join(rng.choices(words, k=8)) for _ in range(20)]
        (folder / f"{number:02}.txt").write_text("\n".join(lines))
    return folder


def tiny_job(folder: Path | str, **changes: Any) -> TrainConfig:
    """A job in ``folder/run``; ``changes`` are dotted keys with ``__`` for the dot (``train__max_steps=3``)."""
    folder = Path(folder)
    cfg = TrainConfig(
        model=ModelConfig(
            name="test",
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=64,
        ),
        data=DataConfig(train=str(write_text(folder)), validation_fraction=0.2),
        train=TrainLoopConfig(
            max_steps=8,
            micro_batch_size=4,
            seq_length=32,
            dtype="fp32",
            eval_interval=4,
            eval_batches=2,
            log_interval=3,
        ),
        backend=BackendConfig(device="cpu"),
        run_dir=str(folder / "run"),
    )
    cfg.optim.lr, cfg.optim.warmup_steps = 3e-3, 2
    cfg.checkpoint.interval = 4
    for key, value in changes.items():
        target: Any = cfg
        *path, name = key.split("__")
        for part in path:
            target = getattr(target, part)
        assert hasattr(target, name), key
        setattr(target, name, value)
    return cfg


def train_rows(run_dir: Path | str) -> list[dict[str, Any]]:
    """The training records of a run."""
    return [r for r in read_metrics(Path(run_dir) / METRICS) if r["kind"] == "train"]


def losses(run_dir: Path | str) -> list[float]:
    """The training loss of each step of a run, checked to be there once each and in order."""
    rows = train_rows(run_dir)
    assert [r["step"] for r in rows] == list(range(1, len(rows) + 1))
    return [r["loss"] for r in rows]


def validation_losses(run_dir: Path | str) -> dict[int, float]:
    """The validation losses of a run by step, checked to be there once each."""
    rows = [r for r in read_metrics(Path(run_dir) / METRICS) if r["kind"] == "eval"]
    assert len({r["step"] for r in rows}) == len(rows)
    return {r["step"]: r["validation_loss"] for r in rows}
