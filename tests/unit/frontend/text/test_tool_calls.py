from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvrouter.frontend.text.tool_calls import ToolUse, tool_format

AUTO = ToolUse("auto")
PARIS = ("weather", {"city": 'Paris {"}]'})
ROME = ("weather", {"city": "Rome"})
HERMES_PARIS = "<tool_call>\n" + json.dumps({"name": "weather", "arguments": PARIS[1]}) + "\n</tool_call>"
HERMES_ROME = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
LLAMA_ROME = '{"name": "weather", "parameters": {"city": "Rome"}}'
MISTRAL_ROME = '[{"name": "weather", "arguments": {"city": "Rome"}}]'

CASES: list[tuple[str, str, str, list[Any]]] = [
    ("hermes", "no call", "no call", []),
    ("hermes", HERMES_ROME, "", [ROME]),
    ("hermes", f"I look.{HERMES_PARIS}\n{HERMES_ROME}\n", "I look.", [PARIS, ROME]),
    ("hermes", "a <tool_cal of", "a <tool_cal of", []),
    ("hermes", "<tool_call>{not JSON}</tool_call>", "<tool_call>{not JSON}</tool_call>", []),
    ("hermes", "<tool_call>text", "<tool_call>text", []),
    ("hermes", '<tool_call>{"name": "weather", "argum', '<tool_call>{"name": "weather", "argum', []),
    ("hermes", '<tool_call>{"city": "Rome"}', '<tool_call>{"city": "Rome"}', []),
    ("llama3_json", LLAMA_ROME, "", [ROME]),
    ("llama3_json", f"\n{LLAMA_ROME}; {LLAMA_ROME}", "", [ROME, ROME]),
    ("llama3_json", f"<|python_tag|>{LLAMA_ROME}", "", [ROME]),
    ("llama3_json", '{"a": 1} is JSON', '{"a": 1} is JSON', []),
    ("llama3_json", "text {", "text {", []),
    ("mistral", f"[TOOL_CALLS]{MISTRAL_ROME}", "", [ROME]),
    ("mistral", f"Well [TOOL_CALLS] {MISTRAL_ROME}", "Well ", [ROME]),
    ("mistral", '[TOOL_CALLS]weather[ARGS]{"city": "Rome"}', "", [ROME]),
    ("mistral", '[TOOL_CALLS]weather{"city": "Rome"}[TOOL_CALLS]weather{"city": "Rome"}', "", [ROME, ROME]),
    ("mistral", "[1] is a list", "[1] is a list", []),
]


def parsed(use: ToolUse, name: Any, pieces: list[str]) -> tuple[str, list[Any]]:
    parser = use.parser(tool_format(name, ""))
    assert parser is not None
    found = [*map(parser.feed, pieces), parser.end()]
    calls = [call for _, each in found for call in each]
    assert len({call.id for call in calls}) == len(calls)
    return "".join(text for text, _ in found), [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize(("name", "output", "text", "calls"), CASES)
def test_an_output_has_the_same_calls_however_it_arrives(name: str, output: str, text: str, calls: list[Any]) -> None:
    @settings(max_examples=30, deadline=None)
    @given(cuts=st.lists(st.integers(0, len(output)), max_size=12).map(sorted))
    def check(cuts: list[int]) -> None:
        places = [0, *cuts, len(output)]
        pieces = [output[begin:end] for begin, end in itertools.pairwise(places)]
        assert parsed(AUTO, name, pieces) == (text, calls)

    assert parsed(AUTO, name, list(output)) == (text, calls)
    check()


def test_a_constrained_output_is_calls_in_any_format() -> None:
    output = '[{"name": "weather", "parameters": {"city": "Rome"}}]'
    assert parsed(ToolUse("required"), "none", list(output)) == ("", [ROME])
    assert parsed(ToolUse("named", "weather"), "none", list('{"city": "Rome"}')) == ("", [ROME])


def test_calls_after_the_first_are_dropped_unless_they_may_be_parallel() -> None:
    use = ToolUse("auto", parallel=False)
    assert parsed(use, "hermes", list(HERMES_PARIS + HERMES_ROME)) == ("", [PARIS])
    assert parsed(use, "hermes", [HERMES_PARIS + HERMES_ROME]) == ("", [PARIS])


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ("""{{ '<|python_tag|>' }}{{ '"parameters": ' }}""", "llama3_json"),
        ("""{{ '<|start_header_id|>' }}{{ '"parameters": ' }}""", "llama3_json"),
        ("{{ '<tool_call><function=' }}", "none"),
        ("{{ messages }}", "none"),
    ],
)
def test_the_format_is_that_of_the_template(template: str, name: Any) -> None:
    assert tool_format(None, template) == tool_format(name, "")
