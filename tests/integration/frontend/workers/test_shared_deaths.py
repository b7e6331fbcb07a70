"""Deaths of workers that one Frontend tells the others of, over a real NATS."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

from kvrouter.frontend.workers.poison_prompts import PoisonPrompts
from kvrouter.frontend.workers.shared_deaths import SharedDeaths
from kvrouter.net.decoding import Quarantine
from kvrouter.net.nats.connection import connect_nats
from kvrouter.v1.names import worker_deaths_subject
from kvrouter.v1.sync_pb2 import WorkerDeathNotice
from nats.aio.client import Client

KEY = bytes(16)


@asynccontextmanager
async def sharing(
    name: str, nats_url: str, namespace: str, frontends: Collection[str]
) -> AsyncIterator[tuple[PoisonPrompts, SharedDeaths]]:
    """Shares the deaths that a Frontend sees until the end of the block."""
    async with connect_nats(nats_url, name) as client:

        async def connected() -> Client:
            return client

        prompts, subject = PoisonPrompts(60), worker_deaths_subject(namespace)
        shared = SharedDeaths(prompts, connected, subject, Quarantine(), frontend_id=name, frontends=lambda: frontends)
        running = asyncio.create_task(shared.run())
        try:
            yield prompts, shared
        finally:
            running.cancel()
            await asyncio.wait({running})


async def until_listening(nats_url: str, namespace: str) -> None:
    """Returns when a Frontend confirms a death, so it is subscribed."""
    async with connect_nats(nats_url, "probe") as client:
        notices = await client.subscribe(worker_deaths_subject(namespace))
        while True:
            probe = WorkerDeathNotice(prompt_key=b"?" * 16, worker="probe 1", frontend_id="probe")
            await client.publish(worker_deaths_subject(namespace), probe.SerializeToString())
            while (notice := WorkerDeathNotice.FromString((await notices.next_msg(30)).data)).frontend_id == "probe":
                continue
            assert notice.confirms
            return


async def test_a_request_waits_until_the_other_frontend_knows_of_a_death(nats_url: str, namespace: str) -> None:
    async with (
        asyncio.timeout(60),
        sharing("a", nats_url, namespace, "ab") as (prompts, shared),
        sharing("b", nats_url, namespace, "ab") as (others, _),
    ):
        await until_listening(nats_url, namespace)
        for worker in ("x 1", "y 1"):
            prompts.note(KEY, worker)
            await prompts.shared()
            entry = others.suspect(KEY)
            assert entry is not None
            assert worker in entry.workers, "known without a further step of the event loop"
        assert shared.unconfirmed == 0


async def test_a_frontend_that_subscribes_late_learns_of_deaths(nats_url: str, namespace: str) -> None:
    """It is registered, so clients reach it, before NATS knows its subscription."""
    async with asyncio.timeout(60), sharing("a", nats_url, namespace, "ab") as (prompts, shared):
        await until_listening(nats_url, namespace)
        prompts.note(KEY, "x 1")
        await prompts.shared()
        assert shared.unconfirmed == 1
        async with sharing("b", nats_url, namespace, "ab") as (others, _):
            while others.suspect(KEY) is None:
                await asyncio.sleep(0.01)
            while shared.unconfirmed:
                await asyncio.sleep(0.01)


async def test_a_frontend_alone_waits_for_nobody(nats_url: str, namespace: str) -> None:
    async with asyncio.timeout(60), sharing("a", nats_url, namespace, "a") as (prompts, shared):
        await until_listening(nats_url, namespace)
        prompts.note(KEY, "x 1")
        await prompts.shared()
        assert shared.unconfirmed == 0
