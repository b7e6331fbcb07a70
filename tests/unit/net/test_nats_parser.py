"""The parser of the NATS client reads what the library's own one reads."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from kvrouter.net.nats.client import TolerantClient
from nats.aio.client import Client
from nats.errors import ProtocolError

MESSAGES = (
    b"MSG a.b 1 0\r\n\r\n",
    b"MSG a.b 17 _INBOX.x.1 5\r\nab\r\nc\r\n",
    b"HMSG a.b 3 $JS.ACK.s.c.1.2.3.4.0 16 19\r\nNATS/1.0\r\nA: b\r\nxyz\r\n",
    b"HMSG  a.b  3  12  12\r\nNATS/1.0\r\n\r\n\r\n",
    b"MSG \xff 2 3\r\nMSG\r\n",
    b"MSG a.b  2 3\r\nabc\r\n",
    b"MSG a.b 17 21\r\nMSG c.d 2 3\r\nabc\r\nxyz\r\n",
    b"PING\r\n",
    b"PONG\r\n",
    b"+OK\r\n",
    b"-ERR 'Stale Connection'\r\n",
    b'INFO {"server_id": "a b 7"}\r\n',
)
MALFORMED = (
    b"MSG a.b 1\r\n",
    b"MSG a.b x 1\r\nx\r\n",
    b"MSG a b 1 c 1\r\nx\r\n",
    b"MSG a 1 -4\r\n\r\n",
    b"HELLO a 1 2\r\n",
)


async def handled(client: Any, parts: list[bytes], at_once: random.Random | None = None) -> list[tuple[Any, ...]]:
    """What a client is told when these parts arrive; ends at a violation of the protocol.

    With ``at_once``, half of the messages that are offered to its receivers are taken.
    """
    calls: list[tuple[Any, ...]] = []
    for name in ("_process_msg", "_process_ping", "_process_pong", "_process_err", "_process_info"):

        async def note(*given: Any, name: str = name) -> None:
            calls.append((name, *given))

        setattr(client, name, note)

    def take(*given: Any) -> bool:
        is_taken = at_once is not None and at_once.random() < 0.5
        calls.extend([("_process_msg", *given)] * is_taken)
        return is_taken

    reader = asyncio.StreamReader()
    if at_once is not None:
        client.take = take
        client._parser.precede(reader)
    try:
        for part in parts:
            reader.feed_data(part)
            rest = bytes(reader._buffer)
            reader._buffer.clear()
            await client._ps.parse(rest)
    except ProtocolError as error:
        calls.append((str(error),))
    return calls


async def test_a_message_whose_content_looks_like_one_is_read_as_by_the_library() -> None:
    parts = [b"MSG a 1 18\r\n", b"MSG b 2 3\r\nabc\r\n\r\n\r\n"]
    assert await handled(TolerantClient(), parts) == [("_process_msg", 1, b"a", b"", parts[1][:-2], None)]


@pytest.mark.parametrize("malformed", [(), MALFORMED], ids=["valid", "malformed"])
async def test_messages_in_any_parts_are_read_as_by_the_library(malformed: tuple[bytes, ...]) -> None:
    rng = random.Random(7)
    for _ in range(1000):
        wire = b"".join(rng.choices(MESSAGES * 3 + malformed, k=rng.randrange(8)))
        cuts = sorted(rng.randrange(len(wire) + 1) for _ in range(rng.randrange(4)))
        parts = [wire[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(wire)], strict=True)]
        expected = await handled(Client(), parts)
        assert await handled(TolerantClient(), parts) == expected, parts
        assert await handled(TolerantClient(), parts, rng) == expected, parts
