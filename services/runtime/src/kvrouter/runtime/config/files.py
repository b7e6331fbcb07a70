"""Checks of output files."""

from __future__ import annotations

import os
from pathlib import Path


def can_be_written(path: Path) -> bool:
    """Returns whether a file can be written or created. Call it at the start, so that no work is lost at the end."""
    return not path.is_dir() and os.access(path if path.exists() else path.parent, os.W_OK)
