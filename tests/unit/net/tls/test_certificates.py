"""Certificates are checked before use, and replaced ones are taken over without a restart."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kvrouter.devtools.system.certificates import PEER_DOMAIN, CertificatePaths, DevelopmentAuthority
from kvrouter.net.http2 import ReceivedCall, endpoint
from kvrouter.net.rpc.call_gate import CallGate
from kvrouter.net.rpc.loop_server import LoopServer
from kvrouter.net.rpc.server import HealthService
from kvrouter.net.secret_files import UnreadableSecret
from kvrouter.net.tls import (
    InvalidCertificate,
    InvalidTls,
    Tls,
    TlsOptions,
    certificates as module,
    open_channel,
)


@pytest.fixture(autouse=True)
def look_at_every_handshake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHECK_SECONDS", 0.0)


@pytest.fixture
def authority(tmp_path: Path) -> DevelopmentAuthority:
    return DevelopmentAuthority(tmp_path / "certs")


def options(paths: CertificatePaths, **others: str) -> TlsOptions:
    return TlsOptions(str(paths.cert), str(paths.key), str(paths.authority), **others)  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def serving(tls: Tls | None) -> AsyncIterator[str]:
    service = HealthService()
    service.set("", True)
    server = LoopServer(CallGate(), tls=tls)
    service.register(server)
    port = await server.start("127.0.0.1:0")
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0.0)


async def ask(target: str, tls: Tls | None, role: str = "") -> int:
    async with open_channel(target, (), tls, role) as channel:
        return await check(channel)


async def check(channel: grpc.aio.Channel) -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=10)
    return int(answer.status)


async def refused(target: str, tls: Tls | None, role: str = "") -> str:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await ask(target, tls, role)
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    return str(raised.value.details())


SERVING = health_pb2.HealthCheckResponse.SERVING


async def test_a_call_succeeds_with_a_certificate_of_the_authority(authority: DevelopmentAuthority) -> None:
    server = Tls(options(authority.issue("scheduler"), client_auth="required"))
    client = Tls(options(authority.issue("frontend")))
    async with serving(server) as target:
        assert await ask(target, client) == SERVING


async def test_a_server_knows_the_dns_names_of_a_client(authority: DevelopmentAuthority) -> None:
    names: list[tuple[str, ...]] = []

    async def see(_incoming: object, context: ReceivedCall) -> None:
        names.append(context.connection.names)

    server = LoopServer(CallGate(), tls=Tls(options(authority.issue("scheduler"), client_auth="required")))
    handlers = {"See": grpc.stream_stream_rpc_method_handler(see)}
    server.add_registered_method_handlers("test.Names", handlers)
    client = Tls(options(authority.issue("frontend", ["host.test", "127.0.0.1"])))
    port = await server.start("127.0.0.1:0")
    try:
        async with open_channel(f"127.0.0.1:{port}", (), client) as channel:
            assert await channel.stream_stream("/test.Names/See")().code() is grpc.StatusCode.OK
    finally:
        await server.stop(0.0)
    assert names == [(f"frontend.{PEER_DOMAIN}", "host.test")]


async def test_a_connection_whose_handshake_ends_after_the_server_has_stopped_is_closed(
    authority: DevelopmentAuthority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "_CHECK_SECONDS", 3600.0)
    server = LoopServer(CallGate(), tls=Tls(options(authority.issue("scheduler"))))
    reader, writer = await asyncio.open_connection("127.0.0.1", await server.start("127.0.0.1:0"))
    context = ssl.create_default_context(cafile=str(authority.certificate_path))
    received, to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
    connection = context.wrap_bio(received, to_send, server_hostname="127.0.0.1")

    async def done(step: Callable[[], bytes | None]) -> bytes | None:
        async with asyncio.timeout(20):
            while True:
                try:
                    return step()
                except ssl.SSLWantReadError:
                    writer.write(to_send.read())
                    received.write(await reader.read(1 << 16))

    try:
        await done(connection.do_handshake)
        await server.stop(0.0)
        # The last part of the handshake is sent only now.
        while await done(connection.read):
            pass
        assert not server.connections
    finally:
        writer.transport.abort()


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_no_session_is_resumed(authority: DevelopmentAuthority, version: ssl.TLSVersion) -> None:
    """A resumed one would outlive the authority of its client."""
    context = ssl.create_default_context(cafile=str(authority.certificate_path))
    context.set_alpn_protocols(["h2"])
    context.maximum_version = version

    def connect(port: int, session: ssl.SSLSession | None) -> tuple[ssl.SSLSession | None, bool | None]:
        with (
            socket.create_connection(("127.0.0.1", port)) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1", session=session) as connection,
        ):
            connection.recv(1)  # Tickets of TLS 1.3 come before the first bytes.
            return connection.session, connection.session_reused

    async with serving(Tls(options(authority.issue("scheduler")))) as target:
        port = int(target.rpartition(":")[2])
        session, _ = await asyncio.to_thread(connect, port, None)
        _, is_resumed = await asyncio.to_thread(connect, port, session)
        assert not is_resumed


async def test_a_server_refuses_who_has_no_valid_certificate(authority: DevelopmentAuthority, tmp_path: Path) -> None:
    server = Tls(options(authority.issue("scheduler"), client_auth="required"))
    other = DevelopmentAuthority(tmp_path / "other")
    stranger = other.issue("frontend")
    async with serving(server) as target:
        await refused(target, None)
        await refused(target, Tls(TlsOptions(ca_file=str(authority.certificate_path))))
        await refused(target, Tls(TlsOptions(str(stranger.cert), str(stranger.key), str(authority.certificate_path))))
        assert server.handshakes >= 2  # A peer without TLS sends nothing that asks for one.


async def test_a_client_refuses_a_server_of_another_authority_or_name(
    authority: DevelopmentAuthority, tmp_path: Path
) -> None:
    stranger = DevelopmentAuthority(tmp_path / "other").issue("scheduler")
    elsewhere = authority.issue("elsewhere", ["scheduler.example"])
    client = Tls(TlsOptions(ca_file=str(authority.certificate_path)))
    async with serving(Tls(options(stranger))) as target:
        await refused(target, client)
    async with serving(Tls(options(elsewhere))) as target:
        await refused(target, client)
    async with serving(None) as target:
        await refused(target, client)


async def test_with_a_peer_domain_the_role_counts_and_not_the_address(authority: DevelopmentAuthority) -> None:
    server = Tls(options(authority.issue("scheduler", [])))
    client = Tls(TlsOptions(ca_file=str(authority.certificate_path), peer_domain=PEER_DOMAIN))
    async with serving(server) as target:
        assert await ask(target, client, "scheduler") == SERVING
        await refused(target, client, "indexer")
        await refused(target, client)


async def test_replaced_certificates_are_used_for_new_connections(
    authority: DevelopmentAuthority, tmp_path: Path
) -> None:
    paths = authority.issue("scheduler")
    server, client = Tls(options(paths)), Tls(options(authority.issue("frontend")))
    successor = DevelopmentAuthority(tmp_path / "successor")
    async with serving(server) as target:
        assert await ask(target, client) == SERVING
        replacement = successor.issue("scheduler")
        for mine, new in ((paths.key, replacement.key), (paths.cert, replacement.cert)):
            new.replace(mine)
        await refused(target, client)
        assert await ask(target, Tls(TlsOptions(ca_file=str(successor.certificate_path)))) == SERVING
        assert server.files.reloads == 1


async def test_a_channel_shows_its_renewed_certificate_and_keeps_running_calls(
    authority: DevelopmentAuthority, tmp_path: Path
) -> None:
    shown = authority.issue("frontend")
    server = Tls(options(authority.issue("scheduler"), client_auth="required"))
    client = Tls(options(shown))
    successor = DevelopmentAuthority(tmp_path / "successor")
    async with serving(server) as target, open_channel(target, (), client) as channel:
        watching = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watching.read()).status == SERVING
        stranger = successor.issue("frontend")
        for mine, new in ((shown.key, stranger.key), (shown.cert, stranger.cert)):
            new.replace(mine)
        with pytest.raises(grpc.aio.AioRpcError):
            await check(channel)
        authority.issue("frontend")
        assert await check(channel) == SERVING
        assert not watching.done()


async def test_half_written_and_expired_files_keep_the_previous_certificate(authority: DevelopmentAuthority) -> None:
    paths = authority.issue("scheduler")
    server, client = Tls(options(paths)), Tls(TlsOptions(ca_file=str(authority.certificate_path)))
    async with serving(server) as target:
        whole = paths.cert.read_bytes()
        paths.cert.write_bytes(whole[: len(whole) // 2])
        assert await ask(target, client) == SERVING
        assert server.files.failed_reloads == 1
        paths.cert.write_bytes(whole)
        assert await ask(target, client) == SERVING
        authority.issue("scheduler", valid_from=datetime.now(UTC) - timedelta(days=400))
        assert await ask(target, client) == SERVING
        assert server.files.failed_reloads == 2
        assert server.files.reloads == 0


def test_files_that_cannot_be_used_are_refused_at_the_start(authority: DevelopmentAuthority) -> None:
    good, other = authority.issue("scheduler"), authority.issue("indexer")
    old = authority.issue("old", valid_from=datetime.now(UTC) - timedelta(days=400))
    with pytest.raises(InvalidCertificate, match="expired"):
        Tls(options(old))
    with pytest.raises(InvalidCertificate, match="certificate and its unencrypted key"):
        Tls(TlsOptions(str(good.cert), str(other.key)))
    with pytest.raises(InvalidCertificate, match="authorities"):
        Tls(TlsOptions(ca_file=str(good.key)))
    with pytest.raises(InvalidCertificate, match="No such file"):
        Tls(TlsOptions(ca_file="/nowhere/ca.crt"))
    with pytest.raises(InvalidTls, match="belong together"):
        TlsOptions(cert_file=str(good.cert))
    with pytest.raises(InvalidTls, match="needs tls_ca_file"):
        TlsOptions(str(good.cert), str(good.key), client_auth="required")
    with pytest.raises(InvalidTls, match="expected none or required"):
        TlsOptions(str(good.cert), str(good.key), str(good.authority), client_auth="optional")


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o660])
def test_a_key_that_others_can_read_or_write_is_refused(authority: DevelopmentAuthority, mode: int) -> None:
    paths = authority.issue("scheduler")
    paths.key.chmod(mode)
    with pytest.raises(UnreadableSecret, match=f"{mode:04o}: run chmod 600"):
        Tls(options(paths))
    paths.key.chmod(0o640)
    assert Tls(options(paths)).serves


async def test_an_http_server_follows_replaced_files_too(authority: DevelopmentAuthority, tmp_path: Path) -> None:
    paths = authority.issue("frontend")
    tls = Tls(options(paths))

    async def shown(ca_file: Path) -> str:
        context = ssl.create_default_context(cafile=str(ca_file))
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        writer.close()
        return str(writer.get_extra_info("peercert")["serialNumber"])

    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=tls.server_context())
    async with server:
        port = server.sockets[0].getsockname()[1]
        before = await shown(authority.certificate_path)
        authority.issue("frontend")
        assert await shown(authority.certificate_path) != before
        with pytest.raises(ssl.SSLCertVerificationError):
            await shown(DevelopmentAuthority(tmp_path / "other").certificate_path)
