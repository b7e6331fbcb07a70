"""The session of an agent, which it names in a header: its requests are one conversation."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b

SESSION_HEADERS = ("x-claude-code-session-id", "thread-id", "session-id", "x-session-id", "x-session-affinity")
"""Headers of known agents and gateways, in lower case. The first one given counts: a thread is a part of a session."""
_MAX_CHARACTERS = 256


def session_of(headers: Mapping[str, str]) -> str:
    """Returns the id of a request's session; empty if it names none.

    An id that is long or no ASCII text is replaced by its digest.

    Args:
        headers: Headers of the request, by name in any or in lower case.
    """
    named = next((value for name in SESSION_HEADERS if (value := headers.get(name, "").strip())), "")
    if len(named) <= _MAX_CHARACTERS and named.isascii():
        return named
    return blake2b(named.encode(errors="surrogateescape"), digest_size=16).hexdigest()
