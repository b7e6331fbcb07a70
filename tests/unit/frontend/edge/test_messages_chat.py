"""Anthropic's messages as those of a chat."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st
from kvrouter.frontend.edge.messages_request import MessagesRequest
from kvrouter.v1.errors import BadRequest


def chat(messages: list[Any], **fields: Any) -> dict[str, Any]:
    body = {"model": "m", "max_tokens": 5, "messages": messages} | fields
    return MessagesRequest.parse(json.dumps(body).encode()).chat


def refused_field(messages: list[Any]) -> str:
    """Returns the field that is refused; the first message if none is."""
    try:
        chat(messages)
    except BadRequest as error:
        return error.info.field
    return "messages.0"


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def test_results_of_tools_precede_the_words_of_the_user() -> None:
    call = {"type": "tool_use", "id": "a", "name": "look", "input": {"at": 1}}
    messages = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": "s"}, call]},
        user(
            text("Then?"),
            {"type": "tool_result", "tool_use_id": "a", "content": [text("1"), text("2")], "is_error": True},
        ),
    ]
    function = {"name": "look", "arguments": '{"at": 1}'}
    assert chat(messages)["messages"] == [
        {"role": "user", "content": "Look."},
        {
            "role": "assistant",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "a", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "a", "content": "1\n2"},
        {"role": "user", "content": "Then?"},
    ]


def test_late_system_messages_leave_the_prefix_of_earlier_turns() -> None:
    system = {"role": "system", "content": "Note."}
    first = [{"role": "system", "content": "Begin."}, user(text("a")), {"role": "assistant", "content": "b"}]
    before = chat([*first, user(text("c"))], system=[text("You "), text("help.")])["messages"]
    assert before[0] == {"role": "system", "content": "You help.\n\nBegin."}
    after = chat([*first, user(text("c")), system], system=[text("You "), text("help.")])["messages"]
    assert after == [*before[:-1], {"role": "user", "content": "c\n\nNote."}]
    between = chat([*first, system, user(text("c"))], system="You help.")["messages"]
    assert between == [*before[:-1], {"role": "user", "content": "Note.\n\nc"}]
    last = chat([*first, system], system="You help.")["messages"]
    assert last == [*before[:-1], {"role": "user", "content": "Note."}]
    result = {"type": "tool_result", "tool_use_id": "a", "content": "1"}
    assert chat([*first, user(result), system])["messages"][-1]["content"] == "1\n\nNote."


@pytest.mark.parametrize("late_systems", [True, False])
def test_an_engine_leaves_late_system_messages_or_begins_with_them(late_systems: bool) -> None:
    note = {"role": "system", "content": [text("No"), text("te.")]}
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    body = {"model": "m", "max_tokens": 5, "system": "You help.", "messages": [note, *turns[:2], note, turns[2]]}
    found = MessagesRequest.engine_chat(json.dumps(body).encode(), late_systems=late_systems)["messages"]
    if late_systems:
        there = {"role": "system", "content": "Note."}
        assert found == [{"role": "system", "content": "You help."}, there, *turns[:2], there, turns[2]]
    else:
        assert found == [{"role": "system", "content": "You help.Note.Note."}, *turns]


def test_hashes_of_requests_are_no_part_of_the_prompt() -> None:
    billing = text("x-anthropic-billing-header: cc_version=2; cch=4f2;")
    assert chat([user(text("a"))], system=[billing, text("Help.")])["messages"][0]["content"] == "Help."


def test_a_final_message_of_the_model_is_continued() -> None:
    continued = chat([user(text("a")), {"role": "assistant", "content": "b"}])
    assert continued["continue_final_message"] is True
    assert "continue_final_message" not in chat([user(text("a"))])


@given(st.recursive(st.none() | st.booleans() | st.text(max_size=5), lambda each: st.lists(each) | st.dictionaries(
    st.sampled_from(["type", "text", "role", "content", "source", "input", "id", "name", "thinking", "tool_use_id"]),
    each | st.sampled_from(["text", "image", "tool_use", "tool_result", "thinking", "document", "search_result"]),
)))  # fmt: skip
def test_any_other_content_is_refused_with_its_place(content: Any) -> None:
    for role in ("user", "assistant", "system"):
        assert refused_field([{"role": role, "content": content}]).startswith("messages.0")


@pytest.mark.parametrize("system", [1, [{}], [{"type": "text"}]])
def test_a_malformed_system_prompt_is_refused(system: Any) -> None:
    with pytest.raises(BadRequest) as refused:
        chat([user(text("a"))], system=system)
    assert refused.value.info.field.startswith("system")


def outcome(body: bytes) -> str:
    """Returns the error of a body; empty if it is translated."""
    try:
        request = MessagesRequest.read(body)
        request.to_text_request(len(body))
        request.engine_messages()
    except BadRequest as error:
        return error.message
    return ""


@pytest.mark.parametrize("depth", [100, 450, 900, 990, 100_000])
def test_deep_contents_are_translated_or_refused(depth: int) -> None:
    nested = b'{"a":' * depth + b"1" + b"}" * depth
    call = b'{"type": "tool_use", "id": "a", "name": "n", "input": %b}' % nested
    body = b'{"model": "m", "max_tokens": 5, "messages": [{"role": "assistant", "content": [%b]}]}' % call
    assert outcome(body) in (("",) if depth == 100 else ("", "body: nested too deeply"))


def test_many_late_system_messages_take_linear_time() -> None:
    many = [{"role": "system", "content": "x" * 50}] * 20_000
    messages = chat([user(text("a")), *many, {"role": "assistant", "content": "b"}, *many])["messages"]
    assert [each["role"] for each in messages] == ["user", "assistant", "user"]
    assert len(messages[0]["content"]) == 1 + 20_000 * 52
