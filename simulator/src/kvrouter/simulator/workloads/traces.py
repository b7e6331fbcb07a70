"""Workloads in files: traces that ``kvrouter.devtools.traces`` reads, and recordings of traffic."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvrouter.devtools.traces.reader import PIECE_TOKENS, TraceRequest, read_trace
from kvrouter.simulator.workloads.workload import Request, Workload


def read(path: Path, limit: int | None = None, model: str | None = None) -> Workload:
    """Returns the first ``limit`` requests of a trace, or all, in order of time. The file may be gzip-compressed.

    Raises:
        TraceError: as ``read_trace``.
    """
    traced = read_trace(path, limit, model)
    requests = [Request(r.arrival_ms / 1e3, r.input_length, r.output_length, r.pieces) for r in traced]
    return Workload(path.name, requests, traced[0].piece_tokens)


def replayable(workload: Workload) -> list[TraceRequest]:
    """Returns the requests as a replay sends them, the first one at 0 ms."""
    first_s = workload.requests[0].arrives_s
    return [
        TraceRequest(
            index,
            (r.arrives_s - first_s) * 1e3,
            r.prompt_tokens,
            r.output_tokens,
            tuple(r.pieces),
            workload.piece_tokens,
        )
        for index, r in enumerate(workload.requests)
    ]


def lines(workload: Workload) -> Iterable[str]:
    """Yields a workload in that format."""
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
