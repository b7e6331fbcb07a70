"""Messages to the gateway, and headers and metadata in its own.

Messages to the gateway are returned encoded. Only what differs between requests is encoded for each of them.

Metadata of the endpoint picker protocol says which endpoints may serve, which should, and which one did.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache

import msgspec
from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue, HeaderValueOption, Metadata
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.struct_pb2 import Value
from kvrouter.frontend.edge.http_errors import error_body
from kvrouter.frontend.edge.request_fields import REQUEST_ID_HEADER
from kvrouter.net.wire_format import encode_field, tag
from kvrouter.v1.errors import KvRouterError

DESTINATION = "x-gateway-destination-endpoint"
"""Header and metadata key of the chosen endpoints: the first one serves, the others are fallbacks."""
_LB_NAMESPACE = "envoy.lb"
_SERVED = "x-gateway-destination-endpoint-served"
_FILTER = "envoy.filters.http.ext_proc"
_CODE_DETAILS = "response.code_details"
_REPLACES = HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
_AFTER_VALUE: bytes = HeaderValueOption(append_action=_REPLACES).SerializeToString()
"""What follows the value in an encoded header."""
_SUBSET_NAMESPACE = "envoy.lb.subset_hint"
_SUBSET = "x-gateway-destination-endpoint-subset"


def allowed_endpoints(metadata: Metadata) -> frozenset[str] | None:
    """Returns the endpoints the gateway allows for a request, as host:port; None if it allows all."""
    namespace = metadata.filter_metadata.get(_SUBSET_NAMESPACE)
    if namespace is None or _SUBSET not in namespace.fields:
        return None
    return frozenset(_texts(namespace.fields[_SUBSET]))


def served_endpoint(metadata: Metadata) -> str:
    """Returns the endpoint that served a request, host:port; empty if the gateway does not report it."""
    namespace = metadata.filter_metadata.get(_LB_NAMESPACE)
    if namespace is None or _SERVED not in namespace.fields:
        return ""
    return str(namespace.fields[_SERVED].string_value)


def code_details(message: ProcessingRequest) -> str:
    """Returns who made a response, and why, as Envoy says it; empty if the gateway does not send that attribute."""
    attributes = message.attributes.get(_FILTER)
    if attributes is None or _CODE_DETAILS not in attributes.fields:
        return ""
    return str(attributes.fields[_CODE_DETAILS].string_value)


def _texts(value: Value) -> list[str]:
    """Returns the endpoints of a list, or of a text with commas: gateways send either."""
    if "list_value" in value:
        return [text for item in value.list_value.values for text in _texts(item)]
    return [text.strip() for text in value.string_value.split(",") if text.strip()]


def header_list(headers: HeaderMap) -> list[tuple[str, str]]:
    """Returns names in lower case and values, with repeated headers."""
    return [
        (each.key.lower(), each.raw_value.decode("utf-8", "surrogateescape") or each.value) for each in headers.headers
    ]


_REQUEST_HEADERS = tag(pb.ProcessingResponse, "request_headers")
_RESPONSE_HEADERS = tag(pb.ProcessingResponse, "response_headers")
_REQUEST_BODY = tag(pb.ProcessingResponse, "request_body")
_RESPONSE = tag(pb.HeadersResponse, "response")
"""It is the same in a BodyResponse."""
_HEADER_MUTATION = tag(pb.CommonResponse, "header_mutation")
_CLEAR_ROUTE_CACHE: bytes = pb.CommonResponse(clear_route_cache=True).SerializeToString()

MAX_PIECE_BYTES = 62 << 10
"""Maximum size of a piece of a body in one message, as Envoy recommends: below 64 KiB."""


def route(endpoints: Sequence[str], headers: Mapping[str, str], removed_headers: Collection[str]) -> bytes:
    """Answers the request's headers: names the endpoints, and sets and removes further headers for the engine."""
    return _routed(_REQUEST_HEADERS, endpoints, headers, removed_headers)


def route_whole(
    endpoints: Sequence[str], headers: Mapping[str, str], removed_headers: Collection[str], body: bytes | None
) -> bytes:
    """Does the same as the answer to a body the gateway has kept; ``body`` replaces it, None for no change."""
    if body is None:
        return _routed(_REQUEST_BODY, endpoints, headers, removed_headers)
    changed = {**headers, "content-length": str(len(body))}
    mutation = pb.CommonResponse(body_mutation=pb.BodyMutation(body=body)).SerializeToString()
    return _routed(_REQUEST_BODY, endpoints, changed, removed_headers, mutation)


def request_body(body: bytes | bytearray, *, end_of_stream: bool) -> list[bytes]:
    """Returns the messages that pass a whole request body on, in pieces; without its end if trailers follow."""
    pieces = [bytes(body[start : start + MAX_PIECE_BYTES]) for start in range(0, len(body), MAX_PIECE_BYTES)] or [b""]
    answers = [pb.ProcessingResponse() for _ in pieces]
    for answer, piece in zip(answers, pieces, strict=True):
        _stream(answer.request_body, piece, end_of_stream=end_of_stream and answer is answers[-1])
    return [answer.SerializeToString() for answer in answers]


REQUEST_HEADERS: bytes = pb.ProcessingResponse(request_headers=pb.HeadersResponse()).SerializeToString()
"""Lets the gateway go on with the body, which it keeps together with the headers."""
REQUEST_TRAILERS: bytes = pb.ProcessingResponse(request_trailers=pb.TrailersResponse()).SerializeToString()
"""Passes the request's trailers on."""
RESPONSE_TRAILERS: bytes = pb.ProcessingResponse(response_trailers=pb.TrailersResponse()).SerializeToString()
"""Passes the response's trailers on."""


def more_time(seconds: float) -> bytes:
    """Tells the gateway the answer to its message takes up to so many seconds."""
    timeout = Duration()
    timeout.FromMilliseconds(int(seconds * 1000))
    return _encoded(pb.ProcessingResponse(override_message_timeout=timeout))


def response_headers(headers: Mapping[str, str], removed_headers: Collection[str] = ()) -> bytes:
    """Passes the response's headers on, with further ones for the client, and without those removed."""
    mutation = encode_field(_HEADER_MUTATION, _header_mutation(headers, removed_headers))
    return encode_field(_RESPONSE_HEADERS, encode_field(_RESPONSE, mutation))


_UNCHANGED: bytes = pb.ProcessingResponse(
    response_body=pb.BodyResponse(response=pb.CommonResponse())
).SerializeToString()
"""Passes a piece of the response on as it is."""


def response_body(piece: bytes, *, is_changed: bool, end_of_stream: bool, full_duplex: bool) -> bytes:
    """Passes a piece of the response on. Unless the gateway waits for every piece, only changed ones are sent back."""
    if not (full_duplex or is_changed):
        return _UNCHANGED
    answer = pb.ProcessingResponse()
    if full_duplex:
        _stream(answer.response_body, piece, end_of_stream=end_of_stream)
    else:
        answer.response_body.response.body_mutation.body = piece
    return _encoded(answer)


def refusal(error: KvRouterError, request_id: str) -> bytes:
    """Ends the request with an error in the format of the OpenAI API."""
    status, body, headers = error_body(error)
    added = {"content-type": "application/json", REQUEST_ID_HEADER: request_id} | headers
    answer = pb.ProcessingResponse()
    immediate = answer.immediate_response
    immediate.status.code = status
    immediate.headers.MergeFromString(_header_mutation(added, ()))
    immediate.body = msgspec.json.encode(body)
    immediate.details = f"kvrouter_{error.code.name.lower()}"
    return _encoded(answer)


def _encoded(answer: pb.ProcessingResponse) -> bytes:
    encoded: bytes = answer.SerializeToString()
    return encoded


def _stream(body: pb.BodyResponse, piece: bytes, *, end_of_stream: bool) -> None:
    streamed = body.response.body_mutation.streamed_response
    streamed.body, streamed.end_of_stream = piece, end_of_stream


def _routed(
    answer_tag: bytes,
    endpoints: Sequence[str],
    headers: Mapping[str, str],
    removed: Collection[str],
    body_mutation: bytes = b"",
) -> bytes:
    named = ",".join(endpoints)
    destination = named.encode()
    mutation = encode_field(_HEADER_MUTATION, _header_mutation({DESTINATION: named, **headers}, removed))
    common = encode_field(_RESPONSE, mutation + body_mutation + _CLEAR_ROUTE_CACHE)
    return b"".join((encode_field(answer_tag, common), _before_destination(len(destination)), destination))


@lru_cache(1024)
def _before_destination(value_bytes: int) -> bytes:
    """Returns what precedes endpoints of that size in encoded metadata, whose last bytes they are."""
    answer = pb.ProcessingResponse()
    answer.dynamic_metadata.fields[_LB_NAMESPACE].struct_value.fields[DESTINATION].string_value = "x" * value_bytes
    return _encoded(answer)[: -value_bytes or None]


def _header_mutation(added: Mapping[str, str], removed: Collection[str]) -> bytes:
    parts: list[bytes] = []
    for name, value in added.items():
        encoded = value.encode()
        parts += (_before_value(name, len(encoded)), encoded, _AFTER_VALUE)
    if removed:
        parts.append(pb.HeaderMutation(remove_headers=removed).SerializeToString())
    return b"".join(parts)


@lru_cache(1024)
def _before_value(name: str, value_bytes: int) -> bytes:
    """Returns what precedes a value of that size in an encoded header."""
    header = HeaderValue(key=name.lower(), raw_value=bytes(value_bytes))
    option = HeaderValueOption(header=header, append_action=_REPLACES)
    encoded: bytes = pb.HeaderMutation(set_headers=[option]).SerializeToString()
    return encoded[: len(encoded) - value_bytes - len(_AFTER_VALUE)]
