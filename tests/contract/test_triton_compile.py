"""Triton kernels compiled, without a GPU, for every architecture we run on: what a profile would show first.

And their logic, run by Triton's interpreter on the CPU.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lumen_core.formats import ElementFormat, element_format, flavour_of
from lumen_core.kernels.triton import both, cast, retile
from lumen_core.kernels.triton.launching import TILE, scale_constants, warps

triton = pytest.importorskip("triton", reason="needs the triton package (pip install 'lumen-train[kernels]')")

POINTER = {
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
    torch.float8_e4m3fnuz: "*fp8e4b8",
    torch.float8_e5m2fnuz: "*fp8e5b16",
}
SIZES = dict.fromkeys(("rows", "columns", "column_tiles", "scale_columns"), "i32")
BOTH = (("tensor", 1, False), ("row", 32, True), ("row", 128, False), ("column", 1, False))  # kind, block, MX
ARCHES = ("gfx942", "gfx950", "sm_90")
Case = tuple[Any, dict[str, str], dict[str, Any]]


def cases(fmt: ElementFormat, hip: bool) -> dict[str, Case]:
    """Kernel, types of its run-time arguments and compile-time arguments, for a 4096 x 4096 bf16 weight."""
    from triton import language as tl

    from lumen_core.kernels.triton import cast_kernels as kernels

    codes = POINTER[fmt.dtype]
    scale = scale_constants(fmt, False, hip)
    matrix = {"x_ptr": "*bf16", "codes_ptr": codes, "scale_ptr": "*fp32"}
    flat = {**matrix, "factor_ptr": "*fp32", "n": "i32", "head_room": "fp32"}
    row = {**matrix, "columns": "i32"}
    moved = {"codes_ptr": codes, "scale_ptr": "*u8", "largest_ptr": "*u8", "out_ptr": codes, "out_scale_ptr": "*fp32"}
    out: dict[str, Case] = {
        "flat at a scale": (kernels.cast_flat, flat, {**scale, "FROM_AMAX": False, "BLOCK": TILE}),
        "flat at an amax": (kernels.cast_flat, flat, {**scale, "FROM_AMAX": True, "BLOCK": TILE}),
        "row": (kernels.cast_rows, row, {**scale, "ONE_PASS": True, "BLOCK": 4096}),
        "long row": (kernels.cast_rows, row, {**scale, "ONE_PASS": False, "BLOCK": TILE}),
        "absmax of one": (
            kernels.absmax_of_one,
            {"x_ptr": "*bf16", "out_ptr": "*i32", "n": "i32"},
            {"BLOCK": TILE, "STEPS": 8},
        ),
        "absmax of many": (
            kernels.absmax_of_many,
            {"table_ptr": "*i64", "out_ptr": "*i32", "count": "i32"},
            {"DTYPE": tl.bfloat16, "ALIGNED": True, "COUNT_BLOCK": 64, "BLOCK": TILE, "STEPS": 8},
        ),
        "transpose bytes": (
            kernels.retile,
            {**dict.fromkeys(moved, "*u8"), **SIZES},
            retile.retile_constants(4096, 4096, True, None, hip),
        ),
    }
    for block, mx in [(b, True) for b in cast.MX_BLOCKS] + [(b, False) for b in cast.FP32_BLOCKS]:
        constants = cast.block_constants(fmt, block, 4096, 4096, mx=mx, rounding="ceil", pow2=False, hip=hip)
        types = {**matrix, "scale_ptr": "*u8" if mx else "*fp32", **SIZES}
        out[f"{'mx' if mx else 'fp32'} {block}"] = (kernels.cast_blocks, types, constants)
    for transposed in (False, True):
        constants = retile.retile_constants(4096, 4096, transposed, fmt, hip)
        out[f"mx to tensor, transposed={transposed}"] = (kernels.retile, {**moved, **SIZES}, constants)
    return out | both_cases(fmt, hip)


def both_cases(fmt: ElementFormat, hip: bool) -> dict[str, Case]:
    """The same of the kernels that cast along both dimensions."""
    from lumen_core.kernels.triton import both_kernels as kernels

    out: dict[str, Case] = {
        "absmax of columns": (
            kernels.column_absmax,
            {"x_ptr": "*bf16", "out_ptr": "*i32", **dict.fromkeys(("rows", "columns", "column_tiles"), "i32")},
            {"TR": 16, "TC": 128, "STEPS": 16, "num_warps": 4},
        )
    }
    for kind, size, mx in BOTH:
        codes, scale = POINTER[fmt.dtype], "*u8" if mx else "*fp32"
        pointers = {"x_ptr": "*bf16", "codes_ptr": codes, "scale_ptr": scale, "turned_ptr": codes}
        types = {**pointers, "turned_scale_ptr": scale, "factor_ptr": "*i32" if kind == "column" else "*fp32", **SIZES}
        types |= {"turned_scale_columns": "i32", "head_room": "fp32"}
        for rows in (True, False):
            if kind == "column" and rows:
                continue
            constants, warp_count = both.both_constants(fmt, kind, size, 4096, 4096, write_rows=rows, mx=mx, hip=hip)
            case = (kernels.cast_both, types, {**constants, "num_warps": warp_count})
            out[f"both {kind} {size}, rows={rows}"] = case
    return out


def casts_a_thread(case: Case) -> int:
    """Of a kernel that casts along both dimensions, on AMD."""
    constants = case[2]
    values = constants["TR"] * constants["TC"] // (64 * constants["num_warps"])
    return values * (2 if constants["KIND"] == "row" and constants["ROWS"] else 1)


def compiled(case: Case, arch: str) -> Any:
    """The kernel as a launch specializes it for aligned pointers and sizes that are multiples of 16."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, types, constants = case
    constants = dict(constants)
    warp_count = constants.pop("num_warps", None)
    names = kernel.arg_names
    assert set(names) == {*types, *constants}
    signature = {name: types.get(name, "constexpr") for name in names}
    even = [
        n
        for n in types
        if types[n].startswith("*") or n in ("n", "rows", "columns", "scale_columns", "turned_scale_columns")
    ]
    hints = {(names.index(n),): [["tt.divisibility", 16]] for n in even}
    hip = arch.startswith("gfx")
    values = constants["TR"] * constants["TC"] if "TR" in constants else constants["BLOCK"]
    target = GPUTarget("hip", arch, 64) if hip else GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    source = ASTSource(kernel, signature, constants, hints)
    return triton.compile(source, target=target, options={"num_warps": warp_count or warps(values, hip)})


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
@pytest.mark.parametrize("arch", [a for a in ARCHES if a.startswith("gfx")])
def test_amd(arch: str, element: str) -> None:
    instruction = {"e4m3": "v_cvt_(scalef32_)?pk_fp8_f32", "e5m2": "v_cvt_(scalef32_)?pk_bf8_f32"}[element]
    for name, case in cases(element_format(element, flavour_of(arch)), hip=True).items():
        listing = compiled(case, arch).asm["amdgcn"]
        assert re.findall(r"\.vgpr_spill_count:\s*(\d+)", listing) == ["0"], name
        assert re.search(r"(global|buffer)_load_dwordx4", listing), name
        # Denormals of fp32 and of 16-bit floats are kept: scales and small values may be some.
        assert re.findall(r"\.amdhsa_float_denorm_mode_(?:32|16_64) (\d)", listing) == ["3", "3"], name
        if "absmax" in name:
            assert re.search(r"(global|buffer)_atomic_(s|i)?max", listing), name
        else:
            assert re.search(r"(global|buffer)_store_dwordx4", listing), name
            assert bool(re.search(instruction, listing)) is (name != "transpose bytes"), name
            # A cast without the instruction takes fifty others: it would make the shortest 2300 to 3400.
            assert len(listing.splitlines()) < (48 * casts_a_thread(case) if name.startswith("both") else 2000), name
            shared = int(re.findall(r"\.group_segment_fixed_size:\s*(\d+)", listing)[0])
            assert shared <= 65536, name


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_nvidia(element: str) -> None:
    for name, case in cases(element_format(element), hip=False).items():
        listing = compiled(case, "sm_90").asm["ptx"]
        assert ".ftz" not in listing and "div.full" not in listing and "div.approx" not in listing, name
        assert re.search(r"ld\.global\S*\.v4", listing), name
        if "absmax" not in name:
            assert re.search(r"st\.global\S*\.v4", listing), name
            assert (f"cvt.rn.satfinite.{element}x2.f32" in listing) is (name != "transpose bytes"), name


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_logic_in_the_interpreter() -> None:
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 9):
        pytest.skip(f"written for the interpreter of triton 3.9, this is {triton.__version__}")
    program = Path(__file__).with_name("interpreted.py")
    done = subprocess.run([sys.executable, "-W", "ignore", program], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"\d+ compared", done.stdout.strip()), done.stdout
