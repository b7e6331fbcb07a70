"""Remembers the prompts in flight when workers died, and refuses those that saw two deaths."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from hashlib import blake2b

from kvrouter.frontend.metrics import FrontendMetrics
from kvrouter.v1.errors import PoisonPrompt

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
