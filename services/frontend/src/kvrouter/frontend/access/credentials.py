"""Finds the credential of a call in its headers or metadata."""

from __future__ import annotations

from collections.abc import Iterable

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
