"""AITER as it is published: every name and parameter that we use, in the wheel and at the head of the repository."""

from __future__ import annotations

import json
import os
import re
import zipfile
from pathlib import Path

import aiter_manifest
import published
import pytest
from fakes import aiter as fake

from lumen_core.kernels.aiter import gemm, probe, quantize

ROOT = Path(__file__).resolve().parents[2]
VERSION = "0.1.7.post2.dev18"
HEAD = json.loads((ROOT / "tests" / "contract" / "aiter_head.json").read_text())
CHECKOUT = os.environ.get("LUMEN_AITER_SRC")


@pytest.fixture(scope="module")
def wheel() -> zipfile.ZipFile:
    """The newest on PyPI (40 MB, pure Python and sources)."""
    return published.wheel("amd-aiter", VERSION)


@pytest.fixture(params=["wheel", "head"])
def generation(request: pytest.FixtureRequest) -> tuple[str, dict[str, dict[str, str | None]]]:
    """Name and signatures, by module and name, of a generation."""
    if request.param == "head":
        return "head", HEAD["functions"]
    files = request.getfixturevalue("wheel")

    def read(path: str) -> str | None:
        return files.read(path).decode() if path in files.namelist() else None

    found = {
        module: {name: aiter_manifest.signature(read, module, name) for name in names}
        for module, names in aiter_manifest.FUNCTIONS.items()
    }
    return "wheel", found


def parameters(signature: str) -> list[str]:
    return [part.partition("=")[0].strip() for part in re.split(r",(?![^()]*\))", signature) if part.strip()]


def test_all_that_we_call_is_there_with_the_parameters_that_we_name(generation):
    name, real = generation
    for function, symbol in probe.FUNCTIONS.items():
        signature = real[symbol.module][function]
        assert signature is not None, function
        assert not set(symbol.parameters) - set(parameters(signature)), function
    a4w4 = parameters(real["aiter.ops.gemm_op_a4w4"]["gemm_a4w4"])
    assert ("out" in a4w4, "dtype" in a4w4) == ((True, False) if name == "wheel" else (False, True))


def test_the_fake_has_the_signatures(generation):
    name, real = generation
    source = published.definitions((ROOT / "tests" / "fakes" / "aiter.py").read_text())
    own = fake.GENERATIONS[name].__name__
    assert fake.MODULES == aiter_manifest.FUNCTIONS
    for names in real.values():
        for function, signature in names.items():
            assert source.get(f"{own}.{function}", source.get(f"Both.{function}")) == signature, function


def test_what_we_look_up_is_what_the_contract_covers():
    """A name that the bindings use and `probe.FUNCTIONS` lacks would be an error on an AMD machine only."""
    source = "".join(Path(module.__file__).read_text() for module in (gemm, quantize))
    used = set(re.findall(r'(?:function|takes|lacking)\("(\w+)"', source))
    used |= {name for names in gemm._FUNCTIONS.values() for name in names}
    assert used == set(probe.FUNCTIONS)


def test_parameters_are_hidden_by_the_registration_with_torch(wheel):
    """Why `probe.parameters_of` asks the operator: the published function has no signature of its own."""
    guard = wheel.read("aiter/jit/utils/torch_guard.py").decode()
    assert "def wrapper_custom(*args, **kwargs):" in guard and "functools.wraps" not in guard
    assert "fp4x2" in published.definitions(wheel.read("aiter/utility/dtypes.py").decode())


def test_the_arithmetic_of_the_casts_is_what_our_reasons_say(wheel):
    kernels = wheel.read("aiter_meta/csrc/kernels/quant_kernels.cu").decode()
    assert "float absMax      = 1e-10f;" in kernels  # the floor under a block's amax
    assert "absMax * inverted_DTYPE_MAX" in kernels  # one unit off amax / max
    assert "1.0f / (*scale)" in kernels  # exact here; approximate at the head
    assert "v_med3_f32" in wheel.read("aiter_meta/csrc/include/ck_tile/vec_convert.h").decode()  # hides NaN
    triton = wheel.read("aiter/ops/triton/_triton_kernels/quant.py").decode()
    assert "(amax + 0x200000)" in triton and "& 0xFF800000" in triton  # `even`, for one bit of mantissa


def test_the_script_follows_what_a_package_imports(tmp_path):
    files = {
        "aiter/ops/gradlib.py": "def hipb_mm(mat1: int, mat2, *, alpha: float = 1.0): ...",
        "aiter/ops/triton/quant/__init__.py": "from .casts import dynamic_mxfp4_quant",
        "aiter/ops/triton/quant/casts.py": "def dynamic_mxfp4_quant(x, scaling_mode='even'): ...",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = aiter_manifest.manifest(tmp_path)
    assert found["aiter.ops.gradlib"] == {"hipb_create_extension": None, "hipb_mm": "mat1, mat2, *, alpha=1.0"}
    quant = {"dynamic_mxfp4_quant": "x, scaling_mode='even'", "dynamic_mxfp8_quant": None}
    assert found["aiter.ops.triton.quant"] == quant and found["aiter.ops.shuffle"] == {"shuffle_weight": None}


if CHECKOUT:

    def test_the_manifest_is_that_of_the_checkout():
        assert aiter_manifest.manifest(Path(CHECKOUT)) == HEAD["functions"]
        kernels = (Path(CHECKOUT) / "csrc" / "kernels" / "quant_kernels.cu").read_text()
        assert "__builtin_amdgcn_rcpf(*scale)" in kernels and "float absMax      = 1e-10f;" in kernels
