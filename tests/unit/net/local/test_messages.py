"""Messages inside of one process go to the receivers of their subject."""

from __future__ import annotations

import pytest
from kvrouter.net.local import LocalMessages
from kvrouter.net.local.messages import Message


@pytest.mark.parametrize(
    ("subject", "is_received"),
    [
        ("a.b", False),
        ("a.b.live.1", True),
        ("a.b.live.1.2", True),
        ("a.b.live", False),
        ("a.c.live.1", False),
        ("x.a.b.live.1", False),
    ],
)
async def test_a_wildcard_at_the_end_stands_for_one_token_or_more(subject: str, is_received: bool) -> None:
    assert await _is_received("a.b.live.>", subject) is is_received


@pytest.mark.parametrize(
    ("subject", "is_received"), [("a.b.c", True), ("a.x.c", True), ("a.c", False), ("a.b.d", False)]
)
async def test_a_star_stands_for_one_token(subject: str, is_received: bool) -> None:
    assert await _is_received("a.*.c", subject) is is_received


async def test_an_ended_subscription_receives_nothing_and_others_go_on() -> None:
    messages = LocalMessages()
    received: list[tuple[int, bytes]] = []

    async def first(message: Message) -> None:
        received.append((1, message.data))

    async def second(message: Message) -> None:
        received.append((2, message.data))

    ended = await messages.subscribe("a", cb=first)
    await messages.subscribe("a", cb=second)
    await messages.publish("a", b"both")
    await ended.unsubscribe()
    await messages.publish("a", b"one")
    assert received == [(1, b"both"), (2, b"both"), (2, b"one")]


async def _is_received(pattern: str, subject: str) -> bool:
    messages = LocalMessages()
    received: list[str] = []

    async def take(message: Message) -> None:
        received.append(message.subject)

    await messages.subscribe(pattern, cb=take)
    await messages.publish(subject, b"")
    return received == [subject]
