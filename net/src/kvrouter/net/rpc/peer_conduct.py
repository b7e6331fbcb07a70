"""Closes connections with floods of calls without a credential.

A refused call costs a server as much as an idle admitted one. Calls are served in the order in which they come, so a
flood of them would delay everybody. The socket of a connection that floods is shut down.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import IPv6Address, ip_address
from urllib.parse import unquote

from kvrouter.net.logs import get_logger

log = get_logger(__name__)

_CALLS_PER_SECOND = 10.0
"""Calls without a credential of one connection for good, each second: probes and tools make fewer."""
_BURST = 32.0
"""Calls without a credential of one connection at once."""
_FLOOD_BURST = 2.0
_FLOOD_CALLS_PER_SECOND = 0.2
"""The same while such calls of all connections are a flood: together, a thousand connections make fewer than the server
can refuse."""
_FLOOD_PER_SECOND = 500
"""Calls without a credential of all connections in a second to count as a flood."""
_MAX_PEERS = 16_384
"""Connections remembered; the least recently used is forgotten."""
_SWEEP_SECONDS = 0.2
"""Least interval at which connections are closed: each time, all descriptors are looked at."""

_Address = tuple[str, int]


class PeerConduct:
    """Counts calls by connection. One with an admitted call is never closed: it may carry many clients."""

    def __init__(self) -> None:
        self.port = 0
        """Port of the server. The other connections of this process may come from the same ports of a peer."""
        self.closed = 0
        """Number of closed connections."""
        self._admitted: OrderedDict[str, None] = OrderedDict()
        self._allowances: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Calls a connection may still make, and when they were computed."""
        self._second = 0
        self._in_second = 0
        self._in_second_before = 0
        self._closing: dict[str, _Address] = {}
        """Peers whose connections are to be closed, unless one makes an admitted call before."""
        self._sweeping: asyncio.TimerHandle | None = None

    def opened(self, peer: str, admitted: bool) -> None:
        """Records a peer's attempt to open a call stream."""
        if admitted:
            self.admitted(peer)
        else:
            self.without_credential(peer)

    def admitted(self, peer: str) -> None:
        """Records an admitted call of a peer, as gRPC names it."""
        if peer not in self._admitted:
            self._allowances.pop(peer, None)
            self._closing.pop(peer, None)
            self._admitted[peer] = None
            if len(self._admitted) > _MAX_PEERS:
                self._admitted.popitem(last=False)

    def without_credential(self, peer: str) -> bool:
        """Records a call for which a peer showed no valid credential. Too many of them end the connection.

        Returns whether it is about to be closed.
        """
        if peer in self._admitted:
            return False
        now = time.monotonic()
        self._count(int(now))
        is_flood = max(self._in_second, self._in_second_before) > _FLOOD_PER_SECOND
        burst, rate = (_FLOOD_BURST, _FLOOD_CALLS_PER_SECOND) if is_flood else (_BURST, _CALLS_PER_SECOND)
        left, then = self._allowances.pop(peer, (burst, now))
        left = min(burst, left + (now - then) * rate) - 1
        if left < 0:
            return self._close(peer)
        self._allowances[peer] = left, now
        if len(self._allowances) > _MAX_PEERS:
            self._allowances.popitem(last=False)
        return False

    def _count(self, second: int) -> None:
        if second != self._second:
            self._in_second_before = self._in_second if second == self._second + 1 else 0
            self._second, self._in_second = second, 0
        self._in_second += 1

    def _close(self, peer: str) -> bool:
        address = _address_of(peer)
        if address is None:
            return False
        if self._sweeping is None:
            self._sweeping = asyncio.get_running_loop().call_later(_SWEEP_SECONDS, self._sweep)
        self._closing[peer] = address
        return True

    def _sweep(self) -> None:
        self._sweeping = None
        closing = set(self._closing.values())
        self._closing.clear()
        if not closing:
            return
        closed = close_connections(closing, self.port)
        self.closed += closed
        log.warning("connections.closed", connections=closed, peer=min(closing)[0], cause="too many calls refused")


def close_connections(peers: set[_Address], port: int) -> int:
    """Shuts down the connections of a local port with one of the addresses as their peer; returns how many."""
    closed = 0
    for name in os.listdir("/dev/fd"):
        try:
            # A duplicate cannot become another connection meanwhile.
            descriptor = os.dup(int(name))
        except OSError:
            continue
        try:
            with socket.socket(fileno=descriptor) as connection:
                if connection.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                if connection.getsockname()[1] == port and _plain(connection.getpeername()) in peers:
                    connection.shutdown(socket.SHUT_RDWR)
                    closed += 1
        except OSError as error:
            if error.errno == errno.ENOTSOCK:
                os.close(descriptor)
    return closed


def _plain(name: tuple[str, int]) -> _Address:
    return _normal(name[0]), name[1]


def _normal(host: str) -> str:
    address = ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return str(mapped or address)


def _address_of(peer: str) -> _Address | None:
    """Returns host and port of a peer such as ``ipv4:127.0.0.1:5`` or ``ipv6:%5B::1%5D:5``; None for another kind."""
    kind, _, rest = unquote(peer).partition(":")
    host, _, port = rest.rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdigit():
        return None
    try:
        return _normal(host.strip("[]")), int(port)
    except ValueError:
        return None


MAX_CALLS = 256
"""Default of the maximum number of such calls."""


class EvictableCalls:
    """Calls without a credential, which may be ended at any time."""

    def __init__(self, limit: int = MAX_CALLS) -> None:
        self.limit = limit
        self.evicted = 0
        """Number of calls ended because a further one came."""
        self._timeouts: dict[asyncio.Timeout, None] = {}

    def __len__(self) -> int:
        """Returns the number of running calls."""
        return len(self._timeouts)

    @contextmanager
    def running(self, timeout: asyncio.Timeout) -> Iterator[None]:
        """Counts a call while the context lasts. ``timeout``, in which the call runs, ends when the call is evicted."""
        if len(self._timeouts) >= self.limit:
            oldest = next(iter(self._timeouts))
            del self._timeouts[oldest]
            self.evicted += 1
            oldest.reschedule(0.0)
        self._timeouts[timeout] = None
        try:
            yield
        finally:
            self._timeouts.pop(timeout, None)
