"""Several Schedulers: one decides for a component, or each for its shard."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random

import pytest
from kvrouter.frontend.schedulers.link_pool import SchedulerLinks
from kvrouter.scheduler.load import overload
from kvrouter.v1.frontend_pb2 import FrontendServiceGenerateRequest
from kvrouter.v1.worker_pb2 import StopConditions

from ..gateway import System, request, running_system

SLOW = {"clock_factor": 0.001, "num_blocks": 4096}
"""Engines whose requests are booked for as long as a test lasts."""


def prompt(document: int, tail: int) -> FrontendServiceGenerateRequest:
    """Ten blocks of a document, and a question of its own."""
    tokens = [*range(10_000 * document, 10_000 * document + 160), *range(tail, tail + 20)]
    return request(tokens, stop_conditions=StopConditions(max_tokens=4))


async def until_booked(system: System, accept: Callable[[list[int]], bool]) -> list[int]:
    async with asyncio.timeout(30):
        while not accept(booked := await system.booked()):
            await asyncio.sleep(0.02)
    return booked


async def end(system: System, asked: list[asyncio.Task[int]]) -> None:
    for task in asked:
        task.cancel()
    await asyncio.wait(asked)
    await system.until_idle()


async def test_one_scheduler_decides_for_all(nats_url: str, etcd_endpoint: str, namespace: str) -> None:
    async with running_system(nats_url, etcd_endpoint, namespace, schedulers=2) as system:
        await system.start_worker(1, **SLOW)
        asked = [asyncio.create_task(system.generated(prompt(number, 0))) for number in range(20)]
        assert sorted(await until_booked(system, lambda booked: sum(booked) == 20)) == [0, 20]
        await end(system, asked)


async def test_sharded_requests_meet_by_prefix_and_are_freed_at_their_scheduler(
    nats_url: str, etcd_endpoint: str, namespace: str
) -> None:
    async with running_system(nats_url, etcd_endpoint, namespace, schedulers=2, sharding=True) as system:
        await system.start_worker(1, **SLOW)
        for document in range(1, 7):
            before = await system.booked()
            asked = [asyncio.create_task(system.generated(prompt(document, tail))) for tail in range(0, 100, 20)]
            booked = await until_booked(system, lambda booked: sum(booked) == 5)
            assert sorted(booked) == [0, 5], "those that share a document meet"
            assert before == [0, 0]
            await end(system, asked)
        many = [asyncio.create_task(system.generated(prompt(document, 0))) for document in range(100, 160)]
        booked = await until_booked(system, lambda booked: sum(booked) == 60)
        assert min(booked) >= 5, "the others are split"
        await end(system, many)


async def test_advice_spreads_what_comes_next(
    nats_url: str, etcd_endpoint: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overload.OverloadDetector, "behind", property(lambda _: True, lambda *_: None), raising=False)
    rng = Random(1)
    async with running_system(nats_url, etcd_endpoint, namespace, schedulers=2) as system:
        await system.start_worker(1, num_blocks=SLOW["num_blocks"])
        assert await system.generated(prompt(1, 0)) == 4
        await system.start_worker(2, **SLOW)
        await system.stop_worker(1)
        asked = [asyncio.create_task(system.generated(prompt(rng.randrange(1, 1000), 0))) for _ in range(60)]
        assert min(await until_booked(system, lambda booked: sum(booked) == 60)) >= 5
        links: SchedulerLinks = system.frontend._links
        assert links.sharded_components == 1
        await end(system, asked)
