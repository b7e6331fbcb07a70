"""Decides whether a prefill worker or the decode worker itself computes a prompt. Pure; the simulator uses it too.

    uncached = prompt tokens that a worker does not hold                                                [tokens]
    compute  = a * prefill time of mode forecast for them, or uncached * prefill_us_per_token if given   [ms]
    transfer = b * (latency + tokens that the decode worker does not hold * bytes per token / bandwidth) [ms]
    wait     = time until a worker has computed the prompts that are booked there, by the same model    [ms]

    a, b     = measured time over that of the model, learned by ``kvrouter.scheduler.load.prefill_times``;
               a also contains the relative latency of the worker, where mode forecast has learned one  [1]

A prefill worker computes the prompt if the decode worker lacks at least ``min_tokens``, and

    wait there + compute there + transfer < wait + 2 * compute

``there`` is the prefill worker that would have computed it first. The decode worker's own time counts twice: a request
waits for it, and so do those that decode beside it. A short rest does not delay them much, and is not worth the detour.

To compare decode workers, a prompt that is computed elsewhere counts as the tokens that could be computed during its
transfer, so that a worker that holds a part of the prompt is preferred to one that must receive all of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from kvrouter.runtime.kv_transfer import KvTransfer
from kvrouter.scheduler.policies.forecast.policy import DEFAULT_BUDGET, prefill_ms
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class RemotePrefillOptions:
    """When a prefill worker is worth its detour."""

    min_tokens: int = 512
    """Least number of uncached prompt tokens for which a prefill worker is used."""
    prefill_us_per_token: float | None = None
    """Time in which a worker computes a prompt token, microseconds; None to learn it from first tokens."""
    transfer: KvTransfer = field(default_factory=KvTransfer)
    """The link between prefill and decode workers, before hand-overs are measured."""


class PrefillFactors(NamedTuple):
    """Measured times over those of the models."""

    compute: float = 1.0
    """Of first tokens."""
    transfer: float = 1.0
    """Of hand-overs."""


MODELS = PrefillFactors()
"""The factors before anything is measured."""
_SHOWN_MS = 0.05
"""Shorter waits are not shown."""


class PrefillDecision(NamedTuple):
    """Who computes a prompt."""

    is_remote: bool
    """Whether a prefill worker does."""
    uncached_tokens: int
    compute_ms: float
    transfer_ms: float
    wait_ms: float
    """Until the decode worker has computed the prompts that are booked there."""
    prefill_wait_ms: float
    """The same at the prefill worker that would have computed the prompt first."""
    prefill_uncached_tokens: int
    prefill_compute_ms: float
    factors: PrefillFactors
    """The measured factors in the times of the decode worker."""
    reason: str
    """Why, for people."""


class FirstPrefill(NamedTuple):
    """The prefill worker that would have computed a prompt first."""

    wait_ms: float
    """Until it has computed the prompts that are booked there."""
    uncached_tokens: int
    """Prompt tokens that it does not hold."""
    compute_ms: float
    """Time in which it computes them."""


class PrefillComparison(NamedTuple):
    """What the decision rests on, for each decode worker. Arrays of shape (candidates,)."""

    uncached_tokens: NDArray[np.int64]
    compute_ms: NDArray[np.float64]
    transfer_ms: NDArray[np.float64]
    wait_ms: NDArray[np.float64]
    """Until the decode worker has computed the prompts that are booked there."""
    first: FirstPrefill | None
    """None if no prefill worker is known: one without a queue is assumed that holds and takes as much."""
    factors: PrefillFactors
    least_tokens: int


class PrefillPlaces(NamedTuple):
    """Who would compute a prompt, for each decode worker. Arrays of shape (candidates,)."""

    is_remote: NDArray[np.bool_]
    """Whether a prefill worker would."""
    weighed_tokens: NDArray[np.int64]
    """Tokens to compute there, or the equivalent of their transfer in tokens."""
    comparison: PrefillComparison | None = None
    """Why; None if a prefill worker computes it in any case."""

    def decision(self, place: int) -> PrefillDecision | None:
        """Returns the decision for the decode worker at an index; None if there was nothing to decide."""
        if self.comparison is None:
            return None
        tokens, compute, transfer, wait = (column[place].item() for column in self.comparison[:4])
        first, factors, least = self.comparison[4:]
        first = first or FirstPrefill(0.0, tokens, compute)
        is_remote = bool(self.is_remote[place])
        there = f"to transfer {tokens} tokens takes {transfer:.1f} ms{_after(first.wait_ms)}"
        if abs(more := first.compute_ms - compute) >= _SHOWN_MS:
            longer = f"{abs(more):.1f} ms {'more' if more > 0 else 'less'} than the decode worker"
            there += f", and a prefill worker computes {first.uncached_tokens} tokens in {longer}"
        if tokens < least:
            reason = f"the decode worker lacks only {tokens} tokens, fewer than {least}"
        elif is_remote:
            reason = f"{there}, to compute them {compute:.1f} ms{_after(wait)}"
        else:
            reason = f"{there}, no less than to compute them ({compute:.1f} ms{_after(wait)})"
        return PrefillDecision(is_remote, tokens, compute, transfer, wait, *first, factors, reason)


def prefill_places(
    uncached_tokens: NDArray[np.int64],
    options: RemotePrefillOptions,
    factors: PrefillFactors = MODELS,
    *,
    relative_latency: NDArray[np.float64] | float = 1.0,
    wait_ms: NDArray[np.float64] | float = 0.0,
    first: FirstPrefill | None = None,
) -> PrefillPlaces:
    """Decides for each decode worker.

    Args:
        uncached_tokens: Prompt tokens that it does not hold, 0 or more.
        options: When a prefill worker is worth its detour.
        factors: What was measured of both times in the component.
        relative_latency: Prefill times of the decode worker over those of its component.
        wait_ms: Time until it has computed the prompts that are booked there.
        first: The prefill worker that would have computed the prompt first; None if none is known.
    """
    compute = compute_ms(uncached_tokens, options, factors.compute * relative_latency)
    link = options.transfer
    transfer = factors.transfer * (link.latency_ms * (uncached_tokens > 0) + uncached_tokens * link.ms_per_token)
    wait = np.zeros(len(compute)) + wait_ms
    least = max(1, options.min_tokens)
    more_there = 0.0 if first is None else first.wait_ms + first.compute_ms - compute
    is_remote = (uncached_tokens >= least) & (more_there + transfer < wait + compute)
    shares = np.divide(transfer, compute, out=np.ones(len(compute)), where=is_remote & (transfer < compute))
    equivalent = (uncached_tokens * shares).astype(np.int64)
    used = factors if options.prefill_us_per_token is None else factors._replace(compute=1.0)
    comparison = PrefillComparison(uncached_tokens, compute, transfer, wait, first, used, least)
    return PrefillPlaces(is_remote, np.where(is_remote, equivalent, uncached_tokens), comparison)


def modelled_ms(tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """Returns the time to compute prompt tokens on the engine that mode forecast models, ms."""
    budget = np.full(len(tokens), DEFAULT_BUDGET)
    return prefill_ms(tokens, budget, np.zeros(len(tokens)))


def compute_ms(
    tokens: NDArray[np.int64], options: RemotePrefillOptions, factor: NDArray[np.float64] | float
) -> NDArray[np.float64]:
    """Returns the time to compute prompt tokens, ms; ``factor`` is the measured time over the modelled one."""
    us = options.prefill_us_per_token
    return factor * modelled_ms(tokens) if us is None else tokens.astype(np.float64) * (us / 1e3)


def _after(wait_ms: float) -> str:
    return f" after a wait of {wait_ms:.1f} ms" if wait_ms >= _SHOWN_MS else ""
