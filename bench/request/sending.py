"""CPU of the publisher SDK for a token, on the engine's machine: ``bench/emit.py`` with the requests of the bar."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from samples import Samples

sys.path.insert(0, str(Path(__file__).parents[1]))

from emit import measure

REQUESTS, STEPS = 64, 200


async def sending(samples: Samples, say: Callable[[str], None]) -> None:
    """Measures tokens that are emitted from the event loop and sent on a call stream."""
    costs = await measure(REQUESTS, "call stream", threaded=False, steps=STEPS, profile=False)
    for number, cost in enumerate(costs):
        samples.add("engine", "SDK", number, {"cpu_us": cost})
    say(f"engine's side: {', '.join(f'{cost:.1f}' for cost in costs)} µs per token")
