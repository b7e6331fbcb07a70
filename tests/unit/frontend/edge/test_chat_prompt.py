"""What a template gets of a chat."""

from __future__ import annotations

import json
from array import array
from typing import Any

import pytest
from kvrouter.frontend.edge.chat_request import parse_chat
from kvrouter.frontend.text.chat_template import ChatTemplate
from kvrouter.frontend.text.client_work import completed
from kvrouter.frontend.text.model_text import ModelText
from kvrouter.v1.errors import BadRequest

AS_JSON = "{% for m in messages %}{{ m | tojson }}{% endfor %}"
PARTS_ONLY = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}{% if add_generation_prompt %}<go>{% endif %}"
)
TRIMS = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}"
USER = {"role": "user", "content": "Hi"}


def rendered(model: ModelText, template: str, *messages: dict[str, Any], **fields: Any) -> str:
    """Returns the text of the prompt of a chat."""
    given, model.template = model.template, ChatTemplate(template, {})
    try:
        (prompt,) = parse_chat(json.dumps({"model": "m", "messages": messages, **fields}).encode()).prompts
        return model.text_of(array("I", completed(prompt.slices(model, 10_000))))
    finally:
        model.template = given


def test_a_field_without_a_value_is_left_out_of_a_message(model: ModelText) -> None:
    message = {"role": "assistant", "content": None, "tool_calls": None, "refusal": None, "name": "n"}
    assert json.loads(rendered(model, AS_JSON, message)) == {"role": "assistant", "content": "", "name": "n"}


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_the_reasoning_of_an_earlier_message_has_the_names_that_templates_use(model: ModelText, name: str) -> None:
    message = json.loads(rendered(model, AS_JSON, {"role": "assistant", "content": "x", name: "why"}))
    assert (message["reasoning_content"], message["thinking"]) == ("why", "why")


@pytest.mark.parametrize("arguments", ['{"a": [1]}', '{"a": 123456789012345678901}', '{"a": -1e999}', "{}", ""])
def test_arguments_of_earlier_calls_are_objects(model: ModelText, arguments: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    message = json.loads(rendered(model, AS_JSON, {"role": "assistant", "tool_calls": [call]}))
    assert message["tool_calls"][0]["function"]["arguments"] == json.loads(arguments or "{}")


def test_a_template_gets_contents_in_the_form_that_it_reads(model: ModelText) -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert rendered(model, PARTS_ONLY, USER, parts) == "Hiab"
    assert rendered(model, TRIMS, USER, parts) == "<user>Hi</><user>a\nb</>"


def test_documents_reach_the_template(model: ModelText) -> None:
    assert rendered(model, "{{ documents[0].text }}", USER, documents=[{"text": "x"}]) == "x"


@pytest.mark.parametrize("content", ["I thi", [{"type": "text", "text": "I thi"}]])
def test_the_final_message_is_continued(model: ModelText, content: Any) -> None:
    final = {"role": "assistant", "content": content}
    assert rendered(model, PLAIN, USER, final, continue_final_message=True) == "<user>Hi</><assistant>I thi"
    assert rendered(model, PLAIN, USER, final).endswith("I thi</><go>")
    assert rendered(model, PLAIN, USER, final, add_generation_prompt=False).endswith("I thi</>")


def test_the_prompt_ends_with_the_spaces_that_the_template_leaves(model: ModelText) -> None:
    final = {"role": "assistant", "content": "I thi "}
    assert rendered(model, PLAIN, final, continue_final_message=True).endswith("I thi ")
    assert rendered(model, TRIMS, final, continue_final_message=True).endswith("I thi")


@pytest.mark.parametrize(
    ("template", "final", "fields"),
    [
        (PLAIN, {"role": "assistant", "content": "x"}, {"add_generation_prompt": True}),
        (PARTS_ONLY, {"role": "assistant", "content": []}, {}),
        ("{{ messages[0].role }}", {"role": "assistant", "content": "x"}, {}),
    ],
)
def test_a_message_that_cannot_be_continued_is_an_error(
    model: ModelText, template: str, final: dict[str, Any], fields: dict[str, Any]
) -> None:
    with pytest.raises(BadRequest) as caught:
        rendered(model, template, USER, final, continue_final_message=True, **fields)
    assert caught.value.info.field == "continue_final_message"


def test_a_chat_of_too_many_objects_is_refused_before_it_is_decoded() -> None:
    body = b'{"model": "m", "messages": [' + b"{}," * 1_000_000
    with pytest.raises(BadRequest, match="brackets and commas"):
        parse_chat(body)
    with pytest.raises(BadRequest, match="body: "):
        parse_chat(body[:1_900_000])
