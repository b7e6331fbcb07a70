"""A sidecar stays up beside an engine that answers badly, and says whose fault it is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from ...waiting import until
from .faulty_engine import METRICS, FaultyEngine, chunk
from .rig import Beside, Sidecar, tokens_of, write_engine_keys

OK = [chunk(1), chunk(2, finish="stop"), b"data: [DONE]\n\n"]


@pytest.fixture
async def engine() -> AsyncIterator[FaultyEngine]:
    async with FaultyEngine().started() as engine:
        yield engine


@pytest.fixture
async def sidecar(engine: FaultyEngine, run: Beside, tmp_path: Path) -> AsyncIterator[Sidecar]:
    keys = write_engine_keys(tmp_path / "keys.toml", workers="secret")
    async with run(engine.url, kv_events=("none",), engine_keys_file=keys) as sidecar:
        await sidecar.ready()
        yield sidecar


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ({"parts": [b'{"error": {"message": "m", "code": 400}}'], "kind": "application/json"}, "INVALID_ARGUMENT"),
        ({"parts": [b'{"error": {"message": "m"}}'], "kind": "application/json"}, "UNAVAILABLE"),
        ({"parts": [b"<html>"], "kind": "text/html"}, "UNAVAILABLE"),
        ({"parts": [b'data: {"error": {"message": "m", "code": 400}}\n\n']}, "INVALID_ARGUMENT"),
        ({"parts": [chunk(1), b'data: {"error": {"message": "m", "code": 500}}\n\n']}, "UNAVAILABLE"),
        ({"parts": [b"data: nonsense\n\n"]}, "UNAVAILABLE"),
        ({"parts": []}, "UNAVAILABLE"),
        ({"parts": [chunk(1)]}, "UNAVAILABLE"),
        ({"parts": [chunk(1)], "breaks": True}, "UNAVAILABLE"),
        ({"parts": [chunk(1), chunk(2)[:-5]]}, "UNAVAILABLE"),
        ({"parts": [b"{}"], "status": 500}, "UNAVAILABLE"),
        ({"parts": [b"{}"], "status": 429}, "RESOURCE_EXHAUSTED"),
        ({"parts": [b'{"error": {"message": "m"}}'], "status": 400}, "INVALID_ARGUMENT"),
        ({"parts": [b"{}"], "status": 401}, "FAILED_PRECONDITION"),
    ],
)
async def test_a_bad_answer_fails_its_request_alone(
    engine: FaultyEngine, sidecar: Sidecar, answer: dict[str, Any], code: str
) -> None:
    engine.answers(*answer.pop("parts"), **answer)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await sidecar.generate([1, 2])
    assert caught.value.code().name == code
    engine.answers(*OK)
    assert tokens_of(await sidecar.generate([1, 2])) == [1, 2]
    result = "refused" if code == "INVALID_ARGUMENT" else "failed"
    assert sidecar.count("requests_total", result=result) == 1
    assert sidecar.count("registrations_total") == 1


async def test_a_connection_that_breaks_after_the_last_token_does_no_harm(
    engine: FaultyEngine, sidecar: Sidecar
) -> None:
    engine.answers(*OK[:2], breaks=True)
    assert tokens_of(await sidecar.generate([1, 2])) == [1, 2]


async def test_the_engines_key_is_sent(engine: FaultyEngine, sidecar: Sidecar) -> None:
    engine.answers(*OK)
    await sidecar.generate([1, 2])
    assert engine.headers == ["Bearer secret"]


async def test_a_caller_that_goes_away_closes_the_connection(engine: FaultyEngine, sidecar: Sidecar) -> None:
    closed = asyncio.Event()
    engine.hangs(chunk(1))
    hang = engine.answer
    assert hang is not None

    async def noticing(request: Any) -> Any:
        try:
            return await hang(request)
        finally:
            closed.set()

    engine.answer = noticing
    async for _ in sidecar.outputs([1, 2]):
        break
    await closed.wait()
    await until(lambda: sidecar.count("running_requests") == 0)


async def test_an_abort_reaches_sglang_under_the_id_that_it_was_given(run: Beside) -> None:
    async with (
        FaultyEngine(is_sglang=True).started() as engine,
        run(engine.url, kv_events=("none",)) as sidecar,
    ):
        await sidecar.ready()
        engine.hangs(b'data: {"output_ids": [1], "meta_info": {"finish_reason": null}}\n\n')
        async for _ in sidecar.outputs([1, 2]):
            break
        await until(lambda: engine.aborted == [engine.bodies[0]["rid"]])


async def test_requests_to_an_engine_that_hangs_fail_when_it_is_away(engine: FaultyEngine, run: Beside) -> None:
    async with run(engine.url, kv_events=("none",), engine_grace_seconds=1) as sidecar:
        await sidecar.ready()
        engine.hangs(chunk(1))
        request = asyncio.create_task(sidecar.generate([1, 2]))
        await until(lambda: bool(engine.headers))  # the engine answers it, and later requests otherwise
        engine.health = 503
        engine.answers(status=500)
        with pytest.raises(grpc.aio.AioRpcError):
            await sidecar.generate([1, 2], request_id="other")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await request
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert not sidecar.worker.is_accepting
        await until(lambda: sidecar.worker.load_reports() == [])
        engine.health = 200
        engine.answers(*OK)
        await until(lambda: sidecar.worker.is_accepting)
        assert tokens_of(await sidecar.generate([1, 2])) == [1, 2]


@pytest.mark.parametrize("metrics", ["", "\x00", METRICS.replace("} 1\n", "} NaN\n"), METRICS.replace("0.5", "-3")])
async def test_a_load_that_is_unusable_is_not_reported(engine: FaultyEngine, sidecar: Sidecar, metrics: str) -> None:
    await until(lambda: [each.active_blocks for each in sidecar.worker.load_reports()] == [32])
    engine.metrics = metrics
    await until(lambda: sidecar.worker.load_reports() == [])
    assert sidecar.worker.is_accepting
    engine.metrics = METRICS
    await until(lambda: [each.active_blocks for each in sidecar.worker.load_reports()] == [32])


async def test_what_is_not_discovered_is_asked_again(run: Beside) -> None:
    async with FaultyEngine().started() as engine, run(engine.url) as sidecar:
        await until(lambda: sidecar.supervisor.is_up)
        assert not sidecar.health.ready
        assert sidecar.supervisor.engine is None


@pytest.mark.parametrize("size", [1, 20_000])
async def test_an_event_may_be_larger_than_a_buffer(engine: FaultyEngine, sidecar: Sidecar, size: int) -> None:
    engine.answers(chunk(*range(size), finish="length"))
    assert tokens_of(await sidecar.generate([1, 2])) == list(range(size))
