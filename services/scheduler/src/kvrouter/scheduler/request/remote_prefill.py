"""Decides whether a prefill worker or the decode worker itself computes a prompt. Pure; the simulator uses it too.

    uncached = prompt tokens not cached by a worker                                                      [tokens]
    compute  = a * prefill time of mode forecast for them, or uncached * prefill_us_per_token if given   [ms]
    transfer = b * (latency + uncached tokens of the decode worker * bytes per token / bandwidth)          [ms]
    wait     = time until a worker has computed its booked prompts, by the same model                    [ms]

    a, b     = measured over modelled time, learned by ``kvrouter.scheduler.load.prefill_times``;
               a also contains the relative latency of the worker, where mode forecast has learned one   [1]

A prefill worker computes the prompt if the decode worker lacks at least ``min_tokens``, and

    wait there + compute there + transfer < wait + 2 * compute

``there`` is the prefill worker with the earliest end. The decode worker's own time counts twice: a request
waits for it, and so do those decoding beside it. A short rest does not delay them much, and is not worth the detour.

To compare decode workers, a prompt computed elsewhere counts as the tokens to compute during its
transfer: a worker that holds a part of the prompt is preferred to one that must receive all of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from kvrouter.runtime.kv_transfer import KvTransfer
from kvrouter.scheduler.policies.forecast.policy import DEFAULT_BUDGET, prefill_ms
from kvrouter.v1.common_pb2 import PrefillDecision
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


class FirstPrefill(NamedTuple):
    """The prefill worker with the earliest end of the prompt."""

    wait_ms: float
    """Until it has computed its booked prompts."""
    uncached_tokens: int
    """Prompt tokens missing in its cache."""
    compute_ms: float
    """Time in which it computes them."""


class PrefillComparison(NamedTuple):
    """Inputs of the decision for each decode worker. Arrays of shape (candidates,)."""

    uncached_tokens: NDArray[np.int64]
    compute_ms: NDArray[np.float64]
    transfer_ms: NDArray[np.float64]
    wait_ms: NDArray[np.float64]
    """Until the decode worker has computed its booked prompts."""
    first: FirstPrefill | None
    """None if no prefill worker is known: one like the decode worker, without a queue, is assumed."""
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
        is_remote = bool(self.is_remote[place])
        there = f"to transfer {tokens} tokens takes {transfer:.1f} ms{_after(0.0 if first is None else first.wait_ms)}"
        if first is not None and abs(more := first.compute_ms - compute) >= _SHOWN_MS:
            longer = f"{abs(more):.1f} ms {'more' if more > 0 else 'less'} than the decode worker"
            there += f", and a prefill worker computes {first.uncached_tokens} tokens in {longer}"
        if tokens < least:
            reason = f"the decode worker lacks only {tokens} tokens, fewer than {least}"
        elif is_remote:
            reason = f"{there}, to compute them {compute:.1f} ms{_after(wait)}"
        else:
            reason = f"{there}, no less than to compute them ({compute:.1f} ms{_after(wait)})"
        decision = PrefillDecision(
            remote=is_remote,
            uncached_tokens=tokens,
            compute_ms=compute,
            transfer_ms=transfer,
            wait_ms=wait,
            reason=reason,
            compute_factor=factors.compute,
            transfer_factor=factors.transfer,
        )
        if first is not None:
            decision.prefill_wait_ms, decision.prefill_uncached_tokens, decision.prefill_compute_ms = first
        return decision


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
        uncached_tokens: Prompt tokens missing in its cache, 0 or more.
        options: When a prefill worker is worth its detour.
        factors: Measured over modelled times in the component.
        relative_latency: Prefill times of the decode worker over those of its component.
        wait_ms: Time until it has computed its booked prompts.
        first: The prefill worker with the earliest end; None if none is known.
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


def modelled_ms(tokens: float) -> float:
    """Returns the time to compute prompt tokens on the engine model of mode forecast, ms."""
    return prefill_ms(tokens, DEFAULT_BUDGET, 0.0)


_BUDGET, _NO_DECODING = np.array(DEFAULT_BUDGET), np.array(0.0)


def compute_ms(
    tokens: NDArray[np.int64], options: RemotePrefillOptions, factor: NDArray[np.float64] | float
) -> NDArray[np.float64]:
    """Returns the time to compute prompt tokens, ms; ``factor`` is the measured time over the modelled one."""
    us = options.prefill_us_per_token
    return factor * prefill_ms(tokens, _BUDGET, _NO_DECODING) if us is None else tokens.astype(np.float64) * (us / 1e3)


def waits_ms(
    booked_tokens: NDArray[np.int64],
    head_seconds: NDArray[np.float64],
    options: RemotePrefillOptions,
    factor: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Returns the time until each rank has computed its booked prompts, ms.

    Args:
        booked_tokens: Booked prompt tokens, not yet computed.
        head_seconds: Time for which the oldest of these prompts has been computed, seconds.
        options: How long a worker computes a prompt token, if given.
        factor: Measured time to compute a prompt over the modelled one.
    """
    return np.maximum(compute_ms(booked_tokens, options, factor) - head_seconds * 1e3, 0.0)


def _after(wait_ms: float) -> str:
    return f" after a wait of {wait_ms:.1f} ms" if wait_ms >= _SHOWN_MS else ""
