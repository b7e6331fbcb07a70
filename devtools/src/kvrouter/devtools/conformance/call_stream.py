"""Checks requests on a call stream, which Frontends prefer to plain calls if the worker announces it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvrouter.devtools.conformance.cache import CacheProbe, check_finish
from kvrouter.devtools.conformance.results import CheckFailed, CheckSkipped
from kvrouter.devtools.conformance.worker_under_test import CLIENT_ERRORS, Output, WorkerUnderTest, add_piece
from kvrouter.net.calls import CallStreamClient
from kvrouter.v1 import worker_pb2
from kvrouter.v1.errors import KvRouterError
from kvrouter.v1.worker_pb2 import WorkerServiceGenerateRequest, WorkerServiceGenerateResponse

_GENERATE = f"{worker_pb2.DESCRIPTOR.services_by_name['WorkerService'].full_name}/Generate"


async def check_call_stream(worker: WorkerUnderTest, probe: CacheProbe) -> str:
    """Runs a request and a refused one on a call stream."""
    if not worker.serves_call_stream:
        raise CheckSkipped("the worker announces no call stream (serves_call_stream); plain calls cost more per token")
    if probe.before is None:
        raise CheckSkipped("the first request was not served")
    try:
        async with _stream(worker) as client:
            output = await _generate(client, worker.request(probe.prompt))
            if len(output.token_ids) != 1:
                raise CheckFailed(
                    expected="1 token for max_tokens 1 on a call stream",
                    received=f"{len(output.token_ids)} tokens",
                    advice="serve Generate on call streams as plain calls are served.",
                )
            check_finish(output)
            try:
                await _generate(client, worker.request([]))
            except KvRouterError as refusal:
                if refusal.code not in CLIENT_ERRORS:
                    raise
            else:
                raise CheckFailed(
                    expected="a refusal of a prompt without tokens on a call stream",
                    received="success",
                    advice="refuse on call streams what is refused as a plain call.",
                )
    except (KvRouterError, TimeoutError) as error:
        raise CheckFailed(
            expected="Generate on a call stream (kvrouter.v1.CallStreamService)",
            received=(error.message if isinstance(error, KvRouterError) else "") or "no answer",
            advice="serve call streams as protos/kvrouter/v1/calls.proto says, or announce none.",
        ) from None
    return "1 token, and a refusal"


@asynccontextmanager
async def _stream(worker: WorkerUnderTest) -> AsyncIterator[CallStreamClient]:
    client = CallStreamClient(worker.endpoint, client_name="conformance kit", tls=None)
    running = asyncio.create_task(client.run())
    try:
        await client.wait_open(worker.options.seconds)
        yield client
    finally:
        running.cancel()
        await asyncio.wait({running})


async def _generate(client: CallStreamClient, request: WorkerServiceGenerateRequest) -> Output:
    receiver = _Receiver()
    client.start(_GENERATE, request.SerializeToString(), receiver)
    async with asyncio.timeout(10):
        await receiver.ended
    return receiver.output


class _Receiver:
    """Collects the output of a call."""

    def __init__(self) -> None:
        self.output = Output()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_response(self, encoded: bytes) -> None:
        add_piece(self.output, WorkerServiceGenerateResponse.FromString(encoded))

    def on_end(self) -> None:
        self.ended.set_result(None)

    def on_error(self, error: KvRouterError) -> None:
        self.ended.set_exception(error)
