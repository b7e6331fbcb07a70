"""Errors in vLLM's format."""

from __future__ import annotations

from typing import Any

from kvrouter.mocker.serving.errors import ApiError


def error_body(path: str, error: ApiError) -> dict[str, Any]:  # noqa: ARG001
    """Returns the body of an error response."""
    return {"error": {"message": str(error), "type": error.type, "param": error.param, "code": error.status}}
