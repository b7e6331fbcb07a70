"""The request to an engine: its body and headers, and the connection on which it is sent or fails.

- Of a client with a key, the engine gets harmless headers and fields only, and the keyed salt.
- A prefill engine gets the body with ``max_tokens`` 1, not streamed. vLLM's gets ``kv_transfer_params`` with
  ``do_remote_decode``, and its response has those of the decode engine. SGLang's engines get the same bootstrap fields.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from typing import Any

import aiohttp
import msgspec
from kvrouter.engines.fields import HARMLESS_HEADERS, ROUTED, START_OF_VLLM_TRANSFER, VLLM_TRANSFER, has_salt
from kvrouter.engines.openai_server import connection_failure
from kvrouter.engines.routes import serves
from kvrouter.frontend.access.access import Access
from kvrouter.frontend.access.rules import check_engine_request
from kvrouter.frontend.edge.token_list import encode_token_ids
from kvrouter.frontend.proxy.routed_body import RoutedBody
from kvrouter.frontend.text.client_work import ClientWork
from kvrouter.net import trace_context
from kvrouter.net.budgets import loop_budget
from kvrouter.net.calls import NotSent
from kvrouter.runtime.discovery.directory import ComponentView
from kvrouter.v1.errors import DeadlineExceeded, DependencyAway
from kvrouter.v1.worker_pb2 import TransferParams

_CONNECT_SECONDS = 10.0
_CHUNK_US = 60
"""CPU time to pass a chunk of a response on, microseconds."""
_BYTES_PER_US = 50
_MAX_FAILURE_BYTES = 64 << 10
"""Maximum size of an engine's error, bytes."""
_NOT_SENT = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, aiohttp.InvalidURL)
_BROKEN = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError)


class EngineFailed(Exception):
    """An engine failed a request it had received: it broke the connection, or answered with an error."""


@asynccontextmanager
async def posted(
    session: aiohttp.ClientSession, url: str, *, data: bytes, headers: dict[str, Any], seconds: float | None
) -> AsyncIterator[aiohttp.ClientResponse]:
    """Sends a request to an engine; yields the response, whose body ``chunks`` reads.

    Args:
        session: Open connections.
        url: URL of the engine's API.
        data: The body.
        headers: The headers.
        seconds: Time until the end of the response; None for any.

    Raises:
        NotSent: the engine cannot be connected to.
        EngineFailed: the connection ended before the head of the response.
        DependencyAway: the response is not HTTP.
        DeadlineExceeded: the time is over.
    """
    timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=_CONNECT_SECONDS)
    try:
        answer = await session.post(url, data=data, headers=headers, timeout=timeout)
    except _NOT_SENT as error:
        raise NotSent(f"its OpenAI API cannot be reached: {connection_failure(error)}") from None
    except (aiohttp.ClientError, TimeoutError) as error:
        raise _failure(error) from None
    async with answer:
        yield answer


async def chunks(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yields a response in parts, each in its turn on the event loop.

    Raises:
        EngineFailed, DependencyAway, DeadlineExceeded: as for ``posted``.
    """
    try:
        async for chunk in answer.content.iter_any():
            await loop_budget().turn(_CHUNK_US + len(chunk) // _BYTES_PER_US)
            yield chunk
    except (aiohttp.ClientError, TimeoutError) as error:
        raise _failure(error) from None


async def failure_body(answer: aiohttp.ClientResponse) -> bytes:
    """Returns the body of an engine's error, of which a bounded part is read.

    Raises:
        EngineFailed, DependencyAway, DeadlineExceeded: as for ``posted``.
    """
    body = bytearray()
    try:
        while len(body) < _MAX_FAILURE_BYTES and (part := await answer.content.read(_MAX_FAILURE_BYTES - len(body))):
            body += part
    except (aiohttp.ClientError, TimeoutError) as error:
        raise _failure(error) from None
    return bytes(body)


def _failure(error: Exception) -> EngineFailed | DependencyAway | DeadlineExceeded:
    # A timeout is a ClientConnectionError, too, if it is that of a socket.
    if isinstance(error, TimeoutError):
        return DeadlineExceeded("its OpenAI API has not answered in time")
    if isinstance(error, _BROKEN):
        return EngineFailed(f"its OpenAI API broke the connection: {connection_failure(error)}")
    return DependencyAway(f"its OpenAI API does not answer: {connection_failure(error)}")


_SEVERAL = re.compile(rb'\[\s*["\[]')
_ONE_TOKEN = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_OF_OUTPUT = ("stream_options", "min_tokens", "min_completion_tokens")
_MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class _Shape(msgspec.Struct):
    prompt: msgspec.Raw = msgspec.Raw()
    n: int | None = None
    best_of: int | None = None
    kv_transfer_params: Any = None
    bootstrap_room: Any = None


class _Response(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw()


_SHAPE = msgspec.json.Decoder(_Shape, strict=False)
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_RESPONSE = msgspec.json.Decoder(_Response)


def can_share(body: bytes) -> bool:
    """Returns whether a prefill and a decode engine can share it: one prompt, one sequence, no transfer of its own."""
    try:
        shape = _SHAPE.decode(body)
    except _MALFORMED:
        return False
    if max(shape.n or 1, shape.best_of or 1) > 1 or _SEVERAL.match(bytes(shape.prompt)):
        return False
    return shape.kv_transfer_params is None and shape.bootstrap_room is None


def prefill_body(body: bytes, params: TransferParams | None) -> bytes:
    """Returns the body for the prefill engine; ``params`` are set if both engines run at the same time."""
    fields = {name: value for name, value in _FIELDS.decode(body).items() if name not in _OF_OUTPUT}
    limits = [name for name in _ONE_TOKEN if name in fields] or ["max_tokens"]
    fields |= dict.fromkeys(limits, msgspec.Raw(b"1"))
    fields["stream"] = msgspec.Raw(b"false")
    if params is None:
        fields["kv_transfer_params"] = msgspec.Raw(json.dumps(START_OF_VLLM_TRANSFER).encode())
    return decode_body(msgspec.json.encode(fields), params)


def decode_body(body: bytes, params: TransferParams | None) -> bytes:
    """Returns the body for the decode engine: the client's with the transfer parameters, if there are any."""
    if params is None:
        return body
    payload = params.payload.strip()
    is_vllm = params.format == VLLM_TRANSFER
    return _with_fields(body, b'"kv_transfer_params":' + payload if is_vllm else payload[1:-1])


def with_token_ids(body: bytes, token_ids: bytes) -> bytes:
    """Returns the body of a completion with token ids, a packed buffer, in the place of its prompt."""
    return msgspec.json.encode(_FIELDS.decode(body) | {"prompt": encode_token_ids(token_ids)})


def transfer_params(response: bytes | bytearray) -> TransferParams | None:
    """Returns the parameters for the decode engine in a response of the prefill engine; None if there are none."""
    try:
        payload = bytes(_RESPONSE.decode(response).kv_transfer_params)
    except _MALFORMED:
        return None
    return TransferParams(format=VLLM_TRANSFER, payload=payload) if payload not in (b"", b"null") else None


def _with_fields(body: bytes, fields: bytes) -> bytes:
    start = body.index(b"{") + 1
    return b"%b%b,%b" % (body[:start], fields, body[start:])


_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])


async def permitted(
    access: Access | None, routed: RoutedBody, body: bytes | bytearray, path: str, work: ClientWork
) -> tuple[RoutedBody, bytes]:
    """Returns the fields for routing and the body for the engine, after checking the caller's permissions.

    The body is encoded again, so the engine reads the checked fields: each field once, its name without escapes.

    Args:
        access: Authentication; None if everybody may send everything, unchanged.
        routed: The fields for routing.
        body: A JSON object.
        path: Path of the engine's API.
        work: Checks a long body, when it is the tenant's turn.

    Raises:
        Unauthenticated, PermissionDenied: the caller may not use the model, the priority or a field.
        RateLimited, Overloaded: too much of the caller's or of all callers' work waits.
    """
    if access is None:
        return routed, bytes(body)
    check = partial(copy_context().run, _permitted, access, routed, body, path)
    return await work.run_body(check, size=len(body))


def check_salted(access: Access, routed: RoutedBody, views: Iterable[ComponentView]) -> None:
    """Checks that a model has a worker whose engine separates caches by salt, if the tenant is isolated.

    Raises:
        PermissionDenied: it has none.
    """
    workers = [worker for view in views for worker in view.workers.values()] if routed.salted_path else []
    if workers and not any(map(routed.may_run_at, workers)):
        access.refuse_unsalted(routed.model, routed.salted_path)


def serves_itself(access: Access | None, path: str, views: Iterable[ComponentView]) -> bool:
    """Returns whether all engines of a model serve a path, apart for each isolated tenant if the caller's is one."""
    workers = [worker for view in views for worker in view.workers.values()]
    isolated = access is not None and access.caller().isolated
    return all(serves(each.engine, path) and (not isolated or has_salt(each.engine, path)) for each in workers)


def _permitted(access: Access, routed: RoutedBody, body: bytes | bytearray, path: str) -> tuple[RoutedBody, bytes]:
    fields = _OBJECT.decode(body)
    caller = access.enforce(
        lambda each: check_engine_request(each, routed.model, routed.priority, access.fields, path, fields),
        "engine request",
    )
    salt = routed.cache_salt if access.salts is None else access.salts.of(caller.cache_tenant, routed.cache_salt)
    kept = {name: value for name, value in fields.items() if name not in ROUTED}
    if salt:
        kept["cache_salt"] = msgspec.Raw(msgspec.json.encode(salt))
    return replace(routed, cache_salt=salt, salted_path=path if caller.isolated else ""), msgspec.json.encode(kept)


_OF_CONNECTIONS = frozenset({"host", "content-length", "transfer-encoding", "connection", "te", "x-request-id"})
"""Headers a gateway sets for its own connection, or whose value is checked apart."""
_OF_GATEWAYS = (":", "x-forwarded-", "x-envoy-")
_REQUEST_ID = re.compile(r"(?!.*__)[A-Za-z0-9._:~-]{1,128}")
"""Ids engines get. A connector of vLLM reads addresses from ids, marked by several underscores."""


def may_reach_engine(name: str) -> bool:
    """Returns whether an engine may get a header, by its name in lower case, behind a gateway."""
    return (
        name in HARMLESS_HEADERS
        or name in _OF_CONNECTIONS
        or name in trace_context.HEADERS
        or name.startswith(_OF_GATEWAYS)
    )


def engine_request_id(request_id: str) -> str:
    """Returns a request's id for an engine; empty if it could mean more to it than an id."""
    return request_id if _REQUEST_ID.fullmatch(request_id) else ""
