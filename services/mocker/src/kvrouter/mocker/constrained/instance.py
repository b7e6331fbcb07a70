"""Draws an instance of a JSON schema.

It has all properties that the schema names, and two items in each array; recursive parts end below a certain depth.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from random import Random
from typing import Any

from kvrouter.mocker.constrained.errors import Unsupported
from kvrouter.mocker.constrained.pattern import draw_match

_FULL_DEPTH = 9
"""Depth from which on an instance is kept small: without optional properties, with as few items as possible."""
_MAX_DEPTH = 64
_MAX_VALUES = 10_000
_UNSUPPORTED = frozenset(
    {"not", "if", "contains", "dependentRequired", "dependentSchemas", "dependencies", "propertyNames", "$dynamicRef"}
)
_WORDS = (
    "amber",
    "basin",
    "cedar",
    "delta",
    "ember",
    "fjord",
    "grove",
    "heron",
    "inlet",
    "juniper",
    "kestrel",
    "lagoon",
)
_FORMATS = {
    "date": r"20[0-2]\d-(0[1-9]|1[0-2])-(0[1-9]|1\d|2[0-8])",
    "time": r"([01]\d|2[0-3]):[0-5]\d:[0-5]\dZ",
    "date-time": r"20[0-2]\d-(0[1-9]|1[0-2])-(0[1-9]|1\d|2[0-8])T([01]\d|2[0-3]):[0-5]\d:[0-5]\dZ",
    "duration": r"P[1-9]D",
    "email": r"[a-z]{3,8}@example\.com",
    "hostname": r"[a-z]{3,8}\.example\.com",
    "ipv4": r"10\.[1-9]\d\.[1-9]\d\.[1-9]\d",
    "ipv6": r"2001:db8::[1-9a-f][0-9a-f]{3}",
    "uri": r"https://example\.com/[a-z]{3,8}",
    "uuid": r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}",
}
_TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")


def draw_word(random: Random) -> str:
    """Returns a word."""
    return random.choice(_WORDS)


def draw_instance(schema: Any, random: Random) -> Any:
    """Returns a value that is valid by a schema.

    Raises:
        Unsupported: the schema is invalid, has no instance, or has keywords that the simulated engine does not know.
    """
    return _Drawing(schema, random).value(schema, 0)


class _TooDeep(Unsupported):
    """A recursive schema is followed too far; the caller takes another way."""

    def __init__(self) -> None:
        super().__init__("the schema has no instance of moderate depth")


class _Drawing:
    """Draws one instance."""

    def __init__(self, root: Any, random: Random) -> None:
        self._root = root
        self._random = random
        self._values = 0

    def value(self, schema: Any, depth: int) -> Any:
        """Returns an instance of a part of the schema."""
        self._values += 1
        if self._values > _MAX_VALUES:
            raise Unsupported(f"the simulated engine draws at most {_MAX_VALUES} values of a JSON schema")
        if depth > _MAX_DEPTH:
            raise _TooDeep
        if schema is True:
            return draw_word(self._random)
        if not isinstance(schema, dict):
            raise Unsupported(f"expected a JSON schema, received {str(schema)[:32]!r}")
        if unknown := sorted(_UNSUPPORTED & schema.keys()):
            raise Unsupported(f"the simulated engine does not know {', '.join(unknown)} in a JSON schema")
        if "$ref" in schema:
            return self.value(_merged(self._referred(schema["$ref"]), schema, "$ref"), depth + 1)
        if "allOf" in schema:
            whole = _merged({}, schema, "allOf")
            for part in schema["allOf"]:
                resolved = self._referred(part["$ref"]) if isinstance(part, dict) and "$ref" in part else part
                whole = _merged(resolved, whole)
            return self.value(whole, depth + 1)
        for name in ("anyOf", "oneOf"):
            if name in schema:
                return self._first_of([_merged(each, schema, name) for each in schema[name]], depth)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return self._random.choice(schema["enum"])
        return self._of_type(schema, depth)

    def _first_of(self, schemas: list[Any], depth: int) -> Any:
        """Returns an instance of one of several schemas, of another one if the drawn one goes too deep."""
        drawn = self._random.sample(schemas, len(schemas))
        for schema in sorted(drawn, key=_is_composed) if depth > _FULL_DEPTH else drawn:
            try:
                return self.value(schema, depth + 1)
            except _TooDeep:
                continue
        raise _TooDeep

    def _of_type(self, schema: Mapping[str, Any], depth: int) -> Any:
        match _type_of(schema):
            case list() as types:
                return self._first_of([{**schema, "type": each} for each in types], depth)
            case "object":
                return self._object(schema, depth)
            case "array":
                return self._array(schema, depth)
            case "string":
                return self._string(schema)
            case "integer":
                return self._integer(schema)
            case "number":
                return self._number(schema)
            case "boolean":
                return self._random.random() < 0.5
            case "null":
                return None
            case other:
                raise Unsupported(f"expected a type of {', '.join(_TYPES)}, received {str(other)[:32]!r}")

    def _object(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        drawn = {}
        for name in dict.fromkeys([*properties, *required]):
            if name in required or depth <= _FULL_DEPTH:
                drawn[name] = self.value(properties.get(name, schema.get("additionalProperties", True)), depth + 1)
        number = 0
        while len(drawn) < schema.get("minProperties", 0):
            number += 1
            value = self.value(schema.get("additionalProperties", True), depth + 1)
            drawn.setdefault(f"{draw_word(self._random)}_{number}", value)
        return drawn

    def _array(self, schema: Mapping[str, Any], depth: int) -> list[Any]:
        first, rest = schema.get("prefixItems", []), schema.get("items", True)
        drawn = [self.value(each, depth + 1) for each in first]
        least = schema.get("minItems", 0)
        usual = 2 if depth <= _FULL_DEPTH and rest is not False else 0
        wanted = max(least, min(schema.get("maxItems", usual), usual))
        for _ in range(100 + wanted):
            if len(drawn) >= wanted:
                break
            item = self.value(rest, depth + 1)
            if not (schema.get("uniqueItems") and item in drawn):
                drawn.append(item)
        if len(drawn) < least:
            raise Unsupported(f"the simulated engine finds no {least} different items for an array")
        return drawn

    def _string(self, schema: Mapping[str, Any]) -> str:
        if (pattern := schema.get("pattern")) is not None:
            return draw_match(pattern, self._random)
        if schema.get("format") in _FORMATS:
            return draw_match(_FORMATS[schema["format"]], self._random)
        text = " ".join(draw_word(self._random) for _ in range(self._random.randint(1, 3)))
        while len(text) < schema.get("minLength", 0):
            text += f" {draw_word(self._random)}"
        return text[: schema.get("maxLength", len(text))]

    def _integer(self, schema: Mapping[str, Any]) -> int:
        low, high = _range(schema, 1)
        step = schema.get("multipleOf", 1)
        if step != int(step):
            step = 1
        first, last = math.ceil(low / step), math.floor(high / step)
        if first > last:
            raise Unsupported(f"no integer is at least {low}, at most {high} and a multiple of {step}")
        return int(self._random.randint(first, last) * step)

    def _number(self, schema: Mapping[str, Any]) -> float:
        if "multipleOf" in schema:
            low, high = _range(schema, schema["multipleOf"])
            step = schema["multipleOf"]
            return float(self._random.randint(math.ceil(low / step), math.floor(high / step)) * step)
        low, high = _range(schema, 0)
        drawn = round(self._random.uniform(low, high), 2)
        lowest, highest = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
        if low <= drawn <= high and drawn not in (lowest, highest):
            return drawn
        return (low + high) / 2

    def _referred(self, reference: object) -> Any:
        """Returns the part of the schema to which a reference points."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise Unsupported(f"expected a $ref into the same schema, received {str(reference)[:64]!r}")
        found = self._root
        for name in reference[1:].split("/")[1:]:
            key = name.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, dict) or key not in found:
                raise Unsupported(f"the $ref {reference[:64]!r} points to nothing")
            found = found[key]
        return found


def _is_composed(schema: Any) -> bool:
    return isinstance(schema, dict) and not schema.keys().isdisjoint({"$ref", "allOf", "anyOf", "properties", "items"})


def _type_of(schema: Mapping[str, Any]) -> Any:
    """Returns the type of a schema; without one that which its keywords are about."""
    if "type" in schema:
        return schema["type"]
    if schema.keys() & {"properties", "required", "additionalProperties", "minProperties"}:
        return "object"
    if schema.keys() & {"items", "prefixItems", "minItems"}:
        return "array"
    if schema.keys() & {"minimum", "maximum", "multipleOf", "exclusiveMinimum", "exclusiveMaximum"}:
        return "number"
    return "string"


def _merged(part: Any, around: Mapping[str, Any], without: str = "") -> Any:
    """Returns a schema that requires what a part of it and the keywords around the part require."""
    rest = {name: value for name, value in around.items() if name not in (without, "$defs", "definitions")}
    if not isinstance(part, dict) or not rest:
        return part
    whole = {**part, **rest}
    for name in ("properties", "required"):
        if name in part and name in rest:
            both = part[name], rest[name]
            whole[name] = {**both[0], **both[1]} if name == "properties" else [*both[0], *both[1]]
    return whole


def _range(schema: Mapping[str, Any], least_step: float) -> tuple[float, float]:
    """Returns the least and the largest number to draw; of those that a schema leaves open, near the others."""
    low, high = schema.get("minimum"), schema.get("maximum")
    if isinstance(above := schema.get("exclusiveMinimum"), int | float) and not isinstance(above, bool):
        low = above + least_step if low is None else max(low, above + least_step)
    if isinstance(below := schema.get("exclusiveMaximum"), int | float) and not isinstance(below, bool):
        high = below - least_step if high is None else min(high, below - least_step)
    if low is None:
        low = 0 if high is None or high >= 0 else high - 100
    if high is None:
        high = low + 100
    return low, high
