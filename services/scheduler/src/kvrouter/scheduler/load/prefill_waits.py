"""How long a prompt waits until its worker computes it.

    wait = time to compute the prompt tokens that are booked at the rank and not computed - time spent on the first one

The time to compute is that of ``kvrouter.scheduler.request.remote_prefill``, times the relative latency of the rank.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from kvrouter.scheduler.load.booked_load import Loads
from kvrouter.scheduler.load.pools import Pool
from kvrouter.scheduler.policies.interface import Amounts
from kvrouter.scheduler.request.remote_prefill import RemotePrefillOptions, compute_ms
from kvrouter.scheduler.workers.candidates import WorkerConstraints
from kvrouter.v1.common_pb2 import Stage


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


def shortest_wait_ms(
    pools: Iterable[Pool], constraints: WorkerConstraints, options: RemotePrefillOptions, factor: float
) -> float:
    """Returns the wait at the prefill rank that is free first, ms; 0 if none is known here.

    Args:
        pools: Prefill pools.
        constraints: Constraints of the request on its decode worker; labels and adapter concern prefill workers too.
        options: How long a worker computes a prompt token, if that is given.
        factor: Measured time to compute a prompt over the modelled one, for pools that have measured none.
    """
    wanted = WorkerConstraints(Stage.STAGE_PREFILL, labels=constraints.labels, lora_name=constraints.lora_name)
    shortest = []
    for pool in pools:
        measured = pool.booked_load.prefill_times.measured_prompts
        own = pool.booked_load.prefill_factors().compute if measured else factor
        waits = waits_ms(pool, pool.booked_load.loads(), options, own)[pool.worker_set.fit(wanted)]
        if len(waits):
            shortest.append(float(waits.min()))
    return min(shortest, default=0.0)
