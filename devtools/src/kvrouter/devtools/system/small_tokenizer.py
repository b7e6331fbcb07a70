"""Trains a small tokenizer with a chat template, for systems of simulated engines."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Sequence
from pathlib import Path

from kvrouter.net.model_files import OUTPUT_FORMAT, TOKENIZER
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY_SIZE = 4096
"""Number of tokens at most, without those that mark parts of a chat."""

_REPETITIONS = 100
"""Number of times that training sees the words of a caller, so that their characters are merged first."""
_MODULES = (
    "argparse",
    "asyncio",
    "collections",
    "contextlib",
    "decimal",
    "difflib",
    "email",
    "functools",
    "heapq",
    "json",
)
"""Modules of the standard library whose documentation is the text to train on."""
_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_MARKS = ("<tools>", "</tools>", "<tool_call>", "</tool_call>", "<think>", "</think>")
"""Tokens that mark tools, their calls and reasoning. Their ids follow the others, so that random output has none."""
_OUTPUT_FORMAT = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
_TEMPLATE = """\
{%- if tools %}<|im_start|>system
# Tools
<tools>
{% for tool in tools %}
{{ tool | tojson }}
{% endfor %}
</tools><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or "" }}
{%- for call in message.tool_calls or [] %}<tool_call>
{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking or reasoning_effort | default("none") != "none" %}<think>
{% endif %}{% endif %}"""


def write_small_tokenizer(directory: Path, *, words: Sequence[str] = ()) -> None:
    """Trains a byte-level BPE tokenizer, within a second, and writes its files into a directory that exists.

    Args:
        directory: Receives the files.
        words: Words of letters that are tokens, with the space before them.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=list(_SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*_documentation(), *_REPETITIONS * [" ".join(("", *words))]], trainer)
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in _MARKS])
    tokenizer.save(str(directory / TOKENIZER))
    config = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "chat_template": _TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (directory / OUTPUT_FORMAT).write_text(json.dumps(_OUTPUT_FORMAT), encoding="utf-8")


def _documentation() -> list[str]:
    texts = []
    for name in _MODULES:
        module = importlib.import_module(name)
        texts.append(inspect.getdoc(module) or "")
        for _, member in inspect.getmembers(
            module, lambda member: inspect.isclass(member) or inspect.isroutine(member)
        ):
            texts.append(inspect.getdoc(member) or "")
            texts += [inspect.getdoc(part) or "" for _, part in inspect.getmembers(member, inspect.isroutine)]
    return texts
