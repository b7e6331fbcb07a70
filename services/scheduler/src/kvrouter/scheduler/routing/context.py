"""The request context: a checked request with everything that a decision needs."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from kvrouter.runtime.errors import BadRequest
from kvrouter.scheduler.identifiers import Key
from kvrouter.scheduler.load.pools import Pool, Pools
from kvrouter.scheduler.load.thresholds import ThresholdBoard
from kvrouter.scheduler.policies.catalogue import POLICIES
from kvrouter.scheduler.policies.direct.policy import Rule as Direct
from kvrouter.scheduler.request.options import RoutingOptions, Tenant, Thresholds, ignored_overrides, overridden
from kvrouter.scheduler.request.prompt import Prompt, read_prompt
from kvrouter.scheduler.request.remote_prefill import PrefillFactors
from kvrouter.scheduler.routing.affinity import conversation_of
from kvrouter.scheduler.workers.candidates import WorkerConstraints
from kvrouter.v1.common_pb2 import Role, Stage
from kvrouter.v1.scheduler_pb2 import RoutingRequest

# Read once: looking up an enum value by name takes a microsecond.
_DECODE = Stage.STAGE_DECODE

DEFAULT_LEASE_SECONDS = 3600.0
MAX_LEASE_SECONDS = 24 * 3600.0
"""Maximum lease. It bounds the load of bookings that a caller never frees."""


class BookingOptions(NamedTuple):
    """The booking that a request requests."""

    key: Key | None = None
    """Key of the booking; None to choose a rank without booking it."""
    session_id: str = ""
    """Session that will own the booking; empty for a lease."""
    opening_number: int = 0
    """The opening of the session that the call belongs to; 0 for any."""
    lease_seconds: float = DEFAULT_LEASE_SECONDS
    """Lifetime of a booking without a session."""
    restores: bool = False
    """Whether it was made before, at the rank in the constraints, where the request runs."""


_NOT_BOOKED = BookingOptions()


class RequestContext(NamedTuple):
    """A checked request, ready for a decision."""

    pool: Pool
    """The component."""
    prompt: Prompt
    constraints: WorkerConstraints
    options: RoutingOptions
    booking: BookingOptions = _NOT_BOOKED
    conversation: bytes = b""
    """Digest of the conversation; empty for none."""
    priority: int = 0
    """Priority among queued requests; higher goes first."""
    ignored_overrides: tuple[str, ...] = ()
    """Names of the request's overrides that have no effect in its mode."""
    may_prefill_locally: bool = False
    """In stage decode, whether the rank may compute the prompt itself; otherwise a prefill worker always does."""
    prefill_pools: tuple[Pool, ...] = ()
    """Components that this Scheduler knows whose workers may compute the prompt instead."""
    tenant: Tenant = Tenant()
    """Whose request it is."""

    def prefill_factors(self) -> PrefillFactors:
        """Returns what is known of the times to compute and to transfer a prompt.

        While the decode workers have computed no prompt, the prefill workers that have measured most stand in.
        """
        own = self.pool.booked_load
        if own.prefill_times.measured_prompts:
            return own.prefill_factors()
        loads = [pool.booked_load for pool in self.prefill_pools]
        most = max(loads, key=lambda each: each.prefill_times.measured_prompts, default=own)
        return own.prefill_factors()._replace(compute=most.prefill_factors().compute)


class RequestReader:
    """Checks requests against the registered components."""

    def __init__(
        self, pools: Pools, thresholds: ThresholdBoard, options: RoutingOptions, *, max_prompt_tokens: int
    ) -> None:
        """``options`` apply unless ``thresholds`` of a model, or a request, override them."""
        self._pools = pools
        self._thresholds = thresholds
        self._options = options
        self._max_prompt_tokens = max_prompt_tokens

    def read(
        self,
        request: RoutingRequest,
        stage: Stage | None,
        booking: BookingOptions = _NOT_BOOKED,
        *,
        needs_worker: bool = True,
    ) -> RequestContext:
        """Checks a request.

        Args:
            request: The request.
            stage: The stage to book; None for prefill at a component of prefill workers, for decode at one of decode
                workers if the request may be prefilled locally, and else for the whole request.
            booking: The requested booking.
            needs_worker: Whether to refuse a request without a worker in a mode that takes the worker from the request.

        Raises:
            BadRequest, PromptTooLong, BlockSizeMismatch, UnknownModel, UnknownComponent.
        """
        pool = self._pools.find(request, stage or Stage.STAGE_WHOLE)
        if stage is None:
            stage = _stage_at(pool.role, may_prefill_locally=request.may_prefill_locally)
        in_force = self._options
        if (thresholds := self._thresholds.of(pool.model)) != in_force.thresholds:
            in_force = replace(in_force, thresholds=thresholds)
        options = overridden(in_force, request.overrides)
        prompt = read_prompt(
            request,
            block_size=pool.booked_load.block_size,
            max_model_len=pool.max_model_len,
            max_prompt_tokens=self._max_prompt_tokens,
            largest_cache=pool.worker_set.largest_cache,
        )
        constraints = WorkerConstraints.of(request, stage)
        if booking.restores:
            _check_restores(booking, constraints)
            constraints = replace(constraints, even_if_draining=True)
            options = replace(options, mode=Direct.name, thresholds=Thresholds())
        if needs_worker and POLICIES[options.mode].needs_worker and constraints.worker_id is None:
            raise BadRequest(
                f"mode {options.mode} needs a worker",
                field="constraints.worker_id",
                advice="Name the worker, or choose another mode.",
                known=sorted({candidate.rank[0] for candidate in pool.candidates}),
            )
        may_prefill_locally = request.may_prefill_locally and stage == _DECODE
        return RequestContext(
            pool,
            prompt,
            constraints,
            options,
            booking,
            conversation_of(request),
            request.priority,
            ignored_overrides(request.overrides, options.mode),
            may_prefill_locally,
            self._pools.prefill_pools_of(pool) if may_prefill_locally else (),
        )


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
    """Returns the stage of a request that names none, by the role of its component's workers."""
    if role == Role.ROLE_PREFILL:
        return Stage.STAGE_PREFILL
    return Stage.STAGE_DECODE if role == Role.ROLE_DECODE and may_prefill_locally else Stage.STAGE_WHOLE


def lease_seconds(lease_ms: int) -> float:
    """Returns the requested lease in seconds.

    Raises:
        BadRequest: it is too long.
    """
    seconds = lease_ms / 1000 if lease_ms else DEFAULT_LEASE_SECONDS
    if seconds > MAX_LEASE_SECONDS:
        raise BadRequest(
            f"lease_ms is {lease_ms}",
            field="lease_ms",
            advice=f"Send {int(MAX_LEASE_SECONDS * 1000)} at most; calls that name the booking renew it.",
        )
    return seconds
