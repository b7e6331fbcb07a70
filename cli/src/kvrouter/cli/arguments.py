"""Parses addresses and names of components on the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrouter.cli.errors import WrongUsage
from kvrouter.v1.names import ComponentName, InvalidName

if TYPE_CHECKING:
    from kvrouter.v1.common_pb2 import Component


def parse_address(text: str) -> str:
    """Returns the text if it is host:port.

    Raises:
        WrongUsage: it has another form.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not host or "/" in host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise WrongUsage(f"expected host:port, received {text!r}")
    return text


def is_url(text: str) -> bool:
    """Returns whether the text is a URL of HTTP or HTTPS."""
    return text.startswith(("http://", "https://"))


def component_name(text: str) -> ComponentName:
    """Returns the component that ``namespace/component`` names.

    Raises:
        WrongUsage: the text is not such a name.
    """
    try:
        return ComponentName.parse(text)
    except InvalidName as error:
        raise WrongUsage(str(error)) from None


def named_component(text: str) -> Component:
    """Does the same as ``component_name`` and returns a message of the contract."""
    from kvrouter.v1.common_pb2 import Component

    name = component_name(text)
    return Component(namespace=name.namespace, name=name.name)
