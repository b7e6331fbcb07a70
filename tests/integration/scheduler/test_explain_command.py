"""``kvrouter explain`` against a Scheduler."""

from __future__ import annotations

import asyncio
import sys
from unittest.mock import ANY

from kvrouter.v1.common_pb2 import RoutingConstraints
from kvrouter.v1.names import ComponentName

from .scheduling import routing, scheduling, selecting


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
        without = routing(6, constraints=RoutingConstraints(excluded_worker_ids=[3]))
        answer = await stack.select(selecting("talk~1", without))
        at = f"127.0.0.1:{stack.server.port}"
        dead = ("--scheduler", "127.0.0.1:1")
        for which, others in (("talk", ()), ("talk~1", dead), (str(answer.decision_id), ())):
            status, out, errors = await run(which, *others, "--scheduler", at)
            assert status == 0, errors
            assert f"decision {answer.decision_id}" in out
            assert f"rank {answer.rank.worker_id}:0 by mode kv" in out
            assert f"{answer.rank.worker_id}:0 *" in out
            assert "12.0 = 1.0 * 6.0 + 6.0 (cached_blocks: 0)" in out
            assert "left out" in out
        status, out, errors = await run("nobody", "--scheduler", at)
        assert (status, out) == (1, "")
        assert "no decision on nobody" in errors
        assert await run("talk", *dead, "--seconds", "5") == (1, "", ANY)
