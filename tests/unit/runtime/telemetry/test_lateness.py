"""How late the event loop is, by timers that may come early."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from kvrouter.net import ticks
from kvrouter.runtime.telemetry import metrics
from kvrouter.runtime.telemetry.metrics import PERIOD_S, lateness


@pytest.mark.parametrize(("late", "expected"), [(-0.0004, 0.0), (0.0, 0.0), (0.05, 0.05)])
async def test_each_interval_is_measured_once(monkeypatch: pytest.MonkeyPatch, late: float, expected: float) -> None:
    now = 1000.07

    async def sleep(seconds: float) -> None:
        nonlocal now
        assert 0 < seconds < 2 * PERIOD_S
        now += seconds + late

    monkeypatch.setattr(ticks, "_now", lambda: now)
    monkeypatch.setattr(metrics, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(metrics, "asyncio", SimpleNamespace(sleep=sleep))
    measurements = lateness()
    assert [await anext(measurements) for _ in range(50)] == pytest.approx([expected] * 50)
    assert now - 1000.07 == pytest.approx(50 * PERIOD_S, abs=PERIOD_S)
