"""Triton kernels of norms, SwiGLU, rotary embedding and cross-entropy: compiled without a GPU, and interpreted."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lumen_core.kernels.triton import cross_entropy, norm, rope, swiglu

triton = pytest.importorskip("triton", reason="needs the triton package (pip install 'lumen-train[kernels]')")

LDS = 64 * 1024  # of a workgroup on gfx942; gfx950 has more
Case = tuple[Any, dict[str, str], dict[str, Any], int]


def _norm_cases(hip: bool) -> dict[str, Case]:
    from lumen_core.kernels.triton import norm_kernels as kernels

    out: dict[str, Case] = {}
    sizes = {"rows": "i32", "columns": "i32"}
    forward = dict.fromkeys(("x_ptr", "weight_ptr", "bias_ptr", "y_ptr"), "*bf16")
    forward |= {"mean_ptr": "*fp32", "rstd_ptr": "*fp32", **sizes, "eps": "fp32"}
    backward = dict.fromkeys(("grad_ptr", "x_ptr", "weight_ptr", "dx_ptr"), "*bf16")
    backward |= dict.fromkeys(("mean_ptr", "rstd_ptr", "dweight_ptr", "dbias_ptr"), "*fp32") | sizes | {"tiles": "i32"}
    for columns in (128, 4096, 8192, norm.LONGEST_ROW):
        for layer in (False, True):
            fixed = {"CENTER": layer, "BIAS": layer, **norm.tile(columns)}
            warps = norm.norm_warps(columns, hip)
            out[f"norm {columns} layer={layer}"] = (kernels.norm_forward, forward, fixed, warps)
            out[f"norm backward {columns} layer={layer}"] = (kernels.norm_backward, backward, fixed, warps)
    return out


def _other_cases(hip: bool) -> dict[str, Case]:
    from lumen_core.kernels.triton import cross_entropy_kernels, rope_kernels, swiglu_kernels

    out: dict[str, Case] = {}
    sizes = dict.fromkeys(("rows", "columns", "column_tiles", "gate_stride", "up_stride"), "i32")
    forward = dict.fromkeys(("gate_ptr", "up_ptr", "out_ptr"), "*bf16") | sizes
    backward = dict.fromkeys(("grad_ptr", "gate_ptr", "up_ptr", "dgate_ptr", "dup_ptr"), "*bf16") | sizes
    backward["grad_stride"] = "i32"
    for columns in (512, 14336):
        fixed, warps = swiglu.tile(columns), swiglu.tile_warps(hip)
        out[f"swiglu {columns}"] = (swiglu_kernels.swiglu_forward, forward, fixed, warps)
        out[f"swiglu backward {columns}"] = (swiglu_kernels.swiglu_backward, backward, fixed, warps)
    heads = dict.fromkeys(("q_ptr", "k_ptr", "q_out_ptr", "k_out_ptr"), "*bf16") | {"cos_ptr": "*fp32"}
    heads |= {"sin_ptr": "*fp32"} | dict.fromkeys(("positions", "q_heads", "k_heads", "q_stride", "k_stride"), "i32")
    for half, dim in ((64, 128), (32, 64), (32, 128)):
        fixed = rope.constants(32, half, dim)
        kernel = rope_kernels.rope, heads, {"INVERSE": True, **fixed}, rope.tile_warps(fixed, hip)
        out[f"rope {2 * half} of {dim}"] = kernel
    logits = {"logits_ptr": "*bf16", "targets_ptr": "*i64", "factor_ptr": "*fp32", "loss_ptr": "*fp32"}
    logits |= {"gradient_ptr": "*bf16", "vocabulary": "i32", "ignore_index": "i32"}
    logits |= {"smoothing": "fp32", "softcap": "fp32"}
    for options in ((0.0, None, False), (0.0, None, True), (0.1, 30.0, True)):
        fixed = cross_entropy.constants(128256, *options)
        warps = cross_entropy.block_warps(fixed["BLOCK"], hip)
        out[f"cross-entropy {options}"] = (cross_entropy_kernels.cross_entropy, logits, fixed, warps)
    return out


def _compiled(case: Case, arch: str) -> Any:
    """As a launch specializes it for aligned pointers and sizes that are multiples of 16."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, types, constants, warps = case
    names = kernel.arg_names
    assert set(names) == {*types, *constants}
    signature = {name: types.get(name, "constexpr") for name in names}
    even = [n for n in types if types[n].startswith("*") or n in ("columns", "vocabulary") or n.endswith("stride")]
    hints = {(names.index(n),): [["tt.divisibility", 16]] for n in even}
    target = GPUTarget("hip", arch, 64) if arch.startswith("gfx") else GPUTarget("cuda", 90, 32)
    return triton.compile(ASTSource(kernel, signature, constants, hints), target=target, options={"num_warps": warps})


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("cases", [_norm_cases, _other_cases])
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_amd(arch: str, cases: Any) -> None:
    for name, case in cases(hip=True).items():
        done = _compiled(case, arch)
        listing = done.asm["amdgcn"]
        assert re.findall(r"\.vgpr_spill_count:\s*(\d+)", listing) == ["0"], name
        assert done.metadata.shared <= LDS, name
        # 8 or 16 bytes a thread: a masked access whose bound had no hint would be 2.
        assert re.search(r"(global|buffer)_load_dwordx[24]", listing), name
        narrow = re.search(r"(global|buffer)_load_(ushort|short_d16)\b", listing)
        assert not narrow or " 128 " in name, name  # a weight of 128 values has less than two for a thread
        if name != "cross-entropy (0.0, None, False)":  # which stores nothing but a loss
            assert re.search(r"(global|buffer)_store_dwordx[24]", listing), name


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("cases", [_norm_cases, _other_cases])
def test_nvidia(cases: Any) -> None:
    for name, case in cases(hip=False).items():
        listing = _compiled(case, "sm_90").asm["ptx"]
        assert re.search(r"ld\.global\S*\.v[24]", listing), name
        assert " 128 " in name or not re.search(r"ld\.global\S*\.b16", listing), name


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_logic_in_the_interpreter() -> None:
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 9):
        pytest.skip(f"written for the interpreter of triton 3.9, this is {triton.__version__}")
    program = Path(__file__).with_name("interpreted_ops.py")
    done = subprocess.run([sys.executable, "-W", "ignore", program], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"\d+ compared", done.stdout.strip()), done.stdout
