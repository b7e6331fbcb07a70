"""Reads traces (Mooncake traces and recordings) and expands their piece ids to tokens.

    {"timestamp": 1250, "input_length": 700, "output_length": 80, "hash_ids": [3, 17], "piece_tokens": 512}

``timestamp`` is in milliseconds. ``hash_ids`` identify the content of the prompt's pieces, in order. Two fields extend
Mooncake's format: ``piece_tokens``, the tokens per piece, 512 by default (the pieces of a recording are blocks), and
``model``, because a recording may contain several models. Equal ids stand for equal tokens, so any deterministic
expansion that gives different pieces different tokens keeps every shared prefix and adds none.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import sys
import zlib
from array import array
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import as_file, files
from itertools import islice
from pathlib import Path
from typing import Any

PIECE_TOKENS = 512
"""Tokens per piece if a trace does not say."""
MAX_PIECE_TOKENS = 1 << 16
_MAX_MS = 1e15  # about 30,000 years, so that Unix time is accepted

_CACHED_PIECES = 16_384  # 2 KiB each: 32 MiB at most
_TOKEN_BYTES = 2  # ids from 0 to 65,535: within every current vocabulary, and 256 random bits in a block of 16


class TraceError(ValueError):
    """A trace cannot be read; the message names the file and, if possible, the line."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A request of a trace."""

    index: int
    """Position in the trace, from 0."""
    arrival_ms: float
    """Arrival, milliseconds after the first request; never before the previous request."""
    input_length: int
    """Tokens of the prompt, at least 1."""
    output_length: int
    """Tokens of the output, at least 1."""
    pieces: tuple[int, ...]
    """Ids of the prompt's pieces in order, u64; of the last piece only a part may belong to the prompt."""
    piece_tokens: int = PIECE_TOKENS
    """Tokens per piece."""

    def tokens(self) -> array[int]:
        """Returns the prompt as `input_length` token ids in an array of 32-bit unsigned integers."""
        expanded: array[int] = array("I")
        for piece in self.pieces:
            expanded.extend(piece_tokens(piece, self.piece_tokens))
        del expanded[self.input_length :]
        return expanded


@lru_cache(maxsize=_CACHED_PIECES)
def piece_tokens(piece: int, count: int = PIECE_TOKENS) -> array[int]:
    """Returns the `count` token ids of a piece: 16-bit little-endian words of SHAKE-128 over the id's decimal form.

    The array is shared between calls and must not be changed.
    """
    words = array("H", hashlib.shake_128(str(piece).encode()).digest(count * _TOKEN_BYTES))
    if sys.byteorder == "big":
        words.byteswap()
    return array("I", words)


def read_trace(path: Path, limit: int | None = None, model: str | None = None) -> list[TraceRequest]:
    """Returns the first `limit` requests of a file (None for all), gzip-compressed or not, in order of time.

    `model` selects the requests of one model from a recording of several.

    Raises:
        TraceError: the file cannot be read, a line violates the format, no request is left, or the file has requests
            of several models and none is selected.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
            numbered = ((f"{path}:{number}", line) for number, line in enumerate(lines, start=1) if line.strip())
            parsed = (_parse(where, line) for where, line in numbered)
            found = list(islice((pair for pair in parsed if model is None or pair[0] in (model, None)), limit))
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise TraceError(f"{path}: cannot be read: {why}") from error
    if not found:
        raise TraceError(f"{path}: holds no request" + (f" of model {model}" if model is not None else ""))
    models = {of_model for of_model, _ in found}
    if len(models) > 1:
        raise TraceError(f"{path}: holds requests of models {', '.join(sorted(map(str, models)))}: name one of them")
    read = [request for _, request in found]
    widths = {request.piece_tokens for request in read}
    if len(widths) > 1:
        raise TraceError(f"{path}: piece_tokens is {sorted(widths)[:4]}, must be the same in every line")
    # A recording has its requests in order of their ends.
    read.sort(key=lambda request: request.arrival_ms)
    first_ms = read[0].arrival_ms
    return [
        replace(request, index=index, arrival_ms=request.arrival_ms - first_ms) for index, request in enumerate(read)
    ]


def read_shipped_trace(limit: int | None = None) -> list[TraceRequest]:
    """Returns the first `limit` requests of the shipped part of Mooncake's conversation trace.

    Raises:
        TraceError: the package is damaged.
    """
    with ExitStack() as stack:
        path = stack.enter_context(as_file(files("kvrouter.devtools.traces") / "data" / "conversation_trace.jsonl.gz"))
        return read_trace(path, limit)


def _parse(where: str, line: str) -> tuple[str | None, TraceRequest]:
    """Returns a request, and its model if the line has one."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{where}: is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise TraceError(f"{where}: is not a JSON object")
    arrival_ms = fields.get("timestamp")
    if isinstance(arrival_ms, bool) or not isinstance(arrival_ms, int | float) or not 0 <= arrival_ms <= _MAX_MS:
        raise TraceError(f"{where}: timestamp is {arrival_ms!r}, must be milliseconds, 0 to {_MAX_MS:g}")
    input_length = _length(where, fields, "input_length")
    output_length = _length(where, fields, "output_length")
    width = _length(where, {"piece_tokens": PIECE_TOKENS} | fields, "piece_tokens")
    if width > MAX_PIECE_TOKENS:
        raise TraceError(f"{where}: piece_tokens is {width}, must be at most {MAX_PIECE_TOKENS}")
    pieces = fields.get("hash_ids")
    if not isinstance(pieces, list) or not all(type(piece) is int and 0 <= piece < 1 << 64 for piece in pieces):
        raise TraceError(f"{where}: hash_ids is {str(pieces)[:40]!r}, must be a list of integers from 0 to 2^64 - 1")
    if len(pieces) * width < input_length:
        raise TraceError(
            f"{where}: {len(pieces)} hash_ids stand for {len(pieces) * width} tokens, "
            f"fewer than input_length, {input_length}"
        )
    model = fields.get("model")
    if not isinstance(model, str | None):
        raise TraceError(f"{where}: model is {str(model)[:40]!r}, must be a name")
    return model, TraceRequest(0, float(arrival_ms), input_length, output_length, tuple(pieces), width)


def _length(where: str, fields: dict[str, Any], name: str) -> int:
    length = fields.get(name)
    if type(length) is not int or length < 1:
        raise TraceError(f"{where}: {name} is {length!r}, must be a number of tokens, 1 or more")
    return length
