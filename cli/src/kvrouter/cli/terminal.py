"""The terminal of an operator: numbers and ids that fit into a table, and names from outside as text only.

Request ids come from clients, and names of models and replicas from whoever can register. Markup in them is not
interpreted, and characters that a terminal would obey or hide (escape sequences, marks of direction) are replaced.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, Any

from kvrouter.v1.common_pb2 import Rank
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def visible(text: str) -> str:
    """Returns text with a replacement for each character that is not printable, except line ends."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each == "\n" else _REPLACEMENT for each in text)


class PlainConsole(Console):
    """A console that shows text as it is: without markup, highlighting, emoji codes, or unprintable characters."""

    def __init__(self, width: int | None = None, *, file: IO[str] | None = None) -> None:
        """Writes to ``file``, by default standard output; ``width`` is its columns, None for those of the terminal."""
        super().__init__(width=width, file=file, markup=False, highlight=False, emoji=False)

    def render_str(self, text: str, **how: Any) -> Text:
        """Returns a string as text; replaced before columns are measured, so that they are wide enough."""
        return super().render_str(visible(text), **how)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Renders as rich does. Sequences of rich itself are styles and control segments, never text."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else visible(text), style, control)


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
