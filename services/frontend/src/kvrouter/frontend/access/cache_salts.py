"""Keyed salts of caches, which engines, events and the index have in the place of a tenant and a client's salt.

Engines share cached blocks among requests of one salt. A keyed salt cannot be guessed from names, and no client can
send one: whatever a client sends is keyed again.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from pathlib import Path

from kvrouter.frontend.access.key_file import KeyFileError, read_protected

_KEY_BYTES = 32
_KEY = re.compile(rb"[0-9a-f]{64}\s*")
_DIGEST_BYTES = 24
"""Bytes of a keyed salt, which is hexadecimal: vLLM takes salts of up to 128 characters."""


def create_salt_key(path: Path) -> None:
    """Writes a new key to a file that does not exist, with mode 600.

    Raises:
        OSError: there is such a file, or it cannot be written.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(f"{secrets.token_hex(_KEY_BYTES)}\n")


class CacheSalts:
    """Computes keyed salts."""

    def __init__(self, key: bytes) -> None:
        """``key`` is the secret of the installation."""
        self._key = key

    def read(self, path: Path) -> None:
        """Takes the key of a file from now on. Blocks cached with the former one are never found.

        Raises:
            KeyFileError: as for ``of_file``. The former key stays.
        """
        self._key = CacheSalts.of_file(path)._key  # noqa: SLF001 - an object of this class

    @classmethod
    def of_file(cls, path: Path) -> CacheSalts:
        """Reads the key from a file, as ``kvrouter keys create-salt-key`` writes it.

        Raises:
            KeyFileError: it cannot be read, others may read or write it, or it is no key.
        """
        content = read_protected(path, secret=True)
        if not _KEY.fullmatch(content):
            raise KeyFileError(
                f"{path}: expected 64 hexadecimal digits: create the file with `kvrouter keys create-salt-key`"
            )
        return cls(bytes.fromhex(content.decode()))

    def of(self, tenant: str, salt: str) -> str:
        """Returns the salt for engines: HMAC-SHA-256 of a tenant and a client's salt. Empty if both are empty."""
        if not tenant and not salt:
            return ""
        name = tenant.encode()
        message = len(name).to_bytes(8, "little") + name + salt.encode("utf-8", "surrogatepass")
        return hmac.new(self._key, message, hashlib.sha256).digest()[:_DIGEST_BYTES].hex()
