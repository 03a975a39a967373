"""Packages as they are published: wheels fetched once, and the signatures in their sources, without importing them."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest


def wheel(distribution: str, version: str, *platform: str) -> zipfile.ZipFile:
    """The wheel of a distribution from the cache folder, downloaded into it (without dependencies) the first time.

    Skips the test where it is neither there nor to be had.
    """
    folder = Path(os.environ.get("LUMEN_WHEEL_CACHE") or Path.home() / ".cache" / "lumen-wheels")
    pattern = f"{distribution.replace('-', '_')}-{version}-*.whl"
    if not list(folder.glob(pattern)):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", *platform]
        command += ["--dest", str(folder), f"{distribution}=={version}"]
        missing = f"{distribution} {version} is not in {folder} and cannot be downloaded"
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=100)
        except (OSError, subprocess.TimeoutExpired) as error:
            pytest.skip(f"{missing}: {error}")
        if done.returncode:
            pytest.skip(f"{missing}: {done.stderr.strip().splitlines()[-1:]}")
    return zipfile.ZipFile(next(folder.glob(pattern)))


def definitions(source: str) -> dict[str, str]:
    """Parameters, with defaults but without annotations, of the functions and the methods of classes in a file."""
    found = {}
    for node in ast.parse(source).body:
        members = node.body if isinstance(node, ast.ClassDef) else [node]
        for member in members:
            if isinstance(member, ast.FunctionDef):
                for argument in (*member.args.args, *member.args.kwonlyargs):
                    argument.annotation = None
                prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
                found[prefix + member.name] = ast.unparse(member.args)
        if isinstance(node, ast.Assign):
            found[ast.unparse(node.targets[0])] = ""
    return found
