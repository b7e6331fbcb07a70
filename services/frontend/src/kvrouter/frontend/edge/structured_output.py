"""Reads the required form of an output: OpenAI's ``response_format`` and the fields of vLLM."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from kvrouter.frontend.edge.json_body import invalid
from kvrouter.v1.worker_pb2 import ChoiceOutput, StructuredOutput

GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
"""Kind of constraint by field of the body."""
_MAX_BYTES = 256 << 10
_ADVICE = "Send one constraint: a JSON schema, json_object, a regular expression, a list of choices or a grammar."
_invalid = partial(invalid, advice=_ADVICE)


def read_structured_output(fields: Mapping[str, Any]) -> tuple[str, StructuredOutput] | None:
    """Returns the field with a constraint, and the constraint; None if the output may be anything.

    Args:
        fields: The fields that may constrain an output, by name; None for one that is not given.

    Raises:
        BadRequest: a constraint is malformed or of an unknown kind, or there are several.
    """
    found = [
        (name, _constraint(name, kind, value)) for name, kind in GUIDED.items() if (value := fields[name]) is not None
    ]
    if (options := fields["structured_outputs"]) is not None:
        found.append(("structured_outputs", _of_vllm(options)))
    response_format = fields["response_format"]
    if response_format is not None and (kind := response_format.get("type") or "text") != "text":
        found.append(("response_format", _of_openai(kind, response_format)))
    if len(found) > 1:
        raise _invalid(found[1][0], f"expected one constraint, received {found[0][0]} too")
    return found[0] if found else None


def _of_openai(kind: object, response_format: Mapping[str, Any]) -> StructuredOutput:
    if kind == "json_object":
        return StructuredOutput(json_object=True)
    if kind != "json_schema":
        raise _invalid(
            "response_format.type", f"expected text, json_object or json_schema, received {str(kind)[:32]!r}"
        )
    named = response_format.get("json_schema")
    schema = named.get("schema") if isinstance(named, dict) else None
    return _constraint("response_format.json_schema.schema", "json", schema)


def _of_vllm(options: object) -> StructuredOutput:
    options = options if isinstance(options, dict) else {}
    given = {name: value for name, value in options.items() if value is not None and value is not False}
    kinds = [name for name in given if name in (*GUIDED.values(), "json_object")]
    if unknown := next((name for name in given if name not in kinds), None):
        raise _invalid(f"structured_outputs.{unknown[:64]}", "not supported by the workers of this model")
    if len(kinds) != 1:
        raise _invalid("structured_outputs", "expected one of json, json_object, regex, choice and grammar")
    if kinds[0] == "json_object":
        return StructuredOutput(json_object=True)
    return _constraint(f"structured_outputs.{kinds[0]}", kinds[0], given[kinds[0]])


def _constraint(field: str, kind: str, value: object) -> StructuredOutput:
    if kind == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(each, str) for each in value):
            raise _invalid(field, "expected a list of texts")
        constraint = StructuredOutput(choice=ChoiceOutput(texts=value))
    elif kind == "json":
        constraint = StructuredOutput(json_schema=_schema(field, value))
    elif not isinstance(value, str) or not value:
        raise _invalid(field, "expected a text")
    else:
        constraint = StructuredOutput(regex=value) if kind == "regex" else StructuredOutput(grammar=value)
    if constraint.ByteSize() > _MAX_BYTES:
        raise _invalid(field, f"longer than {_MAX_BYTES} bytes")
    return constraint


def _schema(field: str, value: object) -> str:
    """Returns a JSON schema as text. It may be an object, or a text with one."""
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
        if isinstance(parsed, dict):
            return value if isinstance(value, str) else json.dumps(parsed, separators=(",", ":"))
    except (ValueError, RecursionError):
        pass
    raise _invalid(field, "expected a JSON schema")
