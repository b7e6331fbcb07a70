"""`kvrouter up` as its user sees it: a system that answers, and nothing left of it afterwards."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from google.protobuf.json_format import MessageToDict
from kvrouter.v1.common_pb2 import TokenIds
from kvrouter.v1.frontend_pb2 import FrontendServiceGenerateRequest
from kvrouter.v1.frontend_pb2_grpc import FrontendServiceStub

from ...waiting import until

ROOT = Path(__file__).parents[3]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


class RunningUp:
    """A `kvrouter up`, and what it says."""

    def __init__(self, process: asyncio.subprocess.Process, output: asyncio.StreamReader) -> None:
        self.process = process
        self.said = ""
        self._output = output

    def children(self) -> list[int]:
        """Every process that it started."""
        return [
            int(pid) for pid in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        ]

    async def until_said(self, words: str) -> None:
        """Reads on until a line has these words."""
        async with asyncio.timeout(90):
            while words not in (line := (await self._output.readline()).decode()):
                assert line, f"it ended:\n{self.said}"
                self.said += line

    async def rest(self) -> str:
        """What it says until it ends."""
        rest = (await self._output.read()).decode()
        await self.process.wait()
        return rest


@asynccontextmanager
async def starting(directory: Path, clock: float = 10) -> AsyncIterator[RunningUp]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvrouter.cli.main", "up", "--workers", "2", "--clock", str(clock)),
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=dict(os.environ) | {"COLUMNS": "200", "TMPDIR": str(directory), "XDG_RUNTIME_DIR": str(directory)},
    )
    assert process.stdout is not None
    try:
        yield RunningUp(process, process.stdout)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@asynccontextmanager
async def up(directory: Path) -> AsyncIterator[RunningUp]:
    async with starting(directory) as system:
        await system.until_said("Ctrl-C stops everything")
        yield system


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


async def run(command: list[str]) -> str:
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    return output.decode()


def pasted(said: str) -> str:
    """Returns the request that `kvrouter up` prints."""
    found = re.search(r"^ +(curl (?:.*\n)+?)\n", said, re.MULTILINE)
    assert found is not None
    return found.group(1).strip()


def body_of(response: str) -> Any:
    """Returns the JSON body of the last response that `curl -i` printed."""
    return json.loads(response[response.rindex("\n{") :])


def has_whole_output(answer: Any) -> bool:
    """Returns whether the output has its 8 tokens, or ended before at a length that the engine drew."""
    tokens, reason = answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]
    return (tokens, reason) == (8, "length") or (0 < tokens <= 8 and reason == "stop")


async def test_the_line_to_paste_works_and_ctrl_c_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with up(tmp_path) as system:
        paste = pasted(system.said)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
        cached = 0
        async with asyncio.timeout(60):
            while cached <= 500:  # The Indexer learns of the blocks shortly after the worker stored them.
                answer = body_of(await run(["sh", "-c", paste]))
                assert "usage" in answer, answer
                assert has_whole_output(answer)
                assert answer["usage"]["prompt_tokens"] > 500
                cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        report = await run(
            [
                *(sys.executable, "-m", "kvrouter.cli.main", "replay"),
                *("--requests", "5", "--clock", "3", "--mode", "round-robin"),
            ]
        )
        assert re.search(r"requests completed\s+5\b", report)
        look = re.search(r"^ +(\S*kvrouter top)$", system.said, re.MULTILINE)
        assert look is not None
        idle, frame = re.compile(r"^1:0 .* 0 / 16,384 +0 +0 +[\d,]+ .* ok *$", re.MULTILINE), ""
        async with asyncio.timeout(60):
            while not idle.search(frame):  # The Scheduler frees a request shortly after its answer.
                frame = await run([*shlex.split(look.group(1)), "--once"])
        assert "kvrouter/workers  model mock-model, mode forecast" in frame
        assert "round-robin: next in turn" in frame
        assert re.search(r" ready-check +\d:0 ", frame), "its own request has a name"
        command = (sys.executable, "-m", "kvrouter.cli.main")
        why = re.search(r"^ +(\S*kvrouter explain)$", system.said, re.MULTILINE)
        assert why is not None
        assert "by mode forecast: lowest cost" in await run([*shlex.split(why.group(1)), answer["id"]])
        assert "by mode round-robin" in await run(shlex.split(why.group(1)))
        assert "kvrouter/workers: ready" in await run([*command, "index", "status"])
        assert names_of(await generated(system.said)) == names_of(printed_in_the_guide())
        children = system.children()
        assert len(children) == 7  # nats-server, etcd, indexer, scheduler, frontend, two workers
        system.process.send_signal(signal.SIGINT)
        assert "nothing is left running" in await system.rest()
        assert system.process.returncode == 0
        assert all(gone(child) for child in children)
    left = os.listdir(tmp_path)
    assert sorted(left) == ["kvrouter", "up-logs"]  # not the data of the servers


async def generated(said: str) -> dict[str, Any]:
    """Sends the gRPC request of the guide; returns the first response."""
    request = FrontendServiceGenerateRequest(model="mock-model", token_ids=TokenIds(ids=range(1, 9)))
    request.stop_conditions.max_tokens = 2
    address = re.search(r"^Frontend, gRPC +(\S+)", said, re.MULTILINE)
    assert address is not None
    async with grpc.aio.insecure_channel(address[1]) as channel:
        first = await anext(aiter(FrontendServiceStub(channel).Generate(request, timeout=30)))
    return MessageToDict(first)


def printed_in_the_guide() -> dict[str, Any]:
    page = (ROOT / "docs/guides/grpc-client.md").read_text(encoding="utf-8")
    after = page.partition("The first one has the routing:\n\n```\n")[2]
    printed: dict[str, Any] = json.loads(after.partition("```")[0])
    return printed


def names_of(message: object) -> object:
    """Names of the fields that are set, of messages within too."""
    return {name: names_of(value) for name, value in message.items()} if isinstance(message, dict) else None


@pytest.mark.full
async def test_a_killed_owner_leaves_nothing_running(tmp_path: Path) -> None:
    async with up(tmp_path) as system:
        children = system.children()
        system.process.kill()
        await system.process.wait()
        await until(lambda: all(gone(child) for child in children))


@pytest.mark.full
async def test_parts_that_die_are_named_and_started_again(tmp_path: Path) -> None:
    async with up(tmp_path) as system:
        paste = pasted(system.said)
        for name, service in (("frontend", b"kvrouter.frontend"), ("nats-server", b"nats-server")):
            victim = next(child for child in system.children() if service in command_line(child))
            os.kill(victim, signal.SIGKILL)
            await system.until_said(f"{name} ")
            await until(lambda service=service: any(service in command_line(child) for child in system.children()))
        answer = body_of(await run(["sh", "-c", f"{paste} --retry 30 --retry-all-errors --fail"]))
        assert has_whole_output(answer)
        children = system.children()
        system.process.send_signal(signal.SIGINT)
        assert "nothing is left running" in await system.rest()
        assert all(gone(child) for child in children)


async def test_a_process_that_does_not_start_ends_it_with_the_end_of_its_log(tmp_path: Path) -> None:
    # Engines too slow for the request of its check: it is not ready before the Frontend ends.
    async with starting(tmp_path, clock=1e-6) as system:
        await system.until_said("waiting until every part is ready")
        children = system.children()
        frontend = next(child for child in children if b"kvrouter.frontend" in command_line(child))
        os.kill(frontend, signal.SIGKILL)
        said = await system.rest()
        assert system.process.returncode == 1
        assert "kvrouter: frontend was ended by SIGKILL; the end of up-logs/frontend.log:" in said
        assert all(gone(child) for child in children)
