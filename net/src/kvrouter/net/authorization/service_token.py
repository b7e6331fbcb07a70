"""A token that the processes of one system share: they show it when they call, and expect it when they are called.

What workers receive is another token, derived from it, which opens workers only.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Iterator
from contextlib import contextmanager

from kvrouter.net.file_version import file_version
from kvrouter.net.logs import get_logger
from kvrouter.net.secret_files import UnreadableSecret, read_secret

log = get_logger(__name__)

HEADER = "x-kvrouter-service-token"
"""Key of the metadata with the token."""
DIGEST_PREFIX = "sha256:"
"""Beginning of a line that has the digest of a token, in hexadecimal digits, instead of the token."""
_LEAST_CHARACTERS = 32
_CHECK_SECONDS = 1.0
"""Interval at which the file is checked for changes."""

_SHOWN: list[ServiceToken] = []
"""Tokens that this process shows; the last one counts. Not a context variable, since servers start the tasks of their
calls in contexts of their own."""


def worker_token(token: str) -> str:
    """Returns the token that is shown to workers. The service token cannot be found from it."""
    return hashlib.sha256(f"worker:{token}".encode()).hexdigest()


def digest_line(token: str) -> str:
    """Returns the line with which a process that calls nobody recognizes a token."""
    return DIGEST_PREFIX + _digest(token).hex()


class ServiceToken:
    """The tokens of a file, one a line. The first is shown, each of them is accepted, so that they can be replaced.

    The file is read again when it changes. If it cannot be used then, that is logged and its previous content stays in
    use. Tokens are compared by their digests, in constant time.
    """

    def __init__(self, path: str, *, of_worker: bool = False) -> None:
        """Reads the file. ``of_worker`` accepts what is shown to workers; digests in the file are of that then.

        Raises:
            UnreadableSecret: it cannot be used.
        """
        self._of_worker = of_worker
        self._path = path
        self._version = file_version(path)
        self._checked_at = time.monotonic()
        self._shown, self._digests = _read(path, of_worker=of_worker)

    @classmethod
    def of(cls, path: str, *, of_worker: bool = False) -> ServiceToken | None:
        """Returns the tokens of a file; None if ``path`` is empty."""
        return cls(path, of_worker=of_worker) if path else None

    def __repr__(self) -> str:
        return f"ServiceToken({self._path!r})"

    def shown_to(self, role: str) -> str:
        """Returns what is shown to a server of a role, such as worker; empty if the file has digests only."""
        self._follow()
        return worker_token(self._shown) if self._shown and role == "worker" else self._shown

    def accepts(self, shown: str | bytes) -> bool:
        """Returns whether a caller showed one of the tokens."""
        self._follow()
        digest = _digest(shown)
        # Not ``any`` of a generator, which would tell by its time which token matched.
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0

    def _follow(self) -> None:
        now = time.monotonic()
        if now - self._checked_at < _CHECK_SECONDS:
            return
        self._checked_at = now
        version = file_version(self._path)
        if version == self._version:
            return
        self._version = version
        try:
            self._shown, self._digests = _read(self._path, of_worker=self._of_worker)
        except UnreadableSecret as error:
            log.error("secret.unreadable", cause=str(error), uses="the previous secret")
        else:
            log.info("service_token.reloaded", file=self._path, tokens=len(self._digests))


@contextmanager
def showing(token: ServiceToken | None) -> Iterator[None]:
    """Shows the token on the connections that this process opens to services meanwhile."""
    if token is None:
        yield
        return
    _SHOWN.append(token)
    try:
        yield
    finally:
        _SHOWN.remove(token)


def shown_token() -> ServiceToken | None:
    """Returns the token that this process shows to services; None for none."""
    return _SHOWN[-1] if _SHOWN else None


def _read(path: str, *, of_worker: bool) -> tuple[str, tuple[bytes, ...]]:
    """Returns the token to show, and the digests of all.

    Raises:
        UnreadableSecret: the file cannot be used.
    """
    try:
        lines = [line.strip() for line in read_secret(path).decode("ascii").splitlines() if line.strip()]
    except UnicodeDecodeError:
        raise UnreadableSecret(f"{path}: expected tokens of ASCII characters, one a line, received others") from None
    return next((line for line in lines if not line.startswith(DIGEST_PREFIX)), ""), tuple(
        _digest_of_line(path, line, of_worker=of_worker) for line in lines
    )


def _digest_of_line(path: str, line: str, *, of_worker: bool) -> bytes:
    if not line.startswith(DIGEST_PREFIX):
        if len(line) < _LEAST_CHARACTERS or not line.isprintable() or " " in line:
            raise UnreadableSecret(
                f"{path}: expected a token of at least {_LEAST_CHARACTERS} characters without spaces on each line:"
                " create one with openssl rand -hex 32"
            )
        return _digest(worker_token(line) if of_worker else line)
    try:
        digest = bytes.fromhex(line.removeprefix(DIGEST_PREFIX))
    except ValueError:
        digest = b""
    if len(digest) != hashlib.sha256().digest_size:
        raise UnreadableSecret(f"{path}: expected 64 hexadecimal digits after {DIGEST_PREFIX}, received others")
    return digest


def _digest(token: str | bytes) -> bytes:
    return hashlib.sha256(token if isinstance(token, bytes) else token.encode()).digest()
