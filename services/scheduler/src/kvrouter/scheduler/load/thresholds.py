"""Busy thresholds in force, by model: those set at run time, over those of the options.

etcd stores what was set, so all Schedulers share it and restarts keep it. Without etcd each process has its own.

A rank is busy while its load is strictly above a threshold. Its load is the greater of the booked and the reported one;
its blocks count only if their total is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np
import structlog
from kvrouter.net.decoding import Quarantine, Undecodable, decode_message
from kvrouter.net.etcd import AWAY, Delete, EtcdAccess, Put, Snapshot, connect, watch_prefix
from kvrouter.runtime.errors import BadRequest, DependencyAway
from kvrouter.scheduler.load.reported_load import Reported
from kvrouter.scheduler.policies.interface import Amounts, Column, Mask
from kvrouter.scheduler.request.options import Thresholds, ThresholdUpdate
from kvrouter.scheduler.workers.candidates import Candidate
from kvrouter.v1.events_pb2 import LoadReport
from kvrouter.v1.names import namespace_prefix, threshold_key
from kvrouter.v1.registry_pb2 import BusyThresholdsRecord

log = structlog.get_logger(component="scheduler")

_TRIES = 16
"""Attempts to write a key that others write at the same time."""


class ThresholdBoard:
    """Thresholds by model, as this process knows them."""

    def __init__(self, at_start: Thresholds) -> None:
        self._at_start = at_start
        self._set: dict[str, Thresholds] = {}

    def of(self, model: str) -> Thresholds:
        """Returns the thresholds in force for a model."""
        was_set = self._set.get(model)
        return self._at_start if was_set is None else was_set.over(self._at_start)

    def was_set(self, model: str) -> Thresholds:
        """Returns the thresholds set at run time for a model, without those of the options."""
        return self._set.get(model, Thresholds())

    def in_force(self, models: Iterable[str]) -> dict[str, Thresholds]:
        """Returns the thresholds of every model that has any, among the given models and those that were set."""
        every = {model: self.of(model) for model in sorted({*models, *self._set})}
        return {model: thresholds for model, thresholds in every.items() if thresholds.any_set}

    def replace(self, thresholds: Mapping[str, Thresholds]) -> None:
        """Replaces everything that was set."""
        self._set = dict(thresholds)

    def put(self, model: str, thresholds: Thresholds | None) -> None:
        """Replaces what was set for one model; None removes it."""
        if thresholds is None:
            self._set.pop(model, None)
        else:
            self._set[model] = thresholds


class OwnThresholds:
    """Updates the thresholds of this process alone, without etcd."""

    synced = True
    """Always true: there is nothing to read."""

    def __init__(self, board: ThresholdBoard) -> None:
        self._board = board

    async def update(self, model: str, update: ThresholdUpdate) -> Thresholds:
        """Applies an update. Returns the thresholds in force."""
        self._board.put(model, update.apply(self._board.was_set(model)))
        log.info("busy_thresholds.set", model=model, **_shown(self._board.was_set(model)))
        return self._board.of(model)


class SharedThresholds:
    """Follows the thresholds in etcd and writes updates there. ``run`` must be running."""

    def __init__(
        self, board: ThresholdBoard, etcd: str | EtcdAccess, namespace: str, quarantine: Quarantine | None = None
    ) -> None:
        self._quarantine = Quarantine() if quarantine is None else quarantine
        self._board = board
        self._etcd = etcd
        self._namespace = namespace
        self._prefix = f"{namespace_prefix(namespace)}thresholds/"
        self.synced = False
        """Whether etcd has been read once."""

    async def update(self, model: str, update: ThresholdUpdate) -> Thresholds:
        """Applies an update. Returns the thresholds in force.

        Raises:
            DependencyAway: etcd is unreachable, or others keep writing; nothing is set.
        """
        key = threshold_key(self._namespace, model).encode()
        try:
            async with connect(self._etcd) as client:
                for _ in range(_TRIES):
                    found = await client.get(key)
                    before = None if found is None else self._read(key.decode(), found.value)
                    merged = update.apply(before or Thresholds())
                    record = BusyThresholdsRecord(model=model, thresholds=merged.to_message())
                    revision = 0 if found is None else found.mod_revision
                    written, _responses = await client.transaction(
                        compare=[client.transactions.mod(key) == revision],
                        success=[client.transactions.put(key, record.SerializeToString())],
                        failure=[],
                    )
                    if written:
                        self._board.put(model, merged)
                        log.info("busy_thresholds.set", model=model, **_shown(merged))
                        return self._board.of(model)
        except AWAY as error:
            raise DependencyAway(f"etcd is unreachable, the thresholds are unchanged: {error}") from None
        raise DependencyAway(
            f"others changed the thresholds of {model!r} at the same time; they are unchanged, try again"
        )

    async def run(self) -> None:
        """Follows etcd until cancelled."""
        watch = watch_prefix(self._etcd, self._prefix, quarantine=self._quarantine)
        async with aclosing(watch) as changes:
            async for change in changes:
                match change:
                    case Snapshot(entries):
                        read = {self._model(key): self._read(key, value) for key, value in entries.items()}
                        self._board.replace({model: value for model, value in read.items() if value is not None})
                        self.synced = True
                    case Put(key, value):
                        read_value = self._read(key, value)
                        if read_value is not None:
                            self._board.put(self._model(key), read_value)
                    case Delete(key):
                        self._board.put(self._model(key), None)

    def _model(self, key: str) -> str:
        return key.removeprefix(self._prefix)

    def _read(self, key: str, value: bytes) -> Thresholds | None:
        """Returns the thresholds of a record; None if it cannot be used, which quarantines it."""
        try:
            try:
                thresholds = Thresholds.of(decode_message(BusyThresholdsRecord, value).thresholds)
            except BadRequest as error:
                raise Undecodable("invalid", str(error)) from None
        except Undecodable as error:
            self._quarantine.reject("etcd", key, error)
            return None
        self._quarantine.release("etcd", key)
        return thresholds


def _shown(thresholds: Thresholds) -> dict[str, float | int | None]:
    return {"decode_blocks": thresholds.decode_blocks, "prefill_tokens": thresholds.prefill_tokens}


@dataclass(frozen=True, slots=True)
class Load:
    """The load that thresholds are compared with, as columns of shape (candidates,)."""

    shares: Amounts
    """Share of the blocks that is active."""
    prefill_tokens: Column

    @classmethod
    def of(cls, active_blocks: Column, prefill_tokens: Column, total_blocks: Column, reported: Reported) -> Load:
        """Returns the greater of booked load, without the request to place, and reported load."""
        booked = np.where(total_blocks > 0, active_blocks / np.maximum(total_blocks, 1), 0.0)
        return cls(np.maximum(booked, reported.shares), np.maximum(prefill_tokens, reported.prefill_tokens))

    def above(self, thresholds: Thresholds) -> Mask:
        """Returns which candidates are busy."""
        busy = np.zeros(len(self.shares), np.bool_)
        if thresholds.decode_blocks is not None:
            busy |= self.shares > thresholds.decode_blocks
        if thresholds.prefill_tokens is not None:
            busy |= self.prefill_tokens > thresholds.prefill_tokens
        return busy

    def why(self, thresholds: Thresholds, place: int) -> str:
        """Returns why the candidate at an index is busy; empty if it is not."""
        return _why(thresholds, float(self.shares[place]), int(self.prefill_tokens[place]))


def why_busy(
    candidate: Candidate,
    thresholds: Thresholds,
    *,
    active_blocks: int,
    prefill_tokens: int,
    report: LoadReport | None,
) -> str:
    """Returns why a rank is busy; empty if it is not.

    Args:
        candidate: The rank.
        thresholds: Thresholds in force.
        active_blocks: Distinct blocks of booked requests, without the request to place.
        prefill_tokens: Prefill tokens booked and not computed.
        report: Newest load report of the rank; None if there is no recent one.
    """
    shares = [active_blocks / candidate.total_blocks] if candidate.total_blocks else []
    if report is not None and report.total_blocks:
        shares.append(report.active_blocks / report.total_blocks)
    tokens = max(prefill_tokens, 0 if report is None else report.prefill_tokens)
    return _why(thresholds, max(shares, default=0.0), tokens)


def _why(thresholds: Thresholds, share: float, tokens: int) -> str:
    if thresholds.decode_blocks is not None and share > thresholds.decode_blocks:
        return f"busy: {share:.3f} of its blocks are active, above {thresholds.decode_blocks:g}"
    if thresholds.prefill_tokens is not None and tokens > thresholds.prefill_tokens:
        return f"busy: {tokens} prefill tokens, above {thresholds.prefill_tokens}"
    return ""
