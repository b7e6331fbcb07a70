"""Asks servers with only an OpenAI API for their models and health."""

from __future__ import annotations

import os
from http import HTTPStatus

import aiohttp
import msgspec
from kvrouter.v1.registry_pb2 import WorkerRegistration


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


_MODELS = msgspec.json.Decoder(_Models)
_MAX_BODY_BYTES = 4 << 20


class Unanswered(Exception):
    """The server does not answer as a live one does. The message describes its answer."""


def is_openai_server(worker: WorkerRegistration) -> bool:
    """Returns whether a worker has an OpenAI API and no WorkerService: its endpoint is the URL of the API."""
    return bool(worker.openai_endpoint) and worker.endpoint == worker.openai_endpoint


def connection_failure(error: Exception) -> str:
    """Returns why aiohttp could not connect or lost the connection: ``connection refused at host:port``."""
    match error:
        case aiohttp.ClientConnectorError():
            return f"{os_error_words(error.os_error)} at {error.host}:{error.port}"
        case aiohttp.ServerDisconnectedError():
            return "closed without a response"
        case aiohttp.ClientPayloadError():
            return "closed within a response"
        case aiohttp.ClientOSError():
            return os_error_words(error)
        case TimeoutError():
            return "no answer in time"
    return str(error) or type(error).__name__


def os_error_words(error: OSError) -> str:
    """Returns the cause of an error. The event loop's own text names the call only: Connect call failed."""
    return os.strerror(error.errno).lower() if error.errno and error.errno > 0 else error.strerror or str(error)


async def served_models(
    session: aiohttp.ClientSession, url: str, *, timeout_seconds: float
) -> tuple[int, list[str] | None]:
    """Returns the HTTP status of a live server, and its models; None if it lists none, for example without a key.

    Raises:
        Unanswered: it cannot be reached, or answers with a server error.
    """
    timeout = aiohttp.ClientTimeout(total=timeout_seconds)
    try:
        async with session.get(f"{url}/v1/models", timeout=timeout) as answer:
            if answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                raise Unanswered(f"it answers {answer.status} to GET /v1/models")
            body = await answer.content.read(_MAX_BODY_BYTES) if answer.status == HTTPStatus.OK else b""
    except (aiohttp.ClientError, TimeoutError) as error:
        raise Unanswered(f"it cannot be reached: {connection_failure(error)}") from None
    try:
        return answer.status, [model.id for model in _MODELS.decode(body).data] if body else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return answer.status, None


_ANSWER = aiohttp.ClientTimeout(total=0.5)
"""Longest wait for an answer. The request waits meanwhile for its next attempt."""


async def is_alive(session: aiohttp.ClientSession, url: str) -> bool:
    """Returns False if an engine refuses connections, or says at ``/health`` it has failed.

    The server of a vLLM whose engine has died lives a moment longer. A late answer says nothing.
    """
    try:
        async with session.get(f"{url.rstrip('/')}/health", timeout=_ANSWER) as answer:
            return answer.status < HTTPStatus.INTERNAL_SERVER_ERROR
    except TimeoutError:
        return True
    except aiohttp.ClientError:
        return False
