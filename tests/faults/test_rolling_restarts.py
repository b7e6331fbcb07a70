"""Every process of a system is restarted in turn while requests run, as an upgrade does. No request fails."""

from __future__ import annotations

import asyncio
import itertools
import signal

import pytest
from kvrouter.v1.errors import DependencyAway, Draining, KvRouterError

from .processes import PATIENCE_SECONDS, Processes, start_workers, streamed

REPLICAS = 2
AT_ONCE = 16
TOKENS = 40


class LoadBalancer:
    """Sends requests to Frontends in turn, as a load balancer does: around those that are away or refuse to begin."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._turns = itertools.count()
        self.completed = 0
        self.failures: list[str] = []
        self.panics = 0
        """Requests that found no Frontend ready. As with Envoy, any other one then gets them."""

    def _frontends(self) -> list[str]:
        registered = self._processes.directory.services("frontend")
        known = [name for name in sorted(registered) if self._processes.knows(name)]
        names = [name for name in known if registered[name].ready]
        if known and not names:
            self.panics += 1
            names = known
        turn = next(self._turns) % len(names) if names else 0
        return [*names[turn:], *names[:turn]]

    async def run(self, stopped: asyncio.Event) -> None:
        """Runs one request after the other until stopped, or until one fails."""
        while not (stopped.is_set() or self.failures):
            await self._request(next(self._turns) % 64)

    async def _request(self, prompt: int) -> None:
        refusal: KvRouterError | None = None
        for name in self._frontends():
            try:
                tokens = await streamed(self._processes.frontend(name), prompt, TOKENS)
            except Draining as error:
                refusal = error
                continue
            except DependencyAway as error:
                # The watch of the registrations may lag behind a process that has ended: nothing was sent to it.
                if "failed to connect" not in str(error):
                    self.failures.append(f"{name}: {error!r}")
                    return
                refusal = error
                continue
            except KvRouterError as error:
                self.failures.append(f"{name}: {error!r}")
                return
            self.completed += 1
            if tokens != TOKENS:
                self.failures.append(f"{name}: {tokens} of {TOKENS} tokens")
            return
        self.failures.append(f"no Frontend took it: {refusal!r}")

    async def until_completed(self, more: int) -> None:
        """Returns when so many further requests have completed."""
        aim = self.completed + more
        async with asyncio.timeout(PATIENCE_SECONDS):
            while self.completed < aim and not self.failures:
                await asyncio.sleep(0.05)
        assert not self.failures, self.failures[:5]


async def restart(processes: Processes, kind: str, name: str, *options: str) -> None:
    """Stops a process in order and starts it again, with a new id as a new pod has."""
    process = processes.running[name]
    processes.signal(name, signal.SIGTERM)
    async with asyncio.timeout(PATIENCE_SECONDS):
        assert await process.wait() == 0, f"{name} ended with status {process.returncode}"
    successor = f"{name}-again"
    await processes.start(kind, successor, *options)
    if kind != "mocker":
        await processes.ready(kind, successor)


async def restart_worker(processes: Processes, number: int) -> None:
    """Restarts a worker. Returns when it is registered again, as a rolling update waits: the other one stops next."""
    worker_id = number + 1
    earlier = processes.registered_at(worker_id)
    worker = ("--worker-id", str(worker_id), "--max-sequences", "512", "--load-report-seconds", "0")
    await restart(processes, "mocker", f"mocker-{number}", *worker)
    await processes.until_registered(worker_id, after=earlier)


@pytest.mark.full
@pytest.mark.timeout(600)
async def test_a_rolling_restart_of_everything_loses_no_request(processes: Processes) -> None:
    options: dict[str, tuple[str, ...]] = {
        "indexer": (),
        "scheduler": ("--replica-sync",),
        "frontend": ("--port", "0"),
    }
    for kind, flags in options.items():
        for number in range(REPLICAS):
            await processes.start(kind, f"{kind}-{number}", *flags)
    await start_workers(processes, 1.0)
    for kind in options:
        for number in range(REPLICAS):
            await processes.ready(kind, f"{kind}-{number}")

    balancer, stopped = LoadBalancer(processes), asyncio.Event()
    async with asyncio.TaskGroup() as clients:
        for _ in range(AT_ONCE):
            clients.create_task(balancer.run(stopped))
        try:
            await balancer.until_completed(50)
            for kind, flags in options.items():
                for number in range(REPLICAS):
                    await restart(processes, kind, f"{kind}-{number}", *flags)
                    await balancer.until_completed(50)
            for number in range(2):
                await restart_worker(processes, number)
                await balancer.until_completed(50)
        finally:
            stopped.set()
    assert not balancer.failures
    assert not balancer.panics
    for number in range(REPLICAS):
        await processes.until_booked(f"scheduler-{number}-again", 0)
