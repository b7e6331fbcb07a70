"""The request to an engine: its body and headers.

- Of a client with a key, the engine gets harmless headers and fields only, and the keyed salt.
- A prefill engine gets the body with ``max_tokens`` 1, not streamed. vLLM's gets ``kv_transfer_params`` with
  ``do_remote_decode``, and its response has those of the decode engine. SGLang's engines get the same bootstrap fields.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from contextvars import copy_context
from typing import Any

import msgspec
from kvrouter.engines.fields import HARMLESS_HEADERS, ROUTED, START_OF_VLLM_TRANSFER, VLLM_TRANSFER, has_salt
from kvrouter.engines.routes import serves
from kvrouter.frontend.access.access import Access
from kvrouter.frontend.access.rules import check_engine_request
from kvrouter.frontend.edge.token_list import encode_token_ids
from kvrouter.frontend.proxy.engine_response import MALFORMED
from kvrouter.frontend.proxy.routed_body import RoutedBody
from kvrouter.frontend.text.client_work import ClientWork
from kvrouter.net import trace_context
from kvrouter.runtime.discovery.directory import ComponentView
from kvrouter.v1.worker_pb2 import TransferParams
from msgspec.structs import replace

_SEVERAL = re.compile(rb'\[\s*["\[]')
_ONE_TOKEN = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_OF_OUTPUT = ("stream_options", "min_tokens", "min_completion_tokens")


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
    except MALFORMED:
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
    fields = b'"kv_transfer_params":' + payload if params.format == VLLM_TRANSFER else payload[1:-1]
    start = body.index(b"{") + 1
    return b"%b%b,%b" % (body[:start], fields, body[start:])


def with_token_ids(body: bytes, token_ids: bytes) -> bytes:
    """Returns the body of a completion with token ids, a packed buffer, in the place of its prompt."""
    return msgspec.json.encode(_FIELDS.decode(body) | {"prompt": encode_token_ids(token_ids)})


def transfer_params(response: bytes | bytearray) -> TransferParams | None:
    """Returns the parameters for the decode engine in a response of the prefill engine; None if there are none."""
    try:
        payload = bytes(_RESPONSE.decode(response).kv_transfer_params)
    except MALFORMED:
        return None
    return TransferParams(format=VLLM_TRANSFER, payload=payload) if payload not in (b"", b"null") else None


async def permitted(
    access: Access, routed: RoutedBody, body: bytes | bytearray, path: str, work: ClientWork
) -> tuple[RoutedBody, bytes]:
    """Returns the fields for routing and the body for the engine, after checking the caller's permissions.

    The body is encoded again, so the engine reads the checked fields: each field once, its name without escapes.

    Args:
        access: Authentication.
        routed: The fields for routing.
        body: A JSON object.
        path: Path of the engine's API.
        work: Checks a long body, when it is the tenant's turn.

    Raises:
        Unauthenticated, PermissionDenied: the caller may not use the model, the priority or a field.
        RateLimited, Overloaded: too much of the caller's or of all callers' work waits.
    """
    context = copy_context()
    return await work.read(lambda each: context.run(_permitted, access, routed, each, path), body)


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
    fields = _FIELDS.decode(body)
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
