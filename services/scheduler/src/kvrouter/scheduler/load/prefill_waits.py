"""How long a prompt waits until its worker computes it.

    wait = time to compute the prompt tokens that are booked at the rank and not computed - time spent on the first one

The time to compute is that of ``kvrouter.scheduler.request.remote_prefill``, times the relative latency of the rank.
"""

from __future__ import annotations

import numpy as np
from kvrouter.scheduler.load.booked_load import Loads
from kvrouter.scheduler.load.pools import Pool
from kvrouter.scheduler.policies.interface import Amounts
from kvrouter.scheduler.request.remote_prefill import RemotePrefillOptions, compute_ms


def waits_ms(pool: Pool, loads: Loads, options: RemotePrefillOptions, factor: float) -> Amounts:
    """Returns the wait at each rank of a component, ms, in order of rank.

    Args:
        pool: The component.
        loads: Its load.
        options: How long a worker computes a prompt token, if that is given.
        factor: Measured time to compute a prompt over the modelled one, in the component.
    """
    booked = compute_ms(loads.prefill_tokens, options, factor * pool.booked_load.relative_latency())
    return np.maximum(booked - loads.heads.seconds * 1e3, 0.0)
