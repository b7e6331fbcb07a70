"""Which Scheduler a Frontend takes that has one in its own process."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import cast

import pytest
from kvrouter.frontend.schedulers import scheduler_choice as module
from kvrouter.frontend.schedulers.scheduler_choice import RemoteSchedulers, rendezvous
from kvrouter.runtime.contracts import Scheduler
from kvrouter.runtime.discovery.directory import Directory
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import ServiceRegistration

COMPONENTS = [ComponentName("test", f"workers-{number}") for number in range(20)]
OWN = ("own", cast(Scheduler, object()))


class Registered:
    """What is registered: ids of Schedulers, and whether they are ready."""

    tls = None

    def __init__(self, **ready: bool) -> None:
        self.ready = ready

    def services(self, kind: str) -> dict[str, ServiceRegistration]:
        assert kind == "scheduler"
        return {key: ServiceRegistration(endpoint="127.0.0.1:1", ready=ready) for key, ready in self.ready.items()}


def picked(registered: Registered, component: ComponentName) -> str | None:
    found = RemoteSchedulers(cast(Directory, registered), OWN).pick(component)
    assert found is None or (found[0] == "own") == (found[1].scheduler is OWN[1])
    return None if found is None else found[0]


async def test_its_own_decides_only_when_it_is_its_turn() -> None:
    everybody = Registered(own=True, other=True)
    turns = [picked(everybody, component) for component in COMPONENTS]
    assert turns == [rendezvous(component, ["own", "other"]) for component in COMPONENTS]
    assert set(turns) == {"own", "other"}


async def test_its_own_serves_while_no_other_is_ready() -> None:
    for registered in (Registered(), Registered(own=False), Registered(own=True), Registered(other=False)):
        assert {picked(registered, component) for component in COMPONENTS} == {"own"}
    drained = Registered(own=False, other=True)
    assert {picked(drained, component) for component in COMPONENTS} == {"other"}


class Registrations:
    """A Directory with Schedulers whose registrations the test changes."""

    tls = None

    def __init__(self, endpoint: str) -> None:
        self.registered = {"one": ServiceRegistration(endpoint=endpoint, ready=True)}

    def services(self, _kind: str) -> dict[str, ServiceRegistration]:
        return self.registered


async def test_a_scheduler_that_left_is_dialled_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REGISTRATION_SECONDS", 0.01)
    dialled = 0

    async def hang_up(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal dialled
        dialled += 1
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
        endpoint = "{}:{}".format(*server.sockets[0].getsockname()[:2])
        registrations = Registrations(endpoint)
        async with aclosing(RemoteSchedulers(cast(Directory, registrations))) as schedulers:
            assert schedulers.pick(ComponentName("n", "c")) is not None
            async with asyncio.timeout(30):
                while dialled < 2:
                    await asyncio.sleep(0.01)
            registrations.registered = {}
            async with asyncio.timeout(30):
                while schedulers._tasks:
                    await asyncio.sleep(0.01)
            assert schedulers.pick(ComponentName("n", "c")) is None
            # One that returns is dialled again.
            registrations.registered = {"one": ServiceRegistration(endpoint=endpoint, ready=True)}
            before = dialled
            assert schedulers.pick(ComponentName("n", "c")) is not None
            async with asyncio.timeout(30):
                while dialled == before:
                    await asyncio.sleep(0.01)
