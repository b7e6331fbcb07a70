"""Reads files with secrets: private keys, passwords, tokens, credentials."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from kvrouter.net.logs import get_logger

log = get_logger(__name__)

_T = TypeVar("_T")

_EXPOSED = stat.S_IRWXO | stat.S_IWGRP | stat.S_IXGRP
"""Permissions a file with a secret must not have. The group may read: Kubernetes mounts secrets for a group."""


class UnreadableSecret(ValueError):
    """A file with a secret cannot be read, is empty, or can be read by everybody. The message never quotes it."""


def read_secret(path: str) -> bytes:
    """Returns the content of a file with a secret.

    Raises:
        UnreadableSecret: the file cannot be read, is empty, or has a mode wider than 0640.
    """
    try:
        with open(path, "rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            content = file.read()
    except OSError as error:
        raise UnreadableSecret(f"{path}: {error.strerror}: expected a file that this process can read") from None
    if mode & _EXPOSED:
        raise UnreadableSecret(f"{path}: expected mode 0600 or 0640, received {mode:04o}: run chmod 600 on it")
    if not content.strip():
        raise UnreadableSecret(f"{path}: expected a secret, received an empty file")
    return content


def read_secret_line(path: str) -> str:
    """Returns the secret of a file of one line, without the line break.

    Raises:
        UnreadableSecret: as ``read_secret``, or the content is not one line of text.
    """
    try:
        lines = read_secret(path).decode().splitlines()
    except UnicodeDecodeError:
        raise UnreadableSecret(f"{path}: expected one line of text, received binary data") from None
    if len(lines) != 1:
        raise UnreadableSecret(f"{path}: expected one line, received {len(lines)}")
    return lines[0].strip()


class FollowedSecret(Generic[_T]):
    """The content of a file with a secret, which is read again when the file changes. Logs an unusable change."""

    def __init__(
        self,
        path: str,
        read: Callable[[str], _T],
        check_seconds: float = 0.0,
        on_reload: Callable[[_T], None] = lambda _content: None,
    ) -> None:
        """Reads the file.

        Args:
            path: The file.
            read: Returns the content of a file; raises UnreadableSecret.
            check_seconds: Interval at which the file is checked for changes, seconds; 0 for each use.
            on_reload: Called with the content of a changed file.

        Raises:
            UnreadableSecret: it cannot be used.
        """
        self._path = path
        self._read = read
        self._check_seconds = check_seconds
        self._on_reload = on_reload
        self._version = file_version(path)
        self._checked_at = time.monotonic()
        self._content = read(path)

    def __repr__(self) -> str:
        return f"FollowedSecret({self._path!r})"

    def __call__(self) -> _T:
        """Returns the content; the previous one if the file cannot be used at the moment."""
        now = time.monotonic()
        if now - self._checked_at >= self._check_seconds:
            self._checked_at = now
            version = file_version(self._path)
            if version != self._version:
                self._version = version
                self._reload()
        return self._content

    def _reload(self) -> None:
        try:
            self._content = self._read(self._path)
        except UnreadableSecret as error:
            log.error("secret.unreadable", cause=str(error), uses="the previous secret")
        else:
            self._on_reload(self._content)


FileVersion = tuple[int, int, int, int]


def file_version(path: str | os.PathLike[str]) -> FileVersion | None:
    """Returns the version of a file, or of the target of a link as Kubernetes replaces it; None without a file."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_mode
