"""`lumen-bench layer`: forward and backward of one Llama block, ours beside torch BF16 and torchao, in one run.

All rows share the model, the data, the attention kernel and the timing; casts and elementwise work are in the numbers.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch

from launch.bench import rivals
from launch.bench.blocks import HEADS, Block, one_attention, rotations
from launch.bench.timing import Stopwatch
from lumen_core import quantize as quant
from lumen_core.diagnostics.text import table

RIVALS = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
OURS = ("tensorwise", "delayed", "rowwise", "blockwise", "mxfp8", "mxfp8-32x32", "mxfp4")
ROWS = ("bf16", *(f"torchao-{name}" for name in RIVALS), *OURS)


def add_arguments(commands: argparse._SubParsersAction, parent: argparse.ArgumentParser) -> None:
    """The command's options."""
    one = commands.add_parser(
        "layer", parents=[parent], help="a Llama block forward and backward: ours, torch BF16 and torchao"
    )
    one.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    one.add_argument("--batch", type=int, default=2, help="sequences (%(default)s)")
    one.add_argument("--tokens", type=int, help="a sequence (GPU 8192, CPU 32)")
    one.add_argument("--hidden", type=int, help=f"width, a multiple of {2 * HEADS} (GPU 4096, CPU 128)")
    one.add_argument("--ffn", type=int, help="width of the MLP (GPU 14336, CPU 256)")
    one.add_argument("--eager", action=argparse.BooleanOptionalAction, default=True, help="also without torch.compile")


def complete(options: argparse.Namespace, gpu: bool) -> None:
    """Sizes that were not given.

    Raises:
        ValueError: a width that the heads do not divide.
    """
    for name, on_gpu, on_cpu in (("tokens", 8192, 32), ("hidden", 4096, 128), ("ffn", 14336, 256)):
        if getattr(options, name) is None:
            setattr(options, name, on_gpu if gpu else on_cpu)
    if options.hidden % (2 * HEADS):
        raise ValueError(f"--hidden {options.hidden}: must be a multiple of {2 * HEADS}")


def measure(options: argparse.Namespace, watch: Stopwatch) -> list[dict[str, Any]]:
    """Rows: row, eager_ms and compiled_ms (None with a reason where one does not run), peak_gib of the last."""
    return [_row(name, options, watch) for name in options.rows]


def _row(name: str, options: argparse.Namespace, watch: Stopwatch) -> dict[str, Any]:
    row: dict[str, Any] = {"row": name, "eager_ms": None, "compiled_ms": None, "peak_gib": None, "reason": None}
    for compiled in (False, True) if options.eager else (True,):
        work, reason = rivals.attempt(lambda c=compiled: _work(name, options, watch.device, c))
        if work is None:
            row["reason"] = reason
        else:
            if watch.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            with one_attention(watch.device):
                row["compiled_ms" if compiled else "eager_ms"] = watch.seconds(work) * 1e3
            if watch.device.type == "cuda":
                row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        del work
        torch._dynamo.reset()
        gc.collect()
    return row


def _work(name: str, options: argparse.Namespace, device: torch.device, compiled: bool) -> Callable[[], None]:
    torch.manual_seed(0)
    with device:
        block = Block(options.hidden, options.ffn).to(torch.bfloat16)
    if name.startswith("torchao-"):
        rivals.convert(block, name.removeprefix("torchao-"))
    elif name != "bf16":
        quant.enable(block, recipe=name)
    x = torch.randn(options.batch, options.tokens, options.hidden, device=device, dtype=torch.bfloat16)
    grad, x = torch.randn_like(x), x.requires_grad_()
    cos, sin = rotations(options.tokens, options.hidden, device)
    run = torch.compile(block) if compiled else block

    def work() -> None:
        with one_attention(device):
            run(x, cos, sin).backward(grad)
        x.grad = None
        block.zero_grad()

    return work


def show(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a table."""
    base = next((row["compiled_ms"] for row in rows if row["row"] == "bf16"), None)
    rivals_ms = [row["compiled_ms"] for row in rows if row["row"].startswith("torchao")]
    best = min(filter(None, rivals_ms), default=None)
    lines = []
    for row in rows:
        ms = row["compiled_ms"]
        lines.append(
            (
                row["row"], _number(row["eager_ms"], "{:.2f}"), _number(ms, "{:.2f}"),
                _number(base and ms and base / ms, "{:.3f}x"), _number(best and ms and best / ms, "{:.3f}x"),
                _number(row["peak_gib"], "{:.2f}"), row["reason"] or "",
            )
        )  # fmt: skip
    head = ("row", "eager ms", "compiled ms", "vs bf16", "vs torchao", "peak GiB", "")
    return table(head, lines) + "\nvs: compiled against torch BF16 compiled and against torchao's best row compiled"


def _number(value: float | None, form: str) -> str:
    return form.format(value) if value else "-"
