"""Prompts in flight when workers died: those that saw two deaths are refused, here and at other Frontends.

Frontends tell each other of deaths over Core NATS, and so do the processes of one Frontend. A lost message costs one
death more at most, so none is acknowledged or repeated.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b

import nats.errors
import structlog
from kvrouter.frontend.metrics import FrontendMetrics
from kvrouter.frontend.workers.failures import HANGS, WorkerFailure
from kvrouter.net.decoding import Quarantine, Undecodable, decode_message
from kvrouter.v1.errors import PoisonPrompt
from kvrouter.v1.sync_pb2 import WorkerDeathNotice
from nats.aio.client import Client
from nats.aio.msg import Msg

MAX_ENTRIES = 10_000
"""Maximum number of prompts to remember; a further one replaces the one whose time ends first."""
MAX_DEATHS = 2
"""Deaths of workers ending a request, and after which its prompt is refused."""
KEY_BYTES = 16
"""Size of a prompt's key."""


def prompt_key(tenant: str, model: str, prompt: bytes) -> bytes:
    """Returns the key of a tenant's prompt: BLAKE2b over the lengths and bytes of tenant, model and packed tokens."""
    digest = blake2b(digest_size=KEY_BYTES)
    for part in (tenant.encode(), model.encode(), prompt):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


async def _shared() -> None:
    """Returns at once, where there is nobody to tell."""


@dataclass(slots=True)
class _Entry:
    workers: tuple[str, ...]
    """Workers that died, at most ``MAX_DEATHS``."""
    expires: float


class PoisonPrompts:
    """Prompts by key, each with the workers that died while they ran it."""

    def __init__(
        self,
        refusal_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        metrics: FrontendMetrics | None = None,
    ) -> None:
        """Knows no prompt yet.

        Args:
            refusal_seconds: Time for which a death is remembered and a prompt is refused, seconds; 0 refuses none.
            clock: Returns seconds.
            metrics: Counts deaths and refusals; None to count none.
        """
        self._metrics = metrics
        self.on_death: Callable[[bytes, str], None] = lambda _key, _worker: None
        """Called with key and worker of each death this process has seen itself."""
        self.shared: Callable[[], Awaitable[None]] = _shared
        """Returns when other Frontends were told of these deaths, or cannot be soon."""
        self._refusal_seconds = refusal_seconds
        self._clock = clock
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        """In the order in which they expire."""

    def __len__(self) -> int:
        return len(self._entries)

    def note(self, key: bytes, worker: str) -> None:
        """Records a death this process has seen: ``worker`` died with the prompt in flight."""
        if self.learn(key, worker):
            if self._metrics is not None:
                self._metrics.worker_deaths.inc()
            self.on_death(key, worker)

    def learn(self, key: bytes, worker: str) -> bool:
        """Records a death this or another process has seen. Returns whether it is new.

        Each worker counts once, however many requests with the prompt it ran, and whoever saw it die.
        """
        if not self._refusal_seconds:
            return False
        now = self._clock()
        self._expire(now)
        entry = self._entries.get(key)
        workers = () if entry is None else entry.workers
        if worker in workers or len(workers) == MAX_DEATHS:
            return False
        self._entries[key] = _Entry((*workers, worker), now + self._refusal_seconds)
        self._entries.move_to_end(key)
        if len(self._entries) > MAX_ENTRIES:
            self._entries.popitem(last=False)
        return True

    def refusal(self, message: str) -> PoisonPrompt:
        """Returns the error of a request refused or ended for deaths, and counts it."""
        if self._metrics is not None:
            self._metrics.poison_prompts.inc()
        return PoisonPrompt(message)

    def refused_seconds(self, key: bytes) -> float:
        """Returns for how long a prompt is refused, seconds; 0 if it is not."""
        now = self._clock()
        self._expire(now)
        entry = self._entries.get(key)
        return 0.0 if entry is None or len(entry.workers) < MAX_DEATHS else entry.expires - now

    def _expire(self, now: float) -> None:
        while self._entries:
            key = next(iter(self._entries))
            if self._entries[key].expires > now:
                return
            del self._entries[key]


log = structlog.get_logger(component="frontend")


class RequestDeaths:
    """Counts the deaths of one request over all of its attempts, and notes them for its prompt."""

    def __init__(self, prompts: PoisonPrompts, tenant: str, model: str, prompt: bytes) -> None:
        """Counts none yet.

        Args:
            prompts: The prompts that saw deaths.
            tenant: Tenant of the request; empty for none.
            model: Its base model.
            prompt: The prompt the client sent, a packed buffer.
        """
        self._prompts = prompts
        self._tenant = tenant
        self._model = model
        self._prompt = prompt
        self._key = b""
        self._failures: list[WorkerFailure] = []
        """Failures of which the worker died, or may have died."""

    @property
    def workers(self) -> list[str]:
        """The workers that died."""
        return [each.fate.worker for each in self._failures if each.fate is not None and each.fate.died]

    @property
    def count(self) -> int:
        """Number of workers that died."""
        return len(self.workers)

    @property
    def next_is_last(self) -> bool:
        """Whether one more death ends the request."""
        return self.count + 1 >= MAX_DEATHS

    def may_leave(self, worker_id: int, cause: str) -> bool:
        """Returns whether the request may leave its worker for a cause, as in ``WorkerFailure``.

        A worker that hangs may die of the request. Another one gets it only if that would be the first death.
        """
        if cause not in HANGS:
            return True
        return not self.count and not any(
            each.cause in HANGS and each.worker_id != worker_id and each.fate is not None and not each.fate.is_known
            for each in self._failures
        )

    def add(self, failure: WorkerFailure) -> None:
        """Adds a failure, whose worker may have died or may yet die."""
        if failure.fate is not None:
            self._failures.append(failure)
            failure.fate.on_death(partial(self._prompts.note, self._find_key()))

    async def shared(self) -> None:
        """Returns when other Frontends know of the deaths, or cannot soon."""
        if self.count:
            await self._prompts.shared()

    def check(self) -> None:
        """Checks that the request may go to a worker, or to a further one.

        Raises:
            PoisonPrompt: two workers died while they ran it, or its tenant's requests with the same prompt.
        """
        if self.count >= MAX_DEATHS:
            log.warning("request.ended_by_deaths", tenant=self._tenant, workers=self.workers)
            raise self._prompts.refusal(f"{MAX_DEATHS} workers died while they ran the request")
        # Nearly always there is none, so the hash of the prompt is computed only if it matters.
        if len(self._prompts) and (seconds := self._prompts.refused_seconds(self._find_key())):
            raise self._prompts.refusal(
                f"{MAX_DEATHS} workers died while they ran this prompt: it is refused for {seconds:.0f} s more"
            )

    def _find_key(self) -> bytes:
        if not self._key:
            self._key = prompt_key(self._tenant, self._model, self._prompt)
        return self._key


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
