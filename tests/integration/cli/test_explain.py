"""``kvrouter explain`` against a Scheduler."""

from __future__ import annotations

import asyncio
import re
import sys
from unittest.mock import ANY

import pytest
from kvrouter.scheduler.queue import request_queue
from kvrouter.v1.common_pb2 import BookingKey, RoutingConstraints
from kvrouter.v1.names import ComponentName
from kvrouter.v1.scheduler_pb2 import FreeRequest

from ..scheduler.scheduling import eventually, routing, scheduling, selecting, soon

# A dozen processes start one after another.
pytestmark = pytest.mark.timeout(300)


async def run(*arguments: str) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvrouter.cli.main", "explain", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, errors = await process.communicate()
    return process.returncode, out.decode(), errors.decode()


async def test_a_decision_is_shown_with_every_candidate(etcd_endpoint: str, nats_url: str, namespace: str) -> None:
    component = ComponentName(namespace, "decode")
    async with scheduling(component, etcd_endpoint, nats_url, kv_events=False) as stack:
        await stack.register(1, 2, 3)
        at = f"127.0.0.1:{stack.server.port}"
        _, _, errors = await run("--scheduler", at)
        assert errors.startswith(f"kvrouter: no decision found at {at}")
        without = routing(6, constraints=RoutingConstraints(excluded_worker_ids=[3]))
        answer = await stack.select(selecting("talk~1", without))
        dead = ("--scheduler", "127.0.0.1:1")
        for which, others in (
            ("talk~1", dead),
            (str(answer.decision_id), ()),
            ("chatcmpl-talk-0", ()),
        ):
            status, out, errors = await run(which, *others, "--scheduler", at)
            assert status == 0, errors
            assert f"decision {answer.decision_id}" in out
            assert f"rank {answer.rank.worker_id}:0 by mode kv: lowest cost" in out
            assert f"{answer.rank.worker_id}:0 *" in out
            assert "as good; ties are broken at random" in out
            assert "rank 3:0 left out: " in out
            assert max(len(line) for line in out.splitlines()) <= 80
        last = await stack.select(selecting("walk~1", without))
        status, out, errors = await run(*dead, "--scheduler", at)
        assert (status, f"decision {last.decision_id}" in out) == (0, True), errors
        long_id = await stack.select(selecting("0123456789-a-long-id-of-a-client-9876543210~1", without))
        status, out, errors = await run("0123…876543210", "--scheduler", at)
        assert (status, f"decision {long_id.decision_id}" in out) == (0, True), errors
        _, out, _ = await run("talk", "--all", "--scheduler", at)
        assert "12.0 = 1.0 * 6.0 + 6.0 (cached_blocks: 0)" in out
        assert "left out" in out
        found = ("--etcd", etcd_endpoint, "--namespace", namespace)
        _, out, _ = await eventually(lambda: run("cmpl-talk", *found), lambda shown: shown[0] == 0)
        assert f"decision {answer.decision_id}" in out
        status, out, errors = await run("nobody", "--scheduler", at)
        assert (status, out) == (1, "")
        assert "no decision about nobody" in errors
        assert "x-request-id" not in errors
        _, _, errors = await run("chatcmpl-of-an-engine", "--scheduler", at)
        assert "give the header x-request-id of the response instead" in errors
        assert await run("talk", *dead, "--seconds", "5") == (1, "", ANY)


async def test_why_a_request_waits_is_shown_and_how_long_it_did(
    etcd_endpoint: str, nats_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_queue, "PATIENCE_S", 60.0)  # A busy machine takes seconds for a command.
    component = ComponentName(namespace, "decode")
    async with scheduling(component, etcd_endpoint, nats_url, kv_events=False, router_mode="forecast") as stack:
        await stack.register(1)
        at = f"127.0.0.1:{stack.server.port}"
        await stack.select(selecting("first", routing(600)))
        waiting = asyncio.create_task(stack.select(selecting("second", routing(600, seed=1))))
        _, out, _ = await eventually(lambda: run("second", "--scheduler", at), lambda shown: shown[0] == 0)
        assert "no rank by mode forecast" in out
        assert "queued for worker_1: the cheapest rank lacks KV blocks" in out
        await stack.scheduler.free(FreeRequest(booking=BookingKey(request_id="first")), deadline=soon())
        assert (await waiting).queued_us > 0
        _, out, _ = await run("second", "--scheduler", at)
        assert re.search(r"rank 1:0 by mode forecast.*\nqueued for \d+\.\d\d s before", out)
