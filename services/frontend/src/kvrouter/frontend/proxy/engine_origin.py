"""The server in the URL of an engine's OpenAI API."""

from __future__ import annotations

import base64
from functools import lru_cache
from urllib.parse import unquote, urlsplit

from msgspec import Struct


class Origin(Struct, frozen=True, cache_hash=True):
    """The server of a URL. URLs with equal origins share connections."""

    host: str
    port: int
    is_encrypted: bool
    path: str
    """Path before the paths of its APIs, without a slash at its end."""
    authority: str
    """Host and port as its requests name them."""
    credential: str
    """Header with the login in the URL; empty if there is none."""

    @classmethod
    @lru_cache(4096)
    def of(cls, url: str) -> Origin:
        """Returns the server of a URL. Raises ValueError if it is no URL of HTTP."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or not url.isascii():
            raise ValueError("expected a URL with http:// or https://")
        is_encrypted = parts.scheme == "https"
        credential = ""
        if parts.username is not None:
            login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            credential = f"Authorization: Basic {base64.b64encode(login.encode()).decode()}\r\n"
        port = parts.port or (443 if is_encrypted else 80)
        path, authority = parts.path.rstrip("/"), parts.netloc.rpartition("@")[2]
        return cls(parts.hostname, port, is_encrypted, path, authority, credential)
