"""What one tenant can do to another: slow it down with a limited key, or learn by time what it has sent.

    python bench/isolation.py [--seconds 10] [--runs 1] [--attacks long-texts,...] [--probes 100]

A quiet tenant sends chats, alone and beside a key of one request a second and a concurrency of 1, whose client does
its worst under ``nice``. Then an isolated tenant sends texts, and another one sends the same or new ones once: the area
under the curve (AUC) says how well its times tell them apart, where 0.5 is a guess. The engines are simulated; their
time is real.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import itertools
import json
import os
import random
import statistics
import string
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import aiohttp
import grpc
import numpy as np
from kvrouter.devtools.system.stack import Stack, StackOptions, running_stack
from kvrouter.frontend.access.cache_salts import create_salt_key
from kvrouter.frontend.access.key_file import KeyEntry, KeyFile, TenantEntry, new_key, write_key_file
from kvrouter.v1.common_pb2 import BookingKey, RoutingRequest, TokenIds
from kvrouter.v1.frontend_pb2 import FrontendServiceGenerateRequest, FrontendServiceSelectWorkerRequest
from kvrouter.v1.worker_pb2 import StopConditions
from rich.console import Console
from rich.table import Table

QUIET_CLIENTS = 4
TENANTS = ("quiet", "other", "limited")
_PAUSE_SECONDS = 0.05
_CONNECTIONS = 32
_BODY_BYTES = 32 << 20
_TEXT_BYTES = 8 << 20
"""Size of the longest text that a Frontend accepts by default."""
_SERVICE = "/kvrouter.v1.FrontendService"
_words = random.Random(7)

Sender = Callable[[aiohttp.ClientSession], Awaitable[None]]


def text(characters: int, *, space: str = " ") -> str:
    """Returns new words."""
    words = ("".join(_words.choices(string.ascii_letters, k=_words.randint(2, 9))) for _ in range(2 + characters // 5))
    return space.join(words)[:characters]


def chat(model: str, content: str, **fields: Any) -> dict[str, Any]:
    """Returns the body of a chat of one token."""
    messages = [{"role": "user", "content": content}]
    return {"model": model, "messages": messages, "max_tokens": 1, "ignore_eos": True} | fields


def schema(depth: int) -> dict[str, Any]:
    """Returns a nested JSON schema."""
    nested: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        nested = {"type": "object", "properties": dict.fromkeys("ab"[: 1 + (depth < 12)], nested)}
    return nested


def tools() -> list[dict[str, Any]]:
    """Returns tools whose description is as long as a body may be beside its prompt."""
    described = {"description": text(2000), "parameters": schema(8)}
    return [{"type": "function", "function": {"name": f"f{number}"} | described} for number in range(8)]


def attacks(model: str) -> dict[str, Callable[[], dict[str, Any]]]:
    """Returns what makes the request of each attack over HTTP, as arguments of ``ClientSession.post``."""

    def body(content: Any) -> dict[str, Any]:
        return {"data": json.dumps(content).encode(), "headers": {"Content-Type": "application/json"}}

    def bomb() -> dict[str, Any]:
        compressed = gzip.compress(json.dumps(chat(model, " " * _BODY_BYTES)).encode())
        return {"data": compressed, "headers": {"Content-Type": "application/json", "Content-Encoding": "gzip"}}

    def with_schema() -> dict[str, Any]:
        named = {"name": "s", "schema": schema(10)}
        return body(chat(model, "x", response_format={"type": "json_schema", "json_schema": named}))

    return {
        "huge-bodies": lambda: body(chat(model, "x" * _BODY_BYTES)),
        "gzip-bombs": bomb,
        "heads": lambda: {"data": b"{}", "headers": {f"x-{number}": "y" * 500 for number in range(12)}},
        "long-texts": lambda: body(chat(model, text(60_000, space=""))),
        "longest-texts": lambda: body(chat(model, text(_TEXT_BYTES))),
        "escaped-texts": lambda: body(chat(model, "\u6c49" * (_TEXT_BYTES // 6))),
        "token-lists": lambda: body({"model": model, "prompt": [7] * 200_000, "max_tokens": 1}),
        "sequences": lambda: body(chat(model, text(2000), n=64, logprobs=True, top_logprobs=20, max_tokens=512)),
        "tools": lambda: body(chat(model, text(200), tools=tools())),
        "schemas": with_schema,
        "braces": lambda: body(chat(model, "x", metadata=json.loads("[" * 500 + "]" * 500))),
    }


async def attack_http(http: str, key: str, request: dict[str, Any], until: float) -> int:
    """Sends a request over and over on many connections. Returns how often."""
    sent = 0
    headers = {"Authorization": f"Bearer {key}"}

    async def repeat(session: aiohttp.ClientSession) -> None:
        nonlocal sent
        while time.time() < until:
            with suppress(aiohttp.ClientError, TimeoutError, OSError):
                async with session.post(f"http://{http}/v1/chat/completions", **request) as response:
                    await response.read()
            sent += 1

    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), headers=headers, timeout=timeout
    ) as session:
        await asyncio.gather(*(repeat(session) for _ in range(_CONNECTIONS)))
    return sent


async def attack_slowly(http: str, key: str, until: float) -> int:
    """Sends bodies byte by byte on many connections. Returns the number of bytes."""
    sent = 0
    host, port = http.split(":")

    async def drip() -> None:
        nonlocal sent
        while time.time() < until:
            with suppress(OSError):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(
                    f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {key}\r\n"
                    "Content-Type: application/json\r\nContent-Length: 9000000\r\n\r\n".encode()
                )
                while time.time() < until and not reader.at_eof():
                    writer.write(b" ")
                    await writer.drain()
                    sent += 1
                    await asyncio.sleep(0.005)
                writer.close()

    await asyncio.gather(*(drip() for _ in range(4 * _CONNECTIONS)))
    return sent


async def attack_grpc(kind: str, model: str, target: str, key: str, until: float) -> int:
    """Calls Generate with long prompts, or SelectWorker with a booking, over and over. Returns how often."""
    sent = 0
    numbers = itertools.count()

    def message() -> tuple[str, bytes]:
        if kind == "grpc-bookings":
            routing = RoutingRequest(model=model, token_ids=TokenIds(ids=range(2000)), prompt_tokens=2000)
            booking = BookingKey(request_id=f"attack-{next(numbers)}")
            return "SelectWorker", FrontendServiceSelectWorkerRequest(
                request=routing, booking=booking, lease_ms=60_000
            ).SerializeToString()
        stop = StopConditions(max_tokens=512)
        request = FrontendServiceGenerateRequest(
            model=model, token_ids=TokenIds(ids=[9] * 100_000), stop_conditions=stop
        )
        return "Generate", request.SerializeToString()

    async def repeat(channel: Any) -> None:
        nonlocal sent
        metadata = (("authorization", f"Bearer {key}"),)
        method, encoded = message()
        while time.time() < until:
            with suppress(grpc.aio.AioRpcError):
                if method == "Generate":
                    async for _ in channel.unary_stream(f"{_SERVICE}/{method}")(encoded, metadata=metadata, timeout=30):
                        pass
                else:
                    await channel.unary_unary(f"{_SERVICE}/{method}")(message()[1], metadata=metadata, timeout=30)
            sent += 1

    async with grpc.aio.insecure_channel(target) as channel:
        await asyncio.gather(*(repeat(channel) for _ in range(_CONNECTIONS)))
    return sent


def kinds(model: str) -> list[str]:
    """Returns the names of all attacks."""
    return [*attacks(model), "slow-bodies", "grpc-prompts", "grpc-bookings"]


async def attack(kind: str, model: str, http: str, target: str, key: str, seconds: float) -> None:
    """Says when its request is made, attacks, and prints the number of requests."""
    make = attacks(model).get(kind, dict)
    request = make()
    print("ready", flush=True)
    until = time.time() + seconds
    if kind == "slow-bodies":
        sent = await attack_slowly(http, key, until)
    elif kind.startswith("grpc"):
        sent = await attack_grpc(kind, model, target, key, until)
    else:
        sent = await attack_http(http, key, request, until)
    print(sent)


async def first_token(session: aiohttp.ClientSession, body: dict[str, Any]) -> tuple[float, aiohttp.ClientResponse]:
    """Returns the time to first token in seconds, and the response."""
    began = time.perf_counter()
    async with session.post("/v1/chat/completions", json=body | {"stream": True}) as response:
        response.raise_for_status()
        await response.content.readany()
        took = time.perf_counter() - began
        await response.read()
        return took, response


async def quiet_times(session: aiohttp.ClientSession, model: str, seconds: float) -> list[float]:
    """Returns the times to first token of the quiet tenant's chats."""
    times: list[float] = []
    until = time.perf_counter() + seconds

    async def repeat() -> None:
        while time.perf_counter() < until:
            times.append((await first_token(session, chat(model, text(1000), max_tokens=4)))[0])
            await asyncio.sleep(_PAUSE_SECONDS)

    await asyncio.gather(*(repeat() for _ in range(QUIET_CLIENTS)))
    return times


async def measure_attacks(
    stack: Stack, keys: dict[str, str], session: aiohttp.ClientSession, chosen: Sequence[str], seconds: float, runs: int
) -> Table:
    """Returns the quiet tenant's times beside each attack."""
    model = stack.options.model
    table = Table("attack", "requests", "p50 ms", "p99 ms", "p99 ms alone", "p99 / alone", "held")
    await quiet_times(session, model, 5)
    for kind in chosen:
        found = []
        for _ in range(runs):
            alone = await quiet_times(session, model, seconds)
            process = await asyncio.create_subprocess_exec(
                *("nice", "-n", "19", sys.executable, __file__, "--attack", kind, "--seconds", str(seconds + 2)),
                *("--http", stack.http, "--grpc", stack.frontend, "--model", model),
                env=os.environ | {"KVROUTER_BENCH_KEY": keys["limited"]},
                stdout=asyncio.subprocess.PIPE,
            )
            assert process.stdout is not None
            await process.stdout.readline()
            await asyncio.sleep(1)
            beside = await quiet_times(session, model, seconds)
            sent, _ = await process.communicate()
            base, p99 = (float(np.percentile(times, 99)) * 1000 for times in (alone, beside))
            found.append((p99 / base, base, p99, float(np.median(beside)) * 1000, sent.decode().strip()))
        ratio, base, p99, p50, requests = sorted(found)[len(found) // 2]
        held = "yes" if ratio <= 1.5 or p99 <= base + 20 else "NO"
        table.add_row(kind, requests, f"{p50:.1f}", f"{p99:.1f}", f"{base:.1f}", f"{ratio:.2f}", held)
    return table


def auc(first: Sequence[float], second: Sequence[float]) -> float:
    """Returns the probability that a value of the first is above one of the second (Mann-Whitney), at least 0.5."""
    above = np.subtract.outer(np.array(first), np.array(second))
    share = float((above > 0).mean() + (above == 0).mean() / 2)
    return max(share, 1 - share)


async def measure_times(model: str, victim: aiohttp.ClientSession, prober: aiohttp.ClientSession, probes: int) -> Table:
    """Returns how well an isolated tenant tells texts that another one has sent from new ones."""
    times: dict[str, list[float]] = {"own": [], "another tenant's": [], "new": []}
    fields: dict[str, set[str]] = {name: set() for name in times}
    for _ in range(probes):
        own, sent, new = (chat(model, text(4000)) for _ in range(3))
        await first_token(prober, own)
        for _ in range(3):
            await first_token(victim, sent)
        order = list(zip(times, (own, sent, new), strict=True))
        _words.shuffle(order)
        for name, body in order:
            took, response = await first_token(prober, body)
            times[name].append(took)
            fields[name].add(response.headers.get("x-kvrouter-overlap-blocks", ""))
    table = Table("texts", "p50 ms", "AUC against new ones", "overlap blocks shown")
    for name, found in times.items():
        table.add_row(
            name,
            f"{statistics.median(found) * 1000:.2f}",
            f"{auc(found, times['new']):.2f}",
            ", ".join(sorted(fields[name])[:4]),
        )
    return table


async def measure(chosen: Sequence[str], seconds: float, runs: int, probes: int) -> None:
    """Prints the tables."""
    console = Console(width=110)
    with tempfile.TemporaryDirectory(prefix="kvrouter-") as folder:
        directory = Path(folder)
        made = {tenant: new_key(tenant) for tenant in TENANTS}
        limits = {"limited": {"requests_per_second": 1.0, "concurrency": 1}}
        entries = [
            KeyEntry(id=name, hash=digest, tenant=name, **cast(Any, limits.get(name, {})))
            for name, (_, digest) in made.items()
        ]
        tenants = [TenantEntry(name=name, isolated=name != "limited") for name in TENANTS]
        write_key_file(directory / "keys.json", KeyFile(keys=entries, tenants=tenants))
        create_salt_key(directory / "salt.key")
        keys = {name: key for name, (key, _) in made.items()}
        options = StackOptions(
            directory,
            directory,
            workers=2,
            has_text=True,
            frontend_options=(
                *("--api-keys", str(directory / "keys.json")),
                *("--cache-salt-key-file", str(directory / "salt.key")),
            ),
            api_key=keys["quiet"],
        )
        async with running_stack(options, lambda words: console.print(f"{words} ...")) as stack:

            def session_of(tenant: str) -> aiohttp.ClientSession:
                headers = {"Authorization": f"Bearer {keys[tenant]}"}
                return aiohttp.ClientSession(f"http://{stack.http}", headers=headers)

            async with session_of("quiet") as quiet, session_of("other") as other:
                if probes:
                    console.print(await measure_times(options.model, quiet, other, probes))
                if chosen:
                    console.print(await measure_attacks(stack, keys, quiet, chosen, seconds, runs))


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attacks", default="all", help="names with commas between them, all, or none")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--probes", type=int, default=100)
    for hidden in ("--attack", "--http", "--grpc", "--model"):
        parser.add_argument(hidden, default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.attack:
        key = os.environ["KVROUTER_BENCH_KEY"]
        asyncio.run(attack(given.attack, given.model, given.http, given.grpc, key, given.seconds))
        return
    every = kinds("m")
    chosen = every if given.attacks == "all" else [] if given.attacks == "none" else given.attacks.split(",")
    asyncio.run(measure(chosen, given.seconds, given.runs, given.probes))


if __name__ == "__main__":
    main()
