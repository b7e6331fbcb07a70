"""Options of a request that only the engine interprets."""

from __future__ import annotations

from typing import Any

import msgspec
from kvrouter.publisher.errors import RequestRefused
from kvrouter.v1.worker_pb2 import SamplingOptions

_FIELD = "sampling_options.engine_options_json"


def engine_options(options: SamplingOptions) -> dict[str, Any]:
    """Returns the options of a request that only the engine interprets.

    Raises:
        RequestRefused: they are no JSON object.
    """
    if not options.engine_options_json:
        return {}
    try:
        return msgspec.json.decode(options.engine_options_json, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestRefused(f"expected a JSON object: {error}", field=_FIELD) from None


def json_object(payload: bytes, field: str) -> dict[str, Any]:
    """Returns a payload of JSON.

    Raises:
        RequestRefused: it is no JSON object.
    """
    try:
        return msgspec.json.decode(payload, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise RequestRefused(f"expected a JSON object: {error}", field=field) from None


def refuse_several_sequences(options: SamplingOptions) -> None:
    """Refuses a request for several sequences: a worker ends its output at the end of the first one.

    Raises:
        RequestRefused: more than one is requested.
    """
    if options.n > 1:
        raise RequestRefused(f"expected one sequence, received n={options.n}", field="sampling_options.n")
