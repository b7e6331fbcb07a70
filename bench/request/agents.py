"""CPU of a router for a request of Messages or Responses, against the same conversation as a chat.

    python bench/request/agents.py [--rounds 25] [--requests 48] [--only passed,translated,tokens]

Three routers without brokers, each with two engines: one whose engines serve all APIs ("passed"), one whose
engines have chats only ("translated"), and one whose workers receive tokens ("tokens"). A router with a file of models
is beside each, for chats. Rounds are short, and the rows of a round follow each other, so that other work on the
machine affects them alike; what counts is the ratio of a round, of which the median is printed.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import sys
import tempfile
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from agent_bodies import MARK, PATHS, bodies
from kvrouter.devtools.system.ports import free_port
from kvrouter.devtools.system.processes import Command, ManagedProcess
from kvrouter.devtools.system.small_tokenizer import VOCABULARY_SIZE, write_small_tokenizer
from kvrouter.devtools.system.stack import service_environment
from usage import cpu_ns

HERE = Path(__file__).parent
MODEL = "m"
BASE, WITH_NAMES = "chat", "chat, models file"
TOKENS = "tokens"
WORKERS = {
    "passed": 'engine = "vllm", endpoint = "http://127.0.0.1:{}"',
    "translated": 'endpoint = "http://127.0.0.1:{}"',
    TOKENS: 'endpoint = "127.0.0.1:{}"',
}
KINDS = {"1 token": (1, False), "64 tokens, streamed": (64, True)}
_AT_ONCE = 8
_numbers = itertools.count(10**9)


@dataclass(frozen=True, slots=True)
class Router:
    """A running router."""

    pid: int
    url: str


class Fleet:
    """Starts processes, which end with the stack."""

    def __init__(self, directory: Path, stack: AsyncExitStack) -> None:
        self.directory = directory
        self._stack = stack
        write_small_tokenizer(directory)

    async def routers(self, kind: str) -> tuple[Router, Router]:
        """Starts two engines and two routers of a kind: without and with a file of models."""
        ports = [free_port() for _ in range(2)]
        for number, port in enumerate(ports, 1):
            text = ("--tokenizer", str(self.directory), "--vocabulary-size", str(VOCABULARY_SIZE))
            simulated = ("--worker-id", str(number), "--speed", "1000", "--model", MODEL, "--mean-output-tokens", "0")
            where = ("--no-registration", "--bind", f"127.0.0.1:{port}", "--http-bind", "")
            worker = ("-m", "kvrouter.mocker", *where, *simulated, *text)
            engine = (str(HERE / "mock_engines.py"), MODEL, str(port))
            await self._start(f"{kind}-engine-{number}", worker if kind == TOKENS else engine)
        listed = self.directory / f"{kind}.toml"
        workers = ", ".join(f"{{{WORKERS[kind].format(port)}}}" for port in ports)
        listed.write_text(f'[[components]]\nname = "{kind}"\nmodel = "{MODEL}"\nworkers = [{workers}]\n')
        names = self.directory / "names.toml"
        names.write_text(f'[models.{MODEL}]\nfallbacks = ["other"]\n')
        return (
            await self._router(f"{kind}-router", listed),
            await self._router(f"{kind}-router-names", listed, "--models-file", str(names)),
        )

    async def _router(self, name: str, listed: Path, *options: str) -> Router:
        http = free_port()
        roles = ("serve", "--roles", "scheduler,frontend", "--no-kv-events", "--router-mode", "kv")
        where = ("--static-workers", str(listed), "--bind", f"127.0.0.1:{free_port()}", "--http-bind", "")
        front = ("--port", str(http), "--tokenizers", f"{MODEL}={self.directory}")
        process = await self._start(name, ("-m", "kvrouter.cli.main", *roles, *where, *front, *options))
        return Router(process.pid, f"http://127.0.0.1:{http}")

    async def _start(self, name: str, arguments: tuple[str, ...]) -> ManagedProcess:
        command = Command(name, (sys.executable, *arguments), service_environment(os.environ))
        process = await ManagedProcess.start(command, self.directory)
        self._stack.push_async_callback(process.stop, 5)
        return process


async def answered(router: Router, path: str, body: bytes) -> None:
    """Returns when a router answers a request.

    Raises:
        TimeoutError: it does not within a minute.
    """
    said = "nothing"
    try:
        async with asyncio.timeout(60), aiohttp.ClientSession() as session:
            while True:
                try:
                    async with session.post(f"{router.url}{path}", data=body) as response:
                        said = await response.text()
                        if response.status == 200:
                            return
                except aiohttp.ClientError as error:
                    said = str(error)
                await asyncio.sleep(0.2)
    except TimeoutError:
        raise TimeoutError(f"{path} answers {said}") from None


async def cpu_us(router: Router, path: str, body: bytes, requests: int, session: aiohttp.ClientSession) -> float:
    """Returns the CPU of a request in microseconds, user and system.

    Raises:
        RuntimeError: a request failed.
    """

    async def client() -> None:
        for _ in range(requests // _AT_ONCE):
            numbered = body.replace(MARK.encode(), b"%d" % next(_numbers))
            async with session.post(f"{router.url}{path}", data=numbered) as response:
                said = await response.read()
                if response.status != 200 or b'error":{' in said:
                    raise RuntimeError(f"{path} answers {response.status}: {said[-500:].decode()}")

    before = cpu_ns(router.pid)
    await asyncio.gather(*(client() for _ in range(_AT_ONCE)))
    return (cpu_ns(router.pid) - before) / 1e3 / (requests // _AT_ONCE * _AT_ONCE)


async def main(options: argparse.Namespace) -> None:
    """Measures, and prints a line for each API of each kind of engines."""
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-agents-")))
        fleet = Fleet(directory, stack)
        session = await stack.enter_async_context(aiohttp.ClientSession())
        for kind in options.only.split(","):
            plain, with_names = await fleet.routers(kind)
            for title, (output, stream) in KINDS.items():
                sent = bodies(MODEL, output=output, stream=stream)
                rows = {api: (plain, PATHS[api], sent[api]) for api in PATHS}
                rows[WITH_NAMES] = (with_names, PATHS[BASE], sent[BASE])
                for row in rows.values():
                    await answered(*row)
                    await cpu_us(*row, options.requests, session)
                taken: dict[str, list[float]] = {name: [] for name in rows}
                for _ in range(options.rounds):
                    for name, row in rows.items():
                        taken[name].append(await cpu_us(*row, options.requests, session))
                for name, values in taken.items():
                    ratio = statistics.median(one / two for one, two in zip(values, taken[BASE], strict=True))
                    median = statistics.median(values)
                    print(f"{kind}, {title}, {name}: {median:,.0f} µs, {ratio:.2f} times a chat", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--requests", type=int, default=48, help="requests of each row in a round")
    parser.add_argument("--only", default=",".join(WORKERS), help="kinds of engines, by comma")
    asyncio.run(main(parser.parse_args()))
