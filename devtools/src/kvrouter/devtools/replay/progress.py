"""Shows the progress of a replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvrouter.devtools.replay.records import RequestRecord
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

_REDRAWS_PER_SECOND = 2  # few, because the replay runs on the same processor
_LINES_WITHOUT_TERMINAL = 10


class _Totals:
    """Totals of the requests that have ended."""

    def __init__(self) -> None:
        self.ended = self.errors = self.prompt_tokens = self.cached_tokens = 0

    def add(self, record: RequestRecord) -> None:
        self.ended += 1
        if record.error is not None:
            self.errors += 1
        elif record.cached_tokens is not None:
            self.prompt_tokens += record.prompt_tokens
            self.cached_tokens += record.cached_tokens

    def __str__(self) -> str:
        rate = self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0
        # Short, so that the bar beside it fits 80 columns.
        return f"{rate:.1%} cached, {self.errors} error{'' if self.errors == 1 else 's'}"


@contextmanager
def replay_progress(console: Console, mode: str, requests: int) -> Iterator[Callable[[RequestRecord], None]]:
    """Yields the function to call when a request ends. Shows a bar on a terminal, otherwise a line for each tenth."""
    totals = _Totals()
    if not console.is_terminal:
        every = max(1, requests // _LINES_WITHOUT_TERMINAL)

        def print_tenth(record: RequestRecord) -> None:
            totals.add(record)
            if totals.ended % every == 0:
                console.print(f"{mode}: {totals.ended} of {requests} requests, {totals}", highlight=False)

        yield print_tenth
        return
    columns = (
        TextColumn("[bold]{task.description}[/bold]"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[totals]}"),
    )
    with Progress(*columns, console=console, refresh_per_second=_REDRAWS_PER_SECOND) as bar:
        task = bar.add_task(mode, total=requests, totals=totals)

        def advance(record: RequestRecord) -> None:
            totals.add(record)
            bar.advance(task)

        yield advance
