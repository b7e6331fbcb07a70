"""Connects to the first live address of a server (after RFC 8305, Happy Eyeballs)."""

from __future__ import annotations

import asyncio
import re
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

_ADDRESS = re.compile(
    r"(?:\[([0-9A-Fa-f.]*:[0-9A-Fa-f:.]*(?:%[^\s\]]+)?)\]"  # an IPv6 address, perhaps with a zone
    r"|([^\s\[\]:/?#@]+)):([0-9]{1,5})"
)
_MAX_PORT = 65_535
_DELAY_SECONDS = 0.25
"""Time after which the next address is tried as well, as RFC 8305 recommends."""


class _Connection(Protocol):
    def close(self) -> None: ...


_C = TypeVar("_C", bound=_Connection)


def host_and_port(target: str) -> tuple[str, int]:
    """Returns host and port of an address of the form host:port.

    Raises:
        ValueError: the target has another form.
    """
    address = _ADDRESS.fullmatch(target)
    if address is None or (port := int(address[3])) > _MAX_PORT:
        raise ValueError(f"expected an address of the form host:port, received {target}")
    return address[1] or address[2], port


def family_of(host: str) -> socket.AddressFamily | None:
    """Returns the family of an IP address; None for a name."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host)
        except (OSError, ValueError):
            continue
        return family
    return None


async def addresses_of(host: str, port: int) -> list[str]:
    """Returns the IP addresses of a host, those of the two families by turns.

    Raises:
        OSError: the name cannot be resolved.
    """
    if family_of(host.partition("%")[0]) is not None:  # A zone is no part of the address.
        return [host]
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    families: dict[int, list[str]] = {}
    for family, _, _, _, address in found:
        families.setdefault(family, []).append(str(address[0]))
    ordered: dict[str, None] = {}
    for index in range(len(found)):
        ordered.update((each[index], None) for each in families.values() if index < len(each))
    return list(ordered)


async def first_connection(
    addresses: Sequence[str], connect: Callable[[str], Awaitable[_C]], within_seconds: float
) -> _C:
    """Returns the first connection made, and closes others.

    Args:
        addresses: The addresses, the preferred one first.
        connect: Connects to an address.
        within_seconds: Time in which every address must be tried, seconds.

    Raises:
        ExceptionGroup: every attempt has failed.
    """
    delay = min(_DELAY_SECONDS, within_seconds / 2 / len(addresses))
    waiting = deque(addresses)
    attempts: set[asyncio.Task[_C]] = set()
    errors: list[Exception] = []
    winner: _C | None = None
    pending: set[asyncio.Task[_C]] = set()
    try:
        while winner is None and (waiting or pending):
            if waiting:
                attempt = asyncio.ensure_future(connect(waiting.popleft()))
                attempts.add(attempt)
                pending.add(attempt)
            done, pending = await asyncio.wait(
                pending, timeout=delay if waiting else None, return_when=asyncio.FIRST_COMPLETED
            )
            for attempt in done:
                error = attempt.exception()
                if error is None:
                    winner = attempt.result() if winner is None else winner
                elif isinstance(error, Exception):
                    errors.append(error)
    finally:
        for attempt in attempts:
            attempt.cancel()
        if pending:
            await asyncio.wait(pending)
        made = [each.result() for each in attempts if each.done() and not each.cancelled() and not each.exception()]
        for connection in made:
            if connection is not winner:
                connection.close()
    if winner is None:
        raise ExceptionGroup("no address could be connected", errors)
    return winner
