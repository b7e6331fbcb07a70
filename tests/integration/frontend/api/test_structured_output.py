"""Requests with a structured output reach only workers that constrain outputs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest
from kvrouter.publisher import worker as sdk
from kvrouter.publisher.config import WorkerConfig
from kvrouter.runtime.deadline import Deadline
from kvrouter.v1.errors import BadRequest
from kvrouter.v1.events_pb2 import LoadReport
from kvrouter.v1.names import ComponentName
from kvrouter.v1.worker_pb2 import (
    FinishReason,
    GenerateOutput,
    SamplingOptions,
    StructuredOutput,
    WorkerServiceGenerateRequest,
)

from ..gateway import MODEL, System, request

JSON = {"type": "json_object"}


class Constraining:
    """An engine that records the constraints which it receives."""

    def __init__(self) -> None:
        self.received: list[StructuredOutput] = []

    async def generate(self, request: WorkerServiceGenerateRequest) -> AsyncIterator[GenerateOutput]:
        self.received.append(request.sampling_options.structured_output)
        yield GenerateOutput(token_ids=[1], finish_reason=FinishReason.FINISH_REASON_STOP)

    async def abort(self, request_ids: Sequence[str]) -> int:
        return 0

    def load(self) -> Mapping[int, LoadReport]:
        return {0: LoadReport(total_blocks=512)}


@pytest.fixture
async def engine(system: System) -> AsyncIterator[Constraining]:
    engine = Constraining()
    config = WorkerConfig(
        component=ComponentName(system.where["namespace"], "workers"),
        model=MODEL,
        block_size=16,
        worker_id=2,
        ranks={0: 512},
        etcd=system.where["etcd"],
        nats=system.where["nats"],
        max_model_len=8192,
        structured_output=True,
    )
    async with AsyncExitStack() as stack:
        await system.start_worker(1)
        worker = await stack.enter_async_context(sdk.running(config, engine))
        await worker.registered()
        await system.until_candidate(2)
        yield engine


async def complete(system: System, **fields: Any) -> aiohttp.ClientResponse:
    body = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 2} | fields
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"http://{system.http}/v1/completions", json=body) as response,
    ):
        await response.read()
        return response


async def test_workers_that_do_not_constrain_outputs_get_none(system: System, engine: Constraining) -> None:
    for _ in range(3):
        response = await complete(system, response_format=JSON)
        assert response.headers["x-kvrouter-worker"] == "2:0"
    assert engine.received == [StructuredOutput(json_object=True)] * 3
    routed = {(await complete(system)).headers["x-kvrouter-worker"] for _ in range(4)}
    assert routed == {"1:0", "2:0"}
    await system.until_idle()


async def test_without_such_a_worker_the_error_names_the_field(system: System) -> None:
    await system.start_worker(1)
    response = await complete(system, response_format=JSON)
    assert (response.status, (await response.json())["error"]["param"]) == (400, "response_format")
    constrained = request(sampling_options=SamplingOptions(structured_output=StructuredOutput(regex="a")))
    with pytest.raises(BadRequest) as caught:
        async for _ in system.client.generate(constrained, deadline=Deadline.after(30)):
            pass
    assert caught.value.info.field == "sampling_options.structured_output"
    assert await system.booked() == [0]
