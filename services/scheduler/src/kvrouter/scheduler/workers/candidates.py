"""Candidates, the constraints of a request, and the reason why a candidate does not satisfy them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from kvrouter.core import Rank
from kvrouter.v1.common_pb2 import Role, RoutingRequest, Stage
from kvrouter.v1.errors import BadRequest, UnknownWorker
from kvrouter.v1.registry_pb2 import WorkerRegistration

_ROLES = {
    # A decode worker can compute prompts itself.
    Stage.STAGE_WHOLE: frozenset({Role.ROLE_UNSPECIFIED, Role.ROLE_BOTH, Role.ROLE_DECODE}),
    Stage.STAGE_PREFILL: frozenset({Role.ROLE_UNSPECIFIED, Role.ROLE_BOTH, Role.ROLE_PREFILL}),
    Stage.STAGE_DECODE: frozenset({Role.ROLE_UNSPECIFIED, Role.ROLE_BOTH, Role.ROLE_DECODE}),
}


_MAX_SHOWN_RANKS = 32
_WHOLE = _ROLES[Stage.STAGE_WHOLE]


def serves(role: Role, stage: Stage) -> bool:
    """Returns whether a worker or component of a role can run a stage."""
    return role in _ROLES.get(stage, _WHOLE)


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
        )
        for worker in workers
        for rank in worker.ranks
    ]
    return tuple(sorted(candidates, key=lambda candidate: candidate.rank))


@dataclass(frozen=True, slots=True)
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

    @property
    def anywhere(self) -> bool:
        """Whether every rank of the stage fits."""
        named = self.worker_id is not None or self.dp_rank is not None
        return not (named or self.allowed or self.excluded or self.labels or self.lora_name)

    @classmethod
    def of(cls, request: RoutingRequest, stage: Stage) -> WorkerConstraints:
        """Returns the constraints of a request."""
        constraints, lora_name = request.constraints, request.scope.lora_name
        if not (lora_name or constraints.ByteSize()):
            return _unconstrained(stage)
        return cls(
            stage=stage,
            worker_id=constraints.worker_id if constraints.HasField("worker_id") else None,
            dp_rank=constraints.dp_rank if constraints.HasField("dp_rank") else None,
            allowed=frozenset(constraints.allowed_worker_ids),
            excluded=frozenset(constraints.excluded_worker_ids),
            avoided={each.worker_id: each.reason for each in reversed(constraints.avoided_workers)},
            labels=dict(constraints.required_labels),
            lora_name=lora_name,
        )


@lru_cache(maxsize=16)
def _unconstrained(stage: Stage) -> WorkerConstraints:
    return WorkerConstraints(stage)


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
