"""The attention kernels compiled, without a GPU, for every architecture we run on; their logic in the interpreter."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from launch.bench.isa import SHARED, compiled, spilled_bytes
from launch.bench.isa_cases import ATTENTION, HEAD_SIZES, OPERANDS, attention_case
from lumen_core.attention import RECIPES

triton = pytest.importorskip("triton", reason="needs the triton package (pip install 'lumen-train[kernels]')")

# Bytes that a program of a kernel may spill on sm_90, where blocks half as large would be slower than a few registers
# in the first-level cache; all others none.
SPILLED = {("backward_keys", "mxfp8"): 80, ("backward_keys", "fp8"): 128, ("backward_queries", "fp8"): 80}
FP8 = {"gfx942": r"v_mfma_f32_\d+x\d+x\d+_fp8_fp8", "gfx950": r"v_mfma_f32_\d+x\d+x\d+_f8f6f4"}
BF16 = r"v_mfma_f32_\d+x\d+x\d+_?bf16"


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def products(name: str, recipe: str) -> tuple[bool, bool]:
    """Whether a kernel multiplies 8-bit codes, and bf16."""
    return name in ATTENTION and recipe == "fp8", name in ATTENTION and recipe != "fp8"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("width", HEAD_SIZES)
@pytest.mark.parametrize("arch", FP8)
def test_amd(arch: str, width: int, recipe: str) -> None:
    for name in ATTENTION:
        kernel = compiled(attention_case(name, recipe, width, arch), arch)
        listing, (eight_bit, sixteen_bit) = kernel.asm["amdgcn"], products(name, recipe)
        assert spilled_bytes(kernel, arch) == 0, name
        assert kernel.metadata.shared <= SHARED[arch], name
        assert bool(re.search(FP8[arch], listing)) is eight_bit, name
        assert bool(re.search(BF16, listing)) is sixteen_bit, name
        assert re.search(r"(global|buffer)_load_dwordx4", listing), name
        if recipe != "bf16":  # P or dS are cast in hardware
            assert re.search("v_cvt_(scalef32_)?pk_fp8_f32", listing), name


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("width", HEAD_SIZES)
def test_nvidia(width: int, recipe: str) -> None:
    for name in ATTENTION:
        kernel = compiled(attention_case(name, recipe, width, "sm_90"), "sm_90")
        listing, (eight_bit, sixteen_bit) = kernel.asm["ptx"], products(name, recipe)
        assert spilled_bytes(kernel, "sm_90") <= SPILLED.get((name, recipe), 0), name
        assert kernel.metadata.shared <= SHARED["sm_90"], name
        widened = eight_bit and (name, width) == ("backward_keys", 256)  # too many registers for blocks of 64 rows
        assert bool(re.search(r"mma\S+\.f16\.f16", listing)) is widened, name
        assert bool(re.search(r"mma\S+\.e4m3\.e4m3", listing)) is (eight_bit and not widened), name
        assert bool(re.search(r"mma\S+\.bf16\.bf16", listing)) is sixteen_bit, name


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("arch", [*FP8, "sm_90"])
def test_operands(arch: str) -> None:
    for name in OPERANDS:
        kernel = compiled(attention_case(name, "", 96, arch), arch)
        if arch == "sm_90":
            assert spilled_bytes(kernel, arch) == 0 and re.search(r"ld\.global\S*\.v4", kernel.asm["ptx"]), name
            casts = bool(re.search(r"cvt\.rn\.satfinite\.e4m3x2\.f32", kernel.asm["ptx"]))
        else:
            listing = kernel.asm["amdgcn"]
            assert spilled_bytes(kernel, arch) == 0, name
            assert re.search(r"(global|buffer)_load_dwordx4", listing), name
            casts = bool(re.search("v_cvt_(scalef32_)?pk_fp8_f32", listing))
        assert casts is (name in ("head_codes", "mx_operand")), name


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_logic_in_the_interpreter() -> None:
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 9):
        pytest.skip(f"written for the interpreter of triton 3.9, this is {triton.__version__}")
    program = Path(__file__).with_name("interpreted_attention.py")
    done = subprocess.run([sys.executable, "-W", "ignore", program], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"\d+ compared", done.stdout.strip()), done.stdout
