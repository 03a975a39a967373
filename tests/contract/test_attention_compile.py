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


def ptxas(kernel: Any) -> str:
    """What the assembler says about registers."""
    from triton import knobs

    tool = knobs.nvidia.ptxas.path
    command = [tool, "-v", "--gpu-name=sm_90a", "-o", "/tmp/h_attn.cubin", "-"]
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(kernel.asm["ptx"])
        file.flush()
        done = subprocess.run([*command[:-1], file.name], capture_output=True, text=True, timeout=100)
    return done.stderr


if __name__ == "__main__":
    import itertools, time
    arches = sys.argv[1].split(","); widths=[int(x) for x in sys.argv[2].split(",")]; recs=sys.argv[3].split(",")
    names = sys.argv[4].split(",") if len(sys.argv)>4 else KERNELS
    for arch,w,r,n in itertools.product(arches,widths,recs,names):
        t=time.time()
        c=compiled(n,r,w,arch)
        if arch.startswith("gfx"):
            l=c.asm["amdgcn"]
            print(arch,w,r,n,"spill",re.findall(r"\.vgpr_spill_count:\s*(\d+)", l),"lds",c.metadata.shared,"vgpr",re.findall(r"\.vgpr_count:\s*(\d+)", l),"mfma",sorted(set(re.findall(r"v_mfma_\w+",l))),len(l.splitlines()),round(time.time()-t,1),flush=True)
        else:
            l=c.asm["ptx"]
            print(arch,w,r,n,"smem",c.metadata.shared,"ptxas",re.findall(r"(\d+) bytes spill stores|Used (\d+) registers",ptxas(c)),"mma",sorted(set(re.findall(r"(?:wgmma.mma_async|mma)\.sync\S+",l))),len(l.splitlines()),round(time.time()-t,1),flush=True)
