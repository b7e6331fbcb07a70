"""Admits calls of processes whose role has business with a server, by their certificates."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc.aio
from kvrouter.net.logs import get_logger
from kvrouter.net.tls.tls import Tls

log = get_logger(__name__)

CALLERS = ("frontend", "scheduler", "indexer", "admin")
"""Roles that call others. A worker calls nobody."""
_CHECKED = "/kvrouter."
"""Prefix of the methods that are checked. Health and reflection are open to every valid certificate."""
_NAMES = "x509_subject_alternative_name"
_LOGGED = 64
"""Number of distinct callers whose refusal is logged."""

_Behaviour = Callable[[Any, Any], Awaitable[Any]]


class CallerCheck(grpc.aio.ServerInterceptor):
    """Refuses calls with PERMISSION_DENIED if the caller's certificate contains none of the roles in CALLERS."""

    def __init__(self, tls: Tls) -> None:
        self._tls = tls
        self._admitted = {tls.peer_name(role).encode() for role in CALLERS}
        self._logged: set[bytes] = set()

    @classmethod
    def of(cls, tls: Tls | None) -> list[CallerCheck]:
        """Returns the check as a list of interceptors; empty if certificates name no roles or clients need none."""
        applies = tls is not None and tls.options.peer_domain and tls.options.client_auth == "required"
        return [cls(tls)] if applies and tls is not None else []

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Implements grpc.aio.ServerInterceptor."""
        handler: Any = await continuation(handler_call_details)
        method = str(handler_call_details.method)
        if handler is None or not method.startswith(_CHECKED):
            return handler
        make, behaviour = _parts(handler)
        return make(self._checked(behaviour, method), handler.request_deserializer, handler.response_serializer)

    def _checked(self, behaviour: _Behaviour, method: str) -> _Behaviour:
        async def check(request: Any, context: Any) -> Any:
            names = [bytes(name) for name in context.auth_context().get(_NAMES, ())]
            if self._admitted.isdisjoint(names):
                self._note(names, method)
                await context.abort(
                    grpc.StatusCode.PERMISSION_DENIED,
                    f"expected a certificate for one of {', '.join(CALLERS)} in {self._tls.options.peer_domain}",
                )
            return await behaviour(request, context)

        return check

    def _note(self, names: list[bytes], method: str) -> None:
        self._tls.refused_calls += 1
        caller = b", ".join(names)
        if caller not in self._logged and len(self._logged) < _LOGGED:
            self._logged.add(caller)
            log.warning("caller.refused", method=method, certificate=caller.decode(errors="replace"))


def _parts(handler: Any) -> tuple[Callable[..., Any], _Behaviour]:
    kinds: dict[tuple[bool, bool], tuple[Callable[..., Any], _Behaviour]] = {
        (False, False): (grpc.unary_unary_rpc_method_handler, handler.unary_unary),
        (False, True): (grpc.unary_stream_rpc_method_handler, handler.unary_stream),
        (True, False): (grpc.stream_unary_rpc_method_handler, handler.stream_unary),
        (True, True): (grpc.stream_stream_rpc_method_handler, handler.stream_stream),
    }
    return kinds[handler.request_streaming, handler.response_streaming]
