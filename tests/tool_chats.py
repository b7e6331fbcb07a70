"""Generated chats with tools, and chat templates that print tools and calls as those of published models do."""

from __future__ import annotations

import hashlib
import json
import random
import string
from array import array
from pathlib import Path
from typing import Any

import msgspec
from kvrouter.frontend.proxy.routed_body import RoutedBody
from kvrouter.frontend.text.chat_template import ChatTemplate
from kvrouter.frontend.text.client_work import completed
from kvrouter.frontend.text.model_text import ModelText
from kvrouter.net.model_files import read_model_files

STORED = Path(__file__).with_name("tool_chats.json")
"""Digests of the token ids that engines gave the first generated chats, with release and seed."""

HERMES = r"""
{%- if tools %}<|im_start|>system
{%- if messages[0].role == 'system' %}{{ '\n' + messages[0].content }}{% endif %}
# Tools
<tools>
{%- for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}
</tools><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% elif message.role == 'assistant' %}<|im_start|>assistant
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% elif message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Prints each tool in one line, as Hermes and Qwen do."""

LLAMA = r"""<|begin_of_text|>
{%- if messages[0].role == 'system' %}
{%- set system = messages[0].content %}{% set messages = messages[1:] %}
{%- else %}{% set system = '' %}{% endif -%}
<|start_header_id|>system<|end_header_id|>
{% if tools %}Environment: ipython
{% endif %}Today Date: {{ date_string or '26 Jul 2024' }}

{{ system }}<|eot_id|>
{%- for message in messages %}
{%- if tools and loop.first %}<|start_header_id|>user<|end_header_id|>
{% for tool in tools %}{{ tool | tojson(indent=4) }}{{ '\n\n' }}{% endfor %}
{{- message.content }}<|eot_id|>
{%- elif message.tool_calls %}<|start_header_id|>assistant<|end_header_id|>
{% for call in message.tool_calls %}{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments
| tojson }}}{% endfor %}<|eot_id|>
{%- elif message.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>
{{ message.content | tojson }}<|eot_id|>
{%- else %}<|start_header_id|>{{ message.role }}<|end_header_id|>
{{ message.content }}<|eot_id|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>
{% endif %}"""
"""Prints tools with indents before the first message of the user, as Llama 3.1 does."""

MISTRAL = r"""<s>
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if tools and loop.last %}[AVAILABLE_TOOLS] [
{%- for tool in tools %}{% set function = tool.function -%}
{"type": "function", "function": {
{%- for key, value in function.items() if key != 'return' %}
{%- if value is string and not loop.first %}, {% endif %}
{%- if value is string %}"{{ key }}": "{{ value }}"{% else %}, "{{ key }}": {{ value | tojson }}{% endif %}
{%- endfor %}}}{% if not loop.last %}, {% endif %}
{%- endfor %}][/AVAILABLE_TOOLS]
{%- endif %}[INST] {{ message.content }}[/INST]
{%- elif message.tool_calls %}[TOOL_CALLS] [
{%- for call in message.tool_calls %}{% set out = call.function | tojson %}
{{- out[:-1] }}, "id": "{{ call.id }}"}{% if not loop.last %}, {% endif %}
{%- endfor %}]</s>
{%- elif message.role == 'tool' %}[TOOL_RESULTS] {"content": {{ message.content | tojson }}, "call_id": "{{
message.tool_call_id }}"}[/TOOL_RESULTS]
{%- else %} {{ message.content }}</s>
{%- endif %}
{%- endfor %}"""
"""Prints the fields of tools and calls in their order, as Mistral does."""

TEMPLATES = {"hermes": HERMES, "llama": LLAMA, "mistral": MISTRAL}

_WORDS = [
    "weather",
    "größe",
    "東京",
    "naïve",
    'a "quoted" word',
    "<b>&'x",
    "emoji 🦊",
    "back\\slash",
    "zeile\nzwei",
    "é",
]
_TYPES = ("string", "integer", "number", "boolean", "null")


def generate(seed: int, count: int) -> list[dict[str, Any]]:
    """Returns bodies of chats that the engines accept, each with a template's name under ``template``."""
    draw = random.Random(seed)
    return [_chat(draw, number) for number in range(count)]


def body(chat: dict[str, Any]) -> bytes:
    """Returns the body of a generated chat."""
    return json.dumps({name: value for name, value in chat.items() if name != "template"}).encode()


def templates_of(engine: str, directory: Path) -> dict[str, ModelText]:
    """Returns the tokenizer in a directory with each template, as an engine renders."""
    models = {name: ModelText(read_model_files(directory), cache_bytes=1 << 20, engine=engine) for name in TEMPLATES}
    for name, model in models.items():
        model.template = ChatTemplate(TEMPLATES[name], {})
    return models


def prompt_ids(model: ModelText, chat: dict[str, Any]) -> list[int]:
    """Returns the token ids by which a generated chat is routed."""
    source = RoutedBody.parse(body(chat), max_prompt_tokens=1 << 24).source
    assert source is not None
    return array("I", completed(source.slices(model, 1 << 24))).tolist()


def digest(token_ids: list[int]) -> str:
    """Returns a short digest of token ids."""
    return hashlib.sha256(msgspec.json.encode(token_ids)).hexdigest()[:12]


def _chat(draw: random.Random, number: int) -> dict[str, Any]:
    names = draw.sample(string.ascii_lowercase, draw.randint(1, 4))
    tools = [_tool(draw, f"{draw.choice(['get', 'set', 'найти'])}_{name}") for name in names]
    chat: dict[str, Any] = {
        "template": list(TEMPLATES)[number % len(TEMPLATES)],
        "model": "m",
        "messages": _messages(draw, [tool["function"]["name"] for tool in tools]),
        "tools": tools,
    }
    name = draw.choice(tools)["function"]["name"]
    choices = [None, "none", "auto", "required", {"type": "function", "function": {"name": name}}]
    if (choice := draw.choice(choices)) is not None:
        chat["tool_choice"] = choice
    return _shuffled(draw, chat)


def _messages(draw: random.Random, names: list[str]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if draw.random() < 0.5:
        messages.append({"role": "system", "content": _text(draw)})
    for turn in range(draw.randint(0, 2)):
        messages.append({"role": "user", "content": _text(draw)})
        calls = [_call(draw, draw.choice(names), f"call{turn}{index}abc") for index in range(draw.randint(1, 2))]
        content = draw.choice([{"content": None}, {"content": ""}, {"content": _text(draw)}, {}])
        messages.append({"role": "assistant", **content, "tool_calls": calls})
        for call in calls:
            result: Any = _text(draw)
            if draw.random() < 0.2:
                result = [{"type": "text", "text": result}]
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        messages.append({"role": "assistant", "content": _text(draw)})
    messages.append({"role": "user", "content": _text(draw)})
    return messages


def _call(draw: random.Random, name: str, number: str) -> dict[str, Any]:
    arguments = {draw.choice(_WORDS): _value(draw, 2) for _ in range(draw.randint(0, 3))}
    function: dict[str, Any] = {"name": name}
    function["arguments"] = json.dumps(arguments, ensure_ascii=draw.random() < 0.5)
    call: dict[str, Any] = {"id": number, "type": "function", "function": _shuffled(draw, function)}
    if draw.random() < 0.2:
        call["index"] = draw.randint(0, 3)
    return _shuffled(draw, call)


def _tool(draw: random.Random, name: str) -> dict[str, Any]:
    function: dict[str, Any] = {"name": name}
    _maybe(draw, function, "description", 0.7, _text(draw))
    _maybe(draw, function, "parameters", 0.8, _schema(draw, 3) | {"type": "object"})
    _maybe(draw, function, "strict", 0.3, draw.random() < 0.5)
    _maybe(draw, function, "defer_loading", 0.1, draw.random() < 0.5)
    _maybe(draw, function, "x-extra", 0.2, {"b": 1, "a": None})
    tool: dict[str, Any] = {"type": "function", "function": _shuffled(draw, function)}
    _maybe(draw, tool, "defer_loading", 0.15, draw.random() < 0.5)
    _maybe(draw, tool, "cache_control", 0.15, {"type": "ephemeral"})
    if draw.random() < 0.1:
        del tool["type"]
    return _shuffled(draw, tool)


def _maybe(draw: random.Random, fields: dict[str, Any], name: str, probability: float, value: Any) -> None:
    if draw.random() < probability:
        fields[name] = value if draw.random() < 0.9 else None


def _schema(draw: random.Random, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    kind = draw.choice((*_TYPES, "object", "array", "any")) if depth < 3 else "object"
    if depth and kind == "object":
        properties = {f"{draw.choice(_WORDS)}{index}": _schema(draw, depth - 1) for index in range(draw.randint(0, 3))}
        schema = {"type": "object", "properties": properties, "required": sorted(properties)[:1]}
        if draw.random() < 0.3:
            schema["additionalProperties"] = False
    elif depth and kind == "array":
        schema = {"type": "array", "items": _schema(draw, depth - 1)}
    elif depth and kind == "any":
        schema = {"anyOf": [_schema(draw, depth - 1), {"$ref": "#/$defs/x"}]}
    elif kind in _TYPES:
        schema = {"type": kind, "default": _value(draw, 0), "enum": [1, 1.0, 1e-7, None, "ü"]}
    _maybe_text(draw, schema, "description")
    return _shuffled(draw, schema)


def _maybe_text(draw: random.Random, schema: dict[str, Any], name: str) -> None:
    if draw.random() < 0.4:
        schema[name] = _text(draw)


def _value(draw: random.Random, depth: int) -> Any:
    plain = [None, True, 7, -3.5, 1e20, 12345678901, "", draw.choice(_WORDS)]
    if depth and draw.random() < 0.4:
        inner = [_value(draw, depth - 1) for _ in range(draw.randint(0, 3))]
        return inner if draw.random() < 0.5 else {f"k{index}": each for index, each in enumerate(inner)}
    return draw.choice(plain)


def _text(draw: random.Random) -> str:
    return " ".join(draw.choices(_WORDS, k=draw.randint(1, 6)))


def _shuffled(draw: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    names = list(fields)
    if draw.random() < 0.5:
        draw.shuffle(names)
    return {name: fields[name] for name in names}
