"""What has to hold on this machine before a run reads data or builds anything: directories, packages, environment."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

from launch.config import ConfigError, TrainConfig

LOCK = ".lock"
_EXTRA = ("transformers", "tokenizers", "safetensors", "torchao", "pyarrow", "datasets", "peft")


def needs(package: str) -> str:
    """What to do about a package that is missing."""
    return f"needs {package}: pip install 'lumen-train[train]'"


def missing_packages(*packages: str) -> list[str]:
    """A line for each of ``packages`` that is not installed."""
    return [needs(p) for p in packages if importlib.util.find_spec(p) is None]


def packages_of(cfg: TrainConfig) -> list[str]:
    """The packages of the train extra that the job ``cfg`` cannot do without."""
    packages = ["transformers"]
    if cfg.export is not None or cfg.data.tokenizer != "byte":
        packages.append("tokenizers")
    if cfg.export is not None or cfg.model.path is not None:
        packages.append("safetensors")
    if cfg.optim.state != "fp32":
        packages.append("torchao")
    sources = f"{cfg.data.train},{cfg.data.validation or ''}".split(",")
    if cfg.data.format == "parquet" or any(s.strip().endswith((".parquet", ".pq")) for s in sources):
        packages.append("pyarrow")
    return packages


def import_problem(error: ImportError) -> str | None:
    """The line for a package of the train extra that only turned out to be missing when used; None for a bug."""
    if "pip install" in str(error):
        return str(error)
    package = (error.name or "").partition(".")[0]
    return needs(package) if package in _EXTRA else None


def kernel_problem() -> str | None:
    """What is wrong with the environment's choice of kernels, if anything. Imports torch."""
    from lumen_core.kernels import registry

    try:
        registry.parse_override(os.environ.get(registry.ENVIRONMENT, ""))
    except ValueError as error:
        return str(error)
    return None


def _probe(folder: Path) -> None:
    """Writes and deletes a small file; raises OSError where that cannot be done, such as on a full disk."""
    file = folder / f".probe-{uuid.uuid4().hex[:8]}"
    try:
        with open(file, "wb") as handle:
            handle.write(bytes(4096))
            handle.flush()
            os.fsync(handle.fileno())
    finally:
        file.unlink(missing_ok=True)


@contextlib.contextmanager
def own_run_dir(run_dir: str | os.PathLike[str]) -> Iterator[None]:
    """Creates ``run_dir`` and keeps every other job out of it; for the first rank.

    The lock is the kernel's (flock): it ends with the process, however that ends.

    Raises:
        ConfigError: nothing can be written there, or another job is at it.
    """
    folder = Path(run_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _probe(folder)
        file = open(folder / LOCK, "a", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"run_dir={run_dir}: cannot be written to: {error.strerror or error}") from None
    with file:
        if not _lock(file.fileno()):
            raise ConfigError(f"run_dir={run_dir}: another job is running in it; wait for it, or set another run_dir")
        yield


def _lock(descriptor: int) -> bool:
    """Whether the file is ours alone; True as well where the file system (or the system) knows no locks."""
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
