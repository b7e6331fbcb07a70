from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from kvrouter.frontend.text.call_reader import tool_format
from kvrouter.frontend.text.tool_calls import ToolCallPiece, ToolUse

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
    ("hermes", f"{HERMES_ROME} that was it; a <b", "that was it; a <b", [ROME]),
    ("hermes", "a <tool_cal of", "a <tool_cal of", []),
    ("hermes", "<tool_call>{not JSON}</tool_call>", "<tool_call>{not JSON}</tool_call>", []),
    ("hermes", "<tool_call>text", "<tool_call>text", []),
    ("hermes", '<tool_call>{"name": "weather", "argum', '<tool_call>{"name": "weather", "argum', []),
    ("hermes", '<tool_call>{"arguments": {"city": "Rome"}, "name": "weather"}</tool_call>', "", [ROME]),
    ("hermes", '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Rome\\"}"}</tool_call>', "", [ROME]),
    ("hermes", '<tool_call>{"id": [1, {}], "x": -1.5, "name": "weather"}</tool_call>', "", [("weather", {})]),
    ("hermes", f"<tool_call>not this {HERMES_ROME}", "<tool_call>not this ", [ROME]),
    ("hermes", '<tool_call>{"city": "Rome"}', '<tool_call>{"city": "Rome"}', []),
    ("llama3_json", LLAMA_ROME, "", [ROME]),
    ("llama3_json", f"\n{LLAMA_ROME}; {LLAMA_ROME}", "", [ROME, ROME]),
    ("llama3_json", f"<|python_tag|>{LLAMA_ROME}", "", [ROME]),
    ("llama3_json", '{"a": 1} is JSON', '{"a": 1} is JSON', []),
    ("llama3_json", '{"name": "Rome"}', '{"name": "Rome"}', []),
    ("llama3_json", '{"type": "function", ' + LLAMA_ROME[1:], "", [ROME]),
    ("llama3_json", '<|python_tag|>search.call(query="x")', '<|python_tag|>search.call(query="x")', []),
    ("llama3_json", "text {", "text {", []),
    ("mistral", f"[TOOL_CALLS]{MISTRAL_ROME}", "", [ROME]),
    ("mistral", f"Well [TOOL_CALLS] {MISTRAL_ROME}", "Well ", [ROME]),
    ("mistral", '[TOOL_CALLS]weather[ARGS]{"city": "Rome"}', "", [ROME]),
    ("mistral", '[TOOL_CALLS]weather{"city": "Rome"}[TOOL_CALLS]weather{"city": "Rome"}', "", [ROME, ROME]),
    ("mistral", '[TOOL_CALLS]weather[CALL_ID]a1B2c3D4e[ARGS]{"city": "Rome"}', "", [ROME]),
    ("mistral", f"[TOOL_CALLS]{MISTRAL_ROME[:-1]}, {MISTRAL_ROME[1:-1]}, ", "", [ROME, ROME]),
    ("mistral", "[TOOL_CALLS][]", "[TOOL_CALLS][]", []),
    ("mistral", "[1] is a list", "[1] is a list", []),
]


def parsed(use: ToolUse, name: Any, pieces: list[str]) -> tuple[str, list[Any]]:
    text, found = parsed_pieces(use, name, pieces)
    calls = [piece for piece in found if piece.name]
    assert [call.index for call in calls] == list(range(len(calls)))
    assert len({call.id for call in calls}) == len(calls)
    assert all(len(piece.id) == (9 if piece.name else 0) for piece in found)
    arguments = ["".join(piece.arguments for piece in found if piece.index == call.index) for call in calls]
    return text, [(call.name, json.loads(given)) for call, given in zip(calls, arguments, strict=True)]


def parsed_pieces(use: ToolUse, name: Any, pieces: list[str]) -> tuple[str, list[ToolCallPiece]]:
    parser = use.parser(tool_format(name, ""))
    assert parser is not None
    found = list(map(parser.feed, pieces))
    return "".join(text for text, _ in found) + parser.end(), [call for _, calls in found for call in calls]


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


@pytest.mark.parametrize(
    ("name", "before"),
    [
        ("hermes", '<tool_call>{"name": "weather", "arguments": '),
        ("llama3_json", '{"name": "weather", "parameters": '),
        ("mistral", '[TOOL_CALLS][{"name": "weather", "arguments": '),
        ("mistral", "[TOOL_CALLS]weather[ARGS]"),
    ],
)
def test_the_name_of_a_call_arrives_before_its_arguments_and_these_as_they_are_written(name: Any, before: str) -> None:
    given = '{"city": "R\\\\", "days": [1, {"}": 2}]}'
    for size in range(len(given) + 1):
        text, pieces = parsed_pieces(AUTO, name, [before, *given[:size]])
        assert text == ("" if size else before)
        assert [piece.name for piece in pieces if piece.name] == ["weather"] * bool(size)
        # A backslash waits for the character that it escapes.
        assert "".join(piece.arguments for piece in pieces) in (given[:size], given[: size - 1])
        assert len(pieces) >= size // 2


def test_a_call_that_begins_is_a_call_whatever_its_arguments_become() -> None:
    broken = '<tool_call>{"name": "weather", "arguments": {"city": Rome]} and so on'
    text, pieces = parsed_pieces(AUTO, "hermes", list(broken))
    assert "".join(piece.arguments for piece in pieces) == '{"city": Rome]'
    assert text == "and so on"


def test_a_value_that_never_becomes_a_call_waits_for_a_bounded_time_only() -> None:
    parser = AUTO.parser(tool_format("llama3_json", ""))
    assert parser is not None
    long = '{"a": "' + "x" * 70_000
    assert parser.feed(long) == (long, [])
    assert parser.feed("and on") == ("and on", [])


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
