"""Admits calls of processes that have business with a server, by their certificates and by the service token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import grpc.aio
from kvrouter.net.authorization.roles import ADMIN, is_checked, may_call
from kvrouter.net.authorization.service_token import HEADER, ServiceToken
from kvrouter.net.calls import CallRefused
from kvrouter.net.grpc_status import set_error
from kvrouter.net.logs import get_logger
from kvrouter.net.tls.tls import Tls
from kvrouter.v1.errors_pb2 import ErrorInfo, ErrorReason

log = get_logger(__name__)

ROLES = ("frontend", "scheduler", "indexer", ADMIN)
"""Roles that call others. A worker calls nobody."""
_NAMES = "x509_subject_alternative_name"
_LOGGED = 64
"""Number of distinct refusals that are logged."""

_Context = grpc.aio.ServicerContext[Any, Any]
_Behaviour = Callable[[Any, Any], Awaitable[Any]]
Reason = Literal["role", "token"]
"""Why a call is refused: the caller's certificate has a role that may not call the method, or its token is wrong."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who opened a connection."""

    roles: frozenset[str]
    """Roles in its certificate."""
    names: tuple[str, ...]
    """Names in its certificate, for the log."""
    shows_token: bool
    """Whether it shows the service token."""
    address: str
    """Its address, for the log."""


class CallerCheck(grpc.aio.ServerInterceptor):
    """Refuses calls with PERMISSION_DENIED unless role and token of the caller permit them.

    Roles are checked if certificates name them and clients must present one, the token if there is one. Call streams
    are checked by ``CallStreamServer``, once for each stream.
    """

    def __init__(self, tls: Tls | None, token: ServiceToken | None = None) -> None:
        self.refused: Counter[Reason] = Counter()
        """Number of refused calls by reason."""
        self._token = token
        checks_roles = tls is not None and tls.options.peer_domain and tls.options.client_auth == "required"
        self._roles = {tls.peer_name(role): role for role in ROLES} if checks_roles and tls is not None else {}
        self._logged: set[tuple[object, ...]] = set()

    @property
    def applies(self) -> bool:
        """Whether there is anything to check."""
        return bool(self._roles) or self._token is not None

    def caller_of(self, context: _Context) -> Caller:
        """Returns who opened the connection of a call."""
        names: tuple[str, ...] = ()
        if self._roles:
            names = tuple(bytes(name).decode(errors="replace") for name in context.auth_context().get(_NAMES, ()))
        return Caller(
            frozenset(self._roles[name] for name in names if name in self._roles),
            names,
            self._token is not None and self._token.accepts(_shown(context.invocation_metadata() or ())),
            context.peer(),
        )

    def why_refused(self, caller: Caller, method: str) -> Reason | None:
        """Returns why the caller may not call a method, such as ``kvrouter.v1.WorkerService/Abort``; None if it may."""
        if not is_checked(method):
            return None
        if self._token is not None and not caller.shows_token:
            return "token"
        return "role" if self._roles and not may_call(caller.roles, method) else None

    def refusal(self, caller: Caller, method: str, reason: Reason) -> CallRefused:
        """Counts and logs a refused call, and returns the error for the caller."""
        self.refused[reason] += 1
        noted = (reason, method, caller.names or caller.address.rpartition(":")[0])
        if noted not in self._logged and len(self._logged) < _LOGGED:
            self._logged.add(noted)
            certificate = ", ".join(caller.names)
            log.warning("caller.refused", method=method, reason=reason, certificate=certificate, peer=caller.address)
        if reason == "token":
            message = "expected the service token of this system, received none or another"
            advice = "Give the calling process the token with --service-token-file."
        else:
            message = f"the role of the caller's certificate may not call {method.partition('/')[2]}"
            advice = "Call with the certificate of a process that may: see the guide to security."
        info = ErrorInfo(reason=ErrorReason.ERROR_REASON_SERVICE_REFUSED, advice=advice, retry_elsewhere=True)
        return CallRefused(grpc.StatusCode.PERMISSION_DENIED, message, info)

    def refusals(self, context: _Context) -> Callable[[str], Callable[[], CallRefused] | None]:
        """Implements kvrouter.net.calls.StreamCheck."""
        caller = self.caller_of(context)

        def refusal_of(method: str) -> Callable[[], CallRefused] | None:
            reason = self.why_refused(caller, method)
            return None if reason is None else partial(self.refusal, caller, method, reason)

        return refusal_of

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Implements grpc.aio.ServerInterceptor."""
        handler: Any = await continuation(handler_call_details)
        method = str(handler_call_details.method).removeprefix("/")
        if handler is None or not is_checked(method):
            return handler
        make, behaviour = _parts(handler)
        return make(self._checked(behaviour, method), handler.request_deserializer, handler.response_serializer)

    def _checked(self, behaviour: _Behaviour, method: str) -> _Behaviour:
        async def check(request: Any, context: Any) -> Any:
            caller = self.caller_of(context)
            reason = self.why_refused(caller, method)
            if reason is None:
                return await behaviour(request, context)
            refused = self.refusal(caller, method, reason)
            set_error(context, refused.code, str(refused), refused.info)
            return None

        return check


def _shown(metadata: Iterable[tuple[str, str | bytes]]) -> str | bytes:
    return next((value for key, value in metadata if key == HEADER), "")


def _parts(handler: Any) -> tuple[Callable[..., Any], _Behaviour]:
    kinds: dict[tuple[bool, bool], tuple[Callable[..., Any], _Behaviour]] = {
        (False, False): (grpc.unary_unary_rpc_method_handler, handler.unary_unary),
        (False, True): (grpc.unary_stream_rpc_method_handler, handler.unary_stream),
        (True, False): (grpc.stream_unary_rpc_method_handler, handler.stream_unary),
        (True, True): (grpc.stream_stream_rpc_method_handler, handler.stream_stream),
    }
    return kinds[handler.request_streaming, handler.response_streaming]
