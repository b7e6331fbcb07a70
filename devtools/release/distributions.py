"""Wheels and source distributions."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from zipfile import ZipFile

from .tree import Tree

PURE = ("protos", "net", "services/publisher_sdk", "services/engines", "client", ".")
NATIVE = ("core", "devtools")
"""Folders of distributions with a Rust extension for the stable ABI."""


def build_distributions(tree: Tree, out: Path) -> None:
    """Writes a wheel of every distribution, and source distributions of those without Rust."""
    tree.run(tree.folder / ".venv/protoc/bin/python", "protos/generate.py")
    for each in PURE:
        for kind in ("wheel", "sdist"):
            hatchling = (sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", out)
            tree.run(*hatchling, cwd=tree.folder / each)
    raw = tree.folder / "raw-wheels"
    for each in NATIVE:
        build = ("--no-build-isolation", "--no-deps", "-q", "-w", raw)
        tree.run(sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", *build, f"./{each}")
    for wheel in raw.iterdir():
        expect_native(wheel)
        # Finds the oldest C library that the wheel runs on and names it in the wheel's tag.
        tree.run(sys.executable, "-m", "auditwheel", "repair", "--only-plat", "-w", out, wheel)
    shutil.rmtree(raw)


def expect_native(wheel: Path) -> None:
    """Checks that a wheel has its Rust extension, which setup.py leaves out without a toolchain.

    Raises:
        SystemExit: it has none.
    """
    if not any(name.endswith("_native.abi3.so") for name in ZipFile(wheel).namelist()):
        raise SystemExit(f"make release: expected a Rust extension in {wheel.name}: install a Rust toolchain")
