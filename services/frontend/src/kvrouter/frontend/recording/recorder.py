"""Records requests in the background, in the trace format of `kvrouter simulate` and `kvrouter replay`: JSON lines.

    {"timestamp": 1763735000123.4, "input_length": 40, "output_length": 7, "hash_ids": [12, 13, 97], "piece_tokens": 16,
     "model": "llama"}

``timestamp`` is the request's arrival in Unix milliseconds. ``hash_ids`` has an id for each block of the prompt: equal
blocks have equal ids, and a partial last block has an id of its own. Ids are numbered in order of appearance. Neither
text nor tokens can be derived from them, as they could from a hash whose seed is known.

Ids stay unique when a restarted process appends to the file: they start at the file's size in bytes, and every id in
the file is smaller than that, since writing an id takes at least one byte.

Requests never wait for the disk; if it is too slow, records are dropped.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import structlog
from kvrouter.runtime.bounds import bounds_of
from prometheus_client import CollectorRegistry, Counter, Gauge

MAX_KNOWN_BLOCKS: Final = 1 << 20
"""Blocks whose ids are remembered, the most recently used ones: 16 million tokens of 16-token blocks, as many as 60
large engines cache. A block returning after so many others gets a new id; no cache would have kept it either."""

_TAIL_BYTES = 1 << 16


class Outline(msgspec.Struct, frozen=True):
    """A request as it is recorded."""

    arrived_unix_ns: int
    model: str
    block_size: int
    """Tokens per block."""
    prompt_tokens: int
    local_hashes: bytes
    """Hashes of the prompt's full blocks, packed little-endian u64."""
    output_tokens: int
    """Generated tokens, at least 1."""

    @property
    def blocks(self) -> int:
        """Number of full blocks of the prompt."""
        return len(self.local_hashes) // 8


class BlockIds:
    """Numbers blocks in order of first appearance."""

    def __init__(self, first: int = 0, most: int = MAX_KNOWN_BLOCKS) -> None:
        self._next = first
        self._most = most
        self._ids: OrderedDict[int, int] = OrderedDict()

    def __len__(self) -> int:
        """Returns the number of remembered blocks."""
        return len(self._ids)

    def of(self, outline: Outline) -> list[int]:
        """Returns the ids of a prompt's blocks, including a partial last block."""
        ids = [self._id(block) for block in memoryview(outline.local_hashes).cast("Q")]
        if outline.prompt_tokens > outline.blocks * outline.block_size:
            ids.append(self._fresh())
        return ids

    def _id(self, block: int) -> int:
        known = self._ids.get(block)
        if known is not None:
            self._ids.move_to_end(block)
            return known
        if len(self._ids) >= self._most:
            self._ids.popitem(last=False)
        made = self._ids[block] = self._fresh()
        return made

    def _fresh(self) -> int:
        self._next += 1
        return self._next - 1


@dataclass(frozen=True, slots=True)
class Written:
    """Result of writing a batch."""

    requests: int
    """Written requests."""
    size: int
    """Size of the file in bytes."""
    full: bool = False
    """Whether the rest of the batch did not fit."""
    failure: str = ""
    """Why the batch could not be written; empty on success."""


class RecordingFile:
    """Appends to a file up to a maximum size. If the file is moved or truncated, the recording starts anew."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self.max_bytes = max_bytes
        self._ids: BlockIds | None = None
        self.size = 0
        """Size of the file when it was last written, bytes."""

    @property
    def known_blocks(self) -> int:
        """Number of blocks whose ids are remembered."""
        return len(self._ids) if self._ids is not None else 0

    def append(self, outlines: Sequence[Outline]) -> Written:
        """Appends whole lines. A failure leaves the file as it was."""
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                return self._append(descriptor, outlines)
            finally:
                os.close(descriptor)
        except OSError as error:
            return Written(0, self.size, failure=str(error))

    def _append(self, descriptor: int, outlines: Sequence[Outline]) -> Written:
        if self._ids is None:
            _cut_torn_line(descriptor)
        size = os.fstat(descriptor).st_size
        if self._ids is None or size < self.size:
            self._ids = BlockIds(first=size)
        self.size = size
        lines = list(self._fitting(outlines, self._ids))
        try:
            _write_all(descriptor, b"".join(lines))
        except OSError:
            self._ids = None  # ids of this batch may exceed the file's size after the failure
            with suppress(OSError):  # if this fails, the next batch removes the torn line
                os.ftruncate(descriptor, size)
            raise
        self.size += sum(map(len, lines))
        return Written(len(lines), self.size, full=len(lines) < len(outlines))

    def _fitting(self, outlines: Sequence[Outline], ids: BlockIds) -> Iterator[bytes]:
        left = self.max_bytes - self.size
        for outline in outlines:
            # A line has at least 2 bytes per block, so no ids are assigned to a request that cannot fit.
            if left <= 2 * outline.blocks:
                return
            line = _line(outline, ids.of(outline))
            left -= len(line)
            if left < 0:
                return
            yield line


def _line(outline: Outline, ids: list[int]) -> bytes:
    fields = {
        "timestamp": round(outline.arrived_unix_ns / 1e6, 1),
        "input_length": outline.prompt_tokens,
        "output_length": outline.output_tokens,
        "hash_ids": ids,
        "piece_tokens": outline.block_size,
        "model": outline.model,
    }
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _cut_torn_line(descriptor: int) -> None:
    """Removes an unterminated last line, which a killed process may leave."""
    end = size = os.fstat(descriptor).st_size
    while end:
        start = max(0, end - _TAIL_BYTES)
        found = os.pread(descriptor, end - start, start).rfind(b"\n")
        if found >= 0:
            end = start + found + 1
            break
        end = start
    if end < size:
        os.ftruncate(descriptor, end)


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
