"""`lumen-bench gemm | quantize | layer | fsdp2 | isa`: how fast products, casts, a block and a sharded step are here.

Medians of single runs; on a GPU timed by events, with the L2 cache flushed before each. Compare numbers of
one run only.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from launch.bench import fsdp2, gemm, isa, layer, quantize
from launch.bench.timing import Stopwatch
from lumen_core.config import QuantConfig
from lumen_core.diagnostics.doctor import describe, torch_build
from lumen_core.diagnostics.text import table
from lumen_core.diagnostics.versions import versions

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
RECIPES = ("tensorwise", "rowwise", "blockwise", "mxfp8", "mxfp8-32x32", "mxfp4")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def _device(text: str) -> torch.device:
    try:
        device = torch.device(text)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise argparse.ArgumentTypeError(f"{text}: {str(error).splitlines()[0]}") from None
    return device


def _recipe(text: str) -> QuantConfig:
    try:
        return QuantConfig.parse(text)
    except (ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lumen-bench", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    saved = argparse.ArgumentParser(add_help=False)
    saved.add_argument("--json", type=Path, metavar="FILE", help="also write everything to FILE")
    every = argparse.ArgumentParser(add_help=False, parents=[saved])
    every.add_argument("--device", type=_device, help="default: the GPU if there is one")
    every.add_argument("--iters", type=_positive, help="timed runs (GPU 20, CPU 5)")
    shared = argparse.ArgumentParser(add_help=False, parents=[every])
    shared.add_argument("--m", type=_positive, help="tokens (GPU 8192, CPU 512)")
    shared.add_argument("--k", type=_positive, help="input features (GPU 4096, CPU 512)")
    shared.add_argument("--dtype", choices=DTYPES, default="bf16", help="of what is quantized (%(default)s)")
    one = commands.add_parser("gemm", parents=[shared], help="TFLOP/s of the three GEMMs of each recipe")
    one.add_argument("--n", type=_positive, help="output features (GPU 4096, CPU 512)")
    one.add_argument(
        "--recipes", type=_recipe, nargs="+", default=[_recipe(r) for r in RECIPES], metavar="RECIPE",
        help=f"names, grammar strings, or either with ,key=value ({' '.join(RECIPES)})",
    )  # fmt: skip
    two = commands.add_parser("quantize", parents=[shared], help="bandwidth of each cast")
    two.add_argument("--casts", nargs="+", choices=quantize.CASTS, default=list(quantize.CASTS), metavar="CAST",
                     help=f"of {', '.join(map(repr, quantize.CASTS))}")  # fmt: skip
    two.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="torch.compile the casts, torchao's too (GPU yes, CPU no)",
    )
    layer.add_arguments(commands, every)
    isa.add_arguments(commands, saved)
    fsdp2.add_arguments(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    options = parser.parse_args(argv)
    if options.command == "fsdp2":
        try:
            return fsdp2.main(options)
        except ValueError as error:
            parser.error(str(error))
    if options.json is not None:
        try:  # before minutes of measuring, not after
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.touch()
        except OSError as error:
            parser.error(f"--json {options.json}: {error.strerror}")
    report: dict[str, Any] = {
        "command": shlex.join(["lumen-bench", *argv]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "torch_build": torch_build(),
        "versions": {name: version for name, version in versions().items() if version is not None},
    }
    try:
        text = _isa(options, report) if options.command == "isa" else _timed(options, report)
    except ValueError as error:  # a recipe that quantizes nothing in a single layer, say
        parser.error(str(error))
    print(text)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def _isa(options: argparse.Namespace, report: dict[str, Any]) -> str:
    report["rows"] = isa.measure(options)
    return f"triton {report['versions'].get('triton')}\n{isa.show(report['rows'])}"


def _timed(options: argparse.Namespace, report: dict[str, Any]) -> str:
    device = options.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    watch = Stopwatch(device, options.iters or (20 if device.type != "cpu" else 5))
    report |= {"device": describe(device), "threads": torch.get_num_threads(), "iterations": watch.iterations}
    return {"gemm": _gemm, "quantize": _quantize, "layer": _layer}[options.command](options, watch, report)


def _sizes(options: argparse.Namespace, report: dict[str, Any], gpu: bool, *names: str) -> None:
    for name in names:
        report[name] = getattr(options, name) or ((8192 if name == "m" else 4096) if gpu else 512)
    report["dtype"] = options.dtype


def _gemm(options: argparse.Namespace, watch: Stopwatch, report: dict[str, Any]) -> str:
    _sizes(options, report, watch.device.type != "cpu", "m", "n", "k")
    sizes = report["m"], report["n"], report["k"]
    report["bf16_tflops"], report["rows"] = gemm.measure(options.recipes, *sizes, DTYPES[options.dtype], watch)
    return show_gemm(report)


def _quantize(options: argparse.Namespace, watch: Stopwatch, report: dict[str, Any]) -> str:
    gpu = watch.device.type != "cpu"
    _sizes(options, report, gpu, "m", "k")
    report["compiled"] = gpu if options.compile is None else options.compile
    report["copy_bytes_per_second"], report["rows"] = quantize.measure(
        options.casts, report["m"], report["k"], DTYPES[options.dtype], watch, compiled=report["compiled"]
    )
    return show_quantize(report)


def _layer(options: argparse.Namespace, watch: Stopwatch, report: dict[str, Any]) -> str:
    layer.complete(options, watch.device.type != "cpu")
    report |= {name: getattr(options, name) for name in ("batch", "tokens", "hidden", "ffn")}
    report["rows"] = layer.measure(options, watch)
    sizes = f"{options.batch} x {options.tokens} tokens, {options.hidden} x {options.ffn}, bf16"
    return "\n".join([_heading(report), sizes, layer.show(report["rows"])])


def _heading(report: dict[str, Any]) -> str:
    device, found = report["device"], report["versions"]
    known = ", ".join(f"{name} {found[name]}" for name in ("torch", "triton", "torchao") if name in found)
    return f"{device['name']} ({device['arch']}), {known}; median of {report['iterations']}"


_ABSENT = "torchao -: it has no counterpart, or it does not run here (--json FILE says why)"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def show_gemm(report: dict[str, Any]) -> str:
    unit, scale = ("TFLOP/s", 1) if report["device"]["device"] != "cpu" else ("GFLOP/s", 1e3)
    bf16 = {name: f"{scale * value:.3g}" for name, value in report["bf16_tflops"].items()}
    rows = [
        (
            *(row[key] for key in ("recipe", "gemm", "kernel")),
            f"{row['ms']:.3f}", f"{scale * row['tflops']:.3g}", f"{row['of_ceiling']:.0%}", _ratio(row["vs_bf16"]),
            "-" if row["torchao_tflops"] is None else f"{scale * row['torchao_tflops']:.3g}", _ratio(row["vs_torchao"]),
        )
        for row in report["rows"]
    ]  # fmt: skip
    header = ("recipe", "gemm", "kernel", "ms", unit, "of ceiling", "vs bf16", "torchao", "vs torchao")
    return "\n".join(
        [
            _heading(report),
            f"M={report['m']} N={report['n']} K={report['k']}; torch bf16 "
            + ", ".join(f"{name} {bf16[name]}" for name in gemm.GEMMS)
            + f" {unit}, ceiling {bf16['ceiling']}",
            table(header, rows),
            _ABSENT,
        ]
    )


def show_quantize(report: dict[str, Any]) -> str:
    unit, scale = ("TB/s", 1e12) if report["device"]["device"] != "cpu" else ("GB/s", 1e9)
    rows = [
        (
            row["cast"], f"{row['bytes'] / 1e6:.2f}", f"{row['ms']:.3f}", f"{row['bytes_per_second'] / scale:.3g}",
            f"{row['of_copy']:.0%}", "-" if row["torchao_ms"] is None else f"{row['torchao_ms']:.3f}",
            _ratio(row["vs_torchao"]),
        )
        for row in report["rows"]
    ]  # fmt: skip
    header = ("cast", "least MB", "ms", unit, "of copy", "torchao ms", "vs torchao")
    how = "compiled" if report["compiled"] else "eager"
    return "\n".join(
        [
            _heading(report),
            f"[{report['m']}, {report['k']}] {report['dtype']}, {how}; copy "
            f"{report['copy_bytes_per_second'] / scale:.3g} {unit}",
            table(header, rows),
            "least MB: input read once (tensor: twice, as its scale depends on every value), codes and scales written",
            _ABSENT,
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
