"""Locates the snapshots of a worker's ranks, and decides whether a restarted relay can resume from them."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator, Mapping
from pathlib import Path

from kvrouter.net.logs import get_logger
from kvrouter.publisher.config import WorkerConfig
from kvrouter.publisher.errors import InvalidConfig
from kvrouter.publisher.snapshots.rank_file import Identity, RankFile, Recovered, Unusable, recover

log = get_logger(__name__)


def _path(config: WorkerConfig, directory: Path, dp_rank: int) -> Path:
    return (
        directory / f"{config.component.namespace}-{config.component.name}-{config.worker_id:016x}-{dp_rank}.snapshot"
    )


def _identity(config: WorkerConfig, dp_rank: int) -> Identity:
    return Identity(
        config.component,
        config.worker_id,
        dp_rank,
        config.block_size,
        config.copy_counting,
        config.engine_incarnation,
    )


def recover_worker(config: WorkerConfig) -> tuple[dict[int, Recovered], dict[int, int]]:
    """Returns the recovered state by rank, and the blocks in each file.

    There are no states unless all ranks have one of the same incarnation and engine.
    """
    states: dict[int, Recovered] = {}
    blocks: dict[int, int] = {}
    if config.state is None:
        return states, blocks
    for rank in config.ranks:
        path = _path(config, config.state, rank)
        try:
            states[rank] = recover(path, _identity(config, rank), config.buffer_events, config.buffer_bytes)
            blocks[rank] = states[rank].recorder.counts().blocks
        except Unusable as error:
            blocks[rank] = error.blocks
            if path.exists():
                log.warning("state.not_recovered", path=str(path), blocks=error.blocks, reason=str(error))
    incarnations = {each.incarnation for each in states.values()}
    is_whole = len(states) == len(config.ranks) and len(incarnations) == 1
    return states if is_whole else {}, blocks


def positions(config: WorkerConfig) -> dict[int, int]:
    """Returns for each rank the number of the last engine message in its file; empty if it cannot resume.

    Call it before ``running``. A relay resumes if its engine can repeat all later messages. Otherwise call
    ``discard``, for the worker to begin a new incarnation.
    """
    return {rank: found.position for rank, found in recover_worker(config)[0].items()}


def discard(config: WorkerConfig) -> None:
    """Deletes the files of a worker."""
    if config.state is not None:
        for rank in config.ranks:
            _path(config, config.state, rank).unlink(missing_ok=True)


def files(config: WorkerConfig, recovered: Mapping[int, Recovered]) -> dict[int, RankFile]:
    """Returns the files of a worker's ranks; empty without ``state``."""
    if config.state is None:
        return {}
    return {
        rank: RankFile(_path(config, config.state, rank), _identity(config, rank), recovered.get(rank))
        for rank in config.ranks
    }


@contextlib.contextmanager
def claimed(config: WorkerConfig) -> Iterator[None]:
    """Locks the files of a worker while the context lasts.

    Raises:
        InvalidConfig: another process has locked them, or the directory cannot be created.
    """
    if config.state is None:
        yield
        return
    path = _path(config, config.state, min(config.ranks)).with_suffix(".lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.open("w")
    except OSError as error:
        raise InvalidConfig(f"state: {error}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InvalidConfig(
                f"state: another process uses the files of worker {config.worker_id}; stop it first"
            ) from None
        yield
