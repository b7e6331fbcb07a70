"""Finds the credential of a call in its headers or metadata, and authenticates API keys by the entries of a file."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from kvrouter.frontend.access.caller import Caller, RateLimits
from kvrouter.frontend.access.key_file import PREFIX, KeyEntry, KeyFile, KeyVerifier, TenantEntry
from kvrouter.frontend.access.refusals import CredentialRefused, RefusalReason

HEADERS = ("authorization", "x-api-key")
"""Headers for the credential, in lower case."""
_MAX_BYTES = 16 << 10


def credential_of(headers: Iterable[tuple[str, str | bytes]]) -> str:
    """Returns the credential: the token of ``Authorization: Bearer``, or the value of ``x-api-key``.

    Args:
        headers: Names and values; names in any case.

    Raises:
        CredentialRefused: there is none, more than one, one with another scheme, or one that is too long.
    """
    credential = ""
    for name, value in headers:
        lower = name.lower()
        if lower in HEADERS:
            found = _value(lower, value)
            if credential and found != credential:
                raise CredentialRefused(RefusalReason.MALFORMED, detail="expected one credential, received several")
            credential = found
    if not credential:
        raise CredentialRefused(RefusalReason.NO_CREDENTIAL)
    return credential


def _value(name: str, value: str | bytes) -> str:
    text = value.decode("latin-1") if isinstance(value, bytes) else value
    if name == "authorization":
        scheme, _, text = text.partition(" ")
        if scheme.lower() != "bearer":
            raise CredentialRefused(RefusalReason.MALFORMED, detail="expected the scheme Bearer")
    text = text.strip()
    if not text or len(text) > _MAX_BYTES or not text.isascii():
        raise CredentialRefused(RefusalReason.MALFORMED)
    return text


NO_TENANT = TenantEntry(name="")
"""The entry of a tenant that the file does not have."""


@dataclass(frozen=True, slots=True)
class _Key:
    entry: KeyEntry
    verifier: KeyVerifier
    caller: Caller


class ApiKeys:
    """The keys of one file. Pure: a changed file is a new object."""

    def __init__(self, content: KeyFile) -> None:
        tenants = {tenant.name: tenant for tenant in content.tenants}
        self.tenants = tenants
        """Tenants by name."""
        self._keys = {
            entry.id: _Key(entry, KeyVerifier(entry), _caller(entry, tenants.get(entry.tenant, NO_TENANT)))
            for entry in content.keys
        }

    def __len__(self) -> int:
        """Returns the number of keys, revoked ones included."""
        return len(self._keys)

    def authenticate(self, credential: str) -> Caller:
        """Returns the caller an API key belongs to.

        Raises:
            CredentialRefused: the key is malformed, unknown, wrong, revoked or expired. To the client an unknown id and
                a wrong secret are the same.
        """
        key_id, point, secret = credential.removeprefix(PREFIX).partition(".")
        key = self._keys.get(key_id)
        if not point or key is None or not key.verifier.matches(secret):
            # The id is the client's claim: it names a key in the log only if there is such a key.
            raise CredentialRefused(RefusalReason.INVALID_KEY, key_id if key is not None else "")
        entry = key.entry
        if entry.revoked is not None:
            raise CredentialRefused(RefusalReason.REVOKED, key_id)
        if entry.expires is not None and entry.expires <= time.time():
            raise CredentialRefused(RefusalReason.EXPIRED, key_id)
        return key.caller


def limits_of(entry: KeyEntry | TenantEntry) -> RateLimits:
    """Returns the limits of a key or tenant."""
    return RateLimits(entry.requests_per_second, entry.tokens_per_minute, entry.concurrency)


def _caller(entry: KeyEntry, tenant: TenantEntry) -> Caller:
    return Caller(
        name=entry.id,
        tenant=entry.tenant,
        role=entry.role,
        models=None if entry.models is None else tuple(entry.models),
        min_priority=tenant.min_priority if entry.min_priority is None else entry.min_priority,
        isolated=tenant.isolated,
        limits=limits_of(entry),
        tenant_limits=limits_of(tenant),
        weight=tenant.weight,
    )
