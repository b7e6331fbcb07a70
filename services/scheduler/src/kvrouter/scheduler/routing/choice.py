"""One choice and its booking: what a Scheduler and the simulator do alike, without waiting."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from kvrouter.scheduler.load.pools import Pool
from kvrouter.scheduler.policies.catalogue import POLICIES
from kvrouter.scheduler.policies.interface import Choice, SchedulingContext, Wait
from kvrouter.scheduler.request.options import RoutingOptions
from kvrouter.scheduler.request.prompt import Prompt
from kvrouter.scheduler.routing.candidate_snapshot import CandidateRow, CandidateRows, CandidateSnapshot, context_of


@dataclass(frozen=True, slots=True)
class Chosen:
    """What a policy made of a request, and of what."""

    found: CandidateSnapshot
    context: SchedulingContext
    row: CandidateRow
    """The rank that the request goes to, or had better wait for."""
    decided: Choice | Wait

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens that the rank has to compute."""
        tokens = self.decided.prefill_tokens
        return self.row.new_prefill_tokens if tokens is None else tokens

    @property
    def forecast_ms(self) -> float | None:
        """Forecast time to the first token; None if it is unsuitable for latency calibration.

        A request that had better wait, and goes all the same, finds more on its way than the forecast knows.
        """
        return self.decided.forecast_ms if isinstance(self.decided, Choice) else None


def choose(
    pool: Pool,
    prompt: Prompt,
    options: RoutingOptions,
    found: CandidateSnapshot,
    rows: CandidateRows,
    rng: Random,
    *,
    calibration_error: float = 1.0,
) -> Chosen:
    """Has the policy choose among ``rows``, one at least, of those that were found.

    ``pace_error`` is how wrong the policy's time model is made; a simulation asks what comes of that.
    """
    context = context_of(
        rows,
        prompt,
        options,
        block_size=pool.booked_load.block_size,
        previous=pool.previous.get(options.mode),
        latency_calibration=calibration_error * pool.booked_load.latency_calibration.value,
    )
    decided = POLICIES[options.mode].decide(context, rng)
    return Chosen(found, context, rows[decided.index], decided)
