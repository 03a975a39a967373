"""Which implementation quantizes: the reference on a CPU, under the compiler and for what no kernel takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lumen_core import casts
from lumen_core.formats import element_format
from lumen_core.kernels import registry
from lumen_core.kernels.quantize import QUANTIZE
from lumen_core.kernels.query import QuantizeQuery
from lumen_core.kernels.registry import Operation
from lumen_core.kernels.table import table
from lumen_core.kernels.triton import cast
from lumen_core.tensor import quantize

CASES = [
    ((0, 0), {}),
    ((0, 0), {"margin": 1, "pow2": True, "amax": torch.tensor(2.0)}),
    ((1, 0), {"pow2": True}),
    ((1, 128), {}),
    ((128, 128), {}),
    ((1, 32), {"mx": True, "rounding": "even"}),
    ((32, 32), {"mx": True}),
]
GPU = QuantizeQuery("cuda", torch.bfloat16, element_format("e4m3"), (1, 32), mx=True, noise=False, elements=4096)


def separately(x: torch.Tensor, block: tuple[int, int], mx: bool = False, rounding: str = "ceil", **options):
    fmt = element_format("e4m3")
    if mx:
        return casts.quantize_mx(x, fmt, block, rounding)
    if block == (0, 0):
        return casts.quantize_tensor(x, fmt, **options)
    if block == (1, 0):
        return casts.quantize_row(x, fmt, **options)
    return casts.quantize_block(x, fmt, block, **options)


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cast, "has_triton", lambda: True)
    monkeypatch.setattr(cast, "_arch", lambda: "sm_90")


@pytest.mark.parametrize(("block", "options"), CASES, ids=str)
@pytest.mark.parametrize("setting", ["", "quantize=reference", "gemm=reference"])
def test_a_cpu_gets_the_reference(block, options, setting, monkeypatch):
    monkeypatch.setenv(registry.ENVIRONMENT, setting)
    monkeypatch.setattr(cast, "quantize", lambda *a, **k: pytest.fail("a kernel was launched"))
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(130, 257).to(dtype).t()  # strided: codes come out row-major
        got = quantize(x, element_format("e4m3"), block, **options)
        codes, scale = separately(x.contiguous(), block, **options)
        assert torch.equal(got.data.view(torch.uint8), codes.view(torch.uint8)) and got.data.is_contiguous()
        assert torch.equal(casts.e8m0_decode(got.scale) if got.scale.dtype != torch.float32 else got.scale,
                           casts.e8m0_decode(scale) if scale.dtype != torch.float32 else scale)  # fmt: skip


def test_a_kernel_that_cannot_run_here_is_refused_by_name(monkeypatch):
    monkeypatch.setenv(registry.ENVIRONMENT, "quantize=triton")
    with pytest.raises(ValueError, match="names triton for quantize, which cannot run here: needs a GPU"):
        quantize(torch.ones(2, 32), element_format("e4m3"), (1, 32), mx=True)
    monkeypatch.setenv(registry.ENVIRONMENT, "quantize=tritn")
    with pytest.raises(ValueError, match="did you mean 'triton'"):
        quantize(torch.ones(2, 32), element_format("e4m3"), (1, 32), mx=True)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"block": (32, 32)}, None),
        ({"block": (0, 0), "mx": False}, None),
        ({"block": (128, 128), "mx": False, "dtype": torch.float16}, None),
        ({"device_type": "cpu"}, "needs a GPU"),
        ({"noise": True}, "stochastic rounding"),
        ({"dtype": torch.float64}, "input dtype torch.float64"),
        ({"fmt": element_format("e2m1")}, "4-bit elements"),
        ({"fmt": element_format("e4m3", "fnuz")}, "FNUZ elements on sm_90"),
        ({"block": (1, 64)}, "blocks of 1x64"),
        ({"block": (256, 256), "mx": False}, "blocks of 256x256"),
        ({"elements": 0}, "an empty tensor"),
        ({"plain": False}, "a tensor subclass, or one that autograd follows"),
    ],
    ids=str,
)
def test_what_the_kernels_take(change, reason, h200):
    query = replace(GPU, **change)
    assert cast.unsupported(query) == reason
    assert QUANTIZE.choose(query).name == ("triton" if reason is None else "reference")


@pytest.mark.parametrize(
    ("arch", "flavour", "reason"),
    [
        ("sm_89", "ocp", None),
        ("sm_120", "ocp", None),
        ("sm_80", "ocp", "sm_80 has no FP8 casts"),
        ("gfx942", "fnuz", None),
        ("gfx942", "ocp", "OCP elements on gfx942"),
        ("gfx950", "ocp", None),
        ("gfx90a", "ocp", "gfx90a has no FP8 casts"),
    ],
)
def test_which_devices_cast_in_hardware(arch, flavour, reason, h200, monkeypatch):
    monkeypatch.setattr(cast, "_arch", lambda: arch)
    assert cast.unsupported(replace(GPU, fmt=element_format("e4m3", flavour))) == reason


def test_without_triton_and_under_the_compiler(h200, monkeypatch):
    with monkeypatch.context() as m:
        m.setattr(torch.compiler, "is_compiling", lambda: True)
        assert cast.unsupported(GPU) == "torch.compile fuses the reference"
    monkeypatch.setattr(cast, "has_triton", lambda: False)
    assert cast.unsupported(GPU) == "triton is not installed"


def test_a_failing_kernel_is_named_with_what_it_was_given(h200, monkeypatch):
    """No silent fall to the next candidate."""

    def broken(*args, **kwargs):
        raise RuntimeError("invalid argument")

    monkeypatch.setattr(cast, "quantize", broken)
    triton = next(c for c in QUANTIZE.candidates if c.name == "triton")
    monkeypatch.setattr(Operation, "choose", lambda self, query: triton)
    with pytest.raises(RuntimeError, match=r"quantize by triton failed on .*elements=64.*: invalid argument"):
        quantize(torch.ones(2, 32), element_format("e4m3"), (1, 32), mx=True)


def test_subclasses_and_differentiated_tensors_are_told_apart(monkeypatch):
    class Wrapped(torch.Tensor):
        pass

    seen = []
    choose = Operation.choose
    monkeypatch.setattr(Operation, "choose", lambda self, query: seen.append(query.plain) or choose(self, query))
    weight = torch.nn.Parameter(torch.randn(4, 32))
    for x in (weight, torch.randn(4, 32), torch.randn(4, 32).as_subclass(Wrapped)):
        quantize(x, element_format("e4m3"), (1, 0))
    with torch.no_grad():
        quantize(weight, element_format("e4m3"), (1, 0))
    assert seen == [False, True, False, True]


def test_the_doctor_lists_it():
    rows = {label: (chosen, dict(why)) for label, chosen, why in table("cpu")}
    chosen, why = rows["quantize mxfp8 32x32"]
    assert why.pop("aiter").startswith("AITER: ")
    assert chosen == "reference" and why == {"triton": "needs a GPU", "reference": None}
    assert sum(label.startswith("quantize ") for label in rows) == 8
    operations = {label.split()[0] for label in rows}
    assert operations == set(registry.FILES), "each operation has a row"
