"""Load over HTTP, by wrk: a fixed number of connections, each with one request at a time."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import resource
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

HERE = Path(__file__).parent
MODEL = "m"
WORDS = tuple(f"w{number}".translate(str.maketrans("0123456789", "abcdefghij")) for number in range(100, 1000))
"""Words of texts and chats, as ``load.lua`` makes them."""
_LATE_SECONDS = 120
_seeds = itertools.count(time.time_ns() // 10**9)  # another seed in each run, so that no suffix is in any cache


class NoLoad(Exception):
    """The load generator is missing, or said nothing that can be read."""


@dataclass(frozen=True, slots=True)
class Work:
    """What is asked of a system, over and over."""

    prefix: int
    """Tokens of a prompt that 1 in 32 requests have in common."""
    suffix: int
    """Tokens of a prompt that no other request has; a multiple of 16."""
    concurrency: int
    output: int = 1
    """Tokens of each response. More than one are streamed."""
    kind: Literal["ids", "text", "chat"] = "ids"
    """What a prompt is: token ids, or a text or chat with a word for each token."""


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What the clients saw."""

    requests: int
    """Responses that were complete when the time was over."""
    seconds: float
    bytes: int
    """Bytes of all responses, those that were not complete included."""
    failed: int
    p50_us: float
    p99_us: float
    generator_seconds: float = 0.0
    """CPU time of the load generator, which has one thread: it keeps up while that is less than ``seconds``."""


def installed() -> bool:
    """Returns whether the load generator can be run."""
    return shutil.which("wrk") is not None


async def load(url: str, work: Work, seconds: float) -> LoadResult:
    """Runs work for a time.

    Raises:
        NoLoad: wrk is missing, or failed.
    """
    if not installed():
        raise NoLoad("wrk is not on the PATH: install the package wrk of your system (Debian: apt-get install wrk)")
    environment = {
        **os.environ,
        "PREFIX": str(work.prefix),
        "SUFFIX": str(work.suffix),
        "MAX_TOKENS": str(work.output),
        "MODEL": MODEL,
        "STREAM": "true" if work.output > 1 else "false",
        "KIND": work.kind,
        "SEED": str(next(_seeds)),
    }
    before = _children_seconds()
    process = await asyncio.create_subprocess_exec(
        *("wrk", "-t1", f"-c{work.concurrency}", f"-d{max(1, round(seconds))}s", "--timeout", f"{_LATE_SECONDS}s"),
        *("-s", str(HERE / "load.lua"), url),
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        said, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    return read(said.decode(), _children_seconds() - before)


def read(said: str, generator_seconds: float = 0.0) -> LoadResult:
    """Returns the result from wrk's output. ``generator_seconds`` is the CPU time wrk took.

    Raises:
        NoLoad: it has no result.
    """
    lines = [line for line in said.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise NoLoad(f"wrk printed no result:\n{said[-2000:]}")
    result = json.loads(lines[-1].removeprefix("RESULT "))
    failed = result["refused"] + result["broken"] + result["late"]
    return LoadResult(
        result["requests"],
        result["seconds"],
        result["bytes"],
        failed,
        result["p50_us"],
        result["p99_us"],
        generator_seconds,
    )


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


async def response_bytes(url: str, work: Work) -> int:
    """Returns the size of one response with its headers and its framing."""
    address = urlsplit(url)
    body = json.dumps(_body(work)).encode()
    path = "/v1/chat/completions" if work.kind == "chat" else "/v1/completions"
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        writer.write(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        return len(await reader.read(-1))
    finally:
        writer.close()


def _body(work: Work) -> dict[str, Any]:
    tokens = list(range(300, 300 + work.prefix + work.suffix))
    text = " ".join(f"w{token}" for token in tokens)
    fields: dict[str, Any] = {"model": MODEL, "max_tokens": work.output, "stream": work.output > 1}
    fields |= {"temperature": 0, "ignore_eos": True}
    if work.kind == "chat":
        return fields | {"messages": [{"role": "user", "content": text}]}
    return fields | {"prompt": text if work.kind == "text" else tokens}
