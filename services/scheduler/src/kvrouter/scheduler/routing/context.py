"""The request context: a checked request with all inputs of a decision."""

from __future__ import annotations

import msgspec
from kvrouter.runtime.booking_updates import Key
from kvrouter.scheduler.load.pools import Pool
from kvrouter.scheduler.request.options import RoutingOptions, Tenant
from kvrouter.scheduler.request.prompt import Prompt
from kvrouter.scheduler.request.remote_prefill import PrefillFactors
from kvrouter.scheduler.workers.candidates import WorkerConstraints

DEFAULT_LEASE_SECONDS = 3600.0


class BookingOptions(msgspec.Struct, frozen=True):
    """The requested booking."""

    key: Key | None = None
    """Key of the booking; None to choose a rank without booking it."""
    session_id: str = ""
    """Owning session; empty for a lease."""
    opening_number: int = 0
    """The opening of the session in the call; 0 for any."""
    lease_seconds: float = DEFAULT_LEASE_SECONDS
    """Lifetime of a booking without a session."""
    restores: bool = False
    """Whether it was made before, at the rank in the constraints, where the request runs."""


class RequestContext(msgspec.Struct, frozen=True):
    """A checked request, ready for a decision."""

    pool: Pool
    """The component."""
    prompt: Prompt
    constraints: WorkerConstraints
    options: RoutingOptions
    booking: BookingOptions = BookingOptions()
    conversation: bytes = b""
    """Digest of the conversation; empty for none."""
    priority: int = 0
    """Priority among queued requests; higher goes first."""
    ignored_overrides: tuple[str, ...] = ()
    """Names of the request's overrides without effect in its mode."""
    may_prefill_locally: bool = False
    """In stage decode, whether the rank may compute the prompt itself; otherwise a prefill worker always does."""
    prefill_pools: tuple[Pool, ...] = ()
    """Known components whose workers may compute the prompt instead."""
    tenant: Tenant = Tenant()
    """Whose request it is."""
    expected_output_tokens: float = 0.0
    """Expected length of the output, as the request states; 0 if it states none."""
    model_choice: str = ""
    """How the Frontend chose the model; empty if it is the one that the client named."""

    def prefill_factors(self) -> PrefillFactors:
        """Returns the measured factors of the times to compute and to transfer a prompt.

        While the decode workers have computed no prompt, the prefill workers with the most measurements stand in.
        """
        own = self.pool.booked_load
        if own.prefill_times.measured_prompts:
            return own.prefill_factors()
        loads = [pool.booked_load for pool in self.prefill_pools]
        most = max(loads, key=lambda each: each.prefill_times.measured_prompts, default=own)
        return own.prefill_factors()._replace(compute=most.prefill_factors().compute)
