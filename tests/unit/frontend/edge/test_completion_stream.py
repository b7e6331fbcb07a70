"""Chunks of a streamed completion, for clients that read and clients that do not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest
from kvrouter.frontend.edge.completion_request import parse_completion
from kvrouter.frontend.edge.event_stream import EventStream
from kvrouter.frontend.edge.frame import ResponseFrame
from kvrouter.frontend.edge.text_responses import CompletionStream
from kvrouter.frontend.packed_prompt import TOKEN_BYTES
from kvrouter.frontend.request.routed import Routed
from kvrouter.frontend.workers.output import DetailedOutput, Output
from kvrouter.net.calls.limits import MAX_UNREAD_BYTES
from kvrouter.v1.common_pb2 import Rank
from kvrouter.v1.errors import TooLarge
from kvrouter.v1.frontend_pb2 import RoutedOn
from kvrouter.v1.worker_pb2 import FinishReason, GenerateOutput

LAST = DetailedOutput.of(GenerateOutput(token_ids=[12], finish_reason=FinishReason.FINISH_REASON_LENGTH))


class Client:
    """An EventStream with a client that reads, or does not."""

    def __init__(self) -> None:
        self.events: list[bytes] = []
        self.headers: dict[str, str] = {}
        self.ended = self.closed = False
        self.reads = asyncio.Event()
        self.reads.set()

    @property
    def begun(self) -> bool:
        return bool(self.events)

    @property
    def is_full(self) -> bool:
        return not self.reads.is_set()

    def add_headers(self, headers: Mapping[str, str]) -> None:
        self.headers.update(headers)

    def write_event(self, data: bytes) -> None:
        assert b"\n" not in data
        self.events.append(data)

    def token_writer(self, _before: bytes, _after: bytes) -> SimpleNamespace:
        assert self.begun
        return SimpleNamespace(total=0)

    def end(self, *, close: bool = False) -> None:
        self.ended, self.closed = True, close

    async def drain(self) -> None:
        await self.reads.wait()

    @property
    def chunks(self) -> list[Any]:
        return [json.loads(event) for event in self.events if event != b"[DONE]"]

    @property
    def token_ids(self) -> Iterator[int]:
        for chunk in self.chunks:
            for choice in chunk["choices"]:
                yield from choice["token_ids"]


def stream(client: Client, **fields: Any) -> CompletionStream:
    body = json.dumps({"model": 'a "model"', "prompt": [1, 2, 3], "stream": True, **fields}).encode()
    request = parse_completion(body, max_prompt_tokens=100)
    assert request.plain_prompt is not None
    frame = ResponseFrame(request, None, [request.plain_prompt.token_ids])
    begun = CompletionStream(frame, cast(EventStream, client))
    begun.routed(Routed(request_id="r", rank=Rank(worker_id=5), mode="kv", routed_on=RoutedOn.ROUTED_ON_TOKENS))
    return begun


async def test_each_piece_is_written_as_it_arrives() -> None:
    client = Client()
    completion = stream(client, return_token_ids=True)
    completion.output(DetailedOutput.of(GenerateOutput(token_ids=[10, 11], cached_tokens=16)))
    assert client.headers == {
        "x-request-id": "r",
        "x-kvrouter-worker": "5:0",
        "x-kvrouter-overlap-blocks": "0",
        "x-kvrouter-routed-on": "tokens",
    }
    assert len(client.events) == 1
    completion.output(LAST)
    await completion.end()
    first, last = client.chunks
    assert (first["id"], first["object"], first["model"]) == ("cmpl-r", "text_completion", 'a "model"')
    assert first["choices"] == [
        {
            "index": 0,
            "text": "",
            "token_ids": [10, 11],
            "prompt_token_ids": [1, 2, 3],
            "logprobs": None,
            "finish_reason": None,
            "stop_reason": None,
        }
    ]
    assert last["choices"][0]["token_ids"] == [12]
    assert last["choices"][0]["finish_reason"] == "length"
    assert "prompt_token_ids" not in last["choices"][0]
    assert client.events[-1] == b"[DONE]"
    assert client.ended
    assert not client.closed


def single(token_id: int) -> Output:
    return Output(1, (token_id,))


async def test_the_first_single_token_of_a_continuation_says_where_it_runs() -> None:
    client = Client()
    completion = stream(client)
    for token_id in (1, 2):
        completion.output(single(token_id))
    completion.routed(Routed(request_id="r", rank=Rank(worker_id=6), migrations=1))
    for token_id in (3, 4):
        completion.output(single(token_id))
    assert list(client.token_ids) == [1, 2, 3, 4]
    assert ["kvrouter" in chunk for chunk in client.chunks] == [False, False, True, False]


async def test_single_tokens_that_a_client_has_not_read_become_one_chunk_and_count() -> None:
    client = Client()
    completion = stream(client, stream_options={"include_usage": True})
    completion.output(single(10))
    client.reads.clear()
    for token_id in (11, 12):
        completion.output(single(token_id))
    client.reads.set()
    completion.output(single(13))
    completion.output(LAST)
    await completion.end()
    assert [choice["token_ids"] for chunk in client.chunks for choice in chunk["choices"]] == [[10], [11, 12, 13, 12]]
    assert client.chunks[-1]["usage"]["completion_tokens"] == 5


async def test_usage_comes_last_if_it_is_requested() -> None:
    client = Client()
    completion = stream(client, stream_options={"include_usage": True})
    completion.output(DetailedOutput.of(GenerateOutput(token_ids=[10, 11], cached_tokens=2)))
    completion.output(LAST)
    await completion.end()
    usage = client.chunks[-1]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 3
    assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert usage["kvrouter"]["worker_id"] == 5


async def test_no_chunk_has_token_ids_if_none_are_requested() -> None:
    client = Client()
    completion = stream(client, return_token_ids=False)
    completion.output(DetailedOutput.of(GenerateOutput(token_ids=[10, 11])))
    completion.output(LAST)
    await completion.end()
    for chunk in client.chunks:
        assert not {"token_ids", "prompt_token_ids"} & chunk["choices"][0].keys()


async def test_unread_output_becomes_one_chunk() -> None:
    client = Client()
    completion = stream(client)
    completion.output(DetailedOutput.of(GenerateOutput(token_ids=[10])))
    client.reads.clear()
    completion.output(DetailedOutput.of(GenerateOutput(token_ids=[11])))
    completion.output(LAST)
    assert len(client.events) == 1
    ending = asyncio.create_task(completion.end())
    client.reads.set()
    await ending
    first, second = client.chunks
    assert first["choices"][0]["token_ids"] == [10]
    assert second["choices"][0]["token_ids"] == [11, 12]
    assert second["choices"][0]["finish_reason"] == "length"
    assert client.events[-1] == b"[DONE]"


async def test_output_that_arrives_while_kept_output_is_written_stays_in_order() -> None:
    client = Client()
    completion = stream(client)
    client.reads.clear()
    completion.output(DetailedOutput.of(GenerateOutput(token_ids=[10])))
    client.reads.set()
    completion.output(DetailedOutput.of(GenerateOutput(token_ids=[11])))
    await asyncio.sleep(0)
    completion.output(LAST)
    await completion.end()
    assert list(client.token_ids) == [10, 11, 12]


async def test_too_much_unread_output_ends_the_request_and_its_connection() -> None:
    client = Client()
    completion = stream(client)
    completion.output(DetailedOutput.of(GenerateOutput(token_ids=[10])))
    client.reads.clear()
    for _ in range(MAX_UNREAD_BYTES // (1024 * TOKEN_BYTES)):
        completion.output(DetailedOutput.of(GenerateOutput(token_ids=[7] * 1024)))
    with pytest.raises(TooLarge):
        completion.output(DetailedOutput.of(GenerateOutput(token_ids=[7])))
    completion.fail({"error": {"message": "too much"}})
    completion.close()
    assert client.closed
    assert client.chunks[-1] == {"error": {"message": "too much"}}


async def test_an_error_in_a_stream_keeps_the_connection_of_a_client_that_reads() -> None:
    client = Client()
    completion = stream(client)
    completion.output(DetailedOutput.of(GenerateOutput(token_ids=[10])))
    completion.fail({"error": {}})
    completion.close()
    assert client.ended
    assert not client.closed
    assert client.events[-1] != b"[DONE]"
