"""Messages between the parts of one process, with the subjects that NATS would have."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol


class Message(Protocol):
    """A received message."""

    @property
    def subject(self) -> str:
        """Subject on which it was published."""

    @property
    def data(self) -> bytes:
        """Its content."""


Receiver = Callable[[Message], Awaitable[None]]


class Subscribed(Protocol):
    """A subscription."""

    async def unsubscribe(self) -> None:
        """Ends it."""


class LiveMessages(Protocol):
    """Where messages are received: the client of NATS, or ``LocalMessages``. What nobody receives is lost."""

    @property
    def is_closed(self) -> bool:
        """Whether it is closed for good."""

    async def subscribe(self, subject: str, *, cb: Receiver) -> Subscribed:
        """Awaits ``cb`` with each message on a subject, one after the other.

        Args:
            subject: The subject; ``*`` stands for any token, ``>`` at the end for all further ones.
            cb: Receives the messages. The next one is not read before it has returned.
        """


@dataclass(frozen=True, slots=True)
class LocalMessage:
    """Implements Message."""

    subject: str
    data: bytes


class LocalMessages:
    """Implements LiveMessages. Nothing waits here: ``publish`` returns when all receivers have taken the message."""

    is_closed = False

    def __init__(self) -> None:
        self._receivers: dict[LocalSubscription, tuple[list[str], Receiver]] = {}

    async def subscribe(self, subject: str, *, cb: Receiver) -> LocalSubscription:
        """Implements LiveMessages."""
        subscription = LocalSubscription(self)
        self._receivers[subscription] = subject.split("."), cb
        return subscription

    async def publish(self, subject: str, data: bytes) -> None:
        """Passes a message to all receivers of its subject."""
        tokens, message = subject.split("."), LocalMessage(subject, data)
        for pattern, receive in list(self._receivers.values()):
            if _matches(pattern, tokens):
                await receive(message)

    def forget(self, subscription: LocalSubscription) -> None:
        """Ends a subscription."""
        self._receivers.pop(subscription, None)


class LocalSubscription:
    """Implements Subscribed."""

    def __init__(self, messages: LocalMessages) -> None:
        self._messages = messages

    async def unsubscribe(self) -> None:
        """Implements Subscribed."""
        self._messages.forget(self)


def _matches(pattern: list[str], tokens: list[str]) -> bool:
    if pattern[-1] == ">":
        pattern, tokens = pattern[:-1], tokens[: len(pattern) - 1] if len(tokens) >= len(pattern) else []
    return len(pattern) == len(tokens) and all(
        each in ("*", token) for each, token in zip(pattern, tokens, strict=True)
    )
