"""Reads files with secrets: private keys, passwords, tokens, credentials."""

from __future__ import annotations

import os
import stat

from kvrouter.net.logs import get_logger

log = get_logger(__name__)

_EXPOSED = stat.S_IRWXO | stat.S_IWGRP | stat.S_IXGRP
"""Permissions that a file with a secret must not have. The group may read: Kubernetes mounts secrets for a group."""


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
    """Returns the secret of a file that holds one line, without the line break.

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


class SecretLine:
    """A secret of one line in a file, which is read again for each use, so that it can be replaced."""

    def __init__(self, path: str) -> None:
        """Reads the file.

        Raises:
            UnreadableSecret: it cannot be used.
        """
        self._path = path
        self._last = read_secret_line(path)

    def __repr__(self) -> str:
        return f"SecretLine({self._path!r})"

    def __call__(self) -> str:
        """Returns the secret; the previous one if the file cannot be used at the moment."""
        try:
            self._last = read_secret_line(self._path)
        except UnreadableSecret as error:
            log.error("secret.unreadable", cause=str(error), uses="the previous secret")
        return self._last
