"""Names of protobuf methods in Python and on the wire."""

from __future__ import annotations

import re
from functools import lru_cache

from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor

_WORD_START = re.compile(r"(?<!^)(?=[A-Z])")


@lru_cache(maxsize=64)
def methods_by_python_name(service: ServiceDescriptor) -> dict[str, MethodDescriptor]:
    """Returns a service's methods by their names in ``kvrouter.runtime.contracts``: FindMatches is find_matches."""
    return {_WORD_START.sub("_", method.name).lower(): method for method in service.methods}


def full_path(method: MethodDescriptor) -> str:
    """Returns the method's path on the wire, such as /kvrouter.v1.IndexerService/FindMatches."""
    return f"/{method.containing_service.full_name}/{method.name}"
