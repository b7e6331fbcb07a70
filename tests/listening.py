"""The sockets on which processes listen, as the kernel tells it (Linux)."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterable
from pathlib import Path

_LISTEN = "0A"


def listening_addresses(process_ids: Iterable[int]) -> dict[str, int]:
    """Returns address → process id of every TCP port on which these processes and their descendants listen."""
    found = {}
    for process_id in _with_descendants(process_ids):
        sockets = _sockets(process_id)
        for family in ("tcp", "tcp6"):
            for line in Path(f"/proc/{process_id}/net/{family}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN and fields[9] in sockets:
                    found[_address(fields[1])] = process_id
    return found


def _with_descendants(process_ids: Iterable[int]) -> set[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue  # it ended meanwhile
            children.setdefault(parent, []).append(int(entry.name))
    found: set[int] = set()
    waiting = list(process_ids)
    while waiting:
        process_id = waiting.pop()
        found.add(process_id)
        waiting += children.get(process_id, [])
    return found


def _sockets(process_id: int) -> set[str]:
    """Returns the inodes of a process's sockets."""
    inodes = set()
    for descriptor in Path(f"/proc/{process_id}/fd").iterdir():
        try:
            target = os.readlink(descriptor)
        except OSError:
            continue  # it was closed meanwhile
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    return inodes


def _address(encoded: str) -> str:
    host, _, port = encoded.partition(":")
    raw = b"".join(struct.pack("=I", int(host[at : at + 8], 16)) for at in range(0, len(host), 8))
    text = socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw)
    text = text.removeprefix("::ffff:")  # an IPv4 address, as gRPC listens on it
    return f"[{text}]:{int(port, 16)}" if ":" in text else f"{text}:{int(port, 16)}"
