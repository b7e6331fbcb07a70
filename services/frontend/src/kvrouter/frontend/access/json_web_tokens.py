"""Verifies JSON Web Tokens with the keys of an issuer, and maps their claims to a caller.

Only the listed algorithms are accepted, and each only with a key of its own kind, so a public key is never taken
for the secret of an HMAC. Verified tokens are remembered until they expire.

Signing keys are kept current: from a file followed, or from a URL fetched again.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import jwt
import msgspec
import structlog
from jwt.exceptions import ExpiredSignatureError, InvalidAudienceError, InvalidIssuerError, PyJWTError
from kvrouter.frontend.access.api_keys import NO_TENANT, limits_of
from kvrouter.frontend.access.caller import Caller, Role
from kvrouter.frontend.access.following import changes
from kvrouter.frontend.access.key_file import TENANT_NAME, KeyFileError, TenantEntry, read_protected
from kvrouter.frontend.access.refusals import CredentialRefused, RefusalReason
from kvrouter.frontend.settings import FrontendSettings
from kvrouter.net.secret_files import file_version
from prometheus_client import CollectorRegistry, Gauge

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


log = structlog.get_logger(component="frontend")

_POLL_SECONDS = 0.5
_FETCH_SECONDS = 300.0
_EARLY_SECONDS = 10.0
"""Shortest time between two fetches, after a failure or because of an unknown key."""
_TIMEOUT_SECONDS = 10.0
_MAX_BYTES = 1 << 20
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


def is_url(location: str) -> bool:
    """Returns whether keys are fetched from there, instead of being read from a file."""
    return location.startswith(("https://", "http://"))


def check_location(location: str) -> None:
    """Checks where keys come from.

    Raises:
        ValueError: it is a URL without TLS to another machine.
    """
    parts = urlsplit(location)
    if parts.scheme == "http" and parts.hostname not in _LOOPBACK:
        raise ValueError("expected a file or an https URL, because whoever changes the keys can sign tokens")


class FollowedSigningKeys:
    """Gives tokens the keys in force. ``run`` must be running."""

    def __init__(self, location: str, tokens: JsonWebTokens, registry: CollectorRegistry) -> None:
        """Reads a file at once; a URL is first fetched by ``run``.

        Raises:
            InvalidKeys: the file cannot be used.
        """
        self._location = location
        self._tokens = tokens
        self._rejected = False
        self._version = file_version(self._location)
        if not is_url(location):
            self._tokens.keys = self._read()
        Gauge("kvrouter_frontend_signing_keys", "Keys that tokens may be signed with.", registry=registry).set_function(
            lambda: 0 if tokens.keys is None else len(tokens.keys)
        )
        Gauge(
            "kvrouter_frontend_signing_keys_rejected",
            "1 while the signing keys cannot be read and the former ones stay in force, otherwise 0.",
            registry=registry,
        ).set_function(lambda: int(self._rejected))

    async def run(self) -> None:
        """Follows the keys until cancelled."""
        if is_url(self._location):
            await self._follow_url()
        async for _ in changes(Path(self._location), self._version):
            try:
                self._accept(await asyncio.to_thread(self._read))
            except InvalidKeys as error:
                self._reject(str(error))

    async def _follow_url(self) -> None:
        clock = asyncio.get_running_loop().time
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_SECONDS)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while True:
                fetched = clock()
                self._tokens.unknown_key = False
                try:
                    self._accept(await self._fetch(session))
                except (InvalidKeys, aiohttp.ClientError, TimeoutError, OSError) as error:
                    self._reject(str(error) or type(error).__name__)
                await asyncio.sleep(_EARLY_SECONDS)
                while clock() - fetched < _FETCH_SECONDS and not (self._rejected or self._tokens.unknown_key):  # noqa: ASYNC110
                    await asyncio.sleep(_POLL_SECONDS)

    async def _fetch(self, session: aiohttp.ClientSession) -> SigningKeys:
        async with session.get(self._location, allow_redirects=False) as response:
            if response.status != 200:
                raise InvalidKeys(f"expected status 200, received {response.status}")
            content = bytearray()
            async for part in response.content.iter_any():
                content += part
                if len(content) > _MAX_BYTES:
                    raise InvalidKeys(f"longer than {_MAX_BYTES} bytes")
        return _parsed(bytes(content))

    def _read(self) -> SigningKeys:
        path = Path(self._location)
        try:
            keys = _parsed(read_protected(path, secret=False))
            if keys.has_secret:
                read_protected(path, secret=True)
        except KeyFileError as error:
            raise InvalidKeys(str(error)) from None
        return keys

    def _accept(self, keys: SigningKeys) -> None:
        if self._rejected or self._tokens.keys is None:
            log.info("signing_keys.loaded", keys=len(keys))
        self._rejected = False
        self._tokens.keys = keys

    def _reject(self, cause: str) -> None:
        if not self._rejected:
            log.error("signing_keys.rejected", cause=cause[:512])
        self._rejected = True


def _parsed(content: bytes) -> SigningKeys:
    try:
        return SigningKeys(msgspec.json.decode(content))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise InvalidKeys("expected JSON") from None
