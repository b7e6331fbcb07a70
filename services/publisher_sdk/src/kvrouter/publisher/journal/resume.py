"""Locates the journals of a worker, and decides whether a restarted relay can resume from them."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator, Mapping
from pathlib import Path

from kvrouter.net.logs import get_logger
from kvrouter.publisher.config import WorkerConfig
from kvrouter.publisher.errors import InvalidConfig
from kvrouter.publisher.journal.journal import Head, JournalPath, Recovered, Unusable, recover

log = get_logger(__name__)


def _place(config: WorkerConfig, directory: Path, dp_rank: int) -> Path:
    return directory / f"{config.component.namespace}-{config.component.name}-{config.worker_id:016x}-{dp_rank}.journal"


def _head(config: WorkerConfig, dp_rank: int, incarnation: int) -> Head:
    return Head(
        config.worker_id, dp_rank, incarnation, config.block_size, config.copy_counting, config.engine_incarnation
    )


def recover_worker(config: WorkerConfig) -> dict[int, Recovered]:
    """Returns the recovered journals by rank; empty unless all ranks have one of the same incarnation and engine."""
    if config.journal_path is None:
        return {}
    journals = {}
    for rank in config.ranks:
        place = _place(config, config.journal_path, rank)
        try:
            journals[rank] = recover(place, _head(config, rank, 0), config.buffer_events, config.buffer_bytes)
        except Unusable as error:
            log.info("journal.not_recovered", path=str(place), reason=str(error))
            return {}
    incarnations = {each.head.incarnation for each in journals.values()}
    return journals if len(incarnations) == 1 else {}


def positions(config: WorkerConfig) -> dict[int, int]:
    """Returns for each rank the number of the last engine message in its journal; empty if it cannot resume.

    Call it before ``running``. A relay resumes if its engine can repeat all later messages. Otherwise call
    ``discard``, for the worker to begin a new incarnation.
    """
    return {rank: journal.position for rank, journal in recover_worker(config).items()}


def discard(config: WorkerConfig) -> None:
    """Deletes the journals of a worker."""
    if config.journal_path is not None:
        for rank in config.ranks:
            _place(config, config.journal_path, rank).unlink(missing_ok=True)


def places(config: WorkerConfig, incarnation: int, recovered: Mapping[int, Recovered]) -> dict[int, JournalPath]:
    """Returns the journal paths of a worker's ranks in an incarnation; empty without ``journal_path``."""
    if config.journal_path is None:
        return {}
    return {
        rank: JournalPath(
            _place(config, config.journal_path, rank), _head(config, rank, incarnation), recovered.get(rank)
        )
        for rank in config.ranks
    }


@contextlib.contextmanager
def claimed(config: WorkerConfig) -> Iterator[None]:
    """Locks the journals of a worker while the context lasts.

    Raises:
        InvalidConfig: another process has locked them, or the directory cannot be created.
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
            raise InvalidConfig(
                f"journal_path: another process uses the journals of worker {config.worker_id}; stop it first"
            ) from None
        yield
