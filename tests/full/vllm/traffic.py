"""Requests that share prefixes: chats with tools, texts and token ids, streamed and whole."""

from __future__ import annotations

import random
from typing import Any

from ...tool_chats import generate
from .engine import BLOCK


def bodies(seed: int, count: int, longest_output: int = 40) -> list[dict[str, Any]]:
    """Returns bodies of chats, which have ``messages``, and of completions. Every second one is streamed."""
    draw = random.Random(seed)
    chats = [chat for chat in generate(seed, 60) if chat.get("tool_choice") in (None, "none", "auto")]
    text = " ".join(draw.choices(["cache", "prefix", "block", "token", "größe", "東京"], k=600))
    token_ids = [draw.randrange(1, 256) for _ in range(64 * BLOCK)]
    made: list[dict[str, Any]] = []
    for number in range(count):
        body: dict[str, Any] = {"max_tokens": draw.randint(1, longest_output)}
        if number % 2:
            body["stream"] = True
        if number % 5 < 3:
            chat = draw.choice(chats[:20])
            further = [{"role": "user", "content": text[: draw.randrange(1, 200)]}] if draw.random() < 0.3 else []
            body |= {name: chat[name] for name in ("tools", "tool_choice") if name in chat}
            if any(tool["function"].get("strict") for tool in body["tools"]):
                body["tool_choice"] = "none"  # vLLM constrains the output, and refuses names that are not ASCII.
            body["messages"] = [*chat["messages"], *further]
        elif number % 5 == 3:
            # Of each second prompt all blocks are full.
            blocks = draw.randint(1, 64)
            body["prompt"] = token_ids[: blocks * BLOCK - draw.randint(0, 1) * draw.randrange(BLOCK)]
        else:
            body["prompt"] = text[: draw.randrange(1, len(text))]
        made.append(body)
    return made
