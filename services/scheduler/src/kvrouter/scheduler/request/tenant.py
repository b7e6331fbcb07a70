"""The tenant of a request."""

from __future__ import annotations

from typing import NamedTuple


class Tenant(NamedTuple):
    """Whose request it is."""

    name: str = ""
    """Name; requests without one count as those of one tenant."""
    weight: float = 1.0
    """Its share, relative to others'."""
