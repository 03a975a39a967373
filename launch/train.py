"""`lumen-train`: one training job from the command line.

The command line is checked completely before torch is imported: a mistake costs half a second and ends with exit
code 2 and one line per problem.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from launch import overrides, preflight, schema
from launch.config import ConfigError, TrainConfig

COMMON = (
    ("train.max_steps", "500"),
    ("train.micro_batch_size", "8"),
    ("train.global_batch_size", "32"),
    ("train.seq_length", "512"),
    ("train.seed", "1"),
    ("train.dtype", "fp32"),
    ("optim.lr", "1e-3"),
    ("data.train", "/corpus/*.txt"),
    ("data.tokenizer", "/models/llama"),
    ("model.path", "/models/llama"),
    ("quant.scale_rounding", "even"),
    ("checkpoint.interval", "100"),
    ("checkpoint.resume", "never"),
    ("run_dir", "runs/mine"),
    ("compare", "bf16"),
    ("export", "out/model"),
)
"""The keys that `--help` shows, each with an example value."""

FLAGS = ("--help", "--keys", "--cfg", "--config-dir", "--config-name")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def _parser() -> _Parser:
    parser = _Parser(prog="lumen-train", add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--keys", action="store_true")
    parser.add_argument("--cfg", "-c", choices=("job",))
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--config-name", "-cn", default="train")
    return parser


def help_text(config_dir: str | None = None) -> str:
    """What `lumen-train --help` prints."""
    from pathlib import Path

    dirs = [overrides.tree()] if config_dir is None else [Path(config_dir), overrides.tree()]
    known = schema.keys()
    lines = [
        "lumen-train: train a language model in FP8, MXFP8 or MXFP4.",
        "",
        "usage: lumen-train [group=option …] [key=value …] [--config-dir DIR] [--config-name NAME] [--cfg job]",
        "       torchrun --nproc-per-node N -m launch.train …",
        "",
        "Groups (group=option picks configs/<group>/<option>.yaml; quant also takes a recipe string):",
    ]
    for group, options in overrides.group_options(dirs).items():
        lines.append(f"  {group:<11} {' '.join(options)}")
    lines += ["", "Keys (the commonest, each with an example; all of them: lumen-train --keys):"]
    for name, example in COMMON:
        lines.append(f"  {f'{name}={example}':<34} {_first_sentences(known[name].help)}")
    lines += [
        "",
        "Flags:",
        "  --cfg job            print the job that would run, as YAML, and stop",
        "  --keys               list every key with its type, default and meaning",
        "  --config-dir DIR     a directory of your own YAML, laid out like configs/ and searched first",
        "  --config-name NAME   the file to start from (default: train)",
        "",
        "Examples:",
        "  lumen-train experiment=demo",
        "  lumen-train model=tiny quant=mxfp8 quant.scale_rounding=even compare=bf16",
        "  lumen-train quant=dynamic_row_e4m3_e4m3_e4m3 train.max_steps=200 optim.lr=1e-3",
        "  lumen-train model.path=/models/llama data.tokenizer=/models/llama 'data.train=/corpus/*.jsonl' export=out",
    ]
    return "\n".join(lines)


def _first_sentences(text: str, room: int = 80) -> str:
    """As many whole sentences of ``text`` as have room, but at least one."""
    first, *rest = text.split(". ")
    for sentence in rest:
        if len(first) + len(sentence) > room:
            break
        first += f". {sentence}"
    return first.removesuffix(".")


def keys_text() -> str:
    """What `lumen-train --keys` prints: every key, what it takes, its default and its meaning."""
    lines = []
    for key in schema.keys().values():
        default = "null" if key.default is None else str(key.default)
        lines.append(f"{key.name}: {key.help}\n    {key.expected()}; default {default}")
    return "\n".join(lines)


def cfg_text(cfg: TrainConfig) -> str:
    """``cfg`` as YAML that `--config-dir`/`--config-name` can read back."""
    from omegaconf import OmegaConf

    body = OmegaConf.to_yaml(OmegaConf.create(schema.to_plain(cfg)))
    return f"# quant: {cfg.quant.to_config()}\n{body}"


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    args, rest = _parser().parse_known_intermixed_args(argv)
    for word in rest:
        if word.split("=")[0] in ("--multirun", "-m"):
            raise ConfigError(f"{word}: one call runs one job; loop over calls in the shell")
        best = schema.nearest(word.split("=")[0], FLAGS)
        raise ConfigError(f"{word}: there is no such flag; nearest: {best} (values are written key=value)")
    return args


def _tell(*problems: str, everywhere: bool = False) -> None:
    """Problems on stderr, a line each: the first rank's, or with ``everywhere`` each rank's under its number."""
    if not _is_first_rank() and not everywhere:
        return
    prefix = "lumen-train" if _is_first_rank() else f"lumen-train [rank {os.environ['RANK']}]"
    if len(problems) > 1 and not everywhere:
        print(f"{prefix}: {len(problems)} problems, nothing was started", file=sys.stderr)
    for problem in problems:
        print(f"{prefix}: {problem}", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `lumen-train`.

    Returns:
        The exit code: 0 done, 1 failed for a reason it names, 2 a mistake in the configuration, 130 interrupted.
    """
    # Before torch starts its threads: ones that spin while they wait take a shared machine's cores from each other.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        args = _parse(sys.argv[1:] if argv is None else argv)
        if args.help or args.keys:
            print(keys_text() if args.keys else help_text(args.config_dir))
            return 0
        cfg, notes = overrides.load(
            args.overrides, config_dir=args.config_dir, config_name=args.config_name, world_size=_world_size()
        )
        if args.cfg and _is_first_rank():
            print(cfg_text(cfg), end="")
    except ConfigError as error:
        _tell(*error.problems)
        return 2
    for note in notes:
        _tell(note)
    return 0 if args.cfg else _run(cfg)


def _run(cfg: TrainConfig) -> int:
    for name in ("torchao", "torch.utils._pytree"):  # what torchao says about itself when transformers imports it
        logging.getLogger(name).setLevel(logging.ERROR)
    problems = preflight.missing_packages(*preflight.packages_of(cfg))
    problems += filter(None, [preflight.kernel_problem()])
    if problems:
        _tell(*problems)
        return 2
    from launch import loop
    from launch.checkpoint import CheckpointError
    from launch.nonfinite import NonFiniteError

    try:
        return loop.run(cfg).exit_code
    except ConfigError as error:  # may be one rank's alone: a GPU that is missing, a file that is not on its machine
        _tell(*error.problems, everywhere=True)
        return 2
    except ImportError as error:
        problem = preflight.import_problem(error)
        if problem is None:
            raise
        _tell(problem, everywhere=True)
        return 2
    except (CheckpointError, NonFiniteError) as error:  # the same on every rank
        _tell(str(error))
        return 1


if __name__ == "__main__":
    sys.exit(main())
