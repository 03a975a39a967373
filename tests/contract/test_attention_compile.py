"""The attention kernels compiled, without a GPU, for every architecture we run on; their logic in the interpreter."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from lumen_core.attention import RECIPES
from lumen_core.formats import element_format, flavour_of
from lumen_core.kernels.triton import attention

triton = pytest.importorskip("triton", reason="needs the triton package (pip install 'lumen-train[kernels]')")

# Bytes that a program of a kernel may spill on sm_90, where blocks half as large would be slower than a few registers
# in the first-level cache; all others none.
SPILLED = {("backward_keys", "mxfp8"): 80, ("backward_keys", "fp8"): 128, ("backward_queries", "fp8"): 80}
WIDTHS = (64, 96, 128, 256)
KERNELS = ("forward", "backward_queries", "backward_keys")
OPERAND_KERNELS = ("head_amax", "head_codes", "mx_operand", "row_delta")
LDS = {"gfx942": 65536, "gfx950": 163840}
SHARED = 232448  # bytes a block may use on sm_90
FP8 = {"gfx942": r"v_mfma_f32_\d+x\d+x\d+_fp8_fp8", "gfx950": r"v_mfma_f32_\d+x\d+x\d+_f8f6f4"}
BF16 = r"v_mfma_f32_\d+x\d+x\d+_?bf16"


def compiled(name: str, recipe: str, width: int, arch: str) -> Any:
    """A kernel as a launch specializes it: aligned pointers and strides, any number of tokens."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from lumen_core.kernels.triton import attention_kernels, attention_operand_kernels

    hip = arch.startswith("gfx")
    fmt = element_format("e4m3", flavour_of(arch))
    codes = {"ocp": "*fp8e4nv", "fnuz": "*fp8e4b8"}[fmt.flavour]
    constants = {"GROUP": 4, "RECIPE": recipe, **attention.format_constants(fmt, hip), "TURNED": recipe == "fp8"}
    constants |= {"D": width, "BD": attention.padded(width), "HAS_LSE": False, "ROWS": 64}
    constants |= dict.fromkeys(("PLAIN", "BY_CHANNEL", "BY_TOKEN"), True)
    if name in KERNELS:
        kernel = getattr(attention_kernels, name)
        sizes, options = attention.blocks(name, recipe, attention.padded(width), hip)
        constants |= sizes
        operand = codes if recipe == "fp8" else "*bf16"
    else:
        kernel = getattr(attention_operand_kernels, name)
        constants["TURNED"] = True
        options, operand = {"num_warps": 4}, "*bf16"
    types = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "g_ptr", "kt_ptr", "qt_ptr", "gt_ptr"), operand)
    types |= dict.fromkeys(("first_ptr", "last_ptr", "begin_ptr", "end_ptr", "amax_ptr"), "*i32")
    types |= dict.fromkeys(("out_ptr", "dq_ptr", "dk_ptr", "dv_ptr", "x_ptr", "grad_ptr"), "*bf16")
    types |= dict.fromkeys(("by_channel_ptr", "by_token_ptr"), "*bf16")
    types |= dict.fromkeys(("codes_ptr", "turned_ptr"), codes) | {"scale": "fp32"}
    names = kernel.arg_names
    constants = {n: value for n, value in constants.items() if n in names}

    def type_of(n: str) -> str:
        return "constexpr" if n in constants else types.get(n, "*fp32" if n.endswith("_ptr") else "i32")

    signature = {n: type_of(n) for n in names}
    odd = ("queries", "keys", "tokens", "bounds_batch", "key_bounds_batch", "scale")
    even = [n for n in names if n not in constants and n not in odd]
    hints = {(names.index(n),): [["tt.divisibility", 16]] for n in even}
    target = GPUTarget("hip", arch, 64) if hip else GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    return triton.compile(ASTSource(kernel, signature, constants, hints), target=target, options=options)


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def stack_bytes(kernel: Any) -> int:
    """Bytes of the stack of a compiled NVIDIA kernel: where registers are spilled to."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return int(re.search(r"STACK:(\d+)", done.stdout).group(1))


def products(name: str, recipe: str) -> tuple[bool, bool]:
    """Whether a kernel multiplies 8-bit codes, and bf16."""
    return name in KERNELS and recipe == "fp8", name in KERNELS and recipe != "fp8"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("arch", LDS)
def test_amd(arch: str, width: int, recipe: str) -> None:
    for name in KERNELS:
        kernel = compiled(name, recipe, width, arch)
        listing, (eight_bit, sixteen_bit) = kernel.asm["amdgcn"], products(name, recipe)
        assert re.findall(r"\.vgpr_spill_count:\s*(\d+)", listing) == ["0"], name
        assert kernel.metadata.shared <= LDS[arch], name
        assert bool(re.search(FP8[arch], listing)) is eight_bit, name
        assert bool(re.search(BF16, listing)) is sixteen_bit, name
        assert re.search(r"(global|buffer)_load_dwordx4", listing), name
        if recipe != "bf16":  # P or dS are cast in hardware
            assert re.search("v_cvt_(scalef32_)?pk_fp8_f32", listing), name


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_nvidia(width: int, recipe: str) -> None:
    for name in KERNELS:
        kernel = compiled(name, recipe, width, "sm_90")
        listing, (eight_bit, sixteen_bit) = kernel.asm["ptx"], products(name, recipe)
        assert stack_bytes(kernel) <= SPILLED.get((name, recipe), 0), name
        assert kernel.metadata.shared <= SHARED, name
        widened = eight_bit and (name, width) == ("backward_keys", 256)  # too many registers for blocks of 64 rows
        assert bool(re.search(r"mma\S+\.f16\.f16", listing)) is widened, name
        assert bool(re.search(r"mma\S+\.e4m3\.e4m3", listing)) is (eight_bit and not widened), name
        assert bool(re.search(r"mma\S+\.bf16\.bf16", listing)) is sixteen_bit, name


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("arch", [*LDS, "sm_90"])
def test_operands(arch: str) -> None:
    for name in OPERAND_KERNELS:
        kernel = compiled(name, "", 96, arch)
        if arch == "sm_90":
            assert stack_bytes(kernel) == 0 and re.search(r"ld\.global\S*\.v4", kernel.asm["ptx"]), name
            casts = bool(re.search(r"cvt\.rn\.satfinite\.e4m3x2\.f32", kernel.asm["ptx"]))
        else:
            listing = kernel.asm["amdgcn"]
            assert re.findall(r"\.vgpr_spill_count:\s*(\d+)", listing) == ["0"], name
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
