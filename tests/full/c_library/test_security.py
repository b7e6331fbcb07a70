"""A worker in C with TLS and with identities in NATS and etcd serves who may call it, and refuses everybody else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kvrouter.devtools.system.certificates import PEER_DOMAIN, CertificatePaths, DevelopmentAuthority, write_file
from kvrouter.devtools.system.credentials import Credentials
from kvrouter.devtools.system.servers import EtcdServer, NatsServer
from kvrouter.net.auth import may_call
from kvrouter.net.nats.client import TolerantClient
from kvrouter.net.nats.event_stream import ensure_stream
from kvrouter.v1 import worker_pb2
from kvrouter.v1.names import ComponentName
from kvrouter.v1.worker_pb2 import GetLoadRequest, GetLoadResponse

from ...faults.rig import Rig
from ...integration.security.conftest import credentials, secure_etcd, secure_nats
from ...integration.security.nats_identities import identity
from .driven import INVALID_ARGUMENT, STOPPED, Answer, DrivenWorker

__all__ = ["credentials", "secure_etcd", "secure_nats"]

POOL = ComponentName("secure", "pool")
NAME = "worker-0000000000000001"
TIMEOUT = 6
STORED = "stored - 1 7 " + " ".join(map(str, range(8)))
"""Command that stores one block."""


def options_of(credentials: Credentials) -> dict[str, object]:
    """Options with which the worker uses its files, as the flags of a service."""
    found = credentials.identities[NAME]
    return {
        "tls_cert_file": found.certificate.cert,
        "tls_key_file": found.certificate.key,
        "tls_ca_file": found.certificate.authority,
        "tls_client_auth": 1,
        "tls_peer_domain": PEER_DOMAIN,
        "nats_nkey_file": found.nkey,
        "nats_inbox_prefix": found.account.inbox_prefix,
        "etcd_user": NAME,
        "etcd_password_file": found.password,
    }


@dataclass
class Secure:
    """Starts workers of the secure pool; their log is in a file."""

    program: Path
    credentials: Credentials
    etcd: EtcdServer
    nats: NatsServer
    log: Path
    exits: AsyncExitStack

    async def start(self, **changed: object) -> tuple[DrivenWorker, Answer]:
        servers = {name: str(changed.pop(name)) for name in ("etcd", "nats") if name in changed}
        given = {"etcd": self.etcd.endpoint, "nats": self.nats.url} | servers
        options = options_of(self.credentials) | changed
        worker = DrivenWorker(
            self.program, 1, etcd=given["etcd"], nats=given["nats"], component=str(POOL), options=options, log=self.log
        )
        self.exits.push_async_callback(worker.kill)
        return worker, await worker.opened()

    async def logged(self, text: str) -> str:
        """Waits for a line of the log that contains a text."""
        async with asyncio.timeout(60):
            while True:
                found = [line for line in self.log.read_text().splitlines() if text in line]
                if found:
                    return found[0]
                await asyncio.sleep(0.05)


@pytest.fixture
async def secure(
    driven_worker: Path, credentials: Credentials, secure_etcd: EtcdServer, secure_nats: NatsServer, tmp_path: Path
) -> AsyncIterator[Secure]:
    async with AsyncExitStack() as exits:
        yield Secure(driven_worker, credentials, secure_etcd, secure_nats, tmp_path / "worker.log", exits)


@dataclass(frozen=True)
class Caller:
    certificate: CertificatePaths | None
    authority: Path

    def channel(self, address: str) -> grpc.aio.Channel:
        key = chain = None
        if self.certificate is not None:
            key, chain = self.certificate.key.read_bytes(), self.certificate.cert.read_bytes()
        used = grpc.ssl_channel_credentials(self.authority.read_bytes(), key, chain)
        name = (("grpc.ssl_target_name_override", f"worker.{PEER_DOMAIN}"), ("grpc.use_local_subchannel_pool", 1))
        return grpc.aio.secure_channel(address, used, options=name)


async def code_of(channel: grpc.aio.Channel) -> grpc.StatusCode:
    async with channel:
        method: Callable[..., Any] = channel.unary_unary(
            "/kvrouter.v1.WorkerService/GetLoad",
            request_serializer=GetLoadRequest.SerializeToString,
            response_deserializer=GetLoadResponse.FromString,
        )
        code: grpc.StatusCode = await method(GetLoadRequest(), timeout=20).code()
        return code


async def test_a_worker_publishes_and_serves_with_its_own_identity_only(secure: Secure, tmp_path: Path) -> None:
    access = secure.credentials.nats_access("indexer", secure.nats.url)
    indexer = TolerantClient(access)
    await indexer.connect(access.servers, **access.options())
    await ensure_stream(indexer.jetstream(timeout=10), POOL)
    worker, opened = await secure.start()
    assert opened.status == 0, opened
    assert worker.obey(*STORED.split()).status == 0
    assert (await worker.awaited("flush")).status == 0
    last = await indexer.jetstream(timeout=10).get_last_msg(POOL.stream, POOL.events_subject(1, 0))
    assert last.data
    await indexer.close()

    address = worker.obey("where").error
    authority = secure.credentials.authority
    own = authority.certificate_path
    stranger = DevelopmentAuthority(tmp_path / "stranger")
    long_ago = datetime.now(UTC) - timedelta(days=400)
    codes = {
        "frontend": await code_of(Caller(authority.paths("frontend"), own).channel(address)),
        "admin": await code_of(Caller(authority.paths("admin"), own).channel(address)),
    }
    assert set(codes.values()) == {grpc.StatusCode.OK}, codes
    assert worker.obey("refused").incarnation == 0
    refused = [
        Caller(None, own),
        Caller(stranger.issue("admin"), own),
        Caller(authority.issue("expired", role="admin", valid_from=long_ago), own),
        Caller(authority.paths("admin"), stranger.certificate_path),
    ]
    for caller in refused:
        assert await code_of(caller.channel(address)) is grpc.StatusCode.UNAVAILABLE, caller
    assert await code_of(grpc.aio.insecure_channel(address)) is grpc.StatusCode.UNAVAILABLE
    another = Caller(authority.paths("worker-0000000000000002"), own)
    assert await code_of(another.channel(address)) is grpc.StatusCode.PERMISSION_DENIED
    async with another.channel(address) as channel:
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)
        assert health.status == health_pb2.HealthCheckResponse.SERVING
    counted = worker.obey("refused")
    assert counted.incarnation >= len(refused) + 1
    assert counted.next_event_id == 1
    assert f"worker.{PEER_DOMAIN}" in await secure.logged("caller.refused")
    assert await secure.logged("tls.connection_refused")


@pytest.mark.parametrize("role", ["frontend", "scheduler", "indexer", "worker-0000000000000002", "admin"])
async def test_a_role_calls_its_own_methods_only(secure: Secure, role: str) -> None:
    worker, opened = await secure.start()
    assert opened.status == 0, opened
    authority = secure.credentials.authority
    caller = Caller(authority.paths(role), authority.certificate_path)
    async with caller.channel(worker.obey("where").error) as channel:
        for method in worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].methods:
            path = f"kvrouter.v1.WorkerService/{method.name}"
            code = await channel.unary_unary(f"/{path}")(b"").code()
            assert (code is not grpc.StatusCode.PERMISSION_DENIED) == may_call({role.partition("-")[0]}, path), path


async def test_renewed_certificates_are_used_and_broken_ones_are_not(secure: Secure, tmp_path: Path) -> None:
    authority = DevelopmentAuthority(tmp_path / "renewing")
    paths = authority.issue("worker")
    caller = Caller(authority.issue("admin"), authority.certificate_path)
    files = {"tls_cert_file": paths.cert, "tls_key_file": paths.key, "tls_ca_file": paths.authority}
    async with AsyncExitStack() as exits:
        nats, etcd = NatsServer(tmp_path / "nats"), EtcdServer(tmp_path / "etcd")
        for server in (nats, etcd):
            exits.push_async_callback(server.kill)
            await server.start()
        plain = dict.fromkeys(("nats_nkey_file", "nats_inbox_prefix", "etcd_user", "etcd_password_file"), "")
        worker, opened = await secure.start(**files, **plain, etcd=etcd.endpoint, nats=nats.url)
        assert opened.status == 0, opened
        address = worker.obey("where").error
        assert await code_of(caller.channel(address)) is grpc.StatusCode.OK
        good = paths.cert.read_bytes()
        write_file(paths.cert, good[: len(good) // 2], 0o644)
        async with asyncio.timeout(60):
            while "tls.reload_refused" not in secure.log.read_text():
                assert await code_of(caller.channel(address)) is grpc.StatusCode.OK
        write_file(paths.cert, good, 0o644)
        authority.issue("worker", ("127.0.0.1",))
        async with asyncio.timeout(60):
            while "tls.reloaded" not in secure.log.read_text():
                assert await code_of(caller.channel(address)) is grpc.StatusCode.OK
        assert await code_of(caller.channel(address)) is grpc.StatusCode.OK
        await worker.kill()


@pytest.mark.parametrize("kind", ["password", "token", "nkey", "credentials"])
async def test_a_secret_that_nats_refuses_is_reported_and_a_corrected_file_suffices(
    kind: str, rig: Rig, driven_worker: Path, tmp_path: Path
) -> None:
    known = identity(kind, tmp_path / "secrets")
    right = known.secret.read_bytes()
    write_file(known.secret, known.wrong, 0o600)
    log = tmp_path / "worker.log"
    options = {f"nats_{name}": value for name, value in known.options.items()}
    async with AsyncExitStack() as exits:
        server = NatsServer(tmp_path / "own-nats", settings=known.settings)
        exits.push_async_callback(server.kill)
        await server.start()
        worker = DrivenWorker(driven_worker, 1, etcd=rig.etcd.endpoint, nats=server.url, options=options, log=log)
        exits.push_async_callback(worker.kill)
        assert (await worker.opened()).status == 0
        assert worker.obey(*STORED.split()).status == 0
        async with asyncio.timeout(60):
            while "nats.unreachable" not in log.read_text():
                await asyncio.sleep(0.05)
        assert "authorization violation" in log.read_text().lower()
        write_file(known.secret, right, 0o600)
        assert (await worker.awaited("flush")).status == 0
        written = log.read_text()
        assert not [part for part in (right + known.wrong).decode().split() if len(part) > 9 and part in written]


async def test_etcd_refuses_a_wrong_password_and_an_unknown_authority(secure: Secure, tmp_path: Path) -> None:
    wrong = tmp_path / "password"
    write_file(wrong, b"hunter-two", 0o600)
    _, opened = await secure.start(etcd_password_file=wrong, timeout_ms=3000)
    assert opened.status == TIMEOUT
    assert "etcd refused user" in opened.error
    assert "check the user and its password file" in opened.error
    assert "hunter-two" not in opened.error + secure.log.read_text()
    stranger = DevelopmentAuthority(tmp_path / "stranger")
    _, opened = await secure.start(etcd_ca_file=stranger.certificate_path, timeout_ms=8000)
    assert opened.status == TIMEOUT
    assert "certificate" in opened.error.lower() + secure.log.read_text().lower()


async def test_no_password_is_sent_to_a_server_without_tls(secure: Secure, tmp_path: Path) -> None:
    received = bytearray()
    heard = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"server_id":"x","version":"2.10.0","proto":1,"max_payload":1048576,"headers":true}\r\n')
        await writer.drain()
        received.extend(await reader.read(4096))
        heard.set()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        password = tmp_path / "password"
        write_file(password, b"open-sesame", 0o600)
        await secure.start(
            nats=f"tls://127.0.0.1:{port}", nats_nkey_file="", nats_user="ann", nats_password_file=password
        )
        async with asyncio.timeout(60):
            await heard.wait()
    assert not received.startswith(b"CONNECT")
    assert b"open-sesame" not in received


async def test_unusable_files_and_options_are_refused_with_advice(secure: Secure, tmp_path: Path) -> None:
    authority = secure.credentials.authority
    long_ago = datetime.now(UTC) - timedelta(days=400)
    expired = authority.issue("long-expired", valid_from=long_ago)
    pair, other = authority.issue("one"), authority.issue("other")
    half = tmp_path / "half.crt"
    half.write_bytes(pair.cert.read_bytes()[:200])
    exposed = tmp_path / "exposed.key"
    write_file(exposed, pair.key.read_bytes(), 0o644)
    for changed, expected in (
        ({"tls_cert_file": expired.cert, "tls_key_file": expired.key}, "valid now"),
        ({"tls_cert_file": pair.cert, "tls_key_file": other.key}, "a certificate and its private key"),
        ({"tls_cert_file": half}, "certificates, PEM"),
        ({"tls_cert_file": pair.cert, "tls_key_file": exposed}, "run chmod 600"),
        ({"tls_key_file": ""}, "belong together"),
        ({"tls_ca_file": ""}, "tls_client_auth needs tls_ca_file"),
        ({"tls_ca_file": tmp_path / "absent"}, "a file that can be read"),
        ({"etcd_user": ""}, "belong together"),
        ({"etcd_password_file": tmp_path / "absent"}, "a file that this process can read"),
        ({"nats_user": "ann"}, "belong together"),
        ({"nats_token_file": exposed}, "received more"),
        ({"nats_nkey_file": pair.key}, "one line"),
        ({"nats_nkey_file": "", "nats_credentials_file": pair.key}, "a credentials file"),
    ):
        _, opened = await secure.start(**changed)
        assert opened.status == INVALID_ARGUMENT, (changed, opened)
        assert expected in opened.error, (changed, opened)


async def test_a_stopped_worker_closes_its_encrypted_port(secure: Secure) -> None:
    worker, opened = await secure.start()
    assert opened.status == 0, opened
    address = worker.obey("where").error
    assert (await worker.awaited("stop")).status == 0
    assert worker.obey("check").status == STOPPED
    own = secure.credentials.authority
    caller = Caller(own.paths("admin"), own.certificate_path)
    assert await code_of(caller.channel(address)) is grpc.StatusCode.UNAVAILABLE
