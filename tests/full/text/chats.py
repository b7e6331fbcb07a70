"""Chats that touch what templates do: tools, system messages, turns, reasoning, parts, continued messages."""

from __future__ import annotations

from typing import Any

TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d <x> é",
        "parameters": {
            "type": "object",
            "properties": {"q": {"type": "string", "description": "what"}, "n": {"type": "integer"}},
            "required": ["q"],
        },
    },
}
CALL = {"id": "a1B2c3D4e", "type": "function", "function": {"name": "f", "arguments": {"q": 'x "é" <b>', "n": 3}}}
RESULT = {"role": "tool", "tool_call_id": "a1B2c3D4e", "name": "f", "content": '{"a": 42, "é": null}'}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


SYSTEM = {"role": "system", "content": "Be brief."}
AGAIN = {**CALL, "id": "b1B2c3D4e"}
CALLED = [user("Use it"), assistant("", tool_calls=[CALL]), RESULT]
TURNS = [SYSTEM, user("Hi"), assistant("Hello!"), user("Again " * 300)]
PARTS = user([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}])

CHATS: list[dict[str, Any]] = [
    {"messages": [user("Hi there")], "add_generation_prompt": True},
    {"messages": [user(" <b>é</b> & \n\n ")], "add_generation_prompt": False},
    {"messages": TURNS, "add_generation_prompt": True},
    {"messages": [user("Use it")], "add_generation_prompt": True, "tools": [TOOL]},
    {"messages": [SYSTEM, *CALLED, assistant("42."), user("ok?")], "add_generation_prompt": True, "tools": [TOOL]},
    {
        "messages": [
            user("Use it"),
            assistant("", tool_calls=[CALL, AGAIN]),
            RESULT,
            {**RESULT, "tool_call_id": "b1B2c3D4e"},
        ],
        "add_generation_prompt": True,
        "tools": [TOOL, TOOL],
    },
    {"messages": [user("Q"), assistant("4", reasoning_content="2+2 is"), user("so?")], "add_generation_prompt": True},
    {"messages": [user("Q")], "add_generation_prompt": True, "enable_thinking": False},
    {"messages": [user("Q")], "add_generation_prompt": True, "enable_thinking": True, "reasoning_effort": "high"},
    {"messages": [user("Q"), assistant("The answer is ")], "add_generation_prompt": False},
    {"messages": [user("Q"), assistant("The answer is ")], "continue_final_message": True},
    {"messages": [*TURNS, assistant("É")], "continue_final_message": True},
    {"messages": [PARTS], "add_generation_prompt": True},
    {"messages": [user("Q"), assistant("4", tool_calls=None, refusal=None), user("x")], "add_generation_prompt": True},
    {"messages": [user("a"), user("b")], "add_generation_prompt": True},
    {"messages": [{"role": "developer", "content": "D"}, user("b")], "add_generation_prompt": True},
    {"messages": [user("Q")], "add_generation_prompt": True, "documents": [{"title": "t", "text": "d"}]},
]


def body(chat: dict[str, Any]) -> dict[str, Any]:
    """Returns the body of a request for a chat, whose fields are the arguments of ``transformers``."""
    fields = {"model": "m", **chat}
    if "enable_thinking" in fields:
        fields["chat_template_kwargs"] = {"enable_thinking": fields.pop("enable_thinking")}
    return fields


def has_parts(chat: dict[str, Any]) -> bool:
    """Returns whether a content is a list. Templates that read texts only get a text, which transformers leaves out."""
    return any(isinstance(message["content"], list) for message in chat["messages"])
