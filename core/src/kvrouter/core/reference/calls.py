"""Reads the messages of call streams that have only calls or only responses, as nearly all do, and writes them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet
from kvrouter.core.interface import Call, Responses, call_of
from kvrouter.v1.calls_pb2 import CallResponseKind, OpenCallStreamRequest, OpenCallStreamResponse

if TYPE_CHECKING:
    from kvrouter.core.reference.token_writer import TokenWriter

_FAILED = CallResponseKind.CALL_RESPONSE_KIND_FAILED


def read_calls(message: bytes) -> list[Call] | None:
    """Returns number, method, request, more, time_left_ms and trace_context of each call of an OpenCallStreamRequest.

    None if it has anything else or no calls, is encoded in an unusual way or is malformed: then a parser of all
    messages must read it.
    """
    try:
        parsed = OpenCallStreamRequest.FromString(message)
    except DecodeError:
        return None
    calls = parsed.calls
    if not calls or not has_only(parsed, {"calls"}) or any(len(UnknownFieldSet(call)) for call in calls):
        return None
    return [call_of(call) for call in calls]


def read_responses(
    messages: Sequence[bytes], start: int, most_bytes: int, writers: dict[int, TokenWriter]
) -> tuple[Responses, int, int]:
    """Reads encoded OpenCallStreamResponses.

    It reads up to one with other than whole responses, which is the last, or to one that has anything else, a failure
    or no responses, is too long, is encoded in an unusual way or is malformed: then a parser of all messages must read
    that.

    Args:
        messages: The messages.
        start: Index of the first one to read.
        most_bytes: Maximum size of a message.
        writers: Writers by number of a call, which are offered its whole responses. One that does not take a response,
            or fails, is removed.

    Returns:
        The responses that were not taken, whole ones as pairs of number and response, and others as number, kind and
        response; how many were taken; and how many messages were read.
    """
    whole: list[tuple[int, bytes]] = []
    others: list[tuple[int, int, bytes]] = []
    taken = count = 0
    for message in islice(messages, start, None):
        responses = _responses(message) if not others and len(message) <= most_bytes else None
        if responses is None:
            break
        all_whole, others = responses
        left = [each for each in all_whole if not (each[0] in writers and _is_taken(*each, writers))]
        whole += left
        taken += len(all_whole) - len(left)
        count += 1
    return (whole, others), taken, count


def _responses(message: bytes) -> Responses | None:
    """Returns the responses of a message; None if it must be read otherwise."""
    try:
        parsed = OpenCallStreamResponse.FromString(message)
    except DecodeError:
        return None
    numbers, whole, others = parsed.whole_numbers, parsed.whole_responses, parsed.responses
    if len(numbers) != len(whole) or not (whole or others):
        return None
    if not has_only(parsed, {"responses", "whole_numbers", "whole_responses"}):
        return None
    if any(other.kind == _FAILED or "failure" in other or len(UnknownFieldSet(other)) for other in others):
        return None
    return list(zip(numbers, whole, strict=True)), [(other.number, other.kind, other.response) for other in others]


def _is_taken(number: int, response: bytes, writers: dict[int, TokenWriter]) -> bool:
    """Returns whether the writer of a call takes a response. Removes one that does not."""
    with suppress(Exception):  # It fails again for the receiver of the call, who handles it.
        if writers[number].take(response):
            return True
    del writers[number]
    return False


def write_calls(calls: list[Call]) -> bytes:
    """Returns an encoded OpenCallStreamRequest with calls, as ``read_calls`` returns them."""
    message = OpenCallStreamRequest()
    for number, method, request, more, time_left_ms, trace_context in calls:
        message.calls.add(
            number=number,
            method=method,
            request=request,
            more=more,
            time_left_ms=time_left_ms,
            trace_context=trace_context,
        )
    return message.SerializeToString()


def write_responses(whole: list[tuple[int, bytes]], others: list[tuple[int, int, bytes]]) -> bytes:
    """Returns an encoded OpenCallStreamResponse with responses, as ``read_responses`` returns them.

    The response of one that is a failure is an encoded CallFailure.
    """
    message = OpenCallStreamResponse()
    for number, kind, response in others:
        item = message.responses.add(number=number, kind=kind)
        if kind == _FAILED:
            item.failure.ParseFromString(response)
        else:
            item.response = response
    message.whole_numbers.extend(number for number, _ in whole)
    message.whole_responses.extend(response for _, response in whole)
    return message.SerializeToString()


def has_only(message: Message, fields: set[str]) -> bool:
    """Returns whether a message has no fields but these."""
    return not len(UnknownFieldSet(message)) and {field.name for field, _ in message.ListFields()} <= fields
