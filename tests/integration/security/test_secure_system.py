"""A whole system that encrypts and authenticates every connection: it serves, refuses others, and keeps secrets."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import aiohttp
import grpc.aio
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kvrouter.devtools.system.certificates import PEER_DOMAIN, CertificatePaths, DevelopmentAuthority
from kvrouter.devtools.system.ports import free_ports
from kvrouter.devtools.system.stack import Stack, StackOptions, running_stack
from kvrouter.net.auth import may_call
from kvrouter.net.calls import SERVICE as CALL_STREAMS
from kvrouter.net.etcd import connect
from kvrouter.net.tls import warn_if_exposed
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.rpc import open_channel, remote
from kvrouter.v1 import indexer_pb2, scheduler_pb2, worker_pb2
from kvrouter.v1.common_pb2 import Component
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import ServiceRegistration, WorkerRegistration
from structlog.testing import capture_logs

from ...listening import listening_addresses

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="module")]

SERVING = health_pb2.HealthCheckResponse.SERVING
SERVER_CERTIFICATES_ONLY = "frontend"
"""Role whose clients need no certificate: they authenticate with keys of the API."""


@dataclass(frozen=True)
class Port:
    role: str
    address: str


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    directory = tmp_path_factory.mktemp("secure-system")
    logs = directory / "logs"
    logs.mkdir()
    picker, ops = free_ports(2)
    options = StackOptions(
        directory=directory,
        logs=logs,
        workers=2,
        clock=10.0,
        secure=True,
        frontend_options=("--endpoint-picker-bind", f"127.0.0.1:{picker}", "--http-bind", f"127.0.0.1:{ops}"),
        log_level="debug",
    )
    async with running_stack(options) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ports(stack: Stack) -> tuple[list[Port], list[Port]]:
    """Every gRPC port and every HTTP port, as they are registered."""
    assert stack.credentials is not None
    rpc, http = [], [Port("worker", address) for address in stack.worker_metrics]
    async with connect(stack.credentials.etcd_access("admin", stack.etcd.endpoint)) as client:
        for role in ("frontend", "scheduler", "indexer"):
            for entry in await client.get_prefix(f"/kvrouter/v1/kvrouter/services/{role}/".encode()):
                registered = ServiceRegistration.FromString(entry.value)
                rpc.append(Port(role, registered.endpoint))
                http.append(Port(role, registered.http_endpoint))
        workers = ComponentName("kvrouter", stack.options.component).workers_prefix
        registrations = [
            WorkerRegistration.FromString(entry.value) for entry in await client.get_prefix(workers.encode())
        ]
        rpc += [Port("worker", registration.endpoint) for registration in registrations]
    _, picker, _, ops = stack.options.frontend_options
    rpc.append(Port("frontend", picker))
    http.append(Port("frontend", ops))
    assert len(rpc) == 6
    assert len(http) == 6
    return rpc, http


async def test_a_request_passes_through_a_secure_system(stack: Stack) -> None:
    assert stack.tls is not None
    body = {"model": stack.options.model, "prompt": list(range(64)), "max_tokens": 4}
    async with aiohttp.ClientSession() as session:
        url = f"https://{stack.http}/v1/completions"
        async with session.post(url, json=body, ssl=stack.tls.client_context()) as response:
            assert response.status == 200, await response.text()
            assert (await response.json())["usage"]["completion_tokens"] == 4


@dataclass(frozen=True)
class Client:
    """A client's certificate, and the authority that it trusts."""

    name: str
    certificate: CertificatePaths | None
    authority: Path


@pytest.fixture
def clients(stack: Stack, tmp_path: Path) -> dict[str, Client]:
    assert stack.credentials is not None
    ours = stack.credentials.authority
    stranger = DevelopmentAuthority(tmp_path / "stranger")
    long_ago = datetime.now(UTC) - timedelta(days=400)
    own = ours.certificate_path
    made = [
        Client("administrator", ours.paths("admin"), own),
        Client("no certificate", None, own),
        Client("certificate of another authority", stranger.issue("admin"), own),
        Client("expired certificate", ours.issue("expired", role="admin", valid_from=long_ago), own),
        Client("server of another authority", ours.paths("admin"), stranger.certificate_path),
    ]
    return {client.name: client for client in made}


async def grpc_answers(port: Port, client: Client, role: str = "") -> bool:
    key = chain = None
    if client.certificate is not None:
        key, chain = client.certificate.key.read_bytes(), client.certificate.cert.read_bytes()
    credentials = grpc.ssl_channel_credentials(client.authority.read_bytes(), key, chain)
    name = f"{role or port.role}.{PEER_DOMAIN}"
    options = (("grpc.ssl_target_name_override", name), ("grpc.use_local_subchannel_pool", 1))
    async with grpc.aio.secure_channel(port.address, credentials, options=options) as channel:
        return await is_serving(channel)


async def is_serving(channel: grpc.aio.Channel) -> bool:
    try:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.UNAVAILABLE:
            raise
        return False
    return bool(answer.status == SERVING)


async def http_answers(port: Port, client: Client, path: str = "/health") -> bool:
    context = ssl.create_default_context(cafile=str(client.authority))
    if client.certificate is not None:
        context.load_cert_chain(client.certificate.cert, client.certificate.key)
    try:
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"https://{port.address}{path}", ssl=context) as response,
        ):
            return response.status == 200
    except (aiohttp.ClientError, ssl.SSLError, OSError):
        return False


async def test_every_port_refuses_who_does_not_authenticate(
    ports: tuple[list[Port], list[Port]], clients: dict[str, Client]
) -> None:
    rpc, http = ports
    for port, answers in [*((port, grpc_answers) for port in rpc), *((port, http_answers) for port in http)]:
        admitted = {name for name, client in clients.items() if await answers(port, client)}
        expected = {"administrator"}
        if port.role == SERVER_CERTIFICATES_ONLY:
            expected |= {"no certificate", "certificate of another authority", "expired certificate"}
        assert admitted == expected, port


async def test_no_process_listens_elsewhere(stack: Stack, ports: tuple[list[Port], list[Port]]) -> None:
    """A new port fails here until the tests of this file try it."""
    servers = (stack.nats, stack.etcd)
    process_ids = [process.pid for process in stack.processes.values()]
    process_ids += [server.pid for server in servers if server.pid is not None]
    tried = {port.address for kind in ports for port in kind}
    # Those of NATS and etcd are tried in test_accounts, the one for other members of etcd below.
    tried |= {stack.nats.address, stack.etcd.address, stack.etcd.peer_address}
    assert set(listening_addresses(process_ids)) == tried


async def test_members_of_etcd_need_a_certificate(stack: Stack, clients: dict[str, Client]) -> None:
    port = Port("etcd", stack.etcd.peer_address)
    admitted = {name for name, client in clients.items() if await http_answers(port, client, "/version")}
    assert admitted == {"administrator"}


async def test_no_port_speaks_plain_text(ports: tuple[list[Port], list[Port]]) -> None:
    rpc, http = ports
    for port in rpc:
        async with grpc.aio.insecure_channel(port.address) as channel:
            assert not await is_serving(channel), port
    async with aiohttp.ClientSession() as session:
        for port in http:
            with pytest.raises(aiohttp.ClientError):
                await session.get(f"http://{port.address}/health")


async def test_no_process_stands_in_for_one_of_another_role(
    ports: tuple[list[Port], list[Port]], clients: dict[str, Client]
) -> None:
    for port in ports[0]:
        other = "scheduler" if port.role == "worker" else "worker"
        assert not await grpc_answers(port, clients["administrator"], other)


SERVICES = {
    "scheduler": scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"],
    "indexer": indexer_pb2.DESCRIPTOR.services_by_name["IndexerService"],
    "worker": worker_pb2.DESCRIPTOR.services_by_name["WorkerService"],
}
STREAM = "a call stream"
ACCOUNTS = ("admin", "frontend", "scheduler", "indexer", "worker-0000000000000001")


async def admitted_calls(port: Port, authority: DevelopmentAuthority, account: str) -> set[str]:
    """Methods of a port's service, and call streams, that the certificate of an account opens."""
    files = authority.paths(account)
    credentials = grpc.ssl_channel_credentials(
        authority.certificate_path.read_bytes(), files.key.read_bytes(), files.cert.read_bytes()
    )
    options = (("grpc.ssl_target_name_override", f"{port.role}.{PEER_DOMAIN}"), ("grpc.use_local_subchannel_pool", 1))
    service = SERVICES[port.role]
    async with grpc.aio.secure_channel(port.address, credentials, options=options) as channel:
        stream = channel.stream_stream(f"/{CALL_STREAMS}/OpenCallStream")(timeout=20)
        await stream.done_writing()
        codes = {STREAM: await stream.code()}
        for method in service.methods:
            call = channel.stream_stream(f"/{service.full_name}/{method.name}")(timeout=20)
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                # Callers are refused before anything is read, so that a write could fail.
                await call.done_writing()
            with suppress(grpc.aio.AioRpcError):
                while await call.read() is not grpc.aio.EOF:
                    pass
            codes[method.name] = await call.code()
    return {name for name, code in codes.items() if code is not grpc.StatusCode.PERMISSION_DENIED}


async def test_each_certificate_opens_the_calls_of_its_role_only(
    stack: Stack, ports: tuple[list[Port], list[Port]]
) -> None:
    assert stack.credentials is not None
    for port in ports[0]:
        if port.role == SERVER_CERTIFICATES_ONLY:
            continue
        service = SERVICES[port.role]
        for account in ACCOUNTS:
            role = account.partition("-")[0]
            expected = {each.name for each in service.methods if may_call({role}, f"{service.full_name}/{each.name}")}
            on_streams = {"scheduler": {"frontend"}, "indexer": {"frontend", "scheduler"}, "worker": {"frontend"}}
            if role in on_streams[port.role] | {"admin"}:
                expected.add(STREAM)
            assert await admitted_calls(port, stack.credentials.authority, account) == expected, (port, account)


async def test_the_indexer_reads_ranks_over_tls(stack: Stack, ports: tuple[list[Port], list[Port]]) -> None:
    assert stack.tls is not None
    indexer = next(port for port in ports[0] if port.role == "indexer")
    component = Component(namespace="kvrouter", name=stack.options.component)
    async with open_channel(indexer.address, tls=stack.tls, role="indexer") as channel:
        replaced = await remote(SERVICES["indexer"], channel).resync(
            indexer_pb2.ResyncRequest(component=component), deadline=Deadline.after(60)
        )
    assert (replaced.ranks, replaced.unreachable) == (stack.options.workers, 0)


async def test_refused_callers_are_counted_at_every_service(stack: Stack, ports: tuple[list[Port], list[Port]]) -> None:
    assert stack.credentials is not None
    for port in ports[0]:
        if port.role != SERVER_CERTIFICATES_ONLY:
            await admitted_calls(port, stack.credentials.authority, "worker-0000000000000001")
    for port in ports[1]:
        if port.role != SERVER_CERTIFICATES_ONLY:
            assert await count_of(stack, port, 'kvrouter_refused_callers_total{reason="role"}') > 0, port


async def count_of(stack: Stack, port: Port, metric: str, session: aiohttp.ClientSession | None = None) -> float:
    """Returns the value of a metric, over a connection of a session or over one of its own."""
    if session is None:
        async with aiohttp.ClientSession() as own:
            return await count_of(stack, port, metric, own)
    assert stack.tls is not None
    async with session.get(f"https://{port.address}/metrics", ssl=stack.tls.client_context()) as response:
        lines = (await response.text()).splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(metric))


async def test_refused_connections_are_counted(
    stack: Stack, ports: tuple[list[Port], list[Port]], clients: dict[str, Client]
) -> None:
    scheduler, http = (next(port for port in kind if port.role == "scheduler") for kind in ports)
    async with asyncio.timeout(30), aiohttp.ClientSession() as session:  # whose connection lasts
        before = await count_of(stack, http, "kvrouter_tls_handshakes_total", session)
        assert not await grpc_answers(scheduler, clients["no certificate"])
        while await count_of(stack, http, "kvrouter_tls_handshakes_total", session) <= before:
            await asyncio.sleep(0.02)  # The client may know of the refusal before the server has counted it.


async def _refused_with(stack: Stack, header: str) -> str:
    """Returns a credential that a client showed in this header, with a request that is refused."""
    assert stack.tls is not None
    secret = f"kvr-{header}-of-a-client"
    body = {"model": "absent", "prompt": [1], "max_tokens": 1}
    async with aiohttp.ClientSession(headers={header: f"Bearer {secret}"}) as session:
        url = f"https://{stack.http}/v1/completions"
        async with session.post(url, json=body, ssl=stack.tls.client_context()) as response:
            assert response.status == 404
    return secret


def visible(pid: int) -> list[str]:
    """Command line and environment of a process."""
    return [Path(f"/proc/{pid}/{what}").read_bytes().decode(errors="replace") for what in ("cmdline", "environ")]


async def test_secrets_are_in_no_log_command_line_environment_or_metric(
    stack: Stack, ports: tuple[list[Port], list[Port]]
) -> None:
    assert stack.credentials is not None
    assert stack.tls is not None
    secrets = {
        path: path.read_text().strip()
        for identity in stack.credentials.identities.values()
        for path in (identity.nkey, identity.password)
    }
    # The first line of a private key has no secret; the key of salts is a single line.
    secrets |= {path: path.read_text().splitlines()[:2][-1] for path in stack.credentials.folder.glob("*.key")}
    assert len(secrets) >= 16
    secrets |= {Path(header): await _refused_with(stack, header) for header in ("authorization", "x-api-key")}
    shown = [path.read_text(errors="replace") for path in stack.options.logs.glob("*.log")]
    shown += [server.log_path.read_text(errors="replace") for server in (stack.nats, stack.etcd)]
    pids = [process.pid for process in stack.processes.values()]
    pids += [server.pid for server in (stack.nats, stack.etcd) if server.pid is not None]
    for pid in pids:
        shown += visible(pid)
    async with aiohttp.ClientSession() as session:
        for port in ports[1]:
            url = f"https://{port.address}/metrics"
            async with session.get(url, ssl=stack.tls.client_context()) as response:
                shown.append(await response.text())
    assert all(shown)
    assert not [path.name for path, secret in secrets.items() if any(secret in text for text in shown)]


@pytest.mark.parametrize("bind", ["0.0.0.0:1", "[::]:1", "*:1", "10.0.0.7:1", "host.example:1"])
async def test_an_address_that_others_reach_needs_tls_or_a_warning(bind: str) -> None:
    with capture_logs() as logs:
        warn_if_exposed(bind, None)
        for loopback in ("127.0.0.1:1", "[::1]:1", "localhost:1", "127.8.8.8:1"):
            warn_if_exposed(loopback, None)
    assert [(line["event"], line["address"]) for line in logs] == [("listener.exposed", bind)]
