"""Outputs that keep a constraint: pydantic is the judge of schemas, Python's re of patterns."""

from __future__ import annotations

import json
import re
from datetime import date, datetime
from enum import Enum
from typing import Annotated, Any, Literal
from uuid import UUID

import pytest
from kvrouter.mocker.constrained.constraint import Constraint
from kvrouter.mocker.constrained.errors import Unsupported
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

SEEDS = [str(number) for number in range(30)]


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Address(BaseModel):
    model_config = ConfigDict(extra="forbid")

    street: str = Field(min_length=30, max_length=35)
    number: int = Field(ge=1, lt=4)
    code: str = Field(pattern=r"^[A-Z]{2}-\d{4,5}$")


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")

    id: UUID
    name: str
    born: date
    seen: datetime | None
    height: float = Field(gt=0.5, le=2.5)
    score: Annotated[int, Field(multiple_of=7, ge=10, le=30)]
    below: Annotated[float, Field(lt=-5)]
    kind: Literal["a", "b"]
    colours: list[Colour] = Field(min_length=1, max_length=5)
    homes: list[Address] = Field(min_length=3)
    pair: tuple[int, str]
    counts: dict[str, int]
    friend: Person | None = None
    friends: list[Person] = []
    either: int | Address | bool = 1


@pytest.mark.parametrize("seed", SEEDS)
def test_an_output_is_an_instance_of_its_schema(seed: str) -> None:
    for kind in (Person, Address, list[Person], dict[str, int], Colour):
        adapter = TypeAdapter[Any](kind)
        text = Constraint(schema=adapter.json_schema()).draw(seed)
        adapter.validate_json(text, strict=kind is Address)
        assert Constraint(schema=adapter.json_schema()).draw(seed) == text, "equal seeds draw the same"


def test_seeds_draw_different_outputs() -> None:
    assert len({Constraint(schema=Person.model_json_schema()).draw(seed) for seed in SEEDS}) == len(SEEDS)


@pytest.mark.parametrize(
    ("schema", "valid"),
    [
        ({"const": 5}, lambda value: value == 5),
        ({"type": ["null", "boolean"]}, lambda value: value in (None, True, False)),
        ({"type": "object"}, lambda value: isinstance(value, dict)),
        ({"properties": {"a": {}}}, lambda value: set(value) == {"a"}),
        ({"required": ["b"]}, lambda value: set(value) == {"b"}),
        ({"type": "object", "minProperties": 3}, lambda value: len(value) >= 3),
        ({"type": "array", "items": False}, lambda value: value == []),
        ({"type": "array", "maxItems": 1}, lambda value: len(value) <= 1),
        (
            {"type": "array", "uniqueItems": True, "minItems": 3, "items": {"enum": [1, 2, 3]}},
            lambda value: sorted(value) == [1, 2, 3],
        ),
        (
            {"allOf": [{"properties": {"a": {"const": 1}}}, {"properties": {"b": {"const": 2}}}], "required": ["a"]},
            lambda value: value == {"a": 1, "b": 2},
        ),
        ({"anyOf": [{"minimum": 5}], "type": "integer", "maximum": 5}, lambda value: value == 5),
        ({"type": "number", "exclusiveMinimum": 1, "exclusiveMaximum": 1.001}, lambda value: 1 < value < 1.001),
        ({"type": "number", "multipleOf": 0.5, "maximum": 2}, lambda value: (value * 2).is_integer() and value <= 2),
        ({"type": "integer", "exclusiveMaximum": 0}, lambda value: value < 0),
    ],
)
def test_an_output_keeps_each_keyword(schema: Any, valid: Any) -> None:
    for seed in SEEDS:
        assert valid(json.loads(Constraint(schema=schema).draw(seed))), seed


@pytest.mark.parametrize(
    "pattern",
    [r"\d{3}-\d{4}", r"^(?:yes|no)$", r"[^a-z]{2,}x*?", r"(a|b)\1", r"\w+@\w+\.(com|org)", r".{5}\s\S\D", r"[à-ü]+"],
)
def test_an_output_matches_its_pattern(pattern: str) -> None:
    for seed in SEEDS:
        assert re.fullmatch(pattern, Constraint(regex=pattern).draw(seed))


def test_an_output_is_one_of_its_choices_or_an_object() -> None:
    assert {Constraint(choice=["red", "blue"]).draw(seed) for seed in SEEDS} == {"red", "blue"}
    assert isinstance(json.loads(Constraint().draw("1")), dict)


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint(schema=False),
        Constraint(schema={"not": {}}),
        Constraint(schema={"type": "text"}),
        Constraint(schema={"$ref": "#/$defs/missing"}),
        Constraint(schema={"$ref": "https://example.com/schema"}),
        Constraint(schema={"$ref": "#"}),
        Constraint(schema={"type": "integer", "minimum": 5, "maximum": 4}),
        Constraint(schema={"type": "array", "minItems": 20_000}),
        Constraint(schema={"type": "array", "uniqueItems": True, "minItems": 3, "items": {"enum": [1, 2]}}),
        Constraint(regex="("),
        Constraint(regex="(?=a)b"),
    ],
)
def test_what_cannot_be_drawn_is_refused(constraint: Constraint) -> None:
    with pytest.raises(Unsupported):
        constraint.draw("1")
