"""The service token between two processes: over ordinary RPCs and on call streams, shown and withheld."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from kvrouter.net.auth import CallerCheck, ServiceToken, showing
from kvrouter.net.auth.service_token import digest_line
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.rpc import (
    RpcServer,
    call_stream_client,
    open_channel,
    remote,
    remote_on_call_stream,
    remote_on_connections,
)
from kvrouter.v1.errors import DependencyAway, ServiceRefused
from kvrouter.v1.indexer_pb2 import GetStatsRequest, GetStatsResponse
from kvrouter.v1.worker_pb2 import AbortRequest
from structlog.testing import capture_logs

from .rpc_harness import INDEXER, WORKER, Worker, soon, tokens

TOKEN = "a token of sixteen times two".replace(" ", "-") + "-characters"
OTHER = TOKEN[::-1]


def token_of(path: Path, content: str) -> ServiceToken:
    path.write_text(content)
    path.chmod(0o600)
    return ServiceToken(str(path))


@pytest.fixture
def check(tmp_path: Path) -> CallerCheck:
    token_of(tmp_path / "expected", TOKEN)
    return CallerCheck(None, ServiceToken(str(tmp_path / "expected"), of_worker=True))


@pytest.mark.parametrize("shown", [TOKEN, OTHER, ""], ids=["the token", "another", "none"])
@pytest.mark.parametrize("role", ["worker", "frontend"])
async def test_a_call_needs_the_token(check: CallerCheck, tmp_path: Path, shown: str, role: str) -> None:
    server = RpcServer("127.0.0.1:0", callers=check)
    server.add_service(WORKER, Worker())
    await server.start()
    with capture_logs() as logs, showing(token_of(tmp_path / "shown", shown) if shown else None):
        async with open_channel(server.endpoint(), role=role) as channel:
            stub = remote(WORKER, channel)
            # A Frontend is what clients call: it receives the keys of its API, not this token.
            if shown == TOKEN and role == "worker":
                assert (await stub.abort(AbortRequest(request_ids=["a"]), deadline=soon())).aborted == 1
                assert len([each async for each in stub.generate(tokens(2), deadline=soon())]) == 2
                assert not check.refused
            else:
                with pytest.raises(ServiceRefused) as unary:
                    await stub.abort(AbortRequest(request_ids=["a"]), deadline=soon())
                with pytest.raises(ServiceRefused):
                    await anext(stub.generate(tokens(2), deadline=soon()))
                assert "--service-token-file" in unary.value.info.advice
                assert check.refused == {"token": 2}
    await server.drain(0)
    assert [line["reason"] for line in logs if line["event"] == "caller.refused"] == ["token"] * len(
        {"Abort", "Generate"} if check.refused else ()
    )
    assert TOKEN not in str(logs)
    assert OTHER not in str(logs)


@pytest.mark.parametrize("shown", [TOKEN, OTHER], ids=["the token", "another"])
async def test_a_call_stream_needs_the_token(check: CallerCheck, tmp_path: Path, shown: str) -> None:
    server = RpcServer("127.0.0.1:0", callers=check)
    server.add_service(WORKER, Worker())
    await server.start()
    with showing(token_of(tmp_path / "shown", shown)):
        client = call_stream_client(server.endpoint(), client_name="tester", role="worker")
    running = asyncio.create_task(client.run())
    try:
        call = remote_on_call_stream(WORKER, client).abort(AbortRequest(request_ids=["a"]), deadline=soon())
        if shown == TOKEN:
            assert (await call).aborted == 1
        else:
            with pytest.raises((ServiceRefused, DependencyAway)):
                await call
            assert check.refused["token"] >= 1
    finally:
        running.cancel()
        await asyncio.wait([running])
        await server.drain(0)


@pytest.mark.parametrize("shown", [TOKEN, OTHER], ids=["the token", "another"])
async def test_a_call_on_a_connection_of_its_own_needs_the_token(
    check: CallerCheck, tmp_path: Path, shown: str
) -> None:
    server = RpcServer("127.0.0.1:0", callers=check)
    server.add_service(WORKER, Worker())
    await server.start()
    with showing(token_of(tmp_path / "shown", shown)):
        stub = remote_on_connections(WORKER, server.endpoint(), role="worker", max_message_bytes=1 << 20)
    responses = stub.generate(tokens(1), deadline=soon())
    try:
        if shown == TOKEN:
            assert (await anext(responses)).output.token_ids == [0]
        else:
            with pytest.raises(ServiceRefused):
                await anext(responses)
    finally:
        await responses.aclose()
        await server.drain(0)


class Indexer:
    async def get_stats(self, _request: GetStatsRequest, *, deadline: Deadline) -> GetStatsResponse:
        assert deadline.remaining()
        return GetStatsResponse()


async def test_what_a_worker_is_shown_opens_no_service(tmp_path: Path) -> None:
    service = token_of(tmp_path / "service", TOKEN)
    shown = service.shown_to("worker")
    digest_of_worker = tmp_path / "digest"
    token_of(digest_of_worker, digest_line(shown))
    worker = ServiceToken(str(digest_of_worker), of_worker=True)
    assert worker.accepts(shown)
    assert not worker.accepts(TOKEN)
    assert not service.accepts(shown)
    assert service.accepts(service.shown_to("scheduler"))
    stolen = token_of(tmp_path / "stolen", shown)
    server = RpcServer("127.0.0.1:0", callers=CallerCheck(None, service))
    server.add_service(INDEXER, Indexer())
    await server.start()
    for token in (stolen, service):
        with showing(token):
            async with open_channel(server.endpoint(), role="indexer") as channel:
                call = remote(INDEXER, channel).get_stats(GetStatsRequest(), deadline=soon())
                if token is service:
                    assert await call == GetStatsResponse()
                    continue
                with pytest.raises(ServiceRefused):
                    await call
    await server.drain(0)
