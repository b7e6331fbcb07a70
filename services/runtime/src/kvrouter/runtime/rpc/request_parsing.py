"""Parses requests within their size limits."""

from __future__ import annotations

from collections.abc import Callable

from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from kvrouter.runtime.errors import BadRequest, KvRouterError, PromptTooLong
from kvrouter.v1.message_limits import InvalidMessage, MessageLimits, TooManyElements

_BY_THE_CONTRACT = "Encode it as the .proto files define, which reflection serves."


def request_parser(method: MethodDescriptor, limits: MessageLimits) -> Callable[[bytes], Message | KvRouterError]:
    """Returns a request parser for gRPC, which swallows exceptions of a deserializer: errors are returned as values."""
    kind: type[Message] = GetMessageClass(method.input_type)

    def read(encoded: bytes) -> Message | KvRouterError:
        try:
            limits.check(encoded, kind)
            return kind.FromString(encoded)
        except TooManyElements as error:
            return PromptTooLong(error.count, error.limit, field=error.field)
        except InvalidMessage as error:
            return BadRequest(str(error), field=error.field, advice=error.advice or _BY_THE_CONTRACT)
        except DecodeError:
            return BadRequest("the request cannot be parsed", advice=_BY_THE_CONTRACT)

    return read
