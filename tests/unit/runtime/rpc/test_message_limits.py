"""What a message may hold is checked on its encoding, before a parser makes many times as much of it."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from google.protobuf.message import Message
from hypothesis import given, strategies as st
from kvrouter.v1.common_pb2 import LocalHashes, MultimodalHash, RankState, RoutingConstraints, RoutingRequest, TokenIds
from kvrouter.v1.frontend_pb2 import FrontendServiceGenerateRequest, FrontendServiceSelectWorkerRequest
from kvrouter.v1.indexer_pb2 import FindMatchesRequest, LoadRequest
from kvrouter.v1.message_limits import (
    DEFAULT_LIMITS,
    LONG_FIELDS,
    SMALL_BYTES,
    InvalidMessage,
    MessageLimits,
    TooManyElements,
)
from kvrouter.v1.scheduler_pb2 import BookingUpdate, ReassertBooking, SelectWorkerRequest, UpdateBookingsRequest
from kvrouter.v1.worker_pb2 import StopConditions, WorkerServiceGenerateRequest

MANY = 300_000


def routing(count: int = MANY) -> RoutingRequest:
    return RoutingRequest(model="m", token_ids=TokenIds(ids=range(count)))


SOUND: list[Message] = [
    FrontendServiceGenerateRequest(
        model="m", token_ids=TokenIds(ids=range(MANY)), multimodal_hashes=[MultimodalHash(hash=1)] * 4096
    ),
    WorkerServiceGenerateRequest(token_ids=range(MANY), stop_conditions=StopConditions(stop_token_ids=range(100))),
    FrontendServiceSelectWorkerRequest(request=routing()),
    SelectWorkerRequest(request=routing()),
    UpdateBookingsRequest(updates=[BookingUpdate(reassert=ReassertBooking(sequence_hashes=range(MANY)))]),
    FindMatchesRequest(local_hashes=LocalHashes(hashes=range(MANY))),
    LoadRequest(state=RankState(blocks=[{"engine_hash": 1, "local_hash": 2, "sequence_hash": 3}] * 4096)),
]


@pytest.mark.parametrize("message", SOUND, ids=lambda message: message.DESCRIPTOR.name)
def test_long_lists_of_tokens_and_hashes_are_accepted(message: Message) -> None:
    encoded = message.SerializeToString()
    DEFAULT_LIMITS.check(encoded, type(message))
    MessageLimits(elements=MANY).check(encoded, type(message))


@pytest.mark.parametrize("message", SOUND[:-1], ids=lambda message: message.DESCRIPTOR.name)
def test_elements_of_long_lists_are_counted(message: Message) -> None:
    with pytest.raises(TooManyElements) as caught:
        MessageLimits(elements=MANY - 1).check(message.SerializeToString(), type(message))
    assert (caught.value.count, caught.value.limit) == (MANY, MANY - 1)
    assert caught.value.field.endswith(("token_ids", "token_ids.ids", "hashes"))


def test_elements_of_a_list_that_comes_in_parts_are_counted_together() -> None:
    part = FrontendServiceGenerateRequest(token_ids=TokenIds(ids=range(MANY))).SerializeToString()
    with pytest.raises(TooManyElements) as caught:
        MessageLimits(elements=MANY).check(part * 2, FrontendServiceGenerateRequest)
    assert caught.value.count == 2 * MANY


HOSTILE: list[tuple[str, bytes, type[Message]]] = [
    ("multimodal_hashes", b"\x5a\x00" * MANY, FrontendServiceGenerateRequest),
    ("ids", b"\x0d\x01\x00\x00\x00" * MANY, TokenIds),
    ("stop_conditions", b"\x22\xe0\xa7\x12" + b"\x2a\x00" * (MANY // 2), FrontendServiceGenerateRequest),
    ("request", b"\x0a\x00" * MANY, FrontendServiceSelectWorkerRequest),
    (
        "request.constraints",
        FrontendServiceSelectWorkerRequest(
            request=RoutingRequest(constraints=RoutingConstraints(excluded_worker_ids=[1] * 2 * MANY))
        ).SerializeToString(),
        FrontendServiceSelectWorkerRequest,
    ),
    ("state", LoadRequest(state=RankState(blocks=[{}] * MANY)).SerializeToString(), LoadRequest),
    ("127", b"\xf8\x07\x01" * MANY, FrontendServiceGenerateRequest),
]


@pytest.mark.parametrize(("field", "encoded", "kind"), HOSTILE, ids=[field for field, *_ in HOSTILE])
def test_everything_besides_is_bounded(field: str, encoded: bytes, kind: type[Message]) -> None:
    with pytest.raises(InvalidMessage) as caught:
        MessageLimits(besides_bytes=256 << 10, records=8192).check(encoded, kind)
    assert caught.value.field == field
    assert caught.value.advice


@pytest.mark.parametrize(
    "tail", [b"\x18", b"\x1a\x05\x01", b"\x0b" * 20_000, b"\x0f", b"\xff" * 20, b"\x0a\xff\xff\xff\xff\xff\x7f"]
)
def test_a_message_that_is_cut_or_damaged_is_refused(tail: bytes) -> None:
    sound = FrontendServiceGenerateRequest(token_ids=TokenIds(ids=range(MANY))).SerializeToString()
    with pytest.raises(InvalidMessage):
        DEFAULT_LIMITS.check(sound + tail, FrontendServiceGenerateRequest)


@given(
    st.binary(max_size=200),
    st.sampled_from([FrontendServiceGenerateRequest, UpdateBookingsRequest, FrontendServiceSelectWorkerRequest]),
)
def test_any_bytes_are_accepted_or_refused(data: bytes, kind: type[Message]) -> None:
    filling = bytes([0x1A, 0x80, 0x80, 0x08]) + bytes(SMALL_BYTES)
    try:
        DEFAULT_LIMITS.check(data + filling, kind)
    except InvalidMessage:
        return


def test_the_long_fields_are_in_the_contract() -> None:
    kinds: Iterable[type[Message]] = [type(message) for message in SOUND] + [RoutingRequest, TokenIds, LocalHashes]
    fields = {field.full_name for kind in kinds for field in kind.DESCRIPTOR.fields}
    assert fields | {"kvrouter.v1.ReassertBooking.sequence_hashes"} >= LONG_FIELDS
    assert ReassertBooking.DESCRIPTOR.fields_by_name["sequence_hashes"].full_name in LONG_FIELDS
