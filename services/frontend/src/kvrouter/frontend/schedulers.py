"""Which Scheduler a component's requests go to, and the links to them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Collection, Iterable
from typing import cast

import grpc.aio
from kvrouter.frontend.scheduler_link import SchedulerLink, SchedulerSource
from kvrouter.runtime.contracts import Scheduler
from kvrouter.runtime.discovery import Directory
from kvrouter.runtime.errors import DependencyAway
from kvrouter.runtime.rpc import open_channel, remote
from kvrouter.v1 import scheduler_pb2
from kvrouter.v1.names import ComponentName

_DESCRIPTOR = scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"]


def rendezvous(component: ComponentName, scheduler_ids: Iterable[str]) -> str | None:
    """The Scheduler that every client of a component agrees on without asking: the one with the highest hash.

    When one goes, only its components move. None where there is none.
    """

    def score(scheduler_id: str) -> bytes:
        return hashlib.sha256(f"{component}\0{scheduler_id}".encode()).digest()

    return max(scheduler_ids, key=score, default=None)


class LocalScheduler:
    """A Scheduler in the same process."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def pick(
        self,
        component: ComponentName,  # noqa: ARG002 - it serves them all
        avoid: Collection[str] = (),  # noqa: ARG002 - there is no other
    ) -> tuple[str, Scheduler] | None:
        """The one that there is."""
        return "local", self._scheduler

    def is_live(self, scheduler_id: str) -> bool:
        """It lives as long as this process."""
        return scheduler_id == "local"

    async def changed(self) -> None:
        """Never returns: the choice does not change."""
        await asyncio.Event().wait()


class RemoteSchedulers:
    """The Schedulers that are registered and ready."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._channels: dict[str, grpc.aio.Channel] = {}

    def pick(self, component: ComponentName, avoid: Collection[str] = ()) -> tuple[str, Scheduler] | None:
        """The component's Scheduler by rendezvous, and a stub of it; one to avoid only where there is no other."""
        live = self._directory.services("scheduler")
        ready = {key for key, registration in live.items() if registration.ready}
        scheduler_id = rendezvous(component, ready - set(avoid) or ready)
        if scheduler_id is None:
            return None
        endpoint = live[scheduler_id].endpoint
        channel = self._channels.get(endpoint)
        if channel is None:
            channel = self._channels[endpoint] = open_channel(endpoint)
        return scheduler_id, cast(Scheduler, remote(_DESCRIPTOR, channel))

    def is_live(self, scheduler_id: str) -> bool:
        """Whether it is registered and ready."""
        registration = self._directory.services("scheduler").get(scheduler_id)
        return registration is not None and registration.ready

    async def changed(self) -> None:
        """Returns at the next change of what is registered."""
        await self._directory.changed()

    async def aclose(self) -> None:
        """Closes the channels."""
        for channel in self._channels.values():
            await channel.close()


class SchedulerLinks:
    """A link for each component of the namespace. ``run`` must be running."""

    def __init__(self, directory: Directory, source: SchedulerSource, *, instance_id: str) -> None:
        self._directory = directory
        self._source = source
        self._instance_id = instance_id
        self._links: dict[ComponentName, SchedulerLink] = {}

    @property
    def live_bookings(self) -> int:
        """Bookings that are not freed, over all components."""
        return sum(link.live_bookings for link in self._links.values())

    def ready(self) -> bool:
        """Whether every component with workers has a session."""
        components = self._directory.components.items()
        return all(name in self._links and self._links[name].ready for name, view in components if view.workers)

    def link(self, component: ComponentName) -> SchedulerLink:
        """The link of a component.

        Raises:
            DependencyAway: the component was discovered this very moment.
        """
        link = self._links.get(component)
        if link is None:
            raise DependencyAway(f"no Scheduler of {component} is known yet")
        return link

    def schedulers(self) -> list[Scheduler]:
        """Every Scheduler that is some component's, each once."""
        picks = [self._source.pick(component) for component in self._directory.components]
        return list(dict(pick for pick in picks if pick is not None).values())

    def scheduler(self, component: ComponentName) -> Scheduler:
        """The Scheduler of a component.

        Raises:
            DependencyAway: none is live.
        """
        pick = self._source.pick(component)
        if pick is None:
            raise DependencyAway(f"no Scheduler of {component} is live")
        return pick[1]

    async def run(self) -> None:
        """Keeps a link for each component that is discovered, until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                for component in self._directory.components:
                    if component not in self._links:
                        self._links[component] = link = SchedulerLink(
                            component,
                            self._source,
                            session_id=f"{self._instance_id}.{component.name}",
                            client_name=self._instance_id,
                        )
                        group.create_task(link.run(), name=f"scheduler-link {component}")
                await self._directory.changed()
