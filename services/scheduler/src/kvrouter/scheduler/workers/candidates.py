"""Candidates, the constraints of a request, and the live ranks of a component with their properties as columns."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from kvrouter.core import Rank
from kvrouter.runtime.requests import serves
from kvrouter.scheduler.policies.interface import Amounts, Column, Mask
from kvrouter.v1.common_pb2 import Role, RoutingRequest, Stage, Tier
from kvrouter.v1.errors import BadRequest, UnknownWorker
from kvrouter.v1.registry_pb2 import WorkerRegistration
from numpy.typing import NDArray

LOWER_TIERS = (Tier.TIER_HOST, Tier.TIER_DISK, Tier.TIER_SHARED)
"""Tiers below device memory, from the fastest: the rows of their columns."""

_MAX_SHOWN_RANKS = 32


@dataclass(frozen=True, slots=True)
class Candidate:
    """A registered rank of a live worker."""

    rank: Rank
    endpoint: str
    role: Role
    incarnation: int
    """Incarnation of its cache."""
    total_blocks: int
    """KV blocks in device memory; 0 if unknown."""
    max_batched_tokens: int
    """Most tokens of one step of the engine; 0 if unknown."""
    max_sequences: int
    """Requests run at once by the engine of the rank; 0 if unknown."""
    draining: bool
    publishes_events: bool
    labels: Mapping[str, str]
    lora_names: frozenset[str]
    reads_shared_storage: bool = False
    """Whether it loads blocks from shared storage that others have stored."""
    load_gb_per_second: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Bandwidth of loads from host memory, disk and shared storage, 10^9 bytes per second; 0 where unknown."""


def candidates_of(workers: Iterable[WorkerRegistration]) -> tuple[Candidate, ...]:
    """Returns every rank of the workers, in order of rank."""
    candidates = [
        Candidate(
            rank=(worker.worker_id, rank.dp_rank),
            endpoint=worker.endpoint,
            role=worker.role,
            incarnation=rank.incarnation,
            total_blocks=rank.total_blocks,
            max_batched_tokens=worker.max_batched_tokens,
            max_sequences=worker.max_sequences,
            draining=worker.draining,
            publishes_events=worker.publishes_events,
            labels=dict(worker.labels),
            lora_names=frozenset(worker.lora_names),
            reads_shared_storage=worker.reads_shared_storage,
            load_gb_per_second=_bandwidths(worker),
        )
        for worker in workers
        for rank in worker.ranks
    ]
    return tuple(sorted(candidates, key=lambda candidate: candidate.rank))


def _bandwidths(worker: WorkerRegistration) -> tuple[float, float, float]:
    known = {each.tier: each.load_gb_per_second for each in worker.storage_tiers}
    host, disk, shared = (max(0.0, known.get(tier, 0.0)) for tier in LOWER_TIERS)
    return host, disk, shared


@dataclass(frozen=True)
class WorkerConstraints:
    """Constraints of a request on its rank."""

    stage: Stage = Stage.STAGE_WHOLE
    worker_id: int | None = None
    """The required worker; None for any."""
    dp_rank: int | None = None
    """The required rank; None for any."""
    allowed: frozenset[int] = frozenset()
    """Allowed workers; empty allows all."""
    excluded: frozenset[int] = frozenset()
    """Excluded workers."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Required labels of the worker."""
    lora_name: str = ""
    """Required adapter; empty for the base model."""
    avoided: Mapping[int, str] = field(default_factory=dict)
    """Workers to use only if no other fits, each with the reason; empty if it is unknown."""
    even_if_draining: bool = False
    """Whether a draining worker fits too, because it runs the request already."""

    @cached_property
    def anywhere(self) -> bool:
        """Whether every rank of the stage fits."""
        named = self.worker_id is not None or self.dp_rank is not None
        return not (named or self.allowed or self.excluded or self.labels or self.lora_name)

    @classmethod
    def of(cls, request: RoutingRequest, stage: Stage) -> WorkerConstraints:
        """Returns the constraints of a request."""
        lora_name = request.scope.lora_name if "scope" in request else ""
        if not lora_name and "constraints" not in request:
            return _UNCONSTRAINED[stage]
        constraints = request.constraints
        return cls(
            stage=stage,
            worker_id=constraints.worker_id if "worker_id" in constraints else None,
            dp_rank=constraints.dp_rank if "dp_rank" in constraints else None,
            allowed=frozenset(constraints.allowed_worker_ids),
            excluded=frozenset(constraints.excluded_worker_ids),
            avoided={each.worker_id: each.reason for each in reversed(constraints.avoided_workers)},
            labels=dict(constraints.required_labels),
            lora_name=lora_name,
        )


_UNCONSTRAINED = {
    stage: WorkerConstraints(stage) for stage in (Stage.STAGE_WHOLE, Stage.STAGE_PREFILL, Stage.STAGE_DECODE)
}


def check_pinned(candidates: Iterable[Candidate], constraints: WorkerConstraints, component: object = None) -> None:
    """Checks the worker and rank named by a request, if any. ``component`` is for the error.

    Raises:
        BadRequest: no worker has the rank.
        UnknownWorker: the worker is not registered, or does not have the rank.
    """
    if constraints.worker_id is None and constraints.dp_rank is None:
        return
    ranks = [candidate.rank for candidate in candidates]
    if constraints.worker_id is None:
        known = sorted({dp_rank for _, dp_rank in ranks})
        if known and constraints.dp_rank not in known:
            shown = ", ".join(map(str, known[:_MAX_SHOWN_RANKS]))
            raise BadRequest(
                f"no worker has data-parallel rank {constraints.dp_rank}",
                field="constraints.dp_rank",
                advice=f"Use one of: {shown}.",
                known=known,
            )
        return
    pinned = [dp_rank for worker_id, dp_rank in ranks if worker_id == constraints.worker_id]
    if not pinned:
        raise UnknownWorker(constraints.worker_id, {worker_id for worker_id, _ in ranks}, component=component)
    if constraints.dp_rank is not None and constraints.dp_rank not in pinned:
        known_workers = {worker_id for worker_id, _ in ranks}
        raise UnknownWorker(constraints.worker_id, known_workers, dp_rank=constraints.dp_rank, component=component)


def why_unfit(candidate: Candidate, constraints: WorkerConstraints) -> str:
    """Returns why a candidate does not satisfy the constraints, whatever its load; empty if it does."""
    worker_id, dp_rank = candidate.rank
    if constraints.worker_id is not None and worker_id != constraints.worker_id:
        return "another worker is named"
    if constraints.dp_rank is not None and dp_rank != constraints.dp_rank:
        return "another rank is named"
    if constraints.allowed and worker_id not in constraints.allowed:
        return "not among the allowed workers"
    if worker_id in constraints.excluded:
        return "excluded by the request"
    if candidate.draining and not constraints.even_if_draining:
        return "draining"
    if not serves(candidate.role, constraints.stage):
        return f"its role {Role.Name(candidate.role)} does not serve {Stage.Name(constraints.stage)}"
    for label, value in constraints.labels.items():
        if candidate.labels.get(label) != value:
            return f"label {label} is {candidate.labels.get(label, '')!r}, not {value!r}"
    if constraints.lora_name and constraints.lora_name not in candidate.lora_names:
        return f"does not serve the adapter {constraints.lora_name!r}"
    return ""


Places = NDArray[np.intp]
"""Indexes of candidates in the worker set, ascending."""


class ListedRanks:
    """Immutable list of ranks, each with the incarnation of its cache."""

    def __init__(self, ranks: Sequence[Rank], incarnations: NDArray[np.uint64]) -> None:
        """Entry i of ``incarnations`` belongs to rank i."""
        self.incarnations = incarnations
        self.place_of = {rank: place for place, rank in enumerate(ranks)}
        """Index of each rank."""


class Sources(NamedTuple):
    """Where another list of ranks has each candidate."""

    places: Places
    """Index in the list; -1 if the candidate is not listed."""
    current: Mask
    """Whether it is listed, with its registered incarnation where known."""
    equal: bool
    """Whether the list has the candidates in their order, with these incarnations, and nothing else."""


class WorkerSet:
    """Immutable set of candidates. Entry i of each column belongs to ``candidates[i]``."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        """``candidates`` are in order of rank."""
        self.candidates = tuple(candidates)
        self.ranks: tuple[Rank, ...] = tuple(candidate.rank for candidate in candidates)
        self.zeros: Column = np.zeros(len(candidates), np.int64)
        self.total_blocks = self._column(candidate.total_blocks for candidate in candidates)
        self.block_limits: Amounts = np.where(self.total_blocks, self.total_blocks, np.inf)
        """KV blocks of each; infinite where unknown."""
        self.largest_cache = int(self.total_blocks.max()) if len(candidates) and self.total_blocks.all() else 0
        """Most KV blocks of a candidate; 0 if those of one of them are unknown."""
        self._smallest_cache = self.total_blocks.min() if self.total_blocks.any() else math.inf
        """Least KV blocks of a candidate, 0 if those of one are unknown; infinite if those of none are known."""
        self.max_batched_tokens = self._column(candidate.max_batched_tokens for candidate in candidates)
        self.slots: Amounts = np.array([candidate.max_sequences or np.inf for candidate in candidates], np.float64)
        """Requests run at once by each; infinite where unknown."""
        self.incarnations = np.array([candidate.incarnation for candidate in candidates], np.uint64)
        self.without_events = frozenset(each.rank for each in candidates if not each.publishes_events)
        """Ranks whose cache no Indexer knows."""
        self.reads_shared_storage = self._those_where(each.reads_shared_storage for each in candidates)
        bandwidths = [each.load_gb_per_second for each in candidates]
        self.load_gb_per_second: Amounts = np.array(bandwidths, np.float64).reshape(-1, len(LOWER_TIERS)).T
        """Registered bandwidth of loads: a row for each lower tier; 0 where unknown."""
        self._worker_ids = np.array([worker_id for worker_id, _ in self.ranks], np.uint64)
        self._dp_ranks = np.array([dp_rank for _, dp_rank in self.ranks], np.uint32)
        self._place_of = {rank: place for place, rank in enumerate(self.ranks)}
        self._draining = self._those_where(candidate.draining for candidate in candidates)
        self.accepting: Mask = ~self._draining
        """Which candidates accept new requests."""
        self.knows_slots = bool(np.isfinite(self.slots).any())
        """Whether the slots of any candidate are known."""
        self.limits_requests = bool(self.accepting.any() and np.isfinite(self.slots[self.accepting]).all())
        """Whether any candidate accepts requests, and all accepting ones have known slots."""
        self.accepted_slots = float(self.slots[self.accepting].sum())
        """Slots of the accepting candidates; infinite if some are unknown."""
        total = self.total_blocks[self.accepting]
        self.accepted_blocks = float(total.sum()) if total.all() else math.inf
        """KV blocks of the accepting candidates; infinite if some are unknown."""
        self.nowhere: Mask = np.zeros(len(candidates), np.bool_)
        """No candidate."""
        self._labelled: dict[tuple[str, str], list[int]] = defaultdict(list)
        self._adapted: dict[str, list[int]] = defaultdict(list)
        for place, candidate in enumerate(candidates):
            for label in candidate.labels.items():
                self._labelled[label].append(place)
            for lora_name in candidate.lora_names:
                self._adapted[lora_name].append(place)
        self._serving: dict[Stage, tuple[Mask, Places]] = {}
        self._sources: tuple[ListedRanks, Sources] | None = None

    def __len__(self) -> int:
        """Returns the number of candidates."""
        return len(self.candidates)

    def place(self, rank: Rank) -> int | None:
        """Returns the index of a rank; None if it is not registered."""
        return self._place_of.get(rank)

    def column(self, amounts: Mapping[Rank, int]) -> Column:
        """Returns an amount of each candidate, 0 where none is given."""
        column = self.zeros.copy()
        for rank, amount in amounts.items():
            if (place := self.place(rank)) is not None:
                column[place] = amount
        return column

    def candidate(self, rank: Rank) -> Candidate | None:
        """Returns the candidate of a rank; None if it is not registered."""
        place = self._place_of.get(rank)
        return None if place is None else self.candidates[place]

    def of_workers(self, worker_ids: Collection[int]) -> Mask:
        """Returns which candidates are ranks of the workers."""
        return np.isin(self._worker_ids, np.array(list(worker_ids), np.uint64))

    def fit(self, constraints: WorkerConstraints) -> Places:
        """Returns the candidates within a request's constraints, whatever their load (see ``why_unfit``)."""
        serving, places = self._serving.get(constraints.stage) or self._that_serve(constraints.stage)
        if constraints.anywhere:
            return places
        mask = self._with_role(constraints.stage) if constraints.even_if_draining else serving.copy()
        if constraints.worker_id is not None:
            mask &= self._worker_ids == constraints.worker_id
        if constraints.dp_rank is not None:
            mask &= self._dp_ranks == constraints.dp_rank
        if constraints.allowed:
            mask &= self.of_workers(constraints.allowed)
        if constraints.excluded:
            mask &= ~self.of_workers(constraints.excluded)
        for label in constraints.labels.items():
            mask &= self._those_at(self._labelled.get(label, []))
        if constraints.lora_name:
            mask &= self._those_at(self._adapted.get(constraints.lora_name, []))
        return np.flatnonzero(mask)

    def preferred(self, places: Places, avoided: Collection[int]) -> Places:
        """Returns the candidates without those of avoided workers; all candidates if none would remain."""
        others = places[~self.of_workers(avoided)[places]]
        return others if len(others) else places

    def with_room(self, places: Places, blocks: int) -> Places:
        """Returns all candidates, or those with the largest KV cache if no cache has more than ``blocks``."""
        if blocks < self._smallest_cache:
            return places
        total = self.total_blocks[places]
        return places if not total.all() or (total > blocks).any() else places[total == total.max(initial=0)]

    def sources(self, listed: ListedRanks) -> Sources:
        """Returns where another list of ranks has each candidate.

        The last result is cached: an Indexer lists the same ranks until one joins, restarts or leaves.
        """
        if self._sources is None or self._sources[0] is not listed:
            places = np.array([listed.place_of.get(rank, -1) for rank in self.ranks], np.intp)
            is_same = (listed.incarnations[places] == self.incarnations) | (self.incarnations == 0)
            current = (places >= 0) & is_same
            in_order = np.array_equal(places, np.arange(len(listed.incarnations)))
            self._sources = (listed, Sources(places, current, in_order and bool(current.all())))
        return self._sources[1]

    def _that_serve(self, stage: Stage) -> tuple[Mask, Places]:
        mask = self.accepting & self._with_role(stage)
        serving = self._serving[stage] = (mask, np.flatnonzero(mask))
        return serving

    def _with_role(self, stage: Stage) -> Mask:
        return self._those_where(serves(each.role, stage) for each in self.candidates)

    def _column(self, values: Iterable[int]) -> Column:
        return np.fromiter(values, np.int64, len(self.candidates))

    def _those_where(self, values: Iterable[bool]) -> Mask:
        return np.fromiter(values, np.bool_, len(self.candidates))

    def _those_at(self, places: Sequence[int]) -> Mask:
        mask = np.zeros(len(self.candidates), np.bool_)
        mask[np.array(places, np.intp)] = True
        return mask
