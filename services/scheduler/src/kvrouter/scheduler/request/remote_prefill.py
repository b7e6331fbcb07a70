"""Decides whether a prefill worker or the decode worker itself computes a prompt. Pure; the simulator uses it too.

    uncached = prompt tokens that the decode worker does not hold                                       [tokens]
    compute  = uncached * prefill time per token                                                        [ms]
    transfer = latency + uncached * bytes per token / bandwidth                                         [ms]

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
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class RemotePrefillOptions:
    """When a prefill worker is worth its detour."""

    min_tokens: int = 512
    """Least number of uncached prompt tokens for which a prefill worker is used."""
    prefill_us_per_token: float = 16.0
    """Time in which a worker computes a prompt token, microseconds."""
    transfer: KvTransfer = field(default_factory=KvTransfer)
    """The link between prefill and decode workers."""


class PrefillDecision(NamedTuple):
    """Who computes a prompt."""

    is_remote: bool
    """Whether a prefill worker does."""
    uncached_tokens: int
    compute_ms: float
    transfer_ms: float
    reason: str
    """Why, for people."""


class PrefillPlaces(NamedTuple):
    """Who would compute a prompt, for each decode worker. Arrays of shape (candidates,)."""

    is_remote: NDArray[np.bool_]
    """Whether a prefill worker would."""
    weighed_tokens: NDArray[np.int64]
    """Tokens to compute there, or the equivalent of their transfer in tokens."""


def prefill_places(uncached_tokens: NDArray[np.int64], options: RemotePrefillOptions) -> PrefillPlaces:
    """Decides for each decode worker, given the prompt tokens that it does not hold."""
    us = options.prefill_us_per_token
    transfer_us = (options.transfer.latency_ms + uncached_tokens * options.transfer.ms_per_token) * 1e3
    is_remote = (uncached_tokens >= max(1, options.min_tokens)) & (transfer_us < uncached_tokens * us)
    # Where it is remote, the transfer takes less time than the computation, so the time per token is not 0.
    equivalent = (transfer_us / us).astype(np.int64) if us else uncached_tokens
    return PrefillPlaces(is_remote, np.where(is_remote, equivalent, uncached_tokens))


def decide_prefill(uncached_tokens: int, options: RemotePrefillOptions) -> PrefillDecision:
    """Decides for one decode worker.

    Args:
        uncached_tokens: Prompt tokens that it does not hold, 0 or more.
        options: When a prefill worker is worth its detour.
    """
    is_remote = bool(prefill_places(np.array([uncached_tokens]), options).is_remote[0])
    compute_ms = uncached_tokens * options.prefill_us_per_token / 1e3
    transfer_ms = options.transfer.ms(uncached_tokens)
    if uncached_tokens < max(1, options.min_tokens):
        reason = f"the decode worker lacks only {uncached_tokens} tokens, fewer than {max(1, options.min_tokens)}"
    elif is_remote:
        reason = f"to transfer {uncached_tokens} tokens takes {transfer_ms:.1f} ms, to compute them {compute_ms:.1f} ms"
    else:
        reason = (
            f"to transfer {uncached_tokens} tokens takes {transfer_ms:.1f} ms, no less than to compute them"
            f" ({compute_ms:.1f} ms)"
        )
    return PrefillDecision(is_remote, uncached_tokens, compute_ms, transfer_ms, reason)
