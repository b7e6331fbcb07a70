"""The live ranks of a component with their registered properties, as columns."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from kvrouter.core import Rank
from kvrouter.scheduler.policies.interface import Amounts, Column, Mask
from kvrouter.scheduler.workers.candidates import Candidate, WorkerConstraints, serves
from kvrouter.v1.common_pb2 import Stage
from numpy.typing import NDArray

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
        self.largest_cache = int(self.total_blocks.max()) if len(candidates) and self.total_blocks.all() else 0
        """Most KV blocks of a candidate; 0 if those of one of them are unknown."""
        self.max_batched_tokens = self._column(candidate.max_batched_tokens for candidate in candidates)
        self.slots: Amounts = np.array([candidate.max_sequences or np.inf for candidate in candidates], np.float64)
        """Requests run at once by each; infinite where unknown."""
        self.incarnations = np.array([candidate.incarnation for candidate in candidates], np.uint64)
        self.without_events = frozenset(each.rank for each in candidates if not each.publishes_events)
        """Ranks whose cache no Indexer knows."""
        self._worker_ids = np.array([worker_id for worker_id, _ in self.ranks], np.uint64)
        self._dp_ranks = np.array([dp_rank for _, dp_rank in self.ranks], np.uint32)
        self._place_of = {rank: place for place, rank in enumerate(self.ranks)}
        self._draining = self._those_where(candidate.draining for candidate in candidates)
        self.accepting: Mask = ~self._draining
        """Which candidates accept new requests."""
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

    def candidate(self, rank: Rank) -> Candidate | None:
        """Returns the candidate of a rank; None if it is not registered."""
        place = self.place(rank)
        return None if place is None else self.candidates[place]

    def fit(self, constraints: WorkerConstraints) -> Places:
        """Returns the candidates within a request's constraints, whatever their load (see ``why_unfit``)."""
        serving, places = self._that_serve(constraints.stage)
        if constraints.anywhere:
            return places
        mask = self._with_role(constraints.stage) if constraints.even_if_draining else serving.copy()
        if constraints.worker_id is not None:
            mask &= self._worker_ids == constraints.worker_id
        if constraints.dp_rank is not None:
            mask &= self._dp_ranks == constraints.dp_rank
        if constraints.allowed:
            mask &= np.isin(self._worker_ids, np.array(list(constraints.allowed), np.uint64))
        if constraints.excluded:
            mask &= ~np.isin(self._worker_ids, np.array(list(constraints.excluded), np.uint64))
        for label in constraints.labels.items():
            mask &= self._those_at(self._labelled.get(label, []))
        if constraints.lora_name:
            mask &= self._those_at(self._adapted.get(constraints.lora_name, []))
        return np.flatnonzero(mask)

    def preferred(self, places: Places, avoided: Collection[int]) -> Places:
        """Returns the candidates without those of avoided workers; all candidates if none would remain."""
        if not avoided:
            return places
        others = places[~np.isin(self._worker_ids[places], np.array(list(avoided), np.uint64))]
        return others if len(others) else places

    def with_room(self, places: Places, blocks: int) -> Places:
        """Returns all candidates, or those with the largest KV cache if no cache has more than ``blocks``."""
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
        serving = self._serving.get(stage)
        if serving is None:
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
