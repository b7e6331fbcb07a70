"""What tracing costs while it is off: CPU of the places that a request passes, times how often it passes them.

    python bench/request/tracing_off.py

Counts CPU of the thread, so that work beside it hardly matters. The request is one of three processes ("split"). A
token passes none of these places.
"""

from __future__ import annotations

import time
import timeit
from collections.abc import Callable

from kvrouter.net import trace_context
from kvrouter.runtime.tracing import Kind, current_span, span

_ROUNDS, _CALLS = 15, 50_000


def _span() -> None:
    with span("kvrouter.v1.SchedulerService/SelectWorker", Kind.CLIENT):
        pass


def _entered() -> None:
    with trace_context.entered(trace_context.checked("")):
        pass


def _nothing() -> None:
    pass


PLACES: tuple[tuple[str, Callable[[], object], int], ...] = (
    # Frontend: the sequence, its selection, its attempt. Scheduler: the call, the query. Indexer: the call.
    ("span", _span, 6),
    ("context of a received call", _entered, 2),
    ("context for a sent call", trace_context.current, 4),
    ("attributes of a decision", current_span, 1),
)


def _seconds(place: Callable[[], object]) -> float:
    return min(timeit.repeat(place, number=_CALLS, repeat=_ROUNDS, timer=time.thread_time)) / _CALLS


def main() -> None:
    """Prints the cost of each place and of a request."""
    nothing, total = _seconds(_nothing), 0.0
    for name, place, times in PLACES:
        each = max(0.0, _seconds(place) - nothing)
        total += each * times
        print(f"{name}: {each * 1e9:.0f} ns, {times} times")
    print(f"a request: {total * 1e6:.1f} µs")


if __name__ == "__main__":
    main()
