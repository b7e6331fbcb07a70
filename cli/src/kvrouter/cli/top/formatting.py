"""Formats numbers, short enough for a table."""

from __future__ import annotations

_MINUTE, _HOUR, _DAY = 60, 3600, 86_400


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


def duration(seconds: float) -> str:
    """Formats a time: ``3 ms``, ``1.2 s``, ``48 s``, ``5 min``, ``3.5 h``, ``12 d``."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < _MINUTE:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    if seconds < _HOUR:
        return f"{seconds / _MINUTE:.0f} min"
    return f"{seconds / _HOUR:.1f} h" if seconds < _DAY else f"{seconds / _DAY:.0f} d"


def share(value: float | None) -> str:
    """Formats a share: ``64 %``; ``-`` for none."""
    return "-" if value is None else f"{value * 100:.0f} %"
