"""Triton kernels of norms, SwiGLU, rotary embedding and cross-entropy: compiled without a GPU, and interpreted."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launch.bench.isa import SHARED, compiled, spilled_bytes
from launch.bench.isa_cases import norms, others

triton = pytest.importorskip("triton", reason="needs the triton package (pip install 'lumen-train[kernels]')")


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("cases", [norms, others])
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_amd(arch: str, cases: Any) -> None:
    for name, case in cases(hip=True).items():
        done = compiled(case, arch)
        listing = done.asm["amdgcn"]
        assert spilled_bytes(done, arch) == 0, name
        assert done.metadata.shared <= SHARED[arch], name
        # 8 or 16 bytes a thread: a masked access whose bound had no hint would be 2.
        assert re.search(r"(global|buffer)_load_dwordx[24]", listing), name
        narrow = re.search(r"(global|buffer)_load_(ushort|short_d16)\b", listing)
        assert not narrow or " 128 " in name, name  # a weight of 128 values has less than two for a thread
        if name != "cross-entropy (0.0, None, False)":  # which stores nothing but a loss
            assert re.search(r"(global|buffer)_store_dwordx[24]", listing), name


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("cases", [norms, others])
def test_nvidia(cases: Any) -> None:
    for name, case in cases(hip=False).items():
        listing = compiled(case, "sm_90").asm["ptx"]
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
