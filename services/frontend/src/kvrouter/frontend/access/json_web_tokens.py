"""Verifies JSON Web Tokens with the keys of an issuer, and maps their claims to a caller.

Only the listed algorithms are accepted, and each only with a key of its own kind, so a public key is never taken
for the secret of an HMAC. Verified tokens are remembered until they expire.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import jwt
from jwt.exceptions import ExpiredSignatureError, InvalidAudienceError, InvalidIssuerError, PyJWTError
from kvrouter.frontend.access.api_keys import NO_TENANT, limits_of
from kvrouter.frontend.access.caller import Caller, Role
from kvrouter.frontend.access.key_file import TENANT_NAME, TenantEntry
from kvrouter.frontend.access.refusals import CredentialRefused, RefusalReason
from kvrouter.frontend.settings import FrontendSettings

_FAMILIES = {"HS": "oct", "RS": "RSA", "PS": "RSA", "ES": "EC", "Ed": "OKP"}
"""The kind of key (kty) of each family of algorithms, by the first two letters."""
_MAX_KEYS = 256
_MAX_REMEMBERED = 16_384
_MAX_MODELS = 1024
_NAME = re.compile(r"[^\x21-\x7e]")
_MAX_NAME = 64


class InvalidKeys(Exception):
    """An unusable JSON Web Key Set. The message has no key."""


@dataclass(frozen=True, slots=True)
class _SigningKey:
    kind: str
    algorithm: str
    """The only algorithm it is for; empty for each of its kind."""
    key: Any


class SigningKeys:
    """The keys of an issuer."""

    def __init__(self, document: object) -> None:
        """Parses a JSON Web Key Set. Keys that are not for signatures, or of unknown kinds, are left out.

        Raises:
            InvalidKeys: it is not one, has no usable key, or too many.
        """
        entries = document.get("keys") if isinstance(document, dict) else None
        if not isinstance(entries, list) or len(entries) > _MAX_KEYS:
            raise InvalidKeys(f"expected a JSON Web Key Set: an object with `keys`, a list of at most {_MAX_KEYS}")
        self._keys: dict[str, _SigningKey] = {}
        self.has_secret = any(isinstance(entry, dict) and entry.get("kty") == "oct" for entry in entries)
        """Whether a key is a secret that signs as well as verifies."""
        for entry in entries:
            if isinstance(entry, dict) and entry.get("use", "sig") == "sig":
                self._add(entry)
        if not self._keys:
            raise InvalidKeys("expected a JSON Web Key Set with at least one key for signatures of a known kind")

    def __len__(self) -> int:
        """Returns the number of usable keys."""
        return len(self._keys)

    def find(self, key_id: object) -> _SigningKey | None:
        """Returns a key by its id; without an id, the only key."""
        if key_id is None:
            return next(iter(self._keys.values())) if len(self._keys) == 1 else None
        return self._keys.get(key_id) if isinstance(key_id, str) else None

    def _add(self, entry: dict[str, Any]) -> None:
        kind, algorithm = str(entry.get("kty")), entry.get("alg", "")
        if kind not in _FAMILIES.values() or not isinstance(algorithm, str):
            return
        try:
            key = jwt.PyJWK(entry, algorithm=algorithm or None).key
        except (PyJWTError, ValueError, TypeError, KeyError, AttributeError):
            return
        self._keys[str(entry.get("kid", ""))] = _SigningKey(kind, algorithm, key)


@dataclass(frozen=True, slots=True)
class _Remembered:
    caller: Caller
    until: float
    keys: SigningKeys
    tenants: Mapping[str, TenantEntry]


class JsonWebTokens:
    """Verifies tokens. ``keys`` may be replaced at any time; while it is None, every token is refused."""

    def __init__(self, settings: FrontendSettings) -> None:
        self.keys: SigningKeys | None = None
        self.unknown_key = False
        """Whether a token named an unknown key, so the issuer may have a new one."""
        self._settings = settings
        self._remembered: dict[bytes, _Remembered] = {}

    def authenticate(self, token: str, tenants: Mapping[str, TenantEntry]) -> Caller:
        """Returns the caller a token names.

        Args:
            token: The token.
            tenants: Tenants by name.

        Raises:
            CredentialRefused: the token is not valid.
        """
        keys = self.keys
        if keys is None:
            raise CredentialRefused(RefusalReason.NO_TOKEN_KEYS)
        known = self.remembered(token, tenants)
        if known is not None:
            return known
        claims = self._verified(token, keys)
        caller = self._caller(claims, tenants)
        if len(self._remembered) >= _MAX_REMEMBERED:
            self._remembered.pop(next(iter(self._remembered)))
        until = float(claims["exp"]) + self._settings.jwt_leeway_seconds
        self._remembered[_digest(token)] = _Remembered(caller, until, keys, tenants)
        return caller

    def remembered(self, token: str, tenants: Mapping[str, TenantEntry]) -> Caller | None:
        """Returns the caller of a token verified before and still valid; None for any other one."""
        known = self._remembered.get(_digest(token))
        if known is None or known.keys is not self.keys or known.tenants is not tenants or time.time() >= known.until:
            return None
        return known.caller

    def _verified(self, token: str, keys: SigningKeys) -> dict[str, Any]:
        settings = self._settings
        try:
            header = jwt.get_unverified_header(token)
            algorithm = header.get("alg")
            if not isinstance(algorithm, str) or algorithm not in settings.jwt_algorithms:
                raise _refused("its algorithm is not accepted")
            if "crit" in header:
                raise _refused("it has a critical extension")
            key = keys.find(header.get("kid"))
            if key is None:
                self.unknown_key = True
                raise _refused("its key is not known")
            if key.kind != _FAMILIES[algorithm[:2]] or key.algorithm not in ("", algorithm):
                raise _refused("its key is not one for its algorithm")
            return jwt.decode(
                token,
                key.key,
                algorithms=[algorithm],
                audience=settings.jwt_audience,
                issuer=settings.jwt_issuer,
                leeway=settings.jwt_leeway_seconds,
                options={"require": ["exp", "iss", "aud", "sub"]},
            )
        except ExpiredSignatureError:
            raise CredentialRefused(RefusalReason.EXPIRED) from None
        except InvalidAudienceError:
            raise _refused("it is for another audience") from None
        except InvalidIssuerError:
            raise _refused("it is from another issuer") from None
        except (PyJWTError, ValueError, TypeError, OverflowError, RecursionError):
            raise _refused("") from None

    def _caller(self, claims: Mapping[str, Any], tenants: Mapping[str, TenantEntry]) -> Caller:
        settings = self._settings
        tenant_name = claims.get(settings.jwt_tenant_claim, "")
        if not isinstance(tenant_name, str) or not TENANT_NAME.fullmatch(tenant_name):
            raise _refused(f"its claim {settings.jwt_tenant_claim} is not the name of a tenant")
        role = claims.get(settings.jwt_role_claim, Role.CLIENT.value)
        if role not in (Role.CLIENT.value, Role.ADMIN.value):
            raise _refused(f"its claim {settings.jwt_role_claim} is neither client nor admin")
        tenant = tenants.get(tenant_name, NO_TENANT)
        return Caller(
            name=f"sub:{_NAME.sub('?', str(claims['sub']))[:_MAX_NAME]}",
            tenant=tenant_name,
            role=Role(role),
            models=self._models(claims.get(settings.jwt_models_claim)),
            min_priority=tenant.min_priority,
            isolated=tenant.isolated,
            tenant_limits=limits_of(tenant),
            weight=tenant.weight,
        )

    def _models(self, claim: object) -> tuple[str, ...] | None:
        """Returns the models of a claim: a list, or names with spaces between them; None without the claim."""
        if claim is None:
            return None
        names: Sequence[object] = claim.split() if isinstance(claim, str) else claim if isinstance(claim, list) else [0]
        if len(names) > _MAX_MODELS or not all(isinstance(name, str) for name in names):
            raise _refused(f"its claim {self._settings.jwt_models_claim} is not a list of models")
        return tuple(str(name) for name in names)


def _digest(token: str) -> bytes:
    return sha256(token.encode("utf-8", "surrogateescape")).digest()


def _refused(detail: str) -> CredentialRefused:
    return CredentialRefused(RefusalReason.INVALID_TOKEN, detail=detail)
