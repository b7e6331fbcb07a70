"""`kvrouter serve --engine … --state`: a restarted process knows what its engines hold."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import pytest
import zmq
import zmq.asyncio
from kvrouter.devtools.system.ports import free_ports

from ...faults.failpoints import RELAY_STEPS
from ...waiting import until
from ..sidecar.rig import BLOCK, EngineServer, events_at, vllm
from .no_broker import NoBroker, serving

pytestmark = pytest.mark.timeout(180)


def forgetful(messages: int = 4) -> EngineServer:
    """An engine that can repeat its last messages only."""
    live, replay = free_ports(2)
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{live}",
        "replay_endpoint": f"tcp://*:{replay}",
        "buffer_steps": messages,
    }
    return vllm(kv_events_config=json.dumps(events), enable_prompt_tokens_details=True)


def in_full(value: str) -> Any:
    """Returns a parameter whose test runs in `make test-full` only."""
    return pytest.param(value, marks=pytest.mark.full)


def prompt(number: int) -> list[int]:
    """A prompt of two whole blocks."""
    return [1000 * number + each for each in range(2 * BLOCK + 1)]


async def fill(system: NoBroker, numbers: Sequence[int]) -> None:
    """Sends prompts, and waits until they are in the index."""
    for number in numbers:
        await system.ask(prompt(number))
    for number in numbers:

        async def indexed(number: int = number) -> bool:
            return (await system.ask(prompt(number))).overlap_blocks == 2

        await until(indexed, 60)


async def saved(system: NoBroker) -> None:
    """Waits until the snapshot has all of the present."""
    began = time.monotonic()

    async def written() -> bool:
        # A snapshot of this size takes milliseconds, so this one was begun later than now.
        age = await system.metric("kvrouter_relay_state_age_seconds")
        return 0 <= age < time.monotonic() - began - 0.5

    await until(written, 60)


def resuming(directory: Path) -> tuple[str, ...]:
    """Options of a process that keeps its state in a directory."""
    return ("--state", str(directory), "--state-seconds", "0.05")


async def killed(system: NoBroker) -> None:
    """Kills the process."""
    os.kill(system.process.pid, signal.SIGKILL)
    await system.process.stop(20)


async def overlaps(system: NoBroker, numbers: Sequence[int]) -> list[int]:
    """Returns the overlap of each prompt, as of the first decision about it."""
    return [(await system.ask(prompt(number))).overlap_blocks for number in numbers]


async def test_a_killed_process_resumes_and_replays_what_it_missed(tmp_path: Path) -> None:
    engine, state = forgetful(), resuming(tmp_path / "state")
    before, missed = range(1, 11), 11
    async with engine.started():
        async with serving(tmp_path, engine.url, options=state) as first:
            await first.serving(1)
            await fill(first, before)
            await saved(first)
            await killed(first)
        async with aiohttp.ClientSession() as session:
            body = {"model": "m", "prompt": prompt(missed), "max_tokens": 1}
            async with session.post(f"{engine.url}/v1/completions", json=body) as response:
                assert response.status == 200
        async with serving(tmp_path, engine.url, options=state, name="again") as second:
            await second.ready()
            assert await overlaps(second, [*before, missed]) == [2] * 11, "all of it, from the first decision on"
            log = second.process.log_file.read_text()
            assert '"resumed": true' in log
            assert await second.metric("kvrouter_relay_restored_blocks") >= 20
            assert await second.metric("kvrouter_relay_dropped_blocks") == 0
        async with serving(tmp_path, engine.url, name="stateless") as third:
            await third.ready()
            assert (await overlaps(third, before))[:4] == [0] * 4, "without the state, the engine has forgotten them"


@pytest.mark.full
async def test_state_of_an_engine_that_restarted_meanwhile_is_dropped(tmp_path: Path) -> None:
    engine, state = forgetful(1000), resuming(tmp_path / "state")
    async with engine.started(), serving(tmp_path, engine.url, options=state) as first:
        await first.serving(1)
        await fill(first, range(1, 6))
    async with engine.started(), serving(tmp_path, engine.url, options=state, name="again") as second:
        await second.ready()
        assert second.logged("relay.state_dropped")
        assert await second.metric("kvrouter_relay_dropped_blocks") >= 10
        assert await overlaps(second, range(1, 6)) == [0] * 5


@pytest.mark.full
@pytest.mark.parametrize("damage", ["cut", *map(in_full, ("flipped", "emptied", "other"))])
async def test_a_damaged_file_is_dropped_and_learned_anew(tmp_path: Path, damage: str) -> None:
    engine, directory = forgetful(1000), tmp_path / "state"
    async with engine.started():
        async with serving(tmp_path, engine.url, options=resuming(directory)) as first:
            await first.serving(1)
            await fill(first, range(1, 6))
        (file,) = directory.glob("*.snapshot")
        content = bytearray(file.read_bytes())
        match damage:
            case "cut":
                content = content[: len(content) // 2]
            case "flipped":
                content[len(content) // 2] ^= 0xFF
            case "emptied":
                content = bytearray()
            case "other":
                content = content.replace(engine.url.encode(), engine.url.replace("127", "128").encode())
        file.write_bytes(content)
        async with serving(tmp_path, engine.url, options=resuming(directory), name="again") as second:
            await second.ready()
            assert await overlaps(second, range(1, 6)) == [2] * 5, "the engine repeats all of its messages"
            assert second.logged("state.not_recovered")
            lost = 0 if damage == "emptied" else 10
            assert await second.metric("kvrouter_relay_dropped_blocks") == lost, "as many as the file had"


async def test_lost_messages_are_replayed(tmp_path: Path) -> None:
    live, replay, lossy_port = free_ports(3)
    engine = vllm(kv_events_config=events_at(live, replay), enable_prompt_tokens_details=True)
    sockets = ("--engine-events", f"tcp://127.0.0.1:{lossy_port}", "--engine-replay", f"tcp://127.0.0.1:{replay}")
    loses, lost = asyncio.Event(), asyncio.Event()
    async with (
        engine.started(),
        forwarding(live, lossy_port, loses, lost),
        serving(tmp_path, engine.url, options=sockets) as system,
    ):
        await system.ready()
        await fill(system, [1])
        loses.set()
        await system.ask(prompt(2))
        await system.ask(prompt(3))
        async with asyncio.timeout(30):
            await lost.wait()
        assert await overlaps(system, [2, 3]) == [0, 0], "nobody has heard of them"
        loses.clear()
        await fill(system, [4, 2, 3, 1])
        assert await system.metric("kvrouter_relay_replayed_total") > 0
        assert not system.logged("relay.messages_lost")


@asynccontextmanager
async def forwarding(source: int, target: int, loses: asyncio.Event, lost: asyncio.Event) -> AsyncIterator[None]:
    """Forwards what an engine publishes to another port, except while ``loses`` is set; ``lost`` tells of the first."""
    context = zmq.asyncio.Context()
    subscriber, publisher = context.socket(zmq.SUB), context.socket(zmq.PUB)
    subscriber.subscribe(b"")
    subscriber.connect(f"tcp://127.0.0.1:{source}")
    publisher.bind(f"tcp://127.0.0.1:{target}")

    async def forward() -> None:
        while True:
            frames = await subscriber.recv_multipart()
            if loses.is_set():
                lost.set()
            else:
                await publisher.send_multipart(frames)

    running = asyncio.create_task(forward())
    try:
        yield
    finally:
        running.cancel()
        await asyncio.wait({running})
        context.destroy(linger=0)


def _has_disks(around: Sequence[str]) -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*around, "true"], capture_output=True, check=False).returncode == 0


async def test_a_full_disk_costs_the_state_only(tmp_path: Path) -> None:
    engine, directory = forgetful(1000), tmp_path / "state"
    directory.mkdir()
    # The disk of the process's own is full except for a few files without content.
    filled = 'mount -t tmpfs -o size=64k none "$1" && { cat /dev/zero > "$1/ballast" || true; } && shift && exec "$@"'
    around = ("unshare", "-rm", "sh", "-c", filled, "sh", str(directory))
    if not _has_disks(around):
        pytest.skip("no tmpfs of the test's own")
    async with (
        engine.started(),
        serving(tmp_path, engine.url, options=resuming(directory), around=around) as system,
    ):
        await system.ready()
        await fill(system, range(1, 4))
        await system.until_logged("state.not_written")
        assert await system.metric("kvrouter_relay_state_failures") > 0
        os.unlink(f"/proc/{system.process.pid}/root{directory}/ballast")
        await system.until_logged("state.written_again")


@pytest.mark.full
@pytest.mark.parametrize("step", [*map(in_full, RELAY_STEPS[:-1]), RELAY_STEPS[-1]])
async def test_a_process_that_dies_while_it_writes_knows_what_it_knew(tmp_path: Path, step: str) -> None:
    engine, state = forgetful(1000), resuming(tmp_path / "state")
    async with engine.started():
        async with serving(tmp_path, engine.url, options=state) as first:
            await first.serving(1)
            await fill(first, range(1, 6))
        async with serving(tmp_path, engine.url, options=state, name="dying", failpoint=step) as second:
            await second.ready()
            known = set(range(1, 6))
            with suppress(aiohttp.ClientError):  # of its death
                for number in itertools.count(6):
                    if (await second.ask(prompt(number % 20 + 6))).status == 200:
                        known.add(number % 20 + 6)
        async with serving(tmp_path, engine.url, options=state, name="again") as third:
            await third.ready()
            assert '"resumed": true' in third.process.log_file.read_text()
            assert await overlaps(third, sorted(known)) == [2] * len(known)


@pytest.mark.full
async def test_a_process_killed_at_any_moment_starts_and_overestimates_nothing(tmp_path: Path) -> None:
    engine, state = forgetful(1000), resuming(tmp_path / "state")
    random = Random(1)

    async def send(system: NoBroker) -> None:
        with suppress(aiohttp.ClientError):  # of the kill
            while True:
                await system.ask(prompt(random.randrange(40)))

    known = 0
    async with engine.started(num_blocks=32):  # for 16 prompts, so that blocks are evicted all the time
        for life in range(12):
            async with serving(tmp_path, engine.url, options=state, name=f"life-{life}") as system:
                await system.ready()
                # The engine has been idle since the kill, so nothing is on its way.
                answer = await system.ask(prompt(random.randrange(40)))
                assert answer.overlap_blocks * BLOCK <= answer.cached_tokens, life
                known += answer.overlap_blocks
                sending = [asyncio.create_task(send(system)) for _ in range(3)]
                await asyncio.sleep(random.random())
                await killed(system)
                await asyncio.wait(sending)
    assert known, "some of the caches were known"
