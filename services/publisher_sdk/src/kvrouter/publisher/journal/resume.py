"""Which files a worker's ranks are kept in, and whether a relay goes on from them beside an engine that lives."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator, Mapping
from pathlib import Path

import structlog
from kvrouter.publisher.config import WorkerConfig
from kvrouter.publisher.errors import InvalidConfig
from kvrouter.publisher.journal.journal import Head, JournalPath, Recovered, Unusable, recover

log = structlog.get_logger(__name__)


def _place(config: WorkerConfig, directory: Path, dp_rank: int) -> Path:
    return directory / f"{config.component.namespace}-{config.component.name}-{config.worker_id:016x}-{dp_rank}.journal"


def _head(config: WorkerConfig, dp_rank: int, incarnation: int) -> Head:
    return Head(
        config.worker_id, dp_rank, incarnation, config.block_size, config.copy_counting, config.engine_incarnation
    )


def recover_worker(config: WorkerConfig) -> dict[int, Recovered]:
    """What the files of a worker have, by rank; empty unless all ranks are in one incarnation of this engine's life."""
    if config.journal_path is None:
        return {}
    found = {}
    for rank in config.ranks:
        place = _place(config, config.journal_path, rank)
        try:
            found[rank] = recover(place, _head(config, rank, 0))
        except Unusable as error:
            log.info("journal.not_recovered", path=str(place), reason=str(error))
            return {}
    incarnations = {each.head.incarnation for each in found.values()}
    return found if len(incarnations) == 1 else {}


def positions(config: WorkerConfig) -> dict[int, int]:
    """Up to which of its own messages each rank of the engine is known, before ``running``; empty where nothing is.

    A relay whose engine can repeat all that comes after it goes on from there. If it cannot, ``discard`` makes the
    worker begin a new incarnation.
    """
    return {rank: found.position for rank, found in recover_worker(config).items()}


def discard(config: WorkerConfig) -> None:
    """Deletes the files of a worker."""
    if config.journal_path is not None:
        for rank in config.ranks:
            _place(config, config.journal_path, rank).unlink(missing_ok=True)


def places(config: WorkerConfig, incarnation: int, found: Mapping[int, Recovered]) -> dict[int, JournalPath]:
    """Where the ranks of a worker are kept in an incarnation; empty if they are not to be."""
    if config.journal_path is None:
        return {}
    return {
        rank: JournalPath(_place(config, config.journal_path, rank), _head(config, rank, incarnation), found.get(rank))
        for rank in config.ranks
    }


@contextlib.contextmanager
def claimed(config: WorkerConfig) -> Iterator[None]:
    """Keeps other processes off the files of a worker.

    Raises:
        InvalidConfig: another process has them, or the directory cannot be made.
    """
    if config.journal_path is None:
        yield
        return
    place = _place(config, config.journal_path, min(config.ranks)).with_suffix(".lock")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        lock = place.open("w")
    except OSError as error:
        raise InvalidConfig(f"journal_path: {error}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InvalidConfig(f"journal_path: another process keeps worker {config.worker_id} there") from None
        yield
