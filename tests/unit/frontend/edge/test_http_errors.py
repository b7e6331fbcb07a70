"""Errors of the HTTP API are those that clients of the OpenAI API recognise."""

from __future__ import annotations

import pytest
from kvrouter.frontend.edge.http_errors import error_body
from kvrouter.v1.errors import (
    AllBusy,
    BadRequest,
    KvRouterError,
    NoWorkers,
    Overloaded,
    PermissionDenied,
    PromptTooLong,
    RateLimited,
    Unauthenticated,
    UnknownModel,
)


@pytest.mark.parametrize(
    ("error", "status", "kind", "code", "retry_after"),
    [
        (PromptTooLong(11, 10), 400, "invalid_request_error", "context_length_exceeded", None),
        (PromptTooLong.for_model(11, 10), 400, "invalid_request_error", "context_length_exceeded", None),
        (BadRequest("wrong"), 400, "invalid_request_error", "invalid_argument", None),
        (Unauthenticated("no key"), 401, "authentication_error", "invalid_api_key", None),
        (PermissionDenied("not yours"), 403, "permission_error", "permission_denied", None),
        (UnknownModel("m"), 404, "invalid_request_error", "model_not_found", None),
        (RateLimited("slower", 1500), 429, "rate_limit_error", "rate_limit_exceeded", "2"),
        (AllBusy(100), 429, "rate_limit_error", "rate_limit_exceeded", "1"),
        (Overloaded("full", 100), 429, "rate_limit_error", "rate_limit_exceeded", "1"),
        (NoWorkers("none"), 503, "server_error", "service_unavailable", "1"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, KvRouterError) else None,
)
def test_an_error_has_the_status_type_and_code_of_the_openai_api(
    error: KvRouterError, status: int, kind: str, code: str, retry_after: str | None
) -> None:
    sent, body, headers = error_body(error)
    assert (sent, body["error"]["type"], body["error"]["code"]) == (status, kind, code)
    assert headers.get("Retry-After") == retry_after
    assert str(error) in body["error"]["message"]


def test_an_overflow_says_how_many_tokens_prompt_and_output_have() -> None:
    error = PromptTooLong.for_model(90, 100, field="stop_conditions.max_tokens", output_tokens=20)
    body = error_body(error)[1]["error"]
    assert body["message"] == (
        "This model's maximum context length is 100 tokens. However, you requested 110 tokens: 90 in the prompt, "
        "20 in the output. The prompt is too long for that. Set max_tokens to at most 10, or shorten the prompt."
    )
    assert body["param"] == "max_tokens"
