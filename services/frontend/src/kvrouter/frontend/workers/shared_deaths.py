"""Tells other Frontends of the deaths this one has seen, over Core NATS, and learns of theirs.

The processes of one Frontend share them in the same way. A Frontend that learns of a death confirms it, by the same
notice with its own id. A notice that a registered Frontend has not confirmed is sent again for some seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field

import nats.errors
import structlog
from kvrouter.frontend.workers.poison_prompts import KEY_BYTES, PoisonPrompts
from kvrouter.net.decoding import Quarantine, Undecodable, decode_message
from kvrouter.v1.sync_pb2 import WorkerDeathNotice
from nats.aio.client import Client
from nats.aio.msg import Msg

log = structlog.get_logger(component="frontend")

_SHARING_SECONDS = 3.0
"""Longest time for which a request that saw a death waits until others know of it, seconds.

Longer than a busy process pauses: a Frontend that learns of a death too late may lose a third worker. A Frontend that
is gone delays such requests until its registration expires."""
_REPEAT_SECONDS = 0.25
"""Interval at which unconfirmed notices are sent again, seconds."""
_LIFE_SECONDS = 10.0
"""Time after which an unconfirmed notice is given up, seconds."""
MAX_UNCONFIRMED = 16_384
"""Maximum number of unconfirmed notices; further ones are dropped. A death notes each prompt in flight."""
_MAX_NAME_CHARACTERS = 512


@dataclass(slots=True)
class _Unconfirmed:
    """A death that not all Frontends are known to know."""

    notice: bytes
    until: float
    """Time at which it is given up, seconds."""
    confirmed: set[str] = field(default_factory=set)
    """Ids of the Frontends that know it."""


class SharedDeaths:
    """Connects PoisonPrompts to NATS. ``run`` must be running."""

    def __init__(
        self,
        prompts: PoisonPrompts,
        connect: Callable[[], Awaitable[Client]],
        subject: str,
        quarantine: Quarantine,
        *,
        frontend_id: str,
        frontends: Callable[[], Collection[str]],
    ) -> None:
        """Does not connect yet.

        Args:
            prompts: The shared prompts.
            connect: Returns the connection once NATS is reachable.
            subject: Subject of the notices of all Frontends of the namespace.
            quarantine: Reports malformed messages.
            frontend_id: Instance id of this Frontend.
            frontends: Returns the instance ids of the registered Frontends.
        """
        self._prompts = prompts
        self._connect = connect
        self._subject = subject
        self._quarantine = quarantine
        self._id = frontend_id
        self._frontends = frontends
        self._unconfirmed: dict[tuple[bytes, str], _Unconfirmed] = {}
        """Deaths by prompt and worker."""
        self._noted = asyncio.Event()
        """Set when a death was noted that is not sent yet."""
        self._known = asyncio.Event()
        """Set when all deaths are confirmed or given up."""
        self._known.set()
        self._client: Client | None = None
        prompts.on_death = self._note
        prompts.shared = self._shared

    @property
    def unconfirmed(self) -> int:
        """Number of notices that not all Frontends have confirmed."""
        return len(self._unconfirmed)

    async def run(self) -> None:
        """Sends and receives until cancelled."""
        client = await self._connect()
        await client.subscribe(self._subject, cb=self._take)
        self._client = client
        while True:
            await self._noted.wait()
            self._noted.clear()
            for key, each in list(self._unconfirmed.items()):
                await self._publish(client, each.notice)
                self._forget_if_known(key)
            if self._unconfirmed:
                with suppress(TimeoutError):
                    async with asyncio.timeout(_REPEAT_SECONDS):
                        await self._known.wait()
                self._noted.set()

    async def _publish(self, client: Client, notice: bytes) -> None:
        try:
            await client.publish(self._subject, notice)
        except nats.errors.Error as error:
            log.warning("death_notice.unsent", cause=repr(error))

    async def _shared(self) -> None:
        """Returns when all Frontends know of all deaths, after 3 s, or at once while NATS is away.

        Otherwise a client sending the prompt again at once, to another Frontend, would be ahead of them.
        """
        if self._client is None or not self._client.is_connected:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(_SHARING_SECONDS):
                await self._known.wait()

    def _note(self, key: bytes, worker: str) -> None:
        if len(self._unconfirmed) >= MAX_UNCONFIRMED:
            return
        notice = WorkerDeathNotice(prompt_key=key, worker=worker, frontend_id=self._id).SerializeToString()
        self._unconfirmed[key, worker] = _Unconfirmed(notice, time.monotonic() + _LIFE_SECONDS)
        self._known.clear()
        self._noted.set()

    async def _take(self, message: Msg) -> None:
        try:
            notice = decode_message(WorkerDeathNotice, message.data)
            if len(notice.prompt_key) != KEY_BYTES or not 0 < len(notice.worker) <= _MAX_NAME_CHARACTERS:
                received = f"{len(notice.prompt_key)} bytes and a worker of {len(notice.worker)} characters"
                raise Undecodable(
                    "out_of_range",
                    f"expected a key of {KEY_BYTES} bytes and a worker of 1 to {_MAX_NAME_CHARACTERS} characters, "
                    f"received {received}",
                )
        except Undecodable as error:
            self._quarantine.reject("nats", self._subject, error)
            return
        if notice.frontend_id == self._id:
            return
        self._prompts.learn(notice.prompt_key, notice.worker)
        key = notice.prompt_key, notice.worker
        if (sent := self._unconfirmed.get(key)) is not None:
            sent.confirmed.add(notice.frontend_id)
            self._forget_if_known(key)
        if not notice.confirms and self._client is not None:
            notice.frontend_id, notice.confirms = self._id, True
            await self._publish(self._client, notice.SerializeToString())

    def _forget_if_known(self, key: tuple[bytes, str]) -> None:
        """Forgets a death all Frontends have confirmed, or which is given up."""
        sent = self._unconfirmed.get(key)
        if sent is not None:
            missing = [each for each in self._frontends() if each != self._id and each not in sent.confirmed]
            if not missing or time.monotonic() >= sent.until:
                del self._unconfirmed[key]
        if not self._unconfirmed:
            self._known.set()
