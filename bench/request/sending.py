"""CPU of the publisher SDK for a token, on the engine's machine, with one request and with many (``bench/emit.py``)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from samples import Samples

sys.path.insert(0, str(Path(__file__).parents[1]))

from emit import measure

ROWS = {"engine": 64, "engine, 1 at once": 1, "engine, 256 at once": 256}
"""Requests at once, by row. The bar is for the first."""
STEPS = 200


async def sending(samples: Samples, say: Callable[[str], None]) -> None:
    """Measures tokens that are emitted from the event loop and sent on a call stream."""
    for row, requests in ROWS.items():
        costs = await measure(requests, "call stream", threaded=False, steps=STEPS, profile=False)
        for number, cost in enumerate(costs):
            samples.add(row, "SDK", number, {"cpu_us": cost})
        say(f"{row}: {', '.join(f'{cost:.1f}' for cost in costs)} µs per token")
