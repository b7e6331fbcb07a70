"""Writes the state of an index to a snapshot object, and reads snapshot objects."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing

from kvrouter.indexer.index.state import IndexState
from kvrouter.indexer.ingest.read_position import Position, StreamIdentity
from kvrouter.indexer.snapshots.format import Snapshot, SnapshotCheck, SnapshotWriter, decode
from kvrouter.indexer.snapshots.store import SnapshotStore
from kvrouter.v1.common_pb2 import Component
from kvrouter.v1.names import ComponentName
from kvrouter.v1.registry_pb2 import ComponentDescriptor
from kvrouter.v1.snapshot_pb2 import SnapshotHeader, SnapshotRef
from kvrouter.v1.snapshot_pb2 import StreamIdentity as StreamMessage

_CHUNK_BLOCKS = 1024  # each is encoded on the loop, in about 0.2 ms


class SnapshotFiles:
    """Snapshot objects of one component, written by one replica."""

    def __init__(
        self,
        store: SnapshotStore,
        name: ComponentName,
        descriptor: ComponentDescriptor,
        state: IndexState,
        *,
        replica_id: str,
    ) -> None:
        self._store = store
        self._state = state
        self._replica_id = replica_id
        self._header = SnapshotHeader(
            component=Component(namespace=name.namespace, name=name.name),
            block_size=descriptor.block_size,
            hash_scheme=descriptor.hash_scheme,
            replica_id=replica_id,
        )

    async def read(self, name: str) -> Snapshot:
        """Reads a snapshot.

        Raises:
            InvalidSnapshot: it is missing, damaged, or of another component.
        """
        data = await self._store.get(name)
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
        for info in await self._state.shared.ranks():
            async for chunk in self._state.shared.dump_rank((info.worker_id, info.dp_rank), _CHUNK_BLOCKS):
                writer.add(chunk)
        parts = writer.parts()
        size = sum(map(len, parts))
        name = f"{taken:020d}-{self._replica_id}"
        await self._store.put(name, parts)
        await self._verify(name)
        ref = SnapshotRef(
            object_name=name,
            stream_sequence=at.applied,
            stream=header.stream,
            taken_unix_ns=taken,
            bytes=size,
        )
        return ref, writer.blocks

    async def _verify(self, name: str) -> None:
        """Reads a snapshot back.

        Raises:
            InvalidSnapshot: it is missing, incomplete or damaged.
        """
        check = SnapshotCheck(self._header)
        async with aclosing(self._store.pieces(name)) as pieces:
            async for piece in pieces:
                check.add(piece)
        check.finish()


def stream_message(identity: StreamIdentity) -> StreamMessage:
    """Returns the identity of a stream as a message."""
    return StreamMessage(name=identity.name, created_unix_ns=identity.created_unix_ns)
