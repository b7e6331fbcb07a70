"""What `kvrouter demo` says before it begins."""

from __future__ import annotations

from pathlib import Path

from kvrouter.devcommands.demo import DemoOptions, opening
from kvrouter.devtools.replay.pacing import TimeScale
from kvrouter.devtools.traces.reader import TraceRequest


def test_it_says_what_it_does_and_how_long_it_takes() -> None:
    requests = [TraceRequest(index, index * 1000.0, 100, 10, (1,)) for index in range(121)]
    options = DemoOptions(requests, "documents", TimeScale(2.0, 1.0), ("kv", "forecast", "random"), 8, 64, 16, Path())
    assert opening(options) == (
        "Sends 121 requests (documents) to 8 simulated engines, once for each routing mode: kv, forecast, random. "
        "Takes about 4 minutes."
    )
