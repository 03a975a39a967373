"""`lumen-doctor`: what is installed, what this machine is, which kernel runs each operation, and whether it
is right.

Exit status 0 when everything that is set up works, 1 when something is broken. Needs torch only.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import torch

from lumen_core.diagnostics.text import table
from lumen_core.diagnostics.versions import PACKAGES, versions
from lumen_core.formats import arch_of, flavour_of
from lumen_core.kernels.aiter import probe as aiter_probe
from lumen_core.kernels.table import table as kernel_table

TRAIN_PACKAGES = (
    "transformers",
    "datasets",
    "tokenizers",
    "safetensors",
    "torchao",
    "tensorboard",
    "rich",
    "matplotlib",
)
PROBED = ("triton", "aiter", "mori", "transformer-engine", "megatron-core", "transformers", "torchao")
# Signal to quantization noise in dB that no working kernel of a recipe falls below (measured: 28.5, 22.6,
# 13.9).
_LEAST_SQNR = {"fp8": 20.0, "fp4": 10.0}


def examine(device: torch.device, *, probe_imports: bool = False) -> dict[str, Any]:
    """Everything `lumen-doctor` says, as plain data (the `--json` output).

    Args:
        device: where kernels are chosen and checked.
        probe_imports: also import each optional package, in a process of its own.
    """
    report: dict[str, Any] = {
        "versions": versions(),
        "torch_build": torch_build(),
        "platform": platform.platform(),
        "devices": [describe(torch.device("cuda", i)) for i in range(torch.cuda.device_count())],
        "device": describe(device),
        "aiter": aiter_probe.describe(),
        "kernels": [],
        "check": [],
        "errors": [],
    }
    report["warnings"] = warnings_about(report)
    try:
        for op, chosen, candidates in kernel_table(device):
            reasons = [{"name": name, "passed_over": reason} for name, reason in candidates]
            report["kernels"].append({"op": op, "chosen": chosen, "candidates": reasons})
        report["check"] = check_recipes(device)
    except (ValueError, RuntimeError) as error:
        report["errors"].append(f"kernels: {error}")
    report["errors"] += [f"recipe {row['recipe']}: {row['problem']}" for row in report["check"] if row["problem"]]
    if probe_imports:
        report["imports"] = {name: probe(name) for name in PROBED if report["versions"][name] is not None}
        report["errors"] += [f"{n} is installed but broken: {text}" for n, text in report["imports"].items() if text]
    report["healthy"] = not report["errors"]
    return report


def torch_build() -> str:
    """What this torch was built for: "rocm 7.1", "cuda 13.0" or "cpu"."""
    if torch.version.hip is not None:
        return f"rocm {torch.version.hip}"
    return f"cuda {torch.version.cuda}" if torch.version.cuda is not None else "cpu"


def describe(device: torch.device) -> dict[str, Any]:
    """Name, architecture, memory and FP8 flavour of a device, with the reason for the flavour."""
    arch = arch_of(device)
    flavour = flavour_of(arch)
    if flavour == "fnuz":
        why = f"the matrix cores of {arch} take FNUZ encodings (largest E4M3 value 240)"
    elif arch.startswith("gfx"):
        why = f"{arch} takes OCP encodings"
    else:
        why = f"only AMD's gfx94x takes FNUZ, and this is {arch}"
    out: dict[str, Any] = {"device": str(device), "name": platform.processor() or platform.machine(), "arch": arch}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        out |= {"name": properties.name, "memory_gib": round(properties.total_memory / 2**30, 1)}
    return {**out, "flavour": flavour, "why": why}


def warnings_about(report: dict[str, Any]) -> list[str]:
    """What works but not as well as it could here, and what to do about it."""
    found, build = report["versions"], report["torch_build"]
    arch = report["device"]["arch"]
    out = []
    missing = [name for name in TRAIN_PACKAGES if found[name] is None]
    if missing:
        out.append(f"lumen-train lacks {', '.join(missing)}: pip install 'lumen-train[train]'")
    if build != "cpu" and not report["devices"]:
        out.append(f"torch is built for {build} but sees no GPU: everything runs on the CPU")
    if arch.startswith("gfx"):
        if found["aiter"] is None:
            out.append("AITER is absent: its kernels are not used; pip install 'lumen-train[amd]'")
        if arch.startswith("gfx94"):
            out.append(f"{arch} has no MX matrix instructions: mxfp8 and mxfp4 are emulated, for accuracy studies only")
    if arch.startswith("sm_") and int(arch.removeprefix("sm_")) < 89:
        out.append(f"{arch} has no FP8 tensor cores: FP8 recipes are emulated")
    if (found["mori"] or "").startswith("1.0."):
        out.append(f"amd-mori {found['mori']} has no collectives (mori.ccl): they come with 1.2, for Python 3.10")
    return out


def check_recipes(device: torch.device) -> list[dict[str, Any]]:
    """Train one linear layer a step with every recipe and compare its three GEMMs with fp32.

    Returns rows of recipe, SQNR in dB of fprop, dgrad and wgrad, and what is wrong with them (None when
    nothing).
    """
    from lumen_core import quantize as quant
    from lumen_core.config import RECIPES

    generator = torch.Generator().manual_seed(0)
    x, weight, grad = (torch.randn(256, 256, generator=generator).to(device) for _ in range(3))
    exact = {"fprop": x @ weight.t(), "dgrad": grad @ weight, "wgrad": grad.t() @ x}
    rows = []
    for recipe in RECIPES:
        row: dict[str, Any] = {"recipe": recipe, "problem": None}
        try:
            model = torch.nn.Sequential(torch.nn.Linear(256, 256, bias=False, device=device))
            with torch.no_grad():
                model[0].weight.copy_(weight)
            quant.enable(model, recipe=recipe)
            leaf = x.clone().requires_grad_()
            out = model(leaf)
            out.backward(grad)
            got = {"fprop": out.detach(), "dgrad": leaf.grad, "wgrad": model[0].weight.grad}
        except (RuntimeError, ValueError, TypeError) as error:
            rows.append({**row, "problem": f"{type(error).__name__}: {error}"})
            continue
        least = _LEAST_SQNR["fp4" if recipe.startswith("mxfp4") else "fp8"]
        for gemm, reference in exact.items():
            noise = (got[gemm] - reference).square().mean() / reference.square().mean()
            ratio = -10 * torch.log10(noise.clamp(min=1e-20)).item()
            row[gemm] = round(ratio, 1)
            if not ratio >= least:
                row["problem"] = f"{gemm} has {ratio:.1f} dB of signal to noise, expected at least {least:.0f}"
        rows.append(row)
    return rows


def probe(name: str) -> str | None:
    """Import a package in a process of its own; None when that works, else what happened."""
    code = f"import {PACKAGES[name][0]}"
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        return "its import was not done after 120 s"
    if done.returncode == 0:
        return None
    last = [line for line in done.stderr.splitlines() if line.strip()][-1:] or [f"exit status {done.returncode}"]
    return last[0].strip()


def render(report: dict[str, Any]) -> str:
    """The report for people."""
    device = report["device"]
    parts = [
        table(("package", "version"), [(name, version or "-") for name, version in report["versions"].items()]),
        f"torch is built for {report['torch_build']}; {len(report['devices'])} GPU(s)",
        "\n".join(f"  {d['device']}: {d['name']} ({d['arch']}), {d['memory_gib']} GiB" for d in report["devices"]),
        f"device {device['device']}: {device['arch']}, FP8 flavour {device['flavour'].upper()}: {device['why']}",
    ]
    parts.append(f"AITER: {report['aiter']}")
    kernels = []
    said = report["aiter"].removeprefix("not used: ")  # above, once for all rows
    for row in report["kernels"]:
        reasons = {c["name"]: c["passed_over"].removeprefix("AITER: ") for c in row["candidates"] if c["passed_over"]}
        skipped = [f"{name}: {reason}" for name, reason in reasons.items() if reason != said]
        kernels.append((row["op"], row["chosen"], "; ".join(skipped) or "-"))
    if kernels:
        parts.append(table(("operation", "runs", "passed over"), kernels))
    if report["check"]:
        columns = ("fprop", "dgrad", "wgrad")
        rows = [(r["recipe"], *(r.get(c, "-") for c in columns), r["problem"] or "ok") for r in report["check"]]
        parts.append("Signal to noise of one layer in dB\n" + table(("recipe", *columns, ""), rows))
    if "imports" in report:
        parts.append(table(("import", ""), [(name, problem or "ok") for name, problem in report["imports"].items()]))
    for kind in ("warnings", "errors"):
        parts += [f"{kind.removesuffix('s')}: {text}" for text in report[kind]]
    parts.append("healthy" if report["healthy"] else "broken: see the errors above")
    return "\n\n".join(part for part in parts if part)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(prog="lumen-doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--device", help="where kernels are chosen and checked (default: the GPU if there is one)")
    parser.add_argument("--import", dest="probe", action="store_true", help="also import each optional package")
    arguments = parser.parse_args(argv)
    name = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        parser.error(f"--device {name}: {str(error).splitlines()[0]}")
    report = examine(device, probe_imports=arguments.probe)
    print(json.dumps(report, indent=2) if arguments.json else render(report))
    return 0 if report["healthy"] else 1


if __name__ == "__main__":
    sys.exit(main())
