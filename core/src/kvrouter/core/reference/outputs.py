"""Reads the output of a worker if it has only tokens, as nearly every piece of a stream."""

from __future__ import annotations

from google.protobuf.message import DecodeError
from kvrouter.v1.worker_pb2 import WorkerServiceGenerateResponse


def read_tokens(response: bytes) -> tuple[int, ...] | None:
    """Returns the token ids of an encoded WorkerServiceGenerateResponse that has only tokens.

    Their times by the engine's clock are ignored. None if it has any other field or no tokens, is encoded in an unusual
    way or is malformed: then a parser of all messages must read it.
    """
    try:
        message = WorkerServiceGenerateResponse.FromString(response)
    except DecodeError:
        return None
    output = message.output
    tokens = tuple(output.token_ids)
    output.ClearField("token_engine_ns")
    rest = message.SerializeToString()
    alone = WorkerServiceGenerateResponse()
    alone.output.token_ids.extend(tokens)
    return tokens if tokens and rest == alone.SerializeToString() else None
