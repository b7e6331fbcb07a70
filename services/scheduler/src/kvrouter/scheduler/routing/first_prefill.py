"""Finds the prefill worker that would have computed a prompt first, for the decision who computes it."""

from __future__ import annotations

import numpy as np
from kvrouter.scheduler.load.prefill_waits import waits_ms
from kvrouter.scheduler.overlap.indexer_query import NOT_QUERIED, Overlaps
from kvrouter.scheduler.request.remote_prefill import FirstPrefill, compute_ms
from kvrouter.scheduler.routing.request_context import RequestContext
from kvrouter.scheduler.workers.candidates import WorkerConstraints
from kvrouter.v1.common_pb2 import Stage


def first_prefill(request: RequestContext, overlaps: Overlaps, factor: float) -> FirstPrefill | None:
    """Returns the prefill worker, over all prefill pools of the request; None if none is known here.

    Args:
        request: The request. Its labels and adapter concern prefill workers too.
        overlaps: What the ranks hold of its prompt.
        factor: Measured time to compute a prompt over the modelled one, for pools that have measured none.
    """
    constraints, options = request.constraints, request.options.remote_prefill
    wanted = WorkerConstraints(Stage.STAGE_PREFILL, labels=constraints.labels, lora_name=constraints.lora_name)
    found = []
    for pool in request.prefill_pools:
        load, fit = pool.booked_load, pool.worker_set.fit(wanted)
        if not len(fit):
            continue
        own = load.prefill_factors().compute if load.prefill_times.measured_prompts else factor
        held = overlaps.prefill.get(pool.name, NOT_QUERIED).on(pool.worker_set)[fit] * load.block_size
        uncached = np.maximum(request.prompt.tokens - held, 0)
        compute = compute_ms(uncached, options, own * load.relative_latency()[fit])
        waits = waits_ms(pool, load.loads(), options, own)[fit]
        first = int(np.argmin(waits + compute))
        found.append(FirstPrefill(float(waits[first]), int(uncached[first]), float(compute[first])))
    return min(found, key=lambda each: each.wait_ms + each.compute_ms, default=None)
