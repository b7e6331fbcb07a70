"""Renders and tokenizes with transformers. Runs in an environment of its own, since it wants other dependencies.

    python transformers_reference.py DIRECTORY < cases.json > results.json

``cases.json`` has ``texts`` and ``chats``; the results have their token ids in the same order.
"""

import json
import sys

from transformers import AutoTokenizer


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], local_files_only=True)
    cases = json.load(sys.stdin)
    texts = [tokenizer.encode(text) for text in cases["texts"]]
    plain = [tokenizer.encode(text, add_special_tokens=False) for text in cases["texts"]]
    chats = []
    for chat in cases["chats"] if tokenizer.chat_template else []:
        options = dict(chat)
        messages = options.pop("messages")
        try:
            rendered = tokenizer.apply_chat_template(messages, tokenize=False, **options)
            ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
            chats.append({"text": rendered, "ids": ids})
        except Exception as error:
            chats.append({"error": f"{type(error).__name__}: {error}"})
    decoded = [tokenizer.decode(ids, skip_special_tokens=True) for ids in plain]
    json.dump({"texts": texts, "plain": plain, "chats": chats, "decoded": decoded}, sys.stdout)


main()
