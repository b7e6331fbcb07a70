"""The error of constraints."""

from __future__ import annotations


class Unsupported(ValueError):
    """A constraint is invalid, or has what the simulated engine does not know."""
