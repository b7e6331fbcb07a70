"""The name of the model in a body, which another model may replace."""

from __future__ import annotations

from typing import Any

import msgspec
from kvrouter.frontend.edge.json_body import without_prompt


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
            fields = _FIELDS.decode(without_prompt(body)[0])
        except _MALFORMED:
            return cls()
        found = (fields.model, fields.conversation_id, fields.prompt_cache_key)
        return cls(*(each if isinstance(each, str) else "" for each in found))


def renamed(body: bytes | bytearray, model: str) -> bytearray:
    """Returns a body that names a model, encoded again with all other values as they are.

    Raises:
        msgspec.DecodeError: it is malformed, so no model is named in it.
    """
    rest, prompt = without_prompt(body)
    fields = _OBJECT.decode(rest)
    if prompt:
        fields["prompt"] = msgspec.Raw(prompt)
    fields["model"] = msgspec.Raw(msgspec.json.encode(model))
    return bytearray(msgspec.json.encode(fields))
