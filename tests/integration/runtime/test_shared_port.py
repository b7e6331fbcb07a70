"""A port that several processes of one service share, and nobody else."""

from __future__ import annotations

import select
import socket

import pytest
from kvrouter.net.rpc.loop_server import BindFailed
from kvrouter.runtime.process.hosting import shared_port


def listener(port: int, *, share: bool) -> socket.socket:
    listening = socket.socket()
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(share))
        listening.bind(("127.0.0.1", port))
        listening.listen()
    except OSError:
        listening.close()
        raise
    return listening


def test_children_share_the_port_and_get_all_connections() -> None:
    with shared_port("127.0.0.1", 0) as port, listener(port, share=True) as one, listener(port, share=True) as other:
        for _ in range(40):
            with socket.create_connection(("127.0.0.1", port)):
                # A moment may pass between the connection and its arrival at a listener.
                (ready,), _, _ = select.select([one, other], [], [], 30)
                ready.accept()[0].close()


@pytest.mark.parametrize("children", [0, 1])
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", ""])  # noqa: S104 - refused
def test_another_service_is_refused_whether_or_not_a_child_listens(children: int, host: str) -> None:
    with shared_port("127.0.0.1", 0) as port:
        listening = [listener(port, share=True) for _ in range(children)]
        with pytest.raises(BindFailed), shared_port(host, port):
            pass
        with pytest.raises(OSError, match="in use"):
            listener(port, share=False)
        for each in listening:
            each.close()


def test_a_port_on_which_a_process_listens_is_refused() -> None:
    for share in (False, True):
        with listener(0, share=share) as other, pytest.raises(BindFailed):
            shared_port("127.0.0.1", other.getsockname()[1]).__enter__()


def test_a_port_can_be_taken_again_while_old_connections_linger() -> None:
    with shared_port("127.0.0.1", 0) as port, listener(port, share=True) as listening:
        client = socket.create_connection(("127.0.0.1", port))
        accepted, _ = listening.accept()
        accepted.close()  # The side that closes first keeps the port in TIME_WAIT.
        client.close()
    with shared_port("127.0.0.1", port) as again:
        assert again == port


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(BindFailed), shared_port("192.0.2.1", 0):
        pass
