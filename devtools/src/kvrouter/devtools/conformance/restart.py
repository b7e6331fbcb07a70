"""Checks the new incarnation of a restarted worker."""

from __future__ import annotations

import asyncio

import grpc
from kvrouter.devtools.conformance.cache import CacheProbe, published_blocks
from kvrouter.devtools.conformance.results import CheckFailed, CheckSkipped
from kvrouter.devtools.conformance.worker_under_test import RankSnapshot, WorkerUnderTest
from kvrouter.net.etcd import AWAY, connect
from kvrouter.v1.registry_pb2 import WorkerRegistration


async def check_restart(worker: WorkerUnderTest, probe: CacheProbe) -> str:
    """Restarts the worker, and compares incarnation, events and cache."""
    command = worker.options.restart_command
    if not command:
        raise CheckSkipped("needs --restart-command")
    before = (await worker.snapshot()).cursor.incarnation
    process = await asyncio.create_subprocess_shell(
        command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL
    )
    if status := await process.wait():
        raise CheckFailed(
            expected="--restart-command to succeed", received=f"exit status {status}", advice="correct the command."
        )

    async def restarted() -> RankSnapshot | None:
        await _follow(worker)
        try:
            state = await worker.snapshot()
        except grpc.aio.AioRpcError:
            return None
        return state if state.cursor.incarnation != before else None

    state = await worker.until(restarted)
    if state is None:
        raise CheckFailed(
            expected=f"an incarnation other than {before} at {worker.endpoint} within {worker.options.seconds:g} s",
            received="the same one, or no answer",
            advice="begin a new incarnation whenever the cache is empty: consumers drop the blocks of the former one "
            "only then. If the worker listens at another address now, give --etcd, or set bind.",
        )
    incarnation = state.cursor.incarnation
    if incarnation < before:
        raise CheckFailed(
            expected=f"an incarnation above {before}",
            received=str(incarnation),
            advice="use the greater of the time in nanoseconds and the previous incarnation plus one: consumers drop "
            "events of a lower incarnation.",
        )
    if probe.before is not None:
        published = await published_blocks(worker, probe.prompt)
        cached = (await worker.generate(worker.request(probe.prompt))).cached_tokens
        if cached is not None and abs(cached - published * worker.block_size) >= worker.block_size:
            raise CheckFailed(
                expected=f"cached_tokens of {published * worker.block_size}: {published} blocks of an earlier prompt "
                "are published",
                received=str(cached),
                advice="report what the engine still holds after a restart, or clear its cache.",
            )
    return f"incarnation {incarnation}, formerly {before}"


async def _follow(worker: WorkerUnderTest) -> None:
    """Connects to the worker's last registered address, if it is registered."""
    options = worker.options
    if worker.registration is None or options.component is None:
        return
    try:
        async with connect(options.etcd) as client:
            found = await client.get(options.component.worker_key(worker.worker_id).encode())
    except AWAY:
        return
    if found is not None:
        endpoint = WorkerRegistration.FromString(found.value).endpoint
        if endpoint != worker.endpoint:
            await worker.connect(endpoint)
