"""Errors in the forms of the APIs: all begin as OpenAI's, by path they become Anthropic's."""

from __future__ import annotations

from typing import Any

import msgspec
from kvrouter.engines.fields import MESSAGES, RESPONSES

_BY_STATUS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_BY_CODE = {"model_not_found": "not_found_error", "service_unavailable": "overloaded_error"}
"""Types by codes of OpenAI's errors, where the status is not known."""
_SHARED = frozenset({"rate_limit_error", "authentication_error", "permission_error", "invalid_request_error"})
"""Types of errors with the same name in both APIs."""


def shaped_error(path: str, body: dict[str, Any], status: int, request_id: str) -> dict[str, Any]:
    """Returns the body of an error for a path.

    Args:
        path: Path of the request.
        body: The body as OpenAI's.
        status: Status of the response.
        request_id: Id of the request.
    """
    if not path.startswith(MESSAGES):
        return body
    return anthropic_error(body, status) | {"request_id": request_id}


def error_event(path: str, body: dict[str, Any]) -> bytes:
    """Returns an error as the last event of a stream of a path."""
    if path.startswith(MESSAGES):
        return b"event: error\ndata: %b\n\n" % msgspec.json.encode(anthropic_error(body))
    if path.startswith(RESPONSES):
        error = {name: body["error"].get(name) for name in ("code", "message", "param")}
        return b"event: error\ndata: %b\n\n" % msgspec.json.encode({"type": "error", "sequence_number": 0} | error)
    return b"data: %b\n\n" % msgspec.json.encode(body)


def anthropic_error(body: dict[str, Any], status: int = 0) -> dict[str, Any]:
    """Returns an error as Anthropic's API has it. ``status`` is that of its response; 0 within a stream."""
    error = body["error"] if isinstance(body.get("error"), dict) else body
    kind, code = str(error.get("type")), str(error.get("code"))
    known = _BY_STATUS.get(status) or _BY_CODE.get(code) or (kind if kind in _SHARED else "api_error")
    return {"type": "error", "error": {"type": known, "message": str(error.get("message"))}}
