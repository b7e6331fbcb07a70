"""The table ``[fleet]`` of a configuration file: how many workers of each role there are.

``kvrouter tune`` writes it and takes it for the present fleet; ``kvrouter up`` starts it. Services ignore it.

    [fleet]
    prefill = 4        # or: workers = 16
    decode = 12
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import NamedTuple

from kvrouter.cli.errors import WrongUsage

_UNDIVIDED, _DIVIDED = frozenset({"workers"}), frozenset({"prefill", "decode"})


class FleetSize(NamedTuple):
    """Numbers of workers."""

    others: int
    """Workers that decode, or serve whole requests."""
    prefill: int
    """Workers that compute prompts for others; 0 for an undivided fleet."""


def read_fleet(path: Path) -> FleetSize | None:
    """Returns the fleet that a file describes; None if it has no such table.

    Raises:
        WrongUsage: the file cannot be read, or the table is malformed.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8")).get("fleet")
    except (OSError, ValueError) as error:
        raise WrongUsage(f"cannot read {path}: {error}") from None
    if table is None:
        return None
    if not isinstance(table, dict) or table.keys() not in (_UNDIVIDED, _DIVIDED):
        raise WrongUsage(f"[fleet] in {path}: expected workers, or prefill and decode")
    for name, number in table.items():
        if type(number) is not int or number < 1:
            raise WrongUsage(f"{name} in [fleet] of {path} is {number!r}: expected an integer, 1 or more")
    return FleetSize(table.get("workers") or table["decode"], table.get("prefill", 0))
