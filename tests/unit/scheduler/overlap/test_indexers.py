"""The Indexers that a Scheduler queries are those that are registered and ready."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvrouter.net.calls import CallStreamCounts
from kvrouter.runtime.discovery.directory import Directory
from kvrouter.scheduler.overlap.indexers import RemoteIndexers
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import ServiceRegistration
from prometheus_client import CollectorRegistry

NAME, OTHER = ComponentName("ns", "a"), ComponentName("ns", "b")


def test_the_ready_indexers_of_a_component_follow_the_registrations() -> None:
    directory = Directory("", "ns", CollectorRegistry())
    indexers = RemoteIndexers(directory, "client", CallStreamCounts())

    def endpoints(name: ComponentName) -> Any:
        found: Any = indexers(name) or SimpleNamespace(_endpoints=[])
        return found._endpoints

    def register(**ready: bool) -> None:
        directory._services = {"indexer": {id_: _registration(id_, ready=is_ready) for id_, is_ready in ready.items()}}

    assert endpoints(NAME) == []
    register(one=True, two=False)
    assert endpoints(NAME) == ["one:1"]
    assert endpoints(OTHER) == []
    assert indexers(NAME) is indexers(NAME)
    register(one=True, two=True)
    assert endpoints(NAME) == ["one:1", "two:1"]
    register()
    assert endpoints(NAME) == []


def _registration(id_: str, *, ready: bool) -> ServiceRegistration:
    registration = ServiceRegistration(endpoint=f"{id_}:1", ready=ready)
    registration.components.add(namespace=NAME.namespace, name=NAME.name)
    return registration
