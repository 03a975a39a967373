"""`lumen-bench isa`: the table of what kernels compile to, and that it sees what it claims to see."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch.bench import cli, isa
from launch.bench.isa_cases import cases

pytest.importorskip("triton", reason="needs the triton package (pip install 'lumen-train[kernels]')")


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "isa.json"
    assert cli.main(["isa", "--kernels", "attention forward fp8 64", "--json", str(out)]) == 0
    rows = {row["arch"]: row for row in json.loads(out.read_text())["rows"]}
    assert set(rows) == set(isa.SHARED)
    assert all("_fp8_fp8" in name for name in rows["gfx942"]["matrix"])
    assert all("f8f6f4" in name for name in rows["gfx950"]["matrix"])
    assert all("e4m3.e4m3" in name for name in rows["sm_90"]["matrix"])
    for arch, row in rows.items():
        assert row["matrix"] and row["casts"] > 0 and row["spilled_bytes"] == 0 and row["load_bytes"] == 16
        assert 0 < row["shared_bytes"] <= isa.SHARED[arch]
    text = capsys.readouterr().out
    assert "matrix instructions" in text and "gfx942" in text


def test_a_name_that_matches_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["isa", "--kernels", "atention*", "--arch", "gfx950"])
    assert "--kernels atention*: no kernel has such a name" in capsys.readouterr().err


def test_names_differ_and_every_kernel_is_there() -> None:
    import inspect
    import pkgutil

    import lumen_core.kernels.triton as package

    names, kernels = zip(*[(name, case.kernel.__name__) for name, case in cases("gfx950")])
    assert len(set(names)) == len(names)
    launched = set()
    for module in pkgutil.iter_modules(package.__path__):
        if not module.name.endswith("_kernels"):
            source = inspect.getsource(__import__(f"{package.__name__}.{module.name}", fromlist=["_"]))
            launched |= {
                line.split("kernels.")[1].split("[")[0]
                for line in source.split("\n")
                if "kernels." in line and "[" in line.split("kernels.")[1]
            }
    assert launched <= set(kernels), launched - set(kernels)
