"""Triton kernels compiled, without a GPU, for every architecture we run on: what a profile would show first.

And their logic, run by Triton's interpreter on the CPU.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from launch.bench.isa import compiled
from launch.bench.isa_cases import ARCHES, Case, both_directions, casts
from lumen_core.formats import ElementFormat, element_format, flavour_of

triton = pytest.importorskip("triton", reason="needs the triton package (pip install 'lumen-train[kernels]')")


def cases(fmt: ElementFormat, hip: bool) -> dict[str, Case]:
    return casts(fmt, hip) | both_directions(fmt, hip)


def casts_a_thread(case: Case) -> int:
    """Of a kernel that casts along both dimensions, on AMD."""
    constants = case.constants
    values = constants["TR"] * constants["TC"] // (64 * case.options["num_warps"])
    return values * (2 if constants["KIND"] == "row" and constants["ROWS"] else 1)


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
