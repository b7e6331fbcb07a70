"""Formats numbers, short enough for a table."""

from __future__ import annotations


def amount(number: int, of: str) -> str:
    """Formats a number of things: ``1 booking``, ``2,000 bookings``."""
    return f"{number:,} {of}{'' if number == 1 else 's'}"


def count(number: int, *, short: bool) -> str:
    """Formats a count: ``33,275``; short: ``33.3k``, ``505k``, ``2.1M``."""
    if not short or number < 10_000:
        return f"{number:,}"
    for size, unit in ((1e9, "G"), (1e6, "M")):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return f"{number / 1e3:.1f}k" if number < 100_000 else f"{number / 1e3:.0f}k"


def share(value: float | None) -> str:
    """Formats a share: ``64 %``; ``-`` for none."""
    return "-" if value is None else f"{value * 100:.0f} %"
