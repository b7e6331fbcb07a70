"""Chooses the model for the name that a client sends, by the file of models, which is followed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import structlog
from kvrouter.frontend.access.caller import current_grant
from kvrouter.frontend.access.following import changes
from kvrouter.frontend.request.current_choice import FALLS_BACK, ModelChoice, running_at
from kvrouter.frontend.request.model_pools import UNCONSTRAINED, can_take, of_pool
from kvrouter.frontend.request.model_rules import ModelFileError, ModelRule, ordered, read_model_rules
from kvrouter.frontend.request.served_models import ServedModels
from kvrouter.frontend.workers.health import WorkerHealth
from kvrouter.net.secret_files import file_version
from kvrouter.v1.errors import KvRouterError
from prometheus_client import CollectorRegistry, Counter, Gauge

log = structlog.get_logger(component="frontend")

_T = TypeVar("_T")


class ModelChoices:
    """The names in force. Without a file there are none, and each name is that of a model. ``run`` must be running."""

    def __init__(
        self, path: Path | None, models: ServedModels, health: WorkerHealth, registry: CollectorRegistry
    ) -> None:
        """Reads the file.

        Args:
            path: The file; None for none.
            models: The served models.
            health: The health of their workers.
            registry: Registry for the metrics.

        Raises:
            ModelFileError: it cannot be used.
        """
        self._path = path
        self._models = models
        self._health = health
        self._version = file_version(path or "")
        self._rejected = False
        self.rules: Mapping[str, ModelRule] = {} if path is None else read_model_rules(path)
        """The entries by name."""
        Gauge(
            "kvrouter_frontend_models_file_rejected",
            "1 while the file of models cannot be used and the former entries stay in force, otherwise 0.",
            registry=registry,
        ).set_function(lambda: int(self._rejected))
        self._chosen = Counter(
            "kvrouter_frontend_model_choices",
            "Attempts to serve a request whose model name is in the file of models. name is the requested one,"
            " model and pool (empty for any) are what was tried, reason is why: name, alias, canary or fallback.",
            ["name", "model", "reason", "pool"],
            registry=registry,
        )

    async def run(self) -> None:
        """Follows the file until cancelled."""
        if self._path is None:
            return
        async for _ in changes(self._path, self._version):
            try:
                self.rules = await asyncio.to_thread(read_model_rules, self._path)
            except ModelFileError as error:
                self._rejected = True
                log.error("models.rejected", cause=str(error), names=len(self.rules))
            else:
                self._rejected = False
                log.info("models.loaded", names=len(self.rules))

    def of(self, name: str, session: str, headers: Mapping[str, str] | None = None) -> tuple[ModelChoice, ...]:
        """Returns the models for a request that have ready workers, at least one, the preferred one first.

        If none has, it is the preferred one. Models that the caller may not use are left out. There are none for a
        name without an entry.

        Args:
            name: The name the client sent.
            session: Session of the request; empty for none.
            headers: Headers of the request; none for None.
        """
        rule = self.rules.get(name)
        if rule is None:
            return ()
        models = ordered(name, rule, session, headers or {}, random.random())
        usable = [each for each in models if self._models.may_use(each.model)]
        if not usable:
            return models[:1]  # Its error says that the caller may not use it.
        return tuple(each for each in usable if self._is_ready(each)) or (usable[0],)

    async def serve(
        self,
        choices: Sequence[ModelChoice],
        attempt: Callable[[str], Awaitable[_T]],
        *,
        begun: Callable[[], bool] = lambda: False,
    ) -> _T:
        """Runs a request at one model after another until one serves it.

        Args:
            choices: The models, at least one.
            attempt: Runs the request at a model.
            begun: Returns whether the client has output, so no other model may serve the request.

        Raises:
            KvRouterError: that of the last model, or one after which no other model is tried.
        """
        for index, choice in enumerate(choices[:-1]):
            try:
                return await self._attempt(choice, attempt, is_last=False)
            except FALLS_BACK as error:
                if begun():
                    raise
                further = choices[index + 1]
                log.info(
                    "request.falls_back",
                    name=choice.name,
                    left=choice.model,
                    left_pool=choice.pool,
                    model=further.model,
                    pool=further.pool,
                    cause=error.message,
                )
                if (grant := current_grant()) is not None:
                    grant.begin_again()
        return await self._attempt(choices[-1], attempt, is_last=True)

    async def _attempt(self, choice: ModelChoice, attempt: Callable[[str], Awaitable[_T]], *, is_last: bool) -> _T:
        self._chosen.labels(*choice).inc()
        with running_at(choice, is_last=is_last):
            return await attempt(choice.model)

    def first(self, name: str, session: str, headers: Mapping[str, str] | None = None) -> ModelChoice | None:
        """Returns the first of these models, which is counted; None for a name without an entry."""
        choices = self.of(name, session, headers)
        if not choices:
            return None
        self._chosen.labels(*choices[0]).inc()
        return choices[0]

    def _is_ready(self, choice: ModelChoice) -> bool:
        try:
            serving = self._models.resolve(choice.model)
            views = of_pool(serving.views, choice.pool)
        except KvRouterError:
            return False
        return any(
            can_take(worker, UNCONSTRAINED, serving.lora_name)
            for view in views
            for worker in self._health.healthy(view.name)
        )
