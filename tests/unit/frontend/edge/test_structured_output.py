"""Which constraint of the output a body has."""

from __future__ import annotations

import json
from typing import Any

import pytest
from kvrouter.frontend.edge.chat_request import parse_chat
from kvrouter.v1.errors import BadRequest
from kvrouter.v1.worker_pb2 import ChoiceOutput, StructuredOutput

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
ENCODED = json.dumps(SCHEMA, separators=(",", ":"))


def constraint(**fields: Any) -> StructuredOutput | None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]} | fields
    return parse_chat(json.dumps(body).encode()).generate_request(5).sampling.structured_output


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutput(json_object=True)),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
            StructuredOutput(json_schema=ENCODED),
        ),
        ({"guided_json": SCHEMA}, StructuredOutput(json_schema=ENCODED)),
        ({"guided_json": ENCODED}, StructuredOutput(json_schema=ENCODED)),
        ({"guided_regex": "a|b"}, StructuredOutput(regex="a|b")),
        ({"guided_choice": ["yes", "no"]}, StructuredOutput(choice=ChoiceOutput(texts=["yes", "no"]))),
        ({"guided_grammar": "root ::= x"}, StructuredOutput(grammar="root ::= x")),
        ({"structured_outputs": {"regex": "a", "json": None}}, StructuredOutput(regex="a")),
        ({"structured_outputs": {"json_object": True}}, StructuredOutput(json_object=True)),
    ],
)
def test_each_form_of_a_constraint(fields: dict[str, Any], expected: StructuredOutput | None) -> None:
    assert constraint(**fields) == expected


def test_a_strict_tool_constrains_an_output_that_must_call_it() -> None:
    """As docs/guides/openai.md, "Tool calls", says. SDKs send ``strict`` unasked, so it is not refused."""
    tools = [{"type": "function", "function": {"name": "f", "strict": True, "parameters": SCHEMA}}]
    assert constraint(tools=tools) is None
    assert constraint(tools=tools, tool_choice="auto") is None
    forced = constraint(tools=tools, tool_choice={"type": "function", "function": {"name": "f"}})
    assert forced is not None
    assert json.loads(forced.json_schema) == SCHEMA


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": 5}}, "response_format.json_schema.schema"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "5"}, "guided_json"),
        ({"guided_json": {"a": "x" * 300_000}}, "guided_json"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_choice": [1]}, "guided_choice"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": "x"}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "grammar": "b"}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_a_malformed_constraint_is_refused_by_its_field(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(BadRequest) as caught:
        constraint(**fields)
    assert caught.value.info.field == field
