"""The newest release of an engine, read from the sources in its wheel and never run."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

_OPTION = re.compile(r"--[a-z][a-z0-9-]+")
_ARGUMENTS = re.compile(r"(/|_)args?(/|_|\.py)")
"""In the path of a file that defines options of the command line."""


def newest(distribution: str, package: str, directory: Path) -> Release:
    """Downloads the newest wheel of a distribution. Skips the test without a package registry."""
    command = (*(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-cache-dir"), distribution)
    done = subprocess.run(command, cwd=directory, check=False, capture_output=True, text=True, timeout=500)
    if done.returncode:
        pytest.skip(f"{distribution} cannot be downloaded: {done.stderr[-200:]}")
    (wheel,) = directory.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        sources = {
            name: archive.read(name).decode()
            for name in archive.namelist()
            if name.startswith(f"{package}/") and name.endswith(".py")
        }
    wheel.unlink()
    return Release(f"{distribution} {wheel.name.split('-')[1]}", sources)


@dataclass(frozen=True)
class Release:
    """The Python sources of a release."""

    name: str
    sources: dict[str, str]
    """Text by path."""

    @cached_property
    def options(self) -> frozenset[str]:
        """Options of its command line: those written out, and those that argument classes have as fields."""
        found: set[str] = set()
        for path, text in self.sources.items():
            if _ARGUMENTS.search(path):
                found.update(_OPTION.findall(text))
                fields = (field for each in _classes(text) for field in _fields(each))
                found.update("--" + field.replace("_", "-") for field in fields)
        return frozenset(found)

    def fields(self, name: str, beside: str = "") -> frozenset[str]:
        """Returns the fields of a class and its bases. ``beside`` is a part of the path of the class."""
        defined: dict[str, list[tuple[str, ast.ClassDef]]] = {}
        for path, each in self._all_classes:
            defined.setdefault(each.name, []).append((path, each))
        waiting, found = [(name, beside)], set[str]()
        while waiting:
            wanted, near = waiting.pop()
            for path, each in defined.get(wanted, ()):
                if near in path:
                    found.update(_fields(each))
                    waiting += [(base.id, "") for base in each.bases if isinstance(base, ast.Name)]
        return frozenset(found)

    def mentions(self, text: str) -> bool:
        """Returns whether a text is a part of a source."""
        return any(text in source for source in self.sources.values())

    @cached_property
    def _all_classes(self) -> list[tuple[str, ast.ClassDef]]:
        return [(path, each) for path, text in self.sources.items() for each in _classes(text)]


def _classes(text: str) -> Iterator[ast.ClassDef]:
    return (node for node in ast.parse(text).body if isinstance(node, ast.ClassDef))


def _fields(definition: ast.ClassDef) -> Iterator[str]:
    for statement in definition.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            name = statement.target.id
            if not name.startswith("_") and not ast.unparse(statement.annotation).startswith("ClassVar"):
                yield name
