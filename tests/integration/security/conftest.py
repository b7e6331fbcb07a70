"""A NATS and an etcd that require TLS and know the accounts of one namespace, shared by the tests of a process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from kvrouter.devtools.system.accounts import Namespace
from kvrouter.devtools.system.credentials import Credentials
from kvrouter.devtools.system.servers import EtcdServer, NatsServer

from ...faults import newer_etcd


@pytest.fixture(scope="session")
def credentials(tmp_path_factory: pytest.TempPathFactory) -> Credentials:
    folder = tmp_path_factory.mktemp("secure") / "certs"
    return Credentials(folder, Namespace("secure", ("pool",)), [("pool", 1), ("pool", 2)])


@pytest.fixture(scope="session")
def secure_nats(credentials: Credentials, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path_factory.mktemp("secure-nats"), credentials=credentials)
    asyncio.run(server.start())
    yield server
    asyncio.run(server.kill())


@pytest.fixture(scope="session")
def secure_etcd(credentials: Credentials, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    folder = tmp_path_factory.mktemp("secure-etcd")
    server = EtcdServer(folder, binary=newer_etcd.find(), credentials=credentials)
    asyncio.run(server.start())
    yield server
    asyncio.run(server.kill())
