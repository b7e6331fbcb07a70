"""The maker of a call, with its permissions."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kvrouter.frontend.access.quotas import Grant


class Role(StrEnum):
    """The kinds of calls a caller may make."""

    CLIENT = "client"
    """Requests to models."""
    ADMIN = "admin"
    """Every call."""


@dataclass(frozen=True, slots=True)
class RateLimits:
    """Limits of a key or a tenant; None for no limit."""

    requests_per_second: float | None = None
    tokens_per_minute: float | None = None
    concurrency: int | None = None

    @property
    def limits_nothing(self) -> bool:
        """Whether no limit is set."""
        return self.requests_per_second is None and self.tokens_per_minute is None and self.concurrency is None


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated caller."""

    name: str
    """Id of its key, or issuer and subject of its token. Never a secret; logs and metrics may have it."""
    tenant: str = ""
    """Tenant it belongs to; empty for none."""
    role: Role = Role.CLIENT
    models: tuple[str, ...] | None = None
    """Names of the models and adapters it may use; ``*`` stands for any characters. None for all."""
    min_priority: int | None = None
    """Smallest priority of its requests, and so their first place in queues; None for any."""
    isolated: bool = False
    """Whether its tenant's cache blocks are shared with nobody else."""
    limits: RateLimits = RateLimits()
    """Limits of this key alone."""
    tenant_limits: RateLimits = RateLimits()
    """Limits of all callers of the tenant together."""
    weight: float = 1.0
    """Share of the tenant when there is not enough for all."""

    @property
    def cache_tenant(self) -> str:
        """Tenant in the scope of its blocks; empty if it shares them with callers of other tenants."""
        return self.tenant if self.isolated else ""

    @property
    def share_holder(self) -> str:
        """Who has a share of what is not enough for all: its tenant, or itself if it has none."""
        return self.tenant or f"key {self.name}"

    def may_use(self, model: str) -> bool:
        """Returns whether the caller may use a model or adapter."""
        return self.models is None or any(fnmatchcase(model, pattern) for pattern in self.models)


class _Call(NamedTuple):
    caller: Caller
    grant: Grant | None


_CALL: ContextVar[_Call | None] = ContextVar("kvrouter_call", default=None)


def current_caller() -> Caller | None:
    """Returns the caller of the call running in this task; None if none was authenticated."""
    call = _CALL.get()
    return None if call is None else call.caller


def current_grant() -> Grant | None:
    """Returns the part of its caller's limits taken by the call of this task; None if nothing is limited."""
    call = _CALL.get()
    return None if call is None else call.grant


class acting_for:  # noqa: N801 - used as a function; a generator would take three times as long
    """Makes ``caller`` the current one while the context lasts, in tasks started meanwhile too."""

    __slots__ = ("_call", "_token")

    def __init__(self, caller: Caller, grant: Grant | None = None) -> None:
        self._call = _Call(caller, grant)

    def __enter__(self) -> None:
        self._token = _CALL.set(self._call)

    def __exit__(self, *_: object) -> None:
        _CALL.reset(self._token)
