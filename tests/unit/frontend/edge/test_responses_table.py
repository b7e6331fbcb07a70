"""The table of fields of OpenAI's Responses in the reference says what the Frontend does with each field."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from kvrouter.frontend.edge.request_fields import OnlyDefault
from kvrouter.frontend.edge.responses_chat import ResponsesFields
from kvrouter.frontend.edge.responses_request import ResponsesRequest
from kvrouter.frontend.generate_request import DEFAULT_SAMPLING, StopRules
from kvrouter.v1.errors import BadRequest
from openai.types.responses.response_create_params import ResponseCreateParamsBase, ResponseCreateParamsStreaming

from ....reference_pages import REFERENCE, rows

PAGE = (REFERENCE / "responses-fields.md").read_text(encoding="utf-8").split("## Items")[0]
TABLE = {row[0].strip("`"): row[1] for row in rows(PAGE) if row[0].startswith("`")}
MINIMAL: dict[str, Any] = {"model": "m", "input": "x", "max_output_tokens": 5}
SAMPLES: dict[str, Any] = {
    "model": "n",
    "max_output_tokens": 9,
    "temperature": 0.5,
    "top_p": 0.5,
    "stream_options": {"include_obfuscation": True},
    "include": ["reasoning.encrypted_content"],
    "metadata": {"a": "b"},
    "user": "x",
    "safety_identifier": "x",
    "service_tier": "auto",
    "prompt_cache_retention": "24h",
    "prompt_cache_options": {"mode": "implicit"},
    "context_management": [{"type": "compaction"}],
    "truncation": "auto",
    "max_tool_calls": 3,
    "client_metadata": {"a": "b"},
    "cache_salt": "s",
    "priority": 3,
    "conversation_id": "c",
    "worker_id": 3,
    "dp_rank": 1,
    "migration_limit": 2,
    "router_config_override": {"mode": "kv"},
}


def generated(body: dict[str, Any]) -> tuple[Any, Any]:
    """Returns what the worker gets of a response, and the rest of the request."""
    request = ResponsesRequest.parse(json.dumps(body).encode()).to_text_request(100)
    generate = request.generate_request(request.max_tokens or 1)
    rest = msgspec.structs.replace(generate, sampling=DEFAULT_SAMPLING, stop=StopRules(1))
    return (generate.sampling, generate.stop), rest


def test_every_field_is_listed() -> None:
    taken = {field.encode_name: field for field in msgspec.structs.fields(ResponsesFields)}
    assert set(TABLE) == set(taken)
    for params in (ResponseCreateParamsBase, ResponseCreateParamsStreaming):
        assert set(params.__annotations__) <= set(taken)
    for name, by in TABLE.items():
        assert (by == "refused") == (taken[name].type == OnlyDefault), name


@pytest.mark.parametrize("name", sorted(TABLE))
def test_each_does_what_the_table_says(name: str) -> None:
    by = TABLE[name]
    assert by in ("worker", "Frontend", "routing", "ignored", "refused")
    if by == "Frontend":
        assert name not in SAMPLES
        return
    body = MINIMAL | {name: SAMPLES.get(name, "x")}
    if by == "refused":
        with pytest.raises(BadRequest) as refused:
            generated(body)
        assert refused.value.info.field == name
        return
    (to_worker, routing), (before, routing_before) = generated(body), generated(MINIMAL)
    assert (to_worker != before) == (by == "worker")
    assert (routing != routing_before) == (by == "routing")


def test_null_is_what_leaving_a_field_out_is() -> None:
    optional = TABLE.keys() - MINIMAL.keys()
    assert generated(MINIMAL | dict.fromkeys(optional)) == generated(MINIMAL)
