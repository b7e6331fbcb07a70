"""Remembers the prompts in flight when workers died, and refuses those that saw two deaths."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b

import msgspec
import structlog
from kvrouter.frontend.metrics import FrontendMetrics
from kvrouter.frontend.packed_prompt import with_content
from kvrouter.frontend.workers.failures import HANGS, WorkerFailure, WorkerFate
from kvrouter.runtime.deadline import Deadline
from kvrouter.v1.common_pb2 import MultimodalHash
from kvrouter.v1.errors import DeadlineExceeded, PoisonPrompt

log = structlog.get_logger(component="frontend")

MAX_ENTRIES = 10_000
"""Maximum number of prompts to remember; a further one replaces the one whose time ends first."""
MAX_DEATHS = 2
"""Deaths of workers ending a request, and after which its prompt is refused."""
KEY_BYTES = 16
"""Size of a prompt's key."""
_MAX_DOUBTS = 8
"""Maximum number of workers remembered of one prompt that may yet die of it."""

_ANSWERS = 2
"""Answered probes after which a worker has survived a request: one may be answered ahead of the request."""
_PAUSE_SECONDS = 0.1
"""Time between these probes, seconds."""


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
class SuspectPrompt:
    """A prompt that was in flight when a worker died or stopped answering."""

    expires: float
    workers: tuple[str, ...] = ()
    """Workers that died, at most ``MAX_DEATHS``."""
    doubts: list[WorkerFate] = field(default_factory=list)
    """Workers that stopped answering while they ran it."""
    trial: object | None = None
    """The request of this process that alone may run it; None if none does."""
    survived: bool = False
    """Whether a request with it has completed since the latest of these: then several may run."""


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
        self.entries: OrderedDict[bytes, SuspectPrompt] = OrderedDict()
        """Prompts that harmed workers, by key, in the order in which they expire."""

    def __len__(self) -> int:
        return len(self.entries)

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
        entry = self.suspect(key)
        workers = () if entry is None else entry.workers
        if not self._refusal_seconds or worker in workers or len(workers) == MAX_DEATHS:
            return False
        self._renewed(key).workers = (*workers, worker)
        return True

    def doubt(self, key: bytes, fate: WorkerFate) -> None:
        """Records that a worker, which may yet die, stopped answering while it ran the prompt."""
        if self._refusal_seconds and not fate.is_known:
            doubts = self._renewed(key).doubts
            if fate not in doubts:
                doubts[:] = [*(each for each in doubts if not each.is_known), fate][-_MAX_DOUBTS:]

    def suspect(self, key: bytes) -> SuspectPrompt | None:
        """Returns what is known of a prompt; None for one that harmed no worker lately."""
        self._expire(self._clock())
        return self.entries.get(key)

    def refusal(self, message: str) -> PoisonPrompt:
        """Returns the error of a request refused or ended for deaths, and counts it."""
        if self._metrics is not None:
            self._metrics.poison_prompts.inc()
        return PoisonPrompt(message)

    def refused_seconds(self, key: bytes) -> float:
        """Returns for how long a prompt is refused, seconds; 0 if it is not."""
        entry = self.suspect(key)
        return 0.0 if entry is None or len(entry.workers) < MAX_DEATHS else entry.expires - self._clock()

    def _renewed(self, key: bytes) -> SuspectPrompt:
        """Returns the entry of a prompt that harms a worker now."""
        entry = self.entries.setdefault(key, SuspectPrompt(0.0))
        entry.expires, entry.survived = self._clock() + self._refusal_seconds, False
        self.entries.move_to_end(key)
        if len(self.entries) > MAX_ENTRIES:
            self.entries.popitem(last=False)
        return entry

    def _expire(self, now: float) -> None:
        while self.entries:
            key = next(iter(self.entries))
            if self.entries[key].expires > now:
                return
            del self.entries[key]


class RequestDeaths(msgspec.Struct, eq=False):
    """Counts the deaths of one request over all of its attempts, and notes them for its prompt."""

    prompts: PoisonPrompts
    """The prompts that saw deaths."""
    tenant: str
    """Tenant of the request; empty for none."""
    model: str
    """Its base model."""
    prompt: bytes
    """The prompt the client sent, a packed buffer."""
    content: Sequence[MultimodalHash] = ()
    """Hashes of its multimodal content."""
    key: bytes = b""
    """Key of the prompt; empty until it matters."""
    failures: list[WorkerFailure] = []
    """Failures of which the worker died, or may have died."""

    def __repr__(self) -> str:
        """Returns the model and the failures, without the prompt."""
        return f"RequestDeaths({self.model!r}, {self.failures!r})"

    @property
    def workers(self) -> list[str]:
        """The workers that died."""
        return [each.fate.worker for each in self.failures if each.fate is not None and each.fate.died]

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
            for each in self.failures
        )

    def add(self, failure: WorkerFailure) -> None:
        """Adds a failure, whose worker may have died or may yet die."""
        if failure.fate is not None:
            self.failures.append(failure)
            self._watch(failure.fate, may_hang=failure.cause in HANGS)

    def abandon(self, fate: WorkerFate) -> None:
        """Adds a worker that does not answer, and at which the request ends for another reason."""
        self._watch(fate, may_hang=True)

    async def settle(self, answers: Callable[[str], Awaitable[bool]], deadline: Deadline) -> None:
        """Waits until the request may go to a worker, or to a further one, without a third one dying of its prompt.

        A worker that ran it and may yet die counts as a death until it answers probes. After a death one request of
        this process at a time runs the prompt.

        Args:
            answers: Returns whether the worker at an address is registered and answers a probe soon.
            deadline: Deadline of the request.

        Raises:
            PoisonPrompt: two workers died.
            DeadlineExceeded: the deadline has passed.
        """
        if not (self.failures or self.prompts.entries):
            return
        answered: Counter[str] = Counter()
        try:
            async with asyncio.timeout(deadline.before_answer()):
                while not self._may_go(doubts := self._doubts(answered)):
                    await asyncio.sleep(_PAUSE_SECONDS)
                    replies = await asyncio.gather(*(answers(fate.endpoint) for fate in doubts))
                    answered.update(fate.worker for fate, reply in zip(doubts, replies, strict=True) if reply)
        except TimeoutError:
            raise DeadlineExceeded(
                "the deadline has passed while the request waited to learn whether workers died of its prompt"
            ) from None

    def end(self, *, survived: bool) -> None:
        """Ends the request; ``survived`` if it is complete, so its last worker lives."""
        if self.key and (suspect := self.prompts.suspect(self.key)) is not None and suspect.trial is self:
            suspect.trial = None
            suspect.survived = suspect.survived or survived

    async def shared(self) -> None:
        """Returns when other Frontends know of the deaths, or cannot soon."""
        if self.count:
            await self.prompts.shared()

    def check(self) -> None:
        """Checks that the request may go to a worker, or to a further one.

        Raises:
            PoisonPrompt: two workers died while they ran it, or its tenant's requests with the same prompt.
        """
        if self.failures and self.count >= MAX_DEATHS:
            log.warning("request.ended_by_deaths", tenant=self.tenant, workers=self.workers)
            raise self.prompts.refusal(f"{MAX_DEATHS} workers died while they ran the request")
        # Nearly always there is none, so the hash of the prompt is computed only if it matters.
        if self.prompts.entries and (seconds := self.prompts.refused_seconds(self._find_key())):
            raise self.prompts.refusal(
                f"{MAX_DEATHS} workers died while they ran this prompt: it is refused for {seconds:.0f} s more"
            )

    def _watch(self, fate: WorkerFate, *, may_hang: bool) -> None:
        key = self._find_key()
        fate.on_death(partial(self.prompts.note, key))
        if may_hang:
            self.prompts.doubt(key, fate)

    def _doubts(self, answered: Counter[str]) -> list[WorkerFate]:
        """Returns the fates of the workers that may yet die, without those that have answered."""
        suspect = self.prompts.suspect(self._find_key())
        fates = [each.fate for each in self.failures if each.fate is not None]
        return [
            fate
            for fate in dict.fromkeys([*fates, *(() if suspect is None else suspect.doubts)])
            if not fate.is_known and answered[fate.worker] < _ANSWERS
        ]

    def _may_go(self, doubts: list[WorkerFate]) -> bool:
        """Returns whether at most one other worker can die, and takes the trial of a suspect prompt.

        Raises:
            PoisonPrompt: as for ``check``.
        """
        self.check()
        suspect = self.prompts.suspect(self._find_key())
        dead = {*self.workers, *(() if suspect is None else suspect.workers)}
        at_risk = dead | {fate.worker for fate in doubts}
        if len(at_risk) >= MAX_DEATHS:
            return False
        if suspect is not None and at_risk and not suspect.survived:
            if suspect.trial not in (None, self):
                return False
            suspect.trial = self
        return True

    def _find_key(self) -> bytes:
        if not self.key:
            self.key = prompt_key(self.tenant, self.model, with_content(self.prompt, self.content))
        return self.key
