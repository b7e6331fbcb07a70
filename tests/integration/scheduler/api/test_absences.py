"""A Scheduler while NATS, etcd or its fellows are away, and as a process of its own."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest
from kvrouter.devtools.system.servers import EtcdServer, NatsServer
from kvrouter.net.etcd import watch_prefix
from kvrouter.net.etcd.watch import Change
from kvrouter.runtime.discovery.directory import Directory
from kvrouter.scheduler.load import thresholds
from kvrouter.scheduler.load.thresholds import ThresholdBoard
from kvrouter.scheduler.request.options import Thresholds, ThresholdUpdate
from kvrouter.v1.common_pb2 import BusyThresholds, Rank, RoutingOverrides
from kvrouter.v1.errors import DependencyAway
from kvrouter.v1.events_pb2 import LoadReport
from kvrouter.v1.names import ComponentName
from kvrouter.v1.scheduler_pb2 import ListBusyThresholdsRequest, SetBusyThresholdRequest
from prometheus_client import CollectorRegistry

from ..scheduling import MODEL, PATIENCE_SECONDS, Stack, eventually, routing, scheduling, selecting, soon


async def set_prefill(stack: Stack, tokens: int) -> None:
    wanted = BusyThresholds(active_prefill_tokens_threshold=tokens)
    await stack.scheduler.set_busy_threshold(SetBusyThresholdRequest(model=MODEL, thresholds=wanted), deadline=soon())


async def listed(stack: Stack) -> dict[str, int]:
    answer = await stack.scheduler.list_busy_thresholds(ListBusyThresholdsRequest(), deadline=soon())
    return {model: each.active_prefill_tokens_threshold for model, each in answer.thresholds.items()}


async def test_thresholds_are_shared_and_outlive_schedulers(
    etcd_endpoint: str, nats_url: str, component: ComponentName
) -> None:
    async with scheduling(component, etcd_endpoint, nats_url, instance_id="one") as one:
        await one.register(1)
        async with scheduling(
            component, etcd_endpoint, nats_url, instance_id="two", active_prefill_tokens_threshold=5
        ) as two:
            await two.register(1)
            assert await listed(two) == {MODEL: 5}
            await set_prefill(one, 700)
            await eventually(lambda: listed(two), lambda seen: seen == {MODEL: 700})
    async with scheduling(component, etcd_endpoint, nats_url, instance_id="three") as three:
        await eventually(lambda: listed(three), lambda seen: seen == {MODEL: 700})


async def test_a_watch_that_is_behind_takes_no_threshold_back(
    etcd_endpoint: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed, go_on, seen = asyncio.Event(), asyncio.Event(), list[int | None]()
    board = ThresholdBoard(Thresholds(), etcd_endpoint, namespace)

    async def late(*arguments: Any, **options: Any) -> AsyncGenerator[Change]:
        async with aclosing(watch_prefix(*arguments, **options)) as changes:
            async for change in changes:
                if listed.is_set():
                    await go_on.wait()
                yield change
                seen.append(board.of("m").prefill_tokens)
                listed.set()

    monkeypatch.setattr(thresholds, "watch_prefix", late)
    following = asyncio.create_task(board.run())
    try:
        await listed.wait()
        for tokens in (5, 7):
            await board.update("m", ThresholdUpdate(Thresholds(prefill_tokens=tokens)))
        go_on.set()
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(seen) < 3:  # the listing and two changes
                await asyncio.sleep(0.01)
        assert seen == [None, 7, 7]
    finally:
        following.cancel()
        await asyncio.wait({following})


async def test_schedulers_that_set_at_the_same_time_lose_nothing(
    etcd_endpoint: str, nats_url: str, component: ComponentName
) -> None:
    async with scheduling(component, etcd_endpoint, nats_url) as stack:
        await stack.register(1)
        decode = SetBusyThresholdRequest(model=MODEL, thresholds=BusyThresholds(active_decode_blocks_threshold=0.9))
        await asyncio.gather(
            set_prefill(stack, 5), stack.scheduler.set_busy_threshold(decode, deadline=soon()), set_prefill(stack, 5)
        )
        answer = await stack.scheduler.set_busy_threshold(SetBusyThresholdRequest(model=MODEL), deadline=soon())
        assert answer.thresholds == BusyThresholds(
            active_decode_blocks_threshold=0.9, active_prefill_tokens_threshold=5
        )


async def test_it_routes_without_nats_and_receives_load_reports_later(
    etcd_endpoint: str, own_nats: NatsServer, component: ComponentName
) -> None:
    await own_nats.kill()
    async with scheduling(component, etcd_endpoint, own_nats.url) as stack:
        await stack.register(1)
        assert (await stack.select(selecting("a"))).rank.worker_id == 1
        await own_nats.start()
        client = await stack.runtime.nats()
        report = LoadReport(rank=Rank(worker_id=1), incarnation=5, prefill_tokens=5000)
        limit = RoutingOverrides(active_prefill_tokens_threshold=4000)

        async def is_busy() -> bool:
            await client.publish(stack.component.load_subject(1, 0), report.SerializeToString())
            (load,) = await stack.loads(routing(overrides=limit))
            return load.busy

        await eventually(is_busy, bool)


async def test_it_routes_while_etcd_is_away_and_follows_it_again(
    own_etcd: EtcdServer, nats_url: str, component: ComponentName
) -> None:
    async with scheduling(component, own_etcd.endpoint, nats_url) as stack:
        await stack.register(1)
        await own_etcd.stop()
        assert (await stack.select(selecting("a"))).rank.worker_id == 1
        with pytest.raises(DependencyAway, match="unchanged"):
            await set_prefill(stack, 7)
        assert await listed(stack) == {}
        await own_etcd.start()
        await stack.register(2)
        await eventually(lambda: set_prefill(stack, 7), lambda _: True)
        # Its own watch comes back by itself, and may bring what etcd had before.
        await eventually(lambda: listed(stack), lambda seen: seen == {MODEL: 7})


async def test_as_a_process_it_gets_ready_and_stops_cleanly(
    etcd_endpoint: str, nats_url: str, component: ComponentName
) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvrouter.scheduler", "--namespace", component.namespace),
        *("--etcd", etcd_endpoint, "--nats", nats_url, "--instance-id", "alone", "--router-mode", "round-robin"),
        stderr=asyncio.subprocess.PIPE,
    )
    watcher = Directory(etcd_endpoint, component.namespace, CollectorRegistry())
    following = asyncio.create_task(watcher.run())
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            await watcher.wait_for(lambda seen: any(one.ready for one in seen.services("scheduler").values()))
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_SECONDS):
            _, log = await process.communicate()
        assert process.returncode == 0, log.decode()
        async with asyncio.timeout(PATIENCE_SECONDS):
            await watcher.wait_for(lambda seen: not seen.services("scheduler"))
    finally:
        following.cancel()
        await asyncio.wait({following})
        if process.returncode is None:
            process.kill()
            await process.wait()
