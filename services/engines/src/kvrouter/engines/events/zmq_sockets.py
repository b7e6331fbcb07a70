"""Sockets on which vLLM and SGLang publish KV events, for any content.

Messages go out on a PUB socket. A subscriber requests missed messages from the replay socket.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import KW_ONLY, dataclass
from types import TracebackType
from typing import Self

import zmq
from kvrouter.engines.events.zmq_frames import END_OF_REPLAY, MalformedMessage, encode_sequence, read_replay_request
from kvrouter.net.logs import get_logger
from kvrouter.publisher.errors import InvalidConfig

log = get_logger(__name__)

_POLL_MS = 200


@dataclass(eq=False)
class EventSockets:
    """Publishes the messages of one rank while the context lasts, from any thread, without waiting for a consumer."""

    endpoint: str
    """Address to listen on, such as tcp://*:5557; once it listens, with the port taken for *."""
    _: KW_ONLY
    replay_endpoint: str = ""
    """Address to answer replay requests on, likewise; empty for none."""
    connects: bool = False
    """Whether the consumer listens on ``endpoint`` and the publisher connects to it."""
    topic: str = ""
    """Topic of the messages."""
    buffer_steps: int = 10_000
    """Number of messages kept for replay."""
    high_water_mark: int = 100_000
    """Messages queued for a consumer; further ones are dropped."""

    def __post_init__(self) -> None:
        self._encoded_topic = self.topic.encode()
        self._lock = threading.Lock()
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=self.buffer_steps)
        self._next_sequence = 0
        self._context = zmq.Context()
        self._events: zmq.Socket[bytes] | None = None
        self._replays: threading.Thread | None = None
        self._stopping = threading.Event()

    def __enter__(self) -> Self:
        """Listens, or connects.

        Raises:
            InvalidConfig: an address cannot be listened on or connected to.
        """
        self._events, self.endpoint = self._open(zmq.PUB, self.endpoint, self.high_water_mark, self.connects)
        if self.replay_endpoint:
            # A ROUTER would drop the rest of a long answer at its mark; what is kept bounds the answer.
            socket, self.replay_endpoint = self._open(zmq.ROUTER, self.replay_endpoint, high_water_mark=0)
            self._replays = threading.Thread(target=self._answer_replays, args=(socket,), name="kv-replay", daemon=True)
            self._replays.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        if self._replays is not None:
            self._replays.join()
        with self._lock:
            self._events = None
        self._context.destroy(linger=0)

    def publish(self, payload: bytes) -> None:
        """Publishes a message."""
        with self._lock:
            sequence, self._next_sequence = self._next_sequence, self._next_sequence + 1
            self._sent.append((sequence, payload))
            if self._events is not None:
                # A PUB socket drops what a consumer cannot take; it does not block.
                self._events.send_multipart([self._encoded_topic, encode_sequence(sequence), payload], zmq.DONTWAIT)

    def _open(
        self, kind: int, endpoint: str, high_water_mark: int, connects: bool = False
    ) -> tuple[zmq.Socket[bytes], str]:
        """Returns a socket, and the address of its listener or peer."""
        socket = self._context.socket(kind)
        socket.set_hwm(high_water_mark)
        try:
            if connects:
                socket.connect(endpoint)
                return socket, endpoint
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise InvalidConfig(f"cannot {'connect to' if connects else 'listen on'} {endpoint}: {error}") from None
        return socket, socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def _answer_replays(self, socket: zmq.Socket[bytes]) -> None:
        while not self._stopping.is_set():
            if not socket.poll(_POLL_MS):
                continue
            frames = socket.recv_multipart()
            try:
                requester, first = read_replay_request(frames)
            except MalformedMessage as error:
                log.warning("replay.malformed_request", error=str(error))
                continue
            with self._lock:
                messages = [message for message in self._sent if message[0] >= first]
            for sequence, payload in messages:
                socket.send_multipart([requester, b"", self._encoded_topic, encode_sequence(sequence), payload])
            socket.send_multipart([requester, b"", b"", encode_sequence(END_OF_REPLAY), b""])
