"""MORI as it is published: every name and parameter that we use, read from the wheel without importing it."""

from __future__ import annotations

import ast
import re
import zipfile
from pathlib import Path

import published
import pytest
from published import definitions

from lumen_core.comm import mori

ROOT = Path(__file__).resolve().parents[2]
VERSION = "1.2.4"
PLATFORM = ("--python-version", "3.10", "--platform", "manylinux_2_35_x86_64")


@pytest.fixture(scope="module")
def wheel() -> zipfile.ZipFile:
    """The one wheel with `mori.ccl` (10 MB)."""
    return published.wheel("amd-mori", VERSION, *PLATFORM)


def read(wheel: zipfile.ZipFile, name: str) -> str:
    return wheel.read(f"mori/{name}").decode()


def test_the_fake_has_the_signatures_of_the_wheel(wheel: zipfile.ZipFile) -> None:
    real = definitions(read(wheel, "ccl/collective.py")) | definitions(read(wheel, "shmem/api.py"))
    fake = definitions((ROOT / "tests" / "fakes" / "mori.py").read_text())
    used = {
        name: p for name, p in fake.items() if re.match(r"shmem_|(All2all|Allgather|Allreduce)Sdma\.(?!_[^_])", name)
    }
    assert len(used) > 12
    assert {name: real.get(name) for name in used} == used


def test_all_names_that_we_use_are_there(wheel: zipfile.ZipFile) -> None:
    """Those looked up by name, and every attribute in our code that is MORI's."""
    ccl, shmem = definitions(read(wheel, "ccl/collective.py")), definitions(read(wheel, "shmem/api.py"))
    assert not [name for name in mori._CCL_NAMES if f"{name}.__init__" not in ccl]
    assert not [name for name in mori._SHMEM_NAMES if name not in shmem]
    source = Path(mori.__file__).read_text()
    assert set(re.findall(r"shmem\.(\w+)", source)) - {"shmem"} <= set(mori._SHMEM_NAMES)
    assert set(re.findall(r'"(\w+Sdma)"', source)) == set(mori._CCL_NAMES)
    methods = set(re.findall(r"handle\.(\w+)\(", source))
    assert methods == {"start_async", "wait_async"}
    for name in ("AllgatherSdma", "All2allSdma"):  # the two that are started asynchronously
        assert all(f"{name}.{method}" in ccl for method in methods)
    for name in mori._CCL_NAMES:
        assert ccl[f"{name}.__call__"].startswith("self, input_data, output_data, count, stream=None")
        assert "input_buffer_size=None, output_buffer_size=None" in ccl[f"{name}.__init__"]
    assert "dtype=torch.uint32" in ccl["AllreduceSdma.__init__"]


def test_the_units_of_counts_are_what_we_assume(wheel: zipfile.ZipFile) -> None:
    """A gather counts elements and rounds them up to words; an all-to-all counts words, whatever the tensor."""
    tree = ast.parse(read(wheel, "ccl/collective.py"))
    calls = {
        node.name: ast.unparse(next(m for m in node.body if getattr(m, "name", "") == "__call__"))
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name in mori._CCL_NAMES
    }
    assert "count * input_data.element_size()" in calls["AllgatherSdma"] and "+ 3) // 4" in calls["AllgatherSdma"]
    assert "element_size" not in calls["All2allSdma"] and "Kernel_u32" in calls["All2allSdma"]
    kernels = "_jit-sources/include/mori/collective"
    assert "16 / sizeof(T)" in read(wheel, f"{kernels}/intra_node/kernels/vec_type.cuh")  # the pack of an all-reduce


# --- is it usable? ----------------------------------------------------------------------------------------------------


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with two GPUs, as far as files tell; any import of MORI fails the test."""
    (tmp_path / "kfd").touch()
    for node, properties in enumerate(("simd_count 0", "simd_count 304", "simd_count 304")):
        folder = tmp_path / "nodes" / str(node)
        folder.mkdir(parents=True)
        (folder / "properties").write_text(f"{properties}\nnum_sdma_engines 2\nnum_sdma_xgmi_engines 14\n")
    monkeypatch.setattr(mori, "_KFD", tmp_path / "kfd")
    monkeypatch.setattr(mori, "_TOPOLOGY", tmp_path / "nodes")
    monkeypatch.setenv("MORI_ENABLE_SDMA", "1")
    monkeypatch.setattr(mori.importlib, "import_module", lambda name: pytest.fail(f"{name} was imported"))
    return tmp_path


def test_missing_hardware_is_noticed_before_mori_is_touched(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    properties = machine / "nodes" / "2" / "properties"
    properties.write_text("simd_count 304\nnum_sdma_engines 0\nnum_sdma_xgmi_engines 0\n")
    assert mori.local_reason() == "GPU node 2 has no SDMA engines"
    for node in (1, 2):
        (machine / "nodes" / str(node) / "properties").unlink()
    assert mori.local_reason() == f"no GPU in {machine / 'nodes'}"
    (machine / "kfd").unlink()
    assert mori.local_reason() == f"{machine / 'kfd'} is absent or not accessible"
    monkeypatch.setenv("MORI_ENABLE_SDMA", "0")
    assert mori.local_reason() == "MORI_ENABLE_SDMA=1 is not set"


def test_absent_old_and_broken_packages(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mori.importlib.util, "find_spec", lambda name: None)
    assert mori.local_reason() == "the package amd-mori is not installed"
    monkeypatch.setattr(mori.importlib.util, "find_spec", lambda name: None if name == "mori.ccl" else object())
    assert "too old" in mori.local_reason()

    def broken(name: str) -> None:
        raise OSError("libpci.so.3: cannot open shared object file")

    monkeypatch.setattr(mori.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(mori.importlib, "import_module", broken)
    assert mori.local_reason() == "amd-mori cannot be imported: libpci.so.3: cannot open shared object file"
