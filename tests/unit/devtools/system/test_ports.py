from __future__ import annotations

import socket
import subprocess
import sys

import pytest
from kvrouter.devtools.system import ports as module
from kvrouter.devtools.system.ports import free_port, free_ports, reserve

TAKE = "from kvrouter.devtools.system.ports import free_ports; print(*free_ports(20)); input()"


def test_ports_are_free_and_never_given_twice_in_a_row() -> None:
    ports = [free_port() for _ in range(50)]
    assert len(set(ports)) == 50
    for port in ports:
        with socket.create_server(("127.0.0.1", port)):
            pass


def test_a_port_in_use_is_not_given() -> None:
    first = free_port()
    with socket.create_server(("127.0.0.1", first + 2)):
        successive = free_ports(3)
    assert first + 2 not in successive
    assert successive.stop - successive.start == 3


def test_a_reserved_port_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_reserved", set())
    reserved = free_port() + 1
    reserve(0, reserved)
    # More than a block has: they are given again from its beginning.
    assert reserved not in {free_port() for _ in range(300)}


def test_processes_never_receive_the_same_port() -> None:
    children = [
        subprocess.Popen([sys.executable, "-c", TAKE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    received = list(free_ports(20))
    for child in children:
        assert child.stdout is not None
        received += map(int, child.stdout.readline().split())
    for child in children:
        child.communicate("\n")
    assert len(set(received)) == 60
