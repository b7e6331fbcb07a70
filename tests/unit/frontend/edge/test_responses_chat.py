"""The input of OpenAI's Responses as messages of a chat."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, strategies as st
from kvrouter.frontend.edge.responses_request import ResponsesRequest
from kvrouter.v1.errors import BadRequest


def messages(items: Any, **fields: Any) -> Any:
    body = {"model": "m", "input": items} | fields
    return ResponsesRequest.parse(json.dumps(body).encode()).chat["messages"]


def refused_field(items: Any) -> str:
    """Returns the field that is refused; the input if none is."""
    try:
        messages(items)
    except BadRequest as error:
        return error.info.field
    return "input"


def test_the_items_of_one_turn_are_one_message() -> None:
    call = {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"}
    turn = [
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        call,
        call | {"call_id": "b"},
    ]
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Look."}]},
        *turn,
        {"type": "function_call_output", "call_id": "a", "output": "1"},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "2"}]},
        *turn[:2],
    ]
    function = {"name": "look", "arguments": "{}"}
    calls = [{"id": name, "type": "function", "function": function} for name in "ab"]
    spoken = {"role": "assistant", "reasoning_content": "Hm.", "content": "I look."}
    assert messages(items, instructions="Help.") == [
        {"role": "system", "content": "Help."},
        {"role": "user", "content": [{"type": "text", "text": "Look."}]},
        spoken | {"tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {"role": "tool", "tool_call_id": "b", "content": [{"type": "text", "text": "2"}]},
        spoken,
    ]


KINDS = ["message", "reasoning", "function_call", "function_call_output", "input_text", "output_text", "input_image"]
NAMES = ["type", "role", "content", "summary", "text", "name", "arguments", "call_id", "output", "image_url"]


@given(
    st.recursive(
        st.none() | st.booleans() | st.text(max_size=5) | st.sampled_from(["user", "assistant", *KINDS]),
        lambda each: st.lists(each) | st.dictionaries(st.sampled_from(NAMES), each),
    )
)
def test_any_other_input_is_refused_with_its_place(item: Any) -> None:
    assert refused_field([item]).startswith("input")
