from __future__ import annotations

from typing import Any

import pytest
from kvrouter.frontend.text import template_bounds
from kvrouter.frontend.text.chat_template import ChatTemplate, InvalidTemplate
from kvrouter.frontend.text.client_work import completed
from kvrouter.frontend.text.model_text import ModelText
from kvrouter.v1.errors import BadRequest

USER = [{"role": "user", "content": "Hi <b>"}]


def render(source: str, messages: list[dict[str, Any]] = USER, **options: Any) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    return completed(template.rendering(messages, **options))


def test_a_template_is_rendered_as_transformers_renders_it() -> None:
    source = """{{- bos_token }}
    {%- for message in messages %}
        {% generation %}
        {{ message['role'] ~ ': ' + message.content | trim }}
        {% endgeneration %}
        {%- if loop.last %}{% break %}{% endif %}
    {% endfor %}
    {%- if tools %}{{ tools | tojson }}{% endif %}
    {%- if add_generation_prompt %}{{ eos_token }}{% endif %}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think></think>' }}{% endif %}"""
    rendered = render(source, tools=[{"name": "<é>"}], options={"enable_thinking": False})
    assert rendered.split() == ["<s>", "user:", "Hi", "<b>", '[{"name":', '"<é>"}]</s><think></think>']


def test_a_short_chat_is_rendered_at_once() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ x }}", {})
    for messages in (USER, USER * 20):
        rendered = template.rendered_at_once(messages, options={"x": "X"})
        assert rendered == completed(template.rendering(messages, options={"x": "X"}))
    assert template.rendered_at_once(USER * 1_000) is None
    assert template.rendered_at_once([{"role": "user", "content": "x" * (1 << 20)}]) is None
    assert ChatTemplate("{{ raise_exception('no') }}", {}).rendered_at_once(USER) is None


def test_a_template_that_takes_long_leaves_more_and_more_chats_to_threads() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})

    def left_after(seconds: float) -> int:
        assert template.may_run_at_once()
        template.took(seconds)
        left = 0
        while not template.may_run_at_once():
            left += 1
        return left

    assert [left_after(seconds) for seconds in (0.001, 0.01, 0.01, 0.01)] == [0, 100, 200, 400]
    for _ in range(1_000):
        assert not left_after(0.001)
    assert left_after(0.01) == 100


def test_the_date_is_available() -> None:
    assert len(render("{{ strftime_now('%Y-%m-%d') }}")) == 10


def test_a_refusal_of_the_template_is_an_error_of_the_messages() -> None:
    with pytest.raises(BadRequest, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert caught.value.info.field == "messages"


def test_contents_in_parts_are_recognized() -> None:
    parts = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
    assert ChatTemplate(parts, {}).takes_parts
    assert not ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {}).takes_parts
    assert not ChatTemplate("{% for m in messages %}{{ m.content | trim }}{% endfor %}", {}).takes_parts


def test_templates_that_take_a_system_message_first_only_are_recognized() -> None:
    anywhere = "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"
    first = "{% for m in messages %}{% if m.role == 'system' and loop.index > 1 %}{{ raise_exception('') }}{% endif %}"
    assert ChatTemplate(anywhere, {}).takes_late_systems
    assert not ChatTemplate(first + "{{ m.content }}{% endfor %}", {}).takes_late_systems


@pytest.mark.parametrize("source", ["{% for %}", "{{ x", "{% unknown %}", "{{ '" + "x" * (4 << 20) + "' }}"])
def test_a_template_that_cannot_be_compiled_is_refused(source: str) -> None:
    with pytest.raises(InvalidTemplate):
        ChatTemplate(source, {})


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace(_x=1) %}",
        "{{ undefined_name.attribute }}",
        "{{ 1 / 0 }}",
        "{% include 'file' %}",
    ],
)
def test_a_template_that_fails_or_leaves_its_sandbox_is_an_error_of_the_messages(source: str) -> None:
    with pytest.raises(BadRequest) as caught:
        render(source)
    assert caught.value.info.field == "messages"


GROWTH = "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(64) %}{% set GROWN %}{% endfor %}{{ ns.x }}"


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 'a' * 10 ** 12 }}",
        "{{ 7 ** (7 ** (7 ** 7)) }}",
        "{{ [0] * 10 ** 12 }}",
        "{{ 'x'.center(10 ** 11) }}",
        "{{ 'x' | center(10 ** 11) }}",
        "{{ '%99999999999d' % 3 }}",
        "{{ '{:>99999999999}'.format(1) }}",
        "{{ '{:{}}'.format(1, 99999999999) }}",
        "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}",
        "{{ ('a' * 1000000) | replace('a', 'b' * 1000000) }}",
        "{{ (['a' * 1000000] * 60000) | join }}",
        "{{ ('a' * 1000000).join(['b'] * 60000) }}",
        "{{ ('a\n' * 1000000) | indent(100000) }}",
        "{% for i in range(99999) %}{{ 'a' * 1000000 }}{% endfor %}",
        GROWTH.replace("GROWN", "ns.x = ns.x ~ ns.x"),
        GROWTH.replace("GROWN", "ns.x = ns.x + ns.x"),
        GROWTH.replace("GROWN", "ns.x = [ns.x, ns.x]"),
        GROWTH.replace("GROWN", "ns.x = {'a': ns.x, 'b': ns.x}"),
        GROWTH.replace("GROWN", "ns.x = dict(a=ns.x, b=ns.x)"),
        GROWTH.replace("GROWN", "ns.x = (ns.x, ns.x)"),
        GROWTH.replace("{% set GROWN %}", "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}"),
    ],
)
def test_a_template_that_loops_or_grows_without_end_is_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_bounds, "MAX_STEPS", 20_000)
    with pytest.raises(BadRequest, match="exceeds its bounds") as caught:
        render(source)
    assert caught.value.info.field == "messages"


def test_the_time_of_a_template_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_bounds, "MAX_SECONDS", 0.0)
    with pytest.raises(BadRequest, match="takes longer"):
        render("{% for a in range(9999) %}{% endfor %}")


def test_a_long_chat_stays_within_the_bounds(model: ModelText) -> None:
    assert model.template is not None
    messages = [{"role": "user", "content": "some words " * 1000}] * 1000
    assert len(completed(model.template.rendering(messages))) > 11_000_000
