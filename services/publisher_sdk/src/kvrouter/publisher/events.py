"""Engine hashes, and contradictions between reports and the configured copy counting.

An engine hash is the engine's own id of a block, in any form.

A set-like configuration is wrong if the engine removes a block once for each time it stored it. A counting
configuration is wrong if more copies are resident than the rank has blocks: they were stored again without a new copy,
so their removals do not follow.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Iterable, Sequence
from typing import SupportsIndex

from kvrouter.core.interface import EventRecorder, RecorderCounts
from kvrouter.net.logs import get_logger
from kvrouter.publisher.errors import InvalidEvent
from kvrouter.v1.common_pb2 import CopyCounting, Tier

EngineHash = SupportsIndex | bytes
"""A block's id: a number of 64 bits, signed or unsigned (an int, a numpy integer), or a digest of at least 8 bytes."""

_U64 = (1 << 64) - 1


def engine_hash_of(value: EngineHash) -> int:
    """Returns the 64-bit pattern of a hash; of a digest, that of its last 8 bytes, big-endian.

    Raises:
        InvalidEvent: the value has no such form.
    """
    if isinstance(value, bytes | bytearray | memoryview):
        if len(value) < 8:
            raise InvalidEvent(f"expected a digest of at least 8 bytes as an engine hash, received {len(value)} bytes")
        return int.from_bytes(value[-8:], "big")
    try:
        number = operator.index(value)
    except TypeError:
        raise InvalidEvent(f"expected an integer or bytes as an engine hash, received {type(value).__name__}") from None
    if not -(1 << 63) <= number <= _U64:
        raise InvalidEvent(f"expected an engine hash of 64 bits, received {number}")
    return number & _U64


def engine_hashes_of(values: Iterable[EngineHash]) -> Sequence[int]:
    """Returns the 64-bit patterns of hashes, packed: a prompt has thousands.

    Raises:
        InvalidEvent: the values are not iterable, or one is no hash.
    """
    if isinstance(values, bytes | bytearray | str):
        raise InvalidEvent(f"expected a sequence of engine hashes, received {type(values).__name__}")
    if isinstance(values, array) and values.typecode == "Q":
        return values
    try:
        given = list(values)
    except TypeError:
        raise InvalidEvent(f"expected a sequence of engine hashes, received {type(values).__name__}") from None
    try:
        return array("Q", given)  # type: ignore[arg-type] # raises for others than unsigned numbers
    except (OverflowError, TypeError):
        return array("Q", map(engine_hash_of, given))


log = get_logger(__name__)

_MAX_REMEMBERED = 4096


class CopyCountingCheck:
    """Counts and logs contradictions of one rank. Not thread-safe."""

    def __init__(self, dp_rank: int, copy_counting: CopyCounting, total_blocks: int | None) -> None:
        """``total_blocks`` is the rank's capacity in device memory; None if unknown."""
        self.doubts = 0
        """Number of contradictions."""
        self._rank = dp_rank
        self._is_set = copy_counting == CopyCounting.COPY_COUNTING_SET
        self._total_blocks = total_blocks
        self._stored_again: set[tuple[int, Tier]] = set()

    def storing(self, engine_hashes: Sequence[int], recorder: EventRecorder, tier: Tier) -> None:
        """Notes blocks resident in the tier and about to be stored again."""
        if self._is_set:
            for engine_hash in recorder.resident(engine_hashes, tier):
                if len(self._stored_again) < _MAX_REMEMBERED:
                    self._stored_again.add((engine_hash, tier))

    def stored(self, counts: RecorderCounts, tier: Tier) -> None:
        """Compares the copies in device memory with the capacity."""
        if self._is_set or tier != Tier.TIER_DEVICE or self._total_blocks is None:
            return
        if counts.device_copies > self._total_blocks:
            self._doubt(
                expected=f"at most {self._total_blocks} copies in device memory",
                received=f"{counts.device_copies} copies",
                advice="set copy_counting to COPY_COUNTING_SET, or report repeated blocks with new_copies=False",
            )

    def removed_unknown(self, engine_hashes: Sequence[int], recorder: EventRecorder, tier: Tier) -> None:
        """Finds blocks stored twice among removals of blocks no longer resident."""
        twice = [engine_hash for engine_hash in engine_hashes if (engine_hash, tier) in self._stored_again]
        for engine_hash in {*twice}.difference(recorder.resident(twice, tier)):
            self._stored_again.discard((engine_hash, tier))
            self._doubt(
                expected="one removal of a block, however often it was stored",
                received="a removal for each copy",
                advice="set copy_counting to COPY_COUNTING_COUNTED",
            )

    def cleared(self) -> None:
        """Forgets all blocks."""
        self._stored_again.clear()

    def _doubt(self, *, expected: str, received: str, advice: str) -> None:
        self.doubts += 1
        if self.doubts == 1:
            log.warning(
                "publish.copy_counting_doubted", rank=self._rank, expected=expected, received=received, advice=advice
            )
