"""A token the processes of one system share: they show it when they call, and expect it when they are called.

Workers receive a derived token, which opens workers only.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from kvrouter.net.logs import get_logger
from kvrouter.net.secret_files import FollowedSecret, UnreadableSecret, read_secret

log = get_logger(__name__)

HEADER = "x-kvrouter-service-token"
"""Key of the metadata with the token."""
DIGEST_PREFIX = "sha256:"
"""Prefix of a line with the digest of a token, in hexadecimal digits."""
_LEAST_CHARACTERS = 32
_CHECK_SECONDS = 1.0
"""Interval at which the file is checked for changes."""

_SHOWN: list[ServiceToken] = []
"""Tokens this process shows; the last one counts. Not a context variable, since servers start the tasks of their
calls in contexts of their own."""


def worker_token(token: str) -> str:
    """Returns the token shown to workers. The service token cannot be found from it."""
    return hashlib.sha256(f"worker:{token}".encode()).hexdigest()


def digest_line(token: str) -> str:
    """Returns the line by which a process without outgoing calls recognizes a token."""
    return DIGEST_PREFIX + _digest(token).hex()


class ServiceToken:
    """The tokens of a file, one a line. The first is shown, each of them is accepted, so they can be replaced.

    A changed file is read again; an unusable one is logged and changes nothing. Tokens are compared by their digests,
    in constant time.
    """

    def __init__(self, path: str, *, of_worker: bool = False) -> None:
        """Reads the file. ``of_worker`` accepts the tokens of workers; digests in the file are theirs.

        Raises:
            UnreadableSecret: it cannot be used.
        """

        def reloaded(tokens: tuple[str, tuple[bytes, ...]]) -> None:
            log.info("service_token.reloaded", file=path, tokens=len(tokens[1]))

        self._tokens = FollowedSecret(path, partial(_read, of_worker=of_worker), _CHECK_SECONDS, reloaded)

    @classmethod
    def of(cls, path: str, *, of_worker: bool = False) -> ServiceToken | None:
        """Returns the tokens of a file; None if ``path`` is empty."""
        return cls(path, of_worker=of_worker) if path else None

    def shown_to(self, role: str) -> str:
        """Returns the token for a server of a role, such as worker; empty if the file has digests only."""
        shown, _ = self._tokens()
        return worker_token(shown) if shown and role == "worker" else shown

    def accepts(self, shown: str | bytes) -> bool:
        """Returns whether a caller showed one of the tokens."""
        _, digests = self._tokens()
        digest = _digest(shown)
        # Not ``any`` of a generator, which would tell by its time which token matched.
        return sum(hmac.compare_digest(digest, known) for known in digests) > 0


@contextmanager
def showing(token: ServiceToken | None) -> Iterator[None]:
    """Shows the token on the connections this process opens to services meanwhile."""
    if token is None:
        yield
        return
    _SHOWN.append(token)
    try:
        yield
    finally:
        _SHOWN.remove(token)


def shown_token() -> ServiceToken | None:
    """Returns the token this process shows to services; None for none."""
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
