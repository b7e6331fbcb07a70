"""Reads names of components from the command line."""

from __future__ import annotations

from kvrouter.cli.errors import WrongUsage
from kvrouter.v1.common_pb2 import Component
from kvrouter.v1.names import ComponentName, InvalidName


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
    name = component_name(text)
    return Component(namespace=name.namespace, name=name.name)
