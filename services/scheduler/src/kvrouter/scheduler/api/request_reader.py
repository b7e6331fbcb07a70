"""Reads requests: checks them, finds their component, and returns the context of the decision."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, field, replace
from hashlib import blake2b

import structlog
from kvrouter.scheduler.identifiers import checked_key
from kvrouter.scheduler.load.pools import Pools
from kvrouter.scheduler.load.thresholds import ThresholdBoard
from kvrouter.scheduler.policies.catalogue import POLICIES
from kvrouter.scheduler.policies.load_only import DirectPolicy
from kvrouter.scheduler.request.options import RoutingOptions, Tenant, Thresholds, ignored_overrides, overridden
from kvrouter.scheduler.request.prompt import read_prompt
from kvrouter.scheduler.routing.context import DEFAULT_LEASE_SECONDS, BookingOptions, RequestContext
from kvrouter.scheduler.workers.candidates import WorkerConstraints
from kvrouter.v1.common_pb2 import Role, RoutingRequest, Stage
from kvrouter.v1.errors import BadRequest
from kvrouter.v1.scheduler_pb2 import SelectWorkerRequest

log = structlog.get_logger(component="scheduler")

_DECODE = Stage.STAGE_DECODE  # read once: looking up an enum value by name takes a microsecond

MAX_LEASE_SECONDS = 24 * 3600.0
"""Longest lease. It bounds the load of bookings without a free."""

_MAX_CHOICE_CHARACTERS = 320

_NOT_BOOKED = BookingOptions()
_NOBODY = Tenant()


@dataclass(eq=False)
class RequestReader:
    """Checks requests against the registered components.

    ``options`` apply unless ``thresholds`` of a model, or a request, override them.
    """

    pools: Pools
    thresholds: ThresholdBoard
    options: RoutingOptions
    _: KW_ONLY
    max_prompt_tokens: int = 1 << 32
    _warned: set[tuple[str, str]] = field(default_factory=set, init=False)

    def read_selection(self, request: SelectWorkerRequest) -> RequestContext:
        """Reads a selection with its booking and tenant.

        Raises:
            BadRequest, PromptTooLong, BlockSizeMismatch, UnknownModel, UnknownComponent.
        """
        weight = request.tenant_weight
        lease_seconds = _lease_seconds(request) if "lease_ms" in request else DEFAULT_LEASE_SECONDS
        tenant = Tenant(request.tenant, weight if 0 < weight < math.inf else 1.0)
        key = checked_key(request.booking) if "booking" in request else None
        booking = BookingOptions(key, request.session_id, request.opening_number, lease_seconds, request.restores)
        stage = None if key is None else key[2]
        context = self.read_request(request.request, stage, booking, tenant)
        if context.ignored_overrides:
            self._warn_of_ignored(context)
        return context

    def read_request(
        self,
        request: RoutingRequest,
        stage: Stage | None = None,
        booking: BookingOptions = _NOT_BOOKED,
        tenant: Tenant = _NOBODY,
        *,
        needs_worker: bool = True,
    ) -> RequestContext:
        """Reads a request.

        Args:
            request: The request.
            stage: The stage to book; None for prefill at a component of prefill workers, for decode at one of decode
                workers if the request may be prefilled locally, and else for the whole request.
            booking: The requested booking.
            tenant: Whose request it is.
            needs_worker: Whether a request must name a worker where its mode takes the worker from the request.

        Raises:
            BadRequest, PromptTooLong, BlockSizeMismatch, UnknownModel, UnknownComponent.
        """
        pool = self.pools.find(request, stage or Stage.STAGE_WHOLE)
        if stage is None:
            stage = _stage_at(pool.role, may_prefill_locally=request.may_prefill_locally)
        in_force = self.options
        thresholds = self.thresholds.of(pool.model)
        if thresholds is not in_force.thresholds:
            in_force = replace(in_force, thresholds=thresholds)
        has_overrides = "overrides" in request
        options = overridden(in_force, request.overrides) if has_overrides else in_force
        prompt = read_prompt(
            request,
            block_size=pool.booked_load.block_size,
            max_model_len=pool.max_model_len,
            max_prompt_tokens=self.max_prompt_tokens,
            largest_cache=pool.worker_set.largest_cache,
        )
        constraints = WorkerConstraints.of(request, stage)
        if booking.restores:
            _check_restores(booking, constraints)
            constraints = replace(constraints, even_if_draining=True)
            options = replace(options, mode=DirectPolicy.name, thresholds=Thresholds())
        if needs_worker and POLICIES[options.mode].needs_worker and constraints.worker_id is None:
            raise BadRequest(
                f"mode {options.mode} needs a worker",
                field="constraints.worker_id",
                advice="Name the worker, or choose another mode.",
                known=sorted({candidate.rank[0] for candidate in pool.candidates}),
            )
        may_prefill_locally = stage == _DECODE and request.may_prefill_locally
        return RequestContext(
            pool,
            prompt,
            constraints,
            options,
            booking,
            conversation_of(request) if request.conversation_id else b"",
            request.priority,
            ignored_overrides(request.overrides, options.mode) if has_overrides else (),
            may_prefill_locally,
            self.pools.prefill_pools_of(pool) if may_prefill_locally else (),
            tenant,
            _stated_output_tokens(request) if "expected_output_tokens" in request else 0,
            request.model_choice[:_MAX_CHOICE_CHARACTERS],
        )

    def _warn_of_ignored(self, context: RequestContext) -> None:
        """Logs overrides without effect, once for each kind."""
        mode = context.options.mode
        names = [name for name in context.ignored_overrides if (mode, name) not in self._warned]
        if names:
            self._warned.update((mode, name) for name in names)
            log.warning("overrides.ignored", overrides=names, mode=mode)


def _stated_output_tokens(request: RoutingRequest) -> int:
    """Returns the expected length of the output that a request states."""
    tokens = request.expected_output_tokens
    if not tokens:
        raise BadRequest(
            "expected_output_tokens is 0",
            field="expected_output_tokens",
            advice="Leave the field unset if the length is unknown.",
        )
    return tokens


def conversation_of(request: RoutingRequest) -> bytes:
    """Returns the 16-byte digest of a request's conversation, which has an id."""
    # A digest bounds the memory for ids of any length. It includes tenant and salt, a keyed one of which stands for a
    # tenant: tenants choose ids independently.
    parts = (request.scope.tenant.encode(), request.scope.cache_salt.encode())
    scope = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return blake2b(scope + request.conversation_id.encode(), digest_size=16).digest()


def _check_restores(booking: BookingOptions, constraints: WorkerConstraints) -> None:
    if booking.key is None:
        raise BadRequest("restores: no booking is named", field="booking", advice="Name the booking that was lost.")
    if constraints.worker_id is None or constraints.dp_rank is None:
        raise BadRequest(
            "restores: the rank of the booking is missing",
            field="constraints.dp_rank" if constraints.worker_id is not None else "constraints.worker_id",
            advice="Name the worker and the rank at which it was made.",
        )


def _stage_at(role: Role, *, may_prefill_locally: bool) -> Stage:
    """Returns the stage of a request without one, by the role of its component's workers."""
    if role == Role.ROLE_PREFILL:
        return Stage.STAGE_PREFILL
    return Stage.STAGE_DECODE if role == Role.ROLE_DECODE and may_prefill_locally else Stage.STAGE_WHOLE


def _lease_seconds(request: SelectWorkerRequest) -> float:
    seconds = request.lease_ms / 1000
    if not 0 < seconds <= MAX_LEASE_SECONDS:
        raise BadRequest(
            f"lease_ms is {request.lease_ms}",
            field="lease_ms",
            advice=f"Send 1 to {int(MAX_LEASE_SECONDS * 1000)}; calls that name the booking renew it.",
        )
    return seconds
