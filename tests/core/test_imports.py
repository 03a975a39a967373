"""What importing costs: `lumen_core` needs torch only, changes nothing, and its parts depend on each other one way."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("lumen_core", "lumen_fsdp2", "lumen_megatron", "launch")
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
}
CORE = [name for name in MODULES if name.split(".")[0] == "lumen_core"]
KERNELS = [name for name in CORE if name.startswith("lumen_core.kernels.triton.") and name.endswith("_kernels")]


def python(code: str, cwd: Path, **environment: str) -> str:
    """stdout of a fresh interpreter that finds this checkout, installed or not."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_core_brings_in_nothing_beyond_torch(tmp_path: Path) -> None:
    """Not even a package that torch itself would load later: what `import torch` loads is the measure."""
    code = (
        "import json, sys, torch; before = {m.split('.')[0] for m in sys.modules}\n"
        "import lumen_core.quantize\n"
        "after = {m.split('.')[0] for m in sys.modules}\n"
        "print(json.dumps(sorted(after - before - set(sys.stdlib_module_names))))"
    )
    assert json.loads(python(code, tmp_path)) == ["lumen_core"]


# As if only torch were installed, with what torch declares (to which numpy is optional).
TORCH_ONLY = """
import importlib.metadata, re, sys
allowed = set(sys.stdlib_module_names) | {"lumen_core", "torch", "torchgen", "functorch", "triton"}
allowed |= {"mpmath", "markupsafe"}  # what sympy and jinja2 need
allowed |= {re.split(r"[^\\w-]", r)[0].replace("-", "_").lower() for r in importlib.metadata.requires("torch")}
class Only:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        top = name.split(".")[0]
        return self.finder.find_spec(name, path, target) if top in allowed or top.startswith("_") else None
sys.meta_path[:] = [Only(finder) for finder in sys.meta_path]
"""


def test_the_first_example_needs_torch_only(tmp_path: Path) -> None:
    """Done when 3: the one-liner with every extra, and numpy and Hydra too, absent."""
    code = TORCH_ONLY + (
        "import torch, lumen_core.quantize as quant; m=torch.nn.Sequential(torch.nn.Linear(64,64)); "
        "quant.enable(m, format='fp8_e4m3', scaling='delayed'); m(torch.randn(4,64)).sum().backward()\n"
        "assert m[0].weight.grad.abs().sum() > 0 and quant.is_enabled(m)\n"
        "from lumen_core.optim import build_optimizer\n"
        "build_optimizer(m, lr=1e-3).step()\n"
        "assert not {'numpy', 'hydra', 'transformers', 'torchao'} & set(sys.modules)\n"
        "print('done')"
    )
    assert python(code, tmp_path, PYTHONWARNINGS="ignore").strip() == "done"


def test_each_core_module_imports_alone_and_changes_nothing(tmp_path: Path) -> None:
    """One fork per module, so that no earlier import hides a cycle or a missing one."""
    names = CORE if importlib.util.find_spec("triton") else [name for name in CORE if name not in KERNELS]
    code = f"""
import gc, os, sys, threading, traceback, torch
import torch._dynamo, torch.distributed.tensor  # loaded by many modules: once is enough
def state():
    return (dict(os.environ), os.getcwd(), sorted(os.listdir(".")), torch.get_default_dtype(), torch.get_num_threads(),
            torch.is_grad_enabled(), torch.random.get_rng_state().tolist(), threading.active_count(),
            torch.distributed.is_initialized(), torch.cuda.is_initialized(), list(sys.path))
for name in {names!r}:
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            before = state()
            __import__(name)
            changed = [(b, a) for b, a in zip(before, state()) if b != a]
            print(name, changed or "ok")
            code = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(code)
    if os.waitpid(child, 0)[1]:
        print(name, "failed")
"""
    lines = python(code, tmp_path).splitlines()
    assert lines == [f"{name} ok" for name in names]
    assert not list(tmp_path.iterdir())


def test_command_line_is_checked_before_torch_is_loaded(tmp_path: Path) -> None:
    code = (
        "import sys, lumen_core.config, launch.config, launch.schema, launch.overrides, launch.train\n"
        "assert 'torch' not in sys.modules"
    )
    python(code, tmp_path)


def imports(path: Path, at_import: bool = True) -> set[str]:
    """Modules that a file imports: those that run at its import, or all."""
    tree = ast.parse(path.read_text())
    if at_import:  # functions import when called, and annotations never
        tree.body = [n for n in tree.body if not (isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test))]
        nodes = [n for top in tree.body if not isinstance(top, ast.FunctionDef | ast.ClassDef) for n in ast.walk(top)]
    else:
        nodes = list(ast.walk(tree))
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            # `from package import module` loads the module too
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_no_import_cycles(package: str) -> None:
    graph = {n: imports(p) & MODULES.keys() - {n} for n, p in MODULES.items() if n.split(".")[0] == package}
    # A package's own __init__ is loaded before its modules: an edge to it says nothing.
    graph = {n: {m for m in found if not n.startswith(m + ".")} for n, found in graph.items()}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path, name))
        if name not in done:
            for other in sorted(graph.get(name, ())):
                visit(other, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_layers() -> None:
    """The core knows no adapter and no launcher; the adapters do not know each other."""
    forbidden = {
        "lumen_core": {"lumen_fsdp2", "lumen_megatron", "launch", "hydra", "omegaconf"},
        "lumen_fsdp2": {"lumen_megatron", "launch"},
        "lumen_megatron": {"lumen_fsdp2", "launch"},
    }
    for name, path in MODULES.items():
        found = {m.split(".")[0] for m in imports(path, at_import=False)}
        assert not found & forbidden.get(name.split(".")[0], set()), name


def test_core_imports_extras_only_where_they_are_used() -> None:
    """Triton may be absent: only its kernels import it, and only a launch imports them."""
    for name in CORE:
        top = {m.split(".")[0] for m in imports(MODULES[name])}
        allowed = {"torch", "lumen_core", "triton"} if name in KERNELS else {"torch", "lumen_core"}
        assert top <= set(sys.stdlib_module_names) | allowed, name
        assert name in KERNELS or not imports(MODULES[name]) & set(KERNELS), name
