"""The component that a request names."""

from __future__ import annotations

from kvrouter.runtime.errors import BadRequest
from kvrouter.v1.common_pb2 import Component
from kvrouter.v1.names import ComponentName, InvalidName


def component_name(component: Component) -> ComponentName:
    """Returns the name in a request.

    Raises:
        BadRequest: it is not well formed.
    """
    try:
        return ComponentName(component.namespace, component.name)
    except InvalidName as error:
        raise BadRequest(
            str(error)[:512], field="component", advice="Name the component by its namespace and its name."
        ) from None
