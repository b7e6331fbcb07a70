"""The model chosen for the name in the request of the current task."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import StrEnum
from typing import NamedTuple

from kvrouter.v1.errors import AllBusy, KvRouterError, NotReady, NoWorkers, UnknownModel

FALLS_BACK = (UnknownModel, NoWorkers, NotReady, AllBusy)
"""Errors after which another model serves a request: no worker has begun with it."""


class Reason(StrEnum):
    """Why a model serves a request."""

    NAME = "name"
    ALIAS = "alias"
    CANARY = "canary"
    FALLBACK = "fallback"


class ModelChoice(NamedTuple):
    """A model for a request."""

    name: str
    """The name the client sent."""
    model: str
    reason: Reason
    pool: str = ""
    """Name of the component of the model that serves; empty for any."""

    @property
    def text(self) -> str:
        """How model and pool were chosen, as Explain shows it; empty if the model is the one the client named."""
        pool = f", pool {self.pool}" if self.pool else ""
        return "" if self.reason is Reason.NAME and not pool else f"{self.reason} for {self.name}{pool}"


class _Current(NamedTuple):
    choice: ModelChoice
    is_last: bool


_CURRENT: ContextVar[_Current | None] = ContextVar("kvrouter_model_choice", default=None)


@contextmanager
def running_at(choice: ModelChoice, *, is_last: bool) -> Iterator[None]:
    """Makes a choice that of this task, and of tasks started meanwhile, while the context lasts.

    ``is_last``: whether no other model may serve the request.
    """
    token = _CURRENT.set(_Current(choice, is_last))
    try:
        yield
    finally:
        _CURRENT.reset(token)


def choice_text() -> str:
    """Returns how the model was chosen; empty if it is the one the client named."""
    current = _CURRENT.get()
    return "" if current is None else current.choice.text


def chosen_model(name: str) -> str:
    """Returns the model that was chosen for the name in the request: the name itself without an entry in the file."""
    current = _CURRENT.get()
    return name if current is None else current.choice.model


def chosen_pool() -> str:
    """Returns the name of the component that was chosen with the model; empty for any."""
    current = _CURRENT.get()
    return "" if current is None else current.choice.pool


def named_model() -> str:
    """Returns the name that the client sent, if it has an entry in the file of models; otherwise an empty text."""
    current = _CURRENT.get()
    return "" if current is None else current.choice.name


def has_fallback() -> bool:
    """Returns whether another model may serve the request."""
    current = _CURRENT.get()
    return current is not None and not current.is_last


def falls_back(error: KvRouterError) -> bool:
    """Returns whether another model serves the request after an error."""
    return has_fallback() and isinstance(error, FALLS_BACK)
