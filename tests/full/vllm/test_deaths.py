"""Two real vLLM servers of which one is killed in the middle of streams and comes back, again and again."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from .engine import BLOCK, MODEL, Published, VllmServer
from .routed import WAYS, Routed, Way, Where, routing
from .traffic import bodies

pytestmark = pytest.mark.timeout(900)

KILLS = 2
"""Deaths for each way: one of each server."""
STREAMS = 8
TOKENS = 1500
"""Output tokens of a stream: more than come before the kill."""
CHECKED = 40
"""Requests that are compared after each restart."""


class Stream:
    """A streamed chat or completion."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.tokens = 0
        self.end: Any = None
        """The reason of the last chunk, or its error."""

    @property
    def reason(self) -> str:
        """Why it ended, in a word."""
        return self.end if isinstance(self.end, str) else str(self.end["type"])

    async def read(self, routed: Routed, body: dict[str, Any]) -> None:
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        fields = {"model": MODEL, "stream": True, "max_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True}
        async with routed.session.post(routed.http + path, json=body | fields) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    self._take(json.loads(line.removeprefix(b"data: ")))

    def _take(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            self.end = chunk["error"]
            return
        for choice in chunk["choices"]:
            self.tokens += len(choice.get("token_ids") or ())
            self.end = choice.get("finish_reason") or self.end
        if self.tokens:
            self.begun.set()


@pytest.mark.parametrize("way", WAYS)
async def test_a_server_that_is_killed_in_the_middle_of_streams(
    way: Way, where: Where, tmp_path: Path, pair: tuple[VllmServer, VllmServer]
) -> None:
    found: dict[str, Counter[Any]] = {name: Counter() for name in ("cut", "whole", "meanwhile", "above")}
    for server in pair:
        await server.ready()
    async with routing(way, where, tmp_path, *pair) as routed:
        for number in range(KILLS):
            streams = [Stream() for _ in range(STREAMS)]
            async with asyncio.TaskGroup() as tasks:
                for index, stream in enumerate(streams):
                    question = _question(f"{way} {number}/{index}", is_chat=index % 2 == 0)
                    tasks.create_task(stream.read(routed, question))
                await asyncio.gather(*(stream.begun.wait() for stream in streams))
                victim = pair[number % 2]
                victim.kill()
            for stream in streams:
                found["whole" if isinstance(stream.end, str) else "cut"][stream.reason] += 1
                assert isinstance(stream.end, dict) or stream.tokens == TOKENS
            for index in range(10):
                answer = await routed.post(_question(f"{way} {number}//{index}") | {"max_tokens": 4})
                found["meanwhile"][answer.status] += 1
            victim.start()
            await victim.ready()
            await routed.until_ready(2)
            published = [Published(server) for server in pair]
            await routed.until_applied(*published)
            for body in bodies(number, CHECKED, longest_output=8):
                answer = await routed.post(body)
                assert answer.status == 200, answer.body
                found["above"][answer.predicted - answer.reported] += 1
                await routed.until_applied(*published)
    (tmp_path / "result.json").write_text(json.dumps(found))
    assert found["whole"].keys() == {"length"}
    # Only what reaches the engines as tokens goes on at the other one.
    assert (found["cut"].total() == 0) == (way == "sidecar-tokens"), found
    assert found["meanwhile"].keys() == {200}
    assert max(found["above"]) <= BLOCK


def _question(text: str, *, is_chat: bool = False) -> dict[str, Any]:
    # No prompt is sent twice: one whose runs saw two deaths would be refused.
    prompt = f"Question {text} " * 20
    return {"messages": [{"role": "user", "content": prompt}]} if is_chat else {"prompt": prompt}
