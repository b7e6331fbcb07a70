"""TCP between workers and a server that goes through the test, which can cut it, or lose JetStream's answers on it."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

_PIECE_BYTES = 1 << 16


class Wire:
    """Passes bytes on as they come."""

    def __init__(self, port: int) -> None:
        self._server_port = port
        self._listening: asyncio.Server | None = None
        self._calls: set[asyncio.Task[None]] = set()
        self._is_cut = False
        self._passes = asyncio.Event()
        self._passes.set()

    @property
    def address(self) -> str:
        """Where to connect instead of the server, host:port."""
        assert self._listening is not None
        return f"127.0.0.1:{self._listening.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        """Ends what is connected, and lets nobody through until ``mend``."""
        self._is_cut = True
        for call in self._calls:
            call.cancel()

    def silence(self) -> None:
        """Holds back all bytes until ``mend``, as a network that loses packets does; nothing is closed."""
        self._passes.clear()

    def mend(self) -> None:
        self._is_cut = False
        self._passes.set()

    @asynccontextmanager
    async def laid(self) -> AsyncIterator[None]:
        """Listens while the context lasts."""
        self._listening = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        try:
            yield
        finally:
            self._listening.close()
            self.cut()
            if self._calls:
                await asyncio.wait(self._calls)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # As a task of its own: one that the server made and that is cancelled is logged as an error.
        call = asyncio.create_task(self._connect(reader, writer))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:
            writer.close()
            return
        with suppress(OSError, asyncio.IncompleteReadError):
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._server_port)
            ways = {
                asyncio.create_task(self._pass(reader, far_writer)),
                asyncio.create_task(self._answer(far_reader, writer)),
            }
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.wait(ways)
                writer.close()
                far_writer.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while piece := await reader.read(_PIECE_BYTES):
                await self._passes.wait()
                writer.write(piece)
                await writer.drain()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._pass(reader, writer)


class AckLosingWire(Wire):
    """To NATS. Of the acknowledgements of what was published, 5 % are lost, 5 % come twice, and 5 % after the next."""

    def __init__(self, port: int, rng: random.Random) -> None:
        super().__init__(port)
        self.counts: Counter[str] = Counter()
        self._rng = rng

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        late: list[bytes] = []
        with suppress(OSError, asyncio.IncompleteReadError):
            while line := await reader.readline():
                frame = line
                if line.startswith((b"MSG ", b"HMSG ")):
                    frame += await reader.readexactly(int(line.split()[-1]) + 2)
                frames = self._spoiled(frame, late) if _is_publish_ack(line, frame) else [frame]
                writer.write(b"".join(frames))
                await writer.drain()

    def _spoiled(self, ack: bytes, late: list[bytes]) -> list[bytes]:
        dice = self._rng.random()
        if dice < 0.05:
            self.counts["dropped"] += 1
            return []
        if dice < 0.10:
            self.counts["reordered"] += 1
            late.append(ack)
            return []
        copies = 2 if dice < 0.15 else 1
        self.counts["doubled"] += copies - 1
        frames = [ack] * copies + late
        late.clear()
        return frames


def _is_publish_ack(line: bytes, frame: bytes) -> bool:
    """Answers of JetStream's own interface tell their type, acknowledgements only stream and sequence."""
    return line.startswith(b"MSG _INBOX.") and b'"seq":' in frame and b'"type":' not in frame
