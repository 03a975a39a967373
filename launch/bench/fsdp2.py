"""`lumen-bench fsdp2`: a training step of sharded Llama blocks, ours beside torch BF16 and torchao, in one run.

All rows share the model, the data, the attention kernel, the optimizer and the timing. A row that fails says why and
the others go on.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import lumen_core.quantize as quant
from launch.bench.blocks import Block, one_attention, rotations
from lumen_core.comm.collectives import C10dCollectives
from lumen_core.comm.meter import KINDS, METER
from lumen_core.diagnostics.text import table
from lumen_fsdp2 import LumenPolicy, fully_shard
from lumen_fsdp2.comm import LumenAllGather, LumenReduceScatter

# Row -> (who, settings): torch's own, torchao's recipe and gather, ours with a recipe and a wire.
ROWS: dict[str, tuple[str, tuple[str | None, ...]]] = {
    "bf16": ("torch", ()),
    "torchao-tensorwise": ("torchao", ("tensorwise", "bf16")),
    "torchao-tensorwise-fp8-gather": ("torchao", ("tensorwise", "fp8")),
    "torchao-rowwise": ("torchao", ("rowwise", "bf16")),
    "tensorwise": ("lumen", ("tensorwise", None)),
    "tensorwise@mxfp8-32x32": ("lumen", ("tensorwise", "mxfp8-32x32")),
    "tensorwise@bf16": ("lumen", ("tensorwise", "bf16")),
    "rowwise": ("lumen", ("rowwise", None)),
    "mxfp8-32x32": ("lumen", ("mxfp8-32x32", None)),
    "mxfp8": ("lumen", ("mxfp8", None)),
    "mxfp4": ("lumen", ("mxfp4", None)),
}


class Stack(nn.Module):
    """Blocks one after another."""

    def __init__(self, layers: int, hidden: int, ffn: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(hidden, ffn) for _ in range(layers))

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x


class _LocalGather(LumenAllGather):
    """Takes the room and the copies of a gather, and sends nothing."""

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        for part in output_tensor.view(group.size(), -1):
            part.copy_(input_tensor)


class _LocalScatter(LumenReduceScatter):
    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()])


def add_arguments(commands: argparse._SubParsersAction) -> None:
    """The command's options."""
    one = commands.add_parser("fsdp2", help="a step of sharded blocks: ours, torch BF16 and torchao")
    one.add_argument("--gpus", type=int, help="ranks (default: all GPUs; 2 on a CPU)")
    one.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    one.add_argument("--layers", type=int, help="blocks (GPU 8, CPU 2)")
    one.add_argument("--tokens", type=int, help="a rank and step (GPU 8192, CPU 64)")
    one.add_argument("--hidden", type=int, help="width, a multiple of 64 (GPU 4096, CPU 256)")
    one.add_argument("--ffn", type=int, help="width of the MLP (GPU 14336, CPU 512)")
    one.add_argument("--master", choices=("bf16", "fp32"), default="fp32", help="parameters (%(default)s)")
    one.add_argument("--iters", type=int, default=8, help="steps in a timed stretch of three (%(default)s)")
    one.add_argument("--warmup", type=int, default=4, help="steps before, compilation included (%(default)s)")
    one.add_argument("--compile", action=argparse.BooleanOptionalAction, help="each block (GPU yes, CPU no)")
    one.add_argument("--json", type=Path, metavar="FILE", help="also write everything to FILE")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure in processes of their own, one a rank; the report of rank 0."""
    gpu = torch.cuda.is_available()
    options.gpus = options.gpus or (torch.cuda.device_count() if gpu else 2)
    if gpu and options.gpus > torch.cuda.device_count():
        raise ValueError(f"--gpus {options.gpus}: this machine has {torch.cuda.device_count()}")
    for name, on_gpu, on_cpu in (("layers", 8, 2), ("tokens", 8192, 64), ("hidden", 4096, 256), ("ffn", 14336, 512)):
        if getattr(options, name) is None:
            setattr(options, name, on_gpu if gpu else on_cpu)
    if options.compile is None:
        options.compile = gpu
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(_rank, (options, port, queue), nprocs=options.gpus)
    return queue.get()


def _rank(rank: int, options: argparse.Namespace, port: int, queue: Any) -> None:
    gpu = torch.cuda.is_available()
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(options.gpus))
    device = torch.device("cuda", rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo", device_id=device if gpu else None)
    try:
        mesh = init_device_mesh(device.type, (options.gpus,))
        rows = []
        for name in options.rows:
            try:
                rows.append({"row": name, **_measure(name, options, mesh, device)})
            except Exception as error:  # ends this row only
                rows.append({"row": name, "reason": f"{type(error).__name__}: {error}".splitlines()[0][:200]})
            report = {"rows": rows, "gpu": torch.cuda.get_device_name() if gpu else "CPU"}
            if rank == 0:
                _keep(report, options)
            torch._dynamo.reset()
            gc.collect()
            if gpu:
                torch.cuda.empty_cache()
            dist.barrier()
        if rank == 0:
            queue.put(report)
    finally:
        dist.destroy_process_group()


def _keep(report: dict[str, Any], options: argparse.Namespace) -> None:
    """Show the last row and write all so far: a run that is cut keeps what it measured."""
    last = report["rows"][-1]
    if "ms" in last:
        print(f"{last['row']}: {last['ms']:.1f} ms, peak {last['peak_gib']:.2f} GiB", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


def _build(
    name: str, options: argparse.Namespace, mesh: DeviceMesh, device: torch.device
) -> tuple[nn.Module, Callable]:
    """The sharded model of a row, and what follows each of its optimizer steps."""
    who, settings = ROWS[name]
    with torch.device("meta"):
        model = Stack(options.layers, options.hidden, options.ffn)
    model = model.to(torch.bfloat16 if options.master == "bf16" else torch.float32)
    policy: MixedPrecisionPolicy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    shard, after = torch_fully_shard, lambda: None
    if who == "torchao":
        from torchao import float8

        low = settings[1] == "fp8"
        if settings[0] == "rowwise":
            config = float8.Float8LinearConfig.from_recipe_name("rowwise")
        else:
            config = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=low, emulate=device.type == "cpu")
        float8.convert_to_float8_training(model, config=config)
        after = (lambda: float8.precompute_float8_dynamic_scale_for_fsdp(model)) if low else after
    elif who == "lumen":
        quant.enable(model, recipe=settings[0])
        low = settings[1] != "bf16"
        policy = LumenPolicy(
            param_dtype=torch.bfloat16,
            reduce_dtype=torch.bfloat16,
            low_precision_all_gather=low,
            wire=settings[1] if low else None,
            print_plan=False,
        )
        shard = fully_shard
    for layer in model.layers:
        if options.compile:
            layer.compile()
        shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.02) if parameter.dim() == 2 else parameter.fill_(1.0)
    after()
    return model, after


def _measure(name: str, options: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> dict[str, Any]:
    torch.manual_seed(0)
    model, after = _build(name, options, mesh, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=True)
    cos, sin = rotations(options.tokens, options.hidden, device)
    x = torch.randn(1, options.tokens, options.hidden, device=device, dtype=torch.bfloat16, requires_grad=True)

    def step() -> None:
        model(x, cos, sin).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        after()

    with one_attention(device):
        _communicate_by(model, mesh, LumenAllGather, LumenReduceScatter)  # which count, for all rows alike
        for _ in range(options.warmup):
            step()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        start = METER.snapshot()
        seconds = _timed(step, options.iters, device)
        traffic = METER.since(start)
        peak = torch.tensor(torch.cuda.max_memory_allocated() if device.type == "cuda" else 0, device=device)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        _communicate_by(model, mesh, _LocalGather, _LocalScatter)
        alone = _timed(step, options.iters, device)
    sent = {kind: traffic.total(kind) / (3 * options.iters) for kind in KINDS}
    return {
        "ms": seconds * 1e3,
        "tokens_per_second": options.tokens / seconds,
        "peak_gib": peak.item() / 2**30,
        "wire_mb": {kind: size / 1e6 for kind, size in sent.items()},
        "exposed_ms": (seconds - alone) * 1e3,
        "kernel": quant.summary(model).rows[0].kernels[0] if quant.is_enabled(model) else "-",
    }


def _communicate_by(model: nn.Module, mesh: DeviceMesh, gather: type, scatter: type) -> None:
    collectives = C10dCollectives(mesh.get_group())
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(gather(collectives))
            module.set_custom_reduce_scatter(scatter(collectives))


def _timed(step: Callable[[], None], iterations: int, device: torch.device) -> float:
    """Seconds a step: the median of three stretches without a stop in between, the slowest rank's."""
    stretches = []
    for _ in range(3):
        dist.barrier()
        _wait(device)
        start = time.perf_counter()
        for _ in range(iterations):
            step()
        _wait(device)
        stretches.append((time.perf_counter() - start) / iterations)
    out = torch.tensor(statistics.median(stretches), device=device, dtype=torch.float32)
    dist.all_reduce(out, op=dist.ReduceOp.MAX)
    return out.item()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def show(report: dict[str, Any], options: argparse.Namespace) -> str:
    """The report as a table."""
    done = {row["row"]: row for row in report["rows"] if "ms" in row}
    base = done.get("bf16")
    rivals = [row["ms"] for name, row in done.items() if name.startswith("torchao")]
    lines = []
    for row in report["rows"]:
        if "ms" not in row:
            lines.append((row["row"], "-", *[""] * 7, row["reason"]))
            continue
        ratio = f"{base['ms'] / row['ms']:.3f}x" if base else "-"
        best = f"{min(rivals) / row['ms']:.3f}x" if rivals else "-"
        wire, exposed = row["wire_mb"], f"{row['exposed_ms']:.1f}" if options.gpus > 1 else "-"
        lines.append(
            (
                row["row"], f"{row['ms']:.1f}", f"{row['tokens_per_second']:.0f}", f"{row['peak_gib']:.2f}",
                f"{wire['all_gather']:.1f}", f"{wire['reduce_scatter']:.1f}", exposed, ratio, best, row["kernel"],
            )
        )  # fmt: skip
    header = (
        "row",
        "ms",
        "tokens/s",
        "peak GiB",
        "gather MB",
        "scatter MB",
        "exposed ms",
        "vs bf16",
        "vs torchao",
        "fprop",
    )
    return "\n".join(
        [
            f"{options.gpus} x {report['gpu']}, torch {torch.__version__}; {options.layers} blocks {options.hidden} x "
            f"{options.ffn}, {options.tokens} tokens a rank, {options.master} parameters, bf16 compute and reduction, "
            f"AdamW(foreach), {'compiled' if options.compile else 'eager'}",
            table(header, lines),
            "vs torchao: its best row here. exposed: step time less that of the same step with local copies for "
            "collectives. name@wire: computes in one recipe, sends another.",
        ]
    )


def main(options: argparse.Namespace) -> int:
    """Run, print and write."""
    report = run(options)
    print(show(report, options))
    return 0
