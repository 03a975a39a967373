"""`lumen-bench isa`: what our Triton kernels compile to, without a GPU, for AMD's and NVIDIA's architectures.

A profile's first lines, from the listing: matrix instructions, hardware casts, spills, shared memory, width of loads.
"""

from __future__ import annotations

import argparse
import fnmatch
import re
import subprocess
import tempfile
from typing import Any

from launch.bench.isa_cases import ARCHES, Case, cases
from lumen_core.diagnostics.text import table

# Bytes of shared memory that a program may use.
SHARED = {"gfx942": 65536, "gfx950": 163840, "sm_90": 232448}
_CAST = {"gfx": r"v_cvt_(?:scalef32_)?pk_(?:fp8|bf8)_f32", "sm_": r"cvt\.rn\.satfinite\.e\dm\dx2\.f32"}
_MATRIX = {"gfx": r"\b(v_mfma_\w+)", "sm_": r"\b(?:wgmma\.mma_async|mma)\.sync\.aligned\.(\S+)"}
_LOAD = {"gfx": r"(?:global|buffer)_load_dword(?:x([234]))?\b", "sm_": r"ld\.global\S*?(?:\.v(\d))?\.(?:b|u)32"}


def add_arguments(commands: argparse._SubParsersAction, parent: argparse.ArgumentParser) -> None:
    """The command's options."""
    one = commands.add_parser("isa", parents=[parent], help="what our Triton kernels compile to; needs no GPU")
    one.add_argument("--arch", nargs="+", choices=ARCHES, default=list(ARCHES), help="(all)")
    one.add_argument("--kernels", default="*", metavar="GLOB", help="names, as the table has them (%(default)s)")


def compiled(case: Case, arch: str) -> Any:
    """A kernel compiled by Triton for `arch`, as a launch would."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = case.kernel.arg_names
    if set(names) != {*case.types, *case.constants}:
        raise ValueError(f"{case.kernel.__name__} takes {names}, not {[*case.types, *case.constants]}")
    signature = {name: case.types.get(name, "constexpr") for name in names}
    hints = {(names.index(n),): [["tt.divisibility", 16]] for n in case.even}
    hip = arch.startswith("gfx")
    target = GPUTarget("hip", arch, 64) if hip else GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    return triton.compile(ASTSource(case.kernel, signature, case.constants, hints), target=target, options=case.options)


def spilled_bytes(kernel: Any, arch: str) -> int:
    """Bytes that a thread keeps outside its registers."""
    if arch.startswith("gfx"):
        return 4 * int(re.search(r"\.vgpr_spill_count:\s*(\d+)", kernel.asm["amdgcn"]).group(1))
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return int(re.search(r"STACK:(\d+)", done.stdout).group(1))


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows: arch, kernel, matrix (instructions), casts (how many), spilled_bytes, shared_bytes, load_bytes (widest).

    Raises:
        ValueError: no kernel has such a name.
    """
    rows = []
    for arch in options.arch:
        for name, case in cases(arch):
            if fnmatch.fnmatch(name, options.kernels):
                rows.append({"arch": arch, "kernel": name, **_row(compiled(case, arch), arch)})
    if not rows:
        raise ValueError(f"--kernels {options.kernels}: no kernel has such a name")
    return rows


def _row(kernel: Any, arch: str) -> dict[str, Any]:
    family = arch[:3]
    listing = kernel.asm["amdgcn" if family == "gfx" else "ptx"]
    widths = [int(n or 1) for n in re.findall(_LOAD[family], listing)]
    return {
        "matrix": sorted(set(re.findall(_MATRIX[family], listing))),
        "casts": len(re.findall(_CAST[family], listing)),
        "spilled_bytes": spilled_bytes(kernel, arch),
        "shared_bytes": kernel.metadata.shared,
        "load_bytes": 4 * max(widths, default=0),
    }


def show(rows: list[dict[str, Any]]) -> str:
    """The rows as a table."""
    head = ("arch", "kernel", "matrix instructions", "casts", "spilled B", "shared B", "widest load B")
    lines = [
        (
            row["arch"], row["kernel"], ", ".join(row["matrix"]) or "-", str(row["casts"]), str(row["spilled_bytes"]),
            f"{row['shared_bytes']} of {SHARED[row['arch']]}", str(row["load_bytes"]),
        )
        for row in rows
    ]  # fmt: skip
    return table(head, lines)
