"""Workloads as files: Mooncake's format, a JSON object a line.

    {"timestamp": 1250, "input_length": 700, "output_length": 80, "hash_ids": [3, 17], "piece_tokens": 512}

``timestamp`` is in ms; ``hash_ids`` name the prompt's pieces in order. ``piece_tokens`` is ours: tokens that an id
stands for, 512 where it is left out, as in Mooncake's own traces. There is no text in it, nor any token.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from kvrouter.cli.trace import PIECE_TOKENS, TraceError
from kvrouter.simulator.workload import Request, Workload


def read(path: Path, limit: int | None = None) -> Workload:
    """The first ``limit`` requests of a trace (all where it is None), gzip-compressed or not, in order of time.

    Raises:
        TraceError: the file cannot be read, a line breaks the format, or there is no request in it.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
            rows = [_row(path, number, line) for number, line in islice(enumerate(lines, 1), limit) if line.strip()]
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from error
    if not rows:
        raise TraceError(f"{path}: holds no request")
    widths = {width for _, width in rows}
    if len(widths) > 1:
        raise TraceError(f"{path}: piece_tokens is {sorted(widths)}; it must be the same in every line")
    requests = sorted((request for request, _ in rows), key=lambda request: request.arrives_s)
    start = requests[0].arrives_s
    shifted = [Request(r.arrives_s - start, r.prompt_tokens, r.output_tokens, r.pieces) for r in requests]
    return Workload(path.name, shifted, widths.pop())


def lines(workload: Workload) -> Iterable[str]:
    """A workload in that format."""
    for request in workload.requests:
        fields: dict[str, Any] = {
            "timestamp": round(request.arrives_s * 1e3, 3),
            "input_length": request.prompt_tokens,
            "output_length": request.output_tokens,
            "hash_ids": list(request.pieces),
        }
        if workload.piece_tokens != PIECE_TOKENS:
            fields["piece_tokens"] = workload.piece_tokens
        yield json.dumps(fields, separators=(",", ":")) + "\n"


def _row(path: Path, number: int, line: str) -> tuple[Request, int]:
    where = f"{path}:{number}"
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise TraceError(f"{where}: is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise TraceError(f"{where}: is not a JSON object")
    at = fields.get("timestamp")
    if isinstance(at, bool) or not isinstance(at, int | float) or not 0 <= at < float("inf"):
        raise TraceError(f"{where}: timestamp is {at!r}, must be milliseconds, 0 or more")
    numbers = {"piece_tokens": PIECE_TOKENS} | fields
    for name in ("input_length", "output_length", "piece_tokens"):
        if type(numbers.get(name)) is not int or numbers[name] < 1:
            raise TraceError(f"{where}: {name} is {numbers.get(name)!r}, must be a number of tokens, 1 or more")
    pieces, width = fields.get("hash_ids"), numbers["piece_tokens"]
    if not isinstance(pieces, list) or not all(type(piece) is int and 0 <= piece < 1 << 64 for piece in pieces):
        raise TraceError(f"{where}: hash_ids is {str(pieces)[:40]!r}, must be a list of integers from 0 to 2^64 - 1")
    if len(pieces) * width < numbers["input_length"]:
        raise TraceError(
            f"{where}: {len(pieces)} hash_ids stand for {len(pieces) * width} tokens, "
            f"fewer than input_length, {numbers['input_length']}"
        )
    return Request(at / 1e3, numbers["input_length"], numbers["output_length"], tuple(pieces)), width
