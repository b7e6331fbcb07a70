from __future__ import annotations

import pytest
from kvrouter.mocker.engine.time_model import TimeModel

from .engine_harness import Drive, engine


@pytest.mark.parametrize(
    ("prefill", "decode", "milliseconds"),
    [
        (0, 0, 0.0),
        (1000, 0, 0.4209989 + 15.18344 + 16.50142),
        (8192, 0, 28.25276 + 124.38274 + 16.50142),
        (0, 100, -0.2574 + 5.401 + 5.74),  # a tenth of the capacity
        (0, 1000, -25.74 + 54.01 + 5.74),
        (0, 3000, -25.74 + 54.01 + 5.74),  # contexts that share blocks may come to more than the capacity
        (1000, 1000, 0.4209989 + 15.18344 + 16.50142 - 25.74 + 54.01 + 5.74),  # the sum of both
    ],
)
def test_step_seconds(prefill: int, decode: int, milliseconds: float) -> None:
    assert TimeModel().step_seconds(prefill, decode, 1000) == pytest.approx(milliseconds / 1e3, abs=1e-7)


def test_no_decode_is_shorter_than_the_floor() -> None:
    assert TimeModel(decode_floor_ms=20.0).step_seconds(0, 100, 1000) == pytest.approx(0.02)


def test_twice_the_speed_halves_a_step() -> None:
    slow, fast = Drive(engine()), Drive(engine(speed=2.0))
    for drive in (slow, fast):
        drive.run("a", range(12), 3)
    assert [s.duration for s in fast.steps] == pytest.approx([s.duration / 2 for s in slow.steps])


def test_coefficients_are_what_a_step_takes() -> None:
    model = TimeModel(0, 0, 10, 0, 0, 3)
    drive = Drive(engine(time_model=model))
    drive.run("a", range(12), 3)
    assert [s.duration for s in drive.steps] == pytest.approx([0.010, 0.003, 0.003])
