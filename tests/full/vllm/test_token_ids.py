"""vLLM answers a completion of token ids as it answers their text, with all that depends on nothing but the tokens."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from .engine import MODEL, VllmServer

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "logprobs": {"logprobs": 2},
    "sequences": {"n": 2, "temperature": 1.0},
    "stop": {"stop": ["a"]},
    "ids": {"return_token_ids": True},
}


@pytest.mark.parametrize("option", OPTIONS)
async def test_a_text_and_its_tokens_have_the_same_response(roomy: VllmServer, option: str) -> None:
    await roomy.ready()
    draw = Random(option)
    for _ in range(20):
        text = "".join(draw.choices("abc dé日\n", k=draw.choice((3, 80, 900))))
        body = {"model": MODEL, "max_tokens": 8, "temperature": 0, "seed": 1} | OPTIONS[option]
        answers = [await roomy.post("/v1/completions", body | {"prompt": each}) for each in (text, list(text.encode()))]
        for answer in answers:
            for name in ("id", "created"):
                del answer[name]
            answer["usage"].pop("prompt_tokens_details")
        assert answers[0] == answers[1]
