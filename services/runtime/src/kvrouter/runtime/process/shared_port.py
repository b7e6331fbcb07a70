"""Reserves a port for several processes of one service, and for nobody else.

With ``SO_REUSEPORT`` the kernel spreads connections over all processes that listen on a port. It would admit any
process of the same user. So the port is first taken exclusively, and then held by a socket that does not listen.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from kvrouter.net.rpc.server import BindFailed

_Address = tuple[socket.AddressFamily, tuple[str, int]]


@contextmanager
def shared_port(host: str, port: int) -> Iterator[int]:
    """Holds a port while the context lasts; yields its number. Child processes listen on it with ``SO_REUSEPORT``.

    Args:
        host: Address to listen on; empty for all addresses.
        port: The port; 0 chooses a free one.

    Raises:
        BindFailed: another process listens on the port or holds it, or the address is not one of this machine's.
    """
    with ExitStack() as held:
        try:
            for family, address in _addresses(host, port):
                holder = _hold(family, (address[0], port))
                held.enter_context(holder)
                port = holder.getsockname()[1]
        except OSError:
            raise BindFailed(f"{host}:{port}") from None
        yield port


def _addresses(host: str, port: int) -> list[_Address]:
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((family, (str(address[0]), port)) for family, _, _, _, address in found))


def _hold(family: socket.AddressFamily, address: tuple[str, int]) -> socket.socket:
    with _bound(family, address) as exclusive:
        # Listening fails if another process listens, whatever options its socket has.
        exclusive.listen(1)
        exclusive.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder = _bound(family, (address[0], exclusive.getsockname()[1]), socket.SO_REUSEPORT)
    # Without this option, a later socket must share the port knowingly, even while no child listens.
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    return holder


def _bound(family: socket.AddressFamily, address: tuple[str, int], *options: int) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Connections of an earlier process may linger on the port.
        for option in (socket.SO_REUSEADDR, *options):
            bound.setsockopt(socket.SOL_SOCKET, option, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound
