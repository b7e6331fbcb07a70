"""Parses messages of call streams."""

from __future__ import annotations

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from kvrouter.net.calls.errors import ProtocolViolation
from kvrouter.net.calls.limits import CallLimits
from kvrouter.v1.calls_pb2 import OpenCallStreamRequest, OpenCallStreamResponse


def parse_request(encoded: bytes, limits: CallLimits) -> OpenCallStreamRequest:
    """Returns a message of the client.

    Raises:
        ProtocolViolation: it is too long, is not a message of the protocol, or has items of an unknown kind.
    """
    if len(encoded) > limits.message_bytes:
        raise ProtocolViolation(
            "too_long", f"expected messages of at most {limits.message_bytes} bytes, received {len(encoded)}"
        )
    try:
        message = OpenCallStreamRequest.FromString(encoded)
    except DecodeError:
        raise ProtocolViolation("garbage", "expected an encoded OpenCallStreamRequest") from None
    if len(UnknownFieldSet(message)):
        raise ProtocolViolation(
            "unknown_kind", "received an item of a kind that is not defined", grpc.StatusCode.UNIMPLEMENTED
        )
    return message


def parse_response(encoded: bytes, limits: CallLimits) -> OpenCallStreamResponse:
    """Returns a message of the server.

    Raises:
        ProtocolViolation: it is too long, is not a message of the protocol, or has items of an unknown kind.
    """
    if len(encoded) > limits.message_bytes:
        raise ProtocolViolation(
            "too_long", f"expected messages of at most {limits.message_bytes} bytes, received {len(encoded)}"
        )
    try:
        message = OpenCallStreamResponse.FromString(encoded)
    except DecodeError:
        raise ProtocolViolation("garbage", "expected an encoded OpenCallStreamResponse") from None
    if len(UnknownFieldSet(message)):
        raise ProtocolViolation("unknown_kind", "received an item of a kind that is not defined")
    return message
