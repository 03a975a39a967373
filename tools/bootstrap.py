"""Make a ready virtual environment for this checkout: `python3 tools/bootstrap.py .venv [--torch SPEC]`.

Standard library only, since it runs before anything is installed. A torch that the calling Python already
imports is reused as it is (on an AMD machine it is the ROCm build, which no registry would give back);
otherwise SPEC is installed. Everything else is then installed with torch pinned to the version present, so
nothing can replace it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MINIMUM_PYTHON = (3, 10)
MINIMUM_TORCH = (2, 11)
_PROBE = (
    "import json, os, torch; from importlib.metadata import version; "
    "print(json.dumps([version('torch'), os.path.dirname(os.path.dirname(torch.__file__))]))"
)


def importable_torch(python: str) -> tuple[str, str] | None:
    """(version, the folder it lies in) of the torch that `python` imports, or None."""
    found = subprocess.run([python, "-c", _PROBE], capture_output=True, text=True, cwd=os.sep)
    if found.returncode != 0:
        return None
    version, folder = json.loads(found.stdout.strip().splitlines()[-1])
    return version, folder


def new_enough(version: str) -> bool:
    """Whether a torch version string such as "2.13.0+rocm7.1" satisfies this package."""
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2]) >= MINIMUM_TORCH


def create(folder: Path, torch_at: str | None) -> None:
    """A virtual environment in `folder`; where `torch_at` is given, packages lying there are visible in it.

    `--system-site-packages` shows the base interpreter's packages but not those of a virtual environment that
    is active now, hence the path file.
    """
    try:
        venv.EnvBuilder(with_pip=True, system_site_packages=torch_at is not None).create(folder)
    except subprocess.CalledProcessError:  # what a Debian Python without its venv package does
        raise SystemExit(
            f"bootstrap: {sys.executable} cannot put pip into {folder}; install its venv package (python3-venv)"
        ) from None
    if torch_at is not None:
        own = next((folder / "lib").glob("python3.*/site-packages"))
        (own / "outer-torch.pth").write_text(torch_at + "\n")


def pip(python: str, *arguments: str) -> None:
    """pip of the new environment; its own output is the log, and its failure is ours."""
    command = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *arguments]
    if subprocess.run(command, stdin=subprocess.DEVNULL).returncode != 0:
        raise SystemExit(f"bootstrap: failed: {' '.join(command)}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the environment goes, for example .venv")
    parser.add_argument("--torch", default="torch==2.13.0", help="installed when no torch is importable (%(default)s)")
    parser.add_argument("--extras", default="train,test", help="extras of this package to install (%(default)s)")
    arguments = parser.parse_args(argv)
    if sys.version_info < MINIMUM_PYTHON:
        raise SystemExit(f"bootstrap: Python {sys.version.split()[0]} is too old: 3.10 or newer (make PYTHON=...)")

    folder = arguments.folder.resolve()
    python = str(folder / "bin" / "python")
    if not os.path.exists(python):
        found = importable_torch(sys.executable)
        if found and not new_enough(found[0]):
            print(
                f"bootstrap: torch {found[0]} of {sys.executable} is older than 2.11 and is left alone",
                flush=True,
            )
            found = None
        create(folder, found[1] if found else None)
    present = importable_torch(python)
    if present is None:
        print(f"bootstrap: no torch here, installing {arguments.torch}", flush=True)
        pip(python, arguments.torch)
        present = importable_torch(python)
        if present is None:
            raise SystemExit(f"bootstrap: {arguments.torch} was installed but does not import")
    if not new_enough(present[0]):
        raise SystemExit(f"bootstrap: torch {present[0]} in {folder} is too old: 2.11 or newer")
    extras = arguments.extras
    if present[0].endswith("+cpu") and "test" in extras.split(","):
        extras += ",kernels"  # a GPU build of torch brings its own Triton
    print(f"bootstrap: torch {present[0]} from {present[1]}; installing the package and [{extras}]", flush=True)
    constraint = folder / "torch-constraint.txt"
    constraint.write_text(f"torch=={present[0]}\n")
    pip(python, "--constraint", str(constraint), "--editable", f"{ROOT}[{extras}]")


if __name__ == "__main__":
    main()
