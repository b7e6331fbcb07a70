"""Keeps the signing keys of an issuer current: from a file followed, or from a URL fetched again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import msgspec
import structlog
from kvrouter.frontend.access.following import changes
from kvrouter.frontend.access.json_web_tokens import InvalidKeys, JsonWebTokens, SigningKeys
from kvrouter.frontend.access.key_file import KeyFileError, read_protected
from kvrouter.net.secret_files import file_version
from prometheus_client import CollectorRegistry, Gauge

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
