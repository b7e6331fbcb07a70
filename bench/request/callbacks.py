"""Runs a program, and records the longest callbacks of its event loop.

    python bench/request/callbacks.py FILE MODULE [ARGUMENT...]

The loop is asyncio's, whose callbacks can be wrapped; uvloop's begin and end at the same places. On SIGUSR1 FILE gets
a JSON list of the callbacks since the last signal, each with its CPU time and the stacks in which it was seen.
"""

from __future__ import annotations

import asyncio
import json
import runpy
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import uvloop

SHOWN_MS = 1.0
_KEPT = 40
_FRAMES = 14
_SAMPLE_SECONDS = 0.0005


class Callbacks:
    """The callbacks of the event loop of the main thread."""

    def __init__(self) -> None:
        self._longest: list[dict[str, Any]] = []
        self._thread = threading.get_ident()
        self._began = 0.0
        """CPU time of the thread at the begin of the running callback; 0 between callbacks."""
        self._stacks: Counter[tuple[str, ...]] = Counter()

    def install(self) -> None:
        """Wraps the callbacks of all loops, and samples the stacks of long ones."""
        run = asyncio.Handle._run

        def timed(handle: asyncio.Handle) -> None:
            self._began = began = time.thread_time()
            try:
                run(handle)
            finally:
                self._began = 0.0
                took_ms = 1e3 * (time.thread_time() - began)
                if took_ms >= SHOWN_MS:
                    self._note(took_ms)

        asyncio.Handle._run = timed  # type: ignore[method-assign]
        threading.Thread(target=self._sample, daemon=True).start()

    def take(self) -> list[dict[str, Any]]:
        """Returns the longest callbacks, the longest first, and forgets them."""
        taken, self._longest = self._longest, []
        return sorted(taken, key=lambda each: -each["ms"])[:_KEPT]

    def _sample(self) -> None:
        clock = time.pthread_getcpuclockid(self._thread)
        sampled = 0.0
        while True:
            time.sleep(_SAMPLE_SECONDS)
            began = self._began
            if not began or time.clock_gettime(clock) - began < _SAMPLE_SECONDS:
                continue
            if began != sampled:
                sampled = began
                self._stacks.clear()
            frame = sys._current_frames()[self._thread]
            stack = traceback.StackSummary.extract(traceback.walk_stack(frame), limit=_FRAMES)
            lines = tuple(f"{Path(each.filename).name}:{each.lineno} {each.name}: {each.line}" for each in stack)
            self._stacks[lines] += 1

    def _note(self, took_ms: float) -> None:
        seen, self._stacks = self._stacks, Counter()
        self._longest.append({"ms": round(took_ms, 2), "stacks": [stack for stack, _ in seen.most_common(3)]})
        if len(self._longest) > 2 * _KEPT:
            self._longest = self.take()


def main(file: Path, module: str, arguments: list[str]) -> None:
    """Runs a module as a program."""
    callbacks = Callbacks()
    callbacks.install()
    uvloop.new_event_loop = asyncio.SelectorEventLoop

    def write(*_: object) -> None:
        written = file.with_suffix(".part")
        written.write_text(json.dumps(callbacks.take(), indent=1), encoding="utf-8")
        written.rename(file)

    signal.signal(signal.SIGUSR1, write)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
