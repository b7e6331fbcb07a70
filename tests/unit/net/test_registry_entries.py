"""What an entry of the registry must say before anybody relies on it."""

from __future__ import annotations

from typing import Any

import pytest
from kvrouter.net.decoding import Undecodable
from kvrouter.net.etcd.registry_entries import read_descriptor, read_service, read_worker
from kvrouter.v1.common_pb2 import Component
from kvrouter.v1.names import ComponentName, InvalidName
from kvrouter.v1.registry_pb2 import ComponentDescriptor, RankRegistration, ServiceRegistration, WorkerRegistration

POOL = ComponentName("ns", "pool")
OTHER = Component(namespace="ns", name="other")


def ascii_beginning(name: str) -> str:
    return ascii(name[:8])


def test_a_descriptor_without_its_component_gets_it() -> None:
    read = read_descriptor(POOL, ComponentDescriptor(model="m", block_size=16).SerializeToString())
    assert read.component == Component(namespace="ns", name="pool")


@pytest.mark.parametrize(
    "change", [{"model": ""}, {"block_size": 0}, {"component": OTHER}, {"role": 9}, {"default_transport": 9}]
)
def test_a_descriptor_that_nothing_can_be_served_by_is_refused(change: dict[str, Any]) -> None:
    descriptor = ComponentDescriptor(**({"model": "m", "block_size": 16} | change))
    with pytest.raises(Undecodable, match=r"expected|component"):
        read_descriptor(POOL, descriptor.SerializeToString())


@pytest.mark.parametrize(
    "change",
    [
        {"worker_id": 2},
        {"component": OTHER},
        {"endpoint": "nowhere"},
        {"endpoint": "a b:1"},
        {"endpoint": "\0:1"},
        {"role": 9},
        {"transport": 9},
        {"ranks": [RankRegistration(), RankRegistration()]},
        {"ranks": [RankRegistration(total_blocks=1 << 63)]},
        {"ranks": [RankRegistration(total_blocks=0)]},
        {"max_batched_tokens": 0},
        {"max_sequences": 0},
        {"heartbeat_ms": 0},
        {"vocabulary_size": 0},
    ],
)
def test_a_worker_that_cannot_be_routed_to_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(Undecodable):
        read_worker(POOL, 1, WorkerRegistration(**({"worker_id": 1} | change)).SerializeToString())


HOSTILE = ["a\x1b[31m", "a\nb", "a\0", "\u202egnp", "a\u200bb", "\u2028", "m" * 1_000_000]


@pytest.mark.parametrize("name", HOSTILE, ids=ascii_beginning)
def test_names_that_a_terminal_would_obey_and_endless_ones_are_refused(name: str) -> None:
    with pytest.raises(Undecodable, match="model: expected") as refused:
        read_descriptor(POOL, ComponentDescriptor(model=name, block_size=16).SerializeToString())
    assert str(refused.value).isprintable()
    fields: list[dict[str, Any]] = [{"model": name}, {"lora_names": [name]}, {"labels": {name: ""}}]
    for field in [*fields, {"labels": {"zone": name}}]:
        with pytest.raises(Undecodable) as refused:
            read_worker(POOL, 1, WorkerRegistration(worker_id=1, **field).SerializeToString())
        assert str(refused.value).isprintable()
        assert len(str(refused.value)) < 1_100


@pytest.mark.parametrize("name", ["org/Modèle 模型-7B", "q\"uo'te", "back\\slash", "<b>{}", "x" * 1024])
def test_every_printable_name_is_served(name: str) -> None:
    worker = WorkerRegistration(worker_id=1, model=name, lora_names=[name], labels={name: name})
    assert read_worker(POOL, 1, worker.SerializeToString()) == worker


@pytest.mark.parametrize("name", HOSTILE, ids=ascii_beginning)
def test_a_refused_component_or_replica_is_described_briefly_and_printably(name: str) -> None:
    descriptor = ComponentDescriptor(model="m", block_size=16, component=Component(namespace="ns", name=name))
    with pytest.raises(Undecodable) as refused:
        read_descriptor(POOL, descriptor.SerializeToString())
    assert str(refused.value).isprintable()
    with pytest.raises(Undecodable) as other:
        read_service("one", ServiceRegistration(instance_id=name).SerializeToString())
    with pytest.raises(InvalidName) as invalid:
        ComponentName("ns", name)
    for error in (refused.value, other.value, invalid.value):
        assert str(error).isprintable()
        assert len(str(error)) < 1_100


@pytest.mark.parametrize("endpoint", ["", "h:1", "10.0.0.1:65535", "[::1]:80", "a.b-c:7001"])
def test_an_address_is_host_and_port(endpoint: str) -> None:
    worker = WorkerRegistration(worker_id=1, endpoint=endpoint)
    assert read_worker(POOL, 1, worker.SerializeToString()) == worker


@pytest.mark.parametrize("change", [{"instance_id": "two"}, {"endpoint": ""}, {"http_endpoint": "x"}])
def test_a_service_that_cannot_be_called_is_refused(change: dict[str, Any]) -> None:
    service = ServiceRegistration(**({"instance_id": "one", "endpoint": "h:1", "ready": True} | change))
    with pytest.raises(Undecodable):
        read_service("one", service.SerializeToString())


def test_a_server_without_a_worker_service_has_its_url_as_its_address() -> None:
    url = "http://h:1"
    worker = WorkerRegistration(worker_id=1, endpoint=url, openai_endpoint=url)
    assert read_worker(POOL, 1, worker.SerializeToString()).endpoint == url
    with pytest.raises(Undecodable, match="expected host:port"):
        read_worker(POOL, 1, WorkerRegistration(worker_id=1, endpoint=url).SerializeToString())
