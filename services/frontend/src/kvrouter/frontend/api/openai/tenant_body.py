"""Gives a body that an engine parses itself the salt of its caller's tenant, since engines know no tenants."""

from __future__ import annotations

from dataclasses import replace

import msgspec
from kvrouter.frontend.access.access import Access
from kvrouter.frontend.access.rules import check_engine_request
from kvrouter.frontend.api.openai.routed_body import RoutedBody
from kvrouter.net.engine_salts import engine_salt
from kvrouter.v1.common_pb2 import BlockScope

_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])


def permitted(access: Access | None, routed: RoutedBody, body: bytes | bytearray) -> tuple[RoutedBody, bytes]:
    """Returns what routing needs and the body for the engine, after checking that the caller may send it.

    The body is unchanged unless its tenant is isolated, or its salt looks like that of a tenant.

    Args:
        access: Authentication; None if everybody may do everything.
        routed: What routing needs of the body.
        body: A JSON object.

    Raises:
        Unauthenticated, PermissionDenied: the caller may not use the model or the priority.
    """
    if access is None:
        return routed, bytes(body)
    caller = access.enforce(lambda each: check_engine_request(each, routed.model, routed.priority), "engine request")
    tenant = caller.cache_tenant
    salt = engine_salt(BlockScope(tenant=tenant, cache_salt=routed.cache_salt))
    if salt != routed.cache_salt:
        body = msgspec.json.encode(_OBJECT.decode(body) | {"cache_salt": salt})
    return replace(routed, tenant=tenant), bytes(body)
