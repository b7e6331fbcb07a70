"""The file of API keys and tenants: JSON, with a salted hash of each key.

    {"keys": [{"id": "chat-1", "hash": "sha256:...", "tenant": "chat", "models": ["llama-*"], "concurrency": 8}],
     "tenants": [{"name": "chat", "tokens_per_minute": 100000, "isolated": true}]}

A key is ``kvr-ID.SECRET`` with 256 random bits. A fast salted hash is sufficient for such a secret, which cannot be
guessed as a password can. Only the owner of the file may write it, and only its owner and group may read it.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import os
import re
import secrets
import stat
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import msgspec
from kvrouter.frontend.access.caller import Role

PREFIX = "kvr-"
"""Beginning of every API key."""
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
TENANT_NAME = re.compile(r"[A-Za-z0-9_.-]{0,64}")
_ID_RULE = "1 to 64 letters, digits, - or _"
_TENANT_RULE = "1 to 64 letters, digits, -, _ or ."
_SECRET_BYTES = 32
_SALT_BYTES = 16
_MAX_FILE_BYTES = 64 << 20
_MAX_KEYS = 100_000

_Rate = Annotated[float, msgspec.Meta(gt=0, le=1e12)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
_Priority = Annotated[int, msgspec.Meta(ge=-(1 << 31), le=(1 << 31) - 1)]


class KeyFileError(Exception):
    """The file cannot be used. The message says why, and how to mend it; it never has a hash or a key."""


class _Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    requests_per_second: _Rate | None = None
    tokens_per_minute: _Rate | None = None
    concurrency: _Count | None = None


class KeyEntry(_Limits, frozen=True, kw_only=True):
    """One key."""

    id: str
    hash: str
    """``sha256:SALT:DIGEST`` in hexadecimal; the digest is that of the salt followed by the secret."""
    tenant: str = ""
    role: Role = Role.CLIENT
    models: list[str] | None = None
    min_priority: _Priority | None = None
    created: int = 0
    """Unix seconds."""
    expires: int | None = None
    """Unix seconds; None for never."""
    revoked: int | None = None
    """Unix seconds at which it was revoked; None while it is valid."""


class TenantEntry(_Limits, frozen=True, kw_only=True):
    """The settings of a tenant, for all of its callers together."""

    name: str
    min_priority: _Priority | None = None
    """Smallest priority of requests whose caller has none of its own."""
    isolated: bool = False
    """Whether the tenant's cache blocks are shared with nobody else."""
    weight: Annotated[float, msgspec.Meta(gt=0, le=1e6)] = 1.0
    """Share of the tenant when there is not enough for all."""


class KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The content of the file."""

    keys: list[KeyEntry] = []
    tenants: list[TenantEntry] = []

    def check(self) -> None:
        """Checks beyond the types.

        Raises:
            KeyFileError: an id, tenant or hash is malformed, or one is there twice.
        """
        if len(self.keys) > _MAX_KEYS:
            raise KeyFileError(f"expected at most {_MAX_KEYS} keys, found {len(self.keys)}")
        for number, key in enumerate(self.keys):
            if not _ID.fullmatch(key.id):
                raise KeyFileError(f"id of key {number}: expected {_ID_RULE}, found {key.id[:80]!r}")
            if not TENANT_NAME.fullmatch(key.tenant):
                raise KeyFileError(f"tenant of key {key.id}: expected {_TENANT_RULE}, found {key.tenant[:80]!r}")
            _parts_of(key)
        for number, tenant in enumerate(self.tenants):
            if not tenant.name or not TENANT_NAME.fullmatch(tenant.name):
                raise KeyFileError(f"name of tenant {number}: expected {_TENANT_RULE}, found {tenant.name[:80]!r}")
        _check_unique("key", [key.id for key in self.keys])
        _check_unique("tenant", [tenant.name for tenant in self.tenants])


def _check_unique(what: str, names: list[str]) -> None:
    for name, times in Counter(names).items():
        if times > 1:
            raise KeyFileError(f"the {what} {name!r} is there {times} times: expected it once")


_DECODER = msgspec.json.Decoder(KeyFile)


def new_key(key_id: str) -> tuple[str, str]:
    """Returns a new API key and its hash.

    Raises:
        KeyFileError: the id is malformed.
    """
    if not _ID.fullmatch(key_id):
        raise KeyFileError(f"expected an id of {_ID_RULE}, received {key_id[:80]!r}")
    secret = secrets.token_urlsafe(_SECRET_BYTES)
    salt = secrets.token_bytes(_SALT_BYTES)
    digest = hashlib.sha256(salt + secret.encode()).hexdigest()
    return f"{PREFIX}{key_id}.{secret}", f"sha256:{salt.hex()}:{digest}"


class KeyVerifier:
    """Compares presented secrets with one key's hash, in constant time."""

    __slots__ = ("_digest", "_salt")

    def __init__(self, key: KeyEntry) -> None:
        self._salt, self._digest = _parts_of(key)

    def matches(self, secret: str) -> bool:
        """Returns whether a text is the key's secret."""
        return hmac.compare_digest(hashlib.sha256(self._salt + secret.encode()).digest(), self._digest)


def _parts_of(key: KeyEntry) -> tuple[bytes, bytes]:
    kind, _, rest = key.hash.partition(":")
    salt, _, digest = rest.partition(":")
    with suppress(ValueError):
        parts = bytes.fromhex(salt), bytes.fromhex(digest)
        if kind == "sha256" and len(parts[0]) >= _SALT_BYTES and len(parts[1]) == hashlib.sha256().digest_size:
            return parts
    raise KeyFileError(f"hash of key {key.id}: expected sha256:SALT:DIGEST: create the key with `kvrouter keys create`")


def read_protected(path: Path, *, secret: bool) -> bytes:
    """Reads a file others cannot write, and if it is secret cannot read either.

    Raises:
        KeyFileError: it cannot be read, is too long, or its mode is another one.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise KeyFileError(f"cannot read {path}: {error.strerror}") from None
    try:
        _check_mode(path, os.fstat(descriptor), secret=secret)
        with open(descriptor, "rb", closefd=False) as file:
            content = file.read(_MAX_FILE_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(content) > _MAX_FILE_BYTES:
        raise KeyFileError(f"{path} is longer than {_MAX_FILE_BYTES} bytes")
    return content


def read_key_file(path: Path) -> KeyFile:
    """Reads and checks a file.

    Raises:
        KeyFileError: it cannot be read, others may read or write it, or its content is invalid.
    """
    content = read_protected(path, secret=True)
    try:
        decoded = _DECODER.decode(content)
        decoded.check()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise KeyFileError(f"{path}: {error}") from None
    except KeyFileError as error:
        raise KeyFileError(f"{path}: {error}") from None
    return decoded


def _check_mode(path: Path, found: os.stat_result, *, secret: bool) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise KeyFileError(f"{path} is not a regular file")
    mode = stat.S_IMODE(found.st_mode)
    if mode & (stat.S_IWGRP | (stat.S_IRWXO if secret else stat.S_IWOTH)):
        raise KeyFileError(
            f"{path} has mode {mode:03o}: expected one that only its owner can write"
            f"{' and others cannot read' if secret else ''}, such as 600 or 640: run `chmod 600 {path}`"
        )


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keeps other writers away from a file while the context lasts."""
    descriptor = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def write_key_file(path: Path, content: KeyFile) -> None:
    """Replaces a file at once: a reader finds the former content or the new one. Its mode stays, 600 for a new file.

    Raises:
        KeyFileError: the content is invalid.
        OSError: it cannot be written.
    """
    content.check()
    path = path.resolve()
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o600
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def now() -> int:
    """Returns the time in Unix seconds."""
    return int(time.time())
