"""Checks the answer of GetLoad."""

from __future__ import annotations

from kvrouter.devtools.conformance.cache import CacheProbe
from kvrouter.devtools.conformance.results import CheckFailed, CheckSkipped
from kvrouter.devtools.conformance.worker_under_test import WorkerUnderTest


async def check_load(worker: WorkerUnderTest, probe: CacheProbe) -> str:
    """Checks the load of an idle rank."""
    if probe.before is None:
        raise CheckSkipped("the first request was not served")
    load = await worker.load()
    if load is None:
        raise CheckFailed(
            expected=f"a report for rank {worker.options.dp_rank} in GetLoad",
            received=f"reports for {[report.rank.dp_rank for report in (await worker.loads()).reports]}",
            advice="return a LoadReport for each rank from load().",
        )
    cursor = (await worker.snapshot()).cursor
    if load.incarnation != cursor.incarnation:
        raise CheckFailed(
            expected=f"incarnation {cursor.incarnation}, as GetRankState says",
            received=str(load.incarnation),
            advice="report the incarnation of the rank's cache: Schedulers drop reports of an earlier one.",
        )
    if load.total_blocks and load.active_blocks > load.total_blocks:
        raise CheckFailed(
            expected=f"at most {load.total_blocks} active blocks, its total_blocks",
            received=str(load.active_blocks),
            advice="count a block that several requests use once.",
        )
    return (
        f"{load.running_requests} running requests, {load.active_blocks} of {load.total_blocks or 'unknown'} blocks "
        f"active, {load.cached_blocks} cached"
    )
