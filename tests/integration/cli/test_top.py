"""``kvrouter top`` against Schedulers that come and go."""

from __future__ import annotations

import asyncio
import os
import pty
import signal
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack

import pytest
from kvrouter.cli.top.sources import Sources, Where, open_sources
from kvrouter.runtime.overview.system import System
from kvrouter.v1.common_pb2 import BookingKey
from kvrouter.v1.names import ComponentName, service_key
from kvrouter.v1.registry_pb2 import ServiceRegistration
from kvrouter.v1.scheduler_pb2 import FreeRequest

from ..scheduler.scheduling import PATIENCE_SECONDS, Stack, routing, scheduling, selecting, soon

COMMAND = (sys.executable, "-m", "kvrouter.cli.main", "top")
NOWHERE = "127.0.0.1:1"


async def until(sources: Sources, accept: Callable[[System], bool]) -> System:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not accept(system := await sources.look()):
            await asyncio.sleep(0.02)
    return system


async def run(*arguments: str) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        *COMMAND, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, errors = await process.communicate()
    return process.returncode, out.decode(), errors.decode()


async def book_two_and_end_one(stack: Stack) -> None:
    await stack.register(1, 2)
    for request_id in ("first~1", "second~1"):
        await stack.select(selecting(request_id, routing(6)))
    ended = FreeRequest(booking=BookingKey(request_id="first~1"), cached_tokens=48)
    await stack.scheduler.free(ended, deadline=soon())


async def test_one_frame_shows_load_hits_and_decisions(etcd_endpoint: str, nats_url: str, namespace: str) -> None:
    component = ComponentName(namespace, "decode")
    async with scheduling(component, etcd_endpoint, nats_url, kv_events=False) as stack:
        await book_two_and_end_one(stack)
        await stack.runtime.registrar.wait_registered()
        by_address = ("--scheduler", f"127.0.0.1:{stack.server.port}", "--indexer", NOWHERE)
        for how in (by_address, ("--etcd", etcd_endpoint, "--namespace", namespace)):
            status, out, errors = await run("--once", *how)
            assert (status, errors) == (0, "")
            assert "scheduler-1 at" in out
            assert "1 booking, 0 sessions" in out
            assert f"{component}  model org/model-7b, mode kv" in out
            # One of two requests of 96 tokens is booked, and half of the other's were cached.
            assert "6 / 2,000" in out
            assert "50 %" in out
            assert "kv: lowest cost" in out
        assert "Indexer   at 127.0.0.1:1 does not answer" in (await run("--once", *by_address))[1]


async def test_whoever_is_away_is_named(etcd_endpoint: str) -> None:
    status, out, errors = await run("--once", "--scheduler", NOWHERE)
    assert (status, errors) == (1, "kvrouter: no Scheduler answers\n")
    assert "Scheduler at 127.0.0.1:1 does not answer: Connection refused" in out
    status, out, _ = await run("--once", "--etcd", etcd_endpoint, "--namespace", "nobody-is-here")
    assert status == 1
    assert f"no Scheduler is registered in namespace nobody-is-here of etcd at {etcd_endpoint}" in out


@pytest.mark.parametrize("arguments", [("--etcd", "nonsense"), ("--namespace", "a/b"), ("--indexer", NOWHERE)])
async def test_wrong_usage_is_one_line(arguments: tuple[str, ...]) -> None:
    status, out, errors = await run("--once", *arguments)
    assert (status, out, errors.count("\n")) == (2, "", 1)


async def test_schedulers_are_followed_as_they_go_and_come(etcd_endpoint: str, nats_url: str, namespace: str) -> None:
    component = ComponentName(namespace, "decode")
    async with AsyncExitStack() as stack:
        sources = await stack.enter_async_context(open_sources(Where((), (), etcd_endpoint, namespace)))
        assert (await sources.look()).schedulers == []
        async with (
            scheduling(component, etcd_endpoint, nats_url) as one,
            scheduling(component, etcd_endpoint, nats_url, instance_id="scheduler-2") as two,
        ):
            await one.register(1)
            await two.knows(lambda found: 1 in found)
            await two.select(selecting("a"))
            view = await until(sources, lambda system: sum(each.status is not None for each in system.schedulers) == 2)
            leading, _ = view.components()[component]
            assert leading.scheduler_id == "scheduler-2"
        await until(sources, lambda system: not system.schedulers)
        async with scheduling(component, etcd_endpoint, nats_url) as again:
            view = await until(sources, lambda system: any(each.status is not None for each in system.schedulers))
            assert view.schedulers[0].address == again.server.endpoint()


async def test_one_that_is_registered_twice_is_shown_once(etcd_endpoint: str, nats_url: str, namespace: str) -> None:
    component = ComponentName(namespace, "decode")
    async with scheduling(component, etcd_endpoint, nats_url) as stack:
        first_incarnation = ServiceRegistration(endpoint=stack.server.endpoint(), ready=True)
        await stack.put(service_key(namespace, "scheduler", "its-first-incarnation"), first_incarnation)
        async with open_sources(Where((), (), etcd_endpoint, namespace)) as sources:
            view = await until(sources, lambda system: bool(system.schedulers))
            assert [each.address for each in view.schedulers] == [stack.server.endpoint()]


async def test_it_draws_again_and_again_and_ends_with_ctrl_c(etcd_endpoint: str, nats_url: str, namespace: str) -> None:
    async with scheduling(ComponentName(namespace, "decode"), etcd_endpoint, nats_url) as stack:
        await stack.register(1, 2)
        screen, terminal = pty.openpty()
        at = f"127.0.0.1:{stack.server.port}"
        try:
            process = await asyncio.create_subprocess_exec(
                *(*COMMAND, "--scheduler", at, "--interval", "0.1"),
                stdin=terminal,
                stdout=terminal,
                stderr=terminal,
                env=dict(os.environ) | {"TERM": "xterm", "COLUMNS": "160", "LINES": "40"},
            )
            os.close(terminal)
            drawn = b""
            async with asyncio.timeout(PATIENCE_SECONDS):
                while drawn.count(b"kvrouter top") < 3:
                    drawn += await asyncio.to_thread(os.read, screen, 65_536)
                process.send_signal(signal.SIGINT)
                while b"\x1b[?1049l" not in drawn:  # the screen as it was before
                    drawn += await asyncio.to_thread(os.read, screen, 65_536)
                assert await process.wait() == 0
            assert b"2:0" in drawn
            assert b"Traceback" not in drawn
        finally:
            os.close(screen)
