"""Chunks of a streamed chat or completion: which are written, and what they say of another worker."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
from kvrouter.frontend.edge.event_stream import EventStream
from kvrouter.frontend.edge.frame import Piece, ResponseFrame
from kvrouter.frontend.edge.text_request import SharedFields, TextRequest
from kvrouter.frontend.edge.text_responses import StreamedResponse
from kvrouter.frontend.request.routed import Routed
from kvrouter.frontend.text.model_text import ModelText
from kvrouter.net.model_files import read_model_files
from kvrouter.v1.common_pb2 import Rank

from ....byte_tokenizer import write_byte_tokenizer


class Client:
    """An EventStream with a client that reads."""

    is_full = False

    def __init__(self) -> None:
        self.chunks: list[Any] = []

    @property
    def begun(self) -> bool:
        return bool(self.chunks)

    def add_headers(self, headers: Mapping[str, str]) -> None: ...

    def write_event(self, data: bytes) -> None:
        self.chunks.append(json.loads(data))

    def end(self, *, close: bool = False) -> None: ...

    async def drain(self) -> None: ...


@pytest.mark.parametrize("is_chat", [True, False])
def test_a_token_without_text_of_its_own_has_its_logprob(is_chat: bool, tmp_path: Path) -> None:
    client = Client()
    model = ModelText(read_model_files(write_byte_tokenizer(tmp_path)), cache_bytes=1 << 20)
    request = TextRequest(SharedFields(model="m"), [], None, is_chat=is_chat, logprobs=True)
    stream = StreamedResponse(ResponseFrame(request, model, [b"\0" * 4]), cast(EventStream, client))
    stream.routed(0, Routed(request_id="", rank=Rank(worker_id=1)))
    for text, logprob in (("a", -1.0), ("", -2.0), ("é", -3.0)):
        stream.add(0, Piece(text, [1], [logprob], [], None, None))
    shown = [chunk["choices"][0]["logprobs"] for chunk in client.chunks]
    if is_chat:
        assert [[each["logprob"] for each in one["content"]] for one in shown] == [[-1.0], [-2.0], [-3.0]]
    else:
        assert [one["token_logprobs"] for one in shown] == [[-1.0], [-2.0], [-3.0]]


def test_the_first_chunk_of_a_continuation_says_where_it_runs() -> None:
    client = Client()
    request = TextRequest(SharedFields(model="m"), [], None, is_chat=True)
    stream = StreamedResponse(ResponseFrame(request, None, [b"\0" * 4]), cast(EventStream, client))
    stream.routed(0, Routed(request_id="", rank=Rank(worker_id=1)))
    for text in "ab":
        stream.add(0, Piece(text, [], [], [], None, None))
    stream.routed(0, Routed(request_id="", rank=Rank(worker_id=2), migrations=1, earlier_ranks=[Rank(worker_id=1)]))
    for text in "cd":
        stream.add(0, Piece(text, [], [], [], None, None))
    assert [chunk["choices"][0]["delta"]["content"] for chunk in client.chunks] == list("abcd")
    moved = [chunk.get("kvrouter") for chunk in client.chunks]
    assert [each is not None for each in moved] == [False, False, True, False]
    assert (moved[2]["worker_id"], moved[2]["earlier_ranks"], moved[2]["migrations"]) == (2, ["1:0"], 1)
