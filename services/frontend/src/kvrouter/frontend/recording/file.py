"""The recording file: one JSON object per line, in the trace format of `kvrouter simulate` and `kvrouter replay`.

    {"timestamp": 1763735000123.4, "input_length": 40, "output_length": 7, "hash_ids": [12, 13, 97], "piece_tokens": 16,
     "model": "llama"}

``timestamp`` is the request's arrival in Unix milliseconds. ``hash_ids`` has an id for each block of the prompt: equal
blocks have equal ids, and a partial last block has an id of its own. Ids are numbered in order of appearance. Neither
text nor tokens can be derived from them, as they could from a hash whose seed is known.

Ids stay unique when a restarted process appends to the file: they start at the file's size in bytes, and every id in
the file is smaller than that, since writing an id takes at least one byte.
"""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MAX_KNOWN_BLOCKS: Final = 1 << 20
"""Blocks whose ids are remembered, the most recently used ones: 16 million tokens of 16-token blocks, as many as 60
large engines cache. A block returning after so many others gets a new id; no cache would have kept it either."""

_TAIL_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Outline:
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
        self._size = 0

    @property
    def size(self) -> int:
        """Size of the file when it was last written, bytes."""
        return self._size

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
            return Written(0, self._size, failure=str(error))

    def _append(self, descriptor: int, outlines: Sequence[Outline]) -> Written:
        if self._ids is None:
            _cut_torn_line(descriptor)
        size = os.fstat(descriptor).st_size
        if self._ids is None or size < self._size:
            self._ids = BlockIds(first=size)
        self._size = size
        lines = list(self._fitting(outlines, self._ids))
        try:
            _write_all(descriptor, b"".join(lines))
        except OSError:
            self._ids = None  # ids of this batch may exceed the file's size after the failure
            with suppress(OSError):  # if this fails, the next batch removes the torn line
                os.ftruncate(descriptor, size)
            raise
        self._size += sum(map(len, lines))
        return Written(len(lines), self._size, full=len(lines) < len(outlines))

    def _fitting(self, outlines: Sequence[Outline], ids: BlockIds) -> Iterator[bytes]:
        left = self.max_bytes - self._size
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
