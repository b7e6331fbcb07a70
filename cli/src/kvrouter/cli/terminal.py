"""The terminal of an operator, on which names from outside are shown as text only.

Request ids come from clients, and names of models and replicas from whoever can register. Markup in them is not
interpreted, and characters that a terminal would obey or hide (escape sequences, marks of direction) are replaced.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, Any

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
