"""Busy thresholds in force, by model: those set at run time, over those of the options.

etcd stores them, so all Schedulers share them and restarts keep them. Without etcd each process has its own.

A rank is busy while its load is strictly above a threshold. Its load is the greater of the booked and the reported one;
its blocks count only if their total is known.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import aclosing
from dataclasses import dataclass, field

import numpy as np
import structlog
from kvrouter.net.decoding import Quarantine, Undecodable, decode_message
from kvrouter.net.etcd import AWAY, Delete, EtcdAccess, Put, Snapshot, connect, watch_prefix
from kvrouter.scheduler.load.reported_load import Reported
from kvrouter.scheduler.policies.interface import Amounts, Column, Mask
from kvrouter.scheduler.request.options import Thresholds, ThresholdUpdate
from kvrouter.v1.errors import BadRequest, DependencyAway
from kvrouter.v1.names import namespace_prefix, threshold_key
from kvrouter.v1.registry_pb2 import BusyThresholdsRecord

log = structlog.get_logger(component="scheduler")

_TRIES = 16
"""Attempts to write a key against concurrent writers."""


@dataclass(eq=False)
class ThresholdBoard:
    """Thresholds by model. With etcd, ``run`` must be running, which follows it."""

    at_start: Thresholds
    """Those of the options."""
    etcd: str | EtcdAccess | None = None
    """Where they are stored; None for thresholds of this process."""
    namespace: str = ""
    quarantine: Quarantine = field(default_factory=Quarantine)

    def __post_init__(self) -> None:
        self._set: dict[str, Thresholds] = {}
        self._written: dict[str, int] = {}
        """etcd revision of this process's last write, by model. The watch may still deliver earlier writes."""
        self.synced = self.etcd is None
        """Whether etcd has been read once, if there is one."""

    def of(self, model: str) -> Thresholds:
        """Returns the thresholds in force for a model."""
        was_set = self._set.get(model)
        return self.at_start if was_set is None else was_set.over(self.at_start)

    def in_force(self, models: Iterable[str]) -> dict[str, Thresholds]:
        """Returns the thresholds of every model with any, given or set."""
        every = {model: self.of(model) for model in sorted({*models, *self._set})}
        return {model: thresholds for model, thresholds in every.items() if thresholds.any_set}

    async def update(self, model: str, update: ThresholdUpdate) -> Thresholds:
        """Applies an update. Returns the thresholds in force.

        Raises:
            DependencyAway: etcd is unreachable, or others keep writing; nothing is set.
        """
        if self.etcd is None:
            return self._apply(model, update.apply(self._set.get(model, Thresholds())))
        key = threshold_key(self.namespace, model).encode()
        try:
            async with connect(self.etcd) as client:
                for _ in range(_TRIES):
                    stored = await client.get(key)
                    before = None if stored is None else self._read(key.decode(), stored.value)
                    merged = update.apply(before or Thresholds())
                    record = BusyThresholdsRecord(model=model, thresholds=merged.to_message())
                    revision = 0 if stored is None else stored.mod_revision
                    written, responses = await client.transaction(
                        compare=[client.transactions.mod(key) == revision],
                        success=[client.transactions.put(key, record.SerializeToString())],
                        failure=[],
                    )
                    if written:
                        self._written[model] = responses[0].response_put.header.revision
                        return self._apply(model, merged)
        except AWAY as error:
            raise DependencyAway(f"etcd is unreachable, the thresholds are unchanged: {error}") from None
        raise DependencyAway(
            f"others changed the thresholds of {model!r} at the same time; they are unchanged, try again"
        )

    def _apply(self, model: str, thresholds: Thresholds) -> Thresholds:
        self._set[model] = thresholds
        log.info(
            "busy_thresholds.set",
            model=model,
            decode_blocks=thresholds.decode_blocks,
            prefill_tokens=thresholds.prefill_tokens,
        )
        return self.of(model)

    async def run(self) -> None:
        """Follows etcd until cancelled."""
        if self.etcd is None:
            return
        prefix = f"{namespace_prefix(self.namespace)}thresholds/"
        watch = watch_prefix(self.etcd, prefix, quarantine=self.quarantine)
        async with aclosing(watch) as changes:
            async for change in changes:
                match change:
                    case Snapshot(entries):
                        read = {key.removeprefix(prefix): self._read(key, value) for key, value in entries.items()}
                        self._set = {model: value for model, value in read.items() if value is not None}
                        self._written.clear()  # An etcd that lost its data counts revisions from 1 again.
                        self.synced = True
                    case Put(key, value, revision):
                        model, read_value = key.removeprefix(prefix), self._read(key, value)
                        if read_value is not None and revision >= self._written.get(model, 0):
                            self._set[model] = read_value
                    case Delete(key):
                        self._set.pop(key.removeprefix(prefix), None)

    def _read(self, key: str, value: bytes) -> Thresholds | None:
        """Returns the thresholds of a record; None if it cannot be used, which quarantines it."""
        try:
            try:
                thresholds = Thresholds.of(decode_message(BusyThresholdsRecord, value).thresholds)
            except BadRequest as error:
                raise Undecodable("invalid", error.message) from None
        except Undecodable as error:
            self.quarantine.reject("etcd", key, error)
            return None
        self.quarantine.release("etcd", key)
        return thresholds


@dataclass(frozen=True, slots=True)
class Load:
    """The load to compare with thresholds, as columns of shape (candidates,)."""

    shares: Amounts
    """Active share of the blocks."""
    prefill_tokens: Column

    @classmethod
    def of(cls, active_blocks: Column, prefill_tokens: Column, total_blocks: Amounts, reported: Reported) -> Load:
        """Returns the greater of booked load, without the request to place, and reported load.

        ``total_blocks`` is infinite where unknown.
        """
        shares = np.maximum(active_blocks / total_blocks, reported.shares)
        return cls(shares, np.maximum(prefill_tokens, reported.prefill_tokens))

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
        share, tokens = float(self.shares[place]), int(self.prefill_tokens[place])
        if thresholds.decode_blocks is not None and share > thresholds.decode_blocks:
            return f"busy: {share:.3f} of its blocks are active, above {thresholds.decode_blocks:g}"
        if thresholds.prefill_tokens is not None and tokens > thresholds.prefill_tokens:
            return f"busy: {tokens} prefill tokens, above {thresholds.prefill_tokens}"
        return ""
