"""A rank's state in a file, from which a restarted relay resumes while its engine continues.

The file is a sequence of records: a head as identity, the rank's state in chunks, the unsent events of the
state, then one record for each later message of the engine with its events and the engine's own message number. What
the events do not say of the blocks (scopes, parts) and of the rank is in a record of notes before them. The file is
replaced atomically when it is started and when the appended part outgrows the state. It has to survive the
process but not the machine, with which the engine dies too, so it is not flushed to the disk.

Events are sent, and states are served, only once they are in the file. No consumer therefore knows more than the file.
A torn last record was never sent and is cut off. Any other damage makes the file unusable.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from google.protobuf.message import DecodeError
from kvrouter.core import EventRecorder, Scope
from kvrouter.core.interface import BlockNote, RecordedEvent, RecorderCounts
from kvrouter.net.logs import get_logger
from kvrouter.publisher.errors import InvalidEvent
from kvrouter.v1.common_pb2 import CopyCounting
from kvrouter.v1.events_pb2 import KvEvent
from kvrouter.v1.worker_pb2 import GetRankStateResponse
from xxhash import xxh3_64_intdigest

log = get_logger(__name__)

NO_POSITION = -1
"""Position of an engine without a reported message."""

_FORMAT = 2
_SEED = 1337
_LEAST_LOG_BYTES = 4 << 20  # minimum size of the appended part before the file is replaced
_MAX_QUEUE_BYTES = 32 << 20  # with a slower disk, the queue is dropped and the whole state is written instead
_record = struct.Struct("<cIQQ")  # kind, length of the body, checksum of these two, checksum of the body
_group = struct.Struct("<q")
_event = struct.Struct("<QI")
_HEAD, _STATE, _UNSENT, _NOTES, _GROUP = b"H", b"S", b"U", b"N", b"G"


class Unusable(Exception):
    """A file cannot be resumed from; the message says why."""


@dataclass(frozen=True, slots=True)
class Head:
    """Identifies the rank and the engine of a file."""

    worker_id: int
    dp_rank: int
    incarnation: int
    block_size: int
    copy_counting: CopyCounting
    engine_incarnation: str
    format: int = _FORMAT


@dataclass(frozen=True, slots=True)
class Recovered:
    """Content of a file."""

    head: Head
    recorder: EventRecorder
    """The rank's blocks, and the newest events, which consumers may lack."""
    position: int
    """The engine's number of the last message in the state."""
    partial: bool
    """Whether events of the engine were lost, and blocks may be missing."""
    size: int
    """Bytes of the file up to the last complete record."""


def recover(path: Path, desired: Head, buffer_events: int = 200_000, buffer_bytes: int = 32 << 20) -> Recovered:
    """Reads a file. The incarnation of ``desired`` is ignored; ``buffer_*`` limit the recorder's events.

    Raises:
        Unusable: the file does not exist, belongs to another engine, or is damaged.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise Unusable(error.strerror or "the file cannot be read") from None
    try:
        return _read(data, desired, buffer_events, buffer_bytes)
    except (ValueError, TypeError, struct.error, DecodeError) as error:
        raise Unusable(f"the file is damaged: {error}") from None


def _read(data: bytes, desired: Head, buffer_events: int, buffer_bytes: int) -> Recovered:
    records = _records(data)
    kind, body, end = next(records, (b"", b"", 0))
    if kind != _HEAD:
        raise Unusable("the file has no head")
    head = Head(**json.loads(body))
    differences = [
        name for name, value in asdict(desired).items() if name != "incarnation" and value != getattr(head, name)
    ]
    if differences:
        raise Unusable(f"the file belongs to another worker or engine: it differs in {', '.join(differences)}")
    identity = (head.worker_id, head.dp_rank, head.incarnation, head.block_size, head.copy_counting)
    recorder = EventRecorder(identity, buffer_events, buffer_bytes)
    chunks, position, whole, partial = [], NO_POSITION, False, False
    noted: bytes | None = None
    for kind, body, size in records:
        if kind == _STATE and not whole:
            position = _group.unpack_from(body)[0]
            chunks.append(GetRankStateResponse.FromString(body[_group.size :]))
            whole = chunks[-1].last
            if whole:
                blocks = [block.SerializeToString() for chunk in chunks for block in chunk.blocks]
                recorder.load(chunks[-1].cursor.next_event_id, blocks)
                if recorder.counts().digest != chunks[-1].digest:
                    raise Unusable("the file is damaged: its state does not have the recorded digest")
        elif kind == _NOTES and whole:
            # Applied after the next record: if that one is torn off, the notes are void.
            noted = body
            continue
        elif kind == _UNSENT and whole:
            recorder.extend(
                [(KvEvent.FromString(encoded).event_id, encoded, digest) for digest, encoded in _unpacked(body)]
            )
        elif kind == _GROUP and whole:
            position = _replay(recorder, body, position)
        else:
            raise Unusable(f"the file is damaged: unexpected record of kind {kind!r}")
        if noted is not None:
            partial, notes = _read_notes(noted)
            recorder.annotate(notes)
            noted = None
        end = size
    if not whole:
        raise Unusable("the file is truncated within its state")
    return Recovered(head, recorder, position, partial, end)


def _records(data: bytes) -> Iterator[tuple[bytes, bytes, int]]:
    """Yields (kind, body, end) of each record, without a torn last one."""
    at = 0
    while len(data) - at >= _record.size:
        kind, length, own, checksum = _record.unpack_from(data, at)
        if own != _checksum(data[at : at + 5]):
            raise Unusable(f"the file is damaged at byte {at}")
        body = data[at + _record.size : at + _record.size + length]
        if len(body) < length:
            return
        if _checksum(body) != checksum:
            raise Unusable(f"the file is damaged after byte {at}")
        at += _record.size + length
        yield kind, body, at


def replay(recorder: EventRecorder, event: KvEvent) -> RecorderCounts:
    """Reports the change of an event. Returns the numbers after it.

    Raises:
        InvalidEvent: the event does not apply to the recorded blocks.
    """
    match event.WhichOneof("change"):
        case "stored":
            stored = event.stored
            hashes = struct.pack(f"<{len(stored.local_hashes)}Q", *stored.local_hashes)
            parent = stored.parent_engine_hash if stored.HasField("parent_engine_hash") else None
            return recorder.stored(list(stored.engine_hashes), hashes, parent, event.tier)
        case "removed":
            return recorder.removed(list(event.removed.engine_hashes), event.tier)
        case _:
            return recorder.cleared(event.tier)


def _replay(recorder: EventRecorder, body: bytes, before: int) -> int:
    """Reports the events of a record. Returns the engine's number of its message, or ``before`` if it has none."""
    (position,) = _group.unpack_from(body)
    for digest, encoded in _unpacked(body):
        event = KvEvent.FromString(encoded)
        try:
            counts = replay(recorder, event)
        except InvalidEvent as error:
            raise Unusable(f"the file is damaged: {error}") from None
        if (counts.next_event_id, counts.digest) != (event.event_id + 1, digest):
            raise Unusable("the file is damaged: an event does not lead to the recorded digest")
    return before if position == NO_POSITION else position


def _encoded_notes(partial: bool, notes: Iterable[BlockNote]) -> bytes:
    blocks = [[asdict(scope), parts, engine_hashes] for scope, parts, engine_hashes in notes]
    return _encoded(_NOTES, json.dumps({"partial": partial, "blocks": blocks}).encode())


def _read_notes(body: bytes) -> tuple[bool, list[BlockNote]]:
    notes = json.loads(body)
    blocks = [(Scope(**scope), parts, engine_hashes) for scope, parts, engine_hashes in notes["blocks"]]
    return bool(notes["partial"]), blocks


def _packed(events: Iterable[RecordedEvent], position: int) -> bytes:
    parts = [_group.pack(position)]
    for _, encoded, digest in events:
        parts += (_event.pack(digest, len(encoded)), encoded)
    return b"".join(parts)


def _unpacked(body: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields (digest, encoded) of each event."""
    at = _group.size
    while at < len(body):
        digest, length = _event.unpack_from(body, at)
        at += _event.size + length
        yield digest, body[at - length : at]


@dataclass(frozen=True, slots=True)
class JournalPath:
    """Path of a rank's journal, and its recovered content."""

    path: Path
    head: Head
    recovered: Recovered | None


class Journal:
    """Writes the file of one rank. ``add`` may be called from any thread with the rank's lock; ``run`` writes."""

    def __init__(
        self,
        place: JournalPath,
        recorder: EventRecorder,
        lock: threading.RLock,
        unsent: Callable[[], Iterable[RecordedEvent]] = tuple,
    ) -> None:
        """Resumes the file if something was recovered, otherwise starts a new one.

        ``lock`` guards ``recorder`` and ``unsent``, which returns the possibly unsent events, oldest first.
        """
        recovered = place.recovered
        self._path = place.path
        self._head = place.head
        self._recorder = recorder
        self._lock = lock
        self._unsent = unsent
        self._position = recovered.position if recovered else NO_POSITION
        self._partial = recovered.partial if recovered else False
        self._size = recovered.size if recovered else 0
        self._state_bytes = 0
        self._log_bytes = 0
        self._queue: list[bytes] = []
        self._queue_bytes = 0
        self._added = self._written = 0
        self._anew = recovered is None
        self._file: BinaryIO | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()
        self._kept = asyncio.Condition()
        self.failed = False
        """Whether the file could not be written and was abandoned."""

    def add(
        self, events: Sequence[RecordedEvent], position: int, *, partial: bool = False, notes: Sequence[BlockNote] = ()
    ) -> None:
        """Queues the events of one message of the engine with its number (NO_POSITION for none).

        ``partial`` says whether the rank is partial after them, and ``notes`` the scopes and parts of their blocks.
        """
        if self.failed:
            return
        self._position = position if position != NO_POSITION else self._position
        record = _encoded(_GROUP, _packed(events, position))
        if notes or partial != self._partial:
            record = _encoded_notes(partial, notes) + record
        self._partial = partial
        self._queue.append(record)
        self._queue_bytes += len(record)
        self._added += 1
        if self._queue_bytes > _MAX_QUEUE_BYTES:
            self._queue, self._queue_bytes, self._anew = [], 0, True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._wake.set)

    @property
    def queued_bytes(self) -> int:
        """Bytes to write, at most 32 MiB."""
        return self._queue_bytes

    async def kept(self) -> None:
        """Waits until everything added so far is in the file, or the file was abandoned."""
        target = self._added
        async with self._kept:
            await self._kept.wait_for(lambda: self._written >= target or self.failed)

    async def run(self) -> None:
        """Writes until cancelled. If writing fails, deletes the file and returns; the worker continues without it."""
        self._loop = asyncio.get_running_loop()
        self._wake.set()
        try:
            while not self.failed:
                await self._wake.wait()
                self._wake.clear()
                try:
                    written = await asyncio.to_thread(self._write)
                except OSError as error:
                    log.error("journal.abandoned", path=str(self._path), error=str(error))
                    self.failed = True
                    with contextlib.suppress(OSError):
                        self._path.unlink(missing_ok=True)
                async with self._kept:
                    self._written = self._added if self.failed else written
                    self._kept.notify_all()
        finally:
            self._loop = None

    def _write(self) -> int:
        """Writes the queue; returns the number of additions in it."""
        with self._lock:
            queue, self._queue, self._queue_bytes = self._queue, [], 0
            written = self._added
            anew = self._anew or self._log_bytes > max(_LEAST_LOG_BYTES, self._state_bytes)
            self._anew = False
            chunks = self._recorder.state_chunks() if anew else None
            position = self._position
            unsent = list(self._unsent()) if anew else []
            notes = _encoded_notes(self._partial, self._recorder.notes()) if anew else b""
        if chunks is not None:
            self._replace(chunks, position, notes, unsent)
        elif queue:
            self._log_bytes += self._append(queue)
        return written

    def _replace(
        self,
        chunks: Iterable[bytes],
        position: int,
        notes: bytes,
        unsent: Sequence[RecordedEvent],
    ) -> None:
        if self._file is not None:
            self._file.close()
        new = self._path.with_suffix(".new")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = new.open("wb", buffering=0)
        size = self._append([_encoded(_HEAD, json.dumps(asdict(self._head)).encode())])
        for chunk in chunks:
            size += self._append([_encoded(_STATE, _group.pack(position) + chunk)])
        size += self._append([notes, _encoded(_UNSENT, _packed(unsent, NO_POSITION))])
        new.replace(self._path)
        self._state_bytes, self._log_bytes = size, 0

    def _append(self, records: Iterable[bytes]) -> int:
        if self._file is None:
            self._file = self._path.open("r+b", buffering=0)
            self._file.truncate(self._size)
            self._file.seek(self._size)
        data = memoryview(b"".join(records))
        size = len(data)
        while data:
            data = data[self._file.write(data) or 0 :]
        return size


def _encoded(kind: bytes, body: bytes) -> bytes:
    front = kind + struct.pack("<I", len(body))
    return _record.pack(kind, len(body), _checksum(front), _checksum(body)) + body


def _checksum(data: bytes) -> int:
    return xxh3_64_intdigest(data, _SEED)
