"""Which fields of a request to an engine its client may set. Pure: each rule raises ``RuleBroken``, or returns."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import msgspec
from kvrouter.engines.fields import (
    HARMLESS,
    HARMLESS_OPTIONS,
    INTERNAL_PART_FIELDS,
    INTERNAL_TEMPLATE_FIELDS,
)
from kvrouter.frontend.access.refusals import RefusalReason, RuleBroken

_MOST_NAMED = 8
_MOST_CHARACTERS = 64
_ESCAPED_LETTER = re.compile(rb"\\u00[4-7]", re.IGNORECASE)
_PART_FIELD = re.compile("|".join(f'"{name}"' for name in sorted(INTERNAL_PART_FIELDS)).encode())
_KEYS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ANYTHING = msgspec.json.Decoder()
_OPTIONS_FIELD = "sampling_options.engine_options_json"
_MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class FieldRules:
    """The fields clients may set: the harmless ones of each path, and those the operator permits."""

    def __init__(self, permitted: Collection[str] = ()) -> None:
        """``permitted`` are further fields, none of them internal."""
        permitted = frozenset(permitted)
        self._fields = {path: names | permitted for path, names in HARMLESS.items()}
        self._options = HARMLESS_OPTIONS | permitted

    def check_body(self, path: str, body: Mapping[str, msgspec.Raw]) -> None:
        """Checks a body for an engine's API.

        Args:
            path: Path of the API. At others, which only administrators reach, every field is permitted.
            body: Its fields, encoded.

        Raises:
            RuleBroken: a field is not permitted.
        """
        if path not in self._fields:
            return
        _refuse(body.keys() - self._fields[path])
        _refuse(_template_fields(body.get("chat_template_kwargs")), "chat_template_kwargs.")
        for name in ("messages", "input"):
            _refuse(_part_fields(body.get(name)), f"{name}.content.")

    def check_options(self, options_json: str) -> None:
        """Checks options for the engine alone. Anything but a JSON object is left for the worker to refuse.

        Raises:
            RuleBroken: an option is not permitted.
        """
        if not options_json:
            return
        try:
            names = _KEYS.decode(options_json).keys()
        except _MALFORMED:
            return
        _refuse(names - self._options, f"{_OPTIONS_FIELD}.")


def _refuse(names: Iterable[str], prefix: str = "") -> None:
    refused = sorted(names)
    if not refused:
        return
    named = ", ".join(repr(name[:_MOST_CHARACTERS]) for name in refused[:_MOST_NAMED])
    more = f" and {len(refused) - _MOST_NAMED} more" if len(refused) > _MOST_NAMED else ""
    raise RuleBroken(
        RefusalReason.FIELD,
        f"the caller may not set {named}{more}: expected fields of prompt, sampling and response only",
        field=f"{prefix}{refused[0][:_MOST_CHARACTERS]}",
        advice="Leave it out. An operator permits harmless fields with --permitted-engine-fields.",
    )


def _template_fields(encoded: msgspec.Raw | None) -> Iterable[str]:
    try:
        return _KEYS.decode(encoded).keys() & INTERNAL_TEMPLATE_FIELDS if encoded is not None else ()
    except _MALFORMED:
        return ()  # No object: the engine refuses it.


def _part_fields(encoded: msgspec.Raw | None) -> set[str]:
    """Returns the internal fields of the parts of messages. They are decoded only if they may have one."""
    if encoded is None:
        return set()
    raw = bytes(encoded)
    if not _PART_FIELD.search(raw) and not _ESCAPED_LETTER.search(raw):
        return set()
    try:
        return set(_in_messages(_ANYTHING.decode(raw)))
    except _MALFORMED:
        return set()


def _in_messages(messages: Any) -> Iterable[str]:
    for message in messages if isinstance(messages, list) else ():
        # An item of a response's input may be a part itself.
        yield from _in_part(message)


def _in_part(part: Any) -> Iterable[str]:
    """Yields the internal fields of a message or part, and of the parts in its content."""
    if not isinstance(part, dict):
        return
    yield from part.keys() & INTERNAL_PART_FIELDS
    if isinstance(kind := part.get("type"), str) and kind in INTERNAL_PART_FIELDS:
        yield kind
    for name, value in part.items():
        if name == "content" or name.endswith(("_url", "_audio")):
            for each in value if isinstance(value, list) else (value,):
                yield from _in_part(each)
