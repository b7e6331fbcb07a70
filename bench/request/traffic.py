"""Work over HTTP, run by all systems in turn: CPU of router and engines, latency, memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bars import ONE_PROCESS, PEER, SPLIT
from kvrouter.devtools.system.processes import ManagedProcess
from load import NoLoad, Work, load, response_bytes
from routers import running_routers
from samples import Samples
from systems import Engines, System, completion_counts, running_systems
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
    "text-1k": Work(768, 256, 16, kind="text"),
    "text-1k, nothing shared": Work(0, 1024, 16, kind="text"),
}
ROUTES = {
    **{
        f"{kind} of {name}": Work(prefix, suffix, 16, kind=kind)
        for name, prefix, suffix in (("1k", 768, 256), ("8k", 6144, 2048))
        for kind in ("text", "chat")
    },
    "chat of 8k, 7k shared": Work(7168, 1024, 16, kind="chat"),
    "streamed chat": Work(768, 256, 64, STREAMED_TOKENS, "chat"),
    "streamed chat, 1 token": Work(768, 256, 64, kind="chat"),
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
        add_tokens(samples, system, "token", "stream", "stream-1")


async def routes(
    samples: Samples, directory: Path, rounds: int, seconds: float, say: Say, *, names: Sequence[str]
) -> None:
    """Measures texts and chats on their way to engines with OpenAI APIs, through the systems of these names."""
    async with running_routers(names, directory) as systems:
        await compare(samples, ROUTES, systems, rounds=rounds, seconds=seconds, say=say)
    for system in names:
        add_tokens(samples, system, "token of a chat", "streamed chat", "streamed chat, 1 token")


def add_tokens(samples: Samples, system: str, row: str, streamed: str, one_token: str) -> None:
    """Adds what each further token costs: the difference of a streamed response and one of one token."""
    for name in samples.names(streamed, system):
        if "cpu_us" in name:
            pairs = zip(samples.of(streamed, system, name), samples.of(one_token, system, name), strict=True)
            for round_number, (all_tokens, one) in enumerate(pairs):
                samples.add(row, system, round_number, {name: (all_tokens - one) / (STREAMED_TOKENS - 1)})


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
    counted = await completion_counts(system)
    result = await load(system.url, work, seconds)
    if result.failed > result.requests / 100:
        raise NoLoad(f"{system.name}: {result.failed} of {result.requests} requests failed; its logs have the cause")
    reused = reuse(system.name, counted, await completion_counts(system), result.requests, work.concurrency)
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
        "generator_cpu_percent": 100 * result.generator_seconds / result.seconds,
        **reused,
        "resident_mb": sum(resident_bytes(pid) for pid in router.values()) / _MB,
        **({f"cpu_us {name}": spent[name] for name in router} if len(router) > 1 else {}),
    }


def reuse(
    name: str, before: Mapping[str, list[int]], after: Mapping[str, list[int]], responses: int, concurrency: int
) -> dict[str, float]:
    """Returns how many requests found their prefix, and the load of the busiest engine; empty if engines do not say.

    Raises:
        NoLoad: engines and clients counted differently.
    """
    if not after:
        return {}
    requests, hits = ([now - then for then, now in zip(before[each], after[each], strict=True)] for each in after)
    # Requests without a response: those under way at the end of this load, and of the one before.
    if not 0 <= sum(requests) - responses <= 2 * concurrency:
        raise NoLoad(f"{name}: clients got {responses} responses, engines counted {sum(requests)} requests")
    busiest = max(requests) * len(requests) / sum(requests)
    return {"hit_percent": 100 * sum(hits) / sum(requests), "busiest_engine": busiest}


def _pids(processes: Mapping[str, ManagedProcess]) -> dict[str, int]:
    return {name: process.pid for name, process in processes.items()}
