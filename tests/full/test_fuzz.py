"""Minutes of random input for both sides of HTTP/2 and of call streams."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable

import pytest

from ..unit.net.calls.linked import ECHO
from ..unit.net.calls.scripted_server import Accepted, scripted
from ..unit.net.calls.test_over_grpc import connected
from ..unit.net.fuzz.call_streams import fuzz_client_stream, fuzz_server_stream, random_response
from ..unit.net.fuzz.http2_client import fuzz_client
from ..unit.net.fuzz.http2_scripts import corpus, cut, random_script
from ..unit.net.fuzz.http2_server import fuzz_server

SECONDS = 60.0
FIRST_SEED = int(os.environ.get("KVROUTER_SEED") or random.SystemRandom().randrange(1 << 48))


@pytest.mark.parametrize("fuzz", [fuzz_client, fuzz_server, fuzz_client_stream, fuzz_server_stream])
def test_random_seeds(fuzz: Callable[[int], None]) -> None:
    end, seed = time.monotonic() + SECONDS, FIRST_SEED
    while time.monotonic() < end:
        try:
            fuzz(seed)
        except Exception as error:
            error.add_note(f"KVROUTER_SEED={seed}")
            raise
        seed += 1


async def test_a_server_of_random_scripts_leaves_its_client_and_the_stream_to_another_server_running() -> None:
    """After the scripts the server is honest, and its calls are answered."""
    rng = random.Random(FIRST_SEED)
    seeds = list(corpus("http2").values())
    end = time.monotonic() + SECONDS
    scripts = 0

    async def hostile(accepted: Accepted, _number: int) -> None:
        nonlocal scripts
        if rng.random() < 0.8 or time.monotonic() > end:
            await accepted.open()
        if time.monotonic() > end:
            await accepted.answer_all()
        scripts += 1
        for _ in range(rng.randint(1, 20)):
            if rng.random() < 0.5:
                accepted.send_message(random_response(rng, 3))
            else:
                for part in cut(rng, random_script(rng, seeds)):
                    accepted.send(part)
                    await asyncio.sleep(0)
            await accepted.flush()

    async def honest(accepted: Accepted, _number: int) -> None:
        await accepted.open()
        await accepted.answer_all()

    async with (
        scripted(hostile) as hostile_port,
        scripted(honest) as honest_port,
        connected(hostile_port, ends_when_silent=False) as attacked,
        connected(honest_port, ends_when_silent=False) as other,
    ):
        while time.monotonic() < end:
            assert await other.call(ECHO, b"x") == b"x"
            if attacked.ready:
                calling = asyncio.create_task(attacked.call(ECHO, b"y"))
                await asyncio.wait([calling], timeout=0.1)
                calling.cancel()
            await asyncio.sleep(0.01)
        async with asyncio.timeout(60):
            while True:
                await attacked.wait_ready()
                calling = asyncio.create_task(attacked.call(ECHO, b"z"))
                await asyncio.wait([calling], timeout=5)
                if calling.done() and not calling.exception():
                    break
                calling.cancel()
        assert other.counts.opened == 1
        assert attacked.running <= 1
        assert scripts > 10, FIRST_SEED
