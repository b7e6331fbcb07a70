"""Where the output of a request goes."""

from __future__ import annotations

from typing import Protocol

from kvrouter.frontend.workers.output import Output
from kvrouter.v1.frontend_pb2 import RoutingInfo


class OutputComplete(Exception):
    """Raised by a receiver that needs no further output, such as after a stop string. The request has succeeded."""


class OutputReceiver(Protocol):
    """Passes the output of one request on to its client.

    Its methods are called from the reader of the worker's connection, which also serves other requests: they must not
    block. A client that does not read must not grow memory without limit: raise ``KvRouterError`` to end its request.
    Raise ``OutputComplete`` to end it as complete.
    How the request ends, ``Generation.run`` says by returning or raising.
    """

    def routed(self, routing: RoutingInfo) -> None:
        """Receives where the request runs, at the start of each attempt."""
        ...

    def output(self, output: Output) -> None:
        """Receives a piece of the output."""
        ...
