"""The table of fields in the reference says what the Frontend does with each field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kvrouter.frontend.edge.chat_request import ChatFields, parse_chat
from kvrouter.frontend.edge.completion_request import CompletionFields, parse_completion
from kvrouter.frontend.edge.request_fields import OnlyDefault
from kvrouter.frontend.generate_request import DEFAULT_SAMPLING, StopRules
from kvrouter.v1.errors import BadRequest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from ....reference_pages import REFERENCE, rows

TABLE = {
    row[0].strip("`"): row[1:4]
    for row in rows((REFERENCE / "openai-fields.md").read_text(encoding="utf-8"))
    if row[0].startswith("`")
}
SCHEMAS = Path(__file__).parents[2] / "engines" / "engine_schemas.json"
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
    "expected_output_tokens": 3,
    "worker_id": 3,
    "dp_rank": 1,
    "migration_limit": 2,
    "model": "n",
    "router_config_override": {"mode": "kv"},
}


ONLY_DEFAULT_OF_CHATS = {"echo", "add_special_tokens"}
DEFAULTS: dict[str, dict[str, Any]] = {
    # Of OpenAI's reference and of vLLM's protocol.
    "both": {
        "allowed_token_ids": None,
        "bad_words": [],
        "early_stopping": False,
        "frequency_penalty": None,
        "ignore_eos": False,
        "include_stop_str_in_output": False,
        "length_penalty": 1.0,
        "logit_bias": {},
        "mm_payload": "tensors",
        "n": 1,
        "priority": 0,
        "prompt_logprobs": None,
        "response_format": {"type": "text"},
        "return_token_ids": None,
        "return_token_offsets": False,
        "return_tokens_as_token_ids": None,
        "routed_experts_prompt_start": 0,
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "stop": [],
        "stop_token_ids": [],
        "stream": False,
        "structured_outputs": None,
        "truncate_prompt_tokens": None,
        "use_beam_search": False,
        "watermarking": False,
        "min_tokens": 0,
    },
    "chat": {
        "add_generation_prompt": True,
        "add_special_tokens": False,
        "continue_final_message": False,
        "documents": None,
        "echo": False,
        "function_call": "none",
        "functions": [],
        "include_reasoning": True,
        "logprobs": False,
        "modalities": ["text"],
        "parallel_tool_calls": True,
        "service_tier": "auto",
        "store": False,
        "tool_choice": "none",
        "top_logprobs": 0,
        "verbosity": "medium",
    },
    "completion": {"add_special_tokens": True, "best_of": 1, "echo": False, "logprobs": None, "suffix": ""},
}
NESTED_NULLS: dict[str, Any] = {
    "router_config_override": {"mode": None},
    "response_format": {"type": None},
    "metadata": {"a": None},
}


def generated(kind: str, body: dict[str, Any]) -> tuple[Any, Any]:
    """Returns the request to the Scheduler and the worker: what the worker gets of it, and the rest."""
    encoded = json.dumps(body).encode()
    request = parse_chat(encoded) if kind == "chat" else parse_completion(encoded, max_prompt_tokens=100)
    generate = request.generate_request(request.max_tokens or 1)
    rest = msgspec.structs.replace(generate, sampling=DEFAULT_SAMPLING, stop=StopRules(1))
    return (generate.sampling, generate.stop), rest


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
    elif name in ONLY_DEFAULT_OF_CHATS and kind == "chat":
        with pytest.raises(BadRequest) as refused:
            generated(kind, body | {name: True})
        assert refused.value.info.field == name
    elif by == "ignored":
        assert generated(kind, body) == generated(kind, MINIMAL[kind])
    elif name in SAMPLES:
        (to_worker, routing), (before, routing_before) = generated(kind, body), generated(kind, MINIMAL[kind])
        assert (to_worker != before) == (by == "worker"), "what the worker gets"
        assert (routing != routing_before) == (by == "routing"), "what routing gets"
    else:
        assert by == "Frontend" or name in ("logprobs", "top_logprobs")


@pytest.mark.parametrize("kind", STRUCTS)
def test_every_field_of_vllm_is_known(kind: str) -> None:
    path = "/v1/chat/completions" if kind == "chat" else "/v1/completions"
    of_vllm = json.loads(SCHEMAS.read_text(encoding="utf-8"))["vllm"][path]
    assert set(of_vllm) <= {field.encode_name for field in msgspec.structs.fields(STRUCTS[kind])}


@pytest.mark.parametrize("kind", STRUCTS)
def test_a_documented_default_is_what_leaving_the_field_out_is(kind: str) -> None:
    for name, value in (DEFAULTS["both"] | DEFAULTS[kind]).items():
        assert generated(kind, MINIMAL[kind] | {name: value}) == generated(kind, MINIMAL[kind]), name
    every = MINIMAL[kind] | DEFAULTS["both"] | DEFAULTS[kind]
    assert generated(kind, every) == generated(kind, MINIMAL[kind])


@pytest.mark.parametrize("kind", STRUCTS)
def test_null_is_what_leaving_the_field_out_is(kind: str) -> None:
    fields = {field.encode_name: field for field in msgspec.structs.fields(STRUCTS[kind])}
    optional = fields.keys() - {"model", "messages", "prompt"}
    for name in optional:
        assert fields[name].default is None or fields[name].type == OnlyDefault, name
    nulls = dict.fromkeys(optional - {"max_tokens"})
    for body in ({name: None} for name in nulls):
        assert generated(kind, MINIMAL[kind] | body) == generated(kind, MINIMAL[kind]), body
    for body in ({name: value} for name, value in NESTED_NULLS.items()):
        assert generated(kind, MINIMAL[kind] | body) == generated(kind, MINIMAL[kind]), body
    assert generated(kind, MINIMAL[kind] | nulls) == generated(kind, MINIMAL[kind])
    streamed = MINIMAL[kind] | {"stream": True}
    assert generated(kind, streamed | {"stream_options": {"include_usage": None}}) == generated(kind, streamed)


@pytest.mark.parametrize(
    ("kind", "fields", "field"),
    [
        ("completion", {"echo": True, "logprobs": 1}, "logprobs"),
        ("completion", {"echo": True, "logprobs": 0}, "logprobs"),
        ("completion", {"prompt_logprobs": 0}, "prompt_logprobs"),
        ("chat", {"stream_options": {"include_usage": True}}, "stream_options"),
        ("chat", {"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options"),
        ("chat", {"stream": True, "stream_options": {"other": 1}}, "stream_options"),
        ("chat", {"structured_outputs": {"regex": "a", "whitespace_pattern": "b"}}, "structured_outputs"),
        ("chat", {"structured_outputs": {"json_object": False}}, "structured_outputs"),
    ],
)
def test_what_cannot_be_honoured_is_refused(kind: str, fields: dict[str, Any], field: str) -> None:
    with pytest.raises(BadRequest) as refused:
        generated(kind, MINIMAL[kind] | fields)
    assert refused.value.info.field.split(".")[0] == field
    assert refused.value.info.advice
