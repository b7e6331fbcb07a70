"""Memory of a router over many requests, which must stay flat once caches are full."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

from load import Work, load
from samples import Samples
from systems import Engines, running_systems
from usage import resident_bytes

WORK = Work(0, 64, 64)
"""Short prompts, many at once: as many requests per second as the machine serves."""
_SAMPLE_SECONDS = 5.0
_MB = 1e6


async def memory(
    samples: Samples, directory: Path, name: str, requests: int, minutes: float, say: Callable[[str], None]
) -> None:
    """Sends requests to one system and samples its memory. Adds the growth from the second to the last quarter.

    Args:
        samples: Where the result goes.
        directory: For logs and servers.
        name: The system.
        requests: Number of requests after which to end.
        minutes: Time after which to end in any case, minutes.
        say: Prints progress.
    """
    end = time.monotonic() + 60 * minutes
    done, failed, curve = 0, 0, list[tuple[int, float]]()
    async with running_systems([name], Engines(), directory) as (system,):
        while done < requests and (not curve or time.monotonic() < end):
            result = await load(system.url, WORK, _SAMPLE_SECONDS)
            done, failed = done + result.requests, failed + result.failed
            resident = sum(resident_bytes(process.pid) for process in system.router.values()) / _MB
            curve.append((done, resident))
            say(f"memory {name}: {done:,} requests, {resident:.1f} MB")
    samples.add("memory", name, 0, {**growth(curve), "requests": done, "failed": failed})


def growth(curve: list[tuple[int, float]]) -> dict[str, float]:
    """Returns the mean memory of the second and the last quarter of the requests, MB, and the growth in percent.

    Args:
        curve: Requests so far and MB, by time; at least one.
    """
    last = curve[-1][0]
    quarters = [
        [resident for done, resident in curve if low * last < done <= high * last] or [curve[-1][1]]
        for low, high in ((0.25, 0.5), (0.75, 1.0))
    ]
    early, late = (statistics.mean(quarter) for quarter in quarters)
    return {"early_mb": early, "late_mb": late, "growth_percent": 100 * (late - early) / early}
