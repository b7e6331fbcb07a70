"""Chooses the files of a model's tokenizer among those its workers register, and fetches them from the workers."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import cast

from kvrouter.net.model_files import MAX_BYTES, NAMES, PIECE_BYTES, TOKENIZER, InvalidModelFiles
from kvrouter.net.tls import Tls
from kvrouter.runtime.contracts import Worker
from kvrouter.runtime.deadline import Deadline
from kvrouter.runtime.discovery.directory import ComponentView
from kvrouter.runtime.rpc import open_channel, remote
from kvrouter.v1 import worker_pb2
from kvrouter.v1.errors import KvRouterError
from kvrouter.v1.registry_pb2 import WorkerRegistration
from kvrouter.v1.worker_pb2 import GetModelFileRequest

_DESCRIPTOR = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"]
_FETCH_SECONDS = 60.0
_MESSAGE_BYTES = 2 * PIECE_BYTES


@dataclass(frozen=True, slots=True, order=True)
class DescribedFile:
    """A file by its content."""

    name: str
    sha256: str
    """In hexadecimal digits."""


Files = tuple[DescribedFile, ...]
"""Files of a model, in order of name."""


def files_of(worker: WorkerRegistration) -> Files:
    """Returns the usable files a worker registers."""
    found = {file.name: file.sha256.hex() for file in worker.model_files if file.name in NAMES}
    return tuple(DescribedFile(name, sha256) for name, sha256 in sorted(found.items()))


def agreed_files(views: Iterable[ComponentView], in_use: Files, pinned: Files = ()) -> Files:
    """Returns which files of a model to use; empty for none.

    Of each component, the files count most of its workers register, if these are at least half of its workers. So
    one worker cannot give a larger component another chat template. Of several components the files with the most
    workers win. Files in use stay while no others have more workers, and while the model has no workers.

    Args:
        views: The components serving the model.
        in_use: The files used so far.
        pinned: Files the operator demands. They are used, and no others.
    """
    if pinned:
        return pinned
    votes = Counter[Files]()
    any_workers = False
    for view in views:
        registered = Counter(map(files_of, view.workers.values()))
        any_workers = any_workers or bool(registered)
        for files, workers in registered.items():
            if files and 2 * workers >= len(view.workers):
                votes[files] += workers
    if not any_workers:
        return in_use
    return min(votes, key=lambda files: (-votes[files], files != in_use, files), default=())


async def fetch_files(files: Files, workers: Sequence[WorkerRegistration], tls: Tls | None) -> Mapping[str, bytes]:
    """Returns the content of files by name. Each is fetched from the first worker that delivers it.

    Raises:
        InvalidModelFiles: no worker delivers a file, or the files are too large.
    """
    contents: dict[str, bytes] = {}
    for file in files:
        room = MAX_BYTES - sum(map(len, contents.values()))
        contents[file.name] = await _fetch(file, workers, room, tls)
    if TOKENIZER not in contents:
        raise InvalidModelFiles(f"expected {TOKENIZER} among the files of the workers, found none")
    return contents


async def _fetch(file: DescribedFile, workers: Sequence[WorkerRegistration], room: int, tls: Tls | None) -> bytes:
    causes = []
    # In any order, so that a slow worker does not delay every fetch.
    for worker in random.sample(workers, len(workers)):
        if file not in files_of(worker):
            continue
        try:
            content = await _fetch_from(worker.endpoint, file, room, tls)
        except KvRouterError as error:
            causes.append(f"worker {worker.worker_id}: {error.message}")
            continue
        if hashlib.sha256(content).hexdigest() == file.sha256:
            return content
        causes.append(f"worker {worker.worker_id} sent {len(content)} bytes of another content, or over {room} bytes")
    reason = "; ".join(causes) or f"no live worker registers it with the hash {file.sha256}"
    raise InvalidModelFiles(f"{file.name} cannot be fetched: {reason}")


async def _fetch_from(endpoint: str, file: DescribedFile, room: int, tls: Tls | None) -> bytes:
    """Returns the worker's file, up to ``room`` bytes.

    Raises:
        KvRouterError: the worker does not answer.
    """
    content = bytearray()
    request = GetModelFileRequest(sha256=bytes.fromhex(file.sha256))
    async with open_channel(endpoint, tls=tls, role="worker", max_message_bytes=_MESSAGE_BYTES) as channel:
        worker = cast(Worker, remote(_DESCRIPTOR, channel))
        async with aclosing(worker.get_model_file(request, deadline=Deadline.after(_FETCH_SECONDS))) as pieces:
            async for piece in pieces:
                content += piece.content
                if len(content) > room:
                    break
    return bytes(content[:room])
