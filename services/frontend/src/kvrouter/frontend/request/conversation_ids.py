"""The conversation of a request, which one id names on every path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvrouter.runtime.requests import is_plain_text
from prometheus_client import Counter

_MAX_BYTES = 256


class ConversationIds:
    """Finds the conversation of each request."""

    def __init__(self, headers: Sequence[str], ignored: Counter) -> None:
        """Creates it.

        Args:
            headers: Names of headers with the id of a conversation, in any case, those that count first.
            ignored: Counts ids that are long or not plain text, by ``source``.
        """
        self._headers = tuple(name.lower() for name in headers)
        self._ignored = ignored

    def of(
        self, headers: Mapping[str, str], *, conversation_id: str | None = None, prompt_cache_key: str | None = None
    ) -> str:
        """Returns the first valid id of a request: the field, one in a header, or the key of its cache.

        Args:
            headers: Headers, by name in any or in lower case.
            conversation_id: The field of the request.
            prompt_cache_key: The field of OpenAI's APIs.

        Returns:
            At most 256 bytes; empty without a valid id.
        """
        if conversation_id and (valid := self._valid(conversation_id, "conversation_id")):
            return valid
        if not headers.keys().isdisjoint(self._headers):
            for name in self._headers:
                if (value := headers.get(name)) and (valid := self._valid(value, "header")):
                    return valid
        return self._valid(prompt_cache_key, "prompt_cache_key") if prompt_cache_key else ""

    def _valid(self, value: str, source: str) -> str:
        """Returns an id without spaces around it; empty, and counted, if it is invalid."""
        value = value.strip()
        if not value or is_plain_text(value, _MAX_BYTES):
            return value
        self._ignored.labels(source=source).inc()
        return ""
