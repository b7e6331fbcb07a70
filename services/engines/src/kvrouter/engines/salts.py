"""Represents tenant and salt together as the salt of an engine, which knows no tenants."""

from __future__ import annotations

from urllib.parse import quote, unquote

from kvrouter.v1.common_pb2 import BlockScope

_PREFIX = "tenant:"


def engine_salt(scope: BlockScope) -> str:
    """Returns the salt for an engine: the scope's, with its tenant before it if there is one."""
    if not scope.tenant and not scope.cache_salt.startswith(_PREFIX):
        return scope.cache_salt
    return f"{_PREFIX}{quote(scope.tenant, safe='')}:{scope.cache_salt}"


def split_salt(salt: str) -> tuple[str, str]:
    """Returns the tenant and the salt an engine's salt stands for."""
    tenant, colon, rest = salt.removeprefix(_PREFIX).partition(":")
    return (unquote(tenant), rest) if colon and salt.startswith(_PREFIX) else ("", salt)
