"""Snapshot objects of a component in a NATS object store: written from the state of an index, and read."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import io
import time
from collections import deque
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

from kvrouter.net.nats.client import or_cancelled
from kvrouter.net.nats.event_stream import write_error
from kvrouter.net.snapshot_format import InvalidSnapshot, SnapshotCheck, SnapshotWriter
from kvrouter.v1.names import ComponentName
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig
from nats.js.errors import APIError, BadObjectMetaError, BucketNotFoundError, NotFoundError, ObjectNotFoundError
from nats.js.object_store import OBJ_CHUNKS_PRE_TEMPLATE, OBJ_META_PRE_TEMPLATE, ObjectStore

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer
from kvrouter.indexer.index.state import IndexState
from kvrouter.indexer.ingest.read_position import Position, StreamIdentity
from kvrouter.indexer.snapshots.format import Snapshot, decode
from kvrouter.v1.common_pb2 import Component
from kvrouter.v1.registry_pb2 import ComponentDescriptor
from kvrouter.v1.snapshot_pb2 import SnapshotHeader, SnapshotRef, StreamIdentity as StreamMessage

_TRANSFER_SECONDS = 60.0
_PIECE_SECONDS = 10.0
_PIECE_BYTES = 1 << 20  # the server's limit of a message
_WRITTEN_BYTES = 128 << 10  # the client library's message size
_TOGETHER = 32
_GONE = (NotFoundError, ObjectNotFoundError, BucketNotFoundError)


class SnapshotStore:
    """The snapshots of one component.

    Every call raises one of ``kvrouter.indexer.ingest.jetstream.AWAY`` if NATS is unreachable.
    """

    def __init__(self, js: JetStreamContext, component: ComponentName) -> None:
        self._js = js
        self._bucket = component.snapshot_bucket
        self._stream = f"OBJ_{self._bucket}"

    async def put(self, name: str, parts: deque[bytes]) -> None:
        """Writes an object whose content is these parts, concatenated. Removes each part once it is read."""
        store = await self._made()
        async with asyncio.timeout(_TRANSFER_SECONDS):
            await store.put(name, io.BufferedReader(_Parts(parts), _WRITTEN_BYTES))

    async def get(self, name: str) -> bytearray:
        """Returns the content of an object.

        Raises:
            InvalidSnapshot: the object is missing, incomplete or damaged.
        """
        content = bytearray()
        async for piece in self.pieces(name):
            content += piece
        return content

    async def pieces(self, name: str) -> AsyncGenerator[bytes, None]:
        """Yields the content of an object in pieces. They are known to be intact only after the last one.

        Raises:
            InvalidSnapshot: the object is missing, incomplete or damaged.
        """
        try:
            store = await self._js.object_store(self._bucket)
            info = await store.get_info(name)
        except _GONE:
            raise InvalidSnapshot("the object is gone") from None
        except BadObjectMetaError as error:
            raise InvalidSnapshot(f"the object is damaged: {error!r}") from None
        if not (isinstance(info.chunks, int) and isinstance(info.nuid, str) and info.nuid.isalnum()):
            raise InvalidSnapshot(
                "expected object metadata with a number of chunks and an alphanumeric nuid, "
                f"received chunks {info.chunks!r} and nuid {info.nuid!r}"
            )
        digest = hashlib.sha256()
        subject = OBJ_CHUNKS_PRE_TEMPLATE.format(bucket=self._bucket, obj=info.nuid)
        try:
            async with aclosing(self._messages(subject, info.chunks)) as messages:
                async for data in messages:
                    digest.update(data)
                    yield data
        except _GONE:
            raise InvalidSnapshot("the object is gone") from None
        except TimeoutError:
            # NATS has just returned the metadata, so it is reachable and the pieces are missing.
            raise InvalidSnapshot("pieces of the object are missing") from None
        if info.digest != f"SHA-256={base64.urlsafe_b64encode(digest.digest()).decode()}":
            raise InvalidSnapshot("the object is damaged: its digest differs")

    async def _messages(self, subject: str, count: int) -> AsyncGenerator[bytes, None]:
        """Yields the messages of a subject. The client library uses a push consumer, which takes four times as long."""
        if not count:
            return
        subscription = await self._js.pull_subscribe(
            subject,
            stream=self._stream,
            config=ConsumerConfig(ack_policy=AckPolicy.NONE, mem_storage=True, inactive_threshold=_TRANSFER_SECONDS),
            pending_bytes_limit=2 * _TOGETHER * _PIECE_BYTES,
        )
        try:
            read = 0
            deadline = time.monotonic() + _TRANSFER_SECONDS
            while read < count:
                left = min(_PIECE_SECONDS, deadline - time.monotonic())
                if left <= 0:
                    raise TimeoutError
                messages = await or_cancelled(subscription.fetch(min(_TOGETHER, count - read), timeout=left))
                read += len(messages)
                for message in messages:
                    yield message.data
                    await asyncio.sleep(0)
        finally:
            await subscription.unsubscribe()

    async def last_sequence(self) -> int:
        """Returns the sequence of the newest message in the bucket; 0 if there is none."""
        try:
            return (await self._js.stream_info(self._stream)).state.last_seq
        except _GONE:
            return 0

    async def drop_stopped(self) -> str:
        """Deletes the bucket if its stream is stopped. Returns why it is stopped; empty if it is not.

        A stopped stream accepts no writes or deletions until NATS is restarted.
        """
        error = await write_error(self._js, self._stream)
        if error:
            with contextlib.suppress(*_GONE):
                await self._js.delete_object_store(self._bucket)
        return error

    async def count(self) -> int:
        """Returns the number of objects."""
        try:
            info = await self._js.stream_info(self._stream, subjects_filter=f"$O.{self._bucket}.M.>")
        except _GONE:
            return 0
        return len(info.state.subjects or {})

    async def sweep(self, keep: Collection[str], up_to: int) -> None:
        """Purges every message up to a sequence, except those of the objects to keep.

        The client library's deletion is not enough: it leaves a message behind, and it does not find the pieces of an
        object whose upload was interrupted. Messages after ``up_to`` stay, so that a caller that was paused does not
        delete what was written meanwhile.
        """
        if not up_to:
            return
        try:
            subjects = (await self._js.stream_info(self._stream, subjects_filter=">")).state.subjects or {}
            kept = {subject for name in keep for subject in await self._subjects_of(name)}
            for subject in sorted(subjects.keys() - kept):
                await self._js.purge_stream(self._stream, seq=up_to + 1, subject=subject)
        except _GONE:
            return

    async def _subjects_of(self, name: str) -> list[str]:
        encoded = base64.urlsafe_b64encode(name.encode()).decode()
        subject = OBJ_META_PRE_TEMPLATE.format(bucket=self._bucket, obj=encoded)
        try:
            store = await self._js.object_store(self._bucket)
            info = await store.get_info(name, show_deleted=True)
        except (*_GONE, BadObjectMetaError):
            return [subject]
        return [subject, OBJ_CHUNKS_PRE_TEMPLATE.format(bucket=self._bucket, obj=info.nuid)]

    async def _made(self) -> ObjectStore:
        try:
            return await self._js.object_store(self._bucket)
        except _GONE:
            try:
                return await self._js.create_object_store(self._bucket)
            except APIError:
                # Another replica has created it at the same time.
                return await self._js.object_store(self._bucket)


class _Parts(io.RawIOBase):
    """File-like reader over parts, which it takes out of their queue."""

    def __init__(self, parts: deque[bytes]) -> None:
        self._parts = parts
        self._left = memoryview(b"")

    def readable(self) -> bool:
        """Returns True."""
        return True

    def readinto(self, to: WriteableBuffer) -> int:
        """Copies the next bytes to a buffer. Returns their number, 0 at the end."""
        while not self._left:
            if not self._parts:
                return 0
            self._left = memoryview(self._parts.popleft())
        with memoryview(to).cast("B") as target:
            taken = min(len(target), len(self._left))
            target[:taken] = self._left[:taken]
        self._left = self._left[taken:]
        return taken


_CHUNK_BLOCKS = 1024  # each is encoded on the loop, in about 0.2 ms


@dataclass(eq=False)
class SnapshotFiles:
    """Snapshot objects of one component, written by one replica."""

    store: SnapshotStore
    name: ComponentName
    descriptor: ComponentDescriptor
    state: IndexState
    _: KW_ONLY
    replica_id: str

    def __post_init__(self) -> None:
        self._header = SnapshotHeader(
            component=Component(namespace=self.name.namespace, name=self.name.name),
            block_size=self.descriptor.block_size,
            hash_scheme=self.descriptor.hash_scheme,
            replica_id=self.replica_id,
        )

    async def read(self, name: str) -> Snapshot:
        """Reads a snapshot.

        Raises:
            InvalidSnapshot: it is missing, damaged, or of another component.
        """
        data = await self.store.get(name)
        return await asyncio.to_thread(decode, data, self._header)

    async def write(self, at: Position) -> tuple[SnapshotRef, int]:
        """Writes the state of every rank and reads it back. Returns its reference and the number of blocks.

        Raises:
            InvalidSnapshot: the written object cannot be read back.
        """
        taken = time.time_ns()
        header = SnapshotHeader()
        header.CopyFrom(self._header)
        header.stream.CopyFrom(stream_message(at.identity))
        header.stream_sequence = at.applied
        header.taken_unix_ns = taken
        writer = SnapshotWriter(header)
        for info in await self.state.shared.ranks():
            async for chunk in self.state.shared.dump_rank((info.worker_id, info.dp_rank), _CHUNK_BLOCKS):
                writer.add(chunk)
        parts = writer.parts()
        size = sum(map(len, parts))
        name = f"{taken:020d}-{self.replica_id}"
        await self.store.put(name, parts)
        await self._verify(name)
        ref = SnapshotRef(
            object_name=name, stream_sequence=at.applied, stream=header.stream, taken_unix_ns=taken, bytes=size
        )
        return ref, writer.blocks

    async def _verify(self, name: str) -> None:
        """Reads a snapshot back.

        Raises:
            InvalidSnapshot: it is missing, incomplete or damaged.
        """
        check = SnapshotCheck(self._header)
        async with aclosing(self.store.pieces(name)) as pieces:
            async for piece in pieces:
                check.add(piece)
        check.finish()


def stream_message(identity: StreamIdentity) -> StreamMessage:
    """Returns the identity of a stream as a message."""
    return StreamMessage(name=identity.name, created_unix_ns=identity.created_unix_ns)
