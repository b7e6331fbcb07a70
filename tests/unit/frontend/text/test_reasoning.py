from __future__ import annotations

import itertools
import json
from array import array
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from kvrouter.frontend.text.client_work import completed
from kvrouter.frontend.text.model_text import ModelText
from kvrouter.frontend.text.output_text import ReasoningParser, reasoning_format

CASES = [
    ("qwen3", False, "<think>\nso\n</think>\n\nHi", "\nso\n", "\n\nHi"),
    ("qwen3", False, " \n<think>so</think>", "so", ""),
    ("qwen3", False, "Hi <think>no</think>", "", "Hi <think>no</think>"),
    ("qwen3", False, "<thin", "", "<thin"),
    ("qwen3", False, " ", "", " "),
    ("qwen3", False, "<think>so </thin", "so </thin", ""),
    ("qwen3", False, "<think></think><think>x", "", "<think>x"),
    ("deepseek_r1", True, "so</think>Hi", "so", "Hi"),
    ("deepseek_r1", True, "so </ and so on", "so </ and so on", ""),
    ("deepseek_r1", True, "</think>", "", ""),
    ("mistral", False, "[THINK]so[/THINK]Hi", "so", "Hi"),
]


def separated(name: str, is_open: bool, pieces: list[str]) -> tuple[str, str]:
    form = reasoning_format(name)
    assert form is not None
    parser = ReasoningParser(form, is_open=is_open)
    found = [*map(parser.feed, pieces), parser.end()]
    return "".join(reasoning for reasoning, _ in found), "".join(answer for _, answer in found)


@pytest.mark.parametrize(("name", "is_open", "output", "reasoning", "answer"), CASES)
def test_reasoning_is_separated_however_the_output_arrives(
    name: str, is_open: bool, output: str, reasoning: str, answer: str
) -> None:
    @settings(max_examples=30, deadline=None)
    @given(cuts=st.lists(st.integers(0, len(output)), max_size=8).map(sorted))
    def check(cuts: list[int]) -> None:
        pieces = [output[begin:end] for begin, end in itertools.pairwise([0, *cuts, len(output)])]
        assert separated(name, is_open, pieces) == (reasoning, answer)

    assert separated(name, is_open, list(output)) == (reasoning, answer)
    check()


def test_both_are_passed_on_at_once() -> None:
    form = reasoning_format("qwen3")
    assert form is not None
    parser = ReasoningParser(form, is_open=True)
    assert [parser.feed(piece) for piece in ("so ", "on <", "b", "</think>", "Hi")] == [
        ("so ", ""),
        ("on ", ""),
        ("<b", ""),
        ("", ""),
        ("", "Hi"),
    ]


@pytest.mark.parametrize(
    ("prompt", "continues", "is_open"),
    [
        ("Hi<assistant>", False, False),
        ("Hi<assistant><think>\n", False, True),
        ("What is <think>?<assistant>", False, False),
        ("<assistant><think>\n\n</think>\n\n", False, False),
        ("<assistant><think>I wonder", True, True),
        ("<assistant><think>I wonder</think>Well", True, False),
    ],
)
def test_the_prompt_says_whether_reasoning_has_begun(
    model_files: dict[str, bytes], prompt: str, continues: bool, is_open: bool
) -> None:
    model = ModelText(model_files, cache_bytes=1 << 20, reasoning_format_name="qwen3")
    tokens = completed(model.tokenizer.encode(prompt, special_tokens=False, limit=1000))
    assert model.text_of_prompt(tokens) == model.text_of(array("I", tokens)) == prompt
    parser = model.reasoning_parser(tokens, prompt if continues else None)
    assert parser is not None
    assert parser.feed("so")[0] == ("so" if is_open else "")


@pytest.mark.parametrize(
    ("published", "chosen", "separates"),
    [
        (None, None, False),
        ({}, None, False),
        ({"reasoning_parser": "qwen3"}, None, True),
        ({"reasoning_parser": "qwen3"}, "none", False),
        ({"reasoning_parser": "none"}, "mistral", True),
        ({"reasoning_parser": "that_of_tomorrow"}, None, False),
        ({"reasoning_parser": ["qwen3"]}, None, False),
    ],
)
def test_reasoning_is_separated_only_if_a_format_is_published_or_chosen(
    model_files: dict[str, bytes], published: Any, chosen: Any, separates: bool
) -> None:
    files = {name: content for name, content in model_files.items() if name != "output_format.json"}
    if published is not None:
        files["output_format.json"] = json.dumps(published).encode()
    model = ModelText(files, cache_bytes=1 << 20, reasoning_format_name=chosen)
    assert (model.reasoning_format is not None) == separates


def test_a_published_format_of_tool_calls_precedes_that_of_the_template(model_files: dict[str, bytes]) -> None:
    files = model_files | {"output_format.json": b'{"tool_call_parser": "mistral"}'}
    assert ModelText(files, cache_bytes=1 << 20).tool_format != ModelText(model_files, cache_bytes=1 << 20).tool_format
    chosen = ModelText(files, cache_bytes=1 << 20, tool_call_format="hermes").tool_format
    assert chosen is not None
    assert chosen.begin == "<tool_call>"
