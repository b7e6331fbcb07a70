"""Leased keys and watches on a real etcd that comes and goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest
import structlog
from aetcd import Client
from kvrouter.devtools.system.servers import EtcdServer
from kvrouter.net.etcd import Delete, EtcdAway, KeyTaken, LeasedKeys, Put, Snapshot, connect, watch, watch_prefix
from structlog.testing import capture_logs

from ..publisher.worker_harness import eventually


@pytest.fixture(autouse=True)
def log_that_can_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A logger that no other test in this process has configured: a cached one writes past ``capture_logs``."""
    monkeypatch.setattr(watch, "log", structlog.get_logger())


@asynccontextmanager
async def held(keys: LeasedKeys) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(keys.run())
        await keys.wait_registered()
        yield
        keys.stop()


async def test_keys_follow_put_and_delete(namespace: str, etcd_endpoint: str) -> None:
    keys = LeasedKeys(etcd_endpoint, ttl_seconds=6)
    keys.put(f"/{namespace}/a", b"1")
    async with connect(etcd_endpoint) as client:
        async with held(keys):
            keys.put(f"/{namespace}/b", b"2")
            keys.put(f"/{namespace}/a", b"3")
            await keys.wait_registered()
            found = {pair.key.decode(): pair.value for pair in await client.get_prefix(f"/{namespace}/".encode())}
            assert found == {f"/{namespace}/a": b"3", f"/{namespace}/b": b"2"}
            keys.delete(f"/{namespace}/a")
            await keys.wait_registered()
            assert await client.get(f"/{namespace}/a".encode()) is None
        assert not await client.get_prefix(f"/{namespace}/".encode())


async def test_the_renewals_of_a_lease_end_with_its_keys(namespace: str, etcd_endpoint: str) -> None:
    keys = LeasedKeys(etcd_endpoint, ttl_seconds=6)
    keys.put(f"/{namespace}/a", b"1")
    async with held(keys):
        keys.put(f"/{namespace}/b", b"2")  # written after a renewal
        await keys.wait_registered()
        renewals = keys._renewals
        assert not renewals.done()
    assert renewals.done()


async def test_keys_that_take_longer_to_write_than_a_lease_lives_stay(namespace: str, etcd_endpoint: str) -> None:
    class Slow(LeasedKeys):
        async def _put_own(self, client: Client, key: str, value: bytes) -> None:
            await asyncio.sleep(0.25)
            await super()._put_own(client, key, value)

    keys = Slow(etcd_endpoint, ttl_seconds=4)
    for number in range(20):
        keys.put(f"/{namespace}/{number}", b"1")
    async with held(keys), connect(etcd_endpoint) as client:
        assert len(list(await client.get_prefix(f"/{namespace}/".encode()))) == 20
        assert keys.registrations == 1


async def test_all_writes_of_a_batch_end_before_one_fails(namespace: str, etcd_endpoint: str) -> None:
    running = 0

    class Uneven(LeasedKeys):
        async def _put_own(self, client: Client, key: str, value: bytes) -> None:
            nonlocal running
            if value == b"fails":
                raise EtcdAway("test")
            running += 1
            await super()._put_own(client, key, value)
            running -= 1

    keys = Uneven(etcd_endpoint, ttl_seconds=6)
    for number, value in enumerate((b"1", b"fails", b"3")):
        keys.put(f"/{namespace}/{number}", value)
    async with connect(etcd_endpoint) as client:
        await keys._renew(client)
        with pytest.raises(EtcdAway):
            await keys._write(client)
        assert running == 0
        assert [pair.value for pair in await client.get_prefix(f"/{namespace}/".encode())] == [b"1", b"3"]


async def test_one_taken_key_of_several_is_an_error(namespace: str, etcd_endpoint: str) -> None:
    former, later = (LeasedKeys(etcd_endpoint, ttl_seconds=6, incarnation_of=int) for _ in range(2))
    later.put(f"/{namespace}/2", b"2")
    for number in range(4):
        former.put(f"/{namespace}/{number}", b"1")
    async with held(later):
        with pytest.raises(KeyTaken, match=f"/{namespace}/2"):
            await former.run()


async def test_each_registration_is_announced(namespace: str, etcd_endpoint: str) -> None:
    calls = 0

    async def tell() -> None:
        nonlocal calls
        calls += 1

    keys = LeasedKeys(etcd_endpoint, ttl_seconds=6, on_registered=tell)
    keys.put(f"/{namespace}/a", b"1")
    async with held(keys), connect(etcd_endpoint) as client:
        assert calls == 1
        assert keys.lease_id is not None
        await client.revoke_lease(keys.lease_id)
        await eventually(lambda: calls == 2)


async def test_a_key_that_an_earlier_incarnation_writes_is_taken_back(namespace: str, etcd_endpoint: str) -> None:
    keys = LeasedKeys(etcd_endpoint, ttl_seconds=6, incarnation_of=int)
    key = f"/{namespace}/a".encode()
    keys.put(key.decode(), b"2")
    async with held(keys), connect(etcd_endpoint) as client:
        await client.put(key, b"1")

        async def back() -> bool:
            found = await client.get(key)
            return found is not None and found.value == b"2"

        await eventually(back)


async def test_a_watch_tells_all_that_changes(namespace: str, etcd_endpoint: str) -> None:
    async with connect(etcd_endpoint) as client:
        await client.put(f"/{namespace}/old".encode(), b"0")
        async with aclosing(watch_prefix(etcd_endpoint, f"/{namespace}/")) as changes:
            assert await anext(changes) == Snapshot({f"/{namespace}/old": b"0"})
            await client.put(f"/{namespace}/new".encode(), b"1")
            await client.put(b"/elsewhere", b"x")
            await client.delete(f"/{namespace}/old".encode())
            assert await anext(changes) == Put(f"/{namespace}/new", b"1")
            assert await anext(changes) == Delete(f"/{namespace}/old")


@pytest.mark.parametrize("progress_seconds", [0.05, 30.0])
async def test_a_watch_goes_on_after_etcd_was_away(
    namespace: str, own_etcd: EtcdServer, progress_seconds: float
) -> None:
    prefix = f"/{namespace}/"
    seen: dict[str, bytes] = {}

    async def put(name: str, value: bytes) -> None:
        async with connect(own_etcd.endpoint) as client:
            await client.put(f"{prefix}{name}".encode(), value)

    async def until_seen(expected: dict[str, bytes]) -> None:
        nonlocal seen
        while seen != {f"{prefix}{name}": value for name, value in expected.items()}:
            match await anext(changes):
                case Snapshot(entries):
                    seen = dict(entries)
                case Put(key, value):
                    seen[key] = value

    async with aclosing(watch_prefix(own_etcd.endpoint, prefix, progress_seconds=progress_seconds)) as changes:
        assert await anext(changes) == Snapshot({})
        await put("a", b"1")
        await until_seen({"a": b"1"})
        await own_etcd.kill()
        await own_etcd.start()
        await put("b", b"2")
        await until_seen({"a": b"1", "b": b"2"})


async def test_a_watch_notices_an_etcd_that_hangs(namespace: str, own_etcd: EtcdServer) -> None:
    prefix = f"/{namespace}/"
    async with aclosing(watch_prefix(own_etcd.endpoint, prefix, progress_seconds=1.2)) as changes:
        assert await anext(changes) == Snapshot({})
        following = asyncio.ensure_future(anext(changes))
        with capture_logs() as logged:
            own_etcd.pause()
            await eventually(lambda: any(line["event"] == "etcd.watch_interrupted" for line in logged))
        own_etcd.resume()
        assert await following == Snapshot({})


async def test_a_watch_says_when_etcd_was_heard_though_nothing_changes(namespace: str, own_etcd: EtcdServer) -> None:
    contacts: list[None] = []
    watching = watch_prefix(
        own_etcd.endpoint, f"/{namespace}/", progress_seconds=1.2, on_contact=lambda: contacts.append(None)
    )
    async with aclosing(watching) as changes:
        assert await anext(changes) == Snapshot({})
        following = asyncio.ensure_future(anext(changes))
        await eventually(lambda: len(contacts) > 3)
        with capture_logs() as logged:
            own_etcd.pause()
            await eventually(lambda: any(line["event"] == "etcd.watch_interrupted" for line in logged))
        heard = len(contacts)
        own_etcd.resume()
        assert await following == Snapshot({})
        assert len(contacts) == heard + 1, "an etcd that hangs is not heard"


async def test_the_first_endpoint_that_answers_is_taken(etcd_endpoint: str) -> None:
    async with connect(f"127.0.0.1:1,{etcd_endpoint}") as client:
        assert await client.get(b"nothing") is None
    with pytest.raises(EtcdAway):
        async with connect("127.0.0.1:1"):
            pass
