"""The table of fields in the reference says what the Frontend does with each field."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from kvrouter.frontend.api.completion_request import CompletionFields, CompletionRequest
from kvrouter.frontend.api.openai.chat_request import ChatFields, parse_chat
from kvrouter.runtime.errors import BadRequest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from ....reference_pages import REFERENCE, rows

TABLE = {
    row[0].strip("`"): row[1:4]
    for row in rows((REFERENCE / "openai-fields.md").read_text(encoding="utf-8"))
    if row[0].startswith("`")
}
STRUCTS: dict[str, type[msgspec.Struct]] = {"chat": ChatFields, "completion": CompletionFields}
MINIMAL: dict[str, dict[str, Any]] = {
    "chat": {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 5},
    "completion": {"model": "m", "prompt": [1, 2], "max_tokens": 5},
}
TOOL = {"type": "function", "function": {"name": "f"}}
SAMPLES: dict[str, Any] = {
    "best_of": 3,
    "logit_bias": {"1": 5},
    "suffix": "x",
    "modalities": ["text"],
    "user": "u",
    "metadata": {"a": "b"},
    "store": True,
    "service_tier": "flex",
    "safety_identifier": "x",
    "prompt_cache_key": "x",
    "seed": 7,
    "top_k": 5,
    "prediction": {"type": "content"},
    "prompt_cache_retention": "24h",
    "prompt_cache_options": {"mode": "implicit"},
    "max_tokens": 9,
    "max_completion_tokens": 9,
    "min_tokens": 2,
    "stop_token_ids": [4],
    "ignore_eos": True,
    "temperature": 0.5,
    "top_p": 0.5,
    "min_p": 0.5,
    "frequency_penalty": 1,
    "presence_penalty": 1,
    "repetition_penalty": 2,
    "response_format": {"type": "json_object"},
    "structured_outputs": {"regex": "a"},
    "guided_json": {},
    "guided_regex": "a",
    "guided_choice": ["a"],
    "guided_grammar": "a",
    "priority": 3,
    "cache_salt": "s",
    "conversation_id": "c",
    "worker_id": 3,
    "dp_rank": 1,
    "migration_limit": 2,
    "model": "n",
    "router_config_override": {"mode": "kv"},
}


def generated(kind: str, body: dict[str, Any]) -> tuple[Any, Any]:
    """Returns the request to the Scheduler and the worker: what the worker gets of it, and the rest."""
    encoded = json.dumps(body).encode()
    if kind == "chat":
        request = parse_chat(encoded)
    else:
        request = CompletionRequest.parse(encoded, max_prompt_tokens=100).to_text_request()
    message = request.fields.generate_request(request.max_tokens or 1)
    sampling, stop = message.sampling_options.SerializeToString(), message.stop_conditions.SerializeToString()
    message.ClearField("sampling_options")
    message.ClearField("stop_conditions")
    return (sampling, stop), message.SerializeToString()


def test_every_field_is_listed() -> None:
    of_openai = {
        *chat_create_params.CompletionCreateParamsBase.__annotations__,
        *completion_create_params.CompletionCreateParamsBase.__annotations__,
    }
    taken = {kind: {field.encode_name for field in msgspec.structs.fields(struct)} for kind, struct in STRUCTS.items()}
    # OpenAI has them for chats only; here they are fields of both.
    assert set(TABLE) == of_openai | taken["chat"] | taken["completion"]
    for name, (chat, completion, _) in TABLE.items():
        assert [chat, completion] == ["yes" if name in taken[kind] else "no" for kind in ("chat", "completion")], name


@pytest.mark.parametrize("kind", STRUCTS)
@pytest.mark.parametrize("name", sorted(TABLE))
def test_each_does_what_the_table_says(kind: str, name: str) -> None:
    chat, completion, by = TABLE[name]
    body = MINIMAL[kind] | {name: SAMPLES.get(name, "x")}
    if (chat if kind == "chat" else completion) == "no" or by == "refused":
        with pytest.raises(BadRequest) as refused:
            generated(kind, body)
        assert refused.value.info.field == name
    elif by == "ignored":
        assert generated(kind, body) == generated(kind, MINIMAL[kind])
    elif name in SAMPLES:
        (to_worker, routing), (before, routing_before) = generated(kind, body), generated(kind, MINIMAL[kind])
        assert (to_worker != before) == (by == "worker"), "what the worker gets"
        assert (routing != routing_before) == (by == "routing"), "what routing gets"
    else:
        assert by == "Frontend" or name in ("logprobs", "top_logprobs")
