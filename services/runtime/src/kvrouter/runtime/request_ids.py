"""Checks ids of requests, which become headers and parts of log lines."""

from __future__ import annotations

import re

from kvrouter.v1.errors import BadRequest

_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""Control characters, line breaks, and halves of pairs, as which Python reads bytes that are not UTF-8."""


def check_request_id(request_id: str, max_bytes: int, field: str) -> None:
    """Checks an id that a client chose; it may be empty.

    Args:
        request_id: The id.
        max_bytes: Its maximum size.
        field: The field or header that has it, for the error.

    Raises:
        BadRequest: it has control characters or is not UTF-8, or it is too long.
    """
    if _UNSAFE.search(request_id):
        raise BadRequest(
            f"{field}: expected UTF-8 without control characters, received {request_id[:32]!r}",
            field=field,
            advice="Send letters, digits and punctuation, such as a UUID.",
        )
    if len(request_id.encode()) > max_bytes:
        raise BadRequest(f"{field} is longer than {max_bytes} bytes", field=field, advice="Send a shorter id.")
