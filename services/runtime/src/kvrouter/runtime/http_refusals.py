"""Answers what never becomes a request, such as headers that are too large, as other errors are: as JSON.

The body has the format of the OpenAI API, whose clients show its message.
"""

from __future__ import annotations

import json
from http import HTTPStatus

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

_MAX_TEXT = 256


class JsonRequestHandler(RequestHandler):
    """aiohttp's handler of a connection, with JSON for requests that it cannot parse."""

    __slots__ = ("is_stranger",)

    is_stranger: bool
    """Whether its last request had no credential that counts."""

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Returns the response to a request that cannot be parsed or has failed. The connection is closed."""
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            status = super().handle_error(request, status, exc, message).status
        elif request.writer.output_size > 0:
            raise ConnectionError("a response is being sent, so this request cannot be answered")
        # A bad request is not logged: it is the client's mistake, and its text may contain a credential.
        cause = " ".join(str(message or "").split())[:_MAX_TEXT]
        answer = web.Response(
            body=error(status, cause), status=status, headers={"Connection": "close"}, content_type="application/json"
        )
        answer.force_close()
        return answer

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Sends a response. The refusal of an expectation, which no middleware sees, is an error as all others."""
        if isinstance(resp, web.HTTPExpectationFailed):
            cause = "the header Expect may only be 100-continue"
            resp = self.handle_error(request, HTTPStatus.EXPECTATION_FAILED, message=cause)
        return await super().finish_response(request, resp, start_time)


def error(status: int, cause: str = "") -> bytes:
    """Returns the body of an error. The cause of an internal error is not shown."""
    phrase = HTTPStatus(status).phrase.lower()
    message = f"{phrase}: {cause}" if cause and status < 500 else phrase
    kind = "invalid_request_error" if status < 500 else "server_error"
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": None}}).encode()


def ending(status: int, cause: str) -> bytes:
    """Returns a whole response for a connection that is closed before a request has arrived."""
    body = error(status, cause)
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nConnection: close\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nRetry-After: 1\r\n\r\n"
    )
    return head.encode() + body
