"""Gateways get IP addresses, also of engines that are registered by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from kvrouter.frontend.proxy.endpoint_picker import engines
from kvrouter.frontend.proxy.endpoint_picker.engines import EngineAddresses
from kvrouter.runtime.discovery.directory import ComponentView
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import ComponentDescriptor, WorkerRegistration


class Names:
    """A name server."""

    def __init__(self, **addresses: str) -> None:
        self.addresses = addresses
        self.asked: list[str] = []

    async def resolve(self, name: str) -> str:
        self.asked.append(name)
        try:
            return self.addresses[name]
        except KeyError:
            raise OSError("no such name") from None


def engine(url: str) -> WorkerRegistration:
    return WorkerRegistration(openai_endpoint=url)


def directory_of(*urls: str) -> Any:
    name = ComponentName("ns", "pool")
    workers = {number: engine(url) for number, url in enumerate(urls)}
    return SimpleNamespace(components={name: ComponentView(name, ComponentDescriptor(), workers)})


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://10.0.0.1:8000", "10.0.0.1:8000"),
        ("http://10.0.0.1/", "10.0.0.1:80"),
        ("https://10.0.0.1", "10.0.0.1:443"),
        ("http://[fd00::1]:8000", "[fd00::1]:8000"),
        ("http://first:8000", "10.0.0.7:8000"),
        ("http://sixth:8000", "[fd00::7]:8000"),
        ("http://unknown:8000", ""),
        ("", ""),
    ],
)
async def test_an_engine_has_an_ip_address_and_a_port(url: str, address: str) -> None:
    names = Names(first="10.0.0.7", sixth="fd00::7")
    addresses = EngineAddresses(directory_of(url), names.resolve)
    await addresses.resolve_due()
    assert addresses.of(engine(url)) == address


async def test_a_name_keeps_its_last_address_until_its_engine_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names(first="10.0.0.7")
    directory = directory_of("http://first:1")
    addresses = EngineAddresses(directory, names.resolve)
    await addresses.resolve_due()
    await addresses.resolve_due()
    assert names.asked == ["first"]  # It is resolved again after a while only.
    monkeypatch.setattr(engines.time, "monotonic", lambda: 1e12)
    names.addresses["first"] = "10.0.0.8"
    await addresses.resolve_due()
    assert addresses.of(engine("http://first:1")) == "10.0.0.8:1"
    monkeypatch.setattr(engines.time, "monotonic", lambda: 2e12)
    del names.addresses["first"]
    await addresses.resolve_due()
    assert addresses.of(engine("http://first:1")) == "10.0.0.8:1"
    directory.components = directory_of().components
    await addresses.resolve_due()
    assert addresses.of(engine("http://first:1")) == ""


async def test_the_system_resolves_names() -> None:
    addresses = EngineAddresses(directory_of("http://localhost:1"))
    await addresses.resolve_due()
    assert addresses.of(engine("http://localhost:1")) in ("127.0.0.1:1", "[::1]:1")


async def test_the_addresses_of_a_component_follow_its_workers_and_their_names() -> None:
    names = Names(first="10.0.0.7")
    directory = directory_of("http://first:1", "http://unknown:2", "http://10.0.0.9:3")
    addresses = EngineAddresses(directory, names.resolve)

    def of_workers() -> dict[int, str]:
        (view,) = directory.components.values()
        return dict(addresses.of_workers(view))

    assert of_workers() == {2: "10.0.0.9:3"}
    await addresses.resolve_due()
    assert of_workers() == {0: "10.0.0.7:1", 2: "10.0.0.9:3"}
    directory.components = directory_of("http://first:4").components
    assert of_workers() == {0: "10.0.0.7:4"}
    directory.components = {}
    await addresses.resolve_due()
    assert not addresses._of_workers
