"""Reads files with secrets: private keys, passwords, tokens, credentials."""

from __future__ import annotations

import os
import stat

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
