"""A recording of traffic: a JSON object a line, in the format that `kvrouter simulate` and `kvrouter replay` read.

    {"timestamp": 1763735000123.4, "input_length": 40, "output_length": 7, "hash_ids": [12, 13, 97], "piece_tokens": 16,
     "model": "llama"}

``timestamp`` is when the request came, Unix ms. ``hash_ids`` has an id for each block of the prompt: equal blocks have
equal ids, and a tail that fills no block has an id of its own. An id is a number in order of appearance, so that
neither text nor tokens can be guessed from it, as they could from a hash whose seed is known.

Ids stay unique in a file that is appended to after a restart: they start at the file's size, and every id in it is
smaller than that, since it takes a byte or more to write one.
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
"""Blocks whose ids are remembered, the last used ones: 16 million tokens, as many as 60 large engines hold. One that
comes again after that many others gets another id, as if it were new; no cache would have it either."""

_TAIL_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Outline:
    """What is kept of a request."""

    arrived_unix_ns: int
    model: str
    block_size: int
    """Tokens per block."""
    prompt_tokens: int
    local_hashes: bytes
    """Of the prompt's full blocks, packed u64."""
    output_tokens: int
    """Tokens that the request got, 1 or more."""

    @property
    def blocks(self) -> int:
        """Full blocks of the prompt."""
        return len(self.local_hashes) // 8


class BlockIds:
    """Numbers blocks in the order in which they appear."""

    def __init__(self, first: int = 0, most: int = MAX_KNOWN_BLOCKS) -> None:
        self._next = first
        self._most = most
        self._ids: OrderedDict[int, int] = OrderedDict()

    def __len__(self) -> int:
        """Blocks that are remembered."""
        return len(self._ids)

    def of(self, outline: Outline) -> list[int]:
        """Ids of the blocks of a prompt, that of its tail included."""
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
    """What became of a batch."""

    requests: int
    """Requests that are in the file."""
    size: int
    """Bytes of the file."""
    full: bool = False
    """Whether the rest did not fit."""
    failure: str = ""
    """Why none could be written; empty if it could."""


class RecordingFile:
    """Appends to a file up to a size. One that is moved or emptied meanwhile is begun anew."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._ids: BlockIds | None = None
        self._size = 0

    @property
    def known_blocks(self) -> int:
        """Blocks whose ids are remembered."""
        return len(self._ids) if self._ids is not None else 0

    def append(self, outlines: Sequence[Outline]) -> Written:
        """Writes whole lines. What fails leaves the file as it was."""
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
            self._ids = None  # those that were given in this batch may be beyond the file's size
            with suppress(OSError):  # the next batch cuts what is torn
                os.ftruncate(descriptor, size)
            raise
        self._size += sum(map(len, lines))
        return Written(len(lines), self._size, full=len(lines) < len(outlines))

    def _fitting(self, outlines: Sequence[Outline], ids: BlockIds) -> Iterator[bytes]:
        left = self._max_bytes - self._size
        for outline in outlines:
            # A line has 2 bytes and more for each block: one that cannot fit is not worth numbering.
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
    """Drops what follows the last end of a line, as a process that was killed leaves it."""
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
