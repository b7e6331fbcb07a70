"""The table of fields of the Anthropic API in the reference says what the Frontend does with each field."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from kvrouter.frontend.edge.messages_chat import MessagesFields, PromptFields
from kvrouter.frontend.edge.messages_request import MessagesRequest
from kvrouter.frontend.edge.request_fields import OnlyDefault
from kvrouter.frontend.generate_request import DEFAULT_SAMPLING, StopRules
from kvrouter.v1.errors import BadRequest

from ....reference_pages import REFERENCE, rows

PAGE = (REFERENCE / "anthropic-fields.md").read_text(encoding="utf-8").split("## Blocks")[0]
TABLE = {row[0].strip("`"): row[1:4] for row in rows(PAGE) if row[0].startswith("`")}
MINIMAL: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 5}
SAMPLES: dict[str, Any] = {
    "model": "n",
    "max_tokens": 9,
    "temperature": 0.5,
    "top_k": 5,
    "top_p": 0.5,
    "cache_control": {"type": "ephemeral"},
    "context_management": {"edits": []},
    "betas": ["x"],
    "speed": "fast",
    "user_profile_id": "x",
    "workspace_id": "x",
    "metadata": {"user_id": "x"},
    "service_tier": "auto",
    "inference_geo": "x",
    "diagnostics": {"previous_message_id": "x"},
    "cache_salt": "s",
    "priority": 3,
    "conversation_id": "c",
    "worker_id": 3,
    "dp_rank": 1,
    "migration_limit": 2,
    "router_config_override": {"mode": "kv"},
    "container": "x",
    "mcp_servers": [{"name": "x"}],
}


def generated(body: dict[str, Any]) -> tuple[Any, Any]:
    """Returns what the worker gets of a message, and the rest of the request."""
    request = MessagesRequest.parse(json.dumps(body).encode()).to_text_request(100)
    generate = request.generate_request(request.max_tokens or 1)
    rest = msgspec.structs.replace(generate, sampling=DEFAULT_SAMPLING, stop=StopRules(1))
    return (generate.sampling, generate.stop), rest


def test_every_field_is_listed() -> None:
    taken = {field.encode_name: field for field in msgspec.structs.fields(MessagesFields)}
    counted = {field.encode_name for field in msgspec.structs.fields(PromptFields)}
    assert set(TABLE) == set(taken)
    assert set(message_create_params.MessageCreateParamsStreaming.__annotations__) <= set(taken)
    assert set(message_create_params.MessageCreateParamsBase.__annotations__) <= set(taken)
    assert set(message_count_tokens_params.MessageCountTokensParams.__annotations__) <= counted
    for name, (created, count, by) in TABLE.items():
        assert created == "yes"
        assert count == ("yes" if name in counted else "no"), name
        assert (by == "refused") == (taken[name].type == OnlyDefault), name


@pytest.mark.parametrize("name", sorted(TABLE))
def test_each_does_what_the_table_says(name: str) -> None:
    by = TABLE[name][2]
    assert by in ("worker", "Frontend", "routing", "ignored", "refused")
    if by == "Frontend":
        assert name not in SAMPLES
        return
    body = MINIMAL | {name: SAMPLES[name]}
    if by == "refused":
        with pytest.raises(BadRequest) as refused:
            generated(body)
        assert refused.value.info.field == name
        assert generated(MINIMAL | {name: None}) == generated(MINIMAL)
        return
    (to_worker, routing), (before, routing_before) = generated(body), generated(MINIMAL)
    assert (to_worker != before) == (by == "worker")
    assert (routing != routing_before) == (by == "routing")


def test_null_is_what_leaving_a_field_out_is() -> None:
    optional = TABLE.keys() - MINIMAL.keys()
    assert generated(MINIMAL | dict.fromkeys(optional)) == generated(MINIMAL)
