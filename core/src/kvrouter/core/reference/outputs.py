"""Reads a worker's pieces of output."""

from __future__ import annotations

from google.protobuf.message import DecodeError
from kvrouter.core.reference.calls import has_only
from kvrouter.v1.worker_pb2 import WorkerServiceGenerateResponse

_PLAIN = {"token_ids", "token_engine_ns", "cached_tokens", "finish_reason", "arrived_engine_ns"}


def read_output(response: bytes) -> tuple[tuple[int, ...], int, int | None] | None:
    """Returns token ids, finish reason and cached tokens of an encoded WorkerServiceGenerateResponse.

    Times by the engine's clock are ignored. None if it has any other field, is encoded in an unusual way or is
    malformed: then a parser of all messages must read it.
    """
    try:
        message = WorkerServiceGenerateResponse.FromString(response)
    except DecodeError:
        return None
    output = message.output
    if "output" not in message or not has_only(message, {"output"}) or not has_only(output, _PLAIN):
        return None
    return tuple(output.token_ids), output.finish_reason, output.cached_tokens if "cached_tokens" in output else None
