"""A NATS client for refusals, and for messages with undecodable subjects and headers.

The client library gives a connection up for good when a server ends it with an error, such as after a change of its
password. This one connects again.

The library decodes subjects and headers in its read loop and stops reading at a failure. The connection then receives
nothing until its pings time out, and a redelivered stream message stops it again.

A server pings a client whose first PING is late. The library then stays in state CONNECTING and never sends anything.
This client answers, and is connected.

A flush of the library may be answered before the server has a subscription that was made before it. This client sends
the PING of a flush after everything that waits to be sent.

The library delivers all it has read before other tasks run. This client takes a turn of the event loop for each
message. It awaits the callback of a subscription when it has read the message, where the library hands each message to
a task, which costs more than most callbacks do. So a callback must not wait for an answer of NATS.

The library reads its socket in a task, which takes a turn of the event loop for each read. While no earlier message
waits, a receiver (``receive_at_once``) gets messages directly from the socket.

Of headers it parses only those with a status of the server. kvrouter reads no others, and to parse the id
and the stream of each event took longer than to apply the event.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from kvrouter.core import read_nats_messages
from kvrouter.core.interface import NatsMessage
from kvrouter.net.budgets import loop_budget
from kvrouter.net.nats.access import NatsAccess
from nats.aio.client import PING_PROTO, Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error, SecureConnRequiredError
from nats.protocol.parser import AWAITING_CONTROL_LINE, Parser

_MESSAGE_US = 50
"""CPU time to receive and handle a small message, microseconds."""
_BYTES_PER_US = 100
_AT_ONCE_BYTES = 1 << 14
"""Size of a read from which on its messages go through the read loop: they are many, or large."""
_JETSTREAM_DELIVERY = b"$JS.ACK."
_STATUS = "Status"
_STATUS_LINE = b"NATS/1.0 "
_ESCAPED = "backslashreplace"
"""How bytes that are not UTF-8 are decoded."""
_REFUSALS = ("authorization violation", "authentication")
"""Words of errors for a refused identity."""
_OPERATIONS = ("permissions violation", "stale connection")
"""Words of errors the library handles itself."""


class NatsRefused(Error):
    """NATS does not admit this process."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"NATS refused the identity of this process: {reason.strip()}; check --nats-user, --nats-password-file,"
            " --nats-token-file, --nats-nkey-file or --nats-credentials-file, and the accounts of the server"
        )


_T = TypeVar("_T")

ReceiveAtOnce = Callable[[str, str, bytes], bool]
"""Gets the subject, reply subject and content of a message, and returns whether it takes it."""


class _MessageParser(Parser):
    """Reads whole messages without the patterns of the library, which take longer than most callbacks."""

    nc: TolerantClient
    is_idle = False
    """Whether the read loop waits, and has handled all that was read before."""

    async def parse(self, data: bytes = b"") -> None:
        """Handles what was received. Leaves all but messages, and messages in several parts, to the library."""
        self.is_idle = False
        at = 0
        for end, message in self._messages(data):
            at = end
            await self.nc._process_msg(*message)  # noqa: SLF001
        if at < len(data):
            await super().parse(data[at:])
        self.is_idle = True

    def precede(self, reader: asyncio.StreamReader) -> None:
        """Offers messages to their receivers before ``reader`` gets them, while the read loop waits.

        The reader gets the rest, from the first message on that no receiver takes.
        """
        feed = reader.feed_data

        def feed_rest(data: bytes) -> None:
            if self.is_idle and len(data) < _AT_ONCE_BYTES:
                at = 0
                for end, message in self._messages(data):
                    if not self.nc.take(*message):
                        break
                    at = end
                if at == len(data):
                    return
                data = data[at:]
            self.is_idle = False
            feed(data)

        reader.feed_data = feed_rest  # type: ignore[assignment, method-assign]

    def _messages(self, data: bytes) -> list[tuple[int, NatsMessage]]:
        """Returns the whole messages at the beginning of ``data``, and where each ends."""
        # After a read that ended behind a control line, the library awaits its message with an empty buffer.
        is_between = self.state == AWAITING_CONTROL_LINE and not self.buf
        return read_nats_messages(data) if is_between else []


class TolerantClient(Client):
    """Delivers every message, with its headers if they have a status. Escapes undecodable bytes of its subject."""

    def __init__(self, access: NatsAccess | None = None) -> None:
        """``access`` has the certificates; pass its ``servers`` and ``options()`` to ``connect``."""
        super().__init__()
        self._ps = self._parser = _MessageParser(self)
        self._receivers: dict[int, ReceiveAtOnce] = {}
        self._access = access
        self._gone = asyncio.Event()

    async def on_closed(self) -> None:
        """Notes the end of the connection; pass it to ``connect`` as ``closed_cb``."""
        self._gone.set()

    async def wait_closed(self) -> None:
        """Returns when the connection is closed, by this process or for good by the library."""
        await self._gone.wait()

    @property
    def ssl_context(self) -> ssl.SSLContext:
        """Certificates for the next connection, which may have been renewed since the last one."""
        context = None if self._access is None else self._access.ssl_context()
        return super().ssl_context if context is None else context

    async def connect(self, *args: Any, **kwargs: Any) -> None:
        """Connects, as ``Client.connect`` does."""
        self._budget = loop_budget()
        await or_cancelled(super().connect(*args, **kwargs))

    async def request(self, *args: Any, **kwargs: Any) -> Msg:
        """Sends a request and returns the reply, as ``Client.request`` does."""
        return await or_cancelled(super().request(*args, **kwargs))

    async def flush(self, *args: Any, **kwargs: Any) -> None:
        """Waits until the server has handled all messages and subscriptions, as ``Client.flush`` does."""
        await or_cancelled(super().flush(*args, **kwargs))

    def receive_at_once(self, subscription: Subscription, receive: ReceiveAtOnce) -> None:
        """Lets ``receive`` take messages of a subscription directly from the socket, while no earlier message waits.

        It must not block. The callback of the subscription gets all statuses, and the messages that ``receive`` does
        not take or raises an exception for.
        """
        self._receivers[subscription._id] = receive  # noqa: SLF001 - no public name

    def take(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> bool:
        """Returns whether a receiver took a message at once."""
        receive = self._receivers.get(sid)
        if receive is None or (headers and headers.startswith(_STATUS_LINE)) or not self._budget.take(_cost_us(data)):
            return False
        try:
            is_taken = receive(subject.decode("utf-8", _ESCAPED), reply.decode("utf-8", _ESCAPED), data)
        except Exception:
            return False  # The callback gets the message, and its error is reported.
        if is_taken:
            self.stats["in_msgs"] += 1
            self.stats["in_bytes"] += len(data)
        return is_taken

    def _remove_sub(self, sid: int, max_msgs: int = 0) -> None:
        super()._remove_sub(sid, max_msgs)
        self._receivers.pop(sid, None)

    async def _read_loop(self) -> None:
        reader = getattr(self._transport, "_io_reader", None)
        if reader is not None:
            self._parser.precede(reader)
        try:
            await super()._read_loop()
        finally:
            self._parser.is_idle = False

    async def _send_ping(self, future: asyncio.Future[Any] | None = None) -> None:
        # The library writes a PING at once, ahead of commands that wait for its flusher. Its PONG cannot confirm them.
        self._pongs.append(asyncio.Future() if future is None else future)
        self._pending.append(PING_PROTO)
        self._pending_data_size += len(PING_PROTO)
        await self._flush_pending()

    async def _flush_pending(self, *args: Any, **kwargs: Any) -> Any:
        return await or_cancelled(super()._flush_pending(*args, **kwargs))

    def _connect_command(self) -> bytes:
        # The library would send the password in plain text to a server that does not ask for TLS.
        if self._access is not None and self._access.encrypted and not self._server_info.get("tls_required"):
            raise SecureConnRequiredError
        if self._nkeys_seed:
            # The library would show the first key forever, with signatures of the newest one.
            self._setup_nkeys_seed_connect()
        command: bytes = super()._connect_command()
        return command

    async def _process_connect_init(self) -> None:
        try:
            await super()._process_connect_init()
        except Error as error:
            if _is_refusal(str(error)):
                raise _typed(str(error)) from None
            raise
        # PINGs that the last connection did not send may still wait. Their flushes are over, so their PONGs would
        # answer flushes of this connection.
        unsent = len(self._pending)
        self._pending = [command for command in self._pending if command != PING_PROTO]
        self._pending_data_size -= (unsent - len(self._pending)) * len(PING_PROTO)
        if self.is_connecting and self._transport and not self._transport.at_eof():
            # The server has accepted CONNECT. It pings first if two seconds have passed since the connection began, and
            # the library, which expects the PONG for its own PING, would never send on this connection.
            self._status = Client.CONNECTED
            self._pongs.append(asyncio.Future())  # That PONG is still to come, and no flush asked for it.
            await self._process_ping()

    async def _process_err(self, err_msg: str) -> None:
        if any(text in err_msg for text in _OPERATIONS):
            await super()._process_err(err_msg)
            return
        error = _typed(err_msg)
        await self._error_cb(error)
        await self._process_op_err(error)

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        cost_us = _cost_us(data)
        if not self._budget.take(cost_us):
            await self._budget.turn(cost_us)
        subscription = self._subs.get(sid)
        receive = None if subscription is None or subscription._jsi else subscription._cb  # noqa: SLF001 - no public names
        if receive is None:
            await super()._process_msg(sid, subject, reply, data, headers)  # type: ignore[arg-type] # None for none
            return
        self.stats["in_msgs"] += 1
        self.stats["in_bytes"] += len(data)
        parsed = await self._process_headers(headers) if headers and headers.startswith(_STATUS_LINE) else None
        message = self._build_message(sid, subject, reply, data, parsed)
        try:
            await receive(message)
        except Exception as error:
            await self._error_cb(error)

    async def _process_headers(self, headers: bytes | None) -> dict[str, str] | None:
        if headers is None or not headers.startswith(_STATUS_LINE):
            return None
        try:
            parsed: dict[str, str] | None = await super()._process_headers(headers)
        except (ValueError, IndexError):
            return None
        return parsed

    def _build_message(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: dict[str, str] | None
    ) -> Msg:
        # Only the server itself sends statuses, and those need no acknowledgement. The library would skip a stored
        # message that has this header, and the server would deliver it again forever.
        if headers and reply.startswith(_JETSTREAM_DELIVERY):
            headers.pop(_STATUS, None)
        subject_text, reply_text = subject.decode("utf-8", _ESCAPED), reply.decode("utf-8", _ESCAPED)
        return Msg(self, subject_text, reply_text, data, headers, _sid=sid)


def _cost_us(data: bytes) -> int:
    return _MESSAGE_US + len(data) // _BYTES_PER_US


def _is_refusal(reason: str) -> bool:
    return any(text in reason.lower() for text in _REFUSALS)


def _typed(reason: str) -> Error:
    bare = reason.removeprefix("nats: ").strip("'")
    return NatsRefused(bare) if _is_refusal(reason) else Error(f"nats: {bare}")


async def or_cancelled(awaitable: Awaitable[_T]) -> _T:
    """Awaits a call of the library, and raises CancelledError if this task was cancelled meanwhile.

    The library uses ``asyncio.wait_for``, which before Python 3.12 forgets a cancellation that comes together with the
    result. A task that calls NATS in a loop would then run on and be waited for forever. ``TolerantClient`` does this
    for its own calls; those of subscriptions need it from their callers.
    """
    task = asyncio.current_task()
    earlier = task.cancelling() if task else 0
    try:
        return await awaitable
    finally:
        if task and task.cancelling() > earlier:
            raise asyncio.CancelledError
