"""Free ports of the loopback interface for servers of tests and of the demo.

A port that was found free by binding port 0 and closing it again can be taken by any outgoing connection, or by another
test process, before its server starts. These ports are outside of the range that the kernel uses for outgoing
connections, and each process takes them from a block of its own.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

DEFAULT_HTTP_PORT = 8000
DEFAULT_GRPC_PORT = 8001
"""Ports of a Frontend that ``kvrouter up`` takes where they are free."""

_LOWEST = 12_288
_BLOCK = 256
_EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_DEFAULT_EPHEMERAL = 32_768


@dataclass(slots=True)
class _Block:
    """Ports of one process; the first one stays bound as long as the process lives, so that others see it is taken."""

    process: int
    claim: socket.socket
    first: int
    given: int = 0

    @property
    def ports(self) -> range:
        """All ports of the block."""
        return range(self.first, self.first + _BLOCK)

    def next_run(self, count: int) -> range:
        """Returns the next ports of the block, from its beginning again after its end."""
        if self.given + count >= _BLOCK:
            self.given = 0
        start = self.first + 1 + self.given
        self.given += count
        return range(start, start + count)


_block: _Block | None = None
_reserved: set[int] = set()


def reserve(*ports: int) -> None:
    """Keeps ports for servers that start later: ``free_ports`` takes none from their blocks."""
    global _block
    _reserved.update(ports)
    if _block is not None and not _reserved.isdisjoint(_block.ports):
        _block.claim.close()
        _block = None


def free_port() -> int:
    """Returns a loopback port on which nobody listens."""
    return free_ports(1)[0]


def free_ports(count: int) -> range:
    """Returns successive loopback ports on which nobody listens.

    Raises:
        OSError: no such ports are free.
    """
    global _block
    if _block is None or _block.process != os.getpid():
        _block = _claim_block()
    for _ in range(_BLOCK):
        ports = _block.next_run(count)
        if all(_is_free(port) for port in ports):
            return ports
    raise OSError(f"expected {count} free ports from {_block.first}, received none")


def _claim_block() -> _Block:
    highest = int(_EPHEMERAL_RANGE.read_text().split()[0]) if _EPHEMERAL_RANGE.exists() else _DEFAULT_EPHEMERAL
    for first in range(_LOWEST, highest - _BLOCK, _BLOCK):
        if not _reserved.isdisjoint(range(first, first + _BLOCK)):
            continue
        claim = socket.socket()
        try:
            claim.bind(("127.0.0.1", first))
        except OSError:
            claim.close()
        else:
            return _Block(os.getpid(), claim, first)
    raise OSError(f"expected a free block of {_BLOCK} ports from {_LOWEST} to {highest}, received none")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
