"""Tells whether a file has changed since it was read."""

from __future__ import annotations

import os

FileVersion = tuple[int, int, int, int]


def file_version(path: str | os.PathLike[str]) -> FileVersion | None:
    """Returns what changes when a file does, or the target of a link as Kubernetes replaces it; None without a file."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_mode
