"""Workers of engines in the process that routes to them: without etcd and NATS."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from kvrouter.net.local import LocalKeys, LocalMessages, LocalState, LocalSystem
from kvrouter.publisher.config import WorkerConfig
from kvrouter.publisher.publishing.transport import Link, Transport as Sender
from kvrouter.publisher.registration import Keys, check_descriptor
from kvrouter.publisher.snapshots.rank_file import Recovered
from kvrouter.v1.common_pb2 import Transport
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import ComponentDescriptor

_MAX_BATCH_BYTES = 1 << 20


class LocalWorkers:
    """Implements ``kvrouter.publisher.registration.System``."""

    def __init__(self, system: LocalSystem) -> None:
        self._system = system
        self._last: dict[tuple[ComponentName, int], int] = {}

    async def settle(self, config: WorkerConfig, former: int | None) -> tuple[int, Transport]:
        """Implements System. The descriptor of a component without workers is replaced.

        Raises:
            DescriptorMismatch: the worker does not fit those that its component has.
        """
        registry, component = self._system.registry, config.component
        desired = config.descriptor()
        desired.default_transport = Transport.TRANSPORT_CORE_NATS
        settled = registry.get(component.descriptor_key)
        if settled is not None and registry.has_any(component.workers_prefix):
            check_descriptor(component, ComponentDescriptor.FromString(settled), desired)
        else:
            registry.put(component.descriptor_key, desired.SerializeToString(deterministic=True))
        worker = (component, config.worker_id)
        incarnation = former or max(time.time_ns(), self._last.get(worker, 0) + 1)
        self._last[worker] = incarnation
        return incarnation, Transport.TRANSPORT_CORE_NATS

    def offer(self, config: WorkerConfig, states: Mapping[int, Recovered]) -> None:
        """Implements System. The Indexer of this process takes them when the worker registers."""
        for dp_rank, state in states.items():
            cursor = (state.incarnation, state.recorder.counts().next_event_id)
            offered = LocalState(cursor, state.partial, tuple(state.chunks))
            self._system.states.put(config.component, config.worker_id, dp_rank, offered)

    def keys(self, config: WorkerConfig, incarnation: int) -> Keys:  # noqa: ARG002 - nobody else has the worker's id
        """Implements System."""
        return LocalKeys(self._system.registry)

    def link(self, config: WorkerConfig) -> Link:  # noqa: ARG002 - all workers have the same one
        """Implements System."""
        return _LocalLink(self._system.messages)


class _LocalLink:
    """Implements Link, and the Sender of all workers: a batch is accepted once the Indexer has queued it."""

    connected = True
    room = _MAX_BATCH_BYTES

    def __init__(self, messages: LocalMessages) -> None:
        self._messages = messages

    async def run(self) -> None:
        """Implements Link."""
        await asyncio.Event().wait()

    async def publish(self, subject: str, payload: bytes) -> None:
        """Implements Link."""
        await self._messages.publish(subject, payload)

    def transport(self, kind: Transport, component: ComponentName) -> Sender:  # noqa: ARG002 - there is one only
        """Implements Link."""
        return self

    async def send(self, subject: str, payload: bytes, message_id: str | None) -> None:  # noqa: ARG002
        """Implements Sender."""
        await self._messages.publish(subject, payload)
