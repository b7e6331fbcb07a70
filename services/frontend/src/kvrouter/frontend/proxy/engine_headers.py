"""Which headers of a client with a key engines get: they read ids, ranks, priorities and transfers from others."""

from __future__ import annotations

import re

from kvrouter.net import trace_context
from kvrouter.net.engine_fields import HARMLESS_HEADERS

_OF_CONNECTIONS = frozenset({"host", "content-length", "transfer-encoding", "connection", "te", "x-request-id"})
"""Headers that a gateway sets for its own connection, or whose value is checked apart."""
_OF_GATEWAYS = (":", "x-forwarded-", "x-envoy-")
_REQUEST_ID = re.compile(r"(?!.*__)[A-Za-z0-9._:~-]{1,128}")
"""Ids that engines get. A connector of vLLM reads addresses from ids, marked by several underscores."""


def may_reach_engine(name: str) -> bool:
    """Returns whether an engine may get a header, by its name in lower case, behind a gateway."""
    return (
        name in HARMLESS_HEADERS
        or name in _OF_CONNECTIONS
        or name in trace_context.HEADERS
        or name.startswith(_OF_GATEWAYS)
    )


def engine_request_id(request_id: str) -> str:
    """Returns a request's id for an engine; empty if it could mean more to it than an id."""
    return request_id if _REQUEST_ID.fullmatch(request_id) else ""
