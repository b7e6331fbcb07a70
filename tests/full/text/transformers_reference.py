"""Renders and tokenizes with transformers. Runs in an environment of its own, since it wants other dependencies.

    python transformers_reference.py DIRECTORY < cases.json > results.json

``cases.json`` has ``texts``, ``chats`` and ``templates`` by name; the results have their token ids in order and
the texts of the chats with each template.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from transformers import AutoTokenizer


def rendered(tokenizer: Any, chat: dict[str, Any], template: str | None = None) -> dict[str, Any]:
    options = dict(chat)
    messages = options.pop("messages")
    try:
        text = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **options)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"text": text, "ids": tokenizer.encode(text, add_special_tokens=False)}


def main() -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(sys.argv[1], local_files_only=True)
    cases = json.load(sys.stdin)
    chats, templates = cases["chats"], cases.get("templates", {})
    plain = [tokenizer.encode(text, add_special_tokens=False) for text in cases["texts"]]
    results = {
        "texts": [tokenizer.encode(text) for text in cases["texts"]],
        "plain": plain,
        "decoded": [tokenizer.decode(ids, skip_special_tokens=True) for ids in plain],
        "chats": [rendered(tokenizer, chat) for chat in chats] if tokenizer.chat_template else [],
        "templates": {
            name: [rendered(tokenizer, chat, source) for chat in chats] for name, source in templates.items()
        },
    }
    json.dump(results, sys.stdout)


main()
