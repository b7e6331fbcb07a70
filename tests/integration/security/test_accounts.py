"""NATS and etcd admit only those who authenticate, and each account only to what its process needs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aetcd
import nats.errors
import pytest
from kvrouter.devtools.system.certificates import DevelopmentAuthority
from kvrouter.devtools.system.credentials import Credentials
from kvrouter.devtools.system.servers import EtcdServer, NatsServer
from kvrouter.net.etcd import AWAY, EtcdAccess, EtcdAway, EtcdRefused, InvalidEndpoint, LeasedKeys, connect
from kvrouter.net.nats.access import InvalidNats, NatsAccess
from kvrouter.net.nats.client import TolerantClient
from kvrouter.net.nats.event_stream import ensure_stream
from kvrouter.net.secret_files import UnreadableSecret
from kvrouter.net.tls import Tls, TlsOptions
from kvrouter.v1.names import ComponentName
from nats.aio.client import Client

from ...faults import newer_etcd

POOL = ComponentName("secure", "pool")
WORKER, OTHER = "worker-0000000000000001", "worker-0000000000000002"


@asynccontextmanager
async def connected(access: NatsAccess) -> AsyncIterator[tuple[Client, list[str]]]:
    """A client, and the errors that the server sent it."""
    errors: list[str] = []

    async def note(error: Exception) -> None:
        errors.append(str(error).lower())

    client = TolerantClient(access)
    await client.connect(access.servers, allow_reconnect=False, connect_timeout=10, error_cb=note, **access.options())
    try:
        yield client, errors
    finally:
        await client.close()


async def settled(client: Client) -> None:
    """Returns when the server has answered everything; the library may count the PONG of the connection as one."""
    for _ in range(2):
        await client.flush(timeout=30)


async def publish_errors(credentials: Credentials, server: NatsServer, name: str, *subjects: str) -> list[str]:
    """Returns what the server says when this account publishes to the subjects."""
    async with connected(credentials.nats_access(name, server.url)) as (client, errors):
        for subject in subjects:
            await client.publish(subject, b"forged")
        await settled(client)
        return list(errors)


async def test_a_worker_publishes_its_own_subjects_only(credentials: Credentials, secure_nats: NatsServer) -> None:
    own = [POOL.events_subject(1, 0), POOL.live_subject(1, 3), POOL.load_subject(1, 0)]
    assert await publish_errors(credentials, secure_nats, WORKER, *own) == []
    forged = [
        *(POOL.events_subject(2, 0), POOL.live_subject(2, 0), POOL.load_subject(2, 0), POOL.sync_subject),
        *("kvrouter.v1.secure.elsewhere.events.0000000000000001.0", "_INBOX_scheduler.x"),
        *(f"$JS.API.STREAM.PURGE.{POOL.stream}", f"$JS.API.STREAM.DELETE.{POOL.stream}"),
    ]
    errors = await publish_errors(credentials, secure_nats, WORKER, *forged)
    assert len(errors) == len(forged)
    assert all("permissions violation for publish" in error for error in errors)


@pytest.mark.parametrize("name", ["indexer", "scheduler", "frontend"])
async def test_no_service_publishes_events(credentials: Credentials, secure_nats: NatsServer, name: str) -> None:
    forged = [POOL.events_subject(1, 0), POOL.live_subject(1, 0), POOL.load_subject(1, 0)]
    assert len(await publish_errors(credentials, secure_nats, name, *forged)) == len(forged)


@pytest.mark.parametrize("name", [WORKER, "frontend", "scheduler"])
async def test_nobody_reads_events_or_replies_of_others(
    credentials: Credentials, secure_nats: NatsServer, name: str
) -> None:
    async with connected(credentials.nats_access(name, secure_nats.url)) as (client, errors):
        subjects = [POOL.events_wildcard, POOL.live_wildcard, "_INBOX.>", "_INBOX_indexer.>", f"_INBOX_{OTHER}.>", ">"]
        for subject in subjects:
            await client.subscribe(subject)
        await settled(client)
        assert len(errors) == len(subjects)


async def test_an_indexer_creates_the_stream_that_a_worker_writes(
    credentials: Credentials, secure_nats: NatsServer
) -> None:
    async with connected(credentials.nats_access("indexer", secure_nats.url)) as (indexer, errors):
        await ensure_stream(indexer.jetstream(timeout=10), POOL)
        assert errors == []
    async with connected(credentials.nats_access(WORKER, secure_nats.url)) as (worker, errors):
        stored = await worker.jetstream(timeout=10).publish(POOL.events_subject(1, 0), b"", stream=POOL.stream)
        assert stored.stream == POOL.stream
        assert errors == []


async def test_nats_refuses_who_does_not_authenticate(
    credentials: Credentials, secure_nats: NatsServer, tmp_path: Path
) -> None:
    def tls(authority: DevelopmentAuthority, name: str) -> Tls:
        paths = authority.issue(name)
        return Tls(TlsOptions(str(paths.cert), str(paths.key), str(credentials.authority.certificate_path)))

    stranger = DevelopmentAuthority(tmp_path / "stranger")
    nkey = str(credentials.identities[WORKER].nkey)
    untrusted = Tls(TlsOptions(ca_file=str(stranger.certificate_path)))
    for access in (
        NatsAccess(secure_nats.url.replace("tls://", "nats://")),
        NatsAccess(secure_nats.url, nkey_file=nkey),
        NatsAccess(secure_nats.url, nkey_file=nkey, tls=untrusted),
        NatsAccess(secure_nats.url, nkey_file=nkey, tls=tls(stranger, "worker")),
        NatsAccess(secure_nats.url, tls=tls(credentials.authority, "guest")),
    ):
        with pytest.raises((nats.errors.Error, OSError)):
            async with connected(access):
                raise AssertionError("connected")


async def test_a_client_that_expects_tls_sends_nothing_to_a_server_without(nats_url: str, tmp_path: Path) -> None:
    secret = tmp_path / "password"
    secret.write_text("hunter2")
    secret.chmod(0o600)
    access = NatsAccess(nats_url.replace("nats://", "tls://"), user="worker", password_file=str(secret))
    with pytest.raises(nats.errors.SecureConnRequiredError):
        async with connected(access):
            raise AssertionError("connected")


async def test_a_user_of_etcd_reads_and_writes_its_own_keys_only(
    credentials: Credentials, secure_etcd: EtcdServer
) -> None:
    allowed = {
        WORKER: [POOL.worker_key(1), POOL.incarnation_key(1)],
        "frontend": ["/kvrouter/v1/secure/services/frontend/a"],
        "scheduler": [
            *("/kvrouter/v1/secure/services/scheduler/a", "/kvrouter/v1/secure/thresholds/m/n"),
            *(POOL.descriptor_key, POOL.drain_key(1)),
        ],
        "indexer": [
            *("/kvrouter/v1/secure/services/indexer/a", POOL.snapshot_key),
            *(POOL.snapshot_lock_key, POOL.applied_key("a")),
        ],
    }
    for name, keys in allowed.items():
        async with connect(credentials.etcd_access(name, secure_etcd.endpoint)) as client:
            for key in keys:
                await client.put(key.encode(), b"value")
            foreign = [key for other, theirs in allowed.items() if other != name for key in theirs]
            for key in [*foreign, POOL.worker_key(2), "/kvrouter/v1/other/x", "elsewhere"]:
                with pytest.raises(AWAY, match="permission denied"):
                    await client.put(key.encode(), b"forged")
            for key in keys:
                await client.delete(key.encode())
    async with connect(credentials.etcd_access(WORKER, secure_etcd.endpoint)) as client:
        with pytest.raises(AWAY, match="permission denied"):
            await client.get_prefix(POOL.workers_prefix.encode())


async def test_etcd_refuses_who_does_not_authenticate(
    credentials: Credentials, secure_etcd: EtcdServer, tmp_path: Path
) -> None:
    wrong = tmp_path / "password"
    wrong.write_text("hunter2")
    wrong.chmod(0o600)
    tls = credentials.etcd_access(WORKER, secure_etcd.endpoint).tls
    with pytest.raises(EtcdRefused, match="etcd refused user 'worker-0000000000000001'") as refused:
        async with connect(EtcdAccess(secure_etcd.endpoint, user=WORKER, password_file=str(wrong), tls=tls)):
            raise AssertionError("connected")
    assert "hunter2" not in str(refused.value)
    assert isinstance(refused.value, AWAY)
    for access in (EtcdAccess(secure_etcd.address), EtcdAccess(secure_etcd.endpoint)):
        with pytest.raises(EtcdAway):
            async with connect(access):
                raise AssertionError("connected")


async def is_expired(client: aetcd.Client) -> bool:
    try:
        await client.get(POOL.worker_key(2).encode())
    except aetcd.ClientError as error:
        return "invalid auth token" in str(error)
    return False


@pytest.fixture
async def etcd_with_short_tokens(credentials: Credentials, tmp_path: Path) -> AsyncIterator[EtcdServer]:
    server = EtcdServer(tmp_path, binary=newer_etcd.find(), credentials=credentials, token_seconds=1)
    await server.start()
    yield server
    await server.kill()


async def test_a_registration_outlives_the_token_of_its_user(
    credentials: Credentials, etcd_with_short_tokens: EtcdServer
) -> None:
    access = credentials.etcd_access(OTHER, etcd_with_short_tokens.endpoint)
    keys = LeasedKeys(access, ttl_seconds=6)
    keys.put(POOL.worker_key(2), b"first")
    running = asyncio.create_task(keys.run())
    try:
        async with asyncio.timeout(60):
            await keys.wait_registered()
            async with connect(access) as client:
                while not await is_expired(client):
                    await asyncio.sleep(3)  # A token of 1 s expires only while nobody uses it.
            keys.put(POOL.worker_key(2), b"second")
            await keys.wait_registered()
            async with connect(access) as client:
                found = await client.get(POOL.worker_key(2).encode())
                assert found is not None
                assert found.value == b"second"
    finally:
        keys.stop()
        await running


def test_incomplete_or_contradicting_identities_are_refused(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("one\ntwo\n")
    secret.chmod(0o600)
    with pytest.raises(InvalidEndpoint, match="belong together"):
        EtcdAccess("a:1", user="worker")
    with pytest.raises(UnreadableSecret, match="expected one line, received 2"):
        EtcdAccess("a:1", user="worker", password_file=str(secret))
    with pytest.raises(InvalidNats, match="belong together"):
        NatsAccess("nats://a:1", user="worker")
    with pytest.raises(InvalidNats, match="received more"):
        NatsAccess("nats://a:1", nkey_file=str(secret), credentials_file=str(secret))
    with pytest.raises(InvalidNats, match=r"received 'http://a:1'"):
        NatsAccess("http://user:hunter2@a:1")
    assert str(NatsAccess("nats://user:hunter2@a:1,nats://b:2")) == "nats://a:1,nats://b:2"
    secret.chmod(0o644)
    with pytest.raises(UnreadableSecret, match="run chmod 600"):
        NatsAccess("nats://a:1", token_file=str(secret))
