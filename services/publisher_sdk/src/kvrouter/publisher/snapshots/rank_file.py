"""A rank's state in a file, from which a restarted relay resumes while its engine continues.

The file is a snapshot as an Indexer takes it, of one rank: ``kvrouter.net.snapshot_format``. Its last record has the
number of the engine's last message in the state, and what the records of blocks lack. It is replaced atomically, so a
process may die at any moment. Whatever happened to the file since, its length and checksum tell.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError
from kvrouter.core import EventRecorder, Scope
from kvrouter.core.interface import BlockNote
from kvrouter.net.snapshot_format import InvalidSnapshot, SnapshotCheck, SnapshotWriter, claimed_blocks, records_after
from kvrouter.publisher.config import HASH_SCHEME
from kvrouter.v1.common_pb2 import Component, CopyCounting, RankState
from kvrouter.v1.names import ComponentName
from kvrouter.v1.snapshot_pb2 import BlockNotes, RelayCursor, SnapshotHeader

NO_POSITION = -1
"""Position of an engine without a reported message."""


class Unusable(Exception):
    """A file cannot be resumed from; the message says why."""

    def __init__(self, why: str, blocks: int = 0) -> None:
        super().__init__(why)
        self.blocks = blocks
        """Blocks that the file says it has, which are lost; 0 if it does not say."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Identifies the rank and the engine of a file."""

    component: ComponentName
    worker_id: int
    dp_rank: int
    block_size: int
    copy_counting: CopyCounting
    engine: str
    """Names the engine and the lifetime of its cache."""

    def header(self) -> SnapshotHeader:
        """Returns what the header of the file says of them."""
        component = Component(namespace=self.component.namespace, name=self.component.name)
        return SnapshotHeader(component=component, block_size=self.block_size, hash_scheme=HASH_SCHEME)


@dataclass(frozen=True, slots=True)
class Recovered:
    """Content of a file."""

    incarnation: int
    recorder: EventRecorder
    """The rank's blocks. Its log of events is empty."""
    position: int
    """The engine's number of the last message in the state."""
    partial: bool
    """Whether events of the engine were lost, and blocks may be missing."""
    chunks: list[bytes]
    """The same blocks as encoded RankState messages, until they are offered to readers."""


@dataclass(frozen=True, slots=True)
class RankFile:
    """Path of a rank's file, and its recovered content."""

    path: Path
    identity: Identity
    recovered: Recovered | None = None


@dataclass(frozen=True, slots=True)
class State:
    """What is written to a file."""

    chunks: Iterable[bytes]
    """Encoded RankState messages."""
    blocks: int
    notes: tuple[BlockNote, ...]
    position: int


def write(place: RankFile, state: State) -> int:
    """Replaces a file atomically. Returns its size in bytes.

    Raises:
        OSError: it cannot be written; the former one stays.
    """
    header = place.identity.header()
    header.taken_unix_ns, header.ranks, header.blocks = time.time_ns(), 1, state.blocks
    writer = SnapshotWriter(header)
    for chunk in state.chunks:
        writer.append(chunk)
    writer.append(_cursor(place.identity.engine, state).SerializeToString())
    new = place.path.with_suffix(".new")
    new.parent.mkdir(parents=True, exist_ok=True)
    try:
        # Readable by this user only: blocks have the salts of tenants.
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            size = sum(file.write(part) for part in writer.parts())
            file.flush()
            os.fsync(file.fileno())
        new.replace(place.path)
    except OSError:
        with suppress(OSError):
            new.unlink(missing_ok=True)
        raise
    return size


def recover(path: Path, desired: Identity, buffer_events: int = 200_000, buffer_bytes: int = 32 << 20) -> Recovered:
    """Reads a file. ``buffer_*`` limit the events that its recorder will keep.

    Raises:
        Unusable: the file does not exist, belongs to another engine, or is damaged.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise Unusable(error.strerror or "the file cannot be read") from None
    try:
        return _read(data, desired, buffer_events, buffer_bytes)
    except (Unusable, InvalidSnapshot, ValueError, DecodeError) as error:
        raise Unusable(str(error), claimed_blocks(data)) from None


def _read(data: bytes, desired: Identity, buffer_events: int, buffer_bytes: int) -> Recovered:
    check = SnapshotCheck(desired.header())
    check.add(data)
    *chunks, last = records_after(data, check.finish())
    cursor = RelayCursor.FromString(last)
    end = RankState.FromString(chunks[-1]) if chunks else RankState()
    found = (end.rank.worker_id, end.rank.dp_rank, end.copy_counting, cursor.engine)
    if found != (expected := (desired.worker_id, desired.dp_rank, desired.copy_counting, desired.engine)):
        raise Unusable(f"the file belongs to another worker or engine: expected {expected}, received {found}")
    head = (desired.worker_id, desired.dp_rank, end.cursor.incarnation, desired.block_size, desired.copy_counting)
    recorder = EventRecorder(head, buffer_events, buffer_bytes)
    recorder.load(chunks)
    counts = recorder.counts()
    if not end.last or (counts.next_event_id, counts.digest) != (end.cursor.next_event_id, end.digest):
        raise Unusable("the state does not have the recorded digest")
    recorder.annotate([_note(notes) for notes in cursor.notes])
    position = cursor.position if "position" in cursor else NO_POSITION
    return Recovered(end.cursor.incarnation, recorder, position, end.partial, chunks)


def _cursor(engine: str, state: State) -> RelayCursor:
    return RelayCursor(
        engine=engine,
        position=None if state.position == NO_POSITION else state.position,
        notes=[
            BlockNotes(
                lora_name=scope.lora_name,
                cache_salt=scope.cache_salt,
                tenant=scope.tenant,
                parts=parts,
                engine_hashes=engine_hashes,
            )
            for scope, parts, engine_hashes in state.notes
        ],
    )


def _note(notes: BlockNotes) -> BlockNote:
    return Scope(notes.lora_name, notes.cache_salt, notes.tenant), notes.parts, notes.engine_hashes
