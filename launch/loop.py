"""One training job, from its configuration to its report."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from launch import summary
from launch.checkpoint import Checkpointer, CheckpointError, Position, find_checkpoint, reading
from launch.config import ConfigError, TrainConfig, resolve
from launch.data import Data, build_data
from launch.distributed import DTYPES, World, join_world, shard_model
from launch.models import build_model, count_parameters, materialize
from launch.nonfinite import NonFiniteError, NonFiniteWatch
from launch.preflight import own_run_dir
from launch.report import METRICS, Reporter, Status, peak_memory, read_metrics, reset_peak_memory
from launch.result import RESULT, RunResult, recipe_label, write_result
from launch.rope import keep_rotary_tables_fp32
from launch.schedule import Schedule
from launch.step import StepRecord, TrainStep, evaluate
from launch.stop import GracefulStop, StopVote, resume_command
from lumen_core import quantize as quant
from lumen_core.comm.meter import KINDS, METER, Traffic
from lumen_core.optim import build_optimizer
from lumen_fsdp2 import plan


def run(cfg: TrainConfig) -> RunResult:
    """Trains, or continues, the job ``cfg`` describes, in this process or the ones torchrun started.

    Raises:
        ConfigError: something only the user can put right.
        NonFiniteError: too many steps with a non-finite loss or gradient, or a last validation loss that is not finite.
        CheckpointError: the last checkpoint could not be written, or the one to go on from is damaged.
    """
    with join_world(cfg.backend.device) as world:
        cfg = resolve(cfg, world.size)
        with GracefulStop(world, _say if world.is_main else lambda text: None) as stop:
            if cfg.compare is not None:
                from launch.compare import run_compare

                result = run_compare(cfg, world, stop)
            else:
                result = train(cfg, world, stop)
                if world.is_main and not result.interrupted:
                    print("\n".join(summary.last_words(result)), flush=True)
            if result.interrupted:
                if world.is_main:
                    command = resume_command(cfg.run_dir)
                    print(f"interrupted after step {result.steps}; to continue:\n  {command}", flush=True)
                # torchrun ends all ranks as soon as one has exited with an error: not before this was said.
                world.gather(None)
        return result


def _say(text: str) -> None:
    os.write(2, f"\n{text}\n".encode())  # from a signal handler, where print() may find itself half-done


def train(cfg: TrainConfig, world: World, stop: GracefulStop) -> RunResult:
    """One run with one recipe; ``cfg`` is resolved."""
    with _run_dir_held(cfg, world):
        trainer = Trainer(cfg, world, stop)
        try:
            trainer.run()
        finally:
            trainer.reporter.close()
        return trainer.finish()


@contextlib.contextmanager
def _run_dir_held(cfg: TrainConfig, world: World) -> Iterator[None]:
    """The first rank keeps other jobs out of the run's directory; where it cannot, every rank hears why."""
    with contextlib.ExitStack() as held:
        problem = None
        if world.is_main:
            try:
                held.enter_context(own_run_dir(cfg.run_dir))
            except ConfigError as error:
                problem = str(error)
        problem = world.from_main(problem)
        if problem is not None:
            raise ConfigError(problem)
        yield


@contextlib.contextmanager
def _told_to_user() -> Iterator[None]:
    """Data and quantization answer bad values with ValueError or TypeError: the user's to mend, so no traceback."""
    try:
        yield
    except (ValueError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(str(error)) from error


def prepare_model(cfg: TrainConfig, world: World, vocab_size: int) -> nn.Module:
    """The model of ``cfg``: built, quantized, and spread over the ranks."""
    dtype, device = cfg.train.dtype, world.device
    model = build_model(cfg.model, vocab_size, cfg.train.seq_length, device=device, seed=cfg.train.seed)
    if cfg.quant.enabled:
        with _told_to_user():
            config = cfg.quant.to_config()
            if "seed" not in cfg.quant.options:
                config = config.replace(seed=cfg.train.seed)
            quant.enable(model, config)
    if dtype == "bf16":
        keep_rotary_tables_fp32(model)
    shard_model(
        model,
        world,
        dtype=dtype,
        backend=cfg.backend,
        activation_checkpointing=cfg.train.activation_checkpointing,
        compile=cfg.train.compile,
    )
    if any(p.is_meta for p in model.parameters()):
        materialize(model, cfg.model, device=device, seed=cfg.train.seed)
    return model


def wire_record(traffic: Traffic) -> dict[str, int]:
    """What a step sent, as ``metrics.jsonl`` has it: bytes of all collectives and of each kind."""
    return {"wire_bytes": traffic.total()} | {f"{kind}_bytes": traffic.total(kind) for kind in KINDS}


class Trainer:
    """A run in progress."""

    def __init__(self, cfg: TrainConfig, world: World, stop: GracefulStop) -> None:
        self.cfg, self.world, self.stop = cfg, world, stop
        reset_peak_memory(world.device)
        self.run_dir = Path(cfg.run_dir)
        self.data = self._build_data()
        torch.manual_seed(cfg.train.seed + world.rank)
        self.model = prepare_model(cfg, world, self.data.tokenizer.vocab_size)
        masters = {"auto": "auto", "true": True, "false": False}[cfg.optim.master_weights]
        self.optimizer = build_optimizer(
            self.model,
            name=cfg.optim.name,
            lr=cfg.optim.lr,
            betas=cfg.optim.betas,
            eps=cfg.optim.eps,
            weight_decay=cfg.optim.weight_decay,
            state=cfg.optim.state,
            master_weights=masters,
        )
        self.schedule = Schedule(
            self.optimizer,
            max_steps=cfg.train.max_steps,
            warmup_steps=cfg.optim.warmup_steps,
            schedule=cfg.optim.schedule,
            min_lr_ratio=cfg.optim.min_lr_ratio,
        )
        dtype = DTYPES[cfg.train.dtype]
        self.step = TrainStep(self.model, self.optimizer, world, dtype=dtype, grad_clip=cfg.train.grad_clip)
        self.checkpoints = Checkpointer(self.run_dir, world, config=cfg, keep=cfg.checkpoint.keep)
        if world.is_main:
            (self.run_dir / RESULT).unlink(missing_ok=True)
        source, self.position = self._resume()
        self.saved = self.position.step if source is not None else -1
        self.watch = NonFiniteWatch(self.step, world, cfg.train.max_nonfinite_steps, self.position.nonfinite)
        self.vote = StopVote(stop)
        self.pending: list[tuple[int, float, torch.Tensor, Traffic]] = []
        self.rates: list[float] = []
        self.clock = time.perf_counter()
        at = {"step": self.position.step, "evaluated": self.position.evaluated}
        self.reporter = Reporter(self.run_dir, recipe_label(cfg), main=world.is_main, **at)
        self.validation_loss: float | None = None
        self._greet(source)

    # -- setting up

    def _build_data(self) -> Data:
        train = self.cfg.train
        with _told_to_user():
            return build_data(
                self.cfg.data,
                seq_length=train.seq_length,
                seed=train.seed,
                rank=self.world.rank,
                world_size=self.world.size,
                micro_batch_size=train.micro_batch_size,
                global_batch_size=train.global_batch_size,
            )

    def _resume(self) -> tuple[Path | None, Position]:
        """Where the run starts: from which checkpoint, if any, and at which position."""
        setting, own = self.cfg.checkpoint.resume, self.checkpoints.latest()
        source, explicit = own, False
        if setting == "never":
            source = None
        elif setting != "auto":
            given = find_checkpoint(setting)
            inside = given.resolve().parent == self.checkpoints.folder.resolve()
            # A run that was started from elsewhere and has checkpoints of its own goes on from those, or else the same
            # command would start over after each interruption.
            if inside or own is None:
                # Another recipe may start from it, but not in the directory of the run that wrote it.
                source, explicit = given, not inside
        if source is None:
            self.checkpoints.set_aside(after=-1)
            return None, Position(fingerprint=self.data.fingerprint)
        with reading(source):
            position = self.checkpoints.load(source, self.model, self.optimizer, other_recipe=explicit)
        if any(self.world.gather(position.fingerprint != self.data.fingerprint)):  # a node may have other files
            raise ConfigError(
                f"checkpoint {source}: the text of data.train={self.cfg.data.train} is no longer the one it was "
                "trained on, so its position in the data means nothing; set checkpoint.resume=never or another run_dir"
            )
        self.checkpoints.set_aside(after=position.step)
        self.data.train.load_state_dict(position.data)
        return source, position

    def _greet(self, source: Path | None) -> None:
        cfg, say = self.cfg, self.reporter.message
        kinds = {"cpu": "CPU", "cuda": "GPU"}
        say(
            f"{cfg.model.name}: {count_parameters(self.model):,} parameters on {self.world.size} "
            f"{kinds[self.world.device.type]} process(es), {cfg.train.dtype}; {self._quantized_share():.1%} of linear "
            "weights quantized"
        )
        if self._sends_quantized():
            say(str(plan(self.model)))
        if source is not None:
            say(f"continuing from {source}, step {self.position.step}")
        if self.position.step >= cfg.train.max_steps:
            say(
                f"all {cfg.train.max_steps} steps are done already; raise train.max_steps to go on, or set "
                "checkpoint.resume=never (or another run_dir) to train again"
            )

    def _quantized_share(self) -> float:
        if not self.cfg.quant.enabled:
            return 0.0
        table = quant.summary(self.model)
        return 0.0 if table.config.format == "bf16" else table.quantized_share

    def _sends_quantized(self) -> bool:
        """Whether there is a plan worth reading: one rank sends nothing, and plain weights travel as they are."""
        return self.world.size > 1 and any(row.mode != "-" for row in plan(self.model).rows)

    # -- the loop

    def run(self) -> None:
        """Trains until the last step, or until somebody asks to stop."""
        train, position = self.cfg.train, self.position
        self.clock = time.perf_counter()
        if self._due(train.eval_interval):
            self._evaluate()
        stopping = False
        while position.step < train.max_steps and not stopping:
            stopping = self.vote.after(self._one_step())
            last = position.step == train.max_steps
            if last or stopping or position.step % train.log_interval == 0:
                self._flush()
            if (last and position.evaluated != position.step) or (not stopping and self._due(train.eval_interval)):
                self._evaluate()
            interval = self.cfg.checkpoint.interval
            if stopping or (interval and position.step % interval == 0) or (last and self.cfg.checkpoint.save_at_end):
                self._save(needed=last or stopping)

    def _due(self, interval: int) -> bool:
        """Whether an evaluation belongs to this step: at the start, and each ``interval`` steps."""
        step = self.position.step
        return self.position.evaluated != step and (step == 0 or (interval > 0 and step % interval == 0))

    def _one_step(self) -> torch.Tensor:
        batches = self.data.train.next_global_batch()
        lr = self.schedule.set(self.position.step)
        before = METER.snapshot()
        vector = self.step(batches, stop=self.stop.requested)
        self.position.step += 1
        self.watch.keep(self.position.step, batches)
        self.pending.append((self.position.step, lr, vector, METER.since(before)))
        return vector[StepRecord._fields.index("stop")]

    def _flush(self) -> None:
        """Reads the steps since the last look (the one place that waits for the device) and reports them."""
        if not self.pending:
            return
        pending, self.pending = self.pending, []
        records = [StepRecord(*values) for values in torch.stack([p[2] for p in pending]).tolist()]
        now = time.perf_counter()
        elapsed, self.clock = now - self.clock, now
        self.position.seconds += elapsed
        tokens = self.cfg.train.global_batch_size * self.cfg.train.seq_length * len(pending)
        self.rates.append(tokens / elapsed)
        rows = [
            {
                "step": step,
                "loss": record.loss,
                "grad_norm": record.grad_norm,
                "lr": lr,
                "tokens": int(record.tokens),
                "skipped": bool(record.nonfinite) or record.tokens == 0,
                **wire_record(traffic),
            }
            for (step, lr, _, traffic), record in zip(pending, records, strict=True)
        ]
        memory = peak_memory(self.world.device)
        rows[-1] |= {"tokens_per_second": self.rates[-1], "memory_gib": memory, "seconds": self.position.seconds}
        self.reporter.steps(rows, self._status(records[-1], rows[-1], memory))
        skipped = [step for (step, *_), record in zip(pending, records, strict=True) if record.nonfinite]
        message = self.watch.look(skipped)
        self.position.nonfinite = self.watch.count
        if message:
            self.reporter.message(message)
        self.clock = time.perf_counter()

    def _status(self, record: StepRecord, row: dict[str, Any], memory: float) -> Status:
        step, max_steps = self.position.step, self.cfg.train.max_steps
        tokens = self.cfg.train.global_batch_size * self.cfg.train.seq_length * (max_steps - step)
        return Status(
            step=step,
            max_steps=max_steps,
            loss=record.loss,
            grad_norm=record.grad_norm,
            lr=row["lr"],
            tokens_per_second=self.rates[-1],
            memory=memory,
            wire_bytes={kind: row[f"{kind}_bytes"] for kind in KINDS},
            seconds_left=tokens / statistics.median(self.rates[-20:]),
            validation_loss=self.validation_loss,
            validation_step=self.position.evaluated,
        )

    def _evaluate(self) -> None:
        train = self.cfg.train
        # As many samples whatever the split into micro-batches and ranks.
        limit = train.eval_batches * (train.global_batch_size // (train.micro_batch_size * self.world.size))
        if limit == 0 or len(self.data.validation) == 0:
            return
        self._flush()
        batches = self.data.validation.batches(limit)
        self.validation_loss = evaluate(self.step.forward, batches, self.world).item()
        self.position.evaluated = self.position.step
        self.reporter.evaluation(self.position.step, self.validation_loss)
        self.clock = time.perf_counter()

    def _save(self, *, needed: bool) -> None:
        """Writes a checkpoint. One on the way may fail, with a loud message: training is worth more than it."""
        if self.saved == self.position.step:
            return
        self._flush()
        self.position.data = self.data.train.state_dict()
        try:
            path = self.checkpoints.save(self.model, self.optimizer, self.position)
        except CheckpointError as error:
            if needed:
                raise
            self.reporter.message(f"WARNING: {error}; training goes on, the checkpoints before it are untouched")
        else:
            self.saved = self.position.step
            self.reporter.message(f"saved {path}")
        self.clock = time.perf_counter()

    # -- the end

    def finish(self) -> RunResult:
        """The result, with its files; exports the weights where asked to."""
        cfg, position = self.cfg, self.position
        done = position.step >= cfg.train.max_steps
        rows = read_metrics(self.run_dir / METRICS) if self.world.is_main else []
        if done and self.world.from_main(summary.diverged(rows, position.step)):
            raise NonFiniteError(
                f"the validation loss after the last step, {position.step}, is not finite: the weights in "
                f"{self.run_dir} are of no use, and nothing was exported",
                step=position.step,
                module=None,
            )
        if done and cfg.export is not None:
            from launch.hf_export import export_model

            path = export_model(self.model, cfg.export, tokenizer=self.data.tokenizer, source=cfg.model.path)
            if self.world.is_main:
                print(f"exported to {path}", flush=True)
        result = RunResult(
            run_dir=str(self.run_dir),
            recipe=recipe_label(cfg),
            steps=position.step,
            max_steps=cfg.train.max_steps,
            tokens_per_second=statistics.median(self.rates) if self.rates else None,
            seconds=position.seconds,
            peak_memory_gib=max(self.world.gather(peak_memory(self.world.device))),
            parameters=count_parameters(self.model),
            quantized_share=self._quantized_share(),
            nonfinite_steps=position.nonfinite,
            interrupted=not done,
        )
        if self.world.is_main:
            for name, value in (summary.final_numbers(rows) | summary.wire_numbers(rows)).items():
                setattr(result, name, value)
            if done:
                sent = str(plan(self.model)) if self._sends_quantized() else None
                summary.report_run(result, rows, cfg, self.model, self.world, sent)
                write_result(result, cfg)
        return self.world.from_main(result)
