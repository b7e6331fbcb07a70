"""Chunks of an engine that differ in their text only are not parsed, and become the same events as if they were."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import pytest
from aiohttp.test_utils import make_mocked_request
from hypothesis import given, settings, strategies as st
from kvrouter.frontend.edge.event_stream import StepWriter
from kvrouter.frontend.edge.messages_request import MessagesRequest
from kvrouter.frontend.edge.responses_request import ResponsesRequest
from kvrouter.frontend.edge.translated_request import TranslatedRequest
from kvrouter.frontend.proxy import engine_chat
from kvrouter.frontend.proxy.engine_chat import ChunkPattern
from kvrouter.frontend.proxy.forwarded_response import TranslatedResponse
from kvrouter.frontend.request.routed import Routed
from kvrouter.frontend.workers.output import DetailedOutput
from kvrouter.v1.common_pb2 import Rank
from kvrouter.v1.errors import DependencyAway
from kvrouter.v1.frontend_pb2 import RoutedOn

BODIES: dict[type[TranslatedRequest], bytes] = {
    MessagesRequest: b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 9, "stream": true}',
    ResponsesRequest: b'{"model": "m", "input": "x", "stream": true}',
}
APIS = tuple(BODIES)


def chunk(delta: dict[str, Any], *, ascii_only: bool = True, **fields: Any) -> bytes:
    body = {"id": "c", "choices": [{"index": 0, "delta": delta, "finish_reason": None} | fields]}
    return b"data: %b\n\n" % json.dumps(body, ensure_ascii=ascii_only).encode()


def text(content: str) -> bytes:
    return chunk({"content": content})


def call(arguments: str, **head: Any) -> bytes:
    return chunk({"tool_calls": [{"index": 0, **head, "function": {"arguments": arguments} | head}]})


class Client:
    """Reads what is written for it."""

    def __init__(self) -> None:
        self.read = b""

    def is_closing(self) -> bool:
        return False

    def get_extra_info(self, name: str) -> None:
        pass

    def write(self, data: bytes) -> None:
        self.read += data


def answered(kind: type[TranslatedRequest], pieces: Sequence[bytes]) -> bytes:
    """Returns the events that a client gets of an engine's chunks."""

    async def run() -> bytes:
        client, writer = Client(), StepWriter()
        protocol = Mock(writing_paused=False, transport=client)
        request = make_mocked_request("POST", kind.path, protocol=protocol, transport=client)
        response = TranslatedResponse(request, writer, RoutedOn.ROUTED_ON_TOKENS, kind.read(BODIES[kind]), b"")
        response.routed(Routed(request_id="id", rank=Rank()))
        response.answers(200, "OK", {"Content-Type": "text/event-stream"})
        for piece in pieces:
            response.output(DetailedOutput(1, raw=piece))
        await response.end()
        return re.sub(rb'"created_at":\d+', b'"created_at":0', client.read.partition(b"\r\n\r\n")[2])

    return asyncio.run(run())


def events(said: bytes) -> list[tuple[bytes, Any]]:
    """Returns the events of a stream, of which texts may be escaped as the engine does it."""
    return [(name, json.loads(data)) for name, data in re.findall(rb"event: (.*)\ndata: (.*)\n\n", said)]


def decoding(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """The decoder of chunks, which counts its calls."""
    decoder = Mock(wraps=engine_chat._ANSWER)
    monkeypatch.setattr(engine_chat, "_ANSWER", decoder)
    decode: Mock = decoder.decode
    return decode


WORDS = st.text(max_size=8) | st.sampled_from(["probe", "content", 'a"b', "\\", "\u2028", "\U0001f600", "id", "\n\n"])
CHUNKS = st.one_of(
    WORDS.map(text),
    WORDS.map(lambda each: chunk({"content": each}, ascii_only=False)),
    WORDS.map(lambda each: chunk({"reasoning_content": each, "content": None})),
    WORDS.map(call),
    st.just(call("", name="look", id="a")),
    st.just(chunk({"role": "assistant", "content": ""})),
    st.just(chunk({}, finish_reason="stop")),
    st.just(b": comment\n\n"),
    st.just(text("Crlf").replace(b"\n", b"\r\n")),
    st.just(b'data: {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 5}}\n\n'),
)


@settings(deadline=None)
@given(kind=st.sampled_from(APIS), drawn=st.lists(CHUNKS, max_size=12), cuts=st.lists(st.integers(0, 2000), max_size=3))
def test_events_are_the_same_as_of_parsed_chunks(
    kind: type[TranslatedRequest], drawn: list[bytes], cuts: list[int]
) -> None:
    repeated = [each for each in drawn for _ in range(2)]
    whole = b"".join(repeated)
    places = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    cut = [whole[start:end] for start, end in pairwise(places)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChunkPattern, "learn", lambda *_: None)
        expected = events(answered(kind, repeated))
    assert events(answered(kind, repeated)) == expected
    assert events(answered(kind, cut)) == expected


@pytest.mark.parametrize("kind", APIS)
@pytest.mark.parametrize(
    "first",
    [text("a"), chunk({"reasoning": "a"}), chunk({"content": "a"}, logprobs=None, token_ids=None)],
    ids=["text", "reasoning", "more fields"],
)
def test_a_text_is_taken_from_a_chunk_like_the_last(
    monkeypatch: pytest.MonkeyPatch, kind: type[TranslatedRequest], first: bytes
) -> None:
    decode = decoding(monkeypatch)
    said = answered(kind, [first, *(first.replace(b'"a"', b'"<%d>"' % number) for number in range(50))])
    assert all(b"<%d>" % number in said for number in range(50))
    assert decode.call_count == 2, "the first chunk, and the one that shows where its text is"


@pytest.mark.parametrize("kind", APIS)
def test_arguments_of_calls_are_taken_in_the_same_way(
    monkeypatch: pytest.MonkeyPatch, kind: type[TranslatedRequest]
) -> None:
    decode = decoding(monkeypatch)
    said = answered(kind, [call("", name="look", id="a"), call('{"a": ['), *[call("1,")] * 50, call("1]}")])
    assert said.count(b'"1,"') == 50
    assert decode.call_count == 3


@pytest.mark.parametrize("kind", APIS)
def test_chunks_that_always_differ_are_compared_a_few_times_only(
    monkeypatch: pytest.MonkeyPatch, kind: type[TranslatedRequest]
) -> None:
    decode = decoding(monkeypatch)
    answered(kind, [chunk({"content": "a"}, number=number) for number in range(100)])
    assert decode.call_count <= 110


@pytest.mark.parametrize("wrong", [b"\\x", b'"', b"\xff", b"\x01", b"\\ud800"])
def test_a_malformed_text_is_not_passed_on(wrong: bytes) -> None:
    first = text("a")
    with pytest.raises(DependencyAway):
        answered(MessagesRequest, [first, first, first.replace(b'"a"', b'"%b"' % wrong)])
