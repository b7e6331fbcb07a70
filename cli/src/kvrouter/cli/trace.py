"""Reads Mooncake traces and expands their piece ids to tokens.

A trace names the content of a prompt by ids of 512-token pieces. Equal ids stand for equal tokens, so any expansion
that is deterministic and gives different pieces different tokens keeps every shared prefix, and adds none.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import sys
from array import array
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import as_file, files
from itertools import islice
from pathlib import Path
from typing import Any

PIECE_TOKENS = 512
"""Tokens that one piece id stands for."""

_CACHED_PIECES = 16_384  # 2 KiB each: 32 MiB at most
_TOKEN_BYTES = 2  # ids from 0 to 65,535: within every current vocabulary, and 256 random bits in a block of 16


class TraceError(ValueError):
    """A trace cannot be read; the message names the file, and the line where one is at fault."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace."""

    index: int
    """Position in the trace, from 0."""
    arrival_ms: float
    """Arrival, milliseconds after the first request, 0 or more, never less than the request's before it."""
    input_length: int
    """Tokens of the prompt, 1 or more."""
    output_length: int
    """Tokens that the model answered with, 1 or more."""
    pieces: tuple[int, ...]
    """Ids of the prompt's pieces, in order; the last one may be used in part."""

    def tokens(self) -> array[int]:
        """The prompt as token ids (array of 32-bit unsigned integers), `input_length` of them."""
        expanded: array[int] = array("I")
        for piece in self.pieces:
            expanded.extend(piece_tokens(piece))
        del expanded[self.input_length :]
        return expanded


@lru_cache(maxsize=_CACHED_PIECES)
def piece_tokens(piece: int) -> array[int]:
    """The 512 token ids that a piece id stands for: 16-bit little-endian words of SHAKE-128 over its decimal form.

    The array is shared between calls: do not change it.
    """
    words = array("H", hashlib.shake_128(str(piece).encode()).digest(PIECE_TOKENS * _TOKEN_BYTES))
    if sys.byteorder == "big":
        words.byteswap()
    return array("I", words)


def read_trace(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """The first `limit` requests of a trace (all where it is None), gzip-compressed or not.

    Raises:
        TraceError: the file cannot be read, a line breaks the format, or there is no request in it.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
            requests = list(islice(_parse(path, lines), limit))
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from error
    if not requests:
        raise TraceError(f"{path}: holds no request")
    return requests


def read_shipped_trace(limit: int | None = None) -> list[TraceRequest]:
    """The first `limit` requests of the part of the conversation trace that the package ships.

    Raises:
        TraceError: the package is damaged.
    """
    with ExitStack() as stack:
        path = stack.enter_context(as_file(files("kvrouter.cli") / "data" / "conversation_trace.jsonl.gz"))
        return read_trace(path, limit)


def _parse(path: Path, lines: Iterator[str]) -> Iterator[TraceRequest]:
    first_ms: float | None = None
    last_ms = 0.0
    index = 0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        request = _parse_line(where, line, index)
        first_ms = request.arrival_ms if first_ms is None else first_ms
        arrival_ms = request.arrival_ms - first_ms
        if arrival_ms < last_ms:
            raise TraceError(f"{where}: timestamp {request.arrival_ms:g} is before that of the request above")
        last_ms = arrival_ms
        yield TraceRequest(index, arrival_ms, request.input_length, request.output_length, request.pieces)
        index += 1


def _parse_line(where: str, line: str, index: int) -> TraceRequest:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise TraceError(f"{where}: is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise TraceError(f"{where}: is not a JSON object")
    arrival_ms = fields.get("timestamp")
    if isinstance(arrival_ms, bool) or not isinstance(arrival_ms, int | float) or not 0 <= arrival_ms < float("inf"):
        raise TraceError(f"{where}: timestamp is {arrival_ms!r}, must be milliseconds, 0 or more")
    input_length = _length(where, fields, "input_length")
    output_length = _length(where, fields, "output_length")
    pieces = fields.get("hash_ids")
    if not isinstance(pieces, list) or not all(type(piece) is int for piece in pieces):
        raise TraceError(f"{where}: hash_ids is {str(pieces)[:40]!r}, must be a list of integers")
    if len(pieces) * PIECE_TOKENS < input_length:
        raise TraceError(
            f"{where}: {len(pieces)} hash_ids stand for {len(pieces) * PIECE_TOKENS} tokens, "
            f"fewer than input_length, {input_length}"
        )
    return TraceRequest(index, float(arrival_ms), input_length, output_length, tuple(pieces))


def _length(where: str, fields: dict[str, Any], name: str) -> int:
    length = fields.get(name)
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise TraceError(f"{where}: {name} is {length!r}, must be a number of tokens, 1 or more")
    return length
