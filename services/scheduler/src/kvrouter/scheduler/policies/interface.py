"""What a policy gets and what it gives back.

A policy sees the candidates as columns, numpy arrays: entry i of each speaks of ``ranks[i]``. It weighs them, and names
one by its index, or one to wait for. It keeps no state and does no I/O; all that it may know is in the facts. Columns
are added when a policy needs more, so that those that are there keep their meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, ClassVar, Protocol

import numpy as np
from kvrouter.core import Rank
from numpy.typing import NDArray

Column = NDArray[np.int64]
"""A whole number for each candidate."""

Amounts = NDArray[np.float64]
"""A number for each candidate."""


@dataclass(frozen=True, slots=True)
class SchedulingContext:
    """A request, and the candidates that it may go to: one at least, in order of rank, none of them busy."""

    prompt_tokens: int
    """Tokens of the prompt, 1 or more."""
    block_size: int
    """Tokens per block."""
    overlap_score_weight: float
    """Weight of prefill blocks against decode blocks, 0 or more."""
    temperature: float
    """Softmax temperature, 0 or more; 0 takes the best."""
    previous: Rank | None
    """The rank that this policy chose last in the component; None if it has not chosen yet."""
    ranks: tuple[Rank, ...]
    overlap_blocks: Column
    """Leading blocks of the prompt in device memory; 0 for all where overlaps are not to be had."""
    new_prefill_tokens: Column
    """Prompt tokens that the rank would have to compute for this request."""
    prefill_tokens: Column
    """Prefill tokens booked and not done, without those of this request."""
    active_blocks: Column
    """Distinct blocks of requests in flight once this request is added; 0 for all where blocks are not tracked."""
    leading_active_blocks: Column
    """Leading blocks of this request that requests in flight use there."""
    active_requests: Column
    """Requests booked."""
    total_blocks: Column
    """KV blocks in device memory; 0 if unknown."""
    max_batched_tokens: Column
    """Most prompt tokens computed in one step; 0 if unknown."""
    head_prefill_tokens: Column
    """Prefill tokens of the request that was booked first of those without a first token; 0 where there is none."""
    head_prefill_seconds: Amounts
    """Seconds since that one became the first."""
    prefill_requests: Column
    """Requests booked without a first token."""
    latency_calibration: float = 1.0
    """Time that prefills have taken of late, over what was forecast."""


def _unexplained(index: int) -> str:  # noqa: ARG001 - stands in for a formula
    return ""


@dataclass(frozen=True, slots=True)
class Explanation:
    """How the candidates compared."""

    reason: str
    """Why this one, for a person."""
    costs: NDArray[Any] | Sequence[float] = ()
    """Cost by candidate, in the policy's unit; empty for a policy that weighs nothing."""
    terms: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Terms of the cost by name: a column each."""
    formula: Callable[[int], str] = _unexplained
    """Writes the cost of one candidate out, given its index. Called only when somebody asks."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The request goes to ``ranks[index]``."""

    index: int
    explanation: Explanation
    prefill_tokens: int | None = None
    """Prompt tokens that the policy takes the rank to compute; None: ``new_prefill_tokens``."""
    forecast_ms: float | None = None
    """Time to the first token, by which the pace is learned; None: no forecast, or too much plays into it."""


@dataclass(frozen=True, slots=True)
class Wait:
    """The request had better wait for ``ranks[index]``."""

    index: int
    explanation: Explanation
    work_ms: float = 0.0
    """Time that its prompt takes there, ms."""
    room_tokens: int = 0
    """KV cache that it adds to what is in use there, tokens: those that need little go first."""
    rank: Rank | None = None
    """``ranks[index]``: when others that wait for it find no room there, this one is not tried either. None: it is."""
    prefill_tokens: int | None = None
    """As in ``Choice``."""


class Policy(Protocol):
    """A way to choose."""

    name: ClassVar[str]
    """The mode's name in options and requests."""
    uses_overlap: ClassVar[bool]
    """Whether ``overlap_blocks`` matters, so that an Indexer is worth asking."""
    needs_worker: ClassVar[bool]
    """Whether the request must name its worker."""

    def decide(self, context: SchedulingContext, rng: Random) -> Choice | Wait:
        """Chooses. ``rng`` is the only source of chance."""
        ...


def rank_label(rank: Rank) -> str:
    """A rank's name in formulas: ``worker_1``, and ``worker_1_dp2`` for a data parallel rank above 0."""
    worker_id, dp_rank = rank
    return f"worker_{worker_id}_dp{dp_rank}" if dp_rank else f"worker_{worker_id}"


def draw_lowest(values: NDArray[Any], rng: Random) -> int:
    """Index of the lowest value; among equals, any with the same chance."""
    lowest = np.flatnonzero(values == values.min())
    return int(lowest[rng.randrange(len(lowest))])
