"""Refusals of callers: counted by reason, and logged at a bounded rate without the credential."""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import StrEnum

import structlog
from kvrouter.v1.errors import KvRouterError, PermissionDenied, Unauthenticated
from prometheus_client import CollectorRegistry, Counter

log = structlog.get_logger(component="frontend")

_LOG_SECONDS = 1.0
"""Shortest time between two log lines about the same caller and reason."""
_MAX_REMEMBERED = 4096
"""Pairs of caller and reason whose last log line is remembered."""


class RefusalReason(StrEnum):
    """Why a call was refused."""

    NO_CREDENTIAL = "no_credential"
    MALFORMED = "malformed_credential"
    INVALID_KEY = "invalid_key"
    REVOKED = "revoked_key"
    EXPIRED = "expired"
    INVALID_TOKEN = "invalid_token"  # noqa: S105 - not a password
    NO_TOKEN_KEYS = "no_token_keys"  # noqa: S105
    ROLE = "role"
    MODEL = "model"
    TENANT = "tenant"
    PRIORITY = "priority"
    FIELD = "field"
    REQUEST_RATE = "request_rate"
    TOKEN_RATE = "token_rate"  # noqa: S105
    CONCURRENCY = "concurrency"
    BOOKINGS = "bookings"
    SESSIONS = "sessions"


_MESSAGES = {
    RefusalReason.NO_CREDENTIAL: "the call has no credential",
    RefusalReason.MALFORMED: "the credential is malformed",
    RefusalReason.INVALID_KEY: "the API key is not valid",
    RefusalReason.REVOKED: "the API key was revoked",
    RefusalReason.EXPIRED: "the credential has expired",
    RefusalReason.INVALID_TOKEN: "the token is not valid",
    RefusalReason.NO_TOKEN_KEYS: "tokens cannot be verified now",
}


class CredentialRefused(Unauthenticated):
    """An invalid credential."""

    def __init__(self, why: RefusalReason, caller: str = "", detail: str = "") -> None:
        """Creates the error.

        Args:
            why: Why it was refused.
            caller: Id of the key, if there is such a key; for the log.
            detail: The cause, for the client. Without any part of the credential.
        """
        super().__init__(_MESSAGES[why] + (f": {detail}" if detail else ""))
        self.why = why
        self.caller = caller


class RuleBroken(PermissionDenied):
    """A request its caller may not make."""

    def __init__(
        self, why: RefusalReason, message: str, *, field: str = "", advice: str = "Use a key that has this permission."
    ) -> None:
        super().__init__(message, field=field, advice=advice)
        self.why = why


class Refusals:
    """Counts and logs refusals."""

    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counter = Counter(
            "kvrouter_frontend_access_refusals",
            "Calls refused because of their credential, role, model, tenant, priority, fields or a limit, by reason.",
            ["reason"],
            registry=registry,
        )
        for reason in RefusalReason:
            self._counter.labels(reason=reason.value)
        self._logged: dict[tuple[str, str], float] = {}
        self._unlogged = 0

    def note(self, why: RefusalReason, error: KvRouterError, *, caller: str, call: str) -> None:
        """Counts a refusal, and logs it unless the same caller was refused for the same reason within a second.

        Args:
            why: The reason.
            error: The client's error.
            caller: Name of the caller; empty if it is not known.
            call: The called method or path.
        """
        self._counter.labels(reason=why.value).inc()
        now = self._clock()
        last = self._logged.get((caller, why))
        if last is not None and now - last < _LOG_SECONDS:
            self._unlogged += 1
            return
        if len(self._logged) >= _MAX_REMEMBERED:
            self._logged.clear()
        self._logged[caller, why] = now
        unlogged, self._unlogged = self._unlogged, 0
        log.warning(
            "access.refused", caller=caller, reason=why.value, call=call, code=error.code.name, unlogged=unlogged
        )
