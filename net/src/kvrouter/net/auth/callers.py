"""Admits calls of authorized processes, by their certificates and by the service token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import grpc
from kvrouter.net.auth.service_token import HEADER, ServiceToken
from kvrouter.net.http2 import ReceivedCall
from kvrouter.net.logs import get_logger
from kvrouter.net.tls.tls import Tls
from kvrouter.v1.errors import KvRouterError, ServiceRefused

ADMIN = "admin"
"""Role with permission for every method."""

_FRONTEND = frozenset({"frontend"})

SERVICE_ROLES: Mapping[str, Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        "kvrouter.v1.SchedulerService": {
            "SelectWorker": _FRONTEND,
            "MarkPrefillComplete": _FRONTEND,
            "ReportOutput": _FRONTEND,
            "Free": _FRONTEND,
            "OpenSession": _FRONTEND,
            "UpdateBookings": _FRONTEND,
            "CloseSession": _FRONTEND,
            "GetPotentialLoads": _FRONTEND,
            # Administrators set thresholds at a Frontend as well.
            "SetBusyThreshold": _FRONTEND,
            "ListBusyThresholds": _FRONTEND,
            # For the web page.
            "Explain": _FRONTEND,
            "GetStatus": _FRONTEND,
        },
        "kvrouter.v1.ReplicaService": {
            "Follow": frozenset({"scheduler"}),
            "GetBookings": frozenset({"scheduler"}),
        },
        "kvrouter.v1.IndexerService": {
            "FindMatches": frozenset({"frontend", "scheduler"}),
            "Dump": _FRONTEND,
            "GetStats": _FRONTEND,
        },
        "kvrouter.v1.WorkerService": {
            "Generate": _FRONTEND,
            "Abort": _FRONTEND,
            # Frontends and Schedulers with listed workers ask these what they serve.
            "GetLoad": frozenset({"frontend", "scheduler"}),
            "GetModelFile": _FRONTEND,
            "GetRankState": frozenset({"indexer"}),
            "GetEvents": frozenset({"indexer"}),
        },
    }
)
"""Roles by service and method. A method not listed is for administrators only.

FrontendService is for clients, which authenticate with keys of the API; health and reflection are open to everybody.
"""

_NOBODY: frozenset[str] = frozenset()


def is_checked(method: str) -> bool:
    """Returns whether a method, such as ``kvrouter.v1.WorkerService/Abort``, is one the table decides about."""
    return method.partition("/")[0] in SERVICE_ROLES


def may_call(roles: Collection[str], method: str) -> bool:
    """Returns whether a process with these roles may call a method."""
    service, _, name = method.partition("/")
    methods = SERVICE_ROLES.get(service)
    if methods is None or ADMIN in roles:
        return True
    return not methods.get(name, _NOBODY).isdisjoint(roles)


log = get_logger(__name__)

ROLES = ("frontend", "scheduler", "indexer", ADMIN)
"""Roles of callers. A worker calls nobody."""
_LOGGED = 64
"""Number of distinct refusals logged."""

Reason = Literal["role", "token"]
"""Why a call is refused: the caller's certificate has another role, or its token is wrong."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who opened a connection."""

    roles: frozenset[str]
    """Roles in its certificate."""
    names: tuple[str, ...]
    """Names in its certificate, for the log."""
    shown: str | bytes
    """The token it shows; empty for none."""
    address: str
    """Its address, for the log."""


class CallerCheck:
    """Refuses calls with PERMISSION_DENIED unless role and token of the caller permit them.

    Roles are checked if certificates name them and clients must present one, the token if there is one. Implements
    kvrouter.net.calls.PeerCheck.
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

    def peer(self, context: ReceivedCall) -> CallerPeer:
        """Returns the peer of a call."""
        shown = _shown(context.invocation_metadata()) if self._token is not None else ""
        connection = context.connection
        return self.peer_of(connection.names if self._roles else (), shown, connection.peer)

    def peer_of(self, names: tuple[str, ...], shown: str | bytes, address: str) -> CallerPeer:
        """Returns the peer with these names in its certificate, the token that it shows, and its address."""
        roles = frozenset(self._roles[name] for name in names if name in self._roles)
        return CallerPeer(self, Caller(roles, names, shown, address))

    def why_refused(self, caller: Caller, method: str) -> Reason | None:
        """Returns why the caller may not call a method, such as ``kvrouter.v1.WorkerService/Abort``; None if it may."""
        if not is_checked(method):
            return None
        if self._token is not None and not self._token.accepts(caller.shown):
            return "token"
        return "role" if self._roles and not may_call(caller.roles, method) else None

    def refusal(self, caller: Caller, method: str, reason: Reason) -> KvRouterError:
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
        return ServiceRefused(message, code=grpc.StatusCode.PERMISSION_DENIED, advice=advice, retry_elsewhere=True)


@dataclass(frozen=True, slots=True)
class CallerPeer:
    """A caller with its check. Implements kvrouter.net.calls.Peer."""

    callers: CallerCheck
    caller: Caller

    def open_stream(self, methods: Sequence[str]) -> None:
        """Admits a caller of one of the methods.

        Raises:
            KvRouterError: it may call none of them.
        """
        reasons = [self.callers.why_refused(self.caller, method) for method in methods]
        if reasons and reasons[0] is not None and all(reasons):
            raise self.callers.refusal(self.caller, methods[0], reasons[0])

    def may_call(self, method: str) -> bool:
        """Returns whether the caller may call a method."""
        return self.callers.why_refused(self.caller, method) is None

    def check(self, method: str) -> None:
        """Admits a caller to a method.

        Raises:
            KvRouterError: it may not call it.
        """
        reason = self.callers.why_refused(self.caller, method)
        if reason is not None:
            raise self.callers.refusal(self.caller, method, reason)


def _shown(metadata: Iterable[tuple[str, str | bytes]]) -> str | bytes:
    return next((value for key, value in metadata if key == HEADER), "")
