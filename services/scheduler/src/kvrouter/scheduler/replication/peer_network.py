"""Replica sync over gRPC between Schedulers that know each other's addresses. Each follows all others by itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import cast

import structlog
from kvrouter.net.backoff import Backoff
from kvrouter.net.tls import Tls
from kvrouter.runtime.contracts import Replica, Stream
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.requests import component_name
from kvrouter.runtime.rpc import not_awaited_by_drain, open_channel, remote
from kvrouter.scheduler.identifiers import component_message
from kvrouter.scheduler.replication.channel import NotSent, SyncChannel
from kvrouter.scheduler.replication.state_transfer import StateBroken, chunks
from kvrouter.v1 import sync_pb2 as pb
from kvrouter.v1.errors import BadRequest, KvRouterError, UnknownComponent
from kvrouter.v1.names import ComponentName

log = structlog.get_logger(component="scheduler")

GRACE_SECONDS = 3.0
"""Time without a message after which a peer's bookings are dropped, seconds. Its requests end with its connections."""
MAX_PEERS = 64
"""Most peers that follow this Scheduler."""
MAX_QUEUED_EVENTS = 65_536
"""Events that wait for a peer; further ones are dropped, which it notices as a gap."""
REPLICA_SERVICE = pb.DESCRIPTOR.services_by_name["ReplicaService"]
"""The service of a ``PeerNetwork``."""
_EVENTS_TOGETHER = 256
_STATE_SECONDS = 30.0
_RETRY_SECONDS = (0.1, 1.0)  # first and longest pause between connections
_UNKNOWN, _AWAY = "", "-"


@dataclass(slots=True)
class _Peer:
    address: str
    id: str = _UNKNOWN
    """Its Scheduler's id; "-" after a failed connection."""
    stub: Replica | None = None
    """While it is connected."""
    heard_at: float = 0.0


class PeerNetwork:
    """Implements Network, and the gRPC service with which the others follow this Scheduler."""

    def __init__(
        self,
        addresses: Sequence[str],
        scheduler_id: str,
        tls: Tls | None,
        *,
        heartbeat_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        """Does not connect yet.

        Args:
            addresses: Those of the peers' gRPC servers. This Scheduler's own may be among them, and is left out.
            scheduler_id: Id of this Scheduler.
            tls: Encrypts connections; None for plain text.
            heartbeat_seconds: Interval of the peers' heartbeats.
            clock: Returns seconds.
        """
        self._peers = [_Peer(address) for address in addresses]
        self._scheduler_id = scheduler_id
        self._tls = tls
        self._silence_seconds = max(GRACE_SECONDS, 3 * heartbeat_seconds)
        self._clock = clock
        self._channels: dict[ComponentName, SyncChannel] = {}
        self._followers: set[asyncio.Queue[pb.ReplicaSyncEvent]] = set()

    @property
    def connected(self) -> int:
        """Number of connected peers."""
        return sum(peer.stub is not None for peer in self._peers)

    @property
    def most_queued(self) -> int:
        """Largest number of events that wait for one peer."""
        return max((queue.qsize() for queue in self._followers), default=0)

    async def run(self) -> None:
        """Follows the peers until cancelled."""
        async with asyncio.TaskGroup() as group:
            for peer in list(self._peers):
                group.create_task(self._follow(peer), name=f"peer {peer.address}")

    async def open(self) -> None:
        """Implements Network. Events are for those that follow at the moment."""

    def transport(self, component: ComponentName) -> PeerTransport:
        """Implements Network."""
        return PeerTransport(self, component)

    def live(self) -> Collection[str]:
        """Implements Network."""
        now = self._clock()
        return [each.id for each in self._peers if each.stub and now - each.heard_at < self._silence_seconds]

    def expected(self) -> Collection[str] | None:
        """Implements Network."""
        if any(peer.id == _UNKNOWN for peer in self._peers):
            return None
        return [peer.id for peer in self._peers if peer.stub is not None]

    def attach(self, channel: SyncChannel) -> None:
        """Passes received events of a channel's component to it."""
        self._channels[channel.component] = channel

    def detach(self, channel: SyncChannel) -> None:
        """Ends ``attach``."""
        self._channels.pop(channel.component, None)

    def tell(self, event: pb.ReplicaSyncEvent) -> None:
        """Sends an event to all followers.

        Raises:
            NotSent: a follower has too many events to read.
        """
        full = [queue for queue in self._followers if queue.full()]
        for queue in self._followers.difference(full):
            queue.put_nowait(event)
        if full:
            raise NotSent(f"{len(full)} peers have {MAX_QUEUED_EVENTS} events to read")

    def stub_of(self, scheduler_id: str) -> Replica:
        """Returns the connection to a Scheduler.

        Raises:
            StateBroken: it is not connected.
        """
        for peer in self._peers:
            if peer.id == scheduler_id and peer.stub is not None:
                return peer.stub
        raise StateBroken("it is not connected")

    @not_awaited_by_drain
    async def follow(self, request: pb.FollowRequest, *, deadline: Deadline) -> Stream[pb.FollowResponse]:  # noqa: ARG002
        """Yields the events of this Scheduler from now on, after a response without any.

        Raises:
            BadRequest: it has too many followers.
        """
        if len(self._followers) >= MAX_PEERS:
            raise BadRequest(f"expected at most {MAX_PEERS} peers, received another", advice="Run fewer processes.")
        queue: asyncio.Queue[pb.ReplicaSyncEvent] = asyncio.Queue(MAX_QUEUED_EVENTS)
        self._followers.add(queue)
        try:
            for channel in self._channels.values():
                channel.announce()
            yield pb.FollowResponse(scheduler_id=self._scheduler_id)
            while True:
                events = [await queue.get()]
                while not queue.empty() and len(events) < _EVENTS_TOGETHER:
                    events.append(queue.get_nowait())
                yield pb.FollowResponse(scheduler_id=self._scheduler_id, events=events)
        finally:
            self._followers.discard(queue)

    async def get_bookings(
        self,
        request: pb.GetBookingsRequest,
        *,
        deadline: Deadline,  # noqa: ARG002
    ) -> Stream[pb.GetBookingsResponse]:
        """Yields the bookings of this Scheduler.

        Raises:
            UnknownComponent: it has no such component.
        """
        component = component_name(request.component)
        channel = self._channels.get(component)
        if channel is None:
            raise UnknownComponent(component)
        for chunk in chunks(channel.replicas):
            yield pb.GetBookingsResponse(chunk=chunk)

    async def _follow(self, peer: _Peer) -> None:
        backoff = Backoff(*_RETRY_SECONDS)
        while True:
            try:
                async with open_channel(peer.address, tls=self._tls, role="scheduler") as channel:
                    stub = cast(Replica, remote(REPLICA_SERVICE, channel))
                    request = pb.FollowRequest(scheduler_id=self._scheduler_id)
                    async with aclosing(stub.follow(request, deadline=Deadline.never())) as responses:
                        async for response in responses:
                            if response.scheduler_id == self._scheduler_id:
                                self._peers.remove(peer)
                                return
                            await self._take(peer, stub, response)
                            backoff.succeeded()
                cause = "it closed the connection"
            except KvRouterError as error:
                cause = error.message
            finally:
                was_connected, peer.stub, peer.id = peer.stub is not None, None, peer.id or _AWAY
            if was_connected or not backoff.failures:
                log.warning("peer.away", address=peer.address, cause=cause, consequence="its bookings are dropped soon")
            await asyncio.sleep(backoff.failed())

    async def _take(self, peer: _Peer, stub: Replica, response: pb.FollowResponse) -> None:
        if peer.stub is None:
            log.info("peer.connected", address=peer.address, scheduler_id=response.scheduler_id)
        peer.stub, peer.id, peer.heard_at = stub, response.scheduler_id, self._clock()
        for event in response.events:
            channel = self._channels.get(component_name(event.component))
            if channel is not None:
                channel.take(event)
            await asyncio.sleep(0)  # Many events would occupy the event loop.


class PeerTransport:
    """Implements Transport."""

    def __init__(self, network: PeerNetwork, component: ComponentName) -> None:
        self._network = network
        self._component = component

    @property
    def is_connected(self) -> bool:
        """Implements Transport. A peer that connects later asks for the state."""
        return True

    @asynccontextmanager
    async def receiving(self, channel: SyncChannel) -> AsyncIterator[None]:
        """Implements Transport."""
        self._network.attach(channel)
        try:
            yield
        finally:
            self._network.detach(channel)

    async def send(self, event: pb.ReplicaSyncEvent) -> None:
        """Implements Transport."""
        self._network.tell(event)

    async def state_of(self, scheduler_id: str) -> AsyncGenerator[pb.SyncStateResponse]:
        """Implements Transport."""
        stub = self._network.stub_of(scheduler_id)
        request = pb.GetBookingsRequest(component=component_message(self._component))
        async with aclosing(stub.get_bookings(request, deadline=Deadline.after(_STATE_SECONDS))) as responses:
            async for response in responses:
                yield response.chunk
