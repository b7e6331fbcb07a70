"""The conformance kit passes a worker that conforms, and finds and explains each defect of one that does not."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from kvrouter.devtools.conformance.options import CheckOptions
from kvrouter.devtools.conformance.results import CheckResult
from kvrouter.devtools.conformance.suite import run_checks
from kvrouter.devtools.system.ports import free_port
from kvrouter.publisher.worker import running
from kvrouter.v1.common_pb2 import Transport
from kvrouter.v1.names import ComponentName

from ...publisher.worker_harness import EchoEngine, config
from .faulty_worker import BLOCK, MAX_MODEL_LEN, Fault, FaultyEngine, serving

WITHOUT_SERVERS = {"registration", "events over NATS", "loads over NATS", "restart"}
"""Checks that need etcd, NATS or a command."""
WITH_WAITS = {"published blocks", "cache salt", "abort", "disconnect"}
"""Checks that wait for an effect, which stays away."""


async def checked(options: CheckOptions) -> dict[str, CheckResult]:
    return {result.name: result async for result in run_checks(options)}


async def of_worker(fault: Fault, **options: float) -> dict[str, CheckResult]:
    async with serving(fault) as endpoint:
        return await checked(
            CheckOptions(endpoint, max_model_len=MAX_MODEL_LEN, seconds=options.get("seconds", 10), component=None)
        )


async def test_a_worker_alone_passes_what_can_be_checked_of_it() -> None:
    results = await of_worker("none")
    assert {name for name, result in results.items() if result.outcome == "skipped"} == WITHOUT_SERVERS
    assert not [result for result in results.values() if result.outcome == "failed"]
    assert results["cached tokens"].received.startswith(f"{4 * BLOCK} tokens for 4 published blocks")
    assert results["abort"].received == "ended, and its load is gone"


@pytest.mark.parametrize(
    ("fault", "check", "received", "advice"),
    [
        ("no block size", "reachable", "block_size 0", "fill them in"),
        ("no events", "published blocks", "no new blocks", "rank.stored()"),
        ("other block size", "published blocks", f"blocks of {BLOCK // 2} tokens", f"set block_size to {BLOCK // 2}"),
        ("other tokens", "published blocks", "4 new blocks, of which 0", "unchanged"),
        ("shifted tokens", "published blocks", "begin with its second token", "from the first one"),
        ("other parent", "published blocks", "at other positions", "set parent"),
        ("first block only", "published blocks", "of which 1 are of the prompt", "missing ones are 1, 2, 3"),
        ("other scope", "published blocks", "of which 0", "scope"),
        ("no hits", "cached tokens", "0", "does not have what it published"),
        ("hits of everything", "shared prefix", str(4 * BLOCK), "more than it published"),
        ("salt ignored", "cache salt", str(4 * BLOCK), "request.scope"),
        ("salt unreported", "cache salt", "0", "scope of the request"),
        ("abort ignored", "abort", "1 running requests and 4 active blocks", "abort()"),
        ("abort ignored", "disconnect", "2 running requests", "disconnects"),
        ("answers everything", "long prompt", "success with 1 tokens", "RequestRefused"),
        ("answers everything", "unknown adapter", "success with 1 tokens", "RequestRefused"),
        ("fails on bad requests", "long prompt", "INTERNAL", "count against the worker"),
        ("never finishes", "completion", "FINISH_REASON_ERROR", "finish_reason"),
        ("too many tokens", "completion", "2 tokens", "max_tokens"),
        ("call stream missing", "call stream", "call stream to 127.0.0.1", "announce none"),
        ("no load", "load", "[]", "LoadReport for each rank"),
    ],
)
async def test_a_defect_is_found_and_explained(fault: Fault, check: str, received: str, advice: str) -> None:
    results = await of_worker(fault, seconds=4 if check in WITH_WAITS else 10)
    found = results[check]
    assert found.outcome == "failed"
    assert received in found.received
    assert advice in found.advice
    assert found.expected


async def test_call_streams_are_optional() -> None:
    assert (await of_worker("no call stream"))["call stream"].outcome == "skipped"


async def test_cached_tokens_are_optional() -> None:
    results = await of_worker("no cached tokens")
    assert results["cached tokens"].outcome == results["shared prefix"].outcome == "skipped"
    assert not [result for result in results.values() if result.outcome == "failed"]


async def test_a_worker_that_does_not_answer_ends_the_checks() -> None:
    results = await checked(CheckOptions(f"127.0.0.1:{free_port()}", seconds=1))
    assert set(results) == {"reachable"}
    assert results["reachable"].outcome == "failed"
    assert "UNAVAILABLE" in results["reachable"].received


async def test_a_worker_that_publishes_only_is_not_sent_requests(
    namespace: str, etcd_endpoint: str, nats_url: str
) -> None:
    settings = config(namespace, etcd_endpoint, nats_url)
    async with running(settings) as worker:
        await worker.registered()
        results = await checked(CheckOptions(worker.endpoint, component=settings.component, etcd=etcd_endpoint))
    assert results["registration"].outcome == "passed"
    assert not [result for result in results.values() if result.outcome == "failed"]
    assert "serves no requests" in results["completion"].received


async def test_a_registration_elsewhere_is_explained(namespace: str, etcd_endpoint: str, nats_url: str) -> None:
    settings = config(namespace, etcd_endpoint, nats_url)
    async with running(settings, EchoEngine()) as worker:
        await worker.registered()
        elsewhere = CheckOptions(
            worker.endpoint, component=ComponentName(namespace, "other"), etcd=etcd_endpoint, seconds=2
        )
        assert "none" in (await checked(elsewhere))["registration"].received
        other_rank = CheckOptions(worker.endpoint, 3, settings.component, etcd_endpoint, seconds=2)
        assert "[0]" in (await checked(other_rank))["registration"].received


class Mocker:
    """A mocker in a process of its own, which is started again whenever it ends."""

    def __init__(self, *arguments: str) -> None:
        self.endpoint = f"127.0.0.1:{free_port()}"
        self.pid = 0
        self._arguments = (*arguments, "--bind", self.endpoint, "--http-bind", "127.0.0.1:0")

    @asynccontextmanager
    async def keeping_up(self) -> AsyncIterator[None]:
        process = await self._start()
        kept = asyncio.create_task(self._keep(process))
        try:
            yield
        finally:
            kept.cancel()
            os.kill(self.pid, signal.SIGKILL)

    async def _keep(self, process: asyncio.subprocess.Process) -> None:
        while True:
            await process.wait()
            process = await self._start()

    async def _start(self) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvrouter.mocker", *self._arguments), stdout=asyncio.subprocess.DEVNULL
        )
        self.pid = process.pid
        return process


async def test_events_over_core_nats_are_checked(namespace: str, etcd_endpoint: str, nats_url: str) -> None:
    settings = config(
        *(namespace, etcd_endpoint, nats_url),
        block_size=BLOCK,
        transport=Transport.TRANSPORT_CORE_NATS,
        max_model_len=MAX_MODEL_LEN,
        load_report_seconds=0.05,
    )
    engine = FaultyEngine("none")
    async with running(settings, engine) as worker:
        engine.server, engine.rank = worker, worker.rank()
        await worker.registered()
        results = await checked(
            CheckOptions(worker.endpoint, component=settings.component, etcd=etcd_endpoint, nats=nats_url)
        )
    assert {name for name, result in results.items() if result.outcome != "passed"} == {"restart"}
    assert results["events over NATS"].received == "10 events"


async def test_the_mocker_passes_every_check(namespace: str, etcd_endpoint: str, nats_url: str) -> None:
    names = ("--namespace", namespace, "--etcd", etcd_endpoint, "--nats", nats_url)
    mocker = Mocker(*names, "--worker-id", "7", "--clock-factor", "10", "--drain-seconds", "0.1")
    async with mocker.keeping_up():
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvrouter.devtools.conformance", "--worker", mocker.endpoint, "--json"),
            *("--component", f"{namespace}/workers", "--etcd", etcd_endpoint, "--nats", nats_url),
            *("--any-adapter", "--restart-command", f"kill {mocker.pid}"),
            stdout=asyncio.subprocess.PIPE,
        )
        said, _ = await process.communicate()
    found = json.loads(said)
    assert [each for each in found["checks"] if each["outcome"] != "passed"] == [
        {
            "name": "unknown adapter",
            "outcome": "skipped",
            "received": "--any-adapter: the engine serves adapters of any name",
            "expected": "",
            "advice": "",
        }
    ]
    assert found["passed"]
    assert process.returncode == 0


async def test_a_failed_check_is_printed_and_fails_the_command() -> None:
    async with serving("no hits") as endpoint:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvrouter.devtools.conformance", "--worker", endpoint, "--seconds", "3"),
            *("--restart-command", "true"),
            stdout=asyncio.subprocess.PIPE,
        )
        said = (await process.communicate())[0].decode()
    assert process.returncode == 1
    assert "failed    cached tokens     expected cached_tokens of 32" in said
    assert "to do: the engine does not have what it published" in said
    assert "failed    restart           expected an incarnation other than 5" in said
    assert said.splitlines()[-1] == "13 passed, 3 failed, 4 skipped"
