"""Files that a process is told to write."""

from __future__ import annotations

import os
from pathlib import Path


def can_be_written(path: Path) -> bool:
    """Whether a file can be written, or made where there is none; to be asked at the start, not after the work."""
    return not path.is_dir() and os.access(path if path.exists() else path.parent, os.W_OK)
