"""The tables of fields of Anthropic's Messages and OpenAI's Responses say what the Frontend does with each field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from kvrouter.frontend.edge.messages_chat import MessagesFields, PromptFields
from kvrouter.frontend.edge.messages_request import MessagesRequest
from kvrouter.frontend.edge.request_fields import OnlyDefault
from kvrouter.frontend.edge.responses_chat import ResponsesFields
from kvrouter.frontend.edge.responses_request import ResponsesRequest
from kvrouter.frontend.generate_request import DEFAULT_SAMPLING, StopRules
from kvrouter.v1.errors import BadRequest
from openai.types.responses.response_create_params import ResponseCreateParamsBase, ResponseCreateParamsStreaming

from ....reference_pages import REFERENCE, rows


def table(page: str, until: str) -> dict[str, list[str]]:
    """The other cells of each field's row."""
    text = (REFERENCE / page).read_text(encoding="utf-8").split(until)[0]
    return {row[0].strip("`"): list(row[1:4]) for row in rows(text) if row[0].startswith("`")}


@dataclass(frozen=True)
class Api:
    """An API that is translated into chats."""

    request: type[MessagesRequest] | type[ResponsesRequest]
    fields: type[msgspec.Struct]
    params: tuple[type, ...]
    """What its client library sends."""
    table: Mapping[str, list[str]]
    by: int
    """Cell of the table with what becomes of a field."""
    minimal: Mapping[str, Any]
    samples: Mapping[str, Any]

    def generated(self, body: Mapping[str, Any]) -> tuple[Any, Any]:
        """Returns what the worker gets of a request, and the rest of it."""
        request = self.request.parse(json.dumps(body).encode()).to_text_request(100)
        generate = request.generate_request(request.max_tokens or 1)
        rest = msgspec.structs.replace(generate, sampling=DEFAULT_SAMPLING, stop=StopRules(1))
        return (generate.sampling, generate.stop), rest


SAMPLES: dict[str, Any] = {
    "model": "n",
    "temperature": 0.5,
    "top_p": 0.5,
    "service_tier": "auto",
    "cache_salt": "s",
    "priority": 3,
    "conversation_id": "c",
    "worker_id": 3,
    "dp_rank": 1,
    "migration_limit": 2,
    "router_config_override": {"mode": "kv"},
}
MESSAGES = Api(
    MessagesRequest,
    MessagesFields,
    (message_create_params.MessageCreateParamsBase, message_create_params.MessageCreateParamsStreaming),
    table("anthropic-fields.md", "## Blocks"),
    2,
    {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 5},
    SAMPLES
    | {
        "max_tokens": 9,
        "top_k": 5,
        "cache_control": {"type": "ephemeral"},
        "context_management": {"edits": []},
        "betas": ["x"],
        "speed": "fast",
        "metadata": {"user_id": "x"},
        "diagnostics": {"previous_message_id": "x"},
        "mcp_servers": [{"name": "x"}],
    },
)
RESPONSES = Api(
    ResponsesRequest,
    ResponsesFields,
    (ResponseCreateParamsBase, ResponseCreateParamsStreaming),
    table("responses-fields.md", "## Items"),
    0,
    {"model": "m", "input": "x", "max_output_tokens": 5},
    SAMPLES
    | {
        "max_output_tokens": 9,
        "stream_options": {"include_obfuscation": True},
        "include": ["reasoning.encrypted_content"],
        "metadata": {"a": "b"},
        "prompt_cache_retention": "24h",
        "prompt_cache_options": {"mode": "implicit"},
        "context_management": [{"type": "compaction"}],
        "truncation": "auto",
        "max_tool_calls": 3,
        "client_metadata": {"a": "b"},
    },
)
APIS = [pytest.param(MESSAGES, id="messages"), pytest.param(RESPONSES, id="responses")]
FIELDS = [pytest.param(api, name, id=name) for api in (MESSAGES, RESPONSES) for name in sorted(api.table)]


@pytest.mark.parametrize("api", APIS)
def test_every_field_is_listed(api: Api) -> None:
    taken = {field.encode_name: field for field in msgspec.structs.fields(api.fields)}
    assert set(api.table) == set(taken)
    for params in api.params:
        assert set(params.__annotations__) <= set(taken)
    for name, cells in api.table.items():
        assert (cells[api.by] == "refused") == (taken[name].type == OnlyDefault), name


def test_the_table_says_which_fields_count_tokens() -> None:
    counted = {field.encode_name for field in msgspec.structs.fields(PromptFields)}
    assert set(message_count_tokens_params.MessageCountTokensParams.__annotations__) <= counted
    for name, (created, count, _) in MESSAGES.table.items():
        assert created == "yes"
        assert count == ("yes" if name in counted else "no"), name


@pytest.mark.parametrize(("api", "name"), FIELDS)
def test_each_does_what_the_table_says(api: Api, name: str) -> None:
    by = api.table[name][api.by]
    assert by in ("worker", "Frontend", "routing", "ignored", "refused")
    if by == "Frontend":
        assert name not in api.samples
        return
    body = {**api.minimal, name: api.samples.get(name, "x")}
    if by == "refused":
        with pytest.raises(BadRequest) as refused:
            api.generated(body)
        assert refused.value.info.field == name
        return
    (to_worker, routing), (before, routing_before) = api.generated(body), api.generated(api.minimal)
    assert (to_worker != before) == (by == "worker")
    assert (routing != routing_before) == (by == "routing")


@pytest.mark.parametrize("api", APIS)
def test_null_is_what_leaving_a_field_out_is(api: Api) -> None:
    optional = dict.fromkeys(api.table.keys() - api.minimal.keys())
    assert api.generated({**api.minimal, **optional}) == api.generated(api.minimal)
