"""The interface between the Scheduler and a routing policy.

A policy receives a request and its candidates as columns: numpy arrays whose entry i describes ``ranks[i]``. It returns
the index of one candidate, to go to or to wait for. It keeps no state and does no I/O. New policies may add columns;
the meaning of existing ones does not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from random import Random
from types import MappingProxyType
from typing import Any, ClassVar, Protocol, get_type_hints

import msgspec
import numpy as np
from kvrouter.core import Rank
from kvrouter.scheduler.policies.loads import Loads
from msgspec.structs import replace
from numpy.typing import NDArray

Column = NDArray[np.int64]
"""Integers by candidate, shape (candidates,)."""

Amounts = NDArray[np.float64]
"""Numbers by candidate, shape (candidates,)."""


Mask = NDArray[np.bool_]
"""One boolean for each candidate."""


class SchedulingContext(msgspec.Struct, frozen=True):
    """A request and its candidates: at least one, in order of rank, none of them busy."""

    prompt_tokens: int
    """Tokens of the prompt, at least 1."""
    block_size: int
    """Tokens per block."""
    overlap_score_weight: float
    """Weight of prefill blocks relative to decode blocks, at least 0."""
    temperature: float
    """Softmax temperature, at least 0; 0 takes the cheapest rank."""
    previous: Rank | None
    """Last choice of this policy in the component; None before its first one."""
    ranks: tuple[Rank, ...]
    overlap_blocks: Column
    """Leading blocks of the prompt that the rank need not compute: those in device memory, and the share of those in
    lower tiers that loading saves. 0 everywhere if there is no overlap information."""
    loads: Loads
    """Load of the ranks, which the properties below name."""
    queued_blocks: Column
    """Blocks that the largest request queued for the rank will add; 0 if this request was queued itself."""
    request_limits: Amounts
    """Bookings that the rank may have; infinite if its slots are unknown."""
    is_kept: Mask
    """Whether the request would take room kept for other tenants there."""
    total_blocks: Column
    """KV blocks in device memory; 0 if unknown."""
    max_batched_tokens: Column
    """Most prompt tokens of a step; 0 if unknown."""
    relative_latency: Amounts
    """Ratio of the rank's prefill times to those of the component; 1 while it is unknown."""
    reuse_chance: Amounts
    """Mean chance over the rank's KV cache that a block is used again, 0 for one without content or if unknown."""
    latency_calibration: float = 1.0
    """Ratio of measured to forecast prefill times in the component."""
    expected_output_tokens: float = 0.0
    """Expected length of the output; 0 if unknown."""
    weighed_tokens: Column | None = None
    """``new_prefill_tokens`` in stage decode; None in other stages, where they follow from ``overlap_blocks``."""

    def at(self, places: NDArray[np.intp]) -> SchedulingContext:
        """Returns the context of some of the candidates."""
        ranks = tuple(map(self.ranks.__getitem__, places.tolist()))
        columns = {name: getattr(self, name)[places] for name in _COLUMNS}
        weighed = None if self.weighed_tokens is None else self.weighed_tokens[places]
        return replace(self, ranks=ranks, loads=self.loads.at(places), weighed_tokens=weighed, **columns)

    @property
    def new_prefill_tokens(self) -> Column:
        """Prompt tokens to compute on the rank."""
        if self.weighed_tokens is not None:
            return self.weighed_tokens
        return uncached_tokens(self.prompt_tokens, self.overlap_blocks, self.block_size)

    @property
    def prefill_tokens(self) -> Column:
        """Prefill tokens booked and not computed, without this request."""
        return self.loads.prefill_tokens

    @property
    def active_blocks(self) -> Column:
        """Distinct blocks of requests in flight, with this request; 0 everywhere if blocks are not tracked."""
        return self.loads.active_blocks

    @property
    def leading_active_blocks(self) -> Column:
        """Leading blocks of this request in use by requests in flight on the rank."""
        return self.loads.leading_active_blocks

    @property
    def active_requests(self) -> Column:
        """Requests booked."""
        return self.loads.requests

    @property
    def free_slots(self) -> Amounts:
        """Free slots of the rank; 0 or less if it has none, infinite if its slots are unknown."""
        return self.request_limits - self.active_requests

    @property
    def head_prefill_tokens(self) -> Column:
        """Prefill tokens of the oldest request without a first token; 0 without one."""
        return self.loads.head_prefill_tokens

    @property
    def head_prefill_seconds(self) -> Amounts:
        """Seconds since the oldest request without a first token became the oldest; 0 without one."""
        return self.loads.head_prefill_seconds

    @property
    def prefill_requests(self) -> Column:
        """Requests booked without a first token."""
        return self.loads.prefill_requests

    @property
    def now(self) -> float:
        """Time of the decision, in seconds."""
        return self.loads.now


_COLUMNS = tuple(name for name, kind in get_type_hints(SchedulingContext).items() if kind in (Column, Amounts, Mask))
"""Fields of a context with an entry for each candidate, besides the ranks."""


def _unexplained(index: int) -> str:  # noqa: ARG001 - stands in for a formula
    return ""


class OnDemand(Mapping[str, NDArray[Any]]):
    """Columns by name, made when they are first read: of thousands of decisions a few are explained."""

    def __init__(self, make: Callable[[], dict[str, NDArray[Any]]]) -> None:
        self._make = make

    @cached_property
    def _columns(self) -> dict[str, NDArray[Any]]:
        return self._make()

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)


class Explanation(msgspec.Struct, frozen=True):
    """How the candidates compared."""

    reason: str
    """Why this candidate was chosen, for people."""
    costs: NDArray[Any] | Sequence[float] = ()
    """Cost by candidate, in the policy's unit; empty if the policy has no cost."""
    terms: Mapping[str, NDArray[Any]] = MappingProxyType({})
    """Columns of the cost's terms, by name."""
    formula: Callable[[int], str] = _unexplained
    """Renders the cost of the candidate at an index. Called only on demand."""
    counts_blocks: bool = False
    """Whether the unit of the costs is a block, of the component's block size."""


class Choice(msgspec.Struct, frozen=True):
    """Sends the request to ``ranks[index]``."""

    index: int
    explanation: Explanation
    use_tokens: int = 0
    """As in ``Wait``."""
    prefill_tokens: int | None = None
    """Prompt tokens to compute on the rank; None means ``new_prefill_tokens``."""
    forecast_ms: float | None = None
    """Forecast time to first token in ms at the component's speed, for latency calibration; None if there is none or it
    is unsuitable."""
    idle_forecast_ms: float | None = None
    """Forecast time as above, also for prompts that are unsuitable for calibration; None if the rank computes another
    prompt."""


class Wait(msgspec.Struct, frozen=True):
    """Queues the request until ``ranks[index]`` has room, or until any candidate has a free slot."""

    index: int
    explanation: Explanation
    prefill_ms: float = 0.0
    """Time in ms to compute the prompt there."""
    room_tokens: int = 0
    """KV cache in tokens added by the request there. Requests with less need go first."""
    use_tokens: int = 0
    """The same, or its slot's part of the KV cache if larger. Tenants with less use go first."""
    rank: Rank | None = None
    """``ranks[index]``. A pass over the queue skips further requests for a rank without room; None is always tried.
    """
    prefill_tokens: int | None = None
    """As in ``Choice``."""
    for_slot: bool = False
    """Whether no candidate has a free slot: dispatched, the request would wait in the engine all the same. The request
    also waits for one if it would take room kept for other tenants."""
    keeps_room: bool = False
    """Whether there is room kept for other tenants."""


class Policy(Protocol):
    """A routing policy."""

    name: ClassVar[str]
    """Name of the mode in options and requests."""
    uses_overlap: ClassVar[bool] = False
    """Whether ``overlap_blocks`` matters, and an Indexer is worth a query."""
    needs_worker: ClassVar[bool] = False
    """Whether the request must name its worker."""
    token_ms: ClassVar[float | None] = None
    """Time to compute a prompt token in ms, before latency calibration: a block is worth loading if that takes less.
    None if routing options say what blocks in lower tiers are worth."""
    options: ClassVar[frozenset[str]] = frozenset()
    """Routing options in use; the others in ``kvrouter.scheduler.request.options.OF_POLICIES`` have no effect."""

    def decide(self, context: SchedulingContext, rng: Random) -> Choice | Wait:
        """Chooses a candidate. ``rng`` is the only source of randomness."""


def rank_label(rank: Rank) -> str:
    """Returns a rank's name in formulas: ``worker_1``, or ``worker_1_dp2`` for a data-parallel rank above 0."""
    worker_id, dp_rank = rank
    return f"worker_{worker_id}_dp{dp_rank}" if dp_rank else f"worker_{worker_id}"


def uncached_tokens(prompt_tokens: int, overlap_blocks: Column, block_size: int) -> Column:
    """Returns the tokens of a prompt without those of its leading blocks on each rank."""
    return np.maximum(prompt_tokens - overlap_blocks * block_size, 0)


def any_of(mask: Mask) -> bool:
    """Returns whether any entry is true. numpy's ``any`` takes ten times as long."""
    return 1 in mask.tobytes()


def largest(column: NDArray[Any]) -> int:
    """Returns the largest value of a column, 0 of an empty one. numpy's ``max`` takes three times as long."""
    value: int = column.item(column.argmax()) if len(column) else 0
    return value


def draw_lowest(values: NDArray[Any], rng: Random) -> int:
    """Returns the index of the lowest value; ties are broken at random."""
    return draw((values == values[values.argmin()]).nonzero()[0].tolist(), rng)


def draw(places: Sequence[int], rng: Random) -> int:
    """Returns one of the places at random."""
    return places[0] if len(places) == 1 else rng.choice(places)
