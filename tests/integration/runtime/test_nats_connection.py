"""A connection to a real NATS that stops, crashes, and is not there yet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from kvrouter.devtools.system.servers import EtcdServer, NatsServer
from kvrouter.runtime.config.settings import ServiceSettings
from kvrouter.runtime.process.context import Runtime, open_runtime

from ...raw_nats import raw_nats


@asynccontextmanager
async def opened(nats_url: str, etcd_endpoint: str, namespace: str) -> AsyncIterator[Runtime]:
    settings = ServiceSettings(etcd=etcd_endpoint, nats=nats_url, namespace=namespace)
    async with asyncio.timeout(60), open_runtime(settings) as runtime:
        yield runtime


def sample(runtime: Runtime, name: str) -> float | None:
    return runtime.registry.get_sample_value(f"kvrouter_nats_{name}")


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_a_subscription_goes_on_after_nats_was_away(
    own_nats: NatsServer, etcd_endpoint: str, namespace: str, how: str
) -> None:
    async with opened(own_nats.url, etcd_endpoint, namespace) as runtime:
        client = await runtime.nats()
        assert await runtime.nats() is client
        subscription = await client.subscribe("news")
        await client.publish("news", b"before")
        assert (await subscription.next_msg(timeout=10)).data == b"before"
        await (own_nats.stop() if how == "stop" else own_nats.kill())
        while sample(runtime, "connected"):
            await asyncio.sleep(0.01)
        await own_nats.start()
        while not sample(runtime, "connected"):
            await asyncio.sleep(0.01)
        await client.publish("news", b"after")
        assert (await subscription.next_msg(timeout=10)).data == b"after"
        assert sample(runtime, "disconnects_total") == 1
    assert sample(runtime, "disconnects_total") == 1  # to leave is not to lose it


async def test_a_process_starts_before_nats_does(own_nats: NatsServer, etcd_endpoint: str, namespace: str) -> None:
    await own_nats.stop()
    async with opened(own_nats.url, etcd_endpoint, namespace) as runtime:
        waiting = asyncio.ensure_future(runtime.nats())
        while not sample(runtime, "errors_total"):
            await asyncio.sleep(0.01)
        assert not waiting.done()
        await own_nats.start()
        assert (await waiting).is_connected


async def test_a_process_ends_while_nats_and_etcd_are_away(
    own_nats: NatsServer, own_etcd: EtcdServer, namespace: str
) -> None:
    await own_nats.stop()
    await own_etcd.stop()
    async with opened(own_nats.url, own_etcd.endpoint, namespace) as runtime:
        waiting = asyncio.ensure_future(runtime.nats())
        while not sample(runtime, "errors_total"):
            await asyncio.sleep(0.01)
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_a_full_subscription_drops_and_counts(nats_url: str, etcd_endpoint: str, namespace: str) -> None:
    async with opened(nats_url, etcd_endpoint, namespace) as runtime:
        client = await runtime.nats()
        await client.subscribe(f"{namespace}.load", pending_msgs_limit=1)
        while not sample(runtime, "slow_consumers_total"):
            await client.publish(f"{namespace}.load", b"x")
            await client.flush()


@pytest.mark.parametrize(
    ("subject", "headers"),
    [
        (b".\xff", None),
        (b".x", b"\xff"),
        (b".x", b"NATS/1.0\r\n"),
        (b".x", b"NATS/1.0 \xff\xff\r\n\r\n"),
        (b".x", b"NATS/1.0 404 \xff\r\n\r\n"),
    ],
)
async def test_a_message_that_cannot_be_decoded_does_not_make_the_connection_deaf(
    nats_url: str, etcd_endpoint: str, namespace: str, subject: bytes, headers: bytes | None
) -> None:
    async with opened(nats_url, etcd_endpoint, namespace) as runtime, raw_nats(nats_url) as raw:
        client = await runtime.nats()
        subscription = await client.subscribe(f"{namespace}.>")
        # A ping may overtake the subscription; a message of the same connection does not.
        await client.publish(f"{namespace}.subscribed")
        await subscription.next_msg(timeout=10)
        raw.publish(namespace.encode() + subject, b"one", headers)
        raw.publish(namespace.encode() + b".sound", b"two")
        await raw.flush()
        assert [(await subscription.next_msg(timeout=10)).data for _ in range(2)] == [b"one", b"two"]
        assert client.stats["reconnects"] == 0


async def test_a_stored_message_that_claims_to_be_a_status_is_delivered(
    nats_url: str, etcd_endpoint: str, namespace: str
) -> None:
    async with opened(nats_url, etcd_endpoint, namespace) as runtime, raw_nats(nats_url) as raw:
        client = await runtime.nats()
        js = client.jetstream()
        await js.add_stream(name=namespace, subjects=[f"{namespace}.>"])
        raw.publish(f"{namespace}.a".encode(), b"", b"NATS/1.0 404 No Messages\r\n\r\n")
        raw.publish(f"{namespace}.b\xff".encode("latin-1"), b"second")
        await raw.flush()
        subscription = await js.pull_subscribe(f"{namespace}.>", durable="reader")
        async with asyncio.timeout(10):
            found = [(await subscription.fetch(1))[0] for _ in range(2)]
        assert [message.data for message in found] == [b"", b"second"]
        assert [message.metadata.sequence.stream for message in found] == [1, 2]
