"""Verifies JSON Web Tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from kvrouter.frontend.access.caller import Caller
from kvrouter.frontend.access.key_file import TenantEntry


class TokenVerifier(Protocol):
    """Verifies tokens and maps their claims to a caller."""

    def authenticate(self, token: str, tenants: Mapping[str, TenantEntry]) -> Caller:
        """Returns the caller that a token names.

        Raises:
            CredentialRefused: the token is not valid.
        """
        ...


def is_token(credential: str) -> bool:
    """Returns whether a credential has the form of a JSON Web Token: three parts with points between them."""
    return credential.count(".") == 2
