"""Tells failures of an engine from those of a request, and converts both to what callers of the worker receive."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import grpc
import msgspec
from kvrouter.engines.fields import shown_failure
from kvrouter.publisher.errors import RequestRefused
from kvrouter.v1.errors_pb2 import ErrorReason

_MOST_CHARACTERS = 512
_BUSY = 429
_UNAVAILABLE = 503
_NOT_THE_CLIENTS = frozenset({401, 403, 405, 408})
"""Statuses below 500 for which the sidecar or the engine is at fault, not the request."""
_TOO_LONG = re.compile(r"(maximum|model's) context length")
"""Words with which vLLM and SGLang refuse a prompt that exceeds the model's context, alone or with its output."""


_ABSENT = msgspec.Raw()


class Answer(msgspec.Struct):
    """What any answer may have instead of output."""

    error: msgspec.Raw = _ABSENT
    object: str = ""


AnswerT = TypeVar("AnswerT", bound=Answer)


class _Error(msgspec.Struct):
    message: str = ""
    code: Any = None


class _ErrorBody(msgspec.Struct):
    error: _Error | str | None = None
    message: str = ""
    object: str = ""
    code: Any = None


_decode = msgspec.json.Decoder(_ErrorBody).decode


class EngineFailed(RequestRefused):
    """A request failed because of its engine. Another worker may serve it."""

    def __init__(self, summary: str, engine_text: str = "", *, was_sent: bool = True) -> None:
        """Describes the failure.

        Args:
            summary: What happened, for logs.
            engine_text: What the engine said. It may quote the request, so only the caller receives it.
            was_sent: Whether the engine received the request, so that it may have died of it.
        """
        super().__init__(
            (f"{summary}: {engine_text}" if engine_text else summary)[:_MOST_CHARACTERS],
            code=grpc.StatusCode.UNAVAILABLE,
            reason=ErrorReason.ERROR_REASON_DEPENDENCY_AWAY,
            advice="Send the request to another worker.",
            retry_elsewhere=True,
        )
        self.summary = summary
        self.was_sent = was_sent

    def died(self) -> None:
        """Says that the engine has died, which Frontends count."""
        self.info.reason = ErrorReason.ERROR_REASON_WORKER_LOST


def refusal_of_status(status: int, body: bytes) -> RequestRefused:
    """Returns the error of a request that the engine answered with another status than 200."""
    message, _ = _read(body)
    if status == 404 and not message:
        return _misconfigured("the engine does not serve this kind of request (status 404)")
    return refusal_of_code(status, message or f"the engine answered with status {status}")


def refusal_of_code(code: int, message: str) -> RequestRefused:
    """Returns the error of a request for which the engine reported an error, by the HTTP status that stands for it."""
    message = shown_failure(message)
    if code == _BUSY:
        return RequestRefused(
            f"the engine is busy: {message}"[:_MOST_CHARACTERS],
            code=grpc.StatusCode.RESOURCE_EXHAUSTED,
            reason=ErrorReason.ERROR_REASON_ALL_BUSY,
            advice="Send the request to another worker, or later.",
            retry_elsewhere=True,
        )
    if code in _NOT_THE_CLIENTS:
        return _misconfigured(f"the engine refuses the sidecar (status {code}): {message}")
    if 400 <= code < 500:
        reason = ErrorReason.ERROR_REASON_BAD_REQUEST
        if _TOO_LONG.search(message):
            reason = ErrorReason.ERROR_REASON_PROMPT_TOO_LONG
        return RequestRefused(f"the engine refuses the request: {message}"[:_MOST_CHARACTERS], reason=reason)
    # An engine that answers 503 has not begun with the request.
    return EngineFailed(f"the engine reports a failure (status {code})", message, was_sent=code != _UNAVAILABLE)


def is_given(field: msgspec.Raw) -> bool:
    """Returns whether a field of an answer is neither absent nor null."""
    return bytes(field) not in (b"", b"null")


def read_answer(decode: Callable[[bytes], AnswerT], data: bytes) -> AnswerT:
    """Returns a whole answer with status 200, or an event of its stream.

    Raises:
        RequestRefused: it reports an error, or is malformed.
    """
    try:
        answer = decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise EngineFailed(f"the engine sent a malformed output: {error}") from None
    if is_given(answer.error) or answer.object == "error":
        raise error_in(data) or refusal_of_code(500, "no message")
    return answer


def error_in(body: bytes) -> RequestRefused | None:
    """Returns the error that an answer with status 200, or an event of its stream, contains; None if it has none."""
    message, code = _read(body)
    if not message:
        return None
    # Without a code nothing says that the request is at fault.
    return refusal_of_code(code if isinstance(code, int) and 400 <= code < 600 else 500, message)


def _read(body: bytes) -> tuple[str, Any]:
    """Returns message and code of an error object; empty and None if the body has none."""
    try:
        found = _decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return "", None
    match found.error:
        case _Error(message=message, code=code):
            return message or "no message", code
        case str() as message if message:
            return message, found.code
    return (found.message or "no message", found.code) if found.object == "error" else ("", None)


def _misconfigured(message: str) -> RequestRefused:
    return RequestRefused(
        message[:_MOST_CHARACTERS],
        code=grpc.StatusCode.FAILED_PRECONDITION,
        advice="Check the sidecar's options and the engine's version.",
        retry_elsewhere=True,
    )
