"""Messages to a gateway, whose headers are encoded without protobuf."""

from __future__ import annotations

from envoy.config.core.v3.base_pb2 import HeaderValue, HeaderValueOption
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from hypothesis import given, strategies as st
from kvrouter.frontend.proxy.endpoint_picker import responses
from kvrouter.frontend.proxy.endpoint_picker.responses import DESTINATION

NAMES = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=200)
VALUES = st.text(st.characters(codec="utf-8"), max_size=40) | st.sampled_from(["a" * 127, "a" * 128, "a" * 20_000])
HEADERS = st.dictionaries(NAMES, VALUES, max_size=6)
REMOVED = st.lists(NAMES, max_size=3)
ENDPOINTS = st.lists(st.sampled_from(["10.0.0.1:8000", "[::1]:1"]), min_size=1, max_size=3)


def changes(added: dict[str, str], removed: list[str]) -> pb.HeaderMutation:
    replaces = HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
    options = [
        HeaderValueOption(header=HeaderValue(key=name.lower(), raw_value=value.encode()), append_action=replaces)
        for name, value in added.items()
    ]
    return pb.HeaderMutation(set_headers=options, remove_headers=removed)


def routed(endpoints: list[str], added: dict[str, str], removed: list[str]) -> tuple[pb.CommonResponse, str]:
    named = ",".join(endpoints)
    mutation = changes({DESTINATION: named, **added}, removed)
    return pb.CommonResponse(header_mutation=mutation, clear_route_cache=True), named


def parsed(answer: bytes) -> pb.ProcessingResponse:
    return pb.ProcessingResponse.FromString(answer)


@given(ENDPOINTS, HEADERS, REMOVED)
def test_a_route_is_the_message_of_protobuf(endpoints: list[str], added: dict[str, str], removed: list[str]) -> None:
    common, named = routed(endpoints, added, removed)
    expected = pb.ProcessingResponse(request_headers=pb.HeadersResponse(response=common))
    expected.dynamic_metadata.update({"envoy.lb": {DESTINATION: named}})
    assert parsed(responses.route(endpoints, added, removed)) == expected


@given(ENDPOINTS, HEADERS, REMOVED, st.none() | st.binary(max_size=300))
def test_a_route_of_a_whole_request_is_the_message_of_protobuf(
    endpoints: list[str], added: dict[str, str], removed: list[str], body: bytes | None
) -> None:
    changed = added if body is None else {**added, "content-length": str(len(body))}
    common, named = routed(endpoints, changed, removed)
    if body is not None:
        common.body_mutation.body = body
    expected = pb.ProcessingResponse(request_body=pb.BodyResponse(response=common))
    expected.dynamic_metadata.update({"envoy.lb": {DESTINATION: named}})
    assert parsed(responses.route_whole(endpoints, added, removed, body)) == expected


@given(HEADERS, REMOVED)
def test_headers_of_a_response_are_the_message_of_protobuf(added: dict[str, str], removed: list[str]) -> None:
    common = pb.CommonResponse(header_mutation=changes(added, removed))
    expected = pb.ProcessingResponse(response_headers=pb.HeadersResponse(response=common))
    assert parsed(responses.response_headers(added, removed)) == expected
