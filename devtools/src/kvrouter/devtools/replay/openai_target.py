"""Sends requests of a trace to any server with the OpenAI completions API. Times are those of this client's clock."""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
from kvrouter.devtools.replay.records import RequestRecord
from kvrouter.devtools.traces.reader import TraceRequest
from kvrouter.net.tls import Tls

_DATA = b"data:"
_END = b"[DONE]"
_MAX_EVENT_BYTES = 16 << 20
_WORKER_HEADER = "x-kvrouter-worker"
_MAX_MESSAGE = 300


class TargetFailed(Exception):
    """The server does not answer, or does not serve the model. The message says what to do."""


class _Choice(msgspec.Struct, frozen=True):
    text: str | None = None
    token_ids: list[int] | None = None


class _CachedTokens(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, frozen=True):
    completion_tokens: int | None = None
    prompt_tokens_details: _CachedTokens | None = None


class _Event(msgspec.Struct, frozen=True):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_EVENT = msgspec.json.Decoder(_Event)


@dataclass(frozen=True, slots=True)
class OpenAiOptions:
    """How requests are made from the trace."""

    url: str
    """URL of the server, with or without /v1."""
    model: str
    """Model of the requests."""
    api_key: str = ""
    """Key for the header Authorization; empty for none."""
    tls: Tls | None = None
    """Certificates for an https URL; None for the system's authorities."""
    vocabulary: int = 1 << 16
    """Number of token ids: prompts use ids below it."""
    ignore_eos: bool = True
    """Whether outputs have the trace's length, by an extension that vLLM, SGLang and kvrouter know."""
    cache_salt: str = ""
    """Cache salt of all requests; empty for none."""
    request_timeout_seconds: float = 600.0
    """Time after which a request is abandoned, above 0."""


class OpenAiTarget:
    """A server with the OpenAI completions API. Made by ``openai_target``."""

    def __init__(self, session: aiohttp.ClientSession, options: OpenAiOptions) -> None:
        self._session = session
        self._options = options

    def prepare(self, request: TraceRequest) -> bytes:
        """Returns the body for a request: a prompt of token ids, a stream, and usage at its end."""
        options = self._options
        body: dict[str, Any] = {
            "model": options.model,
            "prompt": _within(request.tokens(), options.vocabulary),
            "max_tokens": request.output_length,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if options.ignore_eos:
            body["ignore_eos"] = True
        if options.cache_salt:
            body["cache_salt"] = options.cache_salt
        return msgspec.json.encode(body)

    async def send(self, prepared: bytes, record: RequestRecord) -> None:
        """Sends a request and fills its record. A failure is recorded with its HTTP status or kind."""
        sent = time.perf_counter()
        try:
            async with self._session.post("v1/completions", data=prepared) as response:
                if response.status != 200:
                    record.fail(f"HTTP_{response.status}", _message(await response.read()))
                    return
                record.worker = _worker(response.headers)
                await self._read(response, sent, record)
        except TimeoutError:
            record.fail("TIMEOUT", f"no end after {self._options.request_timeout_seconds:g} s")
        except (aiohttp.ClientError, ValueError) as error:
            record.fail("CONNECTION", f"{type(error).__name__}: {error}"[:_MAX_MESSAGE])

    async def _read(self, response: aiohttp.ClientResponse, sent: float, record: RequestRecord) -> None:
        async for line in response.content:
            if not line.startswith(_DATA):
                continue
            data = line[len(_DATA) :].strip()
            if data == _END:
                return
            event = _EVENT.decode(data)
            if event.error is not None:
                record.fail("STREAM", str(event.error)[:_MAX_MESSAGE])
                return
            tokens = sum(_tokens(choice) for choice in event.choices)
            if tokens:
                record.take_tokens(time.perf_counter() - sent, tokens)
            if event.usage is not None:
                record.output_tokens = event.usage.completion_tokens or record.output_tokens
                details = event.usage.prompt_tokens_details
                record.cached_tokens = None if details is None else details.cached_tokens
        record.fail("UNFINISHED", "the stream ended without [DONE]")


@asynccontextmanager
async def openai_target(options: OpenAiOptions) -> AsyncIterator[OpenAiTarget]:
    """Yields a target with connections of its own, one for each running request."""
    async with _session(options.url, options.api_key, options.request_timeout_seconds, options.tls) as session:
        yield OpenAiTarget(session, options)


async def served_models(
    url: str, api_key: str, *, timeout_seconds: float = 10.0, tls: Tls | None = None
) -> dict[str, int]:
    """Returns the models that a server lists, with the number of their workers; 0 if it does not say.

    Raises:
        TargetFailed: it does not answer as the OpenAI API does.
    """
    try:
        async with _session(url, api_key, timeout_seconds, tls) as session, session.get("v1/models") as response:
            body = await response.read()
            if response.status != 200:
                raise TargetFailed(f"{url} answered {response.status} to GET /v1/models: {_message(body)}")
            listed = json.loads(body)["data"]
            return {str(model["id"]): int(model.get("workers") or 0) for model in listed}
    except (aiohttp.ClientError, TimeoutError) as error:
        raise TargetFailed(f"{url} does not answer: {type(error).__name__} {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise TargetFailed(f"{url} does not list its models at /v1/models: is it an OpenAI server?") from None


def _session(url: str, api_key: str, timeout_seconds: float, tls: Tls | None) -> aiohttp.ClientSession:
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    return aiohttp.ClientSession(
        f"{url.rstrip('/').removesuffix('/v1')}/",
        headers=headers,
        connector=aiohttp.TCPConnector(limit=0, ssl=True if tls is None else tls.client_context()),
        timeout=aiohttp.ClientTimeout(total=timeout_seconds),
        read_bufsize=_MAX_EVENT_BYTES,
    )


def _within(tokens: array[int], vocabulary: int) -> list[int]:
    return [token % vocabulary for token in tokens]


def _tokens(choice: _Choice) -> int:
    """Returns the tokens of a piece. Without token ids it is one: servers send a piece for each step."""
    if choice.token_ids is not None:
        return len(choice.token_ids)
    return int(bool(choice.text))


def _worker(headers: Mapping[str, str]) -> tuple[int, int] | None:
    """Returns the worker that a router names in its response; None if it names none."""
    worker_id, _, dp_rank = headers.get(_WORKER_HEADER, "").partition(":")
    return (int(worker_id), int(dp_rank)) if worker_id.isdigit() and dp_rank.isdigit() else None


def _message(body: bytes) -> str:
    """Returns the message of an error body; the beginning of the body if it has another form."""
    try:
        return str(json.loads(body)["error"]["message"])[:_MAX_MESSAGE]
    except (ValueError, KeyError, TypeError):
        return body[:_MAX_MESSAGE].decode("utf-8", "replace")
