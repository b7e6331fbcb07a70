"""A server that ends a connection with an error code that HTTP/2 does not define harms no client."""

from __future__ import annotations

import asyncio
import struct
import sys

import pytest

CLIENT = """
import asyncio, sys
import grpc.aio
from kvrouter.runtime.rpc import open_channel

async def call() -> None:
    async with open_channel(sys.argv[1]) as channel:
        try:
            await channel.unary_unary("/a.B/C")(b"", timeout=10)
        except grpc.aio.AioRpcError as error:
            print(error.code().name)

asyncio.run(call())
"""
SETTINGS, GOAWAY, RST_STREAM = 4, 7, 3


def frame(kind: int, payload: bytes = b"", *, flags: int = 0, stream: int = 0) -> bytes:
    return len(payload).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream) + payload


@pytest.mark.parametrize("code", [14, 0xDEADBEEF])
@pytest.mark.parametrize("kind", [GOAWAY, RST_STREAM])
async def test_a_client_outlives_an_unknown_error_code(kind: int, code: int) -> None:
    ending = (
        frame(GOAWAY, struct.pack(">II", 0, code))
        if kind == GOAWAY
        else frame(RST_STREAM, struct.pack(">I", code), stream=1)
    )

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(frame(SETTINGS) + frame(SETTINGS, flags=1))
        received = b""
        while b"/a.B/C" not in received and (part := await reader.read(1 << 16)):
            received += part
        writer.write(ending)
        await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, asyncio.timeout(60):
        address = "{}:{}".format(*server.sockets[0].getsockname())
        client = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CLIENT, address, stdout=asyncio.subprocess.PIPE
        )
        output, _ = await client.communicate()
        assert client.returncode == 0
        assert output.decode().strip() in {"UNAVAILABLE", "INTERNAL", "DEADLINE_EXCEEDED", "UNKNOWN"}
