"""Parses the component that a request names."""

from __future__ import annotations

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
