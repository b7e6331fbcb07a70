"""Failures in each stage of a disaggregated request: what the client gets, and that nothing stays booked or kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from kvrouter.v1.common_pb2 import RoutingConstraints
from kvrouter.v1.errors import DeadlineExceeded, WorkerLost
from kvrouter.v1.worker_pb2 import FinishReason, GenerateOutput, TransferParams, WorkerServiceGenerateResponse

from ....hostile_worker import Behaviour, HostileWorker, aborts, hangs, piece, writes
from .fleet import DECODE, PREFILL, Fleet, running_fleet

STYLES = ("sequential", "concurrent")
SLOW = 0.002
"""Clock factor at which the prefill of a test's prompt takes about ten seconds."""


@pytest.fixture
async def fleet(nats_url: str, etcd_endpoint: str, namespace: str) -> AsyncIterator[Fleet]:
    """A fleet whose Scheduler knows of no cached blocks, so that each attempt needs a prefill worker."""
    async with running_fleet(nats_url, etcd_endpoint, namespace, router_mode="round-robin") as running:
        yield running


def computed(params: TransferParams) -> bytes:
    output = GenerateOutput(token_ids=[1], finish_reason=FinishReason.FINISH_REASON_LENGTH, transfer_params=params)
    return WorkerServiceGenerateResponse(output=output).SerializeToString()


FAILURES: dict[str, Behaviour] = {
    "refuses": aborts(grpc.StatusCode.UNAVAILABLE),
    "rejects the request": aborts(grpc.StatusCode.INVALID_ARGUMENT),
    "sends garbage": writes(b"\xff\xff"),
    "ends early": writes(),
    "ends with an error": writes(piece(finish=FinishReason.FINISH_REASON_ERROR)),
    "sends no transfer parameters": writes(piece(1, finish=FinishReason.FINISH_REASON_LENGTH)),
    "sends a megabyte of them": writes(computed(TransferParams(format="mock-json", payload=bytes(1 << 20)))),
    "sends ten megabytes": writes(computed(TransferParams(format="mock-json", payload=bytes(10 << 20)))),
}


@pytest.mark.parametrize("failure", FAILURES)
async def test_a_prefill_worker_that_fails_is_replaced_by_another_one(fleet: Fleet, failure: str) -> None:
    await fleet.start(1, DECODE)
    await fleet.start(2, PREFILL)
    async with fleet.hostile(3, PREFILL, FAILURES[failure]) as worker:
        served = await fleet.serve_until_called(worker)
        assert (len(served.tokens), served.prefill) == (4, 2), served.routing[-1].prefill_reason
        assert [each.attempt for each in served.routing] == [0]
        await fleet.until_idle()


async def test_without_another_prefill_worker_the_decode_worker_computes_the_prompt(fleet: Fleet) -> None:
    await fleet.start(1, DECODE)
    await fleet.start(2, PREFILL)
    async with fleet.hostile(3, PREFILL, FAILURES["sends no transfer parameters"]) as worker:
        await fleet.stop(2)
        served = await fleet.serve()
        assert (worker.calls, len(served.tokens), served.prefill) == (1, 4, 0)
        assert "sent no transfer parameters" in served.routing[0].prefill_reason
        assert fleet.prefills("failed") == 1
        await fleet.until_idle()


async def test_a_prefill_that_fails_beside_its_decode_worker_is_repeated_elsewhere(fleet: Fleet) -> None:
    await fleet.start(1, DECODE)
    await fleet.start(2, PREFILL, handover="concurrent")
    async with fleet.hostile(3, PREFILL, aborts(grpc.StatusCode.UNAVAILABLE)) as worker:
        served = await fleet.serve_until_called(worker)
        assert (len(served.tokens), served.prefill) == (4, 2)
        assert served.routing[-1].attempt == 1
        await fleet.until_idle()


@pytest.mark.parametrize("style", STYLES)
async def test_a_prefill_worker_that_stops_answering_is_left(fleet: Fleet, style: str) -> None:
    await fleet.start(1, DECODE)
    await fleet.start(2, PREFILL, handover=style)
    async with fleet.hostile(3, PREFILL, hangs) as worker:
        worker.behave = freezes(worker)
        served = await fleet.serve_until_called(worker)
        assert (len(served.tokens), served.prefill) == (4, 2)
        await fleet.until_idle()


@pytest.mark.parametrize("style", STYLES)
async def test_a_decode_worker_that_fails_before_output_leaves_no_blocks_behind(fleet: Fleet, style: str) -> None:
    await fleet.start(1, DECODE)
    await fleet.start(2, PREFILL, handover=style)
    async with fleet.hostile(3, DECODE, aborts(grpc.StatusCode.UNAVAILABLE)) as worker:
        served = await fleet.serve_until_called(worker)
        assert len(served.tokens) == 4
        assert served.routing[-1].rank.worker_id == 1
        await fleet.until_idle()


@pytest.mark.parametrize("prefill", ["answers", "is lost"])
async def test_a_failure_counts_against_a_decode_worker_if_its_prefill_worker_answers(
    fleet: Fleet, prefill: str
) -> None:
    await fleet.start(1, DECODE)
    await fleet.start(2, PREFILL)
    computing = writes(computed(TransferParams(format="mock-json")))
    async with fleet.hostile(3, DECODE, hangs) as worker, fleet.hostile(4, PREFILL, computing) as prefiller:
        await fleet.stop(2)

        async def fail(context: Any) -> None:
            if prefill == "is lost":
                prefiller.freeze()
            await writes(piece(finish=FinishReason.FINISH_REASON_ERROR))(context)

        worker.behave = fail
        with pytest.raises(WorkerLost):
            await fleet.serve(constraints=RoutingConstraints(worker_id=3))
        assert worker.calls == 1
        assert await fleet.failures_of(3) == (1 if prefill == "answers" else 0)
        await fleet.until_idle()


async def test_the_only_decode_worker_is_asked_again_if_its_blocks_were_gone(fleet: Fleet) -> None:
    await fleet.start(1, DECODE)
    await fleet.start(2, PREFILL, kv_lease_seconds=1e-9)
    served = await fleet.serve()
    assert (len(served.tokens), served.prefill) == (4, 0)
    assert [each.worker_id for each in served.routing[-1].earlier_ranks] == [1]
    assert (fleet.prefills("remote"), fleet.prefills("failed")) == (1, 1)
    await fleet.until_idle()


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("slow", [PREFILL, DECODE])
async def test_a_client_that_leaves_ends_both_stages(fleet: Fleet, style: str, slow: str) -> None:
    await fleet.start(1, DECODE, clock_factor=SLOW if slow == DECODE else 20.0)
    await fleet.start(2, PREFILL, handover=style, clock_factor=SLOW if slow == PREFILL else 20.0)
    running = asyncio.create_task(fleet.serve())
    await _until_booked(fleet, 2 if slow == PREFILL else 1)
    running.cancel()
    await asyncio.wait([running])
    await fleet.until_idle()


@pytest.mark.parametrize("style", STYLES)
async def test_the_deadline_ends_both_stages(fleet: Fleet, style: str) -> None:
    await fleet.start(1, DECODE)
    await fleet.start(2, PREFILL, handover=style, clock_factor=SLOW)
    with pytest.raises(DeadlineExceeded):
        await fleet.serve(seconds=0.5)
    await fleet.until_idle()


def freezes(worker: HostileWorker) -> Behaviour:
    """Stops answering probes with the first request."""

    async def behave(context: Any) -> None:
        worker.freeze()
        await hangs(context)

    return behave


async def _until_booked(fleet: Fleet, bookings: int) -> None:
    async with asyncio.timeout(30):
        while await fleet.bookings() != bookings:
            await asyncio.sleep(0.01)
