"""Where a worker registers and publishes."""

from __future__ import annotations

import time
from typing import Protocol

from kvrouter.net.etcd import AWAY, LeasedKeys, connect
from kvrouter.net.logs import get_logger
from kvrouter.publisher.config import WorkerConfig
from kvrouter.publisher.publishing.transport import Link, NatsLink
from kvrouter.publisher.registration import (
    begin_incarnation,
    companions,
    join_component,
    keep_incarnation,
    registered_incarnation,
    resume_incarnation,
)
from kvrouter.v1.common_pb2 import Transport
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random_exponential

log = get_logger(__name__)


class Keys(Protocol):
    """Registrations with the lifetime of a worker."""

    def put(self, key: str, value: bytes) -> None:
        """Sets the value of a key."""

    def stop(self) -> None:
        """Removes the keys, and lets ``run`` return."""

    async def run(self) -> None:
        """Keeps the keys until ``stop`` or cancellation."""

    @property
    def registered(self) -> bool:
        """Whether others see the keys, as far as is known."""
        ...

    @property
    def registrations(self) -> int:
        """How often all keys were written anew."""
        ...

    async def wait_registered(self) -> None:
        """Waits until others see the keys."""


class System(Protocol):
    """The system that a worker joins."""

    async def settle(self, config: WorkerConfig, former: int | None) -> tuple[int, Transport]:
        """Joins the component. Returns the incarnation, ``former`` if it can be resumed, and the transport.

        Raises:
            DescriptorMismatch: the worker does not fit its component.
        """
        ...

    def keys(self, config: WorkerConfig, incarnation: int) -> Keys:
        """Returns the worker's registrations, still without any."""
        ...

    def link(self, config: WorkerConfig) -> Link:
        """Returns the worker's way to the readers of its events and of its load."""
        ...


class EtcdAndNats:
    """Implements System with the etcd and the NATS of the worker's configuration."""

    async def settle(self, config: WorkerConfig, former: int | None) -> tuple[int, Transport]:
        """Implements System. Waits for etcd."""

        def tell(state: RetryCallState) -> None:
            if state.attempt_number == 1 and state.outcome is not None:
                log.warning("etcd.waiting", endpoints=str(config.etcd), error=str(state.outcome.exception()))

        async for attempt in AsyncRetrying(
            retry=retry_if_exception_type(AWAY), wait=wait_random_exponential(multiplier=0.2, max=3), before_sleep=tell
        ):
            with attempt:
                async with connect(config.etcd) as client:
                    descriptor = await join_component(client, config.component, config.descriptor())
                    transport = config.transport or descriptor.default_transport or Transport.TRANSPORT_DURABLE
                    if former and await resume_incarnation(client, config.component, config.worker_id, former):
                        return former, transport
                    begun = await begin_incarnation(client, config.component, config.worker_id, time.time_ns())
                    return begun, transport
        raise AssertionError("unreachable: the retry ends by return or by an exception")

    def keys(self, config: WorkerConfig, incarnation: int) -> Keys:
        """Implements System."""

        async def restore() -> None:
            """Restores the descriptor and the incarnation record, which etcd may have lost with the registration."""
            async with connect(config.etcd) as client:
                await join_component(client, config.component, config.descriptor())
                await keep_incarnation(client, config.component, config.worker_id, incarnation)

        return LeasedKeys(
            config.etcd,
            ttl_seconds=config.lease_ttl_seconds,
            on_registered=restore,
            incarnation_of=registered_incarnation,
            companions=companions(config.component, config.worker_id, incarnation),
        )

    def link(self, config: WorkerConfig) -> Link:
        """Implements System."""
        return NatsLink(config.nats, f"kvrouter-worker-{config.worker_id:016x}")
