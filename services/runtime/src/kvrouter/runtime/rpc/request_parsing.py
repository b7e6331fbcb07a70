"""Parses requests within their size limits."""

from __future__ import annotations

from collections.abc import Callable

from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from kvrouter.v1.errors import BadRequest, PromptTooLong
from kvrouter.v1.message_limits import InvalidMessage, MessageLimits, TooManyElements

_BY_THE_CONTRACT = "Encode it as the .proto files define, which reflection serves."


def request_parser(method: MethodDescriptor, limits: MessageLimits) -> Callable[[bytes], Message]:
    """Returns what parses a request of a method, and raises BadRequest or PromptTooLong if it cannot be parsed."""
    kind: type[Message] = GetMessageClass(method.input_type)

    def read(encoded: bytes) -> Message:
        try:
            limits.check(encoded, kind)
            return kind.FromString(encoded)
        except TooManyElements as error:
            raise PromptTooLong(error.count, error.limit, field=error.field) from None
        except InvalidMessage as error:
            raise BadRequest(str(error), field=error.field, advice=error.advice or _BY_THE_CONTRACT) from None
        except DecodeError:
            raise BadRequest("the request cannot be parsed", advice=_BY_THE_CONTRACT) from None

    return read
