"""Fields with values of every wrong type: each is taken as engines take it, or refused by its name."""

from __future__ import annotations

import itertools
import json
from typing import Any

import msgspec
import pytest
from kvrouter.frontend.edge.chat_request import ChatFields, parse_chat
from kvrouter.frontend.edge.completion_request import CompletionFields, parse_completion
from kvrouter.frontend.request.request_checks import Limits, check_request
from kvrouter.frontend.text.client_work import completed
from kvrouter.frontend.text.model_text import ModelText
from kvrouter.runtime.discovery.directory import ComponentView
from kvrouter.v1.errors import BadRequest
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import ComponentDescriptor

ODD: list[Any] = [
    *(None, True, False, 0, -1, 1, 2.5, -0.0, 1e308, 1 << 31, 1 << 32, 1 << 64, 10**40),
    *("", "x", "5", "nan", "true", "\u0000", "é" * 2000),
    *([], [None], [[]], [1], ["x"], [-1], [1e9], [{}], [{"role": 5}], [{"role": "user", "content": {}}], [True]),
    *(
        {},
        {"x": None},
        {"type": 5},
        {"type": "json_schema", "json_schema": 5},
        {"": ""},
        {"1": 1e308},
        {"a": {"b": []}},
    ),
    {"type": "function", "function": {"name": 5}},
]
FIELDS = {
    "chat": [field.encode_name for field in msgspec.structs.fields(ChatFields)],
    "completion": [field.encode_name for field in msgspec.structs.fields(CompletionFields)],
}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 5}
COMPLETION = {"model": "m", "prompt": [1, 2], "max_tokens": 5}
TOOLS = [{"type": "function", "function": {"name": "f"}}]
LIMITS = Limits(max_prompt_tokens=10_000, max_output_tokens=10_000)
VIEW = ComponentView(ComponentName("n", "c"), ComponentDescriptor(model="m", block_size=16))
WRITTEN_AS = {
    # The contract nests what is top-level in the body.
    "stop_conditions": {"max_tokens", "max_completion_tokens", "min_tokens"},
    "sampling_options": {"temperature", "top_p", "min_p"},
    "overrides": {"router_config_override"},
}


def check(kind: str, body: dict[str, Any], model: ModelText) -> None:
    """Does with a body what a request does before anything is booked."""
    encoded = json.dumps(body).encode()
    request = parse_chat(encoded) if kind == "chat" else parse_completion(encoded, max_prompt_tokens=10000)
    limit = 5 if request.max_tokens is None else request.max_tokens
    for prompt in request.prompts:
        tokens = completed(prompt.slices(model, 10_000))
        if tokens:
            check_request(request.generate_request(limit), len(tokens) // 4, VIEW, LIMITS)


def refusal(kind: str, body: dict[str, Any], model: ModelText) -> BadRequest | None:
    try:
        check(kind, body, model)
    except BadRequest as error:
        return error
    return None


def names(refused: BadRequest, name: str) -> bool:
    nested, _, rest = refused.info.field.partition(".")
    return nested == name or rest == name or name in WRITTEN_AS.get(nested, ())


@pytest.mark.parametrize(("kind", "valid"), [("chat", CHAT), ("completion", COMPLETION)])
def test_each_value_is_taken_or_refused_by_the_name_of_its_field(
    kind: str, valid: dict[str, Any], model: ModelText
) -> None:
    wrong = []
    for name, value in itertools.product(FIELDS[kind], ODD):
        refused = refusal(kind, {**valid, name: value}, model)
        if refused is not None and not (names(refused, name) and refused.info.advice):
            wrong.append((name, value, refused.info.field, str(refused)[:200]))
    assert wrong == []


@pytest.mark.parametrize("value", ODD)
def test_tools_have_any_form_that_the_template_takes(value: Any, model: ModelText) -> None:
    for body in ({"tools": [value]}, {"tools": TOOLS, "tool_choice": value}):
        refused = refusal("chat", {**CHAT, **body}, model)
        assert refused is None or refused.info.field.split(".")[0] in ("tools", "tool_choice", "messages"), refused


def test_a_missing_field_is_to_be_added() -> None:
    with pytest.raises(BadRequest, match="model: missing") as raised:
        parse_chat(json.dumps({"messages": CHAT["messages"]}).encode())
    assert raised.value.info.advice == "Add it."
