"""Common fields of requests: component and request id."""

from __future__ import annotations

import re

from kvrouter.v1.common_pb2 import Component
from kvrouter.v1.errors import BadRequest
from kvrouter.v1.names import ComponentName, InvalidName


def component_name(component: Component) -> ComponentName:
    """Returns the component's name.

    Raises:
        BadRequest: a part of the name is invalid.
    """
    try:
        return ComponentName(component.namespace, component.name)
    except InvalidName as error:
        raise BadRequest(
            str(error)[:512], field="component", advice="Send a valid namespace and a valid name."
        ) from None


_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""Control characters, line breaks, and halves of pairs, as which Python reads bytes that are not UTF-8."""


def check_request_id(request_id: str, max_bytes: int, field: str) -> None:
    """Checks an id a client chose; it may be empty.

    Args:
        request_id: The id.
        max_bytes: Its maximum size.
        field: The field or header that has it, for the error.

    Raises:
        BadRequest: it has control characters or is not UTF-8, or it is too long.
    """
    if _UNSAFE.search(request_id):
        raise BadRequest(
            f"{field}: expected UTF-8 without control characters, received {request_id[:32]!r}",
            field=field,
            advice="Send letters, digits and punctuation, such as a UUID.",
        )
    if len(request_id.encode()) > max_bytes:
        raise BadRequest(f"{field} is longer than {max_bytes} bytes", field=field, advice="Send a shorter id.")
