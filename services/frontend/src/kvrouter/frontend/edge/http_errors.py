"""Errors of the HTTP API: in the format of the OpenAI API, and by path in that of Anthropic's."""

from __future__ import annotations

import math
from typing import Any

import grpc
import msgspec
import structlog
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from kvrouter.engines.fields import MESSAGES, RESPONSES
from kvrouter.frontend.access.body_room import BodyTooLarge
from kvrouter.frontend.edge.event_stream import event_of, named_event
from kvrouter.frontend.edge.request_fields import REQUEST_ID_HEADER, request_id_of
from kvrouter.v1.error_encoding import http_status
from kvrouter.v1.errors import KvRouterError
from kvrouter.v1.errors_pb2 import ErrorReason
from prometheus_client import Counter

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
    return _anthropic_error(body, status) | {"request_id": request_id}


def error_event(path: str, body: dict[str, Any]) -> bytes:
    """Returns an error as the last event of a stream of a path."""
    if path.startswith(MESSAGES):
        return named_event("error", _anthropic_error(body))
    if path.startswith(RESPONSES):
        error = {name: body["error"].get(name) for name in ("code", "message", "param")}
        return named_event("error", {"sequence_number": 0} | error)
    return event_of(msgspec.json.encode(body))


def _anthropic_error(body: dict[str, Any], status: int = 0) -> dict[str, Any]:
    """Returns an error as Anthropic's API has it. ``status`` is that of its response; 0 within a stream."""
    error = body["error"] if isinstance(body.get("error"), dict) else body
    kind, code = str(error.get("type")), str(error.get("code"))
    known = _BY_STATUS.get(status) or _BY_CODE.get(code) or (kind if kind in _SHARED else "api_error")
    return {"type": "error", "error": {"type": known, "message": str(error.get("message"))}}


log = structlog.get_logger(component="frontend")

_UNAUTHENTICATED, _FORBIDDEN, _TOO_LARGE, _BUSY = 401, 403, 413, 429
_ERROR_TYPES = {
    _BUSY: "rate_limit_error",
    # OpenAI's own is invalid_request_error, by which LiteLLM takes it for a bad request unless the words are OpenAI's.
    _UNAUTHENTICATED: "authentication_error",
    _FORBIDDEN: "permission_error",
}
_OPENAI_CODES = {
    ErrorReason.ERROR_REASON_PROMPT_TOO_LONG: "context_length_exceeded",
    ErrorReason.ERROR_REASON_UNKNOWN_MODEL: "model_not_found",
    ErrorReason.ERROR_REASON_UNAUTHENTICATED: "invalid_api_key",
}
"""Codes of the OpenAI API, by which client libraries choose their own errors. Others are gRPC's, in lower case."""
_FAILED = 400
"""Least status of a failed response."""
_CODE = web.ResponseKey("code", str)
"""Code of an error in its response."""
INTERNAL = {"error": {"message": "internal error", "type": "server_error", "param": None, "code": "internal"}}
"""Body of the response to a defect of this process, whose cause only its log has."""


def error_body(error: KvRouterError) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Returns HTTP status, JSON body and headers of an error response."""
    status = _TOO_LARGE if isinstance(error, BodyTooLarge) else http_status(error.code, error.info.reason)
    body = {
        "error": {
            "message": str(error),
            "type": _error_type(status),
            "param": _param(error.info.field),
            "code": _openai_code(error, status),
        }
    }
    headers = _retry_after(error)
    if status == _UNAUTHENTICATED:
        headers["WWW-Authenticate"] = "Bearer"
    return status, body, headers


def with_retry_time(response: web.Response, error: KvRouterError) -> web.Response:
    """Returns an engine's response to a failed request, with the time to wait before a retry if it names none."""
    if "Retry-After" not in response.headers:
        response.headers.update(_retry_after(error))
    return response


def _retry_after(error: KvRouterError) -> dict[str, str]:
    if "retry_after_ms" not in error.info:
        return {}
    milliseconds = error.info.retry_after_ms
    # The second one is OpenAI's, whose SDKs prefer it.
    return {"Retry-After": str(max(1, math.ceil(milliseconds / 1000))), "retry-after-ms": str(milliseconds)}


def _openai_code(error: KvRouterError, status: int) -> str:
    if status == _BUSY:
        return "rate_limit_exceeded"
    # In a stream that has begun, the code alone tells 503.
    other = "service_unavailable" if error.code is grpc.StatusCode.UNAVAILABLE else error.code.name.lower()
    return _OPENAI_CODES.get(error.info.reason, other)


def _param(field: str) -> str | None:
    """Returns the field of the HTTP body for a field of the contract, which nests what is top-level in the body."""
    for message in ("stop_conditions.", "sampling_options.", "constraints."):
        field = field.removeprefix(message)
    if field.startswith("overrides."):
        return f"router_config_override.{field.removeprefix('overrides.')}"
    return "prompt" if field == "token_ids" else field or None


def _error_type(status: int) -> str:
    if status in _ERROR_TYPES:
        return _ERROR_TYPES[status]
    return "invalid_request_error" if status < 500 else "server_error"


def errors_as_json(errors: Counter) -> Middleware:
    """Returns a middleware answering every failure as a JSON error in the format of the OpenAI API.

    ``errors`` counts failed responses by status and code.
    """

    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            response = await handler(request)
        except KvRouterError as error:
            status, body, headers = error_body(error)
            response = _response(request, body, status, headers)
        except web.HTTPException as error:
            words = f"{request.method} {request.path}: {error.reason.lower()}"
            body = {"error": {"message": words, "type": "invalid_request_error", "param": None, "code": None}}
            allowed = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
            response = _response(request, body, error.status, allowed)
        except Exception:
            log.exception("http.request_failed", path=request.path)
            response = _response(request, INTERNAL, 500, {})
        if response.status >= _FAILED:
            errors.labels(response.status, response.get(_CODE, "")).inc()
        return response

    return answer


def _response(request: web.Request, body: dict[str, Any], status: int, headers: dict[str, str]) -> web.Response:
    request_id = request_id_of(request)
    shown = shaped_error(request.path, body, status, request_id)
    response = web.json_response(shown, status=status, headers={REQUEST_ID_HEADER: request_id, **headers})
    response[_CODE] = body["error"]["code"] or ""
    return response
