"""Requests in a fleet with prefill and decode pools."""

from __future__ import annotations

from typing import Any

import pytest
from kvrouter.runtime.deadline import Deadline
from kvrouter.v1.common_pb2 import (
    BookingKey,
    Component,
    RoutingConstraints,
    RoutingOverrides,
    RoutingRequest,
    Stage,
    TokenIds,
)
from kvrouter.v1.errors import UnknownModel, UnknownWorker
from kvrouter.v1.frontend_pb2 import FrontendServiceSelectWorkerRequest, ListModelsRequest
from kvrouter.v1.scheduler_pb2 import GetStatusRequest
from kvrouter.v1.worker_pb2 import StopConditions

from .fleet import DECODE, PREFILL, Fleet

STYLES = ("sequential", "concurrent")


@pytest.mark.parametrize("style", STYLES)
async def test_a_prefill_worker_computes_a_long_prompt_for_a_decode_worker(fleet: Fleet, style: str) -> None:
    await fleet.start(1, DECODE)
    await fleet.start(2, PREFILL, handover=style)
    served = await fleet.serve(stop_conditions=StopConditions(max_tokens=5))
    assert len(served.tokens) == 5
    assert (served.routing[0].rank.worker_id, served.prefill) == (1, 2)
    assert "to transfer 100 tokens" in served.routing[0].prefill_reason
    assert len(served.routing) == 1
    assert fleet.prefills("remote") == 1
    # A hand-over is not measured if the first token overtakes the end of the prefill on its way to the Frontend.
    for first in range(1000, 11_000, 1000):
        await fleet.until_idle()
        await fleet.serve(first=first)
        status = await fleet.system.scheduler.get_status(GetStatusRequest(decisions=30), deadline=Deadline.after(10))
        factors = [each.prefill.transfer_factor for each in status.decisions if each.HasField("prefill")]
        if factors[0] != 1:
            break
    assert factors[-1] == 1
    assert factors[0] != 1, "the hand-over of an earlier request counts"


async def test_the_detour_begins_with_the_first_prefill_worker_and_ends_with_the_last_one(
    fleet: Fleet,
) -> None:
    await fleet.start(1, DECODE)
    alone = await fleet.serve()
    assert alone.prefill == 0
    assert alone.routing[0].prefill_reason == "no prefill pool serves mock-model"
    await fleet.start(2, PREFILL)
    assert (await fleet.serve(first=1000)).prefill == 2
    await fleet.stop(2)
    left = await fleet.serve(first=2000)
    assert (len(left.tokens), left.prefill) == (4, 0)
    assert (fleet.prefills("absent"), fleet.prefills("remote")) == (2, 1)
    await fleet.until_idle()


async def test_decode_workers_compute_short_prompts_and_what_follows_a_prompt_that_they_hold(fleet: Fleet) -> None:
    await fleet.start(1, DECODE)
    await fleet.start(2, PREFILL)
    short = await fleet.serve(20)
    assert "lacks only 20 tokens" in short.routing[0].prefill_reason
    first = await fleet.serve(160, first=1000)
    follow_up = await fleet.serve(180, first=1000)
    assert [each.prefill for each in (short, first, follow_up)] == [0, 2, 0]
    assert "lacks only 20 tokens" in follow_up.routing[0].prefill_reason
    assert follow_up.routing[0].predicted_overlap_blocks == 10
    assert (fleet.prefills("local"), fleet.prefills("remote")) == (2, 1)
    await fleet.until_idle()


async def test_prompts_return_to_the_prefill_worker_that_holds_their_blocks(fleet: Fleet) -> None:
    await fleet.start(1, DECODE)
    await fleet.start(2, DECODE)
    for worker_id in (3, 4):
        await fleet.start(worker_id, PREFILL)
    holder = (await fleet.serve(320)).prefill
    for more in (1, 2, 3):
        await fleet.until_idle()
        assert (await fleet.serve(320 + 100 * more)).prefill in (0, holder)


async def test_of_several_prefill_pools_the_next_one_helps_out(fleet: Fleet) -> None:
    await fleet.start(1, DECODE)
    await fleet.start(2, PREFILL, component="prefill-a")
    await fleet.start(3, PREFILL, component="prefill-b")
    taken = RoutingRequest(
        component=Component(namespace=fleet.system.where["namespace"], name="prefill-b"), token_ids=TokenIds(ids=[1])
    )
    key = BookingKey(request_id="other", stage=Stage.STAGE_PREFILL)
    busy = RoutingOverrides(active_prefill_tokens_threshold=0)
    await fleet.system.client.select_worker(
        FrontendServiceSelectWorkerRequest(request=taken, booking=key), deadline=Deadline.after(10)
    )
    served = await fleet.serve(overrides=busy)
    assert served.prefill == 2
    taken.component.name = "prefill-a"
    key.attempt = 1
    await fleet.system.client.select_worker(
        FrontendServiceSelectWorkerRequest(request=taken, booking=key), deadline=Deadline.after(10)
    )
    alone = await fleet.serve(first=1000, overrides=busy)
    assert alone.prefill == 0
    assert "the prefill workers are busy" in alone.routing[0].prefill_reason
    assert fleet.prefills("busy") == 1


@pytest.mark.parametrize(
    ("different", "why"),
    [
        ({"block_size": 32}, "no prefill pool has blocks of 16 tokens: "),
        ({"model": "another"}, "no prefill pool serves mock-model"),
    ],
)
async def test_a_prefill_pool_that_does_not_match_is_left_out(
    fleet: Fleet, different: dict[str, Any], why: str
) -> None:
    await fleet.start(1, DECODE)
    await fleet.start(2, PREFILL, **different)
    served = await fleet.serve()
    assert (len(served.tokens), served.prefill) == (4, 0)
    assert served.routing[0].prefill_reason.startswith(why)
    assert fleet.prefills("absent") == 1


async def test_prefill_workers_alone_serve_no_model(fleet: Fleet) -> None:
    await fleet.start(2, PREFILL)
    with pytest.raises(UnknownModel, match="only prefill workers serve the model") as caught:
        await fleet.serve()
    assert caught.value.info.advice == "Start a worker of another role for it."
    assert not (await fleet.system.client.list_models(ListModelsRequest(), deadline=Deadline.after(10))).models


async def test_a_request_pinned_to_a_prefill_worker_is_refused(fleet: Fleet) -> None:
    await fleet.start(1, DECODE)
    await fleet.start(2, PREFILL)
    with pytest.raises(UnknownWorker, match=r"worker 2 is not registered in .*/decode"):
        await fleet.serve(constraints=RoutingConstraints(worker_id=2))
    assert (await fleet.serve(constraints=RoutingConstraints(worker_id=1))).prefill == 2
    await fleet.until_idle()


async def test_labels_concern_both_workers(fleet: Fleet) -> None:
    await fleet.start(1, DECODE, labels={"zone": "a"})
    await fleet.start(2, PREFILL, labels={"zone": "b"})
    served = await fleet.serve(constraints=RoutingConstraints(required_labels={"zone": "a"}))
    assert served.prefill == 0
    assert "zone" in served.routing[0].prefill_reason
