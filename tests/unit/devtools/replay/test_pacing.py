from __future__ import annotations

import pytest
from kvrouter.devtools.replay.pacing import TimeScale


def test_load_compresses_arrivals_and_clock_compresses_the_wall() -> None:
    time_scale = TimeScale(load=2.5, clock=4.0)
    assert time_scale.due_engine_seconds(10_000) == pytest.approx(4.0)
    assert time_scale.due_wall_seconds(10_000) == pytest.approx(1.0)
    assert time_scale.engine_seconds(1.5) == pytest.approx(6.0)


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["load", "clock"])
def test_factors_must_be_above_0(name: str, factor: float) -> None:
    with pytest.raises(ValueError, match=name):
        TimeScale(**({"load": 1.0, "clock": 1.0} | {name: factor}))
