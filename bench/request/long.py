"""Long prompts: how long they occupy an event loop at a time, and how much they delay short ones."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
from bars import BESIDE, LONG_PROMPTS, PEER
from kvrouter.devtools.system.processes import ManagedProcess
from load import MODEL
from samples import Samples
from systems import Engines, Processes, System, running_systems

ALONE = "1k, 50/s"
TOKENS = 131_072
_TEXT_BYTES = 500_000
_SHORT_TOKENS, _SHORT_PER_SECOND = 1024, 50
_REPEATED = 3
_ENGINES = Engines(workers=2, has_text=True)
_LEAST_SECONDS = 10.0
_WRITTEN_SECONDS = 10.0
_SETTLED_SECONDS = 0.5
"""Time after an answer until the events of its blocks are applied."""
_BAR_MS = 5.0

_Body = tuple[str, dict[str, Any]]


def token_ids(count: int) -> list[int]:
    """Returns random token ids."""
    return [random.randrange(300, 31_000) for _ in range(count)]


def text(size: int) -> str:
    """Returns a text of so many bytes: words, of which some are new to a tokenizer."""
    words = Path(__file__).with_name("load.py").read_text(encoding="utf-8").split()
    made = [random.choice(words) for _ in range(size // 4)]
    made[::20] = [f"{random.getrandbits(20):x}" for _ in made[::20]]
    return " ".join(made)[:size]


def bodies() -> Mapping[str, _Body]:
    """Returns the long requests of each kind: path and fields."""
    turns = [{"role": ("user", "assistant")[turn % 2], "content": text(_TEXT_BYTES // 101)} for turn in range(101)]
    kinds: tuple[_Body, ...] = (
        ("/v1/completions", {"prompt": token_ids(TOKENS), "max_tokens": 2}),
        ("/v1/completions", {"prompt": text(_TEXT_BYTES), "max_tokens": 2}),
        ("/v1/chat/completions", {"messages": turns, "max_tokens": 2}),
        ("/v1/messages", {"messages": turns, "max_tokens": 2}),
        ("/v1/responses", {"input": turns, "max_output_tokens": 16, "store": False}),
    )
    return dict(zip(LONG_PROMPTS, kinds, strict=True))


async def long(
    samples: Samples,
    directory: Path,
    rounds: int,
    seconds: float,
    say: Callable[[str], None],
    *,
    names: Sequence[str],
    options: Sequence[str] = (),
) -> None:
    """Measures the longest callbacks of kvrouter's processes, and the latency of short prompts beside long ones."""
    callbacks = directory / "callbacks"
    callbacks.mkdir()
    kvrouter = [name for name in names if name != PEER]
    async with running_systems(kvrouter, _ENGINES, callbacks, options, recorded=True) as systems:
        for system in systems:
            await _longest(samples, system, callbacks, say)
    async with running_systems(names, Engines(), directory, options) as systems:
        for round_number in range(rounds):
            for system in systems:
                await _beside(samples, system, round_number, max(seconds, _LEAST_SECONDS), say)


async def _longest(samples: Samples, system: System, directory: Path, say: Callable[[str], None]) -> None:
    processes = {**system.router, **system.engines}
    async with aiohttp.ClientSession(system.url) as session:
        for number in range(_REPEATED + 1):  # the first requests fill caches, and are not recorded
            for row, (path, fields) in bodies().items():
                values = {}
                for sent in (False, True):
                    if sent:
                        await _send(session, path, json.dumps({"model": MODEL, **fields}).encode())
                        await asyncio.sleep(_SETTLED_SECONDS)
                    for part, process in processes.items():
                        longest = await asyncio.to_thread(_recorded, process, directory)
                        values[f"ms {part}"] = longest[0]["ms"] if longest else 0.0
                        if sent and number and longest and longest[0]["ms"] > _BAR_MS:
                            say(f"{row} {system.name} {part}: {longest[0]['ms']} ms in {longest[0]['stacks'][:1]}")
                if number:
                    samples.add(row, system.name, number, {"longest_ms": max(values.values()), **values})
                    say(f"{row} {system.name}: {values}")


def _recorded(process: ManagedProcess, directory: Path) -> list[dict[str, Any]]:
    """Returns the longest callbacks of a process since the last call."""
    file = Processes.recorded_file(directory, process.command.name)
    file.unlink(missing_ok=True)
    os.kill(process.pid, signal.SIGUSR1)
    deadline = time.monotonic() + _WRITTEN_SECONDS
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return json.loads(file.read_bytes())  # type: ignore[no-any-return]


async def _beside(
    samples: Samples, system: System, round_number: int, seconds: float, say: Callable[[str], None]
) -> None:
    """Adds the latency of short prompts, at a fixed rate, alone and beside a long one a second."""
    p99 = []
    for row in (ALONE, BESIDE):
        long_bodies = [_ids(TOKENS) for _ in range(int(seconds))] if row == BESIDE else []
        short_bodies = [_ids(_SHORT_TOKENS) for _ in range(int(seconds * _SHORT_PER_SECOND))]
        async with aiohttp.ClientSession(system.url) as session:
            _, latencies = await asyncio.gather(
                _paced(session, long_bodies, 1.0), _paced(session, short_bodies, 1 / _SHORT_PER_SECOND)
            )
        latencies.sort()
        values = {f"p{share}_us": 1e6 * latencies[len(latencies) * share // 100] for share in (50, 99)}
        p99.append(values["p99_us"])
        if row == BESIDE:
            values["added_p99_ms"] = (p99[1] - p99[0]) / 1e3
        samples.add(row, system.name, round_number, values)
        say(f"{row} {system.name}: p50 {values['p50_us']:,.0f} µs, p99 {values['p99_us']:,.0f} µs")


def _ids(count: int) -> bytes:
    return json.dumps({"model": MODEL, "prompt": token_ids(count), "max_tokens": 1}).encode()


async def _paced(session: aiohttp.ClientSession, prompts: Sequence[bytes], interval: float) -> list[float]:
    """Sends prompts at intervals, whether or not those before are answered. Returns their latencies, seconds."""

    async def one(number: int, body: bytes) -> float:
        due = began + interval * number
        await asyncio.sleep(due - time.monotonic())
        await _send(session, "/v1/completions", body)
        return time.monotonic() - due

    began = time.monotonic()
    return await asyncio.gather(*(one(number, body) for number, body in enumerate(prompts)))


async def _send(session: aiohttp.ClientSession, path: str, body: bytes) -> None:
    async with session.post(path, data=body, headers={"Content-Type": "application/json"}) as response:
        answer = await response.read()
        if response.status != 200:
            raise RuntimeError(f"{path} answered {response.status}: {answer[:500]!r}")
