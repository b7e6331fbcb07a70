"""Decides whether a prefill worker or the decode worker itself computes a prompt. Pure; the simulator uses it too.

    uncached = prompt tokens that the decode worker does not hold                                       [tokens]
    compute  = a * prefill time of mode forecast for them, or uncached * prefill_us_per_token if given   [ms]
    transfer = b * (latency + uncached * bytes per token / bandwidth)                                   [ms]

    a, b     = measured time over that of the model, learned by ``kvrouter.scheduler.load.prefill_times``  [1]

A prefill worker computes the prompt if uncached >= min_tokens and transfer < compute: then the decode worker is spared
more time than the transfer takes. A short rest does not delay decoding much, and is not worth the detour.

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


class PrefillDecision(NamedTuple):
    """Who computes a prompt."""

    is_remote: bool
    """Whether a prefill worker does."""
    uncached_tokens: int
    compute_ms: float
    transfer_ms: float
    factors: PrefillFactors
    """The measured factors in these times."""
    reason: str
    """Why, for people."""


class PrefillPlaces(NamedTuple):
    """Who would compute a prompt, for each decode worker. Arrays of shape (candidates,)."""

    is_remote: NDArray[np.bool_]
    """Whether a prefill worker would."""
    weighed_tokens: NDArray[np.int64]
    """Tokens to compute there, or the equivalent of their transfer in tokens."""
    factors: PrefillFactors = MODELS


def modelled_ms(tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """Returns the time to compute prompt tokens on the engine that mode forecast models, ms."""
    budget = np.full(len(tokens), DEFAULT_BUDGET)
    return prefill_ms(tokens, budget, np.zeros(len(tokens)))


def prefill_places(
    uncached_tokens: NDArray[np.int64], options: RemotePrefillOptions, factors: PrefillFactors = MODELS
) -> PrefillPlaces:
    """Decides for each decode worker, given the prompt tokens that it does not hold."""
    compute, transfer = _times_ms(uncached_tokens, options, factors)
    is_remote = (uncached_tokens >= max(1, options.min_tokens)) & (transfer < compute)
    # Where it is remote, the transfer takes less time than the computation, so that takes more than none.
    shares = np.divide(transfer, compute, out=np.ones(len(compute)), where=is_remote)
    equivalent = (uncached_tokens * shares).astype(np.int64)
    return PrefillPlaces(is_remote, np.where(is_remote, equivalent, uncached_tokens), factors)


def decide_prefill(
    uncached_tokens: int, options: RemotePrefillOptions, factors: PrefillFactors = MODELS
) -> PrefillDecision:
    """Decides for one decode worker.

    Args:
        uncached_tokens: Prompt tokens that it does not hold, 0 or more.
        options: When a prefill worker is worth its detour.
        factors: What was measured of both times.
    """
    column = np.array([uncached_tokens])
    is_remote = bool(prefill_places(column, options, factors).is_remote[0])
    compute_ms, transfer_ms = (float(times[0]) for times in _times_ms(column, options, factors))
    least = max(1, options.min_tokens)
    if uncached_tokens < least:
        reason = f"the decode worker lacks only {uncached_tokens} tokens, fewer than {least}"
    elif is_remote:
        reason = f"to transfer {uncached_tokens} tokens takes {transfer_ms:.1f} ms, to compute them {compute_ms:.1f} ms"
    else:
        reason = (
            f"to transfer {uncached_tokens} tokens takes {transfer_ms:.1f} ms, no less than to compute them"
            f" ({compute_ms:.1f} ms)"
        )
    used = factors if options.prefill_us_per_token is None else factors._replace(compute=1.0)
    return PrefillDecision(is_remote, uncached_tokens, compute_ms, transfer_ms, used, reason)


def _times_ms(
    tokens: NDArray[np.int64], options: RemotePrefillOptions, factors: PrefillFactors
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns the times to compute and to transfer prompt tokens; none for no token."""
    us = options.prefill_us_per_token
    compute = factors.compute * modelled_ms(tokens) if us is None else tokens.astype(np.float64) * (us / 1e3)
    link = options.transfer
    transfer = factors.transfer * (link.latency_ms * (tokens > 0) + tokens * link.ms_per_token)
    return compute, transfer
