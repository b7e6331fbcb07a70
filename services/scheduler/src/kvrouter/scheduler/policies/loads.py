"""The load of a component's ranks at one moment, as columns."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

_COLUMNS = 7


class RankLoad(NamedTuple):
    """Load of one rank, as in ``Loads``."""

    active_blocks: int = 0
    prefill_tokens: int = 0
    requests: int = 0
    leading_active_blocks: int = 0
    head_prefill_tokens: int = 0
    prefill_requests: int = 0


class Loads(msgspec.Struct, frozen=True, dict=True):
    """Load as columns of shape (ranks,), in the order of the registered ranks: views of the packed bytes."""

    packed: bytes
    """The columns, as in ``kvrouter.core.interface.LoadColumns``."""
    now: float
    """Time at which they were read, seconds."""

    @cached_property
    def rows(self) -> NDArray[np.int64]:
        """The packed columns as rows; the last one has the bits of float64."""
        return np.ndarray((_COLUMNS, len(self.packed) // (8 * _COLUMNS)), np.int64, self.packed)

    def at(self, places: NDArray[np.intp]) -> Loads:
        """Returns the load of some of the ranks."""
        return Loads(self.rows[:, places].tobytes(), self.now)

    @property
    def active_blocks(self) -> NDArray[np.int64]:
        """Distinct active blocks, with those of the request to place, if there is one."""
        column: NDArray[np.int64] = self.rows[0]
        return column

    @property
    def prefill_tokens(self) -> NDArray[np.int64]:
        """Prefill tokens booked and not computed, without those of this request."""
        column: NDArray[np.int64] = self.rows[1]
        return column

    @property
    def requests(self) -> NDArray[np.int64]:
        """Booked sequences."""
        column: NDArray[np.int64] = self.rows[2]
        return column

    @property
    def leading_active_blocks(self) -> NDArray[np.int64]:
        """Leading active blocks of the request to place."""
        column: NDArray[np.int64] = self.rows[3]
        return column

    @property
    def head_prefill_tokens(self) -> NDArray[np.int64]:
        """Uncached tokens of the prompt under computation, the oldest one; 0 if no prompt waits."""
        column: NDArray[np.int64] = self.rows[4]
        return column

    @property
    def prefill_requests(self) -> NDArray[np.int64]:
        """Requests without a first token that had uncached tokens, including this one."""
        column: NDArray[np.int64] = self.rows[5]
        return column

    @property
    def head_prefill_since(self) -> NDArray[np.float64]:
        """Time at which that prompt became the oldest, seconds of the clock; infinite if no prompt waits."""
        column: NDArray[np.int64] = self.rows[6]
        return column.view(np.float64)

    @property
    def head_prefill_seconds(self) -> NDArray[np.float64]:
        """Seconds since that prompt became the oldest; 0 if no prompt waits."""
        return np.maximum(self.now - self.head_prefill_since, 0.0)
