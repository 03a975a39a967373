"""Recipes against BF16 over several seeds: the table of the README.

    python -m launch.sweep recipes=mxfp8,delayed seeds=0,1,2

Each recipe and each seed is a `lumen-train` of its own with the same job (``experiment=demo``), several at a time. A
run is compared with the BF16 run of its own seed: the same initial weights and the same data in the same order. What
is finished is not run again, and what was interrupted goes on, so the same command continues a sweep.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from launch import overrides
from launch.compare import recipe_folder
from launch.config import ConfigError, TrainConfig
from launch.result import RunResult, finished_result
from launch.stop import INTERRUPTED
from launch.summary import fall_percent, gap_percent

REFERENCE = "bf16"
RECIPES = ("mxfp8", "mxfp8-32x32", "delayed", "hybrid", "tensorwise", "rowwise", "blockwise", "mxfp4")
USAGE = """usage: python -m launch.sweep [recipes=a,b,…] [seeds=0,1,2] [jobs=N] [out=DIR] [key=value …]

  recipes  recipe names, comma-separated (default: all of them)
  seeds    comma-separated integers (default: 0,1,2)
  jobs     runs at a time (default: one per CPU core)
  out      directory of all runs and of table.md (default: runs/sweep)

Everything else goes to each lumen-train (default: experiment=demo)."""


@dataclass
class Sweep:
    """What to run.

    Attributes:
        recipes: without the reference, which always runs.
        seeds: of each recipe.
        jobs: processes at a time.
        out: where the runs are.
        words: the job, as `lumen-train` takes it.
    """

    recipes: tuple[str, ...] = RECIPES
    seeds: tuple[int, ...] = (0, 1, 2)
    jobs: int = field(default_factory=lambda: os.cpu_count() or 1)
    out: Path = Path("runs/sweep")
    words: tuple[str, ...] = ("experiment=demo",)

    def job(self, recipe: str, seed: int) -> list[str]:
        """The arguments of one run."""
        folder = self.out / f"{recipe_folder(recipe)}-seed{seed}"
        return [*self.words, f"quant={recipe}", f"train.seed={seed}", "compare=null", f"run_dir={folder}"]


def parse(argv: Sequence[str]) -> Sweep:
    """The sweep that a command line asks for.

    Raises:
        ConfigError: a value of the sweep itself is wrong.
    """
    sweep, rest = Sweep(), []
    for word in argv:
        key, given, value = word.partition("=")
        if not given:
            raise ConfigError(f"{word}: values are written key=value", *USAGE.splitlines())
        if key == "recipes":
            names = [name.strip() for name in value.split(",")]
            sweep.recipes = tuple(n for n in dict.fromkeys(names) if n and n != REFERENCE)
        elif key in ("seeds", "jobs"):
            try:
                numbers = tuple(dict.fromkeys(int(n) for n in value.split(",")))
            except ValueError:
                numbers = ()
            if not numbers or min(numbers) < (key == "jobs") or (key == "jobs" and len(numbers) > 1):
                what = "integers >= 0, comma-separated" if key == "seeds" else "an integer >= 1"
                raise ConfigError(f"{word}: expected {what}")
            if key == "seeds":
                sweep.seeds = numbers
            else:
                sweep.jobs = numbers[0]
        elif key == "out":
            sweep.out = Path(value)
        else:
            rest.append(word)
    if not sweep.recipes:
        raise ConfigError(f"recipes: expected at least one recipe other than {REFERENCE}")
    if rest:
        names = {word.split("=")[0] for word in rest}
        sweep.words = tuple(rest if "experiment" in names else ("experiment=demo", *rest))
    return sweep


def run_one(sweep: Sweep, recipe: str, seed: int, cfg: TrainConfig) -> RunResult:
    """Trains one recipe with one seed in a process of its own, or finds it trained. ``cfg`` is what the words say.

    Raises:
        RuntimeError: it failed; with the end of what it printed.
        KeyboardInterrupt: it was interrupted.
    """
    words = sweep.job(recipe, seed)
    done = finished_result(cfg)
    if done is None:
        threads = max(1, (os.cpu_count() or 1) // sweep.jobs)
        # Waiting threads give their core away: with several processes on it that is much faster.
        environment = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"} | os.environ
        log = Path(cfg.run_dir) / "log.txt"
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "w", encoding="utf-8") as file:
            command = [sys.executable, "-m", "launch.train", *words]
            code = subprocess.run(command, env=environment, stdout=file, stderr=subprocess.STDOUT).returncode
        if code == INTERRUPTED:
            raise KeyboardInterrupt
        done = finished_result(cfg)
        if code or done is None:
            tail = "\n".join(log.read_text(encoding="utf-8").splitlines()[-15:])
            raise RuntimeError(f"{' '.join(command)} ended with code {code}:\n{tail}")
    print(f"{recipe}, seed {seed}: validation loss {done.validation_loss:.4f}", flush=True)
    return done


def table(sweep: Sweep, results: dict[tuple[str, int], RunResult]) -> str:
    """Markdown: a line a recipe, against the BF16 run of the same seed."""
    references = [results[REFERENCE, seed] for seed in sweep.seeds]
    count = f"{len(sweep.seeds)} seed{'s' if len(sweep.seeds) > 1 else ''}"
    lines = [
        f"| recipe | gap to BF16, mean of {count} | each seed | validation loss | linear weights quantized |",
        "|---|---|---|---|---|",
    ]
    mean = statistics.fmean(r.validation_loss for r in references)
    lines.append(f"| {REFERENCE} | - | - | {mean:.4f} | - |")
    for recipe in sweep.recipes:
        runs = [results[recipe, seed] for seed in sweep.seeds]
        gaps = [gap_percent(r.validation_loss, b.validation_loss) for r, b in zip(runs, references, strict=True)]
        cells = [
            recipe,
            f"{statistics.fmean(gaps):+.2f} %",
            " ".join(f"{gap:+.2f}" for gap in gaps),
            f"{statistics.fmean(r.validation_loss for r in runs):.4f}",
            f"{runs[0].quantized_share:.1%}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    falls = [fall_percent(r) for r in references]
    lines += [
        "",
        f"{references[0].steps} steps of `{' '.join(sweep.words)}`; BF16's validation loss falls by "
        f"{statistics.fmean(falls):.1f} % (least: {min(falls):.1f} %) from its value before the first step.",
    ]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a sweep; returns the exit code: 0 done, 1 a run failed, 2 a mistake of the user's, 130 interrupted."""
    argv = sys.argv[1:] if argv is None else argv
    if "--help" in argv or "-h" in argv:
        print(USAGE)
        return 0
    try:
        sweep = parse(argv)
        pairs = [(recipe, seed) for seed in sweep.seeds for recipe in (REFERENCE, *sweep.recipes)]
        jobs = {pair: overrides.load(sweep.job(*pair))[0] for pair in pairs}
    except ConfigError as error:
        print("\n".join(f"launch.sweep: {p}" for p in error.problems), file=sys.stderr)
        return 2
    with ThreadPoolExecutor(sweep.jobs) as pool:
        futures = {pair: pool.submit(run_one, sweep, *pair, cfg) for pair, cfg in jobs.items()}
        try:
            results = {pair: future.result() for pair, future in futures.items()}
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            print("launch.sweep: interrupted; the same command continues", file=sys.stderr)
            return INTERRUPTED
        except RuntimeError as error:
            pool.shutdown(cancel_futures=True)
            print(f"launch.sweep: {error}", file=sys.stderr)
            return 1
    text = table(sweep, results)
    (sweep.out / "table.md").write_text(text, encoding="utf-8")
    print(f"\n{text}\n{sweep.out / 'table.md'}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
