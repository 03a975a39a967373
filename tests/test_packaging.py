"""The distribution: what a wheel holds, that installing it never touches torch, and that an installed one runs."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import bootstrap  # noqa: E402


def run(*command: object, cwd: Path, timeout: float = 110, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command outside the checkout, without what would make the checkout importable."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PIP_", "VIRTUAL_ENV", "LUMEN_"))}
    env |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "100", **environment}
    words = [str(word) for word in command]
    return subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout, stdin=-3)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    done = run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> dict[str, list[str]]:
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        message = message_from_string(archive.read(name).decode())
    return {key: message.get_all(key) for key in message.keys()}


def test_wheel_holds_the_packages_with_the_configs_inside(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    top = {name.split("/")[0] for name in names}
    assert top == {"lumen_core", "lumen_fsdp2", "lumen_megatron", "launch", "lumen_train-0.1.0.dist-info"}
    tree = {str(path.relative_to(ROOT)) for path in (ROOT / "configs").rglob("*") if path.is_file()}
    assert tree and {f"launch/{name}" for name in tree} <= names
    sources = {
        str(path.relative_to(ROOT))
        for package in top & {"lumen_core", "launch"}
        for path in (ROOT / package).rglob("*.py")
    }
    assert sources <= names


def test_metadata(metadata: dict[str, list[str]]) -> None:
    assert metadata["Name"] == ["lumen-train"] and metadata["Requires-Python"] == [">=3.10"]
    assert metadata["License-Expression"] == ["MIT"]
    requirements = [Requirement(text) for text in metadata["Requires-Dist"]]
    core = {r.name for r in requirements if r.marker is None}
    assert core == {"torch", "numpy", "hydra-core"}
    torch = next(r for r in requirements if r.name == "torch")
    # Whatever build is there satisfies: ROCm, CUDA, CPU, a nightly.
    for present in ("2.11.0+rocm7.1", "2.13.0+cpu", "2.14.1", "2.12.0.dev20261101+rocm7.2"):
        assert torch.specifier.contains(present, prereleases=True), present
    assert not torch.specifier.contains("2.10.1+rocm6.4")

    def extra(name: str, python: str) -> set[str]:
        environment = {"extra": name, "python_version": python, "sys_platform": "linux"}
        chosen = [r for r in requirements if r.marker is not None and r.marker.evaluate(environment)]
        return {f"{r.name}{r.specifier}" for r in chosen}

    assert {r.split(">")[0] for r in extra("train", "3.11")} == {
        "transformers", "peft", "datasets", "tokenizers", "safetensors", "torchao", "tensorboard", "rich", "matplotlib",
    }  # fmt: skip
    assert extra("amd", "3.10") == {"amd-aiter", "amd-mori==1.2.4"}
    assert extra("amd", "3.11") == {"amd-aiter"}
    assert extra("amd", "3.12") == {"amd-aiter", "amd-mori==1.0.0"}
    assert any("<0.17" in r for r in extra("megatron", "3.11"))
    assert not any("<0.17" in r for r in extra("megatron", "3.12"))


def test_console_scripts_resolve(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith("entry_points.txt"))
        lines = archive.read(name).decode().splitlines()
    scripts = dict(line.split(" = ") for line in lines if " = " in line)
    assert set(scripts) == {"lumen-train", "lumen-bench", "lumen-doctor", "lumen-export", "lumen-megatron"}
    for target in scripts.values():
        module, _, function = target.partition(":")
        assert callable(getattr(importlib.import_module(module), function))


def fake_distribution(folder: Path, name: str, version: str, package: str | None = None) -> None:
    """An installed distribution, as far as pip and importlib can tell."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "INSTALLER").write_text("rocm\n")
    (info / "RECORD").write_text("")
    if package is not None:
        (folder / package).mkdir()
        (folder / package / "__init__.py").write_text(f"__version__ = {version!r}\n")


def site_of(environment: Path) -> Path:
    return next((environment / "lib").glob("python3.*/site-packages"))


@pytest.mark.parametrize("version", ["2.11.0+rocm7.1", "2.14.0.dev20261101+rocm7.2"])
def test_installing_leaves_a_rocm_torch_alone(wheel: Path, tmp_path: Path, version: str) -> None:
    """What pip would do on an AMD machine: install this package and nothing else (no index is even asked)."""
    venv.EnvBuilder(with_pip=False).create(tmp_path / "env")
    for name, present in (("torch", version), ("numpy", "2.0.0"), ("hydra_core", "1.3.2")):
        fake_distribution(site_of(tmp_path / "env"), name, present)
    done = run(
        sys.executable, "-m", "pip", "--python", tmp_path / "env/bin/python", "install", "--dry-run", "--no-index",
        "--quiet", "--report", "-", wheel, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    planned = [item["metadata"]["name"] for item in json.loads(done.stdout)["install"]]
    assert planned == ["lumen-train"]


# -- set-up from nothing


@pytest.mark.parametrize(
    ("version", "good"),
    [("2.11.0", True), ("2.11.0+rocm7.1", True), ("2.13.0+cpu", True), ("3.0.0a0", True), ("2.10.9", False)]
    + [("2.9.1+rocm6.4", False), ("1.13.1", False)],
)
def test_which_torch_is_new_enough(version: str, good: bool) -> None:
    assert bootstrap.new_enough(version) is good


def prepared(monkeypatch: pytest.MonkeyPatch, folder: Path, outer: str | None) -> list[tuple[str, ...]]:
    """Run the bootstrap with pip recorded; `outer` is the torch version that the calling Python imports."""
    calls: list[tuple[str, ...]] = []

    def pip(python: str, *arguments: str) -> None:
        calls.append(arguments)
        if arguments[0].startswith("torch"):
            fake_distribution(site_of(folder / "env"), "torch", "2.13.0", "torch")

    monkeypatch.setattr(bootstrap, "pip", pip)
    found = bootstrap.importable_torch
    if outer is None:
        monkeypatch.setattr(bootstrap, "importable_torch", lambda p: None if p == sys.executable else found(p))
    else:
        fake_distribution(folder / "outer", "torch", outer, "torch")
        there = (outer, str(folder / "outer"))
        monkeypatch.setattr(bootstrap, "importable_torch", lambda p: there if p == sys.executable else found(p))
    create = venv.EnvBuilder.__init__
    monkeypatch.setattr(venv.EnvBuilder, "__init__", lambda s, **k: create(s, **{**k, "with_pip": False}))
    bootstrap.main([str(folder / "env")])
    return calls


def test_set_up_reuses_the_torch_that_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = prepared(monkeypatch, tmp_path, "2.11.0+rocm7.1")
    assert len(calls) == 1 and "--editable" in calls[0]
    constraint = Path(calls[0][calls[0].index("--constraint") + 1])
    assert constraint.read_text() == "torch==2.11.0+rocm7.1\n"
    assert bootstrap.importable_torch(str(tmp_path / "env/bin/python")) == (
        "2.11.0+rocm7.1",
        str(tmp_path / "outer"),
    )


@pytest.mark.parametrize("outer", [None, "2.9.1+rocm6.4"])
def test_set_up_installs_torch_where_there_is_none_that_will_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, outer: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = prepared(monkeypatch, tmp_path, outer)
    assert [c[0] for c in calls] == ["torch==2.13.0", "--constraint"]
    assert Path(calls[1][1]).read_text() == "torch==2.13.0\n"
    assert ("older than 2.11 and is left alone" in capsys.readouterr().out) is (outer is not None)


def test_make_and_ci(tmp_path: Path) -> None:
    def planned(*arguments: str) -> str:
        done = run("make", "--no-print-directory", "-n", f"VENV={tmp_path}/env", *arguments, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        return done.stdout

    first = planned("test")
    order = ["tools/bootstrap.py", "ruff check", "ruff format --check", 'pytest -q -n 2 --dist loadfile -m "not slow"']
    places = [first.index(part) for part in order]
    assert places == sorted(places) and first.rstrip().endswith(order[-1])
    assert '-m "not slow"' not in planned("test-full") and "lumen-train" in planned("demo")
    assert "torch==2.12.0" in planned("setup", "TORCH=torch==2.12.0")
    # The second time nothing is set up again.
    (tmp_path / "env").mkdir()
    (tmp_path / "env/.setup-done").touch()
    assert "bootstrap" not in planned("test")
    assert os.access(ROOT / ".ci/run", os.X_OK) and "make --no-print-directory test" in (ROOT / ".ci/run").read_text()


# -- installed


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that holds the wheel, and sees the packages of this one without being it."""
    folder = tmp_path_factory.mktemp("installed")
    venv.EnvBuilder(with_pip=False).create(folder / "env")
    python = folder / "env/bin/python"
    done = run(
        sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    # Path files in a folder that a path file names are not read: this checkout's editable install stays out.
    (site_of(folder / "env") / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    where = run(python, "-c", "import launch, lumen_core; print(launch.__file__, lumen_core.__file__)", cwd=folder)
    assert all(path.startswith(str(folder)) for path in where.stdout.split()), where.stdout + where.stderr
    return folder


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_installed_wheel_trains_with_its_own_configs(installed: Path) -> None:
    scripts = installed / "env/bin"
    helped = run(scripts / "lumen-train", "--help", cwd=installed)
    assert helped.returncode == 0, helped.stderr
    for name in ("mxfp8-32x32", "llama31_8b", "fsdp2"):
        assert name in helped.stdout
    texts = installed / "texts"
    texts.mkdir()
    for index in range(4):
        (texts / f"{index}.txt").write_text(f"{index} " + "the quick brown fox jumps over the lazy dog " * 200)
    done = run(
        scripts / "lumen-train", "model=tiny", "quant=mxfp8", f"data.train={texts}", "train.max_steps=2",
        "model.num_hidden_layers=1", "train.seq_length=64", "train.micro_batch_size=1", "train.global_batch_size=2",
        "train.eval_batches=1", "data.validation_fraction=0.25", f"run_dir={installed}/run", cwd=installed, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (installed / "run/metrics.jsonl").read_text().splitlines()]
    assert any(line.get("step") == 2 for line in lines)


@pytest.mark.slow
def test_installed_programs_answer(installed: Path) -> None:
    scripts = installed / "env/bin"
    for program, word in (("lumen-bench", "quantize"), ("lumen-export", "export"), ("lumen-doctor", "--json")):
        done = run(scripts / program, "--help", cwd=installed)
        assert done.returncode == 0 and word in done.stdout, done.stderr
    report = run(scripts / "lumen-doctor", "--json", cwd=installed)
    assert report.returncode == 0, report.stderr
    assert json.loads(report.stdout)["versions"]["lumen-train"] == "0.1.0"
