"""Calls whose requests are a stream: uploads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.rpc import remote
from kvrouter.v1 import errors
from kvrouter.v1.error_encoding import from_rpc_error
from kvrouter.v1.indexer_pb2 import LoadRequest, LoadResponse

from .rpc_harness import INDEXER, serving, soon


class Indexer:
    """Counts the messages of an upload, up to three."""

    async def load(self, requests: AsyncIterator[LoadRequest], *, deadline: Deadline) -> LoadResponse:
        count = 0
        async for _ in requests:
            count += 1
            if count == 3:
                break
        return LoadResponse(ranks=count)


async def test_a_client_stream_gets_one_answer_even_before_it_has_sent_all() -> None:
    async def requests(count: int | None) -> AsyncIterator[LoadRequest]:
        for _ in range(count or 3):
            yield LoadRequest()
        if count is None:
            await asyncio.Event().wait()

    async with serving(INDEXER, Indexer()) as (_, channel):
        stub = remote(INDEXER, channel)
        assert (await stub.load(requests(2), deadline=soon())).ranks == 2
        assert (await stub.load(requests(None), deadline=soon())).ranks == 3


async def test_an_error_in_the_requests_is_the_callers_own() -> None:
    async def requests() -> AsyncIterator[LoadRequest]:
        yield LoadRequest()
        raise ZeroDivisionError

    async with serving(INDEXER, Indexer()) as (_, channel):
        with pytest.raises(ZeroDivisionError):
            await remote(INDEXER, channel).load(requests(), deadline=soon())


async def test_a_malformed_message_is_a_bad_request() -> None:
    async with serving(INDEXER, Indexer()) as (_, channel):
        upload: Any = channel.stream_unary("/kvrouter.v1.IndexerService/Load")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await upload(iter([b"\xff\xff"]))
        assert isinstance(from_rpc_error(refused.value), errors.BadRequest)
