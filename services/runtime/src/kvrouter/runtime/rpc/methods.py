"""Methods of services: their names in Python and on the wire, and the parsing of their requests."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from kvrouter.v1.errors import BadRequest, PromptTooLong
from kvrouter.v1.message_limits import InvalidMessage, MessageLimits, TooManyElements

_WORD_START = re.compile(r"(?<!^)(?=[A-Z])")


@lru_cache(maxsize=64)
def methods_by_python_name(service: ServiceDescriptor) -> dict[str, MethodDescriptor]:
    """Returns a service's methods by their names in ``kvrouter.runtime.contracts``: FindMatches is find_matches."""
    return {_WORD_START.sub("_", method.name).lower(): method for method in service.methods}


def full_path(method: MethodDescriptor) -> str:
    """Returns the method's path on the wire, such as /kvrouter.v1.IndexerService/FindMatches."""
    return f"/{method.containing_service.full_name}/{method.name}"


_BY_THE_CONTRACT = "Encode it as the .proto files define, which reflection serves."


def request_parser(method: MethodDescriptor, limits: MessageLimits) -> Callable[[bytes], Message]:
    """Returns the parser of a method's requests, which raises BadRequest or PromptTooLong if it cannot be parsed."""
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
