"""Chats with tools have the tokens that engines gave them with their own code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kvrouter.engines.chats import chat_rule

from ....byte_tokenizer import write_byte_tokenizer
from ....tool_chats import STORED, digest, generate, prompt_ids, templates_of


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_prompts_of_chats_with_tools_are_those_of_the_engine(engine: str, tmp_path: Path) -> None:
    stored = json.loads(STORED.read_text())[engine]
    expected = stored["digests"].split()
    models = templates_of(engine, write_byte_tokenizer(tmp_path / "model"))
    chats = generate(stored["seed"], len(expected))
    assert [digest(prompt_ids(models[chat["template"]], chat)) for chat in chats] == expected


def test_engines_differ_in_the_tools_that_a_template_gets() -> None:
    tools = [{"function": {"parameters": None, "name": "f", "x": 1}, "type": "function"}]
    assert chat_rule("").tools(tools, "auto") == tools
    vllm = [{"type": "function", "function": {"name": "f", "description": None, "parameters": None}}]
    assert json.dumps(chat_rule("vllm").tools(tools, "none")) == json.dumps(vllm)
    function = {"parameters": None, "name": "f", "description": None}
    sglang = [{"type": "function", "function": function, "defer_loading": None}]
    assert json.dumps(chat_rule("sglang").tools(tools, "auto")) == json.dumps(sglang)
    assert chat_rule("sglang").tools(tools, "none") == []
    assert chat_rule("sglang").tools(tools, {"type": "function", "function": {"name": "g"}}) == []
