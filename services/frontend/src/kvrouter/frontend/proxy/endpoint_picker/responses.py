"""Messages to the gateway, and headers and metadata in its own.

Messages are built in place: one that is passed to the constructor of another is encoded and decoded.

Metadata of the endpoint picker protocol says which endpoints may serve, which should, and which one did.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec
from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValueOption, Metadata
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.struct_pb2 import Value
from kvrouter.frontend.edge.http_errors import error_body
from kvrouter.frontend.edge.request_fields import REQUEST_ID_HEADER
from kvrouter.v1.errors import KvRouterError

DESTINATION = "x-gateway-destination-endpoint"
"""Header and metadata key of the chosen endpoints: the first one serves, the others are fallbacks."""
_LB_NAMESPACE = "envoy.lb"
_SERVED = "x-gateway-destination-endpoint-served"
_FILTER = "envoy.filters.http.ext_proc"
_CODE_DETAILS = "response.code_details"
_REPLACES = HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
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


MAX_PIECE_BYTES = 62 << 10
"""Maximum size of a piece of a body in one message, as Envoy recommends: below 64 KiB."""


def route(
    endpoints: Sequence[str], headers: Mapping[str, str], removed_headers: Iterable[str]
) -> pb.ProcessingResponse:
    """Answers the request's headers: names the endpoints, and sets and removes further headers for the engine."""
    answer = pb.ProcessingResponse()
    _set_route(answer, answer.request_headers.response, endpoints, headers, removed_headers)
    return answer


def route_whole(
    endpoints: Sequence[str], headers: Mapping[str, str], removed_headers: Iterable[str], body: bytes | None
) -> pb.ProcessingResponse:
    """Does the same as the answer to a body the gateway has kept; ``body`` replaces it, None for no change."""
    changed = {} if body is None else {"content-length": str(len(body))}
    answer = pb.ProcessingResponse()
    common = answer.request_body.response
    _set_route(answer, common, endpoints, {**headers, **changed}, removed_headers)
    if body is not None:
        common.body_mutation.body = body
    return answer


def request_body(body: bytes | bytearray, *, end_of_stream: bool) -> list[pb.ProcessingResponse]:
    """Returns the messages that pass a whole request body on, in pieces; without its end if trailers follow."""
    pieces = [bytes(body[start : start + MAX_PIECE_BYTES]) for start in range(0, len(body), MAX_PIECE_BYTES)] or [b""]
    answers = [pb.ProcessingResponse() for _ in pieces]
    for answer, piece in zip(answers, pieces, strict=True):
        _stream(answer.request_body, piece, end_of_stream=end_of_stream and answer is answers[-1])
    return answers


def request_headers() -> pb.ProcessingResponse:
    """Lets the gateway go on with the body, which it keeps together with the headers."""
    return pb.ProcessingResponse(request_headers=pb.HeadersResponse())


def more_time(seconds: float) -> pb.ProcessingResponse:
    """Tells the gateway the answer to its message takes up to so many seconds."""
    timeout = Duration()
    timeout.FromMilliseconds(int(seconds * 1000))
    return pb.ProcessingResponse(override_message_timeout=timeout)


def request_trailers() -> pb.ProcessingResponse:
    """Passes the request's trailers on."""
    return pb.ProcessingResponse(request_trailers=pb.TrailersResponse())


def response_headers(headers: Mapping[str, str], removed_headers: Iterable[str] = ()) -> pb.ProcessingResponse:
    """Passes the response's headers on, with further ones for the client, and without those removed."""
    answer = pb.ProcessingResponse()
    _change_headers(answer.response_headers.response.header_mutation, headers, removed_headers)
    return answer


_UNCHANGED = pb.ProcessingResponse(response_body=pb.BodyResponse(response=pb.CommonResponse()))
"""Passes a piece of the response on as it is."""


def response_body(piece: bytes, *, is_changed: bool, end_of_stream: bool, full_duplex: bool) -> pb.ProcessingResponse:
    """Passes a piece of the response on. Unless the gateway waits for every piece, only changed ones are sent back."""
    if not (full_duplex or is_changed):
        return _UNCHANGED
    answer = pb.ProcessingResponse()
    if full_duplex:
        _stream(answer.response_body, piece, end_of_stream=end_of_stream)
    else:
        answer.response_body.response.body_mutation.body = piece
    return answer


def response_trailers() -> pb.ProcessingResponse:
    """Passes the response's trailers on."""
    return pb.ProcessingResponse(response_trailers=pb.TrailersResponse())


def refusal(error: KvRouterError, request_id: str) -> pb.ProcessingResponse:
    """Ends the request with an error in the format of the OpenAI API."""
    status, body, headers = error_body(error)
    answer = pb.ProcessingResponse()
    immediate = answer.immediate_response
    immediate.status.code = status
    _change_headers(
        immediate.headers, {"content-type": "application/json", REQUEST_ID_HEADER: request_id} | headers, ()
    )
    immediate.body = msgspec.json.encode(body)
    immediate.details = f"kvrouter_{error.code.name.lower()}"
    return answer


def _stream(body: pb.BodyResponse, piece: bytes, *, end_of_stream: bool) -> None:
    streamed = body.response.body_mutation.streamed_response
    streamed.body, streamed.end_of_stream = piece, end_of_stream


def _set_route(
    answer: pb.ProcessingResponse,
    common: pb.CommonResponse,
    endpoints: Sequence[str],
    headers: Mapping[str, str],
    removed_headers: Iterable[str],
) -> None:
    named = ",".join(endpoints)
    _change_headers(common.header_mutation, {DESTINATION: named, **headers}, removed_headers)
    common.clear_route_cache = True
    answer.dynamic_metadata.fields[_LB_NAMESPACE].struct_value.fields[DESTINATION].string_value = named


def _change_headers(mutation: pb.HeaderMutation, added: Mapping[str, str], removed: Iterable[str]) -> None:
    mutation.SetInParent()
    for name, value in added.items():
        option = mutation.set_headers.add(append_action=_REPLACES)
        header = option.header
        header.key, header.raw_value = name.lower(), value.encode()
    mutation.remove_headers.extend(removed)
