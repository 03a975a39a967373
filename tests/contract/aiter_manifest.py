"""What the head of AITER's repository defines of the functions that we call or imitate.

    python tests/contract/aiter_manifest.py CHECKOUT > tests/contract/aiter_head.json

Reads sources only. `manifest` is also what the contract test compares a checkout with (LUMEN_AITER_SRC).
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from published import definitions

# Where the parameters of each are said; the module is the one it is imported from.
FUNCTIONS = {
    "aiter.ops.gradlib": ("hipb_create_extension", "hipb_mm"),
    "aiter.ops.gemm_op_a8w8": ("gemm_a8w8", "gemm_a8w8_blockscale", "gemm_a8w8_blockscale_bpreshuffle"),
    "aiter.ops.gemm_op_a4w4": ("gemm_a4w4",),
    "aiter.ops.shuffle": ("shuffle_weight",),
    "aiter.utility.fp4_utils": ("e8m0_shuffle",),
    "aiter.ops.quant": ("static_per_tensor_quant", "dynamic_per_token_scaled_quant"),
    "aiter.ops.triton.quant": ("dynamic_mxfp4_quant", "dynamic_mxfp8_quant"),
}


def signature(read: Callable[[str], str | None], module: str, name: str) -> str | None:
    """Parameters of `name` in `module`, itself or imported there from a module beside it; None where it is absent.

    Args:
        read: source of a file named from the root of the checkout, None where there is no such file.
    """
    path = module.replace(".", "/")
    source, package = read(f"{path}.py"), False
    if source is None:
        source, package = read(f"{path}/__init__.py"), True
    if source is None:
        return None
    found = definitions(source).get(name)
    if found is not None or not package:
        return found
    for node in ast.parse(source).body:
        if isinstance(node, ast.ImportFrom) and node.level == 1 and name in (alias.name for alias in node.names):
            return signature(read, f"{module}.{node.module}", name)
    return None


def manifest(checkout: Path) -> dict[str, Any]:
    """Parameters by module and name, None for what is absent."""

    def read(path: str) -> str | None:
        file = checkout / path
        return file.read_text() if file.is_file() else None

    return {module: {name: signature(read, module, name) for name in names} for module, names in FUNCTIONS.items()}


if __name__ == "__main__":
    root = Path(sys.argv[1])
    commit = subprocess.run(["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    print(
        json.dumps({"repository": "ROCm/aiter", "commit": commit.stdout.strip(), "functions": manifest(root)}, indent=2)
    )
