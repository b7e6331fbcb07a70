"""`kvrouter serve --engine … --peer`: two processes before the same engines know each other's requests."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from kvrouter.devtools.system.certificates import LOOPBACK, PEER_DOMAIN, DevelopmentAuthority
from kvrouter.devtools.system.ports import free_ports

from ...faults.wires import Wire
from ...waiting import until
from ..sidecar.rig import BLOCK, ENDLESS, ENDLESS_TOKENS, EngineServer, vllm
from .no_broker import NoBroker, begun, serving

pytestmark = pytest.mark.timeout(180)

REMOTE = "kvrouter_scheduler_remote_bookings"


@asynccontextmanager
async def peers(
    logs: Path, *urls: str, one: tuple[str, ...] = (), two: tuple[str, ...] = (), same_list: bool = False
) -> AsyncIterator[tuple[NoBroker, NoBroker]]:
    """Runs two processes that name each other; with ``same_list`` also themselves."""
    first, second = (f"127.0.0.1:{port}" for port in free_ports(2))
    named = {each: f"{first},{second}" if same_list else each for each in (first, second)}
    async with AsyncExitStack() as stack:
        systems = [
            await stack.enter_async_context(
                serving(logs / name, *urls, options=("--peer", named[peer], *options), name=name, bind=bind)
            )
            for name, bind, peer, options in (("one", first, second, one), ("two", second, first, two))
        ]
        yield systems[0], systems[1]


def engine() -> EngineServer:
    return vllm(enable_prompt_tokens_details=True)


async def counts(system: NoBroker, expected: int, metric: str = REMOTE) -> None:
    """Waits until a process counts as many of the other's bookings, or of another metric."""

    async def known() -> bool:
        return await system.metric(metric) == expected

    await until(known, 60)


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    return tmp_path


def prompt(number: int) -> list[int]:
    return [1000 * number + each for each in range(2 * BLOCK + 1)]


@pytest.mark.parametrize("same_list", [False, pytest.param(True, marks=pytest.mark.full)])
async def test_each_knows_the_requests_of_the_other(logs: Path, same_list: bool) -> None:
    running = engine()
    async with running.started(**ENDLESS) as server, peers(logs, running.url, same_list=same_list) as (one, two):
        await asyncio.gather(one.ready(), two.ready())
        asked = await begun(server, one.ask(prompt(1), max_tokens=ENDLESS_TOKENS, ignore_eos=True))
        await counts(two, 1)
        assert await one.metric(REMOTE) == 0, "its own booking"
        await counts(one, 1, "kvrouter_scheduler_peers")
        asked.cancel()
        await counts(two, 0)

        async def followed() -> bool:
            return (await two.ask(prompt(1))).overlap_blocks == 2

        await until(followed, 60)


async def test_one_that_is_killed_under_load_costs_no_request_and_leaves_no_booking(logs: Path) -> None:
    engines = [engine(), engine()]
    numbers, done = itertools.count(1), asyncio.Event()
    failed: list[object] = []

    async def client(systems: tuple[NoBroker, ...]) -> None:
        while not done.is_set():
            number = next(numbers) % 12
            for system in systems if number % 2 else reversed(systems):
                try:
                    answer = await system.ask(prompt(number), max_tokens=8, ignore_eos=True)
                except aiohttp.ClientError:
                    continue  # with the other
                if answer.status == 200:
                    break
            else:
                failed.append(number)

    async with AsyncExitStack() as stack:
        for each in engines:
            await stack.enter_async_context(each.started(clock_factor=2))
        one, two = await stack.enter_async_context(peers(logs, *(each.url for each in engines)))
        await asyncio.gather(one.ready(), two.ready())
        clients = [asyncio.create_task(client((one, two))) for _ in range(6)]

        async def shared() -> bool:
            return await two.metric(REMOTE) > 0

        await until(shared, 60)
        os.kill(one.process.pid, signal.SIGKILL)
        await one.process.stop(20)
        await two.until_logged("peer.away")
        await counts(two, 0)
        before = next(numbers)
        while next(numbers) < before + 50:
            await asyncio.sleep(0.05)
        done.set()
        await asyncio.gather(*clients)
        assert not failed


@pytest.mark.full
async def test_one_that_starts_later_learns_the_bookings_of_the_other(logs: Path) -> None:
    running = engine()
    first, second = (f"127.0.0.1:{port}" for port in free_ports(2))
    async with (
        running.started(**ENDLESS),
        serving(logs / "one", running.url, options=("--peer", second), name="one", bind=first) as one,
    ):
        await one.ready()
        asked = asyncio.create_task(one.ask(prompt(1), max_tokens=ENDLESS_TOKENS, ignore_eos=True))
        async with serving(logs / "two", running.url, options=("--peer", first), name="two", bind=second) as two:
            await counts(two, 1)
            assert one.logged("peer.away"), "it was not there yet"
            asked.cancel()
            await counts(two, 0)


async def test_a_silent_network_costs_the_bookings_of_the_other_until_it_passes_again(logs: Path) -> None:
    running = engine()
    first, second = free_ports(2)
    wire = Wire(first)
    async with (
        running.started(**ENDLESS),
        wire.laid(),
        serving(
            logs / "one", running.url, options=("--peer", f"127.0.0.1:{second}"), name="one", bind=f"127.0.0.1:{first}"
        ) as one,
        serving(
            logs / "two", running.url, options=("--peer", wire.address), name="two", bind=f"127.0.0.1:{second}"
        ) as two,
    ):
        await asyncio.gather(one.ready(), two.ready())
        asked = asyncio.create_task(one.ask(prompt(1), max_tokens=ENDLESS_TOKENS, ignore_eos=True))
        await counts(two, 1)
        wire.silence()
        await counts(two, 0)
        assert not asked.done(), "the other one lives, only the network is silent"
        wire.mend()
        await counts(two, 1)
        asked.cancel()
        await counts(two, 0)


def certificate(authority: DevelopmentAuthority, *roles: str) -> tuple[str, ...]:
    """Returns the options of a process with a certificate that names roles, and requires one of callers."""
    own = authority.issue(roles[0], (*LOOPBACK, *(f"{role}.{PEER_DOMAIN}" for role in roles[1:])))
    files = ("--tls-cert-file", str(own.cert), "--tls-key-file", str(own.key), "--tls-ca-file", str(own.authority))
    return (*files, "--tls-client-auth", "required", "--tls-peer-domain", PEER_DOMAIN)


OF_A_PEER = ("scheduler", "indexer", "frontend", "worker")
"""A process is all of them to its own workers and to its peers."""


@pytest.mark.parametrize("caller", ["peer", pytest.param("frontend", marks=pytest.mark.full), "stranger"])
async def test_peers_show_certificates(logs: Path, caller: str) -> None:
    authority = DevelopmentAuthority(logs / "authority")
    one = certificate(authority, *OF_A_PEER)
    other = DevelopmentAuthority(logs / "other") if caller == "stranger" else authority
    two = certificate(other, *(OF_A_PEER if caller != "frontend" else ("frontend", "worker")))
    running = engine()
    async with running.started(clock_factor=1), peers(logs, running.url, one=one, two=two) as (first, second):

        async def decided() -> bool:
            if caller == "peer":
                return first.logged("peer.connected") and second.logged("peer.connected")
            return second.logged("peer.away") and (caller == "stranger" or first.logged("caller.refused"))

        await until(decided, 60)
        await second.until_logged("sidecar.engine_registered")
        assert second.logged("peer.connected") == (caller == "peer")


@pytest.mark.parametrize("is_same", [pytest.param(True, marks=pytest.mark.full), False])
async def test_peers_show_the_service_token(logs: Path, is_same: bool) -> None:
    options = []
    for name in ("one", "two"):
        token = logs / f"token-{name}"
        token.touch(0o600)
        token.write_text("a" * 43 if is_same else name * 16)
        options.append(("--service-token-file", str(token)))
    running = engine()
    async with running.started(clock_factor=1), peers(logs, running.url, one=options[0], two=options[1]) as (one, two):
        await asyncio.gather(one.ready(), two.ready())

        async def decided() -> bool:
            return two.logged("peer.connected" if is_same else "caller.refused")

        await until(decided, 60)
        assert two.logged("peer.connected") == is_same


@pytest.mark.full
async def test_with_keys_for_clients_peers_need_credentials_too(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.touch(0o600)
    arguments = ("--engine", "http://127.0.0.1:1", "--peer", "127.0.0.1:2", "--api-keys", str(keys))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvrouter.cli.main", "serve", *arguments),
        stderr=asyncio.subprocess.PIPE,
    )
    _, output = await process.communicate()
    assert process.returncode == 2
    assert "--service-token-file" in output.decode()
