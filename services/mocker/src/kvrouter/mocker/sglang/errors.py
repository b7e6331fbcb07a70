"""Errors in SGLang's formats."""

from __future__ import annotations

from typing import Any

from kvrouter.mocker.serving.errors import ApiError


def error_body(path: str, error: ApiError) -> dict[str, Any]:
    """Returns the body of an error response; the OpenAI API has another format than SGLang's own."""
    if path.startswith("/v1/"):
        kind = "BadRequest" if error.status == 400 else "InternalServerError"
        return {"object": "error", "message": str(error), "type": kind, "param": error.param, "code": error.status}
    return {"error": {"message": str(error)}}
