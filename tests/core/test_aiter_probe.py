"""Whether AITER is usable: asked cheaply, imported once, and every way in which it fails becomes a reason."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from fakes import aiter as fake

from lumen_core.diagnostics import doctor
from lumen_core.formats import element_format
from lumen_core.kernels import gemm as gemms
from lumen_core.kernels.aiter import gemm as aiter_gemm
from lumen_core.kernels.aiter import probe
from lumen_core.kernels.gemm import GEMM, query_of
from lumen_core.tensor import QuantizedTensor

FAILURES = [SystemExit(1), OSError("libamdhip64.so"), RuntimeError("ROCm version file not found"), AssertionError()]


def ones(block: tuple[int, int] = (1, 0)) -> QuantizedTensor:
    scale = torch.ones(()) if block == (0, 0) else torch.ones(32, 1)
    return QuantizedTensor(torch.ones(32, 256).to(torch.float8_e4m3fn), scale, element_format("e4m3"), block, (32, 256))


@pytest.fixture
def rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has all that AITER needs, as far as cheap evidence tells."""
    monkeypatch.setattr(torch.version, "hip", "7.1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(probe, "arch_of", lambda device: "gfx950")
    probe.reset()
    yield
    probe.reset()


def test_nothing_is_imported_where_it_cannot_work(rocm, monkeypatch):
    with fake.installed("head", "gfx950"):
        monkeypatch.setattr(probe, "arch_of", lambda device: "gfx90a")
        assert probe.unusable("cuda") == "gfx90a is none of gfx942, gfx950"
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert probe.unusable("cuda") == "gfx90a is none of gfx942, gfx950"  # remembered
        probe.reset()
        assert probe.unusable("cuda") == "no GPU"
        monkeypatch.setattr(torch.version, "hip", None)
        probe.reset()
        assert probe.unusable("cuda") == "this torch is not built for ROCm"
        assert probe.lacking("hipb_mm") == "this torch is not built for ROCm"
        assert fake.calls == [] and "aiter" not in sys.modules


def test_it_is_imported_once(rocm):
    with fake.installed("head", "gfx950"):
        for _ in range(3):
            assert probe.unusable("cuda") is None and probe.unusable("cpu") == "needs a tensor on cuda"
        assert fake.calls == ["import"] and probe.describe() == "usable on gfx950"


def test_an_absent_package(rocm, monkeypatch):
    monkeypatch.setattr(probe.importlib.util, "find_spec", lambda name: None)
    assert probe.describe() == "not used: the package amd-aiter is not installed"


@pytest.mark.parametrize("error", FAILURES, ids=repr)
def test_an_import_that_fails_is_a_reason(error, rocm):
    with fake.installed("wheel", "gfx950", import_error=error):
        assert probe.unusable("cuda") == f"importing aiter failed: {type(error).__name__}: {error}"
        assert probe.unusable("cuda") is not None and fake.calls == ["import"]  # not tried again
        with pytest.raises(RuntimeError, match="AITER: importing aiter failed"):
            probe.function("hipb_mm")


def test_an_interrupt_is_not_swallowed(rocm):
    with fake.installed("wheel", "gfx950", import_error=KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        probe.state()


@pytest.mark.parametrize("error", [SystemExit(1), OSError("no hipcc"), RuntimeError("build failed")], ids=repr)
def test_a_call_that_fails_says_which_and_on_what(error):
    """Neither the end of the process nor a silent fall to the next candidate."""
    with fake.installed("wheel", "gfx950", call_error=error), probe.pretend("gfx950"):
        with pytest.raises(RuntimeError) as caught:
            gemms.gemm(ones(), ones(), torch.bfloat16)
    text = str(caught.value)
    assert "gemm by aiter failed on GemmQuery(" in text and str(error) in text
    assert isinstance(error, RuntimeError) or f"could not build gemm_a8w8: {type(error).__name__}: {error}" in text


def test_missing_functions_and_parameters_are_reasons(monkeypatch):
    query = query_of(ones(), ones(), torch.bfloat16)
    with fake.installed("head", "gfx950", without=("gemm_a8w8",)), probe.pretend("gfx950"):
        assert aiter_gemm.unsupported(query) == "AITER: no aiter.ops.gemm_op_a8w8.gemm_a8w8"
        assert GEMM.choose(query).name != "aiter"
        assert probe.describe() == "usable on gfx950, without gemm_a8w8"
    monkeypatch.setattr(fake.Head, "gemm_a8w8", lambda XQ, WQ, x_scale, scale_of_w: None)
    with fake.installed("head", "gfx950"), probe.pretend("gfx950"):
        assert aiter_gemm.unsupported(query) == "AITER: gemm_a8w8 has no parameter w_scale, dtype"
    monkeypatch.setitem(fake.MODULES, "aiter.ops.gemm_op_a8w8", ())
    monkeypatch.setitem(probe.FUNCTIONS, "gemm_a8w8", probe.Symbol("aiter.ops.moved", ("XQ",)))
    with fake.installed("head", "gfx950"), probe.pretend("gfx950"):
        assert "importing aiter.ops.moved failed: ModuleNotFoundError" in aiter_gemm.unsupported(query)


def test_parameters_hidden_by_the_registration_with_torch_are_read_from_the_operator():
    def hidden(*args, **kwargs):
        return None

    for generation, has_out in (("wheel", True), ("head", False)):
        with fake.installed(generation, "gfx950"), probe.pretend("gfx950"):
            assert probe.takes("gemm_a4w4", "out") is has_out and probe.takes("gemm_a4w4", "dtype") is not has_out
            assert probe.parameters_of(hidden, "gemm_a4w4")[:4] == ("A", "B", "A_scale", "B_scale")
            assert probe.parameters_of(hidden, "unheard_of") is None


def test_a_function_whose_parameters_nothing_tells_is_not_called(monkeypatch):
    monkeypatch.setattr(probe, "parameters_of", lambda found, name: None)
    with fake.installed("head", "gfx950"), probe.pretend("gfx950"):
        assert probe.lacking("gemm_a8w8") == "nothing tells the parameters of gemm_a8w8"
        assert probe.lacking("hipb_create_extension") is None  # which has none


def test_the_doctor_has_a_line_for_it(rocm):
    with fake.installed("wheel", "gfx950", import_error=RuntimeError("hipconfig is missing")):
        report = doctor.examine(torch.device("cpu"))
    assert report["aiter"] == "not used: importing aiter failed: RuntimeError: hipconfig is missing"
    assert f"\n\nAITER: {report['aiter']}\n\n" in doctor.render(report)


def test_the_bindings_import_nothing_of_it():
    code = (
        "import sys, lumen_core.kernels.gemm, lumen_core.kernels.quantize as q;"
        "assert not [m for m in sys.modules if m.partition('.')[0] == 'aiter'], 'imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
