"""The workers that died while they ran one request."""

from __future__ import annotations

from functools import partial

import structlog
from kvrouter.frontend.workers.failures import HANGS, WorkerFailure
from kvrouter.frontend.workers.poison_prompts import MAX_DEATHS, PoisonPrompts, prompt_key

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
