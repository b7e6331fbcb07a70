"""Learns how long the ranks of a component compute prompts, and how long they receive prompts of others.

    factor = ``kvrouter.core.MeasuredFactor`` of measured over modelled times

Measured are

- first tokens of prompts of at least LEAST_TOKENS new tokens on ranks without another prompt;
- hand-overs: the time from the end of a prefill to the first token of its decode worker, as the Frontend reports it.

Unlike the latency calibration of mode forecast this works in every mode. The model counts as the first measurements, so
a single odd one has little weight. Measurements count for less the longer there are none: a factor decides whether
prompts are computed there, so a factor that says no would have no further measurements, and would never change.
"""

from __future__ import annotations

from kvrouter.core import MeasuredFactor
from kvrouter.scheduler.request.remote_prefill import PrefillFactors, modelled_ms

LEAST_TOKENS = 256
"""Shorter prompts take mostly the fixed part of a step."""


class PrefillTimes:
    """The factors of one component. Pure: times are passed in."""

    def __init__(self) -> None:
        self._compute, self._transfer = MeasuredFactor(), MeasuredFactor()

    def factors(self, now: float) -> PrefillFactors:
        """Returns measured times over modelled ones; 1 before anything is measured. ``now``: seconds."""
        return PrefillFactors(self._compute.value(now), self._transfer.value(now))

    @property
    def measured_prompts(self) -> int:
        """Number of first tokens in the factor for computing."""
        return self._compute.count

    def learn(self, measured_ms: float, tokens: int, now: float) -> None:
        """Learns from the first token of a prompt on a rank without others.

        Args:
            measured_ms: Its time since the dispatch, ms.
            tokens: Prompt tokens that the rank computed.
            now: Time in seconds.
        """
        if tokens >= LEAST_TOKENS:
            self._compute.observe(measured_ms, modelled_ms(tokens), now)

    def handed_over(self, measured_ms: float, modelled: float, now: float) -> None:
        """Measures a hand-over, given the time of the model of the link, both in ms; ``now``: seconds."""
        self._transfer.observe(measured_ms, modelled, now)
