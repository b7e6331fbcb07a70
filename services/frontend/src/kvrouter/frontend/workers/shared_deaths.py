"""Tells other Frontends of the deaths this one has seen, over Core NATS, and learns of theirs.

The processes of one Frontend share them in the same way. A lost message costs one death more at most, so none is
acknowledged or repeated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import nats.errors
import structlog
from kvrouter.frontend.workers.poison_prompts import KEY_BYTES, PoisonPrompts
from kvrouter.net.decoding import Quarantine, Undecodable, decode_message
from kvrouter.v1.sync_pb2 import WorkerDeathNotice
from nats.aio.client import Client
from nats.aio.msg import Msg

log = structlog.get_logger(component="frontend")

_SHARING_SECONDS = 0.5
"""Longest time for which a request that saw a death waits until others were told, seconds."""
MAX_UNSENT = 16_384
"""Maximum number of notices that wait to be sent; further ones are dropped. A death notes each prompt in flight."""
_MAX_WORKER_CHARACTERS = 512


class SharedDeaths:
    """Connects PoisonPrompts to NATS. ``run`` must be running."""

    def __init__(
        self, prompts: PoisonPrompts, connect: Callable[[], Awaitable[Client]], subject: str, quarantine: Quarantine
    ) -> None:
        """Does not connect yet.

        Args:
            prompts: The shared prompts.
            connect: Returns the connection once NATS is reachable.
            subject: Subject of the notices of all Frontends of the namespace.
            quarantine: Reports malformed messages.
        """
        self._prompts = prompts
        self._connect = connect
        self._subject = subject
        self._quarantine = quarantine
        self._unsent: asyncio.Queue[WorkerDeathNotice] = asyncio.Queue(MAX_UNSENT)
        self._client: Client | None = None
        prompts.on_death = self._send
        prompts.shared = self._shared

    @property
    def unsent(self) -> int:
        """Number of notices that wait to be sent."""
        return self._unsent.qsize()

    async def run(self) -> None:
        """Sends and receives until cancelled."""
        client = await self._connect()
        await client.subscribe(self._subject, cb=self._take, pending_msgs_limit=MAX_UNSENT)
        self._client = client
        while True:
            notice = await self._unsent.get()
            try:
                await client.publish(self._subject, notice.SerializeToString())
            except nats.errors.Error as error:
                log.warning("death_notice.unsent", cause=repr(error))
            finally:
                self._unsent.task_done()

    async def _shared(self) -> None:
        """Returns when the server has received all notices, or after half a second.

        Otherwise a client sending the prompt again at once, to another Frontend, would be ahead of them.
        """
        if self._client is None or not self._client.is_connected:
            return
        with suppress(TimeoutError, nats.errors.Error):
            async with asyncio.timeout(_SHARING_SECONDS):
                await self._unsent.join()
                await self._client.flush()

    def _send(self, key: bytes, worker: str) -> None:
        if not self._unsent.full():
            self._unsent.put_nowait(WorkerDeathNotice(prompt_key=key, worker=worker))

    async def _take(self, message: Msg) -> None:
        try:
            notice = decode_message(WorkerDeathNotice, message.data)
            if len(notice.prompt_key) != KEY_BYTES or not 0 < len(notice.worker) <= _MAX_WORKER_CHARACTERS:
                received = f"{len(notice.prompt_key)} bytes and a worker of {len(notice.worker)} characters"
                raise Undecodable(
                    "out_of_range",
                    f"expected a key of {KEY_BYTES} bytes and a worker of 1 to {_MAX_WORKER_CHARACTERS} characters, "
                    f"received {received}",
                )
        except Undecodable as error:
            self._quarantine.reject("nats", self._subject, error)
        else:
            self._prompts.learn(notice.prompt_key, notice.worker)
