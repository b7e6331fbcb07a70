"""Changes the file of engines that a process follows. Its comments stay."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kvrouter.cli.errors import WrongUsage
from kvrouter.sidecar.engines_file import checked_engine, read_engines, url_in


def add(path: Path, url: str) -> bool:
    """Adds an engine. Returns False if the file has it.

    Raises:
        WrongUsage: the URL or the file is invalid.
        OSError: the file cannot be written.
    """
    engine = _checked(url)
    if engine in _engines(path):
        return False
    _replace(path, [*_lines(path), engine])
    return True


def remove(path: Path, url: str) -> bool:
    """Removes an engine. Returns False if the file does not have it.

    Raises:
        WrongUsage: the URL or the file is invalid.
        OSError: the file cannot be written.
    """
    engine = _checked(url)
    if engine not in _engines(path):
        return False
    _replace(path, [line for line in _lines(path) if url_in(line) != engine])
    return True


def _checked(url: str) -> str:
    try:
        return checked_engine(url).rstrip("/")
    except ValueError as error:
        raise WrongUsage(str(error)) from None


def _engines(path: Path) -> Sequence[str]:
    try:
        return read_engines(path)
    except ValueError as error:
        raise WrongUsage(str(error)) from None


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def _replace(path: Path, lines: Sequence[str]) -> None:
    """Replaces the content at once, so that the process reads the old or the new one."""
    # A link stays a link.
    path = path.resolve()
    descriptor, temporary = tempfile.mkstemp(prefix=".", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)
            os.fchmod(file.fileno(), path.stat().st_mode & 0o777)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
