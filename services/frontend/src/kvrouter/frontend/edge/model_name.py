"""The name of the model in a body, which another model may replace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from kvrouter.frontend.request.session_keys import SessionKeys


class _Fields(msgspec.Struct):
    model: Any = None
    conversation_id: Any = None
    prompt_cache_key: Any = None


_FIELDS = msgspec.json.Decoder(_Fields)
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class NamedModel(msgspec.Struct, frozen=True):
    """The fields of a body that choose its model; those that are no texts are empty, and refused later."""

    model: str = ""
    conversation_id: str = ""
    prompt_cache_key: str = ""

    @classmethod
    def read(cls, body: bytes | bytearray) -> NamedModel:
        """Reads a JSON body. One that is malformed names no model."""
        try:
            fields = _FIELDS.decode(body)
        except _MALFORMED:
            return cls()
        found = (fields.model, fields.conversation_id, fields.prompt_cache_key)
        return cls(*(each if isinstance(each, str) else "" for each in found))

    def session(self, headers: Mapping[str, str], sessions: SessionKeys) -> str:
        """Returns the session of the request; empty if it has none."""
        return sessions.of(headers, conversation_id=self.conversation_id, prompt_cache_key=self.prompt_cache_key)


def renamed(body: bytes | bytearray, model: str) -> bytearray:
    """Returns a body that names a model, encoded again with all other values as they are.

    Raises:
        msgspec.DecodeError: it is malformed, so no model is named in it.
    """
    fields = _OBJECT.decode(body)
    fields["model"] = msgspec.Raw(msgspec.json.encode(model))
    return bytearray(msgspec.json.encode(fields))
