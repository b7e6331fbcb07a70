"""The name of the model in a body, which another model may replace."""

from __future__ import annotations

from typing import Any

import msgspec
from kvrouter.core import find_json_value

_PROMPT = "prompt"


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
            fields = _FIELDS.decode(_without_prompt(body)[0])
        except _MALFORMED:
            return cls()
        found = (fields.model, fields.conversation_id, fields.prompt_cache_key)
        return cls(*(each if isinstance(each, str) else "" for each in found))


def renamed(body: bytes | bytearray, model: str) -> bytearray:
    """Returns a body that names a model, encoded again with all other values as they are.

    Raises:
        msgspec.DecodeError: it is malformed, so no model is named in it.
    """
    rest, prompt = _without_prompt(body)
    fields = _OBJECT.decode(rest)
    if prompt:
        fields[_PROMPT] = msgspec.Raw(prompt)
    fields["model"] = msgspec.Raw(msgspec.json.encode(model))
    return bytearray(msgspec.json.encode(fields))


def _without_prompt(body: bytes | bytearray) -> tuple[bytes | bytearray, bytes]:
    """Returns a body with null in the place of its prompt, and the prompt; empty if it has none.

    The decoder takes twenty times as long to skip a list of token ids as it takes to cut the list out.
    """
    found = find_json_value(body, _PROMPT) if b'"prompt"' in body else None
    if found is None:
        return body, b""
    start, end = found
    with memoryview(body) as view:
        return b"".join((view[:start], b"null", view[end:])), bytes(view[start:end])
