"""Formats numbers and ids, short enough for a table."""

from __future__ import annotations

from kvrouter.v1.common_pb2 import Rank

SHORTENED = "…"
"""Stands for the middle of an id that is shortened."""
_WORKER_CHARS, _WORKER_HEAD = 9, 4


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


def shortened(name: str, *, chars: int, head: int) -> str:
    """Returns an id of at most ``chars`` characters, of which ``head`` are its beginning."""
    return name if len(name) <= chars else f"{name[:head]}{SHORTENED}{name[head + 1 - chars :]}"


def may_stand_for(short: str, name: str) -> bool:
    """Returns whether an id is, or may have been shortened to, ``short``."""
    head, mark, tail = short.partition(SHORTENED)
    if not mark:
        return short == name
    return len(name) > len(head) + len(tail) and name.startswith(head) and name.endswith(tail)


def rank_name(rank: Rank, *, wide: bool = True) -> str:
    """Returns a rank as ``worker:dp_rank``, with a long id of the worker shortened if it is not ``wide``."""
    worker = str(rank.worker_id)
    worker = worker if wide else shortened(worker, chars=_WORKER_CHARS, head=_WORKER_HEAD)
    return f"{worker}:{rank.dp_rank}"
