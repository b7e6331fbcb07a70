from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kvrouter.engines.fields import HARMLESS, HARMLESS_OPTIONS, INTERNAL, INTERNAL_PART_FIELDS
from kvrouter.frontend.access.refusals import RuleBroken
from kvrouter.frontend.access.rules import FieldRules

SCHEMAS = json.loads((Path(__file__).parents[2] / "engines" / "engine_schemas.json").read_text())
CHATS = "/v1/chat/completions"
FIELDS = sorted({name for paths in SCHEMAS.values() for names in paths.values() for name in names} | INTERNAL)


def refused(body: Mapping[str, Any] | str, path: str = CHATS, rules: FieldRules | None = None) -> str:
    """Returns the field that is refused; empty if none is."""
    text = body if isinstance(body, str) else json.dumps(body)
    try:
        (rules or FieldRules()).check_body(path, msgspec.json.decode(text, type=dict[str, msgspec.Raw]))
    except RuleBroken as broken:
        return broken.info.field
    return ""


@pytest.mark.parametrize("path", HARMLESS)
def test_of_every_engines_fields_only_harmless_ones_pass(path: str) -> None:
    passed = {name for name in FIELDS if not refused({name: None}, path)}
    assert passed == HARMLESS[path] & set(FIELDS)
    assert refused({"a_field_of_the_next_release": 1}, path) == "a_field_of_the_next_release"


@pytest.mark.parametrize("name", ["cache\\u005fsalts", "kv\\u005ftransfer\\u005fparams", "KV_TRANSFER_PARAMS", "rid "])
def test_no_spelling_passes(name: str) -> None:
    assert refused(f'{{"{name}": 1}}')


@pytest.mark.parametrize("wrapper", ["extra_body", "nvext", "sampling_params", "extra_args", "vllm_xargs"])
def test_wrappers_are_refused(wrapper: str) -> None:
    assert refused({wrapper: {"cache_salt": "s"}}) == wrapper


@pytest.mark.parametrize("name", sorted(INTERNAL_PART_FIELDS))
@pytest.mark.parametrize("spelling", [str, lambda name: f"\\u{ord(name[0]):04x}{name[1:]}"])
def test_parts_of_messages_name_no_cached_content(name: str, spelling: Any) -> None:
    for part in (
        f'{{"type": "image_url", "image_url": {{"url": "data:"}}, "{spelling(name)}": "x"}}',
        f'{{"type": "image_url", "image_url": {{"url": "data:", "{spelling(name)}": "x"}}}}',
        f'{{"type": "{spelling(name)}"}}',
        f'{{"type": "tool_result", "content": [{{"type": "image", "{spelling(name)}": "x"}}]}}',
    ):
        assert refused(f'{{"messages": [{{"role": "user", "content": [{part}]}}]}}') == f"messages.content.{name}"
        assert refused(f'{{"input": [{{"content": [{part}]}}]}}', "/v1/responses") == f"input.content.{name}"


def test_words_in_messages_and_arguments_of_tools_pass() -> None:
    said = {"role": "user", "content": 'What is "uuid" in {"uuid": 1}? And "cache_salt"?'}
    used = {"role": "assistant", "content": [{"type": "tool_use", "name": "find", "input": {"uuid": "x"}}]}
    assert not refused({"messages": [said, used], "tools": [{"function": {"parameters": {"uuid": {}}}}]})


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "return_tensors"])
def test_variables_of_a_template_are_no_parameters_of_its_call(name: str) -> None:
    assert refused({"chat_template_kwargs": {name: "x"}}) == f"chat_template_kwargs.{name}"
    assert not refused({"chat_template_kwargs": {"enable_thinking": False}})


def test_options_of_engines_are_about_sampling() -> None:
    passed = set()
    for name in FIELDS:
        try:
            FieldRules().check_options(json.dumps({name: 1}))
        except RuleBroken:
            continue
        passed.add(name)
    assert passed == HARMLESS_OPTIONS & set(FIELDS)


def test_an_operator_permits_further_fields() -> None:
    rules = FieldRules(["return_prompt_text"])
    assert not refused({"return_prompt_text": True}, rules=rules)
    assert refused({"return_prompt_text": True, "rid": "x"}, rules=rules) == "rid"


def test_an_error_names_the_fields_but_not_all_of_many() -> None:
    with pytest.raises(RuleBroken, match=r"'field_00', .* and 92 more"):
        FieldRules().check_body(CHATS, {f"field_{number:02}": msgspec.Raw(b"1") for number in range(100)})
