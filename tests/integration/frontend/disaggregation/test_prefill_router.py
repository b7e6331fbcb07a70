"""A router of its own that only has its prefill workers chosen."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from kvrouter.runtime.deadline import Deadline
from kvrouter.v1.common_pb2 import BookingKey, RoutingRequest, Stage, TokenIds
from kvrouter.v1.frontend_pb2 import (
    FrontendServiceFreeRequest,
    FrontendServiceMarkPrefillCompleteRequest,
    FrontendServiceSelectWorkerRequest,
)
from kvrouter.v1.scheduler_pb2 import GetStatusRequest, RankStatus

from ..gateway import MODEL
from .fleet import DECODE, PREFILL, Fleet

EXAMPLE = Path(__file__).parents[4] / "examples" / "prefill_router.py"


async def status(fleet: Fleet) -> list[RankStatus]:
    found = await fleet.system.scheduler.get_status(GetStatusRequest(), deadline=Deadline.after(10))
    return list(found.components[0].ranks)


async def test_prefills_count_as_tokens_to_compute_until_they_are_complete(fleet: Fleet) -> None:
    await fleet.start(2, PREFILL)
    client, deadline = fleet.system.client, Deadline.after(30)
    request = RoutingRequest(model=MODEL, token_ids=TokenIds(ids=range(1000)))
    booking = BookingKey(request_id="a", stage=Stage.STAGE_PREFILL)
    await client.select_worker(FrontendServiceSelectWorkerRequest(request=request, booking=booking), deadline=deadline)
    loads = [(each.prefill_tokens, each.active_blocks, each.active_requests) for each in await status(fleet)]
    assert loads == [(1000, 0, 1)]
    assert (
        await client.mark_prefill_complete(
            FrontendServiceMarkPrefillCompleteRequest(booking=booking), deadline=deadline
        )
    ).known
    loads = [(each.prefill_tokens, each.active_blocks, each.active_requests) for each in await status(fleet)]
    assert loads == [(0, 0, 1)]
    assert (await client.free(FrontendServiceFreeRequest(booking=booking), deadline=deadline)).known
    await fleet.until_idle()


async def run_example(fleet: Fleet, *stages: str) -> list[str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(EXAMPLE), fleet.system.target, *stages, stdout=asyncio.subprocess.PIPE
    )
    output = (await process.communicate())[0].decode()
    assert process.returncode == 0
    return output.splitlines()


async def test_the_example_books_and_releases_both_stages_or_the_prefill_alone(fleet: Fleet) -> None:
    await fleet.start(2, PREFILL)
    prefill, known = await run_example(fleet, "prefill")
    assert prefill.startswith("prefill worker 2 at 127.0.0.1:")
    assert known == "STAGE_PREFILL: first token, booking known: True"
    await fleet.start(1, DECODE)
    decode, prefill, *both_known = await run_example(fleet)
    assert decode.startswith("decode worker 1 at 127.0.0.1:")
    assert prefill.startswith("prefill worker 2 at 127.0.0.1:")
    assert all(line.endswith("booking known: True") for line in both_known)
    assert len(both_known) == 2
    await fleet.until_idle()
