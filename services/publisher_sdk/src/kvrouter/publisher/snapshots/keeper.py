"""Keeps the snapshot of one rank up to date."""

from __future__ import annotations

import asyncio
import threading
import time

from kvrouter.core import EventRecorder
from kvrouter.net.logs import get_logger
from kvrouter.publisher.snapshots.rank_file import NO_POSITION, RankFile, State, write

log = get_logger(__name__)

_LEAST_SHARE = 50
"""Ratio of the pause between two snapshots to the time of the former one: a large state costs at most 2% of a core."""


class SnapshotKeeper:
    """Writes the file of one rank: at intervals if the rank has changed, and when ``save`` is called."""

    def __init__(self, place: RankFile, recorder: EventRecorder, lock: threading.RLock, seconds: float) -> None:
        """``lock`` guards ``recorder`` and the calls of ``note``; ``seconds`` is the least interval of snapshots."""
        recovered = place.recovered
        self._place = place
        self._recorder = recorder
        self._lock = lock
        self._seconds = seconds
        self._position = recovered.position if recovered else NO_POSITION
        self._partial = recovered.partial if recovered else False
        # A file of an earlier incarnation is replaced even if nothing happens in this one.
        self._is_changed = recovered is None
        self._saving = asyncio.Lock()
        self._written_at: float | None = None
        self.failures = 0
        """Snapshots that could not be written."""

    @property
    def age_seconds(self) -> float | None:
        """Time since the file was last written or found up to date, seconds; None if it never was."""
        return None if self._written_at is None else time.monotonic() - self._written_at

    def note(self, position: int, *, partial: bool) -> None:
        """Records that the rank has changed, by the engine's message of this number (NO_POSITION for none)."""
        self._position = position if position != NO_POSITION else self._position
        self._partial = partial
        self._is_changed = True

    async def run(self) -> None:
        """Writes the file at intervals until cancelled."""
        pause = self._seconds
        while True:
            await asyncio.sleep(pause)
            began = time.monotonic()
            await self.save()
            pause = max(self._seconds, _LEAST_SHARE * (time.monotonic() - began))

    async def save(self) -> None:
        """Writes the file now, unless the rank has not changed. A failure is logged, and the former file stays."""
        async with self._saving:
            if not self._is_changed:
                self._written_at = time.monotonic()
                return
            try:
                size = await asyncio.to_thread(self._write)
            except OSError as error:
                self._is_changed = True
                self.failures += 1
                if self.failures == 1:
                    log.error("state.not_written", path=str(self._place.path), error=str(error))
                return
            if self.failures:
                log.info("state.written_again", path=str(self._place.path), failures=self.failures)
            self.failures = 0
            self._written_at = time.monotonic()
            log.debug("state.written", path=str(self._place.path), bytes=size)

    def _write(self) -> int:
        with self._lock:
            self._is_changed = False
            chunks = self._recorder.dump(self._partial)
            blocks = self._recorder.counts().blocks
            state = State(chunks, blocks, tuple(self._recorder.notes()), self._position)
        return write(self._place, state)
