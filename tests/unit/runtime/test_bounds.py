"""Fill levels of bounds."""

from __future__ import annotations

from kvrouter.runtime.bounds import bounds_of
from prometheus_client import CollectorRegistry


def test_every_limited_part_shows_its_fill_level() -> None:
    registry, waiting, most = CollectorRegistry(), [1, 2, 3], [0]
    bounds_of(registry).add("queue", lambda: len(waiting), 10)
    bounds_of(registry).add("buffer", lambda: 7, lambda: most[0], when_full="drops")
    queue, buffer = {"bound": "queue", "when_full": "refuses"}, {"bound": "buffer", "when_full": "drops"}
    assert registry.get_sample_value("kvrouter_bound_used", queue) == 3
    assert registry.get_sample_value("kvrouter_bound_limit", queue) == 10
    assert registry.get_sample_value("kvrouter_bound_limit", buffer) is None, "it has no limit"
    waiting.append(4)
    most[0] = 8
    assert registry.get_sample_value("kvrouter_bound_used", queue) == 4
    assert registry.get_sample_value("kvrouter_bound_used", buffer) == 7
