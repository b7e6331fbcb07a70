"""Records requests in the background. Requests never wait for the disk; if it is too slow, records are dropped."""

from __future__ import annotations

import asyncio
from collections import deque

import structlog
from kvrouter.frontend.recording.file import Outline, RecordingFile, Written
from kvrouter.runtime.bounds import bounds_of
from prometheus_client import CollectorRegistry, Counter, Gauge

log = structlog.get_logger(component="frontend")

MAX_QUEUED_REQUESTS = 4096
MAX_QUEUED_BLOCKS = 1 << 20
"""Limit on the blocks of all queued requests: 8 MiB of hashes."""
_GATHER_SECONDS = 0.2
"""Time for which requests are collected before they are written together."""


class Recorder:
    """Queues finished requests; ``run`` writes them."""

    def __init__(self, file: RecordingFile, registry: CollectorRegistry) -> None:
        self._file = file
        self._queue: deque[Outline] = deque()
        self._queued_blocks = 0
        self._arrived = asyncio.Event()
        self._stopping = False
        self._trouble = ""
        self._outcomes = Counter(
            "kvrouter_frontend_recorded_requests",
            "Requests by outcome of their record: written, file_full, queue_full, failed.",
            ["outcome"],
            registry=registry,
        )
        self._bytes = Gauge("kvrouter_frontend_recording_bytes", "Size of the recording in bytes.", registry=registry)
        for name, text, value in (
            ("queue", "Requests that wait to be recorded.", lambda: len(self._queue)),
            ("known_blocks", "Blocks whose ids are remembered.", lambda: file.known_blocks),
        ):
            Gauge(f"kvrouter_frontend_recording_{name}", text, registry=registry).set_function(value)
        bounds = bounds_of(registry)
        bounds.add("recording_queue_requests", lambda: len(self._queue), MAX_QUEUED_REQUESTS, when_full="drops")
        bounds.add("recording_queue_blocks", lambda: self._queued_blocks, MAX_QUEUED_BLOCKS, when_full="drops")
        bounds.add("recording_bytes", lambda: file.size, file.max_bytes, when_full="drops")

    def note(self, outline: Outline) -> None:
        """Queues a finished request, or drops and counts it if the queue is full. Never blocks."""
        blocks = outline.blocks
        if len(self._queue) >= MAX_QUEUED_REQUESTS or self._queued_blocks + blocks > MAX_QUEUED_BLOCKS:
            self._outcomes.labels("queue_full").inc()
            return
        self._queue.append(outline)
        self._queued_blocks += blocks
        self._arrived.set()

    def stop(self) -> None:
        """Lets ``run`` end after the queue is written."""
        self._stopping = True
        self._arrived.set()

    async def run(self) -> None:
        """Writes queued requests until ``stop``."""
        while self._queue or not self._stopping:
            await self._arrived.wait()
            if not self._stopping:
                await asyncio.sleep(_GATHER_SECONDS)
            batch = list(self._queue)
            self._queue.clear()
            self._queued_blocks = 0
            self._arrived.clear()
            if batch:
                self._take(batch, await asyncio.to_thread(self._file.append, batch))

    def _take(self, batch: list[Outline], written: Written) -> None:
        self._bytes.set(written.size)
        lost = "failed" if written.failure else "file_full"
        self._outcomes.labels("written").inc(written.requests)
        self._outcomes.labels(lost).inc(len(batch) - written.requests)
        trouble = written.failure or ("full" if written.full else "")
        if trouble and not self._trouble:
            log.warning("recording.stopped", cause=trouble, bytes=written.size)
        elif self._trouble and not trouble:
            log.info("recording.resumed", bytes=written.size)
        self._trouble = trouble
