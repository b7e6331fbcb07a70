"""Work over HTTP, run by all systems in turn: CPU of router and engines, latency, memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bars import ONE_PROCESS, PEER, SPLIT
from kvrouter.devtools.system.processes import ManagedProcess
from load import NoLoad, Work, load, response_bytes
from samples import Samples
from systems import Engines, System, running_systems
from usage import cpu_seconds, resident_bytes

STREAMED_TOKENS = 128
REQUESTS = {
    "1k": Work(768, 256, 16),
    "8k": Work(6144, 2048, 16),
    "alone-1k": Work(768, 256, 1),
    "alone-8k": Work(6144, 2048, 1),
}
STREAM = {
    "stream": Work(768, 256, 64, STREAMED_TOKENS),
    "stream-1": Work(768, 256, 64),  # what such a request costs besides its tokens
}
TEXT = {
    "text-1k": Work(768, 256, 16, is_text=True),
    "text-1k, nothing shared": Work(0, 1024, 16, is_text=True),
}
CORNERS = {
    f"{prompt}, {concurrency} at once": Work(prefix, suffix, concurrency)
    for prompt, prefix, suffix in (("64", 0, 64), ("128k", 98_304, 32_768))
    for concurrency in (1, 256)
}
CORNER_WORKERS = (4, 256)
STREAMING_ENGINES = Engines(speed=10)
_WARM_SECONDS = 2.0
_TOKENS_PER_SECOND = 1e6  # a run is long enough to serve every connection once at this rate
_MB = 1e6

Say = Callable[[str], None]


async def compare(
    samples: Samples,
    works: Mapping[str, Work],
    systems: Sequence[System],
    *,
    rounds: int,
    seconds: float,
    say: Say,
    may_fail: bool = False,
) -> None:
    """Runs each work with all systems in turn, as often as there are rounds.

    Raises:
        NoLoad: requests failed, unless they may: then the system has no sample of that work.
    """
    for row, work in works.items():
        enough = max(seconds, work.concurrency * (work.prefix + work.suffix) / _TOKENS_PER_SECOND)
        for system in systems:
            await load(system.url, work, _WARM_SECONDS)
        for round_number in range(rounds):
            for system in systems:
                try:
                    values = await _measure(system, work, enough)
                except NoLoad as error:
                    if not may_fail:
                        raise
                    say(f"{row} {error}")
                    continue
                samples.add(row, system.name, round_number, values)
                say(f"{row} {system.name}: {values['cpu_us']:,.0f} µs, p50 {values['p50_us']:,.0f} µs")


async def requests(samples: Samples, directory: Path, rounds: int, seconds: float, say: Say, **chosen: object) -> None:
    """Measures requests of 1k and 8k tokens, 16 at once and alone."""
    async with running_systems(directory=directory, engines=Engines(), **chosen) as systems:
        await compare(samples, REQUESTS, systems, rounds=rounds, seconds=seconds, say=say)


async def stream(samples: Samples, directory: Path, rounds: int, seconds: float, say: Say, **chosen: object) -> None:
    """Measures streamed responses, and what a token of them costs."""
    async with running_systems(directory=directory, engines=STREAMING_ENGINES, **chosen) as systems:
        await compare(samples, STREAM, systems, rounds=rounds, seconds=seconds, say=say)
    for system in (ONE_PROCESS, SPLIT, PEER):
        for name in ("cpu_us", "engine_cpu_us"):
            pairs = zip(samples.of("stream", system, name), samples.of("stream-1", system, name), strict=True)
            for round_number, (all_tokens, one_token) in enumerate(pairs):
                per_token = (all_tokens - one_token) / (STREAMED_TOKENS - 1)
                samples.add("token", system, round_number, {name: per_token})


async def text(samples: Samples, directory: Path, rounds: int, seconds: float, say: Say, **chosen: object) -> None:
    """Measures prompts that are texts of 1k words, three quarters of which are shared, or nothing."""
    async with running_systems(directory=directory, engines=Engines(has_text=True), **chosen) as systems:
        await compare(samples, TEXT, systems, rounds=rounds, seconds=seconds, say=say)


async def corners(
    samples: Samples, directory: Path, rounds: int, seconds: float, say: Say, *, workers: int, **chosen: object
) -> None:
    """Measures the corners of scaling with so many workers: short and long prompts, one and many at once."""
    works = {f"{name}, {workers} workers": work for name, work in CORNERS.items()}
    async with running_systems(directory=directory, engines=Engines(workers), **chosen) as systems:
        await compare(samples, works, systems, rounds=rounds, seconds=seconds, say=say, may_fail=True)


async def _measure(system: System, work: Work, seconds: float) -> dict[str, float]:
    router, engines = _pids(system.router), _pids(system.engines)
    before = {name: cpu_seconds(pid) for name, pid in (router | engines).items()}
    result = await load(system.url, work, seconds)
    if result.failed > result.requests / 100:
        raise NoLoad(f"{system.name}: {result.failed} of {result.requests} requests failed; its logs have the cause")
    # Streams that were not complete at the end count by their bytes. There are as many as connections.
    whole = await response_bytes(system.url, work) if work.output > 1 else 0
    each = result.bytes / whole if whole else max(1, result.requests)
    spent = {name: 1e6 * (cpu_seconds(pid) - before[name]) / each for name, pid in (router | engines).items()}
    return {
        "cpu_us": sum(spent[name] for name in router),
        "engine_cpu_us": sum(spent[name] for name in engines),
        "p50_us": result.p50_us,
        "p99_us": result.p99_us,
        "per_second": each / result.seconds,
        "failed": result.failed,
        "resident_mb": sum(resident_bytes(pid) for pid in router.values()) / _MB,
        **({f"cpu_us {name}": spent[name] for name in router} if len(router) > 1 else {}),
    }


def _pids(processes: Mapping[str, ManagedProcess]) -> dict[str, int]:
    return {name: process.pid for name, process in processes.items()}
